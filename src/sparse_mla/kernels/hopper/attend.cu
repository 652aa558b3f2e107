// Mega attention for Hopper (sm_90a): query RoPE, sparse attention over a window and a compressed set of paged
// quantised rows, sink, inverse RoPE, FP8 or bf16 output, in one launch. One CTA works on one token's block of 64, 32 or 16
// heads at a time ("token" below).
//
// Budget of a CTA (checked by tests/hopper/test_budget.py), of 64 / 32 / 16 heads:
//   threads 512 / 640 / 640 = 2 warpgroups of values at 176 / 120 / 96 registers, 2 / 3 / 3 of scores at 80 / 80 / 96
//   spills at most 80 bytes with FP8 output and without lse (else up to 174): what a token needs once, and for 13 of 25 pairs of
//   records a word of every tile; at most 12 bytes with 32 heads, 40 with 16
//   shared memory 232,448 bytes, all there is: query f16 64 / 32 / 2 x 16 KB, weights f16 2 x 8 / 3 x 4 / 3 x 2 KB, raw rows and
//   f16 scales of 4 / 5 / 5 tiles (one less with 584-byte rows, and where scales lie apart and there is no room), the rest
//   barriers, references and sums
//   tile of 64 keys: tensor cores 2048 / 1024 / 512 clocks; widening 800 clocks of conversion pipe; shared memory with 64 heads
//   1.9 k clocks at 128 B (scores 512, values 512, raw rows in 264, out 2 x 264, weights 64); up to 4 tiles of rows in flight
//
// Every matrix product has keys in registers as its left operand, so a tile is never stored widened:
//   scores    groups of 4 warps take turns. A lane holds 16 dims of two rows per 64-dim block, widens them, and the
//             tensor cores give (keys x heads) scores. Weights go to shared memory, heads x keys, and the scales of the
//             tile, f16, beside its rows. One warp of each group looks up where later rows are. The group whose tile is a
//             token's first has the query copied while the others work on the tiles before, or, where there is room for two
//             queries, one tile ahead; it turns half of it, the group of the tile after the other half. It is in the L2 by then,
//             which is asked for it when the rows of that tile are looked up. Scores of the tile after wait for those of a token's first.
//   values    warpgroup g adds up (dims x heads) of all tiles for dims 256 g .. 256 g + 255. A lane reads 8 dims of four
//             keys, pairs up two keys of a dim, widens them, and multiplies by the weights. Between its products a warp
//             copies 8 rows of the tile AHEAD further, one bulk copy each.
// The reference of a head's weights lies 2^10 below its maximum, so that weights down to 2^-24 of the largest are normal
// f16. It moves only when the maximum grew by more than 2^5, so sums are almost never rescaled: a tile's weights are found with
// the old one, and once more if one of them is above 2^15. The tile after learns it from the tile before (SETTLED). The sum of
// the weights is that of the rounded ones, a product with ones, shared out over the warps of values; a call that wants
// lse, and weights of bf16, get the sum from before they were rounded instead. SPLITS > 1: a cluster shares one token's tiles. Each CTA
// finishes the output of some heads: sums for the others go there from its own shared memory by bulk copies, which count on a
// barrier, mostly to where the query was. What it was sent it adds in rank order.
//
// Orders. Dims of the query inside 16: step i of a 64-dim block has dim 16 t + 4 i + 2 h + e in place 8 h + 2 t + e; where one of the sets is
// NVFP4 dim 16 t + 8 (i >> 1) + (i & 1) + 4 h + 2 e, for even and odd codes of a word are widened apart.
// Keys of a tile: row 16 t + 8 h + 4 e + s is in step s of the values, place 8 h + 2 t + e; score warp s has these 16 rows.
// 16 rows share a pad of 32 bytes, so that the reads of both meet different banks.
//
// Macros: HEAD_TILES (8, 4 or 2, of 8 heads), A_KIND, B_KIND (record of the window and of the compressed set), X_ROW_UNITS (16-byte units between rows),
// X_SCALE_STRIDE (bytes between rows of scales), SPLITS, FP8_OUTPUT, OUT_CHUNKED, WITH_LSE, WITH_MAX, BF16_NUMBERS (query, keys
// and weights are bf16 for the tensor cores: nothing saturates, weights keep 8 bits, widening takes three more
// instructions a pair).

#include "arguments.cuh"
#include "instructions.cuh"

