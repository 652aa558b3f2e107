// STUDY, never run on a GPU: what it is to show is in docs/performance.md ("Hopper", keys in registers). It is right in the
// emulator of tests/hopper. The version before it, which loads rows by its score warps, was measured and is in the history. Check and time it with
//   python benchmarks/hopper_sources.py landed study=benchmarks/studies/keys_in_registers.cu
//
// Mega attention for Hopper (sm_90a): query RoPE, sparse attention over a window and a compressed set of paged
// quantised rows, sink, inverse RoPE, FP8 or bf16 output, in one launch. One CTA works on one token's 64 heads.
//
// Budget of a CTA:
//   threads 512 = 2 warpgroups of values at 160 registers, 1 of scores at 168, 1 of producers at 24
//   spills at most 200 bytes, of what is kept from tile to tile
//   shared memory 221,952 bytes: keys 3 x 32 KB f16, query 64 KB f16, weights 2 x 8 KB f16, 64 raw rows of 592 bytes, the
//   rest barriers and maxima
//   tile of 64 keys: tensor cores 2048 clocks; shared memory 2.4 k clocks at 128 B (scores 512, widened keys 512,
//   values 768, weights 64, raw rows 520); widening 470 clocks of conversion pipe; 32 KB of rows in flight
//
// Roles
//   producers  warp w copies rows 16 w .. 16 w + 15 of every tile, whole, one bulk copy each.
//   scores     warp w reads those rows into registers at once, so that the next ones can come: a lane holds 16 dims of two
//              rows per 64-dim block. It widens them, gives them to the tensor cores as the left operand of
//              (keys x heads) scores, and stores the same registers into the tile that the values are read from.
//   values     warpgroup g adds up the values of all tiles for its 256 output dims, and writes them. Its half of a tile
//              is a unit of 32 KB; three units let the next tile begin while this one is summed up.
// The running maximum moves only when a head grew by more than 2^8, so the accumulator is almost never rescaled.
// The next token's query and scores overlap the output of this one.
// SPLITS > 1: a cluster shares one token's tiles; partial sums meet in distributed shared memory, in rank order.
//
// Dims are permuted inside each group of 16 (16 t + 4 i + 2 h + e, t = lane & 3): for the scores step i of a block has it
// in place 8 h + 2 t + e (query and keys alike); in the tile of values it sits in chunk h, place 2 i + e, so that a
// lane of the output holds 4 consecutive dims.
//
// Macros: A_KIND, B_KIND (record of the window and of the compressed set), X_ROW_UNITS (16-byte units between rows),
// X_SCALE_STRIDE (bytes between rows of scales), SPLITS, FP8_OUTPUT, OUT_CHUNKED, WITH_MAX.

#include "arguments.cuh"

#define HAS_V4 (A_KIND == KIND_V4 || B_KIND == KIND_V4)

constexpr int KEYS = 0, UNIT = 32768, QUERY = 3 * UNIT, WEIGHTS = QUERY + 65536, FULL = WEIGHTS + 16384;
constexpr int WEIGHTS_EMPTY = FULL + 16;      // FULL, WEIGHTS_EMPTY: [stage 2]
constexpr int UNIT_EMPTY = WEIGHTS_EMPTY + 16;  // [unit 3], padded
constexpr int RAW_FULL = UNIT_EMPTY + 32, RAW_EMPTY = RAW_FULL + 32;  // [warp 4]
constexpr int GREW = RAW_EMPTY + 32;          // [stage 2] u32
constexpr int VALID = GREW + 16;              // [warp 4] u32
constexpr int RESCALE = VALID + 16;           // [stage 2][64] f32
constexpr int REFERENCE = RESCALE + 512;      // [token parity 2][64] f32, what weights refer to, log2 units
constexpr int TRUE_MAX = REFERENCE + 512;     // [token parity 2][64] f32, log2 units
constexpr int SUMS = TRUE_MAX + 512;          // [token parity 2][warp 4][64] f32, of the weights
constexpr int RAW = (SUMS + 2048 + 127) & ~127, RAW_WARP = 16 * 592;   // [warp 4][row 16]
constexpr int SHARED_BYTES = RAW + 4 * RAW_WARP;
constexpr int FINAL_CTA = RAW;                // [64] float2, after the last tile of a split token
constexpr int FINAL_MAX = RAW + 512;          // [64] f32
static_assert(SHARED_BYTES == 221952, "build.py asks for as many bytes");

#ifndef SCORES_REGISTERS
#define VALUES_REGISTERS 160
#define SCORES_REGISTERS 168
#define PRODUCER_REGISTERS 24
#endif
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)

