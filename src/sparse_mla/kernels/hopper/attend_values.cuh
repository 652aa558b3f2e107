// The warpgroups of values, and the output.
#pragma once

// ---------------------------------------------------------------- values
struct Values {
  uint32_t base;               // shared memory
  int g, w, lane, g8, t;
};

// Heads lane and lane + 32 of a block, as far as it has them; of 16 heads two lanes have the same.
constexpr int LANE_HEADS = HEAD_TILES == 8 ? 2 : 1;
DI int lane_head(int lane, int i) { return (lane + 32 * i) & (HEADS - 1); }

// Factors of heads 8 c + 2 t + e, from a table of them.
DI void rescale(const Values& s, float (&acc)[2 * HEADS], uint32_t table) {
#pragma unroll
  for (int c = 0; c < HEAD_TILES; c++) {
    const float2 f = load_float2(table + (8 * c + 2 * s.t) * 4);
#pragma unroll
    for (int m = 0; m < 4; m++) { float* a = acc + HEADS / 2 * m + 4 * c; a[0] *= f.x; a[1] *= f.y; a[2] *= f.x; a[3] *= f.y; }
  }
}
// Sums of the weights: a warp has 16 heads, of so many of the four steps of 16 keys.
constexpr int SUM_STEPS = HEAD_TILES == 8 ? 2 : 1;
DI int sum_heads(const Values& s) { return 16 * (s.w & (HEAD_TILES / 2 - 1)); }   // the first
DI int sum_step(const Values& s) { return 2 * s.g + (HEAD_TILES == 8 ? 0 : HEAD_TILES == 4 ? s.w >> 1 : s.w & 1); }   // likewise
// The same for them: total[0] is that of the first head + g8, total[2] of 8 heads further.
DI void rescale_sums(const Values& s, float (&total)[4], uint32_t table) {
  const float f0 = load_float(table + (sum_heads(s) + s.g8) * 4), f1 = load_float(table + (sum_heads(s) + s.g8 + 8) * 4);
  total[0] *= f0; total[1] *= f0; total[2] *= f1; total[3] *= f1;
}
// A tile's weights as the tensor cores have them, to be added to the sums: where this lane reads them, step `k` of SUM_STEPS.
DI uint32_t summed_weights(const Values& s, int k) {
  const int row = s.lane & 15;
  return (sum_heads(s) + row) * 128 + (((2 * (sum_step(s) + k) + (s.lane >> 4)) ^ (row & 7)) << 4);
}
// Left operands of two row blocks, 4 dims of a lane: words of keys (h, e); `half`: which 4 of the 8 dims.
template <int KIND> DI void widen_words(uint32_t* a, const uint32_t (&x)[2][2], uint32_t sc0, uint32_t sc1, int half) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t sc = h ? sc1 : sc0;
    uint32_t v[4];
    if (KIND == KIND_NVFP4) {
      const uint32_t both = __byte_perm(x[h][0], x[h][1], half ? 0x7362 : 0x5140), even = e2m1_even(both), odd = e2m1_odd(both);
      v[0] = e4m3_pair<0>(even); v[1] = e4m3_pair<0>(odd); v[2] = e4m3_pair<1>(even); v[3] = e4m3_pair<1>(odd);
    } else {
      const uint32_t lo = __byte_perm(x[h][0], x[h][1], 0x5140), hi = __byte_perm(x[h][0], x[h][1], 0x7362);
      v[0] = e4m3_pair<0>(lo); v[1] = e4m3_pair<1>(lo); v[2] = e4m3_pair<0>(hi); v[3] = e4m3_pair<1>(hi);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) a[4 * (i >> 1) + 2 * h + (i & 1)] = times(numbers_of_f16(v[i]), sc);
  }
}
// The same from bf16 dims.
DI void widen_tail(uint32_t* a, const uint32_t (&x)[2][2], const uint32_t (&y)[2][2]) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    a[2 * h] = numbers_of_bf16(__byte_perm(x[h][0], x[h][1], 0x5410)); a[2 * h + 1] = numbers_of_bf16(__byte_perm(x[h][0], x[h][1], 0x7632));
    a[4 + 2 * h] = numbers_of_bf16(__byte_perm(y[h][0], y[h][1], 0x5410)); a[4 + 2 * h + 1] = numbers_of_bf16(__byte_perm(y[h][0], y[h][1], 0x7632));
  }
}
// Adds a tile to the accumulators, and does what else there is to do between its eight steps: acc[HEADS / 2 m + 4 c + 2 r + e] is dim 2 m + r of the lane's 8, head 8 c + 2 t + e.
constexpr int PRODUCTS = 2;      // pairs of them at once
template <int KIND, class Side> DI void add_tile(const Values& s, float (&acc)[2 * HEADS], uint32_t raw, uint64_t right, bool first, Side side) {
  constexpr int PITCH = Raw<KIND>::PITCH;
  const bool tail = KIND == KIND_V4 && s.g == 1 && s.w == 3;
  const uint32_t rows = raw + s.t * (16 * PITCH + 32) + (tail ? 448 + 16 * s.g8 : (256 * s.g + 64 * s.w + 8 * s.g8) >> (KIND == KIND_NVFP4));
  const uint32_t scales = raw + scales_at<KIND>() + 8 * s.t + (KIND == KIND_NVFP4 ? (4 * (s.w & 1) + (s.g8 >> 1)) * PART + (2 * s.g + (s.w >> 1)) * 32
                                                                                 : (2 * (s.w & 1) + (s.g8 >> 2)) * PART + (2 * s.g + (s.w >> 1)) * 32);
  uint32_t A[PRODUCTS][8], x[2][2], y[2][2];
  uint2 pairs;
  const auto read = [&](int k) {
    pairs = load_shared8(scales + 128 * k);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const uint32_t from = rows + (8 * h + 4 * e + k) * PITCH;
        if (KIND == KIND_NVFP4) { x[h][e] = load_shared4(from); y[h][e] = x[h][e]; }
        else { const uint2 v = load_shared8(from); x[h][e] = v.x; y[h][e] = v.y; }
      }
  };
  read(0);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint32_t sc0 = __byte_perm(pairs.x, pairs.y, 0x5410), sc1 = __byte_perm(pairs.x, pairs.y, 0x7632);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t* a = A[(2 * k + half) % PRODUCTS];
      if (2 * k + half >= PRODUCTS) mma_wait<PRODUCTS - 1>();   // the products that read them
      if (tail) {
        if (half == 1) {
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) { const uint2 v = load_shared8(rows + (8 * h + 4 * e + k) * PITCH + 8); x[h][e] = v.x; y[h][e] = v.y; }
        }
        widen_tail(a, x, y);
      } else {
        if (half == 0) widen_words<KIND>(a, x, sc0, sc1, half);
        else widen_words<KIND>(a, y, sc0, sc1, half);
      }
      if (half == 1 && k < 3) read(k + 1);            // early: they arrive while the products are issued
      mma_fence();
      const int keep = k > 0 || !first;
      if (half == 0) { keys_mma<0>(acc, a, right + 2 * k, keep); keys_mma<HEADS / 2>(acc, a + 4, right + 2 * k, keep); }
      else { keys_mma<HEADS>(acc, a, right + 2 * k, keep); keys_mma<HEADS * 3 / 2>(acc, a + 4, right + 2 * k, keep); }
      mma_commit();
      side(2 * k + half);                             // the products are under way
    }
  }
  mma_wait<0>();
}

