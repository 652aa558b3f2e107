// What the roles of attend.cu share: instructions, number formats, the work of a CTA.
#pragma once

// ---------------------------------------------------------------- instructions
DI void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DI void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
DI uint32_t load_shared1(uint32_t a) { uint32_t v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
DI void store_shared1(uint32_t a, uint32_t x) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
// Without a branch around what only the store needs.
DI void store_global8_if(bool x, void* a, uint2 v) { asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.u32 [%1], {%2,%3};}" ::"r"((uint32_t)x), "l"(a), "r"(v.x), "r"(v.y) : "memory"); }
DI void store_global1_if(bool x, void* a, uint32_t v) { asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u8 [%1], %2;}" ::"r"((uint32_t)x), "l"(a), "r"(v) : "memory"); }
DI void store_global16_if(bool x, void* a, uint4 v) { asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.u32 [%1], {%2,%3,%4,%5};}" ::"r"((uint32_t)x), "l"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
DI void prefetch_l1(const void* a) { asm volatile("prefetch.global.L1 [%0];" ::"l"(a)); }
// Blocks `block` to `block` + 3 of a token's query, HEADS heads from `head` on, to shared memory: a head's 64 dims of a block are 128
// bytes, zeros for heads that do not exist.
DI void copy_query(const TensorMap& map, uint32_t to, int block, int head, int token, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4, %5}], [%6];"
      ::"r"(to), "l"(&map), "r"(0), "r"(head), "r"(block), "r"(token), "r"(barrier) : "memory");
}
// The same to the L2.
DI void prefetch_query(const TensorMap& map, int block, int head, int token) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %1, %2, %3, %4}];"
      ::"l"(&map), "r"(0), "r"(head), "r"(block), "r"(token) : "memory");
}
DI void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// Descriptor of the heads in shared memory, a head's numbers side by side: 128-byte swizzle, 1024 B between 8 heads. Its low half
// says where, in units of 16 bytes, and the other one is always the same.
DI uint32_t dim_major_low(uint32_t a) { return (a & 0x3ffff) >> 4 | 1 << 16; }
DI uint64_t dim_major_of(uint32_t low) { return low | (64ull << 32) | (1ull << 62); }
DI uint64_t dim_major(uint32_t a) { return dim_major_of(dim_major_low(a)); }
DI void values_sync() { asm volatile("bar.sync 6, 256;" ::: "memory"); }   // both warpgroups of values
DI void scores_sync() { asm volatile("bar.sync 7, %0;" ::"n"(128 * GROUPS) : "memory"); }   // all of scores
DI void group_sync(int g) { asm volatile("bar.sync %0, 128;" ::"r"(g + 1) : "memory"); }   // a warpgroup of scores
DI float least_or_nan(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
// Whether `x` holds in any thread of the warpgroup of scores.
DI bool group_any(int g, bool x) {
  uint32_t r;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, 128, p; selp.u32 %0, 1, 0, q;}" : "=r"(r) : "r"((uint32_t)x), "r"(g + 1) : "memory");
  return __any_sync(~0u, r);   // for the compiler: all lanes have the same
}
// What is computed from x from here on is computed here, not before a loop and kept.
template <class T> DI void forget(T& x) { asm volatile("" : "+r"(x)); }
#ifdef EVERY_LANE_ARRIVES
DI void arrive_once(uint32_t b) { arrive(b); }
#else
DI void arrive_once(uint32_t b) { asm volatile("{.reg .pred p; .reg .b64 t; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(b) : "memory"); }
#endif
// By one warp: on the barrier of each CTA of the cluster.
DI void tell_cluster(uint32_t b) {
#ifndef EVERY_LANE_ARRIVES
  if (!one_lane()) return;
#endif
#pragma unroll
  for (int r = 0; r < SPLITS; r++) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote(b, r)) : "memory");
}
DI int lane_number() { int r; asm volatile("mov.u32 %0, %%laneid;" : "=r"(r)); return __shfl_sync(~0u, r, r); }   // a shuffle is not done again, reading the number would be
DI void load_matrices(uint32_t (&x)[4], uint32_t a) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(a) : "memory"); }
DI void store_matrices_turned(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }

// A pair turned back, in the registers that it has: left to the compiler it takes 26 words of spills.
DI void unrotate_pair(float& x, float& y, float co, float si) {
  asm volatile("{.reg .f32 t, u; mul.f32 t, %0, %2; mul.f32 u, %0, %3; fma.rn.f32 %0, %1, %3, t; neg.f32 u, u; fma.rn.f32 %1, %1, %2, u;}"
               : "+f"(x), "+f"(y) : "f"(co), "f"(si));
}

#if BF16_NUMBERS
#define NUMBER "bf16"
constexpr uint32_t ONES = 0x3f803f80;
#else
#define NUMBER "f16"
constexpr uint32_t ONES = 0x3c003c00;
#endif
// d[2 r + e] += the sum of 16 numbers of row g8 + 8 r; ONES: a pair of them.
DI void add_rows(float (&d)[4], const uint32_t (&a)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NUMBER "." NUMBER ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(ONES));
}
// 64 rows x HEADS heads x 16: keys in registers; query or weights in shared memory, a head's 16 numbers side by side. FIRST: of
// the HEADS / 2 sums of a lane in d.
#define FOUR(i) "+f"(d[FIRST + i]), "+f"(d[FIRST + i + 1]), "+f"(d[FIRST + i + 2]), "+f"(d[FIRST + i + 3])
template <int FIRST, int N> DI void keys_mma(float (&d)[N], const uint32_t* a, uint64_t b, int keep) {
#if HEAD_TILES == 8
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." NUMBER "." NUMBER " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20), FOUR(24), FOUR(28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
#elif HEAD_TILES == 4
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." NUMBER "." NUMBER " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : FOUR(0), FOUR(4), FOUR(8), FOUR(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
#else
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." NUMBER "." NUMBER " {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
      : FOUR(0), FOUR(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
#endif
}
#undef FOUR

// Pairs of the numbers that the tensor cores take: f16, or bf16 where values leave f16's range.
DI uint32_t times(uint32_t a, uint32_t b) { uint32_t r; asm("mul.rn." NUMBER "x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
#if BF16_NUMBERS
DI uint32_t numbers_of_bf16(uint32_t x) { return x; }
DI uint32_t numbers_of_f16(uint32_t x) {
  float lo, hi;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(lo), "=f"(hi) : "r"(x));
  return pack_bf16(lo, hi);
}
DI uint32_t pack_numbers(float lo, float hi) { return pack_bf16(lo, hi); }
DI uint32_t numbers_of_ue8m0(uint32_t a, uint32_t b) { return min(a, 254u) << 7 | min(b, 254u) << 23; }
#else
DI uint32_t numbers_of_bf16(uint32_t x) { return bf16_to_f16(x); }
DI uint32_t numbers_of_f16(uint32_t x) { return x; }
DI uint32_t pack_numbers(float lo, float hi) { return pack_f16(lo, hi); }
// Scales above 2^7 are read as 2^7, so that no product leaves f16.
DI uint32_t numbers_of_ue8m0(uint32_t a, uint32_t b) { return least_f16(pack_f16(__uint_as_float(a << 23), __uint_as_float(b << 23)), 0x58005800); }
#endif
// e4m3 pair in the low or high half of a word -> f16 pair.
template <int HIGH> DI uint32_t e4m3_pair(uint32_t w) {
  uint32_t r;
  if (HIGH) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(w));
  else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(w));
  return r;
}

// ---------------------------------------------------------------- work of a CTA
// To the next of COUNT places in turn; the parity is that of the rounds.
template <int COUNT> DI void next_place(int& place, uint32_t& parity) {
  if (COUNT == 2) { parity ^= place; place ^= 1; return; }   // fewer instructions
  const bool wraps = place == COUNT - 1;
  place = wraps ? 0 : place + 1;
  parity ^= wraps;
}
struct Span { int window_tiles, window_keys, compressed_keys, first, last; };

DI Span span_of(const Args& p, int window_keys, int compressed_keys, int rank) {
  Span s;
  s.window_keys = min(max(window_keys, 0), (int)p.a.width);
  s.compressed_keys = min(max(compressed_keys, 0), (int)p.b.width);
  s.window_tiles = (s.window_keys + 63) >> 6;
  const int tiles = s.window_tiles + ((s.compressed_keys + 63) >> 6);
  s.first = rank * tiles / SPLITS; s.last = (rank + 1) * tiles / SPLITS;
  return s;
}
