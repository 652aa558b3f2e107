// Mega attention for Hopper (sm_90a): query RoPE, sparse attention over a window and a compressed set of paged
// quantised rows, sink, inverse RoPE, FP8 or bf16 output, in one launch. One CTA works on one token's 64 heads.
//
// Budget of a CTA (checked by tests/hopper/test_budget.py):
//   threads 512 = 2 consumer warpgroups at 192 registers, 2 producer warpgroups at 64
//   spills at most 320 bytes, outside the tile loop but for a handful of words
//   shared memory 231,680 bytes: keys 2 x 64 KB f16, query 64 KB f16, weights 2 x 8 KB f16, raw rows 16 KB, the rest
//   barriers, maxima and slots
//   tile of 64 keys: tensor cores 2048 clocks; shared memory 2.4 k clocks at 128 B (scores 1024, values 576, widened
//   keys 512, raw rows 264); widening 470 clocks of conversion pipe; 32 KB of rows in flight, half of them in registers
//
// Roles
//   producers   warpgroup 2 + h owns dims 256 h .. 256 h + 255 of every tile. A warp owns 16 of the 64 rows: it keeps
//               one tile of them in flight (eight rows in registers, eight in shared memory, where every lane reads
//               back what it copied), widens to f16 and stores into the dim-major, 128-byte swizzled tile.
//   consumers   warpgroup g computes scores and weights of tiles g, g + 2, ... and the values of ALL tiles for its
//               256 output dims: its own tiles with weights in registers, the other's through shared memory.
//               Tile j: scores(j) | values(j-1) in flight | softmax(j) | values(j). Rows are handed back in halves.
// The running maximum moves only when it grew by more than 2^8, so the accumulator is almost never rescaled.
// SPLITS > 1: a cluster shares one token's tiles; partial sums meet in distributed shared memory, in rank order.
//
// Dims are permuted inside each group of 16 (the same for query, keys and output) so that a lane holds 4 consecutive
// dims: logical 4q + 2j + e sits in chunk j, place 2q + e; in odd 64-dim blocks the two chunks are swapped.
//
// Macros: A_KIND, B_KIND (record of the window and of the compressed set), X_ROW_UNITS (16-byte units between rows),
// X_SCALE_STRIDE (bytes between rows of scales), SPLITS, FP8_OUTPUT, OUT_CHUNKED, WITH_MAX.

#include "arguments.cuh"

#define HAS_V4 (A_KIND == KIND_V4 || B_KIND == KIND_V4)

constexpr int KEYS = 0, STAGE = 65536, QUERY = 2 * STAGE, WEIGHTS = QUERY + 65536, BARRIERS = WEIGHTS + 16384;
constexpr int KEYS_FULL = BARRIERS;           // [stage 2][half 2]
constexpr int KEYS_EMPTY = KEYS_FULL + 32;    // [stage 2][half 2][rows 0..31, 32..63]
constexpr int WEIGHTS_FULL = KEYS_EMPTY + 64; // [2]
constexpr int VALID = WEIGHTS_FULL + 16;      // [2] u64, one bit a key
constexpr int GREW = VALID + 16;              // [2][warp 4] u32
constexpr int MAXIMUM = GREW + 32;            // [2][64] f32
constexpr int RESCALE = MAXIMUM + 512;        // [2][64] f32
constexpr int SLOTS = RESCALE + 512;          // [producer warp 8][lane 32] int, slots of a tile to come
constexpr int RAW = (SLOTS + 1024 + 127) & ~127;  // [producer warp 8][row pair 4][lane 32] 16 bytes
constexpr int SHARED_BYTES = RAW + 16384;
// After the last tile of a token the weights' space holds its statistics.
constexpr int FINAL = WEIGHTS;                // [2][64] float2
constexpr int FINAL_CTA = FINAL + 1024;       // [64] float2
constexpr int TRUE_MAX = FINAL_CTA + 512;     // [2][64] f32
static_assert(SHARED_BYTES == 231680, "build.py asks for as many bytes");

#ifndef CONSUMER_REGISTERS
#define CONSUMER_REGISTERS 192
#define PRODUCER_REGISTERS 64
#endif
constexpr float LOG2E = 1.4426950408889634f;
#define INF __int_as_float(0x7f800000)

#include "attend_parts.cuh"

// ---------------------------------------------------------------- instructions of its own
DI void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// ---------------------------------------------------------------- keys in shared memory
DI uint32_t tile_address(uint32_t row, uint32_t group16, uint32_t j) {   // of chunk j of 16 dims, in a 256-dim half
  return (group16 >> 2) * 8192 + row * 128 + (((2 * (group16 & 3) + (j ^ ((group16 >> 2) & 1))) ^ (row & 7)) << 4);
}
// Eight consecutive dims (number `eight` of the half) of one row, f16 pairs w[0..3].
DI void store_eight(uint32_t half_base, uint32_t row, uint32_t eight, const uint32_t (&w)[4]) {
  const uint32_t a = half_base + tile_address(row, eight >> 1, 0) + 8 * (eight & 1);
  store_shared8(a, w[0], w[2]);
  store_shared8(a ^ 16, w[1], w[3]);
}

