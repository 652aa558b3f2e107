// The instructions of few_heads_parts.cuh in plain C++, for threads that are fibers of one process.
//
// What lanes of a warp do together (`together`) checks that all of them do the same thing. Bulk copies land later, in
// any order. Barriers count as mbarriers do; too many arrivals, an unaligned access and one outside shared memory
// abort. Orderings that only real memory can break are not seen here.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <functional>
#include <map>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
struct float2 { float x, y; }; struct float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; }; struct uint4 { uint32_t x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float __uint_as_float(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
static inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
static inline uint32_t __float_as_uint(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static inline int __float_as_int(float f) { int x; memcpy(&x, &f, 4); return x; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  uint64_t v = ((uint64_t)b << 32) | a; uint32_t r = 0;
  for (int i = 0; i < 4; i++) { uint32_t k = (s >> (4 * i)) & 15, y = (v >> (8 * (k & 7))) & 255; if (k & 8) y = y & 128 ? 255 : 0; r |= y << (8 * i); }
  return r;
}
#define fail(...) do { fprintf(stderr, __VA_ARGS__); fprintf(stderr, "\n"); abort(); } while (0)

struct Barrier { int count, pending; int64_t tx; uint32_t phase; };
struct Named { int count = 0, gen = 0; bool any = false, result[2] = {false, false}; };
struct Copy { struct Block* cta; uint32_t to; std::vector<uint8_t> bytes; uint32_t bar; int delay; };
struct Warp { int count = 0; int gen = 0; int op[2]; uint64_t in[2][32]; uint32_t frag[2][32][10]; float out[2][32][4]; };
struct Block { uint8_t* mem; std::map<uint32_t, Barrier> bars; Named named[16]; std::vector<Warp> warps; int rank; };
struct Dim { int x; };
struct Fiber { ucontext_t ctx; void* stack; bool done = false; std::function<bool()> ready; Block* cta; Warp* warp; Dim tid, bid, gdim; int lane; int cluster_gen = 0; bool waited = false; };
extern Fiber* cur; extern ucontext_t sched; extern std::vector<Copy> copies; extern std::vector<Block*> cluster; extern int cluster_count, cluster_gen, total_threads, block_threads;
#define threadIdx (cur->tid)
#define blockIdx (cur->bid)
#define gridDim (cur->gdim)
// What the launch ahead writes is there for a thread that has waited for it.
static inline void wait_for_launch_before() { cur->waited = true; }
static inline void check_waited() { if (!cur->waited) fail("device memory before the launch ahead has ended, thread %d", cur->tid.x); }
template <class T> static inline T __ldg(const T* p) { check_waited(); return *p; }
static inline void until(std::function<bool()> f) { if (f()) return; cur->ready = f; swapcontext(&cur->ctx, &sched); }
// All 32 lanes meet; the last one computes.
template <class F> static inline int together(int op, uint64_t v, F compute) {
  Warp* w = cur->warp; const int g = w->gen, b = g & 1;
  if (w->count == 0) w->op[b] = op; else if (w->op[b] != op) fail("lanes diverge: op %d and %d, thread %d", w->op[b], op, cur->tid.x);
  w->in[b][cur->lane] = v;
  if (++w->count == 32) { compute(w, b); w->count = 0; w->gen++; } else until([=] { return w->gen != g; });
  return b;
}
static inline void nothing(Warp*, int) {}
static inline void __syncwarp() { together(1, 0, nothing); }
template <class T> static inline T __shfl_sync(uint32_t, T v, int from) { uint64_t x = 0; memcpy(&x, &v, sizeof v); Warp* w = cur->warp; int b = together(2, x, nothing); T r; memcpy(&r, &w->in[b][from & 31], sizeof r); return r; }
template <class T> static inline T __shfl_xor_sync(uint32_t m, T v, int d) { return __shfl_sync(m, v, cur->lane ^ d); }
static inline uint32_t __ballot_sync(uint32_t, bool p) { Warp* w = cur->warp; int b = together(3, p, nothing); uint32_t r = 0; for (int i = 0; i < 32; i++) r |= (uint32_t)(w->in[b][i] & 1) << i; return r; }
static inline int uniform(int x) { Warp* w = cur->warp; int b = together(4, (uint64_t)(int64_t)x, nothing); int r = x; for (int i = 0; i < 32; i++) { int y = (int)w->in[b][i]; r = y < r ? y : r; } return r; }
static inline uint32_t uniform_least(uint32_t x) { Warp* w = cur->warp; int b = together(5, x, nothing); uint32_t r = x; for (int i = 0; i < 32; i++) { uint32_t y = (uint32_t)w->in[b][i]; r = y < r ? y : r; } return r; }
static inline bool gather(int id, int threads, bool x) {
  Named& n = cur->cta->named[id]; const int g = n.gen;
  n.any |= x;
  if (++n.count == threads) { n.result[g & 1] = n.any; n.any = false; n.count = 0; n.gen++; } else { Named* q = &n; until([=] { return q->gen != g; }); }
  return n.result[g & 1];
}
static inline void __syncthreads() { gather(0, block_threads, false); }
template <int ID, int COUNT = 256> static inline void meet() { gather(ID, COUNT, false); }
template <int ID> static inline bool meet_or(bool x) { return gather(ID, 256, x); }
static inline void cluster_arrive_relaxed() { cur->cluster_gen = cluster_gen; if (++cluster_count == total_threads) { cluster_count = 0; cluster_gen++; } }
static inline void cluster_wait() { const int g = cur->cluster_gen; until([=] { return cluster_gen != g; }); }
static inline void fence_barriers() {}
static inline void let_next_launch_begin() {}
static inline void fence_async() {}
template <int N, int BEFORE> static inline void take_registers() {}

constexpr uint32_t SHARED_LIMIT = 232448;
static inline uint8_t* at(uint32_t a, uint32_t n) {
  Block* c = cur->cta;
  if (a >> 24) { c = cluster[(a >> 24) - 1]; a &= 0xffffff; }
  if (a + n > SHARED_LIMIT || a % n) fail("shared address %u of %u bytes, thread %d", a, n, cur->tid.x);
  return c->mem + a;
}
static inline uint32_t shared_address(const void*) { return 0; }
template <class T> static inline T get(uint32_t a) { T v; memcpy(&v, at(a, sizeof v), sizeof v); return v; }
template <class T> static inline void put(uint32_t a, T v) { memcpy(at(a, sizeof v), &v, sizeof v); }
static inline uint4 load_shared16(uint32_t a) { return get<uint4>(a); }
static inline uint2 load_shared8(uint32_t a) { return get<uint2>(a); }
static inline uint32_t load_shared4(uint32_t a) { return get<uint32_t>(a); }
static inline uint32_t load_shared2(uint32_t a) { return get<uint16_t>(a); }
static inline void store_shared16(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { put<uint4>(a, {x, y, z, w}); }
static inline void store_shared8(uint32_t a, uint32_t x, uint32_t y) { put<uint2>(a, {x, y}); }
static inline void store_shared4(uint32_t a, uint32_t x) { put(a, x); }
static inline void store_float(uint32_t a, float x) { put(a, x); }
static inline void store_float2(uint32_t a, float x, float y) { put<float2>(a, {x, y}); }
static inline void store_float4(uint32_t a, float x, float y, float z, float w) { put<float4>(a, {x, y, z, w}); }
static inline float load_float(uint32_t a) { return get<float>(a); }
static inline float2 load_float2(uint32_t a) { return get<float2>(a); }
static inline float4 load_float4(uint32_t a) { return get<float4>(a); }
static inline uint32_t remote(uint32_t a, int rank) { return a | (uint32_t)(rank + 1) << 24; }

static inline Barrier& barrier_at(Block* c, uint32_t b) { auto i = c->bars.find(b); if (i == c->bars.end()) fail("no barrier at %u", b); return i->second; }
static inline void settle(Barrier& x) { if (x.pending < 0) fail("too many arrivals"); if (x.pending == 0 && x.tx == 0) { x.phase ^= 1; x.pending = x.count; } }
static inline void barrier_init(uint32_t b, int n) { cur->cta->bars[b] = {n, n, 0, 0}; }
static inline void arrive_at(Block* c, uint32_t b) { Barrier& x = barrier_at(c, b); x.pending--; settle(x); }
static inline void arrive(uint32_t b) { arrive_at(cur->cta, b); }
static inline void arrive_and_expect(uint32_t b, uint32_t bytes) { Barrier& x = barrier_at(cur->cta, b); x.tx += bytes; x.pending--; settle(x); }
static inline void wait(uint32_t b, uint32_t parity) { Barrier* x = &barrier_at(cur->cta, b); until([=] { return x->phase != parity; }); }
static inline void copy_row(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  check_waited();
  if ((uintptr_t)from % 16 || to % 16 || bytes % 16) fail("unaligned row");
  const uint8_t* f = (const uint8_t*)from;
  copies.push_back({cur->cta, to, std::vector<uint8_t>(f, f + bytes), barrier, rand() % 40});
}
// To a block of the cluster, later.
static inline void send_bytes(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
  at(to, 16); at(to + bytes - 16, 16);
  if (to >> 24 != barrier >> 24) fail("barrier of another block");
  copies.push_back({cluster[(to >> 24) - 1], to & 0xffffff, std::vector<uint8_t>(from, from + bytes), barrier & 0xffffff, rand() % 40});
}
static inline void send4(uint32_t to, float x, float y, float z, float w, uint32_t barrier) {
  const float4 v = {x, y, z, w};
  send_bytes(to, (const uint8_t*)&v, 16, barrier);
}
static inline void send_block(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || from % 16 || bytes % 16 || from >> 24) fail("unaligned block");
  if (cluster[(to >> 24) - 1] == cur->cta) fail("a block to its own shared memory");   // memcheck takes it for an error
  at(from + bytes - 16, 16);
  send_bytes(to, at(from, 16), bytes, barrier);
}
static inline void wait_for_cluster(uint32_t b, uint32_t parity) { wait(b, parity); }
static inline void copies_land(bool all) {
  for (size_t i = 0; i < copies.size();) {
    Copy& c = copies[i];
    if (!all && c.delay-- > 0) { i++; continue; }
    memcpy(c.cta->mem + c.to, c.bytes.data(), c.bytes.size());
    Barrier& x = barrier_at(c.cta, c.bar); x.tx -= c.bytes.size(); settle(x);
    copies.erase(copies.begin() + i);
  }
}
template <int N> static inline void copy_async(uint32_t to, const void* from, int size = N) { check_waited(); if ((uintptr_t)from % N) fail("unaligned copy"); uint8_t* t = at(to, N); memset(t, 0, N); memcpy(t, from, size); }
static inline void copies_arrive(uint32_t b) { arrive(b); }
static inline void copies_wait() {}

// numbers
static inline uint16_t to_f16(float f) { _Float16 h = (_Float16)f; uint16_t r; memcpy(&r, &h, 2); return r; }
static inline float from_f16(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static inline uint16_t to_bf16(float f) { uint32_t x = __float_as_uint(f); if ((x & 0x7fffffff) > 0x7f800000) return 0x7fff; return (x + 0x7fff + ((x >> 16) & 1)) >> 16; }
static inline float e4m3(uint32_t b) { int e = (b >> 3) & 15, m = b & 7; float v = (b & 127) == 127 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9); return b & 128 ? -v : v; }
static inline uint32_t to_e4m3(float f) {
  if (f != f) return 0x7f;
  uint32_t s = signbit(f) ? 128 : 0; float a = fabsf(f); int best = 0; float d = INFINITY;
  for (int i = 0; i < 127; i++) { float e = fabsf(e4m3(i) - a); if (e < d || (e == d && !(i & 1))) { d = e; best = i; } }
  return s | best;
}
static inline uint32_t two(uint16_t lo, uint16_t hi) { return lo | (uint32_t)hi << 16; }
// A prefetch outside of its tensor would go unnoticed on a GPU, so it reads here.
static inline void prefetch_l2(const void* a) { (void)*(const volatile char*)a; }
static inline float exp2_fast(float x) { return x != x ? __int_as_float(0x7fffffff) : exp2f(x); }   // NaN as the GPU has it
static inline float reciprocal(float x) { return 1.f / x; }
static inline uint32_t pack_f16(float lo, float hi) { return two(to_f16(lo), to_f16(hi)); }
static inline uint32_t pack_bf16(float lo, float hi) { return two(to_bf16(lo), to_bf16(hi)); }
static inline uint32_t pack_e4m3(float lo, float hi) { return to_e4m3(lo) | to_e4m3(hi) << 8; }
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t s) { return __byte_perm(a, b, s); }
static inline float clamped(float f) { return f > 65504.f ? 65504.f : f < -65504.f ? -65504.f : f; }
static inline uint32_t bf16_to_f16(uint32_t x) { return pack_f16(clamped(__uint_as_float(x << 16)), clamped(__uint_as_float(x & 0xffff0000u))); }
#if BF16_NUMBERS
static inline float wide(uint32_t x) { return __uint_as_float(x << 16); }
static inline uint32_t times(uint32_t a, uint32_t b) { return pack_bf16(wide(a) * wide(b), wide(a >> 16) * wide(b >> 16)); }
#else
static inline uint32_t times(uint32_t a, uint32_t b) { return pack_f16(from_f16(a) * from_f16(b), from_f16(a >> 16) * from_f16(b >> 16)); }
#endif
static inline uint32_t least_f16(uint32_t a, uint32_t b) { return pack_f16(fminf(from_f16(a), from_f16(b)), fminf(from_f16(a >> 16), from_f16(b >> 16))); }
static inline uint32_t low_twice(uint32_t w) { return two(w, w); }
static inline uint32_t high_twice(uint32_t w) { return two(w >> 16, w >> 16); }
static inline uint32_t e4m3_low(uint32_t w) { return pack_f16(e4m3(w & 255), e4m3((w >> 8) & 255)); }
static inline uint32_t e4m3_high(uint32_t w) { return e4m3_low(w >> 16); }
static inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  Warp* w = cur->warp; const int b = w->gen & 1; uint32_t* f = w->frag[b][cur->lane];
  f[0] = a0; f[1] = a1; f[2] = a2; f[3] = a3; f[4] = b0; f[5] = b1; memcpy(f + 6, d, 16);
  together(7, 0, [](Warp* w, int b) {
    float A[16][16], B[16][8];
    for (int l = 0; l < 32; l++) {
      int g = l >> 2, t = l & 3; uint32_t* f = w->frag[b][l];
      for (int r = 0; r < 4; r++) for (int h = 0; h < 2; h++) A[g + 8 * (r & 1)][2 * t + h + 8 * (r >> 1)] = from_f16(f[r] >> (16 * h));
      for (int r = 0; r < 2; r++) for (int h = 0; h < 2; h++) B[2 * t + h + 8 * r][g] = from_f16(f[4 + r] >> (16 * h));
    }
    for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) {
      int row = (l >> 2) + 8 * (i >> 1), col = 2 * (l & 3) + (i & 1); float c; memcpy(&c, w->frag[b][l] + 6 + i, 4); double s = c;
      for (int k = 0; k < 16; k++) s += (double)A[row][k] * B[k][col];
      w->out[b][l][i] = (float)s;
    }
  });
  memcpy(d, w->out[b][cur->lane], 16);
}
static inline void load_matrices2(uint32_t (&r)[2], uint32_t a) {
  Warp* w = cur->warp; int b = together(8, a, nothing);
  for (int m = 0; m < 2; m++) { if (w->in[b][8 * m + (cur->lane >> 2)] % 16) fail("unaligned matrix"); r[m] = get<uint32_t>((uint32_t)w->in[b][8 * m + (cur->lane >> 2)] + 4 * (cur->lane & 3)); }
}