DI void write_statistics(const Args& p, int token, int head, float m, float l, float true_max) {
  if (head >= p.heads) return;
  const int64_t at = (int64_t)token * p.heads + head;
  if (WITH_LSE && p.lse) p.lse[at] = l == 0.f ? INF : m * LN2 + logf(l);
  if (WITH_MAX && p.max_logits) p.max_logits[at] = true_max * LN2;
}
// Denominator with the sink, relative to 2^m.
DI float denominator(uint32_t base, int head, float m, float l) { return l + exp2_fast(load_float(base + SINKS + 4 * head) - m); }

// 0 without keys, and where huge logits rounded all weights away.
DI float share(float denominator) { return denominator > 0.f ? reciprocal(denominator) : 0.f; }

// Where the rows of a token go; a lane holds 8 dims of a head, four lanes a block of 32.
struct Output {
  const Args& p;
  uint8_t* data;               // of the token
  int token, head0, block, part, t;
  uint32_t codes;              // of the scales that this lane is to store, one byte a pair of c
  uint32_t at;                 // from there to this lane's dims of head0 + 2 t, but for what its group adds
  uint32_t group_mul, group_of_first;   // head / heads_per_group = head * group_mul >> 16; before that shift, of head0 + 2 t
  uint32_t group_bytes;        // what a group adds to a head's place
  int left;                    // heads from head0 + 2 t on