#define HAS_V4 (A_KIND == KIND_V4 || B_KIND == KIND_V4)
#define HAS_NVFP4 (A_KIND == KIND_NVFP4 || B_KIND == KIND_NVFP4)

// Rows of a tile in shared memory, scales behind the data, PITCH bytes apart.
template <int KIND> struct Raw;
template <> struct Raw<KIND_MXFP8> { static constexpr int DATA = 512, SCALES = 16, PITCH = DATA + SCALES; };
template <> struct Raw<KIND_NVFP4> { static constexpr int DATA = 256, SCALES = 32, PITCH = DATA + SCALES + 16; };
template <> struct Raw<KIND_V4> { static constexpr int DATA = 448 + 2 * 64, SCALES = 8, PITCH = DATA + 16; };
template <int KIND> DI constexpr int row_at(int row) { return row * Raw<KIND>::PITCH + (row >> 4) * 32; }
// f16 scales of a tile behind its rows: [part][score warp 4][quarter 4][g8 8] pairs (rows h = 0 and 1) of the block
// of dims number `quarter` x parts + part; blocks of 32 dims in 4 parts, of 16 dims in 8.
constexpr int PART = 544;
template <int KIND> DI constexpr int scales_at() { return row_at<KIND>(63) + Raw<KIND>::PITCH; }

