// The warpgroups of scores.
#pragma once

// ---------------------------------------------------------------- scores
constexpr int TOGETHER = HEAD_TILES == 8 ? 1 : 2;   // products that are issued at once; 64 heads leave no registers for two
constexpr int OPERANDS = TOGETHER == 1 ? 3 : 2;     // so many times TOGETHER, widened keys are kept
static_assert(QUERIES == 1 || AHEAD >= GROUPS, "a group that asks ahead knows its next tile");
// Of numbers >= 0 the largest, as its bits, whose order is theirs; NaN is above all.
DI int largest(int bits, float x, float y) { return max(max(bits, __float_as_int(x)), __float_as_int(y)); }

struct Scores {
  const Args& p;
  const TensorMap& query_map;
  uint32_t base;
  int group, w, lane, g8, t;
  float c1;
  float sum[2], refers[2];     // for lse, of heads 8 c + 2 t + e, c from the bits of g8: weights before they are rounded, what they refer to
  bool counted;                // the sums hold something
  uint32_t own;                // tiles of this group so far
  int stage; uint32_t phase;   // of its next tile
  int rank, item_step;
  bool asked;                  // for the query of the group's next tile, ahead of time

  DI uint32_t ring() const { return GROUPS * own + group; }
  // The group of the tile that is `tiles` before this group's next one, and the parity of that tile.
  DI int group_before(int tiles) const { return GROUPS == 2 ? group ^ (tiles & 1) : group >= tiles ? group - tiles : group - tiles + GROUPS; }
  DI uint32_t parity_before(int tiles) const { return GROUPS == 2 ? (own ^ group ^ 1) & 1 : (group >= tiles ? own : own + 1) & 1; }
  // What the group of the tile before has done with it.
  DI void wait_before(uint32_t barriers) const { wait(barriers + 8 * group_before(1), parity_before(1)); }
  // What the other groups have done with theirs.
  DI void wait_others(uint32_t barriers) const {
#pragma unroll
    for (int x = 1; x < GROUPS; x++) wait(barriers + 8 * group_before(x), parity_before(x));
  }