// ---------------------------------------------------------------- query
// Query rows 16 w .. 16 w + 15, eight dims of one half a lane. `start` copies the bf16 values to where their f16 will
// be (two neighbours share 32 bytes); `finish` rotates, rounds to bf16, widens and stores.
struct QueryRows {
  uint32_t at;                 // shared memory of row 16 w, this lane's 16 raw bytes
  int lane, half, w;
  float4 c, s;                 // rotation of this lane's dims

  DI void start(const Args& p, int item, int position) {
    const int token = p.head_blocks == 1 ? item : item / p.head_blocks, head0 = (item - token * p.head_blocks) * 64 + 16 * w;
    const int64_t lane_bytes = p.query_chunked ? (int64_t)(half * 16 + (lane >> 1)) * 32 * p.heads + (lane & 1) * 16 : half * 512 + lane * 16;
    const int64_t head_bytes = p.query_chunked ? 32 : p.q_head_stride;
    const uint8_t* from = p.q + (int64_t)token * p.q_token_stride + head0 * head_bytes + lane_bytes;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const bool live = head0 + i < p.heads;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((at ^ ((i & 7) << 4)) + i * 128), "l"(live ? from + i * head_bytes : p.q), "r"(live ? 16 : 0) : "memory");
    }
    copy_commit();
    if (p.rotate_query && half == 1 && lane >= 24) {
      const float* table = rope_row(p, position) + 4 * (lane - 24);
      c = __ldg((const float4*)table); s = __ldg((const float4*)(table + 32));
    }
  }
  DI void finish(const Args& p) {
    const bool rotate = p.rotate_query && half == 1 && lane >= 24;
    const uint32_t chunk0 = at ^ ((lane & 1) << 4);   // 8-byte pieces: this lane's half of chunk 0 and of chunk 1
    copy_wait<0>();
#pragma unroll
    for (int i0 = 0; i0 < 16; i0 += 8) {
      uint4 x[8];
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = load_shared16((at ^ (i << 4)) + (i0 + i) * 128);
      __syncwarp();            // the neighbour has read what is overwritten now
#pragma unroll
      for (int i = 0; i < 8; i++) {
        uint32_t v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
        if (rotate) { v[0] = turn(v[0], c.x, s.x); v[1] = turn(v[1], c.y, s.y); v[2] = turn(v[2], c.z, s.z); v[3] = turn(v[3], c.w, s.w); }
        const uint32_t to = (chunk0 ^ (i << 4)) + (i0 + i) * 128 + 8 * (lane & 1);
        store_shared8(to, bf16_to_f16(v[0]), bf16_to_f16(v[2]));
        store_shared8(to ^ 16, bf16_to_f16(v[1]), bf16_to_f16(v[3]));
      }
    }
  }
  DI static uint32_t turn(uint32_t pair, float c, float s) {
    const float a = __uint_as_float(pair << 16), b = __uint_as_float(pair & 0xffff0000u);
    return pack_bf16(a * c - b * s, a * s + b * c);
  }
};

// Accumulator values of block G (0..7 of the half) of row `row` or `row + 8`.
template <int G> DI void pick(float (&v)[8], const float (&acc)[128], int high) {
  constexpr int SWAP = (G >> 1) & 1;
#pragma unroll
  for (int u = 0; u < 2; u++)
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) v[4 * u + 2 * j + e] = high ? acc[(4 * G + 2 * u + (j ^ SWAP)) * 4 + 2 + e] : acc[(4 * G + 2 * u + (j ^ SWAP)) * 4 + e];
}

// ---------------------------------------------------------------- consumers
struct Consumer {
  uint32_t base;               // shared memory
  int g, other, w, lane, row, q;
  float c1, threshold;
  float m0, m1, l0, l1, t0, t1;  // reference maximum, denominator, true maximum of rows `row`, `row + 8`
  uint32_t own_phase, other_phase;
};