// What rows that do not exist are read from.
__device__ __align__(16) uint8_t zero_row[1024];

#include "attend_parts.cuh"

// ---------------------------------------------------------------- instructions of its own
DI void scores_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }   // the warpgroup of scores
// Whether `x` holds in any thread of the warpgroup of scores.
DI bool scores_any(bool x) {
  uint32_t r;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 1, 128, p; selp.u32 %0, 1, 0, q;}" : "=r"(r) : "r"((uint32_t)x) : "memory");
  return r;
}
DI void store_matrices_turned(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
DI uint2 load_shared8(uint32_t a) { uint2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory"); return v; }
DI void expect(uint32_t b, uint32_t bytes) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(bytes) : "memory"); }
DI uint32_t least(uint32_t x) { uint32_t r; asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x)); return r; }
// A row to shared memory; its bytes count on the barrier. All lanes call it alike, one lane copies.
DI void copy_row(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred q;\nelect.sync _|q, 0xffffffff;\n"
      "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// 64 keys x 64 heads x 16 dims: keys in registers, query in shared memory, dim-major.
__device__ __forceinline__ void scores_mma(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(keep));
}

// ---------------------------------------------------------------- accumulators
// Accumulator values of block G (0..7 of the half) of row `row` or `row + 8`.
template <int G> DI void pick(float (&v)[8], const float (&acc)[128], int high) {
#pragma unroll
  for (int u = 0; u < 2; u++)
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) v[4 * u + 2 * j + e] = high ? acc[(4 * G + 2 * u + j) * 4 + 2 + e] : acc[(4 * G + 2 * u + j) * 4 + e];
}

// ---------------------------------------------------------------- values
struct Values {
  uint32_t base;               // shared memory
  int g, w, lane, row, q;
};

DI void rescale(float (&acc)[128], float a0, float a1) {
#pragma unroll
  for (int x = 0; x < 32; x++) { acc[4 * x] *= a0; acc[4 * x + 1] *= a0; acc[4 * x + 2] *= a1; acc[4 * x + 3] *= a1; }
}
// Adds a tile to the accumulators; `first`: of a token.
DI void add_tile(const Values& s, float (&acc)[128], int stage, int unit, bool first) {
  if (!first && load_word(s.base + GREW + 4 * stage)) {
    const uint32_t a = s.base + RESCALE + stage * 256 + s.row * 4;
    rescale(acc, load_float(a), load_float(a + 32));
  }
  const uint32_t weights = s.base + WEIGHTS + stage * 8192;
  const uint64_t left = dim_major(weights), right = across(s.base + KEYS + unit * UNIT);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) {
    values_mma_shared<0>(acc, left + 2 * k, right + 128 * k, k > 0 || !first);
    values_mma_shared<64>(acc, left + 2 * k, right + 1024 + 128 * k, k > 0 || !first);
  }
  mma_commit();
  mma_wait<0>();
  if (s.lane == 0) { arrive(s.base + UNIT_EMPTY + 8 * unit); arrive(s.base + WEIGHTS_EMPTY + 8 * stage); }
}

DI void write_statistics(const Args& p, int token, int head, float m, float l, float true_max) {
  if (head >= p.heads) return;
  const int64_t at = (int64_t)token * p.heads + head;
  if (p.lse) p.lse[at] = l > 0.f ? m * LN2 + logf(l) : INF;
  if (WITH_MAX && p.max_logits) p.max_logits[at] = true_max * LN2;
}
// Denominator with the sink, relative to 2^m.
DI float denominator(const Args& p, int head, float m, float l) {
  const float sink = p.sink && head < p.heads ? __ldg(p.sink + head) : -INF;
  return l + exp2_fast(sink * LOG2E - m);
}