  static constexpr int STEP = OUT_CHUNKED ? 32 : 512;   // values between heads of a group

  DI void start(int first_block) {
    block = first_block;
    group_mul = 65536u / p.heads_per_group + 1;
    constexpr int BYTES = FP8_OUTPUT ? 1 : 2;
    data = p.out + (int64_t)token * p.heads * (512 * BYTES);
    at = ((head0 + 2 * t) * STEP + block * (OUT_CHUNKED ? 32 * p.heads_per_group : 32) + part * 8) * BYTES;
    group_of_first = (head0 + 2 * t) * group_mul;
    group_bytes = p.heads_per_group * 480 * BYTES;   // chunked: a group is 512 values a head, of which heads are 32 apart
    forget(at); forget(group_bytes);
    left = p.heads - head0 - 2 * t;
    codes = 0;
  }
  // Of head 8 c + 2 t + e.
  DI uint8_t* place(int c, int e) const {
    uint32_t place = at;
    if (OUT_CHUNKED) place += (group_of_first + (8 * c + e) * group_mul >> 16) * group_bytes;
    return data + place + (8 * c + e) * STEP * (FP8_OUTPUT ? 1 : 2);
  }
  DI void store_bf16(const float (&v)[8], float w, int c, int e) const {
    store_global16_if(8 * c + e < left, place(c, e), bf16_of(v, w));
  }
  DI void store_fp8(const float (&v)[8], float f, int c, int e) const {
    store_global8_if(8 * c + e < left, place(c, e), e4m3_of(v, f));
  }
  DI static float largest(const float (&v)[8]) {
    return fmaxf(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))), fmaxf(fmaxf(fabsf(v[4]), fabsf(v[5])), fmaxf(fabsf(v[6]), fabsf(v[7]))));
  }
  // Head 8 c + 2 t + e times w, for a lane that knows only this head.
  DI void store(const float (&v)[8], float w, int c, int e) {
    if (!FP8_OUTPUT) { store_bf16(v, w, c, e); return; }
    float amax = largest(v);
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 4)); amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 8));
    const uint32_t code = scale_code(amax * w);
    store_fp8(v, unscale(code) * w, c, e);
    if (part == 2 * (c & 1) + e) codes |= code << (8 * (c >> 1));
  }
  // What heads 8 c + 2 t + e are to be multiplied by, in `factors`: each lane finds those of four of them, whose scales it
  // will store. top[2 c + e]: the largest of this lane's numbers; f: of heads lane and lane + 32, the share of a sum.
  DI void find_scales(float (&top)[HEADS / 4], const float (&f)[LANE_HEADS], float (&factors)[HEADS / 16]) {
#pragma unroll
    for (int x = 0; x < HEAD_TILES; x++) {          // the lane with the other bit of c
      const int even = 4 * (x >> 1) + (x & 1);
      const float give = part & 2 ? top[even] : top[even + 2], keep = part & 2 ? top[even + 2] : top[even];
      top[even] = fmaxf(keep, __shfl_xor_sync(~0u, give, 8));
    }
#pragma unroll
    for (int k = 0; k < HEADS / 16; k++) { // and of e
      const float give = part & 1 ? top[4 * k] : top[4 * k + 1], keep = part & 1 ? top[4 * k + 1] : top[4 * k];
      const float amax = fmaxf(keep, __shfl_xor_sync(~0u, give, 4));
      const float w = __shfl_sync(~0u, f[k >> 1], 16 * (k & 1) + 8 * (part >> 1) + 2 * t + (part & 1));
      const uint32_t code = scale_code(amax * w);
      codes |= code << (8 * k);
      factors[k] = unscale(code) * w;
    }
  }
  // Scales of pieces 2 c + e (heads 8 c + 2 t + e) from first to last; this lane's are those of c = 2 k + (part >> 1).
  DI void store_scales(int first, int last) const {
    if (!FP8_OUTPUT) return;
#pragma unroll
    for (int k = 0; k < HEADS / 16; k++) {
      const int own = 2 * (part >> 1), e = part & 1, piece = 4 * k + own + e, further = 16 * k + 4 * own + e;   // heads further than head0 + 2 t
      // Its number among the scales of a token, 4 to a word: block hpg + member in a group of 16 hpg, or 16 head + block.
      const uint32_t head = head0 + 2 * t + further, hpg = p.heads_per_group;
      const uint32_t number = OUT_CHUNKED ? (group_of_first + further * group_mul >> 16) * 15 * hpg + head + block * hpg : head * 16 + block;
      store_global1_if(further < left && piece >= first && piece <= last, (uint8_t*)(p.scales + token) + (uint64_t)(number >> 2) * p.scale_stride * 4 + (number & 3), codes >> (8 * k));
    }
  }
};
// Of the last 64 dims COUNT pieces from piece FIRST on, turned back. `table`: cosines of this lane's four pairs, sines 128 bytes further.
template <int FIRST, int COUNT> DI void unrotate(float (&acc)[2 * HEADS], uint32_t table) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float co = load_float(table + 4 * i), si = load_float(table + 128 + 4 * i);   // not all of them: registers are few
#pragma unroll
    for (int x = FIRST; x < FIRST + COUNT; x++) {
      float* a = acc + HEADS / 2 * i + 4 * (x >> 1) + (x & 1);
      unrotate_pair(a[0], a[2], co, si);
    }
  }
}
DI void dims_of(float (&v)[8], const float (&acc)[2 * HEADS], int c, int e) {
#pragma unroll
  for (int m = 0; m < 4; m++) { v[2 * m] = acc[HEADS / 2 * m + 4 * c + e]; v[2 * m + 1] = acc[HEADS / 2 * m + 4 * c + 2 + e]; }
}
// All rows of a warp; f: the shares of heads lane and lane + 32.
DI void store_rows(Output& out, const float (&acc)[2 * HEADS], const float (&f)[LANE_HEADS], int lane) {
  float v[8], top[HEADS / 4], factors[HEADS / 16];
  if (FP8_OUTPUT) {
#pragma unroll
    for (int x = 0; x < HEADS / 4; x++) { dims_of(v, acc, x >> 1, x & 1); top[x] = Output::largest(v); }
    out.find_scales(top, f, factors);
  }
#pragma unroll
  for (int c = 0; c < HEAD_TILES; c++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      dims_of(v, acc, c, e);
      if (FP8_OUTPUT) out.store_fp8(v, __shfl_sync(~0u, factors[c >> 1], (lane & ~12) | (2 * (c & 1) + e) << 2), c, e);
      else out.store_bf16(v, __shfl_sync(~0u, f[c >> 2], (8 * c + 2 * out.t + e) & 31), c, e);
    }
}
#if SPLITS > 1
DI int first_finished(int rank) { return rank * SHARE / 2 * 8; }       // head of the block

