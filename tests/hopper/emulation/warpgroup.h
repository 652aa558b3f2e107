// What attend.cu needs beyond device.h: warpgroup products, matrices, copies. Products happen when they are issued, a
// warp at a time: a warp's 16 rows of a product are its own. Registers that a product still reads are not watched.
#pragma once
#include "device.h"
struct int2 { int x, y; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Operands in shared memory: descriptors as the kernel makes them, 128-byte swizzle.
static inline uint32_t dim_major_low(uint32_t a) { return (a & 0x3ffff) >> 4 | 1 << 16; }
static inline uint64_t dim_major_of(uint32_t low) { return low | (64ull << 32) | (1ull << 62); }
static inline uint64_t dim_major(uint32_t a) { return dim_major_of(dim_major_low(a)); }
// Numbers of the tensor cores.
#if BF16_NUMBERS
static inline uint16_t to_number(float f) { return to_bf16(f); }
static inline float from_number(uint16_t x) { return __uint_as_float((uint32_t)x << 16); }
static inline uint32_t numbers_of_bf16(uint32_t x) { return x; }
static inline uint32_t numbers_of_ue8m0(uint32_t a, uint32_t b) { return min(a, 254u) << 7 | min(b, 254u) << 23; }
#else
static inline uint16_t to_number(float f) { return to_f16(f); }
static inline float from_number(uint16_t x) { return from_f16(x); }
static inline uint32_t numbers_of_bf16(uint32_t x) { return bf16_to_f16(x); }
static inline uint32_t numbers_of_ue8m0(uint32_t a, uint32_t b) { return least_f16(pack_f16(__uint_as_float(a << 23), __uint_as_float(b << 23)), 0x58005800); }
#endif
static inline uint32_t pack_numbers(float lo, float hi) { return two(to_number(lo), to_number(hi)); }
static inline uint32_t numbers_of_f16(uint32_t x) { return pack_numbers(from_f16(x), from_f16(x >> 16)); }
static inline float half_at(uint32_t a) { return from_number(get<uint16_t>(a ^ (((a >> 7) & 7) << 4))); }
static inline float dim_major_at(uint64_t d, int row, int k) { return half_at(((uint32_t)(d & 0x3fff) << 4) + (row >> 3) * 1024 + (row & 7) * 128 + 2 * k); }

struct Left { float a[16][16]; };
static inline Left left_of_registers(Warp* w, int b) {
  Left x;
  for (int l = 0; l < 32; l++) for (int r = 0; r < 4; r++) for (int h = 0; h < 2; h++)
    x.a[(l >> 2) + 8 * (r & 1)][2 * (l & 3) + h + 8 * (r >> 1)] = from_number(w->frag[b][l][r] >> (16 * h));
  return x;
}
// Adds 16 rows x n columns to what lanes hold from element `first` on; each lane passed the address of its array.
template <class Right> static inline void multiply(Warp* w, int b, int n, const Left& left, Right right, bool keep, int first) {
  std::vector<float> column(16);
  for (int c = 0; c < n; c++) {
    for (int k = 0; k < 16; k++) column[k] = right(k, c);
    for (int l = (c & 7) >> 1; l < 32; l += 4) for (int h = 0; h < 2; h++) {
      float& d = ((float*)w->in[b][l])[first + 4 * (c >> 3) + 2 * h + (c & 1)];
      double s = keep ? d : 0.0;
      for (int k = 0; k < 16; k++) s += (double)left.a[(l >> 2) + 8 * h][k] * column[k];
      d = (float)s;
    }
  }
}
static inline void lend(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) { uint32_t* f = cur->warp->frag[cur->warp->gen & 1][cur->lane]; f[0] = a0; f[1] = a1; f[2] = a2; f[3] = a3; }
template <int FIRST, int N> static inline void keys_mma(float (&d)[N], const uint32_t* a, uint64_t right, int keep) {
  lend(a[0], a[1], a[2], a[3]);
  together(30, (uint64_t)&d[0], [=](Warp* w, int b) { multiply(w, b, 8 * HEAD_TILES, left_of_registers(w, b), [=](int k, int n) { return dim_major_at(right, n, k); }, keep, FIRST); });
}
static inline void mma_fence() { together(24, 0, nothing); }
static inline void mma_commit() {}
template <int N> static inline void mma_wait() { together(25, 0, nothing); }

static inline void values_sync() { gather(6, 256, false); }
static inline void scores_sync() { gather(7, 128 * (HEAD_TILES == 8 ? 2 : 3), false); }
static inline float least_or_nan(float a, float b) { return a < b || a != a ? a : b; }
static inline void group_sync(int g) { gather(g + 1, 128, false); }
static inline bool group_any(int g, bool x) { return gather(g + 1, 128, x); }
template <class T> static inline void forget(T&) {}
static inline bool one_lane() { together(31, 0, nothing); return cur->lane == 0; }
#ifdef EVERY_LANE_ARRIVES
static inline void arrive_once(uint32_t b) { arrive(b); }
#else
static inline void arrive_once(uint32_t b) { if (one_lane()) arrive(b); }
#endif
static inline void tell_cluster(uint32_t b) {
#ifndef EVERY_LANE_ARRIVES
  if (!one_lane()) return;
#endif
  for (int r = 0; r < SPLITS; r++) arrive_at(cluster[r], b);
}
static inline int lane_number() { return cur->lane; }

static inline void load_matrices(uint32_t (&x)[4], uint32_t a) {
  Warp* w = cur->warp; const int b = together(26, a, nothing);
  for (int m = 0; m < 4; m++) x[m] = get<uint32_t>((uint32_t)w->in[b][8 * m + (cur->lane >> 2)] + 4 * (cur->lane & 3));
}
static inline void add_rows(float (&d)[4], const uint32_t (&a)[4]) {
  lend(a[0], a[1], a[2], a[3]);
  together(27, (uint64_t)&d[0], [](Warp* w, int b) { multiply(w, b, 8, left_of_registers(w, b), [](int, int) { return 1.f; }, true, 0); });
}
static inline void store_matrices_turned(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t v) {
  lend(x, y, z, v);
  together(28, a, [](Warp* w, int b) {
    for (int m = 0; m < 4; m++) for (int l = 0; l < 32; l++) for (int e = 0; e < 2; e++)
      put<uint16_t>((uint32_t)w->in[b][8 * m + 2 * (l & 3) + e] + 2 * (l >> 2), (uint16_t)(w->frag[b][l][m] >> (16 * e)));
  });
}

static inline void unrotate_pair(float& x, float& y, float co, float si) { const float a = x, b = y; x = a * co + b * si; y = b * co - a * si; }
static inline void store_global1_if(bool x, void* a, uint32_t v) { if (x) *(uint8_t*)a = (uint8_t)v; }
static inline void store_global8_if(bool x, void* a, uint2 v) { if (x) memcpy(a, &v, 8); }
static inline void store_global16_if(bool x, void* a, uint4 v) { if (x) memcpy(a, &v, 16); }
template <class M> static inline void prefetch_map(const M&) {}
// A map of the query: where the arguments are that say how it lies.
struct Args;
template <class M, class A = Args> static inline void prefetch_query(const M& map, int block, int head, int token) {
  const A& p = *(const A*)map.words[0];
  for (int b = block; b < block + 4; b++) {
    const int64_t first = p.query_chunked ? ((int64_t)4 * b * p.heads + head) * 32 : head * p.q_head_stride + b * 128;
    prefetch_l2(p.q + token * p.q_token_stride + first);
  }
}
static inline void prefetch_l1(const void* a) { (void)*(const volatile char*)a; }
static inline uint32_t load_shared1(uint32_t a) { return get<uint8_t>(a); }
static inline void store_shared1(uint32_t a, uint32_t x) { put<uint8_t>(a, (uint8_t)x); }
static inline void copy_commit() {}
template <int N> static inline void copy_wait() {}
template <class M, class A = Args> static inline void copy_query(const M& map, uint32_t to, int block, int head, int token, uint32_t barrier) {
  const A& p = *(const A*)map.words[0];
  check_waited();
  std::vector<uint8_t> box(4 * HEAD_TILES * 1024);
  for (int b = 0; b < 4; b++)
    for (int h = 0; h < 8 * HEAD_TILES && head + h < p.heads; h++)
      for (int piece = 0; piece < 8; piece++) {
        const int64_t from = p.query_chunked ? ((int64_t)(4 * (block + b) + (piece >> 1)) * p.heads + head + h) * 32 + (piece & 1) * 16 : (head + h) * p.q_head_stride + (block + b) * 128 + piece * 16;
        memcpy(&box[b * HEAD_TILES * 1024 + h * 128 + piece * 16], p.q + token * p.q_token_stride + from, 16);
      }
  copies.push_back({cur->cta, to, box, barrier, rand() % 40});
}
static inline void copy_row_together(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  if (policy >> 60 != 1) fail("no policy of the L2: %llx", (unsigned long long)policy);
  together(29, to, nothing);
  if (cur->lane == 0) copy_row(to, from, bytes, barrier);
}
static inline void copy_two_rows_together(uint32_t to0, uint32_t to1, const void* from0, const void* from1, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  copy_row_together(to0, from0, bytes, barrier, policy);
  copy_row_together(to1, from1, bytes, barrier, policy);
}

template <int HIGH> static inline uint32_t e4m3_pair(uint32_t w) { return HIGH ? e4m3_high(w) : e4m3_low(w); }
