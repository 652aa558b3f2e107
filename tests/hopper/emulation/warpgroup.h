// What attend.cu needs beyond device.h: warpgroup products, matrices, copies. Products happen when they are issued, a
// warp at a time: a warp's 16 rows of a product are its own. Registers that a product still reads are not watched.
#pragma once
#include "device.h"
struct int2 { int x, y; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Operands in shared memory: descriptors as the kernel makes them, 128-byte swizzle.
static inline uint64_t dim_major(uint32_t a) { return (uint64_t)((a & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
static inline uint64_t across(uint32_t a) { return (uint64_t)((a & 0x3ffff) >> 4) | (512ull << 16) | (64ull << 32) | (1ull << 62); }
static inline float half_at(uint32_t a) { return from_f16(get<uint16_t>(a ^ (((a >> 7) & 7) << 4))); }
static inline float dim_major_at(uint64_t d, int row, int k) { return half_at(((uint32_t)(d & 0x3fff) << 4) + (row >> 3) * 1024 + (row & 7) * 128 + 2 * k); }
static inline float across_at(uint64_t d, int k, int n) { return half_at(((uint32_t)(d & 0x3fff) << 4) + (n >> 6) * 8192 + (k >> 3) * 1024 + (k & 7) * 128 + 2 * (n & 63)); }
static inline int slab() { return (cur->tid.x / 32) & 3; }

struct Left { float a[16][16]; };
static inline Left left_of_registers(Warp* w, int b) {
  Left x;
  for (int l = 0; l < 32; l++) for (int r = 0; r < 4; r++) for (int h = 0; h < 2; h++)
    x.a[(l >> 2) + 8 * (r & 1)][2 * (l & 3) + h + 8 * (r >> 1)] = from_f16(w->frag[b][l][r] >> (16 * h));
  return x;
}
static inline Left left_of_memory(uint64_t d, int slab) {
  Left x;
  for (int m = 0; m < 16; m++) for (int k = 0; k < 16; k++) x.a[m][k] = dim_major_at(d, 16 * slab + m, k);
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
static inline void scores_mma(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t right, int keep) {
  lend(a0, a1, a2, a3);
  together(20, (uint64_t)&d[0], [=](Warp* w, int b) { multiply(w, b, 64, left_of_registers(w, b), [=](int k, int n) { return dim_major_at(right, n, k); }, keep, 0); });
}
static inline void scores_mma(float (&d)[32], uint64_t left, uint64_t right, int keep) {
  const int s = slab();
  together(21, (uint64_t)&d[0], [=](Warp* w, int b) { multiply(w, b, 64, left_of_memory(left, s), [=](int k, int n) { return dim_major_at(right, n, k); }, keep, 0); });
}
template <int FIRST> static inline void values_mma(float (&d)[128], const uint32_t (&a)[4], uint64_t right, int keep) {
  lend(a[0], a[1], a[2], a[3]);
  together(22, (uint64_t)&d[0], [=](Warp* w, int b) { multiply(w, b, 128, left_of_registers(w, b), [=](int k, int n) { return across_at(right, k, n); }, keep, FIRST); });
}
template <int FIRST> static inline void values_mma(float (&d)[128], uint64_t left, uint64_t right, int keep) {
  const int s = slab();
  together(23, (uint64_t)&d[0], [=](Warp* w, int b) { multiply(w, b, 128, left_of_memory(left, s), [=](int k, int n) { return across_at(right, k, n); }, keep, FIRST); });
}
template <int FIRST> static inline void values_mma_shared(float (&d)[128], uint64_t left, uint64_t right, int keep) { values_mma<FIRST>(d, left, right, keep); }
static inline void mma_fence() { together(24, 0, nothing); }
static inline void mma_commit() {}
template <int N> static inline void mma_wait() { together(25, 0, nothing); }
static inline void fence_tensor() {}

static inline void consumers_sync() { gather(1, 256, false); }
static inline void scores_sync() { gather(1, 128, false); }
static inline bool scores_any(bool x) { return gather(1, 128, x); }

static inline bool __any_sync(uint32_t m, bool p) { return __ballot_sync(m, p) != 0; }
static inline void load_matrices(uint32_t (&x)[4], uint32_t a) {
  Warp* w = cur->warp; const int b = together(26, a, nothing);
  for (int m = 0; m < 4; m++) x[m] = get<uint32_t>((uint32_t)w->in[b][8 * m + (cur->lane >> 2)] + 4 * (cur->lane & 3));
}
static inline void store_matrices(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t v) {
  lend(x, y, z, v);
  together(27, a, [](Warp* w, int b) {
    for (int m = 0; m < 4; m++) for (int l = 0; l < 32; l++) put<uint32_t>((uint32_t)w->in[b][8 * m + (l >> 2)] + 4 * (l & 3), w->frag[b][l][m]);
  });
}
static inline void store_matrices_turned(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t v) {
  lend(x, y, z, v);
  together(28, a, [](Warp* w, int b) {
    for (int m = 0; m < 4; m++) for (int l = 0; l < 32; l++) for (int e = 0; e < 2; e++)
      put<uint16_t>((uint32_t)w->in[b][8 * m + 2 * (l & 3) + e] + 2 * (l >> 2), (uint16_t)(w->frag[b][l][m] >> (16 * e)));
  });
}
static inline void add_columns(float (&d)[4], const uint32_t (&a)[4]) { mma(d, a[0], a[1], a[2], a[3], 0x3c003c00, 0x3c003c00); }

template <class T> static inline T global_at(const void* p) { if ((uintptr_t)p % sizeof(T)) fail("unaligned load"); T v; memcpy(&v, p, sizeof v); return v; }
static inline uint4 load16(const uint8_t* p) { return global_at<uint4>(p); }
static inline uint2 load8(const uint8_t* p) { return global_at<uint2>(p); }
static inline uint32_t load4(const uint8_t* p) { return global_at<uint32_t>(p); }
static inline uint32_t load_word(uint32_t a) { return get<uint32_t>(a); }
static inline uint64_t load_mask(uint32_t a) { return get<uint64_t>(a); }
static inline void store_shared1(uint32_t a, uint32_t x) { put<uint8_t>(a, (uint8_t)x); }
static inline float load_remote(uint32_t a, int rank) { return get<float>(remote(a, rank)); }
template <int N> static inline void copy_async(uint32_t to, const void* from) { copy_async<N>(to, from, N); }
static inline void copy_commit() {}
template <int N> static inline void copy_wait() {}
static inline void expect(uint32_t b, uint32_t bytes) { barrier_at(cur->cta, b).tx += bytes; }
static inline uint32_t least(uint32_t x) { return uniform_least(x); }
static inline void copy_row_together(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) { together(29, to, nothing); if (cur->lane == 0) copy_row(to, from, bytes, barrier); }

template <int HIGH> static inline uint32_t e4m3_pair(uint32_t w) { return HIGH ? e4m3_high(w) : e4m3_low(w); }
static inline uint32_t e2m1_high_bytes(uint32_t codes) {
  static const uint8_t magnitude[8] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46};
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) { const uint32_t c = (codes >> (4 * i)) & 15; r |= (uint32_t)(magnitude[c & 7] | (c & 8 ? 0x80 : 0)) << (8 * i); }
  return r;
}