constexpr bool APART = A_ROW_UNITS * 16 != A_SCALE_STRIDE || B_ROW_UNITS * 16 != B_SCALE_STRIDE;   // scales and data of a row
constexpr int HEADS = 8 * HEAD_TILES;         // of a block
constexpr int GROUPS = HEAD_TILES == 8 ? 2 : 3;            // warpgroups of scores
constexpr int QUERIES = HEAD_TILES == 2 ? 2 : 1;           // of a token, and of the next one
constexpr int STAGES = HEAD_TILES == 8 ? (HAS_V4 || APART ? 3 : 4) : HAS_V4 || (HEAD_TILES == 4 && (APART || WITH_MAX)) ? 4 : 5;
constexpr int AHEAD = STAGES - 1;   // so many tiles after the one whose values are added up rows are copied
constexpr int STAGE = scales_at<HAS_V4 ? KIND_V4 : KIND_MXFP8>() + 4 * PART - 32;   // the last part needs no pad
static_assert(scales_at<KIND_NVFP4>() + 8 * PART <= STAGE, "a tile of the smallest rows");
// Several tiles, and tokens of one tile each, are under way: what is kept of so many.
constexpr int TILES = GROUPS == 2 ? 8 : 16, KEPT = GROUPS == 2 ? 2 : 4, TURNS = GROUPS == 2 ? 4 : 8;
constexpr int BLOCK = HEADS * 128;            // bytes of 64 numbers of each head: dims of the query, or weights of a tile
constexpr int TABLE = HEADS * 4;              // bytes of a number of each head
constexpr int QUERY_BYTES = 8 * BLOCK;
constexpr int QUERY = 0, WEIGHTS = QUERIES * QUERY_BYTES, RAW = WEIGHTS + GROUPS * BLOCK;
// SPLITS > 1: the sums of a split token. Piece 2 c + e of a warp's are those of heads 8 c + 2 t + e, 8 dims a lane: 1 KB. CTA r finishes
// pieces r SHARE and following, of all warps.
constexpr int PIECES = 2 * HEAD_TILES, SHARE = PIECES / SPLITS;
constexpr int ROUND = SHARE >= 4 ? 2 : 1, ROUNDS = SHARE / ROUND;   // pieces go on their way so many at once
constexpr int PARTS_BYTES = 8192 * SHARE * (SPLITS - 1);   // that a CTA gets, or sends
constexpr int SHARE_HEADS = SHARE > 2 ? 4 * SHARE : 8;     // heads of the tiles that pieces are from
constexpr int FINAL_BYTES = 16 * SHARE_HEADS; // [head of the share] maximum, sum, true maximum, unused
constexpr int SENT_END = 2 * PARTS_BYTES + SPLITS * FINAL_BYTES;   // of what is sent and what comes
constexpr int ROWS_END = RAW + STAGES * STAGE;
constexpr int ANGLES = ROWS_END < SENT_END ? SENT_END : ROWS_END;   // [token, TURNS][64] f32 of the rope table
constexpr int SINKS = ANGLES + TURNS * 256;   // [128] f32, log2 units
constexpr int SUMS = SINKS + 512;             // of a token's weights: WITH_LSE [group][head] f32, else [token parity 2][warp of values 8][16]
constexpr int SUM_REFERENCE = SUMS + (WITH_LSE ? GROUPS * TABLE : 1024);      // WITH_LSE: [group][head] f32, what they refer to
constexpr int REFERENCE = SUM_REFERENCE + (WITH_LSE ? GROUPS * TABLE : 0);    // [token, KEPT][head] f32, what weights refer to, log2 units
constexpr int TRUE_MAX = REFERENCE + KEPT * TABLE;         // WITH_MAX: [token, KEPT][head] f32, log2 units
constexpr int RESCALE = TRUE_MAX + (WITH_MAX ? KEPT * TABLE : 0);   // [group][head] f32
constexpr int RAW_FULL = RESCALE + GROUPS * TABLE;         // [stage]
constexpr int FULL = RAW_FULL + 8 * STAGES;                // [group], weights
constexpr int WEIGHTS_EMPTY = FULL + 8 * GROUPS;           // [group], and the rows of that tile are read
constexpr int SETTLED = WEIGHTS_EMPTY + 8 * GROUPS;        // [group], the scores of its tile are done, the reference is final
constexpr int HALF_READ = SETTLED + 8 * GROUPS;            // [group], the products with the first half of the query are done
constexpr int ALL_READ = HALF_READ + 8 * GROUPS;           // [group], ... with all of it
constexpr int QUERY_RAW = ALL_READ + 8 * GROUPS;           // [token parity 2][half 2], bf16 values of blocks 0 to 3 and 4 to 7 have come
constexpr int QUERY_FULL = QUERY_RAW + 32;    // [token parity 2]: with three groups one may come to it when the token before has not passed
constexpr int SUMS_READ = QUERY_FULL + 16;    // [token parity 2]
constexpr int PARTS_ROOM = SUMS_READ + 16;    // SPLITS > 1: all of the cluster have room for sums
constexpr int PARTS_FULL = PARTS_ROOM + 8;    // [round], what the cluster sends has come
constexpr int VALID = SUMS_READ + 16 + (SPLITS > 1 ? 8 + 8 * ROUNDS : 0);   // [tile 8] u64, one bit a key
constexpr int HOW = VALID + 64;               // [tile 8][8 rows] u8: 0 window, 1 compressed set | MISSING: not all of them exist; or NO_TILE
constexpr uint32_t MISSING = 2, NO_TILE = 4 | MISSING;
constexpr int WHICH = HOW + 64;               // [tile, TILES][2] u32, see Walk::word; token and heads
constexpr int GREW = WHICH + 8 * TILES;       // [group] u32, sums must be rescaled
constexpr int MET = GREW + 4 * GROUPS;        // [token, KEPT] u32, a tile had a key
constexpr int UNITS = (MET + 4 * KEPT + 15) & ~15;   // [stage][64] u32, where its rows are, 16-byte units; ~0: nowhere
constexpr int SLOTS = UNITS + 256 * STAGES;   // [group][64] int
constexpr int WALK = SLOTS + 256 * GROUPS;    // [group] 32 bytes
constexpr int SCALE_UNITS = WALK + 32 * GROUPS;   // [stage][64] u32, where scales are that lie apart, 8-byte units
constexpr int SHARED_BYTES = 232448;     // what a multiprocessor has
static_assert(SCALE_UNITS + (APART ? 256 * STAGES : 0) <= SHARED_BYTES, "shared memory");
constexpr int MESSAGE = 1024 * ROUND;         // of a warp to a CTA
constexpr int OUTBOX = ANGLES - PARTS_BYTES;  // [round][other CTA][warp of values]: for that CTA, where rows were
constexpr int INBOX = QUERY;                  // the same, from that CTA
constexpr bool EARLY = PARTS_BYTES <= QUERIES * QUERY_BYTES;   // it may come when the cluster's scores are done, else when its values are
constexpr int FINAL_OUT = OUTBOX - SPLITS * FINAL_BYTES;   // [rank] those for that CTA
constexpr int FINAL = UNITS;                  // [rank] those from that CTA
static_assert(SPLITS == 1 || INBOX + PARTS_BYTES <= FINAL_OUT, "room for sums");
static_assert(SPLITS == 1 || SPLITS == 2 || SPLITS == 4, "each CTA finishes as many pieces; eight take longer than four");
static_assert(SPLITS * FINAL_BYTES <= WALK - UNITS, "room for statistics");

