// Mega attention for Hopper in blocks of 8 heads: the contract and arguments of attend.cu, but keys stand on the M side
// of mma.sync and no key is widened in shared memory: raw bytes go from shared memory into registers, are converted
// there and multiplied. One CTA works on one item at a time and stays for the next one: item i is token i / head_blocks
// and its block i % head_blocks ("token" below), the last of them maybe in part.
//
// Keys come in blocks of 16 (of one set each) and tiles of 8 blocks; a ring of blocks lies in shared memory. Roles:
//   scores    warps 0..7: warp w scores block w of a tile, S^T [16 keys x heads] = K Q^T, and writes weights P^T. They
//             meet once a tile. Weights are relative to a running maximum that moves only when it grew by more than
//             2^5; only then they meet two more times and the values role rescales.
//   values    warps 8..15: warp w owns 64 output dims, O^T [64 x heads] += V^T P^T over the blocks of a tile, and
//             writes them.
//   producers warps 16..19: one bulk copy a row into the ring, as far ahead as it has room, also for the next token.
// Only scores and producers look at lengths; the value role is told each tile's Work. While rows are copied any load takes
// as long as a tile, so what comes next is asked for early, into shared memory: the slots of the next tile by the producers;
// the lengths, position, angles and query of the next token by the scores.
// A row is copied by one lane, from an address that it reads from shared memory: six instructions a row, no loop over lanes.
// A block goes back to the producers after a fence: reads that an arrival alone orders may come after the next copy's writes.
// SPLITS > 1: a cluster shares the blocks of one token. Each CTA sends its partial sums to the CTA that writes those
// outputs, which adds them in rank order. A barrier there counts the bytes: a barrier of the cluster with release would
// wait for everything on its way to global memory.
//
// Budget of a CTA (checked by tests/hopper/test_few_heads.py):
//   threads 640: 8 score warps, 8 value warps, 4 producer warps; registers by role, see below
//   spills none
//   tile of 128 rows of 528 bytes, each scheduler: conversions 1,300 clocks (512 of 2.5), products 900 (128
//   of 7), about 2,300 issue slots; HBM needs 3,500 clocks
//
// Fragments (lane = 4 g + t)
//   scores   A rows g and g + 8 are keys 2 pi(g) and 2 pi(g) + 1, pi swaps bits 0 and 1: no bank conflicts. Of each
//            64 dims a lane holds 16 t .. 16 t + 15, four k16 steps. With e2m1 rows each 8 dims are in the order
//            0 2 4 6 1 3 5 7 (the same for query and keys).
//   values   A rows g and g + 8 of m tile i are dims 8 g + 2 i and 8 g + 2 i + 1 of the warp's 64; k is the key.
//            So a lane ends up with 8 consecutive dims of heads 2 t and 2 t + 1.
// Scales become f16 once, in a table of (key pair, group) -> f16 pair for both products.
//
// Macros: HEAD_TILES (1, of 8 heads), A_KIND, B_KIND, X_ROW_UNITS, X_SCALE_STRIDE, SPLITS, FP8_OUTPUT, OUT_CHUNKED, WITH_MAX
// as in attend.cu.

#include "few_heads_parts.cuh"

#define HAS_V4 (A_KIND == KIND_V4 || B_KIND == KIND_V4)
#define HAS_NVFP4 (A_KIND == KIND_NVFP4 || B_KIND == KIND_NVFP4)
#define A_PLANAR (A_SCALE_STRIDE != A_ROW_UNITS * 16)
#define B_PLANAR (B_SCALE_STRIDE != B_ROW_UNITS * 16)
// Bulk copies of one record may then land where a table or scales of the other were stored.
#define MIXED (A_KIND != B_KIND || A_PLANAR != B_PLANAR)