  // The widened scales of the warp's rows, for all who read the tile.
  template <int KIND> DI void widen_scales(uint32_t row, uint32_t to) const {
    constexpr int H = 8 * Raw<KIND>::PITCH;
    if (KIND == KIND_NVFP4) {
      const uint2 x = load_shared8(row + Raw<KIND>::DATA + 8 * t), y = load_shared8(row + H + Raw<KIND>::DATA + 8 * t);
#pragma unroll
      for (int i = 0; i < 8; i++) store_shared4(to + i * PART, times(numbers_of_f16(e4m3_pair<0>(__byte_perm(i < 4 ? x.x : x.y, i < 4 ? y.x : y.y, (i & 3) | (4 + (i & 3)) << 4))), numbers_of_f16(E2M1_FACTOR)));
      return;
    }
    const int at = KIND == KIND_V4 ? 4 * (t >> 1) : 4 * t;
    uint32_t x = load_shared4(row + Raw<KIND>::DATA + at), y = load_shared4(row + H + Raw<KIND>::DATA + at);
    if (KIND == KIND_V4) { x >>= 16 * (t & 1); y >>= 16 * (t & 1); }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int byte = KIND == KIND_V4 ? i >> 1 : i;
      const uint32_t a = __byte_perm(x, 0, 0x4440 | byte), b = __byte_perm(y, 0, 0x4440 | byte);
      store_shared4(to + i * PART, numbers_of_ue8m0(a, b));
    }
  }
  // Those of this lane's 16 dims that step i has, as two f16 pairs; of 16 bf16 dims x has the half that is asked for.
  template <int KIND, int B> DI static void widen(uint32_t& lo, uint32_t& hi, int i, uint4 x, uint32_t sc) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    if (KIND == KIND_V4 && B == 7) {
      const int pairs = i & 1 ? 0x7632 : 0x5410;
      lo = numbers_of_bf16(HAS_NVFP4 ? __byte_perm(words[0], words[1], pairs) : words[2 * (i & 1)]);
      hi = numbers_of_bf16(HAS_NVFP4 ? __byte_perm(words[2], words[3], pairs) : words[2 * (i & 1) + 1]);
      return;
    }
    uint32_t codes = words[i];
    if (KIND == KIND_NVFP4) codes = i & 1 ? e2m1_odd(words[i >> 1]) : e2m1_even(words[i >> 1]);
    else if (HAS_NVFP4) codes = __byte_perm(words[i & 2], words[(i & 2) + 1], i & 1 ? 0x7531 : 0x6420);
    lo = times(numbers_of_f16(e4m3_pair<0>(codes)), sc); hi = times(numbers_of_f16(e4m3_pair<1>(codes)), sc);
  }
  template <int KIND, int B> DI void read_block(uint4 (&d)[2], uint32_t row) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t from = row + 8 * r * Raw<KIND>::PITCH;
      if (KIND == KIND_NVFP4) { const uint2 x = load_shared8(from + 32 * B + 8 * t); d[r].x = x.x; d[r].y = x.y; d[r].z = d[r].w = 0; }
      else d[r] = load_shared16(from + 64 * B + (KIND == KIND_V4 && B == 7 ? 32 : 16) * t);
    }
  }
  template <int KIND, int B> DI void block(float (&S)[HEADS / 2], uint32_t (&A)[OPERANDS][4 * TOGETHER], uint4 (&d)[2], uint32_t row, uint32_t scales, uint32_t query_at) const {
    constexpr bool BF16 = KIND == KIND_V4 && B == 7;
    uint32_t pair = 0;
    if (!BF16) pair = load_shared4(scales + (B & 1) * (KIND == KIND_NVFP4 ? 4 : 2) * PART + (B >> 1) * 32);
    uint4 next[2];
    if constexpr (B < 7) read_block<KIND, B + 1>(next, row);
    const uint32_t sc0 = __byte_perm(pair, 0, 0x1010), sc1 = __byte_perm(pair, 0, 0x3232);
    const uint64_t query = dim_major(query_at) + B * (BLOCK >> 4);
#pragma unroll
    for (int i = 0; i < 4; i += TOGETHER) {
      const int number = (4 * B + i) / TOGETHER;
      uint32_t* a = A[number % OPERANDS];
      if (number >= OPERANDS) mma_wait<OPERANDS - 1>();       // the products that read them
      if (QUERIES == 1 && number == 16 / TOGETHER + OPERANDS - 1) arrive_once(base + HALF_READ + 8 * group);
#pragma unroll
      for (int x = 0; x < TOGETHER; x++) {
        widen<KIND, B>(a[4 * x], a[4 * x + 2], i + x, d[0], sc0);
        widen<KIND, B>(a[4 * x + 1], a[4 * x + 3], i + x, d[1], sc1);
        if (BF16 && i + x == 1) read_block<KIND, B>(d, row + 16);   // the second half, early: it arrives while the product is issued
      }
      mma_fence();
#pragma unroll
      for (int x = 0; x < TOGETHER; x++) keys_mma<0>(S, a + 4 * x, query + 2 * (i + x), B > 0 || i + x > 0);
      mma_commit();
    }
    if constexpr (B < 7) block<KIND, B + 1>(S, A, next, row, scales, query_at);
  }
  // The references of heads 8 c + 2 t + e, 0 where no tile had a key.
  DI void read_references(float (&ref)[HEADS / 4], uint32_t kept, bool met) const {
    int at = base + REFERENCE + kept * TABLE + 8 * t;
    forget(at);
#pragma unroll
    for (int c = 0; c < HEAD_TILES; c++) {
      float2 r = make_float2(0.f, 0.f);
      if (met) r = load_float2(at + 32 * c);
      ref[2 * c] = r.x; ref[2 * c + 1] = r.y;
    }
  }
  // Stores the weights of logits relative to the references, log2 units; whether one of this lane's is above 2^MOST, or no
  // number. `add`: their sums, for lse.
  DI bool weigh(const float (&S)[HEADS / 2], float (&add)[2]) const {
    const uint32_t at = base + WEIGHTS + group * BLOCK + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((2 * w + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    float sums[HEADS / 4];
    int most = 0;
#pragma unroll
    for (int c = 0; c < HEAD_TILES; c += 2) {
      uint32_t P[4];
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const float* s = S + 4 * (c + x);
        const float e0 = exp2_fast(s[0]), e1 = exp2_fast(s[1]), f0 = exp2_fast(s[2]), f1 = exp2_fast(s[3]);
        P[2 * x] = pack_numbers(e0, e1); P[2 * x + 1] = pack_numbers(f0, f1);
        if (WITH_LSE) { sums[2 * (c + x)] = e0 + f0; sums[2 * (c + x) + 1] = e1 + f1; }
        most = largest(largest(most, e0, e1), f0, f1);
      }
      store_matrices_turned(at + c * 1024, P[0], P[1], P[2], P[3]);
    }
    if (WITH_LSE) gather_columns<false>(sums, add);
    return most > __float_as_int(TOP_WEIGHT);
  }
  // Moves the references of heads whose maximum over this tile exceeds them by more than 2^15 (all of them on the first
  // tile that has a key). S: logits relative to the reference, 1 / unit of them in log2 units; then in those. The weights' space of the group,
  // whose weights are not yet, or not right, holds the maxima of the four warps.
  DI void move_references(float (&S)[HEADS / 2], uint32_t kept, bool first, bool met, float unit) {
    const uint32_t tops = base + WEIGHTS + group * BLOCK, references = base + REFERENCE + kept * TABLE;
    float v[HEADS / 4], ref[HEADS / 4], top[2];
#pragma unroll
    for (int x = 0; x < HEADS / 4; x++) v[x] = fmaxf(S[4 * (x >> 1) + (x & 1)], S[4 * (x >> 1) + 2 + (x & 1)]);
    read_references(ref, kept, met);
    gather_columns<true>(v, top);
    store_float2(tops + w * TABLE + mine(), top[0], top[1]);
    const float2 old = load_float2(references + mine());
    group_sync(group);
    const float2 x0 = load_float2(tops + mine()), x1 = load_float2(tops + TABLE + mine()), x2 = load_float2(tops + 2 * TABLE + mine()), x3 = load_float2(tops + 3 * TABLE + mine());
    top[0] = fmaxf(fmaxf(x0.x, x1.x), fmaxf(x2.x, x3.x)) * unit; top[1] = fmaxf(fmaxf(x0.y, x1.y), fmaxf(x2.y, x3.y)) * unit;
    const float was[2] = {met ? old.x : 0.f, met ? old.y : 0.f};
    if (w == 0) {
      const float limit = met ? MOST : -INF;
      const float by[2] = {top[0] > limit ? top[0] - ABOVE : 0.f, top[1] > limit ? top[1] - ABOVE : 0.f};
      store_float2(references + mine(), was[0] + by[0], was[1] + by[1]);
      store_float2(base + RESCALE + group * TABLE + mine(), exp2_fast(-by[0]), exp2_fast(-by[1]));
      if (WITH_MAX && owns()) {
        const uint32_t at = base + TRUE_MAX + kept * TABLE + mine();
        const float2 before = load_float2(at);
        store_float2(at, first ? top[0] + was[0] : fmaxf(top[0] + was[0], before.x), first ? top[1] + was[1] : fmaxf(top[1] + was[1], before.y));
      }
    }
    group_sync(group);
#pragma unroll
    for (int c = 0; c < HEAD_TILES; c++) {
      const float2 r = load_float2(references + (8 * c + 2 * t) * 4);
      const float by0 = r.x - ref[2 * c], by1 = r.y - ref[2 * c + 1];
      // No more than the limit, which only the rounding of huge logits exceeds here; NaN stays.
#pragma unroll
      for (int x = 0; x < 4; x++) S[4 * c + x] = least_or_nan(fmaf(S[4 * c + x], unit, -(x & 1 ? by1 : by0)), MOST);
    }
  }
  // In a table of heads: this lane's two. With fewer than 64 heads several lanes have the same.
  DI uint32_t mine() const {
    const int c = HEAD_TILES == 8 ? 4 * (g8 & 1) + (g8 & 2) + (g8 >> 2) : HEAD_TILES == 4 ? 2 * (g8 & 1) + ((g8 >> 1) & 1) : g8 & 1;
    return (8 * c + 2 * t) * 4;
  }
  DI bool owns() const { return HEAD_TILES == 8 || g8 < HEAD_TILES; }   // ... and is the one that reads and writes there
  // Of N numbers of every lane and of those of the lane whose number differs in bit BIT: each of the two keeps a half, or, where two are left, both.
  template <bool MAXIMUM, int BIT, int N> DI static void halve(const float (&v)[N], float (&half)[N > 2 ? N / 2 : 2], int lane) {
#pragma unroll
    for (int i = 0; i < (N > 2 ? N / 2 : 2); i++) {
      const bool upper = lane & BIT;
      const float give = N == 2 || upper ? v[i] : v[N / 2 + i], keep = N > 2 && upper ? v[N / 2 + i] : v[i], got = __shfl_xor_sync(~0u, give, BIT);
      half[i] = MAXIMUM ? fmaxf(keep, got) : keep + got;
    }
  }
  // Sums or maxima of the numbers of every lane over the lanes of equal t; a lane gets those of its two heads.
  template <bool MAXIMUM> DI void gather_columns(const float (&v)[HEADS / 4], float (&total)[2]) const {
    constexpr int A = HEADS / 8, B = HEADS > 16 ? HEADS / 16 : 2;
    float a[A], b[B];
    halve<MAXIMUM, 4>(v, a, lane);
    halve<MAXIMUM, 8>(a, b, lane);
    halve<MAXIMUM, 16>(b, total, lane);
  }
  // The sums of the group's warps, one after the other.
  DI void add_sums(uint32_t at) const {
    for (int x = 0; x < 4; x++) {
      if (w == x && owns()) {
        const float2 before = x ? load_float2(at) : make_float2(0.f, 0.f);
        store_float2(at, before.x + sum[0], before.y + sum[1]);
      }
      group_sync(group);
    }
  }
  DI void place_lane() { forget(lane); g8 = lane >> 2; t = lane & 3; }   // anew, instead of registers during the products
  DI int key() const { return 16 * (g8 >> 1) + 4 * (g8 & 1) + w; }       // of this lane's two keys the first, the other is 8 further
  // Scores, scales and weights of the group's next tile; `first` of the token, `last` of this group's, `all` its keys exist.
  // `number`: of the token.
  template <int KIND> DI void tile(uint32_t number, bool first, bool last, bool all) {
    place_lane();
    const uint32_t kept = number & (KEPT - 1), raw = base + RAW + stage * STAGE;
    float S[HEADS / 2];
    wait(base + RAW_FULL + 8 * stage, phase);
    {
      const uint32_t row = raw + row_at<KIND>(key()), scales = raw + scales_at<KIND>() + w * 128 + g8 * 4;
      uint32_t A[OPERANDS][4 * TOGETHER];
      uint4 d[2];
      read_block<KIND, 0>(d, row);
      widen_scales<KIND>(row, scales + t * 32);
      __syncwarp();
      block<KIND, 0>(S, A, d, row, scales + (KIND == KIND_NVFP4 ? t : t >> 1) * PART, query_of(number));
    }
    // What the weights need is asked for while the last products run.
    place_lane();
    wait(base + WEIGHTS_EMPTY + 8 * group, (own & 1) ^ 1);
    wait_before(base + SETTLED);
    const bool met = !first && load_shared4(base + MET + 4 * kept);
    mma_wait<0>();
    if (QUERIES == 1) arrive_once(base + ALL_READ + 8 * group);
    RawPosition position;
    if (QUERIES == 2 && w == 0) ask_ahead(number, position);
    if (met) {
      float ref[HEADS / 4];
      read_references(ref, kept, true);
#pragma unroll
      for (int x = 0; x < HEADS / 2; x++) S[x] = fmaf(S[x], c1, -ref[2 * (x >> 2) + (x & 1)]);
    }
    float add[2];
    bool grew = false;
    // Most tiles have all their keys, and references seldom move: weights are found as if it were so, and once more if not.
    bool exact = !all || WITH_MAX;
    if (!WITH_MAX && met) exact |= weigh(S, add);
    if (!met || group_any(group, exact)) {
      const uint32_t valid = base + VALID + 8 * (ring() & 7);
      if (!all) {
        const uint32_t bits = load_shared4(valid + (g8 & 4)) >> (key() & 31);
        const bool ok0 = bits & 1, ok1 = bits & 256;
#pragma unroll
        for (int x = 0; x < HEADS / 2; x++) if (!(x & 2 ? ok1 : ok0)) S[x] = -INF;
      }
      if (met) {
        float top = -INF;
#pragma unroll
        for (int x = 0; x < HEADS / 2; x++) top = fmaxf(top, S[x]);
        grew = group_any(group, top > MOST);
      } else {
        grew = all || __ballot_sync(~0u, (load_shared4(valid) | load_shared4(valid + 4)) != 0);   // there is a key
      }
      if (grew || WITH_MAX) move_references(S, kept, first, met, met ? 1.f : c1);
      weigh(S, add);
    }
    if (WITH_LSE) {
      const float2 r = load_float2(base + REFERENCE + kept * TABLE + mine());
      const float now[2] = {met || grew ? r.x : 0.f, met || grew ? r.y : 0.f};
#pragma unroll
      for (int i = 0; i < 2; i++) { sum[i] = counted ? sum[i] * exp2_fast(refers[i] - now[i]) : 0.f; refers[i] = now[i]; }
    }
    if (w == 0 && one_lane()) { store_shared4(base + GREW + 4 * group, grew && met); store_shared4(base + MET + 4 * kept, grew || met); }
    __syncwarp();
    arrive_once(base + SETTLED + 8 * group);
    counted = met || grew;
    if (WITH_LSE) { sum[0] += add[0]; sum[1] += add[1]; }
    if (WITH_LSE && last) {
      const uint32_t ahead = number + TURNS - 1;
      wait(base + SUMS_READ + 8 * (ahead & 1), (ahead >> 1) & 1);   // those of the token before
      if (w == 0) store_float2(base + SUM_REFERENCE + group * TABLE + mine(), refers[0], refers[1]);
      add_sums(base + SUMS + group * TABLE + mine());
    }
    fence_async();
    __syncwarp();
    arrive_once(base + FULL + 8 * group);
    if (QUERIES == 2 && has_asked()) ask_angles((number + 1) & (TURNS - 1), position);
    own++;
    stage += GROUPS;
    if (stage >= STAGES) { stage -= STAGES; phase ^= 1; }
  }
  DI uint32_t query_of(uint32_t number) const { return base + QUERY + (number & (QUERIES - 1)) * QUERY_BYTES; }
  DI static uint32_t query_raw(uint32_t number, int half) { return QUERY_RAW + 16 * (number & 1) + 8 * half; }
  // Asks for blocks 4 half .. 4 half + 3 of the query of a token, number `number` of the CTA, from head `head` on.
  DI void ask_half(int token, int head, uint32_t number, int half) const {
    const uint32_t raw = base + query_raw(number, half);
    if (one_lane()) {
      arrive_and_expect(raw, 4 * BLOCK + (half && wants_angles() ? 256 : 0));
      copy_query(query_map, query_of(number) + 4 * half * BLOCK, 4 * half, head, token, raw);
    }
  }
  DI bool wants_angles() const { return p.rotate_query || p.unrotate_output; }
  // They come with the second half.
  DI void ask_angles(uint32_t number, const RawPosition& position) const {
    const float* table = rope_row(p, position.value(p));
    if (wants_angles() && one_lane()) copy_row(base + ANGLES + 256 * number, table, 256, base + query_raw(number, 1));
  }
  // The second half, and the token's angles.
  DI void ask_rest(int token, int head, uint32_t number, const RawPosition& position) const {
    ask_half(token, head, number, 1);
    ask_angles(number, position);
  }
  // By warp 0 of the group whose tile is the first of a token, while the others work on the tiles before: where there is one query, each
  // half of it is copied when the products with what was there are done.
  DI void ask_query(int item, uint32_t number) const {
    const int token = token_of(p, item), head = first_head(p, item);
    const RawPosition position = ask_position(p, token);
    if (QUERIES == 1) {
      wait(base + SETTLED + 8 * group, (own & 1) ^ 1); // of this group's other warps
      wait_others(base + HALF_READ);
    } else {
      wait(base + SETTLED + 8 * group_before(2), parity_before(2));   // of the token two before, which had this place; the tile before may be of the other one
    }
    ask_half(token, head, number, 0);
    if (QUERIES == 1) wait_others(base + ALL_READ);
    ask_rest(token, head, number, position);
  }
  // In the middle of a tile, by warp 0: if the group's next tile is the first of the next token, nobody needs what is where its query
  // goes. The position has not come yet.
  DI void ask_ahead(uint32_t number, RawPosition& position) {
    const uint32_t place = (ring() + GROUPS) & (TILES - 1), word = word_at(place), next = (number + 1) & (TURNS - 1);
    asked = word & TOKEN_FIRST && token_number(word) == next;
    if (!asked) return;
    const int item = item_at(place), token = token_of(p, item), head = first_head(p, item);
    position = ask_position(p, token);
    ask_half(token, head, next, 0);
    ask_half(token, head, next, 1);
  }
  DI bool has_asked() const { return __ballot_sync(~0u, asked); }   // a vote: for the compiler all lanes have the same
  // This warp's part of half of a token's query: the first half by the group whose tile is the first of the token, the second
  // by that of the tile after.
  DI void widen_query(int half, uint32_t number) const {
    int l = lane, rows = w;
    forget(l); forget(rows);
    wait(base + query_raw(number, half), (number >> 1) & 1);
    QueryRows(base, query_of(number), base + ANGLES + 256 * number, rows, l).widen(half, number, p.rotate_query);
  }
  // The second half for the tile before this group's next one, the first of its token.
  DI void widen_rest() const { widen_query(1, token_number(word_at(ring() - 1))); }
  // By warp 0, before the group's next tile. A place in UNITS is free once the copies of the tile before, which were started from
  // there, are over.
  DI void look_up() const {
    const int freed = stage ? stage - 1 : STAGES - 1;
    if (own || group) wait(base + RAW_FULL + 8 * freed, phase ^ (stage == 0));
    const int begins = lookup().next(ring(), group, freed);
    if (SPLITS > 1 || begins >= lookup().items() || !one_lane()) return;   // a split token is a CTA's only one
#pragma unroll 1
    for (int half = 0; half < 2; half++) prefetch_query(query_map, 4 * half, first_head(p, begins), token_of(p, begins));   // so that it is there when it is asked for
  }
  DI Lookup lookup() const { return {p, base, 0, lane, rank, item_step}; }
  DI uint32_t word_at(uint32_t place) const { return __shfl_sync(~0u, load_shared4(base + WHICH + 8 * (place & (TILES - 1))), 0); }
  DI int item_at(uint32_t place) const { return load_shared4(base + WHICH + 8 * (place & (TILES - 1)) + 4); }
  DI void run(int item0) {
    const bool work = item0 < p.tokens * p.head_blocks, asks = work && group == 0 && w == 0;
    const int token0 = token_of(p, item0), head0 = first_head(p, item0);
    RawPosition position;
    wait_for_launch_before();
    if (work) {
      float sink = -INF;
      if (asks) { ask_half(token0, head0, 0, 0); position = ask_position(p, token0); }
      if (group == 1 && p.sink && 32 * w + lane < p.heads) sink = __ldg(p.sink + 32 * w + lane);
      if (w == 0) lookup().ask_first(item0, group);
      if (group == 1) store_float(base + SINKS + (32 * w + lane) * 4, sink * LOG2E);
    }
    __syncthreads();
    if (work && is_tile(word_at(0)) && item_at(0) == item0) {
      if (asks) ask_rest(token0, head0, 0, position);   // after the slots, and about when the first rows are asked for
    } else if (work) {
      // What was asked for is of no use: the first row has no keys. The barrier is brought back to where it was.
      if (asks) {
        wait(base + QUERY_RAW, 0);
        if (one_lane()) arrive(base + QUERY_RAW);
        __syncwarp();
        if (is_tile(word_at(0))) ask_query(item_at(0), 0);
      }
      scores_sync();
    }
    uint32_t before = TURNS - 2;                       // number of the token of this group's last tile
    while (true) {
      const uint32_t word = word_at(ring()), number = token_number(word);
      const bool exists = is_tile(word), first = word & TOKEN_FIRST;
      const bool begins = word & (GROUP_FIRST | NONE); // the first tile of this group in the token, or none: else there is no query to care for
      if (begins) {
        // The tile before is the first of its token.
        if (word & TOKEN_SECOND || ((first || !exists) && (own || group) && word_at(ring() - 1) & TOKEN_FIRST)) widen_rest();
        const bool follows = number == ((before + 1) & (TURNS - 1));   // the token of this group's last tile was the one before
        before = number;
        if (first && !has_asked()) {
          if (QUERIES == 2 && !follows) {
            wait(base + SETTLED + 8 * group_before(2), parity_before(2));   // the token two before has had its query, which waited for the same barriers
          }
          if (w == 0 && (own || group)) ask_query(item_at(ring()), number);
        }
      }
      if (w == 0 && exists) look_up();                 // while the query comes
      if (begins) {
        if (!exists) break;
        if (first) widen_query(0, number);
        asked = false;
        wait(base + QUERY_FULL + 8 * (number & 1), (number >> 1) & 1);
        counted = false;
        if (QUERIES == 1 && word & TOKEN_SECOND) wait_before(base + ALL_READ);   // the values wait for the first tile of a token: it has the tensor cores for itself
      }
      if (A_KIND == B_KIND || !(word & COMPRESSED)) tile<A_KIND>(number, first, word & GROUP_LAST, word & ALL_EXIST);
      else tile<B_KIND>(number, first, word & GROUP_LAST, word & ALL_EXIST);
    }
    copy_wait<0>();
  }
};
