// What fetching random rows costs alone: kernels that bring the rows of each token to shared memory (or registers) in
// several ways and do nothing with them. Hopper.
//
//   nvcc -arch=sm_90a -O3 -std=c++17 benchmarks/row_copies.cu -o build/row_copies && build/row_copies
//
// One CTA a multiprocessor takes tokens in turn; its warps fill a ring of blocks of 16 rows, another warp frees them. Times are
// microseconds of a launch: CUDA graphs of 32 launches over 8 sets of rows, median of 12. "L2": all rows are among 20,000.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(x) do { cudaError_t e_ = (x); if (e_) { printf("%s, line %d\n", cudaGetErrorString(e_), __LINE__); exit(1); } } while (0)
#define DI __device__ __forceinline__

struct Task { const uint8_t* pool; const int* slots; int tokens, rows, bytes, ring; int* out; };   // rows a token; bytes a row

DI uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DI void barrier_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DI void arrive_and_expect(uint32_t b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
DI void arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory"); }
DI void wait(uint32_t b, uint32_t parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(b), "r"(parity) : "memory");
}
DI bool one_lane() { uint32_t r; asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(r)); return r; }
DI void bulk_copy(uint32_t to, const void* from, int n, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(n), "r"(barrier) : "memory");
}
DI void copy_async(uint32_t to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
DI void copies_arrive(uint32_t b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(b) : "memory"); }
DI void store_shared(uint32_t to, uint4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }

enum Way { LANES, REDUCED, ONE_LANE, REGISTERS, COPY_ASYNC };   // the last two: rows of 528 bytes

// One block of 16 rows; lanes 0 to 15 hold the slots.
template <Way WAY> DI void fetch(const Task& t, const int* slots, int slot, int lane, uint32_t to, uint32_t full) {
  if (WAY == LANES || WAY == REDUCED) {
    if (lane == 0) arrive_and_expect(full, 16 * t.bytes);
    __syncwarp();
  }
  if (WAY == LANES) {                          // the compiler makes a loop over the lanes
    if (lane < 16) bulk_copy(to + lane * t.bytes, t.pool + (int64_t)slot * t.bytes, t.bytes, full);
  } else if (WAY == REDUCED) {                 // addresses in uniform registers
    const uint32_t unit = (uint32_t)slot * (t.bytes / 16);
#pragma unroll
    for (int r = 0; r < 16; r++) {
      const uint32_t u = __reduce_min_sync(~0u, lane == r ? unit : ~0u);
      if (one_lane()) bulk_copy(to + r * t.bytes, t.pool + (uint64_t)u * 16, t.bytes, full);
    }
  } else if (WAY == ONE_LANE) {
    if (one_lane()) {
      arrive_and_expect(full, 16 * t.bytes);
      int own[16];
#pragma unroll
      for (int i = 0; i < 4; i++) *(int4*)(own + 4 * i) = __ldg((const int4*)slots + i);
#pragma unroll
      for (int r = 0; r < 16; r++) bulk_copy(to + r * t.bytes, t.pool + (uint64_t)((uint32_t)own[r] * (t.bytes / 16)) * 16, t.bytes, full);
    }
  } else {                                     // 512 bytes of a row, then the last 16 of all rows
    uint4 v[16], last = {};
#pragma unroll
    for (int r = 0; r < 16; r++) {
      const uint8_t* from = t.pool + (int64_t)__shfl_sync(~0u, slot, r) * t.bytes + lane * 16;
      if (WAY == COPY_ASYNC) copy_async(to + r * t.bytes + lane * 16, from);
      else v[r] = __ldg((const uint4*)from);
    }
    const uint8_t* end = t.pool + (int64_t)slot * t.bytes + 512;
    if (lane < 16) { if (WAY == COPY_ASYNC) copy_async(to + lane * t.bytes + 512, end); else last = __ldg((const uint4*)end); }
    if constexpr (WAY == COPY_ASYNC) {
      copies_arrive(full);
    } else {
#pragma unroll
      for (int r = 0; r < 16; r++) store_shared(to + r * t.bytes + lane * 16, v[r]);
      if (lane < 16) store_shared(to + lane * t.bytes + 512, last);
      arrive(full);
    }
  }
}