DI void rescale(float (&acc)[128], float a0, float a1) {
#pragma unroll
  for (int x = 0; x < 32; x++) { acc[4 * x] *= a0; acc[4 * x + 1] *= a0; acc[4 * x + 2] *= a1; acc[4 * x + 3] *= a1; }
}
// Values of a tile of the other warpgroup; its weights are in shared memory. Leaves two groups in flight.
DI void issue_other_values(Consumer& s, float (&acc)[128]) {
  wait(s.base + WEIGHTS_FULL + 8 * s.other, s.other_phase);
  s.other_phase ^= 1;
  if (load_word(s.base + GREW + s.other * 16 + s.w * 4)) {
    const uint32_t a = s.base + RESCALE + s.other * 256 + s.row * 4;
    rescale(acc, load_float(a), load_float(a + 32));
  }
  const uint64_t weights = dim_major(s.base + WEIGHTS + s.other * 8192), values = across(s.base + KEYS + s.other * STAGE + s.g * 32768);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) {
    values_mma_shared<0>(acc, weights + 2 * k, values + 128 * k, 1);
    values_mma_shared<64>(acc, weights + 2 * k, values + 1024 + 128 * k, 1);
    if (k & 1) mma_commit();
  }
}
// Waits for the values of a tile (two groups, 32 keys each) and hands its rows back as they are done.
DI void release(const Consumer& s, int stage) {
  const uint32_t empty = s.base + KEYS_EMPTY + stage * 32 + s.g * 16;
  mma_wait<1>();
  if (s.lane == 0) arrive(empty);
  mma_wait<0>();
  if (s.lane == 0) arrive(empty + 8);
}
template <bool FIRST> DI void tile(Consumer& s, float (&acc)[128]) {
  float S[32];
  const uint32_t full = s.base + KEYS_FULL + s.g * 16;
  const uint64_t keys = dim_major(s.base + KEYS + s.g * STAGE), query = dim_major(s.base + QUERY);
  wait(full, s.own_phase);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 16; k++) scores_mma(S, query + (k >> 2) * 512 + (k & 3) * 2, keys + (k >> 2) * 512 + (k & 3) * 2, k > 0);
  wait(full + 8, s.own_phase);
#pragma unroll
  for (int k = 16; k < 32; k++) scores_mma(S, query + (k >> 2) * 512 + (k & 3) * 2, keys + (k >> 2) * 512 + (k & 3) * 2, 1);
  mma_commit();
  s.own_phase ^= 1;
  float p0 = -INF, p1 = -INF;  // reference maximum after tile j - 1
  if (FIRST) {
    mma_wait<0>();
  } else {
    issue_other_values(s, acc);
    p0 = load_float(s.base + MAXIMUM + s.other * 256 + s.row * 4); p1 = load_float(s.base + MAXIMUM + s.other * 256 + s.row * 4 + 32);
    mma_wait<2>();
  }
  uint64_t valid = load_mask(s.base + VALID + 8 * s.g);
  if (valid != ~0ull) {
    valid >>= 2 * s.q;
#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (!((valid >> (8 * c + e)) & 1)) { S[4 * c + e] = -INF; S[4 * c + 2 + e] = -INF; }
  }
  float x0 = fmaxf(S[0], S[1]), x1 = fmaxf(S[2], S[3]);
#pragma unroll
  for (int c = 1; c < 8; c++) { x0 = fmaxf(x0, fmaxf(S[4 * c], S[4 * c + 1])); x1 = fmaxf(x1, fmaxf(S[4 * c + 2], S[4 * c + 3])); }
  x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
  x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
  if (WITH_MAX) { s.t0 = fmaxf(s.t0, x0); s.t1 = fmaxf(s.t1, x1); }
  const bool n0 = x0 > p0 + s.threshold, n1 = x1 > p1 + s.threshold;
  const bool grew = __any_sync(~0u, n0 || n1);
  const float a0 = n0 ? exp2_fast((p0 - x0) * s.c1) : 1.f, a1 = n1 ? exp2_fast((p1 - x1) * s.c1) : 1.f;
  p0 = n0 ? x0 : p0; p1 = n1 ? x1 : p1;
  s.l0 *= s.m0 == p0 ? 1.f : exp2_fast((s.m0 - p0) * s.c1); s.l1 *= s.m1 == p1 ? 1.f : exp2_fast((s.m1 - p1) * s.c1);
  s.m0 = p0; s.m1 = p1;
  const float b0 = p0 == -INF ? 0.f : -p0 * s.c1, b1 = p1 == -INF ? 0.f : -p1 * s.c1;
  uint32_t P[4][4];
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float e0 = exp2_fast(fmaf(S[4 * c], s.c1, b0)), e1 = exp2_fast(fmaf(S[4 * c + 1], s.c1, b0));
    const float f0 = exp2_fast(fmaf(S[4 * c + 2], s.c1, b1)), f1 = exp2_fast(fmaf(S[4 * c + 3], s.c1, b1));
    s.l0 += e0 + e1; s.l1 += f0 + f1;
    P[c >> 1][2 * (c & 1)] = pack_f16(e0, e1); P[c >> 1][2 * (c & 1) + 1] = pack_f16(f0, f1);
  }
  const int r = 16 * s.w + ((s.lane >> 3) & 1) * 8 + (s.lane & 7);
  const uint32_t to = s.base + WEIGHTS + s.g * 8192 + r * 128 + (((s.lane >> 4) ^ (s.lane & 7)) << 4);