constexpr int BLOCKS = 8, THREADS = 640;     // blocks of a tile, each scored by one warp
constexpr int HEADS = 8;                     // of a block
static_assert(HEADS == 8 * HEAD_TILES, "heads of a block");
constexpr bool PAIRS = !HAS_V4;              // values of two blocks at a time
constexpr int ENTRY_REGISTERS = 96;          // of 65,536 over 640 threads
constexpr int SCORE_REGISTERS = 152, VALUE_REGISTERS = 72, PRODUCER_REGISTERS = 32;
static_assert(2 * (SCORE_REGISTERS + VALUE_REGISTERS) + PRODUCER_REGISTERS <= 5 * ENTRY_REGISTERS, "registers of a CTA");
// Weights are 2^10 exp(z - m), so those down to 2^-24 are normal f16; up to 2^15 before the maximum moves.
constexpr float WEIGHT_SHIFT = 10.f, GROWTH = 5.f;

// A block of 16 rows: rows PITCH bytes apart, the scales of a row SCALES bytes into it. The padding makes reads of eight
// rows free of bank conflicts. e2m1 rows keep their table of scales behind them.
template <int KIND> struct Record {};
template <> struct Record<KIND_MXFP8> { static constexpr int PITCH = 33 * 16, SCALES = 512, BYTES = 16 * PITCH; };
template <> struct Record<KIND_V4> { static constexpr int PITCH = 37 * 16, SCALES = 36 * 16, BYTES = 16 * PITCH; };
template <> struct Record<KIND_NVFP4> { static constexpr int PITCH = 19 * 16, SCALES = 256, TABLE = 16 * PITCH, TABLE_PITCH = 144, BYTES = TABLE + 8 * TABLE_PITCH; };
constexpr int BLOCK_BYTES = Record<A_KIND>::BYTES > Record<B_KIND>::BYTES ? Record<A_KIND>::BYTES : Record<B_KIND>::BYTES;
constexpr int QUERY_BYTES = 1024 * HEADS;
constexpr int TABLES_BYTES = A_KIND == KIND_NVFP4 && B_KIND == KIND_NVFP4 ? 0 : 512 * BLOCKS;  // of one of two sets
constexpr int WEIGHT_PITCH = 32 * BLOCKS + 16, WEIGHTS_BYTES = HEADS * WEIGHT_PITCH;           // of one of two sets
constexpr int HEAD_BYTES = 4 * HEADS;

