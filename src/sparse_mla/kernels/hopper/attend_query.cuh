// The query of a token's block of heads, in shared memory: from bf16 as the TMA copied it to the order in which the scores
// read it.
#pragma once

// Warp w of a group turns a quarter of the heads: a lane 8 dims, piece lane & 7 of a block of 64, of its heads
// 4 n + (lane >> 3). bf16 values are rotated, rounded to bf16, widened and stored in the order of attend.cu, within the 128
// bytes that a head has of a block.
struct QueryRows {
  uint32_t base, angles, row;  // shared memory; of the token's angles; of head lane >> 3, block 0
  int w, lane;

  static constexpr int ROUNDS = HEADS / 16;    // of four heads
  DI QueryRows(uint32_t base, uint32_t query, uint32_t angles, int w, int lane) : base(base), angles(angles), row(query + w * ROUNDS * 512 + (lane >> 3) * 128), w(w), lane(lane) {}
  DI uint32_t raw_at(int n, int b) const { return row + n * 512 + b * BLOCK + ((lane & 7) << 4); }
  // Rotates 8 dims of the last block.
  DI void turn_dims(uint4& x) const {
    const uint4 c = load_shared16(angles + 16 * (lane & 7)), s = load_shared16(angles + 128 + 16 * (lane & 7));
    x = make_uint4(turn(x.x, __uint_as_float(c.x), __uint_as_float(s.x)), turn(x.y, __uint_as_float(c.y), __uint_as_float(s.y)),
                   turn(x.z, __uint_as_float(c.z), __uint_as_float(s.z)), turn(x.w, __uint_as_float(c.w), __uint_as_float(s.w)));
  }
  DI void store(uint4 x, int n, int b) const {
    uint32_t words[4] = {x.x, x.y, x.z, x.w};
    if (HAS_NVFP4) {
      words[0] = __byte_perm(x.x, x.y, 0x5410); words[2] = __byte_perm(x.x, x.y, 0x7632);
      words[1] = __byte_perm(x.z, x.w, 0x5410); words[3] = __byte_perm(x.z, x.w, 0x7632);
    }
    const uint32_t four = ROUNDS == 1 ? w : n;   // of the heads, its parity
    const uint32_t to = row + n * 512 + b * BLOCK + ((lane & 1) ^ (four & 1)) * 64 + 4 * ((lane >> 1) & 3);
#pragma unroll
    for (int j = 0; j < 4; j++) store_shared4(to + ((j ^ (lane >> 3)) << 4), numbers_of_bf16(words[j]));
  }
  // Blocks 4 half .. 4 half + 3 have come. Then this half of the query is there, as far as this warp is concerned.
  DI void widen(int half, uint32_t number, bool rotate) const {
#pragma unroll 1
    for (int b = 4 * half; b < 4 * half + 4; b++) {
      uint4 x[ROUNDS];
#pragma unroll
      for (int n = 0; n < ROUNDS; n++) x[n] = load_shared16(raw_at(n, b));
      if (b == 7 && rotate) {
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) turn_dims(x[n]);
      }
      __syncwarp();            // the lanes of the rows have read what is overwritten now
#pragma unroll
      for (int n = 0; n < ROUNDS; n++) store(x[n], n, b);
    }
    fence_async();
    __syncwarp();
    arrive_once(base + QUERY_FULL + 8 * (number & 1));
  }
};