template <Way WAY, int WARPS> __global__ void __launch_bounds__(WARPS * 32 + 32, 1) to_shared(Task t) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t base = shared_address(memory), rows = base + 1024;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = t.rows / 16;
  if (threadIdx.x < t.ring) {
    barrier_init(base + 8 * threadIdx.x, WAY == REGISTERS || WAY == COPY_ASYNC ? 32 : 1);
    barrier_init(base + 512 + 8 * threadIdx.x, 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  int n = 0;
  uint32_t sum = 0;
  for (int token = blockIdx.x; token < t.tokens; token += gridDim.x)
    for (int b = 0; b < blocks; b++, n++) {
      const int place = n % t.ring;
      const uint32_t round = (n / t.ring) & 1, full = base + 8 * place, empty = full + 512;
      if (warp == WARPS) {
        wait(full, round);
        sum += *(volatile uint32_t*)(memory + 1024 + place * 16 * t.bytes + lane * 4);
        __syncwarp();
        if (lane == 0) arrive(empty);
      } else if (n % WARPS == warp) {
        const int* slots = t.slots + (int64_t)token * t.rows + 16 * b;
        const int slot = lane < 16 ? __ldg(slots + lane) : 0;
        wait(empty, round ^ 1);
        fetch<WAY>(t, slots, slot, lane, rows + place * 16 * t.bytes, full);
        __syncwarp();
      }
    }
  if (sum == 0x12345) t.out[0] = sum;
}
// Into registers, N rows of a warp under way.
template <int WARPS, int N> __global__ void __launch_bounds__(WARPS * 32, 1) to_registers(Task t) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t sum = 0;
  for (int token = blockIdx.x; token < t.tokens; token += gridDim.x)
    for (int r = warp * N; r < t.rows; r += WARPS * N) {
      const int* slots = t.slots + (int64_t)token * t.rows + r;
      uint4 v[N], last = {};
      int own[N];
#pragma unroll
      for (int i = 0; i < N; i++) own[i] = __ldg(slots + i);
#pragma unroll
      for (int i = 0; i < N; i++) v[i] = lane < t.bytes / 16 ? __ldg((const uint4*)(t.pool + (int64_t)own[i] * t.bytes) + lane) : last;
      if (lane < N && t.bytes > 512) last = __ldg((const uint4*)(t.pool + (int64_t)__ldg(slots + lane) * t.bytes) + 32);
#pragma unroll
      for (int i = 0; i < N; i++) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
      sum ^= last.x ^ last.y ^ last.z ^ last.w;
    }
  if (sum == 0x12345) t.out[0] = sum;
}

constexpr int SETS = 8, ROWS = 640, MOST_TOKENS = 512, LAUNCHES = 4 * SETS;
constexpr int64_t POOL_ROWS = 400000, POOL_BYTES = POOL_ROWS * 528;

struct Case { const char* name; void (*kernel)(Task); int threads, ring; bool any_row; };
struct Pools { uint8_t* rows; int *everywhere, *few, *out; };

double microseconds(const Case& c, const Pools& pools, int tokens, int bytes, bool few) {
  const int shared = c.ring ? 1024 + c.ring * 16 * bytes : 0;
  CHECK(cudaFuncSetAttribute((const void*)c.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  cudaStream_t stream; cudaGraph_t graph; cudaGraphExec_t instance; cudaEvent_t begin, end;
  CHECK(cudaStreamCreate(&stream)); CHECK(cudaEventCreate(&begin)); CHECK(cudaEventCreate(&end));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < LAUNCHES; i++) {
    const int set = i % SETS;
    const Task t = {pools.rows + (few ? 0 : set * POOL_BYTES), (few ? pools.few : pools.everywhere) + (int64_t)set * MOST_TOKENS * ROWS, tokens, ROWS, bytes, c.ring, pools.out};
    c.kernel<<<std::min(tokens, 132), c.threads, shared, stream>>>(t);
  }
  CHECK(cudaStreamEndCapture(stream, &graph)); CHECK(cudaGraphInstantiate(&instance, graph, 0));
  std::vector<float> times;
  for (int i = 0; i < 12; i++) {
    float ms;
    CHECK(cudaEventRecord(begin, stream)); CHECK(cudaGraphLaunch(instance, stream)); CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream)); CHECK(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms * 1000 / LAUNCHES);
  }
  std::sort(times.begin(), times.end());
  return times[6];
}

int main() {
  Pools pools;
  CHECK(cudaMalloc(&pools.rows, SETS * POOL_BYTES)); CHECK(cudaMemset(pools.rows, 1, SETS * POOL_BYTES)); CHECK(cudaMalloc(&pools.out, 4));
  for (int few = 0; few < 2; few++) {
    std::vector<int> slots(SETS * MOST_TOKENS * ROWS);
    uint32_t random = 1;
    for (int& slot : slots) { random = random * 1664525u + 1013904223u; slot = (uint64_t)(random >> 4) * (few ? 20000 : POOL_ROWS) >> 28; }
    int*& to = few ? pools.few : pools.everywhere;
    CHECK(cudaMalloc(&to, slots.size() * 4)); CHECK(cudaMemcpy(to, slots.data(), slots.size() * 4, cudaMemcpyHostToDevice));
  }
#define SHARED(way, warps, ring, any) {#way ", " #warps " warps, ring of " #ring, to_shared<way, warps>, warps * 32 + 32, ring, any}
  const Case cases[] = {
      {"loads into registers, 32 warps", to_registers<32, 4>, 1024, 0, true},
      SHARED(LANES, 4, 8, true), SHARED(LANES, 4, 24, true), SHARED(LANES, 8, 8, true), SHARED(LANES, 16, 16, true),
      SHARED(REDUCED, 4, 16, true), SHARED(REDUCED, 8, 16, true), SHARED(REDUCED, 16, 16, true),
      SHARED(ONE_LANE, 4, 16, true), SHARED(ONE_LANE, 8, 16, true),
      SHARED(REGISTERS, 4, 8, false), SHARED(REGISTERS, 8, 8, false), SHARED(COPY_ASYNC, 4, 16, false), SHARED(COPY_ASYNC, 8, 8, false),
  };
  for (int bytes : {528, 288})
    for (bool few : {false, true}) {
      printf("rows of %d bytes%s, us at 64 / 128 / 256 / 512 tokens of %d rows\n", bytes, few ? " in the L2" : "", ROWS);
      for (const Case& c : cases) {
        if (bytes != 528 && !c.any_row) continue;
        printf("  %-36s", c.name);
        for (int tokens : {64, 128, 256, 512}) printf(" %7.2f", microseconds(c, pools, tokens, bytes, few));
        printf("\n");
      }
    }
}