constexpr int QUERY = 0;                                     // fragments of all 32 k16 steps, f16; the next token's once registers hold them
constexpr int TABLES = QUERY + QUERY_BYTES;                  // [2][block] (key pair, group) -> f16 scales of both keys
constexpr int WEIGHTS = TABLES + 2 * TABLES_BYTES;           // [2][head][128 keys] f16
constexpr int TILE_MAX = WEIGHTS + 2 * WEIGHTS_BYTES;        // [block][head] f32
constexpr int END = TILE_MAX + BLOCKS * HEAD_BYTES;          // [token parity 2], what the value role needs at the end of a token:
constexpr int SUMS = END, TRUE_MAX = SUMS + BLOCKS * HEAD_BYTES;            // [block][head] f32 each
constexpr int MAXIMUM = TRUE_MAX + BLOCKS * HEAD_BYTES;                     // [head] f32, the reference
constexpr int SINKS = MAXIMUM + HEAD_BYTES;                                 // [head] f32
constexpr int END_BYTES = SINKS + HEAD_BYTES - END;
constexpr int FACTORS = END + 2 * END_BYTES;                 // [2][head] f32, of what was summed before a tile
constexpr int FINAL = FACTORS + 2 * HEAD_BYTES;              // SPLITS > 1: [rank][head] maximum, sum, true maximum
constexpr int TILE = FINAL + (SPLITS > 1 ? 4 * HEAD_BYTES * SPLITS : 0);  // [2] u32, Work of a tile for the value role
constexpr int WEIGHTS_FULL = TILE + 8;                       // [2]
constexpr int WEIGHTS_EMPTY = WEIGHTS_FULL + 16;             // [2]
constexpr int FINAL_FULL = WEIGHTS_EMPTY + 16;               // [token parity 2]; SPLITS > 1: what the cluster sends counts on the first
constexpr int FULL = FINAL_FULL + 16;                        // [ring]
constexpr int MAX_RING = 32;
constexpr int EMPTY = FULL + 8 * MAX_RING;                   // [ring]
constexpr int VALID = EMPTY + 8 * MAX_RING;                  // [ring] u32, a bit a row
constexpr int LENGTHS = VALID + 4 * MAX_RING;                // [token parity 2] (window, compressed) int, what scores ask for ahead
constexpr int POSITIONS = LENGTHS + 16;                      // [token & 3] RawPosition, asked for a token ahead, read up to two behind
// SPLITS > 1: partial sums that the cluster sends. A unit is (64 dims, even or odd heads), 1 KB.
constexpr int UNITS = 16;                                    // unit u is written by rank u % SPLITS
constexpr int ANGLES = (POSITIONS + 32 + 15) & ~15;          // [token & 3][cos, sin][32] f32, likewise
constexpr int ADDRESSES = ANGLES + 1024;                     // [producer][row 32] u64, of the rows that it copies next
constexpr int SLOTS = ADDRESSES + 1024;                      // [producer][row 32] int, of the tile after
constexpr int PARTS = (SLOTS + 512 + 127) & ~127;            // [own unit][rank] f32
constexpr int PARTS_BYTES = SPLITS > 1 ? (UNITS + SPLITS - 1) / SPLITS * SPLITS * 1024 : 0;
constexpr int ROWS = PARTS + PARTS_BYTES;                    // the ring
constexpr int FITTING = (232448 - ROWS) / BLOCK_BYTES, RING = FITTING < MAX_RING ? FITTING : MAX_RING;
static_assert(RING >= 2 * BLOCKS, "two tiles at least");

__device__ __align__(16) uint8_t zero_row[1024];   // stands for rows that no valid slot names; the host knows where it is

// ---------------------------------------------------------------- work of a CTA
// A tile: number of blocks, how many of them are of the window, whether it is the token's last one, whether it is one,
// whether maxima moved.
struct Work {
  uint32_t bits;
  DI int blocks() const { return bits & 15; }
  DI int window() const { return (bits >> 4) & 15; }
  DI bool last() const { return bits & 256; }
  DI bool exists() const { return bits & 512; }
  DI bool moved() const { return bits & 1024; }
};

struct Cursor {
  int item, at, end, window_blocks, window_keys, compressed_keys;
  int next_window, next_compressed;          // lengths of the next item, asked for one item ahead

  DI void ask(const Args& p, int next) {
    next_window = p.a.width; next_compressed = p.b.width;
    const int token = token_of(p, next);
    if (token < p.tokens) {
      if (p.a.lengths) next_window = __ldg(p.a.lengths + token);
      if (p.b.lengths) next_compressed = __ldg(p.b.lengths + token);
    }
  }
  DI void enter(const Args& p, int number, int rank, int window, int compressed) {
    item = number;
    window_keys = uniform(min(max(window, 0), (int)p.a.width));
    compressed_keys = uniform(min(max(compressed, 0), (int)p.b.width));
    window_blocks = (window_keys + 15) >> 4;
    const int blocks = window_blocks + ((compressed_keys + 15) >> 4);
    at = rank * blocks / SPLITS; end = (rank + 1) * blocks / SPLITS;
  }
  // Begins an item whose lengths have been asked for.
  DI void begin(const Args& p, int number, int rank, int step) {
    enter(p, number, rank, next_window, next_compressed);
    ask(p, number + step);
  }
  // Where the slot of row `row` of block `block` of the item is, null if there is no such key.
  DI const int* slot_of(const Args& p, int block, int row) const {
    const bool compressed = block >= window_blocks;
    const int key = 16 * (compressed ? block - window_blocks : block) + row;
    const KeyArgs& k = compressed ? p.b : p.a;
    const int token = token_of(p, item);
    if (token >= p.tokens || block >= end || key >= (compressed ? compressed_keys : window_keys)) return nullptr;
    return k.indices + (int64_t)token * k.indices_stride + key;
  }
  // The next tile of the item.
  DI Work take() {
    const int blocks = min(end - at, BLOCKS), window = min(max(window_blocks - at, 0), blocks);
    at += BLOCKS;
    return {512u | blocks | (window << 4) | (at >= end ? 256 : 0)};
  }
  // The next tile of all items.
  DI Work next(const Args& p, int rank, int step) {
    if (token_of(p, item) >= p.tokens) return {0};
    const Work w = take();
    if (w.last()) begin(p, item + step, rank, step);
    return w;
  }
};