#pragma unroll
  for (int k = 0; k < 4; k++) store_matrices(to ^ (k * 32), P[k][0], P[k][1], P[k][2], P[k][3]);
  if (s.q == 0) {
    const uint32_t a = s.base + s.g * 256 + s.row * 4;
    store_float(a + MAXIMUM, p0); store_float(a + MAXIMUM + 32, p1);
    store_float(a + RESCALE, a0); store_float(a + RESCALE + 32, a1);
  }
  if (s.lane == 0) store_shared4(s.base + GREW + s.g * 16 + s.w * 4, grew);
  fence_tensor();
  __syncwarp();
  if (s.lane == 0) arrive(s.base + WEIGHTS_FULL + 8 * s.g);
  if (!FIRST) {
    release(s, s.other);
    if (grew) rescale(acc, a0, a1);
  }
  const uint64_t values = across(s.base + KEYS + s.g * STAGE + s.g * 32768);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) {
    values_mma<0>(acc, P[k], values + 128 * k, 1);
    values_mma<64>(acc, P[k], values + 1024 + 128 * k, 1);
    if (k & 1) mma_commit();
  }
  release(s, s.g);
}

DI void write_statistics(const Args& p, int token, int head, float m, float l, float true_max) {
  if (head >= p.heads) return;
  const int64_t at = (int64_t)token * p.heads + head;
  if (p.lse) p.lse[at] = l > 0.f ? m * p.scale + logf(l) : INF;
  if (WITH_MAX && p.max_logits) p.max_logits[at] = true_max * p.scale;
}
// Denominator with the sink, relative to 2^(m c1).
DI float denominator(const Args& p, int head, float m, float l, float c1) {
  const float sink = p.sink && head < p.heads ? __ldg(p.sink + head) : -INF;
  return l + exp2_fast(sink * LOG2E - m * c1);
}

// Blocks G .. 7 of this warpgroup's half, of one row.
template <int G> DI void store_blocks(const Consumer& s, const float (&acc)[128], const OutputRow& r, int high, float w, const float* table, uint32_t (&words)[2]) {
  float v[8];
  pick<G>(v, acc, high);
  if (G >= 6 && s.g == 1 && table) unrotate(v, table, G - 6, s.q);
  const uint32_t byte = store_block(r, v, w, s.g * 8 + G, s.q);
  if (FP8_OUTPUT) {
    if (OUT_CHUNKED) { if (r.live && s.q == (G & 3)) store_scale(r, s.g * 8 + G, byte); }
    else words[G >> 2] |= byte << (8 * (G & 3));
  }
  if constexpr (G < 7) store_blocks<G + 1>(s, acc, r, high, w, table, words);
}
DI void store_row(const Consumer& s, const float (&acc)[128], const OutputRow& r, int high, float w, const float* table) {
  uint32_t words[2] = {0, 0};
  store_blocks<0>(s, acc, r, high, w, table, words);
  if (FP8_OUTPUT && !OUT_CHUNKED && r.live && s.q < 2)   
    *(uint32_t*)(r.scales + (r.member * 4 + s.g * 2 + s.q) * r.word_stride) = s.q ? words[1] : words[0];
}
#if SPLITS > 1
template <int G> DI void send_blocks(const Consumer& s, const float (&acc)[128], int rank, float w0, float w1) {
  constexpr int BLOCKS = 16 / SPLITS;
  const int block = s.g * 8 + G;
  const uint32_t to = remote(s.base + KEYS + (rank * BLOCKS + block % BLOCKS) * 8192 + (s.w * 32 + s.lane) * 16, block / BLOCKS);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float v[8];
    pick<G>(v, acc, h);
    const float weight = h ? w1 : w0;
#pragma unroll
    for (int x = 0; x < 2; x++)
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to + h * 4096 + x * 2048), "f"(v[4 * x] * weight), "f"(v[4 * x + 1] * weight), "f"(v[4 * x + 2] * weight), "f"(v[4 * x + 3] * weight) : "memory");
  }
  if constexpr (G < 7) send_blocks<G + 1>(s, acc, rank, w0, w1);
}
#endif