// A warp's sums of a split token, and what comes of them.
struct Parts {
  const Args& p;
  const Values& s;
  int slab, rank;
  uint32_t angles;             // for `unrotate`, or 0
  const float (&M)[LANE_HEADS], (&L)[LANE_HEADS], (&T)[LANE_HEADS];   // of heads lane and lane + 32: reference, sum of the weights, true maximum

  // In a box of CTA `owner`: this warp's pieces of a round for CTA `other`, or from it.
  DI uint32_t place(int owner, int round, int other) const { return ((round * (SPLITS - 1) + other - (other > owner)) * 8 + slab) * MESSAGE; }
  DI uint32_t full(int round, int to) const { return remote(s.base + PARTS_FULL + 8 * round, to); }

  // Statistics go to every other CTA, of the heads that it finishes, by one warp for each. This leaves them where they are sent from.
  DI void leave_statistics() const {
    if (slab >= SPLITS || slab == rank) return;
#pragma unroll
    for (int i = 0; i < LANE_HEADS; i++) {
      const int head = lane_head(s.lane, i) - first_finished(slab);
      if ((HEADS >= 32 || s.lane < HEADS) && head >= 0 && head < SHARE_HEADS) store_float4(s.base + FINAL_OUT + slab * FINAL_BYTES + head * 16, M[i], L[i], T[i], 0.f);
    }
  }
  DI void send_statistics() const {
    if (slab < SPLITS && slab != rank && one_lane()) send_block(remote(s.base + FINAL + rank * FINAL_BYTES, slab), s.base + FINAL_OUT + slab * FINAL_BYTES, FINAL_BYTES, full(0, slab));
  }
  // Round number N and following of the pieces that CTA TO finishes.
  template <int TO, int N = 0> DI void send_to(float (&acc)[2 * HEADS]) const {
    constexpr int FIRST = TO * SHARE + N * ROUND;
    if (angles) unrotate<FIRST, ROUND>(acc, angles);
    int lane = s.lane;
    forget(lane);              // addresses are not kept, spilled, all along
    const uint32_t from = s.base + OUTBOX + place(rank, N, TO);
#pragma unroll
    for (int i = 0; i < ROUND; i++) {
      const uint32_t to = from + 1024 * i + lane * 16;
      float v[8];
      dims_of(v, acc, (FIRST + i) >> 1, (FIRST + i) & 1);
      store_float4(to, v[0], v[1], v[2], v[3]); store_float4(to + 512, v[4], v[5], v[6], v[7]);
    }
    fence_async();
    __syncwarp();
    if (N == 0 && TO == (rank == 0 ? 1 : 0)) send_statistics();   // once, with what is sent first
    if (one_lane()) send_block(remote(s.base + INBOX + place(TO, N, rank), TO), from, MESSAGE, full(N, TO));
    if constexpr (N + 1 < ROUNDS) send_to<TO, N + 1>(acc);
  }
  // What CTA TO and following finish, except for this one.
  template <int TO = 0> DI void send(float (&acc)[2 * HEADS]) const {
    if (TO != rank) send_to<TO>(acc);
    if constexpr (TO + 1 < SPLITS) send<TO + 1>(acc);
  }
  // This lane's dims of a piece.
  DI static void load_piece(float (&x)[8], uint32_t from) {
    const float4 low = load_float4(from), high = load_float4(from + 512);
    x[0] = low.x; x[1] = low.y; x[2] = low.z; x[3] = low.w; x[4] = high.x; x[5] = high.y; x[6] = high.z; x[7] = high.w;
  }
  // The share that the sums of each CTA have, of head first_finished(TO) + lane of this CTA, TO; lanes beyond the heads have those of others.
  template <int TO> DI void weigh(float (&w)[SPLITS], const Output& out) const {
    const int number = s.lane & (SHARE_HEADS - 1), first = first_finished(TO), head = out.head0 + first + number;
    float4 x[SPLITS];
    float top = -INF, all = 0.f, true_max = -INF;
#pragma unroll
    for (int r = 0; r < SPLITS; r++) {
      if (r == TO) {
        const int i = first >> 5, from = (first + number) & 31;   // who knows that head
        x[r] = make_float4(__shfl_sync(~0u, M[i], from), __shfl_sync(~0u, L[i], from), WITH_MAX ? __shfl_sync(~0u, T[i], from) : -INF, 0.f);
      } else {
        x[r] = load_float4(s.base + FINAL + r * FINAL_BYTES + number * 16);
      }
      top = fmaxf(top, x[r].x); true_max = fmaxf(true_max, x[r].z);
    }
#pragma unroll
    for (int r = 0; r < SPLITS; r++) { w[r] = top == -INF ? 0.f : exp2_fast(x[r].x - top); all += x[r].y * w[r]; }
    if (slab == 0 && s.lane < SHARE_HEADS) write_statistics(p, out.token, head, top, all, true_max);
    const float one = share(denominator(s.base, head, top, all));
#pragma unroll
    for (int r = 0; r < SPLITS; r++) w[r] *= one;
  }
  // Adds what this CTA was sent to its own sums, in rank order, and writes that; if it is TO or one of those that follow.
  template <int TO = 0> DI void finish(float (&acc)[2 * HEADS], Output& out) const {
    if (TO == rank) {
      float w[SPLITS];
      if (angles) unrotate<TO * SHARE, SHARE>(acc, angles);   // while the others' are on their way
      wait_for_cluster(s.base + PARTS_FULL, 0);
      weigh<TO>(w, out);
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        const int c = (TO * SHARE + i) >> 1, e = (TO * SHARE + i) & 1, round = i / ROUND;
        if (i % ROUND == 0 && i > 0) wait_for_cluster(s.base + PARTS_FULL + 8 * round, 0);
        if (i == SHARE - ROUND) cluster_arrive_relaxed();   // all has come that others sent, so they may leave
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int r = 0; r < SPLITS; r++) {
          const float f = __shfl_sync(~0u, w[r], 8 * c + 2 * s.t + e - first_finished(TO));
          float x[8];
          if (r == TO) dims_of(x, acc, c, e);
          else load_piece(x, s.base + INBOX + place(TO, round, r) + 1024 * (i % ROUND) + s.lane * 16);
#pragma unroll
          for (int k = 0; k < 8; k++) v[k] += x[k] * f;
        }
        out.store(v, 1.f, c, e);
      }
      out.store_scales(TO * SHARE, TO * SHARE + SHARE - 1);
    } else if constexpr (TO + 1 < SPLITS) {
      finish<TO + 1>(acc, out);
    }
  }
};
#endif