// Blocks G .. 7 of this warpgroup's half, of one row.
template <int G> DI void store_blocks(const Values& s, const float (&acc)[128], const OutputRow& r, int high, float w, const float* table, uint32_t (&words)[2]) {
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
DI void store_row(const Values& s, const float (&acc)[128], const OutputRow& r, int high, float w, const float* table) {
  uint32_t words[2] = {0, 0};
  store_blocks<0>(s, acc, r, high, w, table, words);
  if (FP8_OUTPUT && !OUT_CHUNKED && r.live && s.q < 2)   
    *(uint32_t*)(r.scales + (r.member * 4 + s.g * 2 + s.q) * r.word_stride) = s.q ? words[1] : words[0];
}
#if SPLITS > 1
template <int G> DI void send_blocks(const Values& s, const float (&acc)[128], int rank, float w0, float w1) {
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

// What the output will need, into L1 while the tiles are under way.
DI void prefetch_output(const Args& p, int lane, int head0, int position) {
  const void* a = nullptr;
  if (lane < 2 && p.unrotate_output) a = rope_row(p, position) + 32 * lane;
  if ((lane & 30) == 2 && p.sink && head0 + 32 * (lane & 1) < p.heads) a = p.sink + head0 + 32 * (lane & 1);
  if (a) asm volatile("prefetch.global.L1 [%0];" ::"l"(a));
}

DI void add_values(const Args& p, uint32_t base, int g, int w, int lane, int rank, int item0, int item_step) {
  Values s;
  s.base = base; s.g = g; s.w = w; s.lane = lane; s.row = 16 * w + (lane >> 2); s.q = lane & 3;
  float acc[128];
  const int items = p.tokens * p.head_blocks;
  uint32_t done = 0, parity = 0;    // tiles; bit of the tokens that have keys
  int unit = g;                     // of the next tile's half
  Ahead ahead = look_ahead(p, item0);
  for (int item = item0; item < items; item += item_step) {
    const int token = p.head_blocks == 1 ? item : item / p.head_blocks, head0 = (item - token * p.head_blocks) * 64;
    const Span span = span_of(p, ahead.window_keys, ahead.compressed_keys, rank);
    const int tiles = span.last - span.first, position = ahead.position;
    prefetch_output(p, lane, head0, position);
    ahead = look_ahead(p, item + item_step);
    if (tiles == 0) {
#pragma unroll
      for (int x = 0; x < 128; x++) acc[x] = 0.f;
    }
    for (int j = 0; j < tiles; j++) {
      const int stage = done & 1;
      wait(base + FULL + 8 * stage, (done >> 1) & 1);
      done++;
      add_tile(s, acc, stage, unit, j == 0);
      unit = unit == 0 ? 2 : unit - 1;
    }
    float M[2], L[2], T[2];   // reference and true maximum (log2 units), sum of the weights
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t at = parity * 256 + s.row * 4 + 32 * h;
      const uint32_t sums = base + SUMS + parity * 1024 + s.row * 4 + 32 * h;
      L[h] = tiles == 0 ? 0.f : (load_float(sums) + load_float(sums + 256)) + (load_float(sums + 512) + load_float(sums + 768));
      M[h] = L[h] == 0.f ? -INF : load_float(base + REFERENCE + at);
      T[h] = WITH_MAX && tiles > 0 ? load_float(base + TRUE_MAX + at) : -INF;
    }
    parity ^= tiles > 0;
    const int head = head0 + s.row;
    const float* table = p.unrotate_output ? rope_row(p, position) : nullptr;
#if SPLITS == 1
    if (g == 0 && s.q == 0) { write_statistics(p, token, head, M[0], L[0], T[0]); write_statistics(p, token, head + 8, M[1], L[1], T[1]); }
    const float w0 = M[0] == -INF ? 0.f : 1.f / denominator(p, head, M[0], L[0]), w1 = M[1] == -INF ? 0.f : 1.f / denominator(p, head + 8, M[1], L[1]);
    store_row(s, acc, output_row(p, token, head), 0, w0, table);
    store_row(s, acc, output_row(p, token, head + 8), 1, w1, table);
#else
    if (g == 0 && s.q == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        store_float2(base + FINAL_CTA + s.row * 8 + 64 * h, M[h], L[h]);
        if (WITH_MAX) store_float(base + FINAL_MAX + s.row * 4 + 32 * h, T[h]);
      }
    }
    cluster_arrive(); cluster_wait();
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = -INF, all = 0.f, mine = 0.f, true_max = -INF;
#pragma unroll
      for (int r = 0; r < SPLITS; r++) {
        top = fmaxf(top, load_remote(base + FINAL_CTA + s.row * 8 + 64 * h, r));
        if (WITH_MAX) true_max = fmaxf(true_max, load_remote(base + FINAL_MAX + s.row * 4 + 32 * h, r));
      }
#pragma unroll
      for (int r = 0; r < SPLITS; r++) {
        const uint32_t from = base + FINAL_CTA + s.row * 8 + 64 * h;
        const float e = top == -INF ? 0.f : exp2_fast(load_remote(from, r) - top);
        all += load_remote(from + 4, r) * e;
        mine = r == rank ? e : mine;
      }
      if (rank == 0 && g == 0 && s.q == 0) write_statistics(p, token, head + 8 * h, top, all, true_max);
      weight[h] = top == -INF ? 0.f : mine / denominator(p, head + 8 * h, top, all);
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

// ---------------------------------------------------------------- scores
// Query heads 16 w .. 16 w + 15: a lane takes dims 16 t .. 16 t + 15 of every block of heads 16 w + g8 and + 8. `start`
// copies their bf16 values to the head's row; `finish` rotates, rounds to bf16, widens and stores.
struct QueryRows {
  uint32_t row;                // shared memory of head 16 w + g8, block 0
  int head, g8, t;             // head 16 w + g8 of the block of 64

  DI void start(const Args& p, int item) const {
    const int token = p.head_blocks == 1 ? item : item / p.head_blocks, head0 = (item - token * p.head_blocks) * 64 + head;
    const int64_t step = p.query_chunked ? (int64_t)128 * p.heads : 128;   // bytes between blocks
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int h = head0 + 8 * r;
      const bool live = h < p.heads;
      const uint8_t* from = p.q + (live ? (int64_t)token * p.q_token_stride + (p.query_chunked ? h * 32 + (int64_t)t * 32 * p.heads : h * p.q_head_stride + t * 32) : 0);
#pragma unroll
      for (int b = 0; b < 8; b++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(row + r * 1024 + b * 8192 + (((2 * t + c) ^ g8) << 4)), "l"(from + (live ? b * step + c * 16 : 0)), "r"(live ? 16 : 0) : "memory");
    }
    copy_commit();
  }
  DI static uint32_t turn(uint32_t pair, float c, float s) {
    const float a = __uint_as_float(pair << 16), b = __uint_as_float(pair & 0xffff0000u);
    return pack_bf16(a * c - b * s, a * s + b * c);
  }
  template <bool ROTATE> DI void widen_block(uint32_t at, const float4* table) const {
    const uint4 x = load_shared16(at + (((2 * t) ^ g8) << 4)), y = load_shared16(at + (((2 * t + 1) ^ g8) << 4));
    uint32_t v[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    if (ROTATE) {
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const float4 c = __ldg(table + u), z = __ldg(table + 8 + u);
        v[4 * u] = turn(v[4 * u], c.x, z.x); v[4 * u + 1] = turn(v[4 * u + 1], c.y, z.y);
        v[4 * u + 2] = turn(v[4 * u + 2], c.z, z.z); v[4 * u + 3] = turn(v[4 * u + 3], c.w, z.w);
      }
    }
    __syncwarp();              // the lanes of the row have read what is overwritten now
#pragma unroll
    for (int m = 0; m < 8; m++) store_shared4(at + ((m ^ g8) << 4) + 4 * t, bf16_to_f16(v[m]));
  }
  DI void finish(const Args& p, int position) const {
    const float4* table = (const float4*)(p.rotate_query ? rope_row(p, position) + 8 * t : nullptr);
    copy_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int b = 0; b < 8; b++) {
        const uint32_t at = row + r * 1024 + b * 8192;
        if (b == 7 && p.rotate_query) widen_block<true>(at, table);
        else widen_block<false>(at, nullptr);
      }
  }
};