// Position in the ring of blocks: place and the parity of its round.
struct Ring {
  int place; uint32_t round;
  DI Ring ahead(int n) const { Ring r = {place + n, round}; if (r.place >= RING) { r.place -= RING; r.round ^= 1; } return r; }
};

// ---------------------------------------------------------------- scales
// Word of a key pair and, for scores, of this lane's group of the first 64 dims; the next 64 dims are 4 bytes on.
// MXFP8: [pair 8][odd group 2][64 dims 8 ^ 4 (pair / 2 & 1)]; NVFP4: [pair 8, 144 B][group 4][64 dims 8]; V4: [pair 8][64 dims 8].
template <int KIND> DI uint32_t table_word(int pair, int group, int dims64) {
  if (KIND == KIND_MXFP8) return pair * 64 + group * 32 + ((dims64 ^ ((pair & 2) << 1)) << 2);
  if (KIND == KIND_NVFP4) return pair * Record<KIND_NVFP4>::TABLE_PITCH + group * 32 + dims64 * 4;
  return pair * 32 + dims64 * 4;
}
// A lane does one key pair and a quarter of the groups.
template <int KIND> DI void fill_table(uint32_t block, uint32_t table, int lane) {
  using R = Record<KIND>;
  const int pair = lane >> 2, quarter = lane & 3;
  const uint32_t from = block + R::SCALES + 2 * pair * R::PITCH;
  if (KIND == KIND_MXFP8) {
    const uint32_t a = load_shared4(from + 4 * quarter), b = load_shared4(from + R::PITCH + 4 * quarter);
    store_shared8(table + table_word<KIND>(pair, 0, 2 * quarter), ue8m0_pair<0>(a, b), ue8m0_pair<2>(a, b));
    store_shared8(table + table_word<KIND>(pair, 1, 2 * quarter), ue8m0_pair<1>(a, b), ue8m0_pair<3>(a, b));
  } else if (KIND == KIND_V4) {
    const uint32_t a = load_shared2(from + 2 * quarter), b = load_shared2(from + R::PITCH + 2 * quarter);
    store_shared8(table + table_word<KIND>(pair, 0, 2 * quarter), ue8m0_pair<0>(a, b), ue8m0_pair<1>(a, b));
  } else {
    const uint2 a = load_shared8(from + 8 * quarter), b = load_shared8(from + R::PITCH + 8 * quarter);
    const uint32_t x0 = permute(a.x, b.x, 0x5140), x1 = permute(a.x, b.x, 0x7362), y0 = permute(a.y, b.y, 0x5140), y1 = permute(a.y, b.y, 0x7362);
    store_shared8(table + table_word<KIND>(pair, 0, 2 * quarter), times(e4m3_low(x0), E2M1_FACTOR), times(e4m3_low(y0), E2M1_FACTOR));
    store_shared8(table + table_word<KIND>(pair, 1, 2 * quarter), times(e4m3_high(x0), E2M1_FACTOR), times(e4m3_high(y0), E2M1_FACTOR));
    store_shared8(table + table_word<KIND>(pair, 2, 2 * quarter), times(e4m3_low(x1), E2M1_FACTOR), times(e4m3_low(y1), E2M1_FACTOR));
    store_shared8(table + table_word<KIND>(pair, 3, 2 * quarter), times(e4m3_high(x1), E2M1_FACTOR), times(e4m3_high(y1), E2M1_FACTOR));
  }
}
DI uint32_t table_of(uint32_t base, bool nvfp4, uint32_t block, int parity, int number) {
  return nvfp4 ? block + Record<KIND_NVFP4>::TABLE : base + TABLES + parity * TABLES_BYTES + number * 512;
}