// What will be asked of the next item, into L1 while the tiles are under way.
DI void prefetch_ahead(const Args& p, int lane, int next_item) {
  const void* a = nullptr;
  if (SPLITS == 1 && next_item < p.tokens * p.head_blocks) {   // a split token is a CTA's only one
    const int token = token_of(p, next_item);
    if (lane == 2 && p.a.lengths) a = p.a.lengths + token;
    if (lane == 3 && p.b.lengths) a = p.b.lengths + token;
    if (lane == 4 && p.positions) a = position_at(p, token);
  }
  if (a) prefetch_l1(a);
}

// Of heads lane and lane + 32, if a tile had a key: the reference and the true maximum.
DI void read_references(uint32_t base, int lane, uint32_t kept, float (&M)[LANE_HEADS], float (&T)[LANE_HEADS]) {
  if (!load_shared4(base + MET + 4 * kept)) return;
#pragma unroll
  for (int i = 0; i < LANE_HEADS; i++) {
    const uint32_t head = kept * TABLE + lane_head(lane, i) * 4;
    M[i] = load_float(base + REFERENCE + head);
    if (WITH_MAX) T[i] = load_float(base + TRUE_MAX + head);
  }
}
// For lse: the sum of the weights before they were rounded, of the groups of scores that had tiles of the token; `group` had the last, number `number`.
// In the order of the token's tiles, not of the groups: a row has the same bits wherever it stands in a batch.
DI void read_sums(uint32_t base, int lane, int group, int number, const float (&M)[LANE_HEADS], float (&L)[LANE_HEADS]) {
  const int behind = number % GROUPS, first = group >= behind ? group - behind : group - behind + GROUPS;   // of the token's first tile
#pragma unroll
  for (int i = 0; i < LANE_HEADS; i++)
#pragma unroll
    for (int x = 0; x < GROUPS; x++) {
      if (x > number) continue;
      const uint32_t at = (first + x >= GROUPS ? first + x - GROUPS : first + x) * TABLE + lane_head(lane, i) * 4;
      const float sum = load_float(base + SUMS + at);
      L[i] += sum == 0.f ? 0.f : sum * exp2_fast(load_float(base + SUM_REFERENCE + at) - M[i]);
    }
}
// The sums that each warp has of some of a token's rounded weights, to all of them.
DI void share_sums(const Values& s, uint32_t parity, const float (&total)[4], float (&L)[LANE_HEADS]) {
  const uint32_t sums = s.base + SUMS + parity * 512;
  int lane = s.lane;
  forget(lane);                     // addresses are not kept, spilled, all along
  const uint32_t own = sums + s.g * 256 + (16 * s.w + (lane >> 2)) * 4;
  if ((lane & 3) == 0) { store_float(own, total[0]); store_float(own + 32, total[2]); }
  values_sync();
#pragma unroll
  for (int i = 0; i < LANE_HEADS; i++) {
    const uint32_t at = sums + lane_head(lane, i) * 4;
    L[i] = load_float(at) + load_float(at + 256);
    if (HEAD_TILES < 8) L[i] += load_float(at + HEADS * 4) + load_float(at + 256 + HEADS * 4);
  }
}