DI void consume(const Args& p, uint32_t base, int g, int w, int lane, int rank, int item0, int item_step) {
  Consumer s;
  s.base = base; s.g = g; s.other = 1 - g; s.w = w; s.lane = lane; s.row = 16 * w + (lane >> 2); s.q = lane & 3;
  s.c1 = p.scale * LOG2E; s.threshold = 8.0f / s.c1;
  s.own_phase = 0; s.other_phase = 0;
  float acc[128];
  const int items = p.tokens * p.head_blocks;
  QueryRows query;
  query.lane = lane; query.half = g; query.w = w;
  query.at = base + QUERY + g * 32768 + 16 * w * 128 + (tile_address(0, lane >> 1, lane & 1));
  query.c = query.s = make_float4(0, 0, 0, 0);
  Ahead ahead = look_ahead(p, item0);
  if (item0 < items) query.start(p, item0, ahead.position);
  for (int item = item0; item < items; item += item_step) {
    const int token = p.head_blocks == 1 ? item : item / p.head_blocks, head0 = (item - token * p.head_blocks) * 64;
    const Span span = span_of(p, ahead.window_keys, ahead.compressed_keys, rank);
    const int tiles = span.last - span.first, position = ahead.position;
    query.finish(p);
    ahead = look_ahead(p, item + item_step);
    fence_tensor();
    consumers_sync();
    s.m0 = s.m1 = s.t0 = s.t1 = -INF; s.l0 = s.l1 = 0.f;
#pragma unroll
    for (int x = 0; x < 128; x++) acc[x] = 0.f;
    int j = g;
    if (g == 0 && tiles > 0) { tile<true>(s, acc); j = 2; }
    for (; j < tiles; j += 2) tile<false>(s, acc);
    if (tiles > 0 && ((tiles - 1) & 1) != g) {
      issue_other_values(s, acc);
      release(s, s.other);
    }
    consumers_sync();   // the weights are read, their space is free
    s.l0 += __shfl_xor_sync(~0u, s.l0, 1); s.l1 += __shfl_xor_sync(~0u, s.l1, 1);
    s.l0 += __shfl_xor_sync(~0u, s.l0, 2); s.l1 += __shfl_xor_sync(~0u, s.l1, 2);
    if (s.q == 0) {
      const uint32_t a = base + FINAL + g * 512 + s.row * 8;
      store_float2(a, s.m0, s.l0); store_float2(a + 64, s.m1, s.l1);
      if (WITH_MAX) { store_float(base + TRUE_MAX + g * 256 + s.row * 4, s.t0); store_float(base + TRUE_MAX + g * 256 + s.row * 4 + 32, s.t1); }
    }
    consumers_sync();
    float M[2], L[2], T[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float2 x = load_float2(base + FINAL + s.row * 8 + 64 * h), y = load_float2(base + FINAL + 512 + s.row * 8 + 64 * h);
      M[h] = fmaxf(x.x, y.x);
      L[h] = M[h] == -INF ? 0.f : x.y * exp2_fast((x.x - M[h]) * s.c1) + y.y * exp2_fast((y.x - M[h]) * s.c1);
      T[h] = WITH_MAX ? fmaxf(load_float(base + TRUE_MAX + s.row * 4 + 32 * h), load_float(base + TRUE_MAX + 256 + s.row * 4 + 32 * h)) : 0.f;
    }
    const int head = head0 + s.row;
    const float* table = p.unrotate_output ? rope_row(p, position) : nullptr;
    if (item + item_step < items) query.start(p, item + item_step, ahead.position);
#if SPLITS == 1
    if (g == 0 && s.q == 0) { write_statistics(p, token, head, M[0], L[0], T[0]); write_statistics(p, token, head + 8, M[1], L[1], T[1]); }
    const float w0 = M[0] == -INF ? 0.f : 1.f / denominator(p, head, M[0], L[0], s.c1), w1 = M[1] == -INF ? 0.f : 1.f / denominator(p, head + 8, M[1], L[1], s.c1);
    store_row(s, acc, output_row(p, token, head), 0, w0, table);
    store_row(s, acc, output_row(p, token, head + 8), 1, w1, table);
#else
    if (g == 0 && s.q == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        store_float2(base + FINAL_CTA + s.row * 8 + 64 * h, M[h], L[h]);
        if (WITH_MAX) store_float(base + TRUE_MAX + s.row * 4 + 32 * h, T[h]);
      }
    }
    cluster_arrive(); cluster_wait();
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = -INF, sum = 0.f, mine = 0.f, true_max = -INF;
#pragma unroll
      for (int r = 0; r < SPLITS; r++) {
        top = fmaxf(top, load_remote(base + FINAL_CTA + s.row * 8 + 64 * h, r));
        if (WITH_MAX) true_max = fmaxf(true_max, load_remote(base + TRUE_MAX + s.row * 4 + 32 * h, r));
      }
#pragma unroll
      for (int r = 0; r < SPLITS; r++) {
        const uint32_t from = base + FINAL_CTA + s.row * 8 + 64 * h;
        const float e = top == -INF ? 0.f : exp2_fast((load_remote(from, r) - top) * s.c1);
        sum += load_remote(from + 4, r) * e;
        mine = r == rank ? e : mine;
      }
      if (rank == 0 && g == 0 && s.q == 0) write_statistics(p, token, head + 8 * h, top, sum, true_max);
      weight[h] = top == -INF ? 0.f : mine / denominator(p, head + 8 * h, top, sum, s.c1);
    }
    send_blocks<0>(s, acc, rank, weight[0], weight[1]);
    cluster_arrive(); cluster_wait();
    const OutputRow out = output_row(p, token, head + 8 * g);   // warpgroup g finishes rows `row + 8 g`