// ---------------------------------------------------------------- producers
// The 16 rows of a block, which lie where `addresses` in shared memory say; lanes `first` .. `first` + 15 know where their scales lie.
template <int KIND, int UNITS, bool PLANAR> DI void copy_block(const KeyArgs& k, uint32_t addresses, uint32_t block, uint32_t full, uint32_t valid_at, int lane, int first, uint32_t valid, uint32_t scale_offset) {
  using R = Record<KIND>;
  if (one_lane()) {
    store_shared4(valid_at, valid);
    arrive_and_expect(full, 256 * UNITS);
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const uint4 x = load_shared16(addresses + 8 * i), y = load_shared16(addresses + 8 * i + 16);
      const uint64_t from[4] = {x.x | (uint64_t)x.y << 32, x.z | (uint64_t)x.w << 32, y.x | (uint64_t)y.y << 32, y.z | (uint64_t)y.w << 32};
#pragma unroll
      for (int j = 0; j < 4; j++) copy_row(block + (i + j) * R::PITCH, (const void*)from[j], UNITS * 16, full);
    }
  }
  const int row = lane - first;
  if (row < 0 || row >= 16) return;
  if (PLANAR) {
    const uint8_t* from = k.pages + (uint64_t)scale_offset * 8;
    const uint32_t to = block + row * R::PITCH + R::SCALES, ok = (valid >> row) & 1;
    if (KIND == KIND_V4) copy_async<8>(to, from, ok * 8);
    else copy_async<16>(to, from, ok * 16);
    if (KIND == KIND_NVFP4) copy_async<16>(to + 16, from + 16, ok * 16);
    copies_arrive(full);
  } else if (A_PLANAR || B_PLANAR) arrive(full);
}

// Producer w copies blocks w and w + 4 of every tile; a lane finds one row, of block `number` of a tile.
DI int number_of(int w, int lane) { return w + 4 * (lane >> 4); }
// `guessed`: the lane's first slot if every list is full as in `guess`, asked for together with the lengths.
DI void produce(const Args& p, uint32_t base, int w, int lane, int rank, int step, Cursor cursor, const Cursor& guess, int guessed) {
  const int number = number_of(w, lane), row = lane & 15;
  cursor.begin(p, blockIdx.x / SPLITS, rank, step);
  const int* from = cursor.slot_of(p, cursor.at + number, row);
  const bool right = cursor.at == guess.at && cursor.window_blocks == guess.window_blocks;
  int slot = !from ? -1 : right ? guessed : __ldg(from);
  Work work = cursor.next(p, rank, step);
  Ring ring = {0, 0};
  uint32_t slots = base + SLOTS + w * 128 + lane * 4;   // this lane's slot of the next tile; a load would be waited for within its tile
  while (work.exists()) {
    from = cursor.slot_of(p, cursor.at + number, row);
    const Work next_work = cursor.next(p, rank, step);
    if (from) copy_async<4>(slots, from, 4); else store_shared4(slots, ~0u);
    copy_commit();
    const bool compressed = number >= work.window();
    const KeyArgs& k = compressed ? p.b : p.a;
    const bool ok = (uint32_t)slot < k.places.num_slots;
    const uint32_t s = ok ? slot : 0, page = page_of(k.places, s), offset = row_units(k.places, s, page), scale_offset = scale_units(k.places, s, page);
    const uint32_t valid = __ballot_sync(~0u, ok), addresses = base + ADDRESSES + w * 256;
    const uint64_t address = (uint64_t)(ok ? k.pages + (uint64_t)offset * 16 : p.zeros);
    store_shared8(addresses + lane * 8, (uint32_t)address, (uint32_t)(address >> 32));
    __syncwarp();
    // Who has no block in a tile waits for those who have: a round ahead it would take a place for free that is not.
    if (work.blocks() < 4) meet<2, 128>();
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
      if (w + 4 * h >= work.blocks()) break;
      const Ring at = ring.ahead(w + 4 * h);
      const uint32_t full = base + FULL + 8 * at.place, block = base + ROWS + at.place * BLOCK_BYTES, bits = (valid >> (16 * h)) & 0xffff;
      const uint32_t from = addresses + 128 * h, valid_at = base + VALID + 4 * at.place;
      wait(base + EMPTY + 8 * at.place, at.round ^ 1);
      if (MIXED) fence_async();
      if (!MIXED) copy_block<A_KIND, A_ROW_UNITS, A_PLANAR>(w + 4 * h >= work.window() ? p.b : p.a, from, block, full, valid_at, lane, 16 * h, bits, scale_offset);
      else if (w + 4 * h >= work.window()) copy_block<B_KIND, B_ROW_UNITS, B_PLANAR>(p.b, from, block, full, valid_at, lane, 16 * h, bits, scale_offset);
      else copy_block<A_KIND, A_ROW_UNITS, A_PLANAR>(p.a, from, block, full, valid_at, lane, 16 * h, bits, scale_offset);
      __syncwarp();
    }
    ring = ring.ahead(work.blocks());
    work = next_work;
    copy_wait<0>();
    slot = load_shared4(slots);
  }
}