// What the warps of values know of the tile after the one that they add.
struct NextTile {
  uint32_t word;               // Walk::word
  int item;

  DI bool exists() const { return is_tile(word); }
  DI bool compressed() const { return word & COMPRESSED; }
  DI bool last() const { return word & TOKEN_LAST; }   // of its token
};
DI NextTile next_tile(uint32_t base, uint32_t tile) {
  const uint2 x = load_shared8(base + WHICH + 8 * (tile & (TILES - 1)));
  return {__shfl_sync(~0u, x.x, 0), (int)__shfl_sync(~0u, x.y, 0)};
}

DI void add_values(const Args& p, uint32_t base, int g, int w, int lane, int rank, int item0, int item_step) {
  Values s;
  s.base = base; s.g = g; s.w = w; s.lane = lane; s.g8 = lane >> 2; s.t = lane & 3;
  float acc[2 * HEADS];
  const int items = p.tokens * p.head_blocks, slab = 4 * g + w;   // slab: 64 dims, this warp's
  uint32_t done = 0, tokens = 0;    // tiles; tokens that have keys
  int stage = 0, freed = STAGES - 1;   // of this tile and of the tile before, where the rows of a tile to come go
  int group = 0, group_before = GROUPS - 1;   // of scores, likewise
  uint32_t phase = 0, turn = 0, turn_before = 1;   // parities of the stage's, of the group's and of the tile before
  uint32_t summed[SUM_STEPS];
#pragma unroll
  for (int k = 0; k < SUM_STEPS; k++) summed[k] = base + WEIGHTS + summed_weights(s, k);
  uint32_t first_weights = dim_major_low(base + WEIGHTS);   // of a descriptor of them
  forget(first_weights);
  Coming coming{p};
  coming.lane = lane;
  Lookup{p, base, slab, lane, rank, item_step}.begin(item0);
  __syncthreads();                  // the first rows are looked up
  NextTile next = next_tile(base, 0);
#pragma unroll 1
  for (int i = 0; i < AHEAD; i++) {
    // Those after the first GROUPS - 1 are asked for when the first is there: at the start every CTA waits for device memory.
    if (i == GROUPS - 1 && next.exists()) wait(base + RAW_FULL, 0);
    coming.look(base, i, i, slab);
    coming.start(base, i, slab);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) coming.copy(pair);   // from registers: a loop takes 150 clocks a row
  }
  for (int item = item0; item < items; item += item_step) {
    const int token = token_of(p, item), head0 = first_head(p, item);
    const bool has_keys = next.exists() && next.item == item;
    const uint32_t angles = base + ANGLES + 256 * (tokens & (TURNS - 1));
    prefetch_ahead(p, lane, item + item_step);
    float M[LANE_HEADS], L[LANE_HEADS], T[LANE_HEADS];   // of heads lane and lane + 32: reference and true maximum (log2 units), sum of the weights
#pragma unroll
    for (int i = 0; i < LANE_HEADS; i++) { M[i] = -INF; L[i] = 0.f; T[i] = -INF; }
    if (!has_keys) {
#pragma unroll
      for (int x = 0; x < 2 * HEADS; x++) acc[x] = 0.f;
    }
    float total[4] = {0.f, 0.f, 0.f, 0.f};
    int number = 0;
    bool last = !has_keys;
    while (!last) {
      const uint32_t raw = base + RAW + stage * STAGE;
      const uint64_t weights = dim_major_of(first_weights + group * (BLOCK >> 4));
      last = next.last();
      wait(base + FULL + 8 * group, turn);
      const bool grew = load_shared4(base + GREW + 4 * group);
      uint32_t some[SUM_STEPS][4];
      if (!WITH_LSE) {
#pragma unroll
        for (int k = 0; k < SUM_STEPS; k++) load_matrices(some[k], summed[k] + group * BLOCK);
      }
      wait(base + RAW_FULL + 8 * stage, phase);       // long over, but what the copies wrote is this thread's to read now
      if (number && grew) {
        rescale(s, acc, base + RESCALE + group * TABLE);
        if (!WITH_LSE) rescale_sums(s, total, base + RESCALE + group * TABLE);
      }
      if (!WITH_LSE) {
#pragma unroll
        for (int k = 0; k < SUM_STEPS; k++) add_rows(total, some[k]);
      }
      coming.look(base, done + AHEAD, freed, slab);
      const NextTile tile = next;
      const auto side = [&](int step) {
        if (step == 0) {
          wait(base + WEIGHTS_EMPTY + 8 * group_before, turn_before);   // the tile before, whose rows were in the stage
          coming.start(base, freed, slab);
        }
        if (step & 1) coming.copy(step >> 1);
        if (step == 7) next = next_tile(base, done + 1);
      };
      if (A_KIND == B_KIND || !tile.compressed()) add_tile<A_KIND>(s, acc, raw, weights, number == 0, side);
      else add_tile<B_KIND>(s, acc, raw, weights, number == 0, side);
      __syncwarp();
      if (last) {
        read_references(base, lane, tokens & (KEPT - 1), M, T);
        if (WITH_LSE) {
          read_sums(base, lane, group, number, M, L);
          __syncwarp();
          arrive_once(base + SUMS_READ + 8 * (tokens & 1));
        }
      }
      arrive_once(base + WEIGHTS_EMPTY + 8 * group);
      number++;
      done++;
      group_before = group; turn_before = turn;
      next_place<GROUPS>(group, turn);
      freed = stage;
      next_place<STAGES>(stage, phase);
    }
    if (!WITH_LSE && has_keys) share_sums(s, tokens & 1, total, L);
    tokens += has_keys;
    Output out{p, nullptr, token, head0, 0, s.g8 & 3, s.t, 0, 0, 0, 0, 0, 0};
#if SPLITS == 1
    float f[LANE_HEADS];
#pragma unroll
    for (int i = 0; i < LANE_HEADS; i++) {
      const int head = head0 + lane_head(lane, i);
      f[i] = share(denominator(base, head, M[i], L[i]));
      if (g == 0 && w == 0) write_statistics(p, token, head, M[i], L[i], T[i]);
    }
    if (slab == 7 && has_keys && p.unrotate_output) unrotate<0, PIECES>(acc, angles + 16 * s.g8);
    out.start(2 * slab + (s.g8 >> 2));
    store_rows(out, acc, f, lane);
    out.store_scales(0, PIECES - 1);
#else
    const Parts parts{p, s, slab, rank, slab == 7 && has_keys && p.unrotate_output ? angles + 16 * s.g8 : 0, M, L, T};
    if (WITH_LSE || !has_keys) values_sync();   // all are done with rows and weights
    cluster_wait();                             // others have begun
    if (!EARLY && slab == 0) tell_cluster(base + PARTS_ROOM);
    wait_for_cluster(base + PARTS_ROOM, 0);
    parts.leave_statistics();
    parts.send(acc);
    out.start(2 * slab + (s.g8 >> 2));
    parts.finish(acc, out);
    cluster_wait();
#endif
  }
}
