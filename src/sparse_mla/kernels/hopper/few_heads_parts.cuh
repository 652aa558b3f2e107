// Instructions and number formats of few_heads.cu.
#pragma once

#include "arguments.cuh"
#include "instructions.cuh"

// ---------------------------------------------------------------- instructions
DI uint32_t load_shared2(uint32_t a) { uint16_t v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a) : "memory"); return v; }
DI void load_matrices2(uint32_t (&r)[2], uint32_t a) { asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory"); }
// A value that all lanes of the warp agree on, known as such to the compiler.
DI int uniform(int x) { int r; asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x)); return r; }
template <int ID, int COUNT = 256> DI void meet() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory"); }
// Meets like `meet` and says whether any thread passed true.
template <int ID> DI bool meet_or(bool x) {
  int r;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.or.pred q, %2, 256, p;\nselp.s32 %0, 1, 0, q;\n}" : "=r"(r) : "r"((int)x), "n"(ID) : "memory");
  return r;
}
// Until this thread's copies are done.
DI void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// d += a b for 16 rows x 8 columns x 16.
DI void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DI uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
DI uint32_t times(uint32_t a, uint32_t b) { uint32_t r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI uint32_t low_twice(uint32_t w) { uint32_t r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(w)); return r; }
DI uint32_t high_twice(uint32_t w) { uint32_t r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(w)); return r; }
// e4m3 pair in the low or high half of a word -> f16 pair.
DI uint32_t e4m3_low(uint32_t w) { uint32_t r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(w)); return r; }
DI uint32_t e4m3_high(uint32_t w) { uint32_t r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(w)); return r; }
// ---------------------------------------------------------------- numbers
// Byte number N of two words of ue8m0 scales -> f16 pair. Scales above 2^7 are read as 2^7, so that no product leaves f16.
template <int N> DI float ue8m0(uint32_t w) { return __uint_as_float((N == 3 ? w >> 1 : w << (23 - 8 * N)) & 0x7f800000u); }
template <int N> DI uint32_t ue8m0_pair(uint32_t a, uint32_t b) { return least_f16(pack_f16(ue8m0<N>(a), ue8m0<N>(b)), 0x58005800); }
