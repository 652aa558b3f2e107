// What an instruction of a warp costs its scheduler on Hopper, for those that widen, turn and multiply keys.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 benchmarks/units.cu -o build/units && build/units
//
// One CTA a multiprocessor, 1 to 4 warps a scheduler, 8 chains a warp that do not wait for each other. Clocks of the
// multiprocessor for an instruction, of one scheduler.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(x) do { cudaError_t e_ = (x); if (e_) { printf("%s, line %d\n", cudaGetErrorString(e_), __LINE__); exit(1); } } while (0)
#define DI __device__ __forceinline__

constexpr int ROUNDS = 256, CHAINS = 8, SHARED_BYTES = 65536;

// A chain: a register and three more, four sums, an address in shared memory.
struct Chain { uint32_t x, more[3]; float d[4]; uint32_t at; };

struct Widen { static constexpr char name[] = "e4m3 pair to f16"; static DI void step(Chain& c) { asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %0; cvt.rn.f16x2.e4m3x2 %0, l;}" : "+r"(c.x)); } };
struct Permute { static constexpr char name[] = "byte permutation"; static DI void step(Chain& c) { asm volatile("prmt.b32 %0, %0, %1, 0x5140;" : "+r"(c.x) : "r"(c.at)); } };
struct Logic { static constexpr char name[] = "logic of three"; static DI void step(Chain& c) { asm volatile("lop3.b32 %0, %0, %1, 0x1c1c1c1c, 0x6a;" : "+r"(c.x) : "r"(c.at)); } };
struct Times { static constexpr char name[] = "f16 product"; static DI void step(Chain& c) { asm volatile("mul.rn.f16x2 %0, %0, %1;" : "+r"(c.x) : "r"(c.at)); } };
struct Turn { static constexpr char name[] = "8 x 8 turned"; static DI void step(Chain& c) { asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(c.x)); } };
struct Shuffle { static constexpr char name[] = "shuffle"; static DI void step(Chain& c) { asm volatile("shfl.sync.bfly.b32 %0, %0, 4, 0x1f, 0xffffffff;" : "+r"(c.x)); } };
struct Multiply {
  static constexpr char name[] = "m16n8k16 product";
  static DI void step(Chain& c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3};" : "+f"(c.d[0]), "+f"(c.d[1]), "+f"(c.d[2]), "+f"(c.d[3]) : "r"(c.x));
  }
};
struct Load { static constexpr char name[] = "16 bytes a lane loaded"; static DI void step(Chain& c) { asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(c.x), "=r"(c.more[0]), "=r"(c.more[1]), "=r"(c.more[2]) : "r"(c.at)); } };
struct Store { static constexpr char name[] = "16 bytes a lane stored"; static DI void step(Chain& c) { asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(c.at), "r"(c.x)); } };
struct LoadTurned { static constexpr char name[] = "four 8 x 8 loaded and turned"; static DI void step(Chain& c) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(c.x), "=r"(c.more[0]), "=r"(c.more[1]), "=r"(c.more[2]) : "r"(c.at)); } };

template <class Op> __global__ void __launch_bounds__(512, 1) run(long long* clocks, uint32_t zero) {
  extern __shared__ __align__(1024) uint8_t memory[];
  for (int i = threadIdx.x; i < SHARED_BYTES / 4; i += blockDim.x) ((uint32_t*)memory)[i] = 0;
  Chain chains[CHAINS];
  const uint32_t own = (uint32_t)__cvta_generic_to_shared(memory) + (threadIdx.x >> 5) * 4096 + (threadIdx.x & 31) * 16;
#pragma unroll
  for (int i = 0; i < CHAINS; i++) chains[i] = {zero + i, {0, 0, 0}, {0.f, 0.f, 0.f, 0.f}, own + 512 * i};
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 4
  for (int round = 0; round < ROUNDS; round++)
#pragma unroll
    for (int i = 0; i < CHAINS; i++) Op::step(chains[i]);
  uint32_t all = 0;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < CHAINS; i++) { all |= chains[i].x | chains[i].more[0] | chains[i].more[1] | chains[i].more[2]; sum += chains[i].d[0]; }
  const long long end = clock64();
  if (threadIdx.x == 0) clocks[blockIdx.x] = all == 1 || sum == 1.f ? 0 : end - begin;   // both are used
}

template <class Op> void measure(long long* clocks) {
  CHECK(cudaFuncSetAttribute(run<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
  printf("%-30s", Op::name);
  for (int warps = 1; warps <= 4; warps++) {
    long long first;
    for (int i = 0; i < 2; i++) run<Op><<<132, 128 * warps, SHARED_BYTES>>>(clocks, 0);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&first, clocks, sizeof first, cudaMemcpyDeviceToHost));
    printf("  %d: %5.2f", warps, (double)first / (ROUNDS * CHAINS * warps));
  }
  printf("\n");
}

int main() {
  long long* clocks;
  CHECK(cudaMalloc(&clocks, 132 * sizeof *clocks));
  printf("instruction; warps a scheduler: clocks\n");
  measure<Widen>(clocks);
  measure<Permute>(clocks);
  measure<Logic>(clocks);
  measure<Times>(clocks);
  measure<Turn>(clocks);
  measure<Shuffle>(clocks);
  measure<Multiply>(clocks);
  measure<Load>(clocks);
  measure<Store>(clocks);
  measure<LoadTurned>(clocks);
}
