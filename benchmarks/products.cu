// What products of 64 rows x 64 columns x 16 cost on Hopper's tensor cores, left operand in registers or in shared memory, alone
// or with conversions of the left operand in between.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 benchmarks/products.cu -o build/products && build/products
//
// One CTA a multiprocessor, 1 to 4 warpgroups, three groups of products under way in each. Clocks of the multiprocessor for a
// product; 32 is the peak.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(x) do { cudaError_t e_ = (x); if (e_) { printf("%s, line %d\n", cudaGetErrorString(e_), __LINE__); exit(1); } } while (0)
#define DI __device__ __forceinline__

constexpr int ROUNDS = 64, SHARED_BYTES = 16384;
#define ACCUMULATORS \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ALL FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20), FOUR(24), FOUR(28)

template <bool REGISTERS> DI void product(float (&d)[32], const uint32_t (&a)[4], uint64_t left, uint64_t right) {
  if (REGISTERS) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACCUMULATORS ", {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : ALL : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " ACCUMULATORS ", %32, %33, 1, 1, 1, 0, 0;" : ALL : "l"(left), "l"(right));
  }
}

// TOGETHER: products that share a left operand and a group.
template <bool REGISTERS, int TOGETHER, bool CONVERT> __global__ void __launch_bounds__(512, 1) run(long long* clocks, uint32_t zero) {
  extern __shared__ __align__(1024) uint8_t memory[];
  for (int i = threadIdx.x; i < SHARED_BYTES / 4; i += blockDim.x) ((uint32_t*)memory)[i] = 0;
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(memory);
  const uint64_t right = (uint64_t)((base & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;   // 128-byte swizzle
  float d[32];
  for (float& x : d) x = 0.f;
  uint32_t a[4][4];
  for (auto& operand : a) for (uint32_t& x : operand) x = zero;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const long long begin = clock64();
  for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      asm volatile("wgmma.wait_group.sync.aligned 2;" ::: "memory");
#pragma unroll
      for (int i = 0; CONVERT && i < 4; i++) {
        asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(a[j][i]) : "h"((uint16_t)(zero + i + round)));
        asm volatile("mul.rn.f16x2 %0, %0, %1;" : "+r"(a[j][i]) : "r"(zero));
      }
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) product<REGISTERS>(d, a[j], right, right + 2 * i);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  const long long end = clock64();
  float sum = 0.f;
  for (float x : d) sum += x;
  if (threadIdx.x == 0) clocks[blockIdx.x] = sum == 1.f ? 0 : end - begin;   // the sum is used
}

template <bool REGISTERS, int TOGETHER, bool CONVERT> void measure(long long* clocks) {
  printf("%-16s %d together, %s", REGISTERS ? "registers" : "shared memory", TOGETHER, CONVERT ? "converted" : "as it is ");
  for (int warpgroups = 1; warpgroups <= 4; warpgroups++) {
    long long first;
    for (int i = 0; i < 2; i++) run<REGISTERS, TOGETHER, CONVERT><<<132, 128 * warpgroups, SHARED_BYTES>>>(clocks, 0);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&first, clocks, sizeof first, cudaMemcpyDeviceToHost));
    printf("  %d: %5.1f", warpgroups, (double)first / (ROUNDS * 4 * TOGETHER * warpgroups));
  }
  printf("\n");
}

int main() {
  long long* clocks;
  CHECK(cudaMalloc(&clocks, 132 * sizeof *clocks));
  printf("left operand; warpgroups: clocks a product\n");
  measure<true, 1, false>(clocks);
  measure<true, 2, false>(clocks);
  measure<true, 1, true>(clocks);
  measure<true, 2, true>(clocks);
  measure<false, 1, false>(clocks);
}
