// What attend.cu and few_heads.cu share: instructions and number formats, rows of tables.
#pragma once

#define INF __int_as_float(0x7f800000)
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// ---------------------------------------------------------------- instructions
DI uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DI uint4 load_shared16(uint32_t a) { uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory"); return v; }
DI uint2 load_shared8(uint32_t a) { uint2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory"); return v; }
DI uint32_t load_shared4(uint32_t a) { uint32_t v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
DI void store_shared16(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
DI void store_shared8(uint32_t a, uint32_t x, uint32_t y) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory"); }
DI void store_shared4(uint32_t a, uint32_t x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DI void store_float(uint32_t a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory"); }
DI void store_float2(uint32_t a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory"); }
DI float load_float(uint32_t a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
DI float2 load_float2(uint32_t a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory"); return v; }
DI float4 load_float4(uint32_t a) { float4 v; asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a) : "memory"); return v; }
DI void store_float4(uint32_t a, float x, float y, float z, float w) { asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory"); }
DI void barrier_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
DI void arrive(uint32_t b) { asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(b) : "memory"); }
DI void arrive_and_expect(uint32_t b, uint32_t bytes) { asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}" ::"r"(b), "r"(bytes) : "memory"); }
DI void wait(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
      ::"r"(b), "r"(parity) : "memory");
}
DI uint32_t uniform_least(uint32_t x) { uint32_t r; asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x)); return r; }
// One lane of the warp, for what one lane does.
DI bool one_lane() {
  uint32_t r;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(r));
  return r;
}
// A row to shared memory; its bytes count on the barrier. One lane calls it: for several the compiler makes a loop.
DI void copy_row(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// The same for all lanes of a warp, which call it with the same values; one of them copies. `policy`: what the L2 does with the row.
DI void copy_row_together(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "{\n.reg .pred q;\nelect.sync _|q, 0xffffffff;\n"
      "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n}"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// Two rows of as many bytes: one choice of a lane less.
DI void copy_two_rows_together(uint32_t to0, uint32_t to1, const void* from0, const void* from1, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "{\n.reg .pred q;\nelect.sync _|q, 0xffffffff;\n"
      "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%2], %4, [%5], %6;\n"
      "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%1], [%3], %4, [%5], %6;\n}"
      ::"r"(to0), "r"(to1), "l"(from0), "l"(from1), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// 4, 8 or 16 bytes, of which `size` are copied and the rest is zero.
template <int N> DI void copy_async(uint32_t to, const void* from, int size = N) {
  if (N == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(N), "r"(size) : "memory");
}
DI void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DI void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// This thread's copies so far arrive on a barrier when they are done.
DI void copies_arrive(uint32_t b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(b) : "memory"); }
DI float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DI float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DI uint32_t pack_f16(float lo, float hi) { uint32_t r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DI uint32_t pack_bf16(float lo, float hi) { uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DI uint32_t pack_e4m3(float lo, float hi) { uint16_t r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }
DI uint32_t remote(uint32_t a, int rank) { uint32_t d; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(rank)); return d; }
// Registers of a thread, instead of the BEFORE that it has at the start.
template <int N, int BEFORE> DI void take_registers() {
  if (N > BEFORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
  if (N < BEFORE) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// Stores seen by now, of other threads too, come before what bulk copies and tensor cores do next.
DI void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What launches before this one wrote is there, and what they read may be overwritten. Without overlap that is so at once.
DI void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next launch may begin; it waits for this one as above.
DI void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// 16 bytes to the shared memory of a CTA of the cluster; they count on a barrier of that CTA.
DI void send4(uint32_t to, float x, float y, float z, float w, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
      ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier) : "memory");
}
// `wait` for what other CTAs send.
DI void wait_for_cluster(uint32_t b, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
      ::"r"(b), "r"(parity) : "memory");
}
// Bytes of this CTA's shared memory to that of a CTA of the cluster; they count on a barrier of that CTA. One lane calls it.
DI void send_block(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
DI void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Orders no memory: with release a barrier of the cluster would wait for everything on its way to global memory.
DI void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DI void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DI void prefetch_l2(const void* a) { asm volatile("prefetch.global.L2 [%0];" ::"l"(a)); }   // 32 bytes at least
// bf16 pair -> f16 pair, saturated to the largest finite f16; NaN stays.
DI uint32_t bf16_to_f16(uint32_t x) {
  uint32_t r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(__uint_as_float(x & 0xffff0000u)), "f"(__uint_as_float(x << 16)));
  return r;
}
DI uint32_t least_f16(uint32_t a, uint32_t b) { uint32_t r; asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }

// ---------------------------------------------------------------- of both bodies
DI int token_of(const Args& p, int item) { return p.block_mul ? __umulhi(item, p.block_mul) : item; }
DI int first_head(const Args& p, int item) { return p.block_mul ? (item - token_of(p, item) * p.head_blocks) * 8 * HEAD_TILES : 0; }
DI uint32_t page_of(const Places& k, uint32_t slot) { return __umulhi(slot, k.page_mul) >> k.page_shift; }
DI uint32_t row_units(const Places& k, uint32_t slot, uint32_t page) { return slot * k.slot_units + page * k.page_units; }
DI uint32_t scale_units(const Places& k, uint32_t slot, uint32_t page) { return k.first_scale + slot * k.slot_scales + page * k.page_scales; }
// By one warp while the launch ahead of this one ends, to the L2: a token's slots (256 of each set), lengths and position. Nothing is read,
// so all of it may still be written.
DI void prefetch_lists(const Args& p, int token, int lane) {
#pragma unroll
  for (int set = 0; set < 2; set++) {
    const KeyArgs& k = set ? p.b : p.a;
    if (8 * lane < k.width) prefetch_l2(k.indices + token * k.indices_stride + 8 * lane);
    if (lane == set && k.lengths) prefetch_l2(k.lengths + token);
  }
  if (lane == 2 && p.positions) prefetch_l2(position_at(p, token));
}
DI const float* rope_row(const Args& p, int position) { return p.rope + (int64_t)min(max(position, 0), p.rope_rows - 1) * 64; }
// A bf16 pair of a query, rotated and rounded to bf16 again.
DI uint32_t turn(uint32_t pair, float c, float s) {
  const float a = __uint_as_float(pair << 16), b = __uint_as_float(pair & 0xffff0000u);
  return pack_bf16(a * c - b * s, a * s + b * c);
}
// The even (odd) ones of eight e2m1 codes as four e4m3 codes of value 2^-6 times theirs.
DI uint32_t e2m1_even(uint32_t w) { return ((w << 2) & 0x1c1c1c1cu) | ((w << 4) & 0x80808080u); }
DI uint32_t e2m1_odd(uint32_t w) { return ((w >> 2) & 0x1c1c1c1cu) | (w & 0x80808080u); }
constexpr uint32_t E2M1_FACTOR = 0x54005400u;   // f16 pair of 2^6
// Eight neighbouring numbers of an output, times w.
DI uint4 bf16_of(const float (&v)[8], float w) { return make_uint4(pack_bf16(v[0] * w, v[1] * w), pack_bf16(v[2] * w, v[3] * w), pack_bf16(v[4] * w, v[5] * w), pack_bf16(v[6] * w, v[7] * w)); }
DI uint2 e4m3_of(const float (&v)[8], float w) { return make_uint2(pack_e4m3(v[0] * w, v[1] * w) | (pack_e4m3(v[2] * w, v[3] * w) << 16), pack_e4m3(v[4] * w, v[5] * w) | (pack_e4m3(v[6] * w, v[7] * w) << 16)); }
// ue8m0 code of the scale of numbers up to `amax`: exponent, one more if the mantissa is not zero.
DI uint32_t scale_code(float amax) { return (__float_as_uint(fmaxf(amax, 1e-4f) * (1.0f / 448.0f)) + 0x7fffff) >> 23; }
DI float unscale(uint32_t code) { return __uint_as_float((254 - code) << 23); }   // a power of two