#pragma unroll
    for (int b = 0; b < 16 / SPLITS; b++) {
      const int block = rank * (16 / SPLITS) + b;
      float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
      for (int r = 0; r < SPLITS; r++)
#pragma unroll
        for (int x = 0; x < 2; x++) {
          const uint4 y = load_shared16(base + KEYS + (r * (16 / SPLITS) + b) * 8192 + g * 4096 + x * 2048 + (w * 32 + lane) * 16);
          v[4 * x] += __uint_as_float(y.x); v[4 * x + 1] += __uint_as_float(y.y); v[4 * x + 2] += __uint_as_float(y.z); v[4 * x + 3] += __uint_as_float(y.w);
        }
      if (block >= 14 && table) unrotate(v, table, block - 14, s.q);
      const uint32_t byte = store_block(out, v, 1.f, block, s.q);
      if (FP8_OUTPUT && out.live && s.q == (b & 3)) store_scale(out, block, byte);
    }
#endif
  }
}

// ---------------------------------------------------------------- producers
// Row lane & 15 of the warp's 16 rows (8 w .. 8 w + 7 and 32 + 8 w .. of the tile): its offset in 16-byte units, its scales' in 8-byte units.
struct Tile { uint32_t offset, scale_offset, valid; bool compressed, exists; };

struct Producer {
  const Args& p;
  uint32_t base, slots, raw;   // shared memory: this lane's slot, this lane's raw bytes
  int half, w, lane, rank;
  int item, items, item_step, j;
  Span span;
  int fetched_rows; bool fetched_compressed, fetched;   // the tile whose slots are under way
  uint4 d[4];                  // row pairs 0..3 of the tile in flight; pairs 4..7 are in `raw`
#if HAS_V4
  uint4 tail[2];
#endif
  uint32_t scale0, scale1, next0, next1;