// ---------------------------------------------------------------- output
DI void write_statistics(const Args& p, int token, int head, float m, float l, float true_max) {
  if (head >= p.heads) return;
  const int64_t at = (int64_t)token * p.heads + head;
  if (p.lse) p.lse[at] = l == 0.f ? INF : m * p.scale + (logf(l) - WEIGHT_SHIFT * LN2);
  if (WITH_MAX && p.max_logits) p.max_logits[at] = true_max * p.scale;
}
DI float sink_of(const Args& p, int head) { return p.sink && head < p.heads ? __ldg(p.sink + head) : -INF; }
// What an accumulator is multiplied with, sink included; sums are relative to 2^(m c1 - WEIGHT_SHIFT).
DI float weight_of(float m, float l, float sink, float c1) { return m == -INF ? 0.f : reciprocal(l + exp2_fast(sink * LOG2E - m * c1 + WEIGHT_SHIFT)); }

// Dims 64 w + 8 g .. + 7 of one head times `weight`; four lanes (g & ~3 ..) share a block of 32 dims. head / heads_per_group
// is head * group_mul >> 16.
DI void store_head(const Args& p, int token, int head, float (&v)[8], float weight, uint32_t angles, int w, int g, uint32_t group_mul) {
  if (angles && w == 7) {      // rotate back
    const float4 c = load_float4(angles + 16 * g), s = load_float4(angles + 128 + 16 * g);
    const float cs[4] = {c.x, c.y, c.z, c.w}, ss[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = v[2 * i], b = v[2 * i + 1];
      v[2 * i] = a * cs[i] + b * ss[i]; v[2 * i + 1] = b * cs[i] - a * ss[i];
    }
  }
  const int hpg = p.heads_per_group, group = head * group_mul >> 16, member = head - group * hpg, block = 2 * w + (g >> 2);
  const int64_t start = ((int64_t)token * p.heads + (OUT_CHUNKED ? group * hpg : head)) * 512;
  uint8_t* to = p.out + (start + (OUT_CHUNKED ? (block * hpg + member) * 32 + 8 * (g & 3) : 64 * w + 8 * g)) * (FP8_OUTPUT ? 1 : 2);
  const bool live = head < p.heads;
  if (!FP8_OUTPUT) {
    if (live) *(uint4*)to = bf16_of(v, weight);
    return;
  }
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) amax = fmaxf(amax, fabsf(v[i]));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 4)); amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 8));
  const uint32_t code = scale_code(amax * weight);
  const float f = unscale(code) * weight;
  if (!live) return;
  *(uint2*)to = e4m3_of(v, f);
  if ((g & 3) == 0) {
    const int number = OUT_CHUNKED ? block * hpg + member : member * 16 + block;
    ((uint8_t*)p.scales)[(((int64_t)group * 4 * hpg + (number >> 2)) * p.scale_stride + token) * 4 + (number & 3)] = (uint8_t)code;
  }
}