// Rows of a warp in shared memory: 16 of them, PITCH bytes apart, scales behind the data.
template <int KIND> struct Raw;
template <> struct Raw<KIND_MXFP8> { static constexpr int DATA = 512, SCALES = 16, PITCH = 528; };
template <> struct Raw<KIND_NVFP4> { static constexpr int DATA = 256, SCALES = 32, PITCH = 288; };
template <> struct Raw<KIND_V4> { static constexpr int DATA = 576, SCALES = 8, PITCH = 592; };
// Row that lane group g8 holds first (8 more is the second): reads of neighbouring groups meet other banks.
template <int KIND> DI int row_of(int g8) { return KIND == KIND_MXFP8 ? (g8 >> 1) + 4 * (g8 & 1) : g8; }

// ---------------------------------------------------------------- producers
// Producer w copies rows 16 w .. 16 w + 15 of every tile, one bulk copy each, to where score warp w reads them.
struct Producer {
  const Args& p;
  uint32_t base;
  int w, lane, rank, items, item_step;
  int item, j;                 // the tile whose slots are asked for next
  Span span;
  int window_ahead, compressed_ahead;

  DI int token_of(int i) const { return p.head_blocks == 1 ? i : i / p.head_blocks; }
  DI void ask_lengths(int i) {
    window_ahead = p.a.width; compressed_ahead = p.b.width;
    if (i < items) {
      const int token = token_of(i);
      if (p.a.lengths) window_ahead = __ldg(p.a.lengths + token);
      if (p.b.lengths) compressed_ahead = __ldg(p.b.lengths + token);
    }
  }
  DI void start_item() {
    span = span_of(p, window_ahead, compressed_ahead, rank);
    j = span.first;
    ask_lengths(item + item_step);
  }
  // (slot of row lane & 15, bit 0: compressed set, bit 1: there is a tile)
  DI int2 fetch() {
    while (item < items && j >= span.last) { item += item_step; if (item < items) start_item(); }
    int2 s = make_int2(-1, 0);
    if (item < items) {
      const bool c = j >= span.window_tiles;
      const int key = (c ? j - span.window_tiles : j) * 64 + 16 * w + (lane & 15);
      const int* list = c ? p.b.indices : p.a.indices;
      const int64_t stride = c ? p.b.indices_stride : p.a.indices_stride;
      if (key < (c ? span.compressed_keys : span.window_keys)) s.x = __ldg(list + token_of(item) * stride + key);
      s.y = 2 | c;
      j++;
    }
    return s;
  }
  template <int KIND, int UNITS, int SCALE_STRIDE> DI void copy(const KeyArgs& k, int slot) {
    using R = Raw<KIND>;
    constexpr bool TOGETHER = UNITS * 16 == SCALE_STRIDE;   // data and scales of a row are neighbours
    const bool ok = (uint32_t)slot < k.num_slots;
    const uint32_t page = page_of(k, slot), row = slot - page * k.page_rows;
    const uint32_t at = page * (uint32_t)(k.page_stride >> 4) + row * UNITS;
    const uint32_t valid = __ballot_sync(~0u, ok) & 0xffff;
    const uint32_t full = base + RAW_FULL + 8 * w, to = base + RAW + w * RAW_WARP;
    if (lane == 0) {
      store_shared4(base + VALID + 4 * w, valid);
      expect(full, 16 * (TOGETHER ? R::DATA + R::SCALES : KIND == KIND_V4 ? R::DATA : R::DATA + R::SCALES));
    }
    __syncwarp();
    const uint64_t scales = (uint64_t)page * k.page_stride + k.scale_base + (uint64_t)row * SCALE_STRIDE;
    if (!TOGETHER && KIND == KIND_V4) {      // 8 bytes are too few for a bulk copy
      if (lane < 16) {
        const uint2 x = ok ? load8(k.pages + scales) : make_uint2(0, 0);
        store_shared8(to + lane * R::PITCH + R::DATA, x.x, x.y);
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; i < 16; i++) {
      const uint64_t unit = least(lane == i ? at : ~0u);
      copy_row(to + i * R::PITCH, (valid >> i) & 1 ? k.pages + unit * 16 : zero_row, TOGETHER ? R::DATA + R::SCALES : R::DATA, full);
      if (!TOGETHER && KIND != KIND_V4) {
        const uint32_t scale_unit = least(lane == i ? (uint32_t)(scales >> 4) : ~0u);
        copy_row(to + i * R::PITCH + R::DATA, (valid >> i) & 1 ? k.pages + (uint64_t)scale_unit * 16 : zero_row, R::SCALES, full);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(full);
  }
  DI void run(int item0) {
    items = p.tokens * p.head_blocks;
    item = item0; span.first = span.last = 0; j = 0;
    ask_lengths(item);
    if (item < items) start_item();
    int2 slots = fetch();
    uint32_t round = 1;        // parity of the round before is over at the start
    while (slots.y) {
      const int2 after = fetch();
      wait(base + RAW_EMPTY + 8 * w, round);
      round ^= 1;
      if ((A_KIND == B_KIND && A_ROW_UNITS == B_ROW_UNITS) || !(slots.y & 1)) copy<A_KIND, A_ROW_UNITS, A_SCALE_STRIDE>(slots.y & 1 ? p.b : p.a, slots.x);
      else copy<B_KIND, B_ROW_UNITS, B_SCALE_STRIDE>(p.b, slots.x);
      slots = after;
    }
  }
};

struct Scores {
  const Args& p;
  uint32_t base, to;           // shared memory; this lane's chunk of row g8 of the tile of stage 0
  int w, lane, g8, t, rank, items, item_step;
  float c1;
  uint4 d[8][2];               // raw blocks of this tile
#if HAS_V4
  uint4 tail[2];
#endif
  uint2 scales0, scales1;      // of the rows, those that this lane hands out
  bool ok0, ok1;
  float shift[16];             // of heads 8 c + 2 t and + 1: minus the maximum that weights refer to, log2 units
  float sum[16];               // of this lane's weights of the token, before they are rounded
  uint32_t tiles_done;
  int unit;                    // of the tile's first half
  uint32_t rounds;             // bit `unit`: parity to wait for

  // This lane's share of the warp's rows, after which their space is free.
  template <int KIND> DI void read_rows() {
    using R = Raw<KIND>;
    wait(base + RAW_FULL + 8 * w, tiles_done & 1);
    const uint32_t valid = load_word(base + VALID + 4 * w);
    const int row = row_of<KIND>(g8);
    ok0 = (valid >> row) & 1; ok1 = (valid >> (row + 8)) & 1;
    const uint32_t at = base + RAW + w * RAW_WARP + row * R::PITCH;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t from = at + 8 * r * R::PITCH;
#pragma unroll
      for (int b = 0; b < 8; b++) {
        if (KIND == KIND_NVFP4) { const uint2 x = load_shared8(from + 32 * b + 8 * t); d[b][r].x = x.x; d[b][r].y = x.y; }
        else d[b][r] = load_shared16(from + 64 * b + (KIND == KIND_V4 && b == 7 ? 32 : 16) * t);
      }
#if HAS_V4
      if (KIND == KIND_V4) tail[r] = load_shared16(from + 448 + 32 * t + 16);
#endif
      uint2& scales = r ? scales1 : scales0;
      if (KIND == KIND_NVFP4) scales = load_shared8(from + R::DATA + 8 * t);
      else scales.x = load_word(from + R::DATA + (KIND == KIND_V4 ? 4 * (t & 1) : 4 * t));
    }
    __syncwarp();
    if (lane == 0) arrive(base + RAW_EMPTY + 8 * w);
  }
  template <int KIND, int B> DI uint32_t scale_pair(uint2 scales) const {
    const uint32_t word = __shfl_sync(~0u, KIND == KIND_NVFP4 && (B & 1) ? scales.y : scales.x, (lane & 28) | (KIND == KIND_V4 ? B >> 2 : B >> 1));
    const int byte = KIND == KIND_MXFP8 ? 2 * (B & 1) + (t >> 1) : KIND == KIND_V4 ? B & 3 : t;
    const uint32_t code = __byte_perm(word, 0, 0x4440 | byte);
    return KIND == KIND_NVFP4 ? e4m3_pair<0>(code | (code << 8)) : ue8m0_pair(code);
  }
  // Dims 4 i .. 4 i + 3 of this lane's 16, as two f16 pairs; `rest`: the second half of 16 bf16 dims.
  template <int KIND, int B> DI static void widen(uint32_t& lo, uint32_t& hi, int i, uint4 x, uint4 rest, uint32_t sc) {
    const uint32_t words[8] = {x.x, x.y, x.z, x.w, rest.x, rest.y, rest.z, rest.w};
    if (KIND == KIND_V4 && B == 7) { lo = bf16_to_f16(words[2 * i]); hi = bf16_to_f16(words[2 * i + 1]); return; }
    if (KIND == KIND_NVFP4) {
      const uint32_t high = e2m1_high_bytes(words[i >> 1] >> (16 * (i & 1)));
      lo = times(__byte_perm(high, 0, 0x1404), sc); hi = times(__byte_perm(high, 0, 0x3424), sc);
      return;
    }
    lo = times(e4m3_pair<0>(words[i]), sc); hi = times(e4m3_pair<1>(words[i]), sc);
  }
  // `low`, `high`: where the dims of the first and of the second half go; blocks 4 to 7 wait until `high` is free.
  template <int KIND, int B> DI void block(float (&S)[32], uint32_t (&A)[2][8], uint32_t low, uint32_t high, uint32_t empty, uint32_t round) {
    if (B == 4) wait(empty, round);
    constexpr bool BF16 = KIND == KIND_V4 && B == 7;
    const uint32_t sc0 = BF16 ? 0 : scale_pair<KIND, B>(scales0), sc1 = BF16 ? 0 : scale_pair<KIND, B>(scales1);
    uint4 rest[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
#if HAS_V4
    rest[0] = tail[0]; rest[1] = tail[1];
#endif
    const uint64_t query = dim_major(base + QUERY) + B * 512;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (B > 0) mma_wait<1>();                       // the products that read A[h]
#pragma unroll
      for (int i = 0; i < 2; i++) {
        widen<KIND, B>(A[h][4 * i], A[h][4 * i + 2], 2 * h + i, d[B][0], rest[0], sc0);
        widen<KIND, B>(A[h][4 * i + 1], A[h][4 * i + 3], 2 * h + i, d[B][1], rest[1], sc1);
      }
      mma_fence();
#pragma unroll
      for (int i = 0; i < 2; i++) scores_mma(S, A[h][4 * i], A[h][4 * i + 1], A[h][4 * i + 2], A[h][4 * i + 3], query + 2 * (2 * h + i), B > 0 || h > 0 || i > 0);
      mma_commit();
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        store_shared16(((B < 4 ? low : high) ^ (c * 16)) + (B & 3) * 8192 + r * 1024, A[0][r + 2 * c], A[0][4 + r + 2 * c], A[1][r + 2 * c], A[1][4 + r + 2 * c]);
    if constexpr (B < 7) block<KIND, B + 1>(S, A, low, high, empty, round);
  }
  // Moves the references of heads whose maximum over this tile exceeds them by more than 2^8 (all of them on the first
  // tile that has a key). S: logits relative to the reference, log2 units. The weights' space of the stage, still
  // unused, holds the maxima of the four warps.
  DI void move_references(float (&S)[32], int stage, uint32_t parity, bool first, bool met) {
    const uint32_t tops = base + WEIGHTS + stage * 8192;
#pragma unroll
    for (int c = 0; c < 8; c++) {
      float top[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float v = fmaxf(ok0 ? S[4 * c + e] : -INF, ok1 ? S[4 * c + 2 + e] : -INF);
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 4)); v = fmaxf(v, __shfl_xor_sync(~0u, v, 8)); v = fmaxf(v, __shfl_xor_sync(~0u, v, 16));
        top[e] = v;
      }
      if (g8 == 0) store_float2(tops + w * 256 + (8 * c + 2 * t) * 4, top[0], top[1]);
    }
    scores_sync();
#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const uint32_t head = (8 * c + 2 * t + e) * 4, from = tops + head;
        const float top = fmaxf(fmaxf(load_float(from), load_float(from + 256)), fmaxf(load_float(from + 512), load_float(from + 768)));
        const float by = top > (met ? 8.f : -INF) ? top : 0.f;
        if (w == 0 && g8 == 0) {
          store_float(base + REFERENCE + parity * 256 + head, by - shift[2 * c + e]);
          store_float(base + RESCALE + stage * 256 + head, exp2_fast(-by));
          if (WITH_MAX) {
            const uint32_t at = base + TRUE_MAX + parity * 256 + head;
            const float here = top - shift[2 * c + e];
            store_float(at, first ? here : fmaxf(here, load_float(at)));
          }
        }
        shift[2 * c + e] -= by; S[4 * c + e] -= by; S[4 * c + 2 + e] -= by;
        sum[2 * c + e] *= exp2_fast(-by);
      }
    scores_sync();
  }
  // Scores, widened keys and weights of tile `now`; `first`, `last`: of its token, `met`: a tile before had a key. Returns `met`.
  template <int KIND> DI bool tile(uint32_t parity, bool first, bool last, bool met, const QueryRows& query, int next_query) {
    float S[32];
    uint32_t A[2][8];
    const int stage = tiles_done & 1;
    const int other = unit == 2 ? 0 : unit + 1;
    read_rows<KIND>();
    wait(base + UNIT_EMPTY + 8 * unit, (rounds >> unit) & 1);
    const uint32_t round = (rounds >> other) & 1;
    rounds ^= (1u << unit) | (1u << other);
    block<KIND, 0>(S, A, to + unit * UNIT, to + other * UNIT, base + UNIT_EMPTY + 8 * other, round);
    unit = unit == 0 ? 2 : unit - 1;
    mma_wait<0>();
    wait(base + WEIGHTS_EMPTY + 8 * stage, ((tiles_done >> 1) & 1) ^ 1);
    tiles_done++;
    if (next_query >= 0) {       // the query is read: the next one may come
      scores_sync();
      query.start(p, next_query);
    }
    if (!met) {
#pragma unroll
      for (int x = 0; x < 16; x++) shift[x] = sum[x] = 0.f;
    }
    float top0 = -INF, top1 = -INF;
#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        S[4 * c + e] = fmaf(S[4 * c + e], c1, shift[2 * c + e]); S[4 * c + 2 + e] = fmaf(S[4 * c + 2 + e], c1, shift[2 * c + e]);
        top0 = fmaxf(top0, S[4 * c + e]); top1 = fmaxf(top1, S[4 * c + 2 + e]);
      }
    const float limit = met ? 8.f : -INF;
    const bool grew = scores_any((ok0 && top0 > limit) || (ok1 && top1 > limit));
    if (grew || WITH_MAX) move_references(S, stage, parity, first, met);
    if (w == 0 && lane == 0) store_shared4(base + GREW + 4 * stage, grew && met);
#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (!ok0) S[4 * c + e] = -INF;
        if (!ok1) S[4 * c + 2 + e] = -INF;
      }
    const uint32_t at = base + WEIGHTS + stage * 8192 + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((2 * w + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      uint32_t P[4];
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const float* s = S + 4 * (c + x);
        const float e0 = exp2_fast(s[0]), e1 = exp2_fast(s[1]), f0 = exp2_fast(s[2]), f1 = exp2_fast(s[3]);
        P[2 * x] = pack_f16(e0, e1); P[2 * x + 1] = pack_f16(f0, f1);
        sum[2 * (c + x)] += e0 + f0; sum[2 * (c + x) + 1] += e1 + f1;
      }
      store_matrices_turned(at + c * 1024, P[0], P[1], P[2], P[3]);
    }
    if (last) {
#pragma unroll
      for (int c = 0; c < 8; c++) {
        float v[2] = {sum[2 * c], sum[2 * c + 1]};
#pragma unroll
        for (int e = 0; e < 2; e++) { v[e] += __shfl_xor_sync(~0u, v[e], 4); v[e] += __shfl_xor_sync(~0u, v[e], 8); v[e] += __shfl_xor_sync(~0u, v[e], 16); }
        if (g8 == 0) store_float2(base + SUMS + parity * 1024 + w * 256 + (8 * c + 2 * t) * 4, v[0], v[1]);
      }
    }
    fence_tensor();
    __syncwarp();
    if (lane == 0) arrive(base + FULL + 8 * stage);
    return met || grew;
  }
  DI void run(int item0) {
    items = p.tokens * p.head_blocks;
    c1 = p.scale * LOG2E;
    g8 = lane >> 2; t = lane & 3;
    to = base + KEYS + (16 * w + g8) * 128 + (((2 * t) ^ g8) << 4);
    tiles_done = 0;
    QueryRows query;
    query.g8 = g8; query.t = t; query.head = 16 * w + g8; query.row = base + QUERY + query.head * 128;
    unit = 0; rounds = 7;
    Ahead ahead = look_ahead(p, item0);
    if (item0 < items) query.start(p, item0);
    uint32_t parity = 0;
    bool started = true;       // the query of the item is under way
    for (int i = item0; i < items; i += item_step) {
      const Span s = span_of(p, ahead.window_keys, ahead.compressed_keys, rank);
      const int tiles = s.last - s.first, position = ahead.position;
      ahead = look_ahead(p, i + item_step);
      if (!started) query.start(p, i);   // after a token without keys
      if (tiles == 0) { copy_wait<0>(); started = false; continue; }
      query.finish(p, position);
      fence_tensor();
      scores_sync();
      started = i + item_step < items;
      bool met = false;
      for (int x = 0; x < tiles; x++) {
        const int next_query = x == tiles - 1 && started ? i + item_step : -1;
        if (A_KIND == B_KIND || s.first + x < s.window_tiles) met = tile<A_KIND>(parity, x == 0, x == tiles - 1, met, query, next_query);
        else met = tile<B_KIND>(parity, x == 0, x == tiles - 1, met, query, next_query);
      }
      parity ^= 1;
    }
  }
};

