// What the host hands to every Hopper kernel, see attend.py, and the names of the records.
#pragma once

#ifndef __CUDACC_RTC__
#include <stdint.h>
#else
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#endif

#define KIND_MXFP8 0
#define KIND_NVFP4 1
#define KIND_V4 2
#define DI __device__ __forceinline__

#ifdef EVERY_LANE_ARRIVES     // for racecheck, which takes no arrival for that of a whole warp
constexpr int WARP = 32;
#else
constexpr int WARP = 1;        // arrivals of a warp
#endif

// Where the row of a slot is, counted from the pages, modulo 2^32: page = umulhi(slot, page_mul) >> page_shift, 0 where pages have one row.
struct Places {
  uint32_t num_slots, page_mul, page_shift;
  uint32_t slot_units, page_units;          // row at slot * slot_units + page * page_units, 16-byte units
  uint32_t slot_scales, page_scales, first_scale;   // its scales at first_scale + .., 8-byte units
};
struct KeyArgs {
  const uint8_t* pages;        // first byte of page 0
  const int* indices;          // [T, width] slots
  const int* lengths;          // [T], may be null
  int64_t indices_stride;      // elements between rows of indices
  Places places;
  uint32_t width, pad;
};

struct Args {
  KeyArgs a, b;                // window, compressed (width 0 = none)
  const uint8_t* q;            // bf16 [T, H, 512]
  uint8_t* out;                // bf16 [T, H, 512] or e4m3 [T, G, hpg * 512]
  uint32_t* scales;            // [T, G, 4 * hpg], strides (1, 4 * hpg * A, A)
  float* lse;                  // [T, H], may be null
  float* max_logits;           // [T, H], may be null
  const float* sink;           // [H], may be null
  const int* positions;        // [T], `position_step` words apart (2 for int64)
  const float* rope;           // [rope_rows, 64]
  int64_t q_token_stride, q_head_stride;  // bytes
  int64_t scale_stride;        // A, words
  int tokens, heads, head_blocks, heads_per_group;
  uint32_t block_mul;          // n / head_blocks = umulhi(n, block_mul) for n < 2^28; 0: head_blocks is 1
  int position_step, rope_rows;
  int rotate_query, unrotate_output, query_chunked;
  float scale;
  const uint8_t* zeros;        // 1024 zero bytes
  uint64_t row_policy;         // what the L2 does with rows; few_heads.cu lets it do as usual
};

// The position of a token as it is loaded, 0 without positions. Only `value` waits for it.
struct RawPosition {
  int low, high;               // the same word twice if positions have one

  // Positions that no 32-bit number holds are as good as the nearest that one does.
  DI int value(const Args& p) const {
    if (p.position_step == 1) return low;
    return high < 0 ? -1 : high > 0 || low < 0 ? 0x7fffffff : low;
  }
};
DI const int* position_at(const Args& p, int token) { return p.positions + (int64_t)token * p.position_step; }
DI RawPosition ask_position(const Args& p, int token) {
  RawPosition x = {0, 0};
  if (p.positions) {
    const int* at = position_at(p, token);
    x.low = __ldg(at); x.high = __ldg(at + p.position_step - 1);
  }
  return x;
}