#include "few_heads_scores.cuh"
#include "few_heads_values.cuh"

// ---------------------------------------------------------------- the kernel
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Args p) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t base = uniform_least(shared_address(memory));
  const int warp = uniform(threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31);
  const int rank = SPLITS == 1 ? 0 : blockIdx.x % SPLITS, step = gridDim.x / SPLITS, item = blockIdx.x / SPLITS;
  if (warp == 8 && token_of(p, item) < p.tokens) prefetch_lists(p, token_of(p, item), lane);
  // Loads that others wait for are under way while barriers are made.
  int guessed = -1;
  Cursor cursor, guess;
  const int* from = nullptr;
  if (warp >= 16) {
    guess.enter(p, item, rank, p.a.width, p.b.width);
    from = guess.slot_of(p, guess.at + number_of(warp - 16, lane), lane & 15);
  }
  wait_for_launch_before();
  let_next_launch_begin();
  if (warp < 8) {
    if (warp == 0 || warp == 7) { ask_ahead(p, base, warp, lane, item, 0); copy_commit(); }
    ask_query(p, base + QUERY, item, warp, lane >> 2, lane & 3);
  } else if (warp >= 16) {
    if (from) guessed = __ldg(from);
    cursor.ask(p, item);
  }
#pragma unroll 1
  for (int i = warp; i < RING + 2; i += THREADS / 32) {   // one lane each: barriers of a warp would wait for each other
    if (lane > 0) continue;
    if (i < RING) {
      barrier_init(base + FULL + 8 * i, A_PLANAR || B_PLANAR ? 17 : 1);
      barrier_init(base + EMPTY + 8 * i, 8 * WARP);
    } else {
      barrier_init(base + WEIGHTS_FULL + 8 * (i - RING), WARP == 32 ? 256 : 1);
      barrier_init(base + WEIGHTS_EMPTY + 8 * (i - RING), 8 * WARP);
      barrier_init(base + FINAL_FULL + 8 * (i - RING), SPLITS == 1 ? 8 * WARP : 1);
      if (SPLITS > 1 && i == RING) arrive_and_expect(base + FINAL_FULL, SPLITS * (16 * HEADS + (UNITS - rank + SPLITS - 1) / SPLITS * 1024));
    }
  }
  fence_barriers();
  __syncthreads();
  if (SPLITS > 1) cluster_arrive_relaxed();               // others may send from now on
  const float c1 = p.scale * LOG2E;
  if (warp < 8) {
    take_registers<SCORE_REGISTERS, ENTRY_REGISTERS>();
    Scores scores{p, base, warp, lane, lane >> 2, lane & 3, c1, GROWTH / c1};
    scores.run(rank, step);
  } else if (warp < 16) {
    take_registers<VALUE_REGISTERS, ENTRY_REGISTERS>();
    Values values{p, base, warp - 8, lane, lane >> 2, lane & 3, c1, 65536u / p.heads_per_group + 1};
    values.run(rank, step);
  } else {
    take_registers<PRODUCER_REGISTERS, ENTRY_REGISTERS>();
    produce(p, base, warp - 16, lane, rank, step, cursor, guess, guessed);
  }
  __syncwarp();
  if (SPLITS > 1 && warp >= 16) cluster_wait();           // the other roles do in their finish()
}
