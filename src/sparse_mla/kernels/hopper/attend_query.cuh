// The query of 64 heads of a token: from device memory to the order in which the scores read it.
#pragma once

// Warp w of a group brings heads 16 w .. 16 w + 15: a lane 8 dims, piece lane & 7 of every block of 64, of heads
// 4 n + (lane >> 3). bf16 values are rotated, rounded to bf16, widened and stored in the order of attend.cu, within the 128
// bytes that a head has of a block.
struct QueryRows {
  const uint8_t* from;         // this lane's dims of block 0, n = 0
  int64_t head_step, block_step;   // bytes between n and n + 1, between blocks
  int live;                    // n below this exist
  uint32_t row;                // shared memory of head lane >> 3, block 0
  int lane;

  DI QueryRows(const Args& p, uint32_t query, int w, int lane, int item) : lane(lane) {
    const int token = token_of(p, item), head = (item - token * p.head_blocks) * 64 + 16 * w + (lane >> 3);
    live = (p.heads - head + 3) >> 2;
    row = query + w * 2048 + (lane >> 3) * 128;
    head_step = p.query_chunked ? 128 : 4 * p.q_head_stride;
    block_step = p.query_chunked ? 128 * p.heads : 128;
    from = p.q + (int64_t)token * p.q_token_stride + (p.query_chunked ? (((lane >> 1) & 3) * p.heads + head) * 32 + (lane & 1) * 16 : head * p.q_head_stride + (lane & 7) * 16);
  }
  // Starts copies of the bf16 values to the head's 128 bytes, zeros for heads that do not exist: blocks 0 to blocks - 1.
  DI void copy(const Args& p, int blocks) const {
    const uint8_t* q = from;
#pragma unroll 1
    for (int b = 0; b < blocks; b++, q += block_step)
#pragma unroll
      for (int n = 0; n < 4; n++) copy_async<16>(raw_at(n, b), n < live ? q + n * head_step : p.q, n < live ? 16 : 0);
    copy_commit();
  }
  DI uint32_t raw_at(int n, int b) const { return row + n * 512 + b * 8192 + (((lane & 7) ^ (4 * (n & 1) + (lane >> 3))) << 4); }
  // Blocks 4 to 7 to registers.
  DI void load(uint4 (&x)[16]) const {
    const uint8_t* q = from + 4 * block_step;
#pragma unroll
    for (int n = 0; n < 4; n++, q += head_step)
#pragma unroll
      for (int b = 0; b < 4; b++) x[4 * n + b] = n < live ? load_once(q + b * block_step) : make_uint4(0, 0, 0, 0);
  }
  // Rotates 8 dims of the last block. `table`: cosines of the token's pairs, sines 32 further.
  DI void turn_dims(uint4& x, const float* table) const {
    const float4* at = (const float4*)(table + 4 * (lane & 7));
    const float4 c = __ldg(at), s = __ldg(at + 8);
    x = make_uint4(turn(x.x, c.x, s.x), turn(x.y, c.y, s.y), turn(x.z, c.z, s.z), turn(x.w, c.w, s.w));
  }
  DI void store(uint4 x, int n, int b) const {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w}, to = row + n * 512 + b * 8192 + ((lane & 1) ^ (n & 1)) * 64 + 4 * ((lane >> 1) & 3);
#pragma unroll
    for (int j = 0; j < 4; j++) store_shared4(to + ((j ^ (lane >> 3)) << 4), numbers_of_bf16(words[j]));
  }
  // What `load` has.
  DI void store_loaded(uint4 (&x)[16], const float* table) const {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (table) turn_dims(x[4 * n + 3], table);
#pragma unroll
      for (int b = 0; b < 4; b++) store(x[4 * n + b], n, 4 + b);
    }
  }
  // Where the angles of the item's token are, null without rotation; its position is noted for the output.
  DI const float* angles(const Args& p, uint32_t base, uint32_t number, int item) const {
    const int position = ask_position(p, token_of(p, item)).value(p);
    if (one_lane()) store_shared4(base + POSITION + 4 * number, position);
    if (lane < 2 && (p.rotate_query || p.unrotate_output)) prefetch_l1(rope_row(p, position) + 32 * lane);
    return p.rotate_query ? rope_row(p, position) : nullptr;
  }
  // Stores what this warp's copies have brought; then the query is there, as far as this warp is concerned.
  DI void publish(uint32_t base, int blocks, const float* table) const {
    copy_wait<0>();
    __syncwarp();
#pragma unroll 1
    for (int b = 0; b < blocks; b++) {
      uint4 x[4];
#pragma unroll
      for (int n = 0; n < 4; n++) x[n] = load_shared16(raw_at(n, b));
      if (b == 7 && table) {
#pragma unroll
        for (int n = 0; n < 4; n++) turn_dims(x[n], table);
      }
      __syncwarp();            // the lanes of the rows have read what is overwritten now
#pragma unroll
      for (int n = 0; n < 4; n++) store(x[n], n, b);
    }
    fence_async();
    __syncwarp();
    arrive_once(base + QUERY_FULL);
  }
};