extern "C" __global__ void __launch_bounds__(512, 1) attend(const __grid_constant__ Args p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), group = warp >> 2, w = warp & 3, lane = tid & 31;
  const int rank = SPLITS == 1 ? 0 : blockIdx.x % SPLITS, item0 = blockIdx.x / SPLITS, item_step = gridDim.x / SPLITS;
  if (tid == 0) {
    for (int i = 0; i < 2; i++) { barrier_init(base + FULL + 8 * i, 4); barrier_init(base + WEIGHTS_EMPTY + 8 * i, 8); }
    for (int i = 0; i < 3; i++) barrier_init(base + UNIT_EMPTY + 8 * i, 4);
    for (int i = 0; i < 4; i++) { barrier_init(base + RAW_FULL + 8 * i, 1); barrier_init(base + RAW_EMPTY + 8 * i, 1); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (group < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(VALUES_REGISTERS));
    add_values(p, base, group, w, lane, rank, item0, item_step);
  } else if (group == 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(SCORES_REGISTERS));
    Scores scores{p};
    scores.base = base; scores.w = w; scores.lane = lane; scores.rank = rank;
    scores.item_step = item_step;
    scores.run(item0);
    if (SPLITS > 1) { cluster_arrive(); cluster_wait(); cluster_arrive(); cluster_wait(); }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    Producer producer{p};
    producer.base = base; producer.w = w; producer.lane = lane; producer.rank = rank; producer.item_step = item_step;
    producer.run(item0);
    if (SPLITS > 1) { cluster_arrive(); cluster_wait(); cluster_arrive(); cluster_wait(); }
  }
}
