// What the 64-head kernels share: instructions, number formats, the work of a CTA, output rows.
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
DI void store_shared1(uint32_t a, uint32_t x) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DI void store_float(uint32_t a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory"); }
DI void store_float2(uint32_t a, float x, float y) { asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(x), "f"(y) : "memory"); }
DI float load_float(uint32_t a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
DI float2 load_float2(uint32_t a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a) : "memory"); return v; }
DI uint32_t load_word(uint32_t a) { uint32_t v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
DI uint64_t load_mask(uint32_t a) { uint64_t v; asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(a) : "memory"); return v; }
DI void store_matrices(uint32_t a, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
DI uint4 load16(const uint8_t* p) { uint4 v; asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v; }
DI uint2 load8(const uint8_t* p) { uint2 v; asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p)); return v; }
DI uint32_t load4(const uint8_t* p) { uint32_t v; asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v; }
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
// Descriptors, 128-byte swizzle. dim-major: 1024 B between groups of 8 rows. Across: 8192 B between 64-dim blocks.
DI uint64_t dim_major(uint32_t a) { return (uint64_t)((a & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
DI uint64_t across(uint32_t a) { return (uint64_t)((a & 0x3ffff) >> 4) | (512ull << 16) | (64ull << 32) | (1ull << 62); }

#include "wgmma.cuh"
// bf16 pair -> f16 pair, saturated to the largest finite f16.
DI uint32_t bf16_to_f16(uint32_t x) {
  float lo = fminf(fmaxf(__uint_as_float(x << 16), -65504.f), 65504.f);
  float hi = fminf(fmaxf(__uint_as_float(x & 0xffff0000u), -65504.f), 65504.f);
  return pack_f16(lo, hi);
}
DI uint32_t times(uint32_t a, uint32_t b) { uint32_t r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
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
// ue8m0 byte -> f16 pair. Scales above 2^7 are read as 2^7, so that no product leaves f16.
DI uint32_t ue8m0_pair(uint32_t byte) { const float f = __uint_as_float(min(byte, 134u) << 23); return pack_f16(f, f); }
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
  if (p.positions) a.position = __ldg(p.positions + (int64_t)token * p.position_step);
  if (p.a.lengths) a.window_keys = __ldg(p.a.lengths + token);
  if (p.b.lengths) a.compressed_keys = __ldg(p.b.lengths + token);
  return a;
}
DI const float* rope_row(const Args& p, int position) { return p.rope + (int64_t)min(max(position, 0), p.rope_rows - 1) * 64; }

// ---------------------------------------------------------------- output
struct OutputRow {             // one head of one token, seen by the four lanes that share it
  uint8_t* data;
  uint8_t* scales;             // of the head's group and token
  int64_t word_stride;         // bytes between words of scales
  int member, hpg;             // head in its group
  bool live;
};

DI OutputRow output_row(const Args& p, int token, int head) {
  OutputRow r;
  const int hpg = p.heads_per_group, group = head / hpg, member = head - group * hpg;
  const int64_t start = ((int64_t)token * p.heads + (OUT_CHUNKED ? group * hpg : head)) * 512 + (OUT_CHUNKED ? member * 32 : 0);
  r.data = p.out + start * (FP8_OUTPUT ? 1 : 2);
  r.scales = (uint8_t*)p.scales + ((int64_t)group * 4 * hpg * p.scale_stride + token) * 4;
  r.word_stride = p.scale_stride * 4;
  r.member = member; r.hpg = hpg; r.live = head < p.heads;
  return r;
}
DI void store_scale(const OutputRow& r, int block, uint32_t byte) {
  const int number = OUT_CHUNKED ? block * r.hpg + r.member : r.member * 16 + block;
  r.scales[(number >> 2) * r.word_stride + (number & 3)] = (uint8_t)byte;
}
DI void unrotate(float (&v)[8], const float* table, int group, int q) {   // group 0 or 1 of the last 64 dims
#pragma unroll
  for (int u = 0; u < 2; u++) {
    const float2 c = __ldg((const float2*)(table + 16 * group + 8 * u + 2 * q)), s = __ldg((const float2*)(table + 32 + 16 * group + 8 * u + 2 * q));
    const float a0 = v[4 * u], b0 = v[4 * u + 1], a1 = v[4 * u + 2], b1 = v[4 * u + 3];
    v[4 * u] = a0 * c.x + b0 * s.x; v[4 * u + 1] = b0 * c.x - a0 * s.x;
    v[4 * u + 2] = a1 * c.y + b1 * s.y; v[4 * u + 3] = b1 * c.y - a1 * s.y;
  }
}
// One block of 32 dims times w: a lane holds dims 4q .. 4q+3 and 16+4q .. 16+4q+3; neighbours swap to store 8 in a
// row. Returns the byte of the block's scale.
DI uint32_t store_block(const OutputRow& r, const float (&v)[8], float w, int block, int q) {
  const bool odd = q & 1;
  const int dim = odd ? 12 + 4 * q : 4 * q;
  uint8_t* to = r.data + (block * (OUT_CHUNKED ? r.hpg * 32 : 32) + dim) * (FP8_OUTPUT ? 1 : 2);
  if (!FP8_OUTPUT) {
    const uint32_t x0 = pack_bf16(v[0] * w, v[1] * w), x1 = pack_bf16(v[2] * w, v[3] * w), y0 = pack_bf16(v[4] * w, v[5] * w), y1 = pack_bf16(v[6] * w, v[7] * w);
    const uint32_t g0 = __shfl_xor_sync(~0u, odd ? x0 : y0, 1), g1 = __shfl_xor_sync(~0u, odd ? x1 : y1, 1);
    if (r.live) *(uint4*)to = odd ? make_uint4(g0, g1, y0, y1) : make_uint4(x0, x1, g0, g1);
    return 0;
  }
  float amax = fmaxf(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))), fmaxf(fmaxf(fabsf(v[4]), fabsf(v[5])), fmaxf(fabsf(v[6]), fabsf(v[7]))));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1)); amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
  const uint32_t bits = __float_as_uint(fmaxf(amax * w, 1e-4f) * (1.0f / 448.0f));
  const uint32_t byte = (bits + 0x7fffff) >> 23;            // exponent, one more if the mantissa is not zero
  const float f = __uint_as_float((254 - byte) << 23) * w;  // the first factor is a power of two
  const uint32_t x = pack_e4m3(v[0] * f, v[1] * f) | (pack_e4m3(v[2] * f, v[3] * f) << 16);
  const uint32_t y = pack_e4m3(v[4] * f, v[5] * f) | (pack_e4m3(v[6] * f, v[7] * f) << 16);
  const uint32_t got = __shfl_xor_sync(~0u, odd ? x : y, 1);
  if (r.live) *(uint2*)to = odd ? make_uint2(got, y) : make_uint2(x, got);
  return byte;
}
