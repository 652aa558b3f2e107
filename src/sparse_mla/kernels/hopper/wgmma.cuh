// Warpgroup matrix products of sm_90a, float32 accumulators, f16 operands: d += a b (or d = a b if !keep).
// Only these four shapes are used. Operands in shared memory are 64-bit matrix descriptors.
#pragma once

// 64 heads x 64 keys x 16 dims: query and keys in shared memory, both dim-major.
__device__ __forceinline__ void scores_mma(float (&d)[32], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(keep));
}

// 64 heads x 128 dims x 16 keys: weights in shared memory, keys read across.
template <int FIRST> __device__ __forceinline__ void values_mma_shared(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 1;\n}"
      : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]),
        "+f"(d[FIRST + 4]), "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]),
        "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]), "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]),
        "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]), "+f"(d[FIRST + 15]),
        "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
        "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]),
        "+f"(d[FIRST + 24]), "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]),
        "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]), "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]),
        "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]), "+f"(d[FIRST + 35]),
        "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
        "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]),
        "+f"(d[FIRST + 44]), "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]),
        "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]), "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]),
        "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]), "+f"(d[FIRST + 55]),
        "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
        "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
      : "l"(a), "l"(b), "r"(keep));
}

// The same with the weights in registers.
template <int FIRST> __device__ __forceinline__ void values_mma(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : "+f"(d[FIRST + 0]), "+f"(d[FIRST + 1]), "+f"(d[FIRST + 2]), "+f"(d[FIRST + 3]),
        "+f"(d[FIRST + 4]), "+f"(d[FIRST + 5]), "+f"(d[FIRST + 6]), "+f"(d[FIRST + 7]),
        "+f"(d[FIRST + 8]), "+f"(d[FIRST + 9]), "+f"(d[FIRST + 10]), "+f"(d[FIRST + 11]),
        "+f"(d[FIRST + 12]), "+f"(d[FIRST + 13]), "+f"(d[FIRST + 14]), "+f"(d[FIRST + 15]),
        "+f"(d[FIRST + 16]), "+f"(d[FIRST + 17]), "+f"(d[FIRST + 18]), "+f"(d[FIRST + 19]),
        "+f"(d[FIRST + 20]), "+f"(d[FIRST + 21]), "+f"(d[FIRST + 22]), "+f"(d[FIRST + 23]),
        "+f"(d[FIRST + 24]), "+f"(d[FIRST + 25]), "+f"(d[FIRST + 26]), "+f"(d[FIRST + 27]),
        "+f"(d[FIRST + 28]), "+f"(d[FIRST + 29]), "+f"(d[FIRST + 30]), "+f"(d[FIRST + 31]),
        "+f"(d[FIRST + 32]), "+f"(d[FIRST + 33]), "+f"(d[FIRST + 34]), "+f"(d[FIRST + 35]),
        "+f"(d[FIRST + 36]), "+f"(d[FIRST + 37]), "+f"(d[FIRST + 38]), "+f"(d[FIRST + 39]),
        "+f"(d[FIRST + 40]), "+f"(d[FIRST + 41]), "+f"(d[FIRST + 42]), "+f"(d[FIRST + 43]),
        "+f"(d[FIRST + 44]), "+f"(d[FIRST + 45]), "+f"(d[FIRST + 46]), "+f"(d[FIRST + 47]),
        "+f"(d[FIRST + 48]), "+f"(d[FIRST + 49]), "+f"(d[FIRST + 50]), "+f"(d[FIRST + 51]),
        "+f"(d[FIRST + 52]), "+f"(d[FIRST + 53]), "+f"(d[FIRST + 54]), "+f"(d[FIRST + 55]),
        "+f"(d[FIRST + 56]), "+f"(d[FIRST + 57]), "+f"(d[FIRST + 58]), "+f"(d[FIRST + 59]),
        "+f"(d[FIRST + 60]), "+f"(d[FIRST + 61]), "+f"(d[FIRST + 62]), "+f"(d[FIRST + 63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
