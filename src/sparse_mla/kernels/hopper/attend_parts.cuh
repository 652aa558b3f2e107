// What the roles of attend.cu share: instructions, number formats, the work of a CTA.
#pragma once

// ---------------------------------------------------------------- instructions
DI uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DI void barrier_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
DI void arrive(uint32_t b) { asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(b) : "memory"); }
DI void wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
      ::"r"(b), "r"(parity) : "memory");
}
DI void fence_tensor() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DI void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DI void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
DI uint4 load_shared16(uint32_t a) { uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory"); return v; }
DI void store_shared16(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
DI void store_shared8(uint32_t a, uint32_t x, uint32_t y) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory"); }
DI void store_shared4(uint32_t a, uint32_t x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DI void store_float(uint32_t a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory"); }
DI void store_float2(uint32_t a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory"); }
DI float load_float(uint32_t a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
DI float2 load_float2(uint32_t a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory"); return v; }
DI uint32_t load_word(uint32_t a) { uint32_t v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
template <int N> DI void copy_async(uint32_t to, const void* from) {
  if (N == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(N) : "memory");
}
DI void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DI void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
DI float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DI uint32_t pack_f16(float lo, float hi) { uint32_t r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DI uint32_t pack_bf16(float lo, float hi) { uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DI uint32_t pack_e4m3(float lo, float hi) { uint16_t r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }
DI uint32_t remote(uint32_t a, int rank) { uint32_t d; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(rank)); return d; }
DI float load_remote(uint32_t a, int rank) { float v; asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote(a, rank))); return v; }
DI void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DI void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Descriptor of 64 heads in shared memory, a head's numbers side by side: 128-byte swizzle, 1024 B between 8 heads.
DI uint64_t dim_major(uint32_t a) { return (uint64_t)((a & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
DI void group_sync(int g) { asm volatile("bar.sync %0, 128;" ::"r"(g + 1) : "memory"); }   // a warpgroup of scores
// Whether `x` holds in any thread of the warpgroup of scores.
DI bool group_any(int g, bool x) {
  uint32_t r;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, 128, p; selp.u32 %0, 1, 0, q;}" : "=r"(r) : "r"((uint32_t)x), "r"(g + 1) : "memory");
  return r;
}
// One lane of the warp, for what one lane does.
DI bool one_lane() {
  uint32_t r;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(r));
  return r;
}
// What is computed from x from here on is computed here, not before a loop and kept.
DI void forget(int& x) { asm volatile("" : "+r"(x)); }
#ifdef EVERY_LANE_ARRIVES
DI void arrive_once(uint32_t b) { arrive(b); }
#else
DI void arrive_once(uint32_t b) { asm volatile("{.reg .pred p; .reg .b64 t; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(b) : "memory"); }
#endif
DI int lane_number() { int r; asm volatile("mov.u32 %0, %%laneid;" : "=r"(r)); return __shfl_sync(~0u, r, r); }   // a shuffle is not done again, reading the number would be
DI void store_matrices_turned(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
DI uint2 load_shared8(uint32_t a) { uint2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory"); return v; }
DI void arrive_and_expect(uint32_t b, uint32_t bytes) { asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(b), "r"(bytes) : "memory"); }
DI void copies_arrive(uint32_t b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory"); }   // when this thread's copies are there
DI uint32_t least_f16(uint32_t a, uint32_t b) { uint32_t r; asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI uint32_t least(uint32_t x) { uint32_t r; asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x)); return r; }
// A row to shared memory; its bytes count on the barrier. All lanes call it alike, one lane copies.
DI void copy_row(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred q;\nelect.sync _|q, 0xffffffff;\n"
      "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

#if BF16_NUMBERS
#define NUMBER "bf16"
#else
#define NUMBER "f16"
#endif
// 64 rows x 64 heads x 16: keys in registers; query or weights in shared memory, a head's 16 numbers side by side.
template <int FIRST, int N> __device__ __forceinline__ void keys_mma(float (&d)[N], const uint32_t* a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." NUMBER "." NUMBER " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]), "+f"(d[FIRST + 4]), "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]),
        "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]), "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]), "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]), "+f"(d[FIRST + 15]),
        "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]), "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]),
        "+f"(d[FIRST + 24]), "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]), "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]), "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// bf16 pair -> f16 pair, saturated to the largest finite f16; NaN stays.
DI uint32_t bf16_to_f16(uint32_t x) {
  uint32_t r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(__uint_as_float(x & 0xffff0000u)), "f"(__uint_as_float(x << 16)));
  return r;
}
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
// Four e2m1 codes (low 16 bits) -> the high bytes of four f16; their low bytes are zero.
DI uint32_t e2m1_high_bytes(uint32_t codes) {
  const uint32_t magnitude = __byte_perm(0x3e3c3800u, 0x46444240u, codes & 0x7777u);
  uint32_t sign;               // 0xff where a code's bit 3 is set (prmt replicates the top bit then), else 0x80
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(sign) : "r"(0x80808080u), "r"(codes));
  return magnitude | ((sign << 1) & 0x80808080u);
}

// ---------------------------------------------------------------- numbers
DI int page_of(const KeyArgs& k, uint32_t slot) { return k.page_mul ? __umulhi(slot, k.page_mul) >> k.page_shift : slot; }

// ---------------------------------------------------------------- work of a CTA
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

// What a token's first step depends on, asked for one token ahead.
struct Ahead { int position, window_keys, compressed_keys; };

DI Ahead look_ahead(const Args& p, int item) {
  const int token = p.head_blocks == 1 ? item : item / p.head_blocks;
  Ahead a = {0, (int)p.a.width, (int)p.b.width};
  if (item >= p.tokens * p.head_blocks) return a;
  a.position = position_of(p, token);
  if (p.a.lengths) a.window_keys = __ldg(p.a.lengths + token);
  if (p.b.lengths) a.compressed_keys = __ldg(p.b.lengths + token);
  return a;
}
DI const float* rope_row(const Args& p, int position) { return p.rope + (int64_t)min(max(position, 0), p.rope_rows - 1) * 64; }