constexpr int THREADS = 128 * (2 + GROUPS);
constexpr int ENTRY_REGISTERS = 65536 / THREADS & ~7;   // of a thread at the start
#if HEAD_TILES == 8
#define VALUES_REGISTERS 176
#define SCORES_REGISTERS 80
#elif HEAD_TILES == 4
#define VALUES_REGISTERS 120
#define SCORES_REGISTERS 80
#else
#define VALUES_REGISTERS 96
#define SCORES_REGISTERS 96
#endif
static_assert(2 * VALUES_REGISTERS + GROUPS * SCORES_REGISTERS <= (2 + GROUPS) * ENTRY_REGISTERS, "registers of a CTA");
constexpr float ABOVE = 10.f;    // of the largest weight over its reference, log2, when that moves
constexpr float MOST = 15.f;     // ... and at most
constexpr float TOP_WEIGHT = 32768.f;    // 2^MOST

// How the query lies in device memory, as the TMA takes it (CUtensorMap); the host makes it.
struct __align__(64) TensorMap { uint64_t words[16]; };
// What rows that do not exist are read from; the host knows where it is, here its address would come from device memory.
__device__ __align__(16) uint8_t zero_row[1024];

#include "attend_parts.cuh"
#include "attend_rows.cuh"
#include "attend_query.cuh"
#include "attend_values.cuh"
#include "attend_scores.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Args p, const __grid_constant__ TensorMap query_map) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), group = warp >> 2, w = warp & 3, lane = lane_number();
  const int rank = SPLITS == 1 ? 0 : blockIdx.x % SPLITS, item0 = blockIdx.x / SPLITS, item_step = gridDim.x / SPLITS;
  if (tid == 0) {
    prefetch_map(query_map);
    for (int i = 0; i < STAGES; i++) { barrier_init(base + RAW_FULL + 8 * i, HAS_V4 ? 1 + 64 : 1); }
    for (int i = 0; i < GROUPS; i++) { barrier_init(base + FULL + 8 * i, 4 * WARP); barrier_init(base + WEIGHTS_EMPTY + 8 * i, 8 * WARP); barrier_init(base + SETTLED + 8 * i, 4 * WARP); barrier_init(base + HALF_READ + 8 * i, 4 * WARP); barrier_init(base + ALL_READ + 8 * i, 4 * WARP); }
    for (int i = 0; i < 4; i++) barrier_init(base + QUERY_RAW + 8 * i, 1);
    for (int i = 0; i < 2; i++) { barrier_init(base + QUERY_FULL + 8 * i, 8 * WARP); barrier_init(base + SUMS_READ + 8 * i, 8 * WARP); }
    if (SPLITS > 1) {
      barrier_init(base + PARTS_ROOM, (EARLY ? 1 : 2) * SPLITS * WARP);
      for (int i = 0; i < ROUNDS; i++) {
        barrier_init(base + PARTS_FULL + 8 * i, 1);
        arrive_and_expect(base + PARTS_FULL + 8 * i, PARTS_BYTES / ROUNDS + (i == 0 ? (SPLITS - 1) * FINAL_BYTES : 0));
      }
    }
    fence_barriers();
  }
  if (warp == 1 && item0 < p.tokens * p.head_blocks) prefetch_lists(p, token_of(p, item0), lane);
  __syncthreads();
  if (SPLITS > 1) cluster_arrive_relaxed();   // the others may arrive on these barriers
  if (group < 2) {
    take_registers<VALUES_REGISTERS, ENTRY_REGISTERS>();
    add_values(p, base, group, w, lane, rank, item0, item_step);
  } else {
    take_registers<SCORES_REGISTERS, ENTRY_REGISTERS>();
    Scores scores{p, query_map, base, group - 2, w, lane, lane >> 2, lane & 3, p.scale * LOG2E, {0.f, 0.f}, {0.f, 0.f}, false, 0, group - 2, 0, rank, item_step, false};
    scores.run(item0);
    let_next_launch_begin();   // not sooner: a different kernel that is ready from the start on begins 4 us late
    if (SPLITS > 1) {
      cluster_wait();
      scores_sync();           // all are done with the query, and have their slots
      if (warp == 8) tell_cluster(base + PARTS_ROOM);
      cluster_arrive_relaxed();
      cluster_wait();
    }
  }
}