  DI int token() const { return p.head_blocks == 1 ? item : item / p.head_blocks; }
  DI void start_item() {
    const int t = token();
    span = span_of(p, p.a.lengths ? __ldg(p.a.lengths + t) : p.a.width, p.b.lengths ? __ldg(p.b.lengths + t) : p.b.width, rank);
    j = span.first;
  }
  // Ask for the slots of the next tile of this CTA.
  DI void fetch() {
    while (item < items && j >= span.last) { item += item_step; if (item < items) start_item(); }
    fetched = item < items;
    if (fetched) {
      fetched_compressed = j >= span.window_tiles;
      const KeyArgs& k = fetched_compressed ? p.b : p.a;
      const int first = (fetched_compressed ? j - span.window_tiles : j) * 64;
      const int row = 8 * w + (lane & 7) + 4 * (lane & 8);
      fetched_rows = (fetched_compressed ? span.compressed_keys : span.window_keys) - first - row;
      if (fetched_rows > 0) copy_async<4>(slots, k.indices + (int64_t)token() * k.indices_stride + first + row);
      j++;
    }
    copy_commit();
  }
  // Turn the fetched slots into row offsets.
  DI Tile resolve() {
    Tile t;
    t.exists = fetched; t.compressed = fetched_compressed; t.offset = 0; t.scale_offset = 0; t.valid = 0;
    if (!t.exists) return t;
    const KeyArgs& k = t.compressed ? p.b : p.a;
    uint32_t slot = load_word(slots);
    const bool ok = fetched_rows > 0 && slot < k.num_slots;
    t.valid = __ballot_sync(~0u, ok) & 0xffff;
    slot = ok ? slot : 0;
    const uint32_t page = page_of(k, slot), row = slot - page * k.page_rows;
    t.offset = page * (uint32_t)(k.page_stride >> 4) + row * (t.compressed ? B_ROW_UNITS : A_ROW_UNITS);
    t.scale_offset = page * (uint32_t)(k.page_stride >> 3) + (uint32_t)(k.scale_base >> 3) + row * ((t.compressed ? B_SCALE_STRIDE : A_SCALE_STRIDE) / 8);
    return t;
  }
  DI int tile_row(int row) const { return 8 * w + (row & 7) + 4 * (row & 8); }
  template <int KIND> DI void load_first(const Tile& t) {
    const KeyArgs& k = t.compressed ? p.b : p.a;
    const int l = lane & 15, hi = lane >> 4;
    const uint8_t* scales = k.pages + (uint64_t)t.scale_offset * 8;
    if (KIND == KIND_MXFP8) next0 = load4(scales + 8 * half + 4 * hi);
    else if (KIND == KIND_V4) next0 = load4(scales + 4 * half);
    else { const uint2 s = load8(scales + 16 * half + 8 * hi); next0 = s.x; next1 = s.y; }
    const uint8_t* from = k.pages + (KIND == KIND_NVFP4 ? half * 128 + l * 8 : half * 256 + l * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t* row = from + (uint64_t)__shfl_sync(~0u, t.offset, 2 * i + hi) * 16;
      if (KIND == KIND_NVFP4) { const uint2 x = load8(row); d[i].x = x.x; d[i].y = x.y; }
      else d[i] = load16(row);
    }
#if HAS_V4
    if (KIND == KIND_V4 && half == 1) {   // bf16 dims 480..511 of rows 8 x .. 8 x + 7
#pragma unroll
      for (int x = 0; x < 2; x++)
        tail[x] = load16(k.pages + (uint64_t)__shfl_sync(~0u, t.offset, 8 * x + (lane >> 2)) * 16 + 512 + (lane & 3) * 16);
    }
#endif
  }
  template <int KIND> DI void load_second(const Tile& t) {
    const KeyArgs& k = t.compressed ? p.b : p.a;
    const int l = lane & 15, hi = lane >> 4;
    const uint8_t* from = k.pages + (KIND == KIND_NVFP4 ? half * 128 + l * 8 : half * 256 + l * 16);
#pragma unroll
    for (int i = 0; i < 4; i++)
      copy_async<KIND == KIND_NVFP4 ? 8 : 16>(raw + i * 512, from + (uint64_t)__shfl_sync(~0u, t.offset, 8 + 2 * i + hi) * 16);
  }
  // Row pair k (rows 2 k and 2 k + 1): `x` is what this lane loaded.
  template <int KIND> DI void widen_pair(uint32_t half_base, uint32_t stage_to, uint32_t valid, int k, uint4 x) {
    const int l = lane & 15, hi = lane >> 4, row = 2 * k + hi;
    const uint32_t to = (stage_to ^ ((2 * k & 6) << 4)) + (k & 3) * 256 + (k >> 2) * 4096;
    if (valid != 0xffff && !((valid >> row) & 1)) x = make_uint4(0, 0, 0, 0);
    if (KIND == KIND_NVFP4) {
      const uint32_t s0 = __shfl_sync(~0u, scale0, row + 16 * (l >> 3)), s1 = __shfl_sync(~0u, scale1, row + 16 * (l >> 3));
      const uint32_t byte = __byte_perm((l & 4) ? s1 : s0, 0, 0x4440 | (l & 3));
      const uint32_t sc = e4m3_pair<0>(byte | (byte << 8));
      const uint32_t t0 = e2m1_high_bytes(x.x), t1 = e2m1_high_bytes(x.x >> 16), t2 = e2m1_high_bytes(x.y), t3 = e2m1_high_bytes(x.y >> 16);
      store_shared16(to, times(__byte_perm(t0, 0, 0x1404), sc), times(__byte_perm(t1, 0, 0x1404), sc), times(__byte_perm(t2, 0, 0x1404), sc), times(__byte_perm(t3, 0, 0x1404), sc));
      store_shared16(to ^ 16, times(__byte_perm(t0, 0, 0x3424), sc), times(__byte_perm(t1, 0, 0x3424), sc), times(__byte_perm(t2, 0, 0x3424), sc), times(__byte_perm(t3, 0, 0x3424), sc));
      return;
    }
    const uint32_t word = __shfl_sync(~0u, scale0, KIND == KIND_V4 ? row : row + 16 * (l >> 3));
    const uint32_t sc = ue8m0_pair(__byte_perm(word, 0, 0x4440 | (KIND == KIND_V4 ? l >> 2 : (l >> 1) & 3)));
    if (KIND == KIND_V4 && half == 1 && l >= 12) {   // bf16 dims 448..479
      const uint32_t v[4] = {bf16_to_f16(x.x), bf16_to_f16(x.y), bf16_to_f16(x.z), bf16_to_f16(x.w)};
      store_eight(half_base, tile_row(row), 24 + l - 12, v);
    } else {
      store_shared16(to, times(e4m3_pair<0>(x.x), sc), times(e4m3_pair<0>(x.y), sc), times(e4m3_pair<0>(x.z), sc), times(e4m3_pair<0>(x.w), sc));
      store_shared16(to ^ 16, times(e4m3_pair<1>(x.x), sc), times(e4m3_pair<1>(x.y), sc), times(e4m3_pair<1>(x.z), sc), times(e4m3_pair<1>(x.w), sc));
    }
  }
  template <int KIND> DI void widen_first(uint32_t half_base, uint32_t stage_to, uint32_t valid) {
#pragma unroll
    for (int i = 0; i < 4; i++) widen_pair<KIND>(half_base, stage_to, valid, i, d[i]);
#if HAS_V4
    if (KIND == KIND_V4 && half == 1) {
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const int row = 8 * x + (lane >> 2);
        const bool ok = (valid >> row) & 1;
        const uint32_t v[4] = {ok ? bf16_to_f16(tail[x].x) : 0, ok ? bf16_to_f16(tail[x].y) : 0, ok ? bf16_to_f16(tail[x].z) : 0, ok ? bf16_to_f16(tail[x].w) : 0};
        store_eight(half_base, tile_row(row), 28 + (lane & 3), v);
      }
    }
#endif
  }
  template <int KIND> DI void widen_second(uint32_t half_base, uint32_t stage_to, uint32_t valid) {
#pragma unroll
    for (int i = 0; i < 4; i++) widen_pair<KIND>(half_base, stage_to, valid, 4 + i, load_shared16(raw + i * 512));
  }
  DI void run() {
    const int l = lane & 15, hi = lane >> 4;
    const uint32_t to = base + KEYS + half * 32768 + (l >> 2) * 8192 + (8 * w + hi) * 128 + (((2 * (l & 3) + ((l >> 2) & 1)) ^ hi) << 4);
    slots = base + SLOTS + (half * 4 + w) * 128 + lane * 4;
    raw = base + RAW + (half * 4 + w) * 2048 + lane * 16;
    items = p.tokens * p.head_blocks;
    span.last = 0; span.first = 0; j = 0;
    if (item < items) start_item();
    next0 = next1 = 0;
    uint32_t phase = 0;        // bit `stage`
    int stage = 0;
    fetch();
    copy_wait<0>();
    Tile now = resolve();
    int now_item = item;
    if (now.exists) { load_first_of(now); load_second_of(now); }
    copy_commit();
    fetch();
    copy_wait<0>();
    Tile next = resolve();
    int next_item = item;
    fetch();
    while (now.exists) {
      const uint32_t half_base = base + KEYS + stage * STAGE + half * 32768, stage_to = to + stage * STAGE;
      const uint32_t empty = base + KEYS_EMPTY + stage * 32 + half * 16, parity = ((phase >> stage) & 1) ^ 1;
      wait(empty, parity);
      if (HAS_V4) wait(empty + 8, parity);   // its bf16 tail is stored for all rows at once
      asm volatile("mov.b32 %0, %1;" : "=r"(scale0) : "r"(next0));
      asm volatile("mov.b32 %0, %1;" : "=r"(scale1) : "r"(next1));
      if (now.valid != 0xffff && !((now.valid >> l) & 1)) { scale0 = 0; scale1 = 0; }
      if (A_KIND == B_KIND || !now.compressed) widen_first<A_KIND>(half_base, stage_to, now.valid);
      else widen_first<B_KIND>(half_base, stage_to, now.valid);
      if (next.exists) load_first_of(next);
      copy_wait<1>();          // all but the newest group: slots of a tile to come
      wait(empty + 8, parity);
      if (A_KIND == B_KIND || !now.compressed) widen_second<A_KIND>(half_base, stage_to, now.valid);
      else widen_second<B_KIND>(half_base, stage_to, now.valid);
      if (half == 0 && lane == 0) { store_shared1(base + VALID + stage * 8 + w, now.valid); store_shared1(base + VALID + stage * 8 + 4 + w, now.valid >> 8); }
      fence_tensor();
      __syncwarp();
      if (lane == 0) arrive(base + KEYS_FULL + stage * 16 + half * 8);
      if (next.exists) load_second_of(next);
      copy_commit();
      now = next;
      phase ^= 1u << stage;
      stage = next_item == now_item ? stage ^ 1 : 0;   // every token begins at stage 0
      now_item = next_item;
      copy_wait<1>();          // the slots are there, the rows may be under way
      next = resolve();
      next_item = item;
      fetch();
    }
  }
  DI void load_first_of(const Tile& t) { if (A_KIND == B_KIND || !t.compressed) load_first<A_KIND>(t); else load_first<B_KIND>(t); }
  DI void load_second_of(const Tile& t) { if (A_KIND == B_KIND || !t.compressed) load_second<A_KIND>(t); else load_second<B_KIND>(t); }
};

extern "C" __global__ void __launch_bounds__(512, 1) attend(const __grid_constant__ Args p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), group = warp >> 2, w = warp & 3, lane = tid & 31;
  const int rank = SPLITS == 1 ? 0 : blockIdx.x % SPLITS, item0 = blockIdx.x / SPLITS, item_step = gridDim.x / SPLITS;
  if (tid == 0) {
    for (int i = 0; i < 4; i++) barrier_init(base + KEYS_FULL + 8 * i, 4);
    for (int i = 0; i < 8; i++) barrier_init(base + KEYS_EMPTY + 8 * i, 4);
    for (int i = 0; i < 2; i++) barrier_init(base + WEIGHTS_FULL + 8 * i, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (group < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(p, base, group, w, lane, rank, item0, item_step);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    Producer producer{p};
    producer.base = base; producer.half = group - 2; producer.w = w; producer.lane = lane; producer.rank = rank;
    producer.item = item0; producer.item_step = item_step;
    producer.run();
    if (SPLITS > 1) { cluster_arrive(); cluster_wait(); cluster_arrive(); cluster_wait(); }
  }
}
