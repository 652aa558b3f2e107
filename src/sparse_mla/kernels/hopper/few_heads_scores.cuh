// The score role of few_heads.cu: query, S^T = K Q^T, weights.
#pragma once

// Eight words of 16 consecutive 16-bit values in the order of the products.
DI void order(uint32_t (&w)[8]) {
#if HAS_NVFP4
  const uint32_t v[8] = {permute(w[0], w[1], 0x5410), permute(w[2], w[3], 0x5410), permute(w[0], w[1], 0x7632), permute(w[2], w[3], 0x7632),
                         permute(w[4], w[5], 0x5410), permute(w[6], w[7], 0x5410), permute(w[4], w[5], 0x7632), permute(w[6], w[7], 0x7632)};
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = v[i];
#endif
}
// Byte of this lane's pair of words of a k16 step.
DI uint32_t query_place(int step, int lane) { return (step >> 1) * 512 + (step & 1) * 8 + lane * 16; }
// Byte of 8 bf16 of this lane, half `h` of its 16 dims, as they are loaded: where only this lane's words will be.
DI uint32_t raw_place(int d, int h, int lane) { return (2 * d + h) * 512 + lane * 16; }
// Asks for the warp's part of an item's query: dims 64 d .. of head g of the block, zero for a head that does not exist. Lanes
// that are side by side read what lies side by side: bytes 16 c of a head's 128, half c & 1 of lane c / 2.
DI void ask_query(const Args& p, uint32_t query, int item, int d, int g, int t) {
  const int token = token_of(p, item), head = first_head(p, item) + g;
  const bool here = head < p.heads && token < p.tokens;
  const uint8_t* from = p.q + (here ? (int64_t)token * p.q_token_stride + (p.query_chunked ? (4 * d * p.heads + head) * 32 : head * p.q_head_stride + d * 128) : 0);
#pragma unroll
  for (int c = t; c < t + 8; c += 4) {
    const int place = p.query_chunked ? (c >> 1) * p.heads * 32 + (c & 1) * 16 : c * 16;
    copy_async<16>(query + raw_place(d, c & 1, 4 * g + (c >> 1)), from + (here ? place : 0), here ? 16 : 0);
  }
}
// Of the CTA's token number n.
DI int position_of(const Args& p, uint32_t base, int n) {
  if (!p.positions) return 0;
  const uint2 x = load_shared8(base + POSITIONS + (n & 3) * 8);
  return RawPosition{(int)x.x, (int)x.y}.value(p);
}
// What a token needs before its first tile goes to shared memory, so that nothing waits for it and no register holds it:
// warp 0 asks for the lengths (lanes 0 and 1), warp 7, which rotates, for the position (2 and 3) of the CTA's token number n.
DI void ask_ahead(const Args& p, uint32_t base, int warp, int lane, int item, int n) {
  const int token = token_of(p, item);
  const int* from = lane == 0 ? p.a.lengths : lane == 1 ? p.b.lengths : p.positions;
  if (lane >= 4 || (warp == 0) != (lane < 2) || !from || token >= p.tokens) return;
  from += lane < 2 ? token : (int64_t)token * p.position_step + (lane - 2) * (p.position_step - 1);
  copy_async<4>(base + (lane < 2 ? LENGTHS + (n & 1) * 8 : POSITIONS + (n & 3) * 8 - 8) + lane * 4, from, 4);
}
// Sinks of an item's heads, token number n.
DI void ask_sinks(const Args& p, uint32_t base, int lane, int item, int n) {
  const int head = first_head(p, item) + lane;
  if (lane < HEADS && p.sink && head < p.heads) copy_async<4>(base + SINKS + (n & 1) * END_BYTES + lane * 4, p.sink + head, 4);
}
// Angles of the CTA's token number n, cos and sin of 32 pairs, for the query and the output; its position is there.
DI void ask_angles(const Args& p, uint32_t base, int lane, int n) {
  if (lane < 16 && (p.rotate_query || p.unrotate_output)) copy_async<16>(base + ANGLES + (n & 3) * 256 + lane * 16, rope_row(p, position_of(p, base, n)) + lane * 4, 16);
}
// Of what the warp asked for: rotates, rounds to bf16, widens to f16, orders, and stores where all score warps find it.
DI void finish_query(const Args& p, uint32_t query, uint32_t angles, int d, int lane) {
  const uint4 x = load_shared16(query + raw_place(d, 0, lane)), y = load_shared16(query + raw_place(d, 1, lane));
  uint32_t w[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
  if (p.rotate_query && d == 7) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float4 c = load_float4(angles + (lane & 3) * 32 + 16 * h), s = load_float4(angles + 128 + (lane & 3) * 32 + 16 * h);
      w[4 * h] = turn(w[4 * h], c.x, s.x); w[4 * h + 1] = turn(w[4 * h + 1], c.y, s.y);
      w[4 * h + 2] = turn(w[4 * h + 2], c.z, s.z); w[4 * h + 3] = turn(w[4 * h + 3], c.w, s.w);
    }
  }
  order(w);
#pragma unroll
  for (int c = 0; c < 4; c++) store_shared8(query + query_place(4 * d + c, lane), bf16_to_f16(w[2 * c]), bf16_to_f16(w[2 * c + 1]));
}

// The query of a score warp, in registers.
struct Query {
  uint32_t w[32][2];           // of each k16 step

  DI void load(uint32_t query, int lane) {
#pragma unroll
    for (int step = 0; step < 32; step++) { const uint2 x = load_shared8(query + query_place(step, lane)); w[step][0] = x.x; w[step][1] = x.y; }
  }
  // Multiplies a k16 step of keys with it.
  DI void multiply(float (&c)[4], int step, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) const { mma(c, a0, a1, a2, a3, w[step][0], w[step][1]); }
};

// Codes of 16 dims of one key -> four words of e4m3 codes in the order of the products.
template <int KIND> DI uint4 load_codes(uint32_t a) {
  if (KIND == KIND_NVFP4) { const uint2 x = load_shared8(a); return make_uint4(e2m1_even(x.x), e2m1_odd(x.x), e2m1_even(x.y), e2m1_odd(x.y)); }
  uint4 x = load_shared16(a);
#if HAS_NVFP4
  x = make_uint4(permute(x.x, x.y, 0x6420), permute(x.x, x.y, 0x7531), permute(x.z, x.w, 0x6420), permute(x.z, x.w, 0x7531));
#endif
  return x;
}
DI void load_bf16(uint32_t (&w)[8], uint32_t a) {
  const uint4 x = load_shared16(a), y = load_shared16(a + 16);
  w[0] = x.x; w[1] = x.y; w[2] = x.z; w[3] = x.w; w[4] = y.x; w[5] = y.y; w[6] = y.z; w[7] = y.w;
  order(w);
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = bf16_to_f16(w[i]);
}
// pi
DI int key_pair(int g) { return (g & 4) | ((g & 1) << 1) | ((g >> 1) & 1); }
// S = scores of the block's keys 2 pi(g) (values 0, 1) and 2 pi(g) + 1 (2, 3) with heads 2 t (even), 2 t + 1 (odd).
template <int KIND> DI void score_block(float (&S)[4], const Query& q, uint32_t block, uint32_t table, int g, int t) {
  using R = Record<KIND>;
  constexpr int BYTES = KIND == KIND_NVFP4 ? 8 : 16;   // of a lane's 16 codes
  const int pair = key_pair(g);
  const uint32_t row = block + 2 * pair * R::PITCH;
  const int group = KIND == KIND_V4 ? 0 : KIND == KIND_MXFP8 ? t >> 1 : t;
  float C[4][4];               // four sums: products need not wait for each other
#pragma unroll
  for (int c = 0; c < 4; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) C[c][i] = 0.f;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 four = load_shared16(table + table_word<KIND>(pair, group, 4 * h));
    const uint32_t scales[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int d = 4 * h + i;
      if (KIND == KIND_V4 && d == 7) {
        uint32_t x[8], y[8];
        load_bf16(x, row + 448 + 32 * t); load_bf16(y, row + R::PITCH + 448 + 32 * t);
#pragma unroll
        for (int c = 0; c < 4; c++) q.multiply(C[c], 4 * d + c, x[2 * c], y[2 * c], x[2 * c + 1], y[2 * c + 1]);
        continue;
      }
      const uint4 x = load_codes<KIND>(row + d * 4 * BYTES + t * BYTES), y = load_codes<KIND>(row + R::PITCH + d * 4 * BYTES + t * BYTES);
      const uint32_t s0 = low_twice(scales[i]), s1 = high_twice(scales[i]);
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const uint32_t a0 = times(e4m3_low(xs[c]), s0), a1 = times(e4m3_low(ys[c]), s1), a2 = times(e4m3_high(xs[c]), s0), a3 = times(e4m3_high(ys[c]), s1);
        q.multiply(C[c], 4 * d + c, a0, a1, a2, a3);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) S[i] = (C[0][i] + C[1][i]) + (C[2][i] + C[3][i]);
}

// What the score warps left of a head at the end of a token.
struct EndOfToken { float maximum, sum, top; };
DI EndOfToken end_of_token(uint32_t end, int head) {
  const uint32_t at = end + SUMS + head * 4;
  EndOfToken x = {load_float(end + MAXIMUM + head * 4), 0.f, -INF};
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) { x.sum += load_float(at + i * HEAD_BYTES); if (WITH_MAX) x.top = fmaxf(x.top, load_float(at + i * HEAD_BYTES + TRUE_MAX - SUMS)); }
  return x;
}

// The score role.
struct Scores {
  const Args& p;
  uint32_t base;
  int warp, lane, g, t;
  float c1, threshold;
  Query q;
  float m[2], l[2], top[2];    // reference, sum and true maximum of heads 2 t and 2 t + 1
  float S[4];

  // Weights of the warp's block to shared memory; their sums.
  DI void weigh(bool active, int parity, float (&sum)[2]) {
    const uint32_t to = base + WEIGHTS + parity * WEIGHTS_BYTES + warp * 32 + key_pair(g) * 4 + 2 * t * WEIGHT_PITCH;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float reference = m[e] == -INF ? 0.f : m[e];
      const float x = exp2_fast(fmaf(S[e] - reference, c1, WEIGHT_SHIFT)), y = exp2_fast(fmaf(S[2 + e] - reference, c1, WEIGHT_SHIFT));
      sum[e] = active ? x + y : 0.f;
      if (active) store_shared4(to + e * WEIGHT_PITCH, pack_f16(x, y));
    }
  }
  // All score warps: move the maxima of a tile and weigh again.
  DI void move(bool active, int parity, float (&sum)[2]) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float x = active ? fmaxf(S[e], S[2 + e]) : -INF;
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 4)); x = fmaxf(x, __shfl_xor_sync(~0u, x, 8)); x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
      if (g == 0) store_float(base + TILE_MAX + warp * HEAD_BYTES + (2 * t + e) * 4, x);
    }
    meet<1>();
    const uint32_t at = base + TILE_MAX + 8 * t;
    float2 x = load_float2(at);
#pragma unroll
    for (int i = 1; i < BLOCKS; i++) { const float2 y = load_float2(at + i * HEAD_BYTES); x.x = fmaxf(x.x, y.x); x.y = fmaxf(x.y, y.y); }
    const float now[2] = {x.x, x.y};
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const bool moves = now[e] > m[e] + threshold;
      factor[e] = moves ? exp2_fast((m[e] - now[e]) * c1) : 1.f;
      m[e] = moves ? now[e] : m[e];
      l[e] *= factor[e];
    }
    if (warp == 0 && g == 0) store_float2(base + FACTORS + parity * HEAD_BYTES + 8 * t, factor[0], factor[1]);
    weigh(active, parity, sum);
    meet<1>();
  }
  DI bool score(Work work, Ring ring, int parity) {
    const Ring at = ring.ahead(warp);
    const uint32_t block = base + ROWS + at.place * BLOCK_BYTES;
    wait(base + FULL + 8 * at.place, at.round);
    uint32_t valid = load_shared4(base + VALID + 4 * at.place);
    if (A_KIND == B_KIND || warp < work.window()) {
      const uint32_t table = table_of(base, A_KIND == KIND_NVFP4, block, parity, warp);
      fill_table<A_KIND>(block, table, lane);
      __syncwarp();
      score_block<A_KIND>(S, q, block, table, g, t);
    } else {
      const uint32_t table = table_of(base, B_KIND == KIND_NVFP4, block, parity, warp);
      fill_table<B_KIND>(block, table, lane);
      __syncwarp();
      score_block<B_KIND>(S, q, block, table, g, t);
    }
    if (valid != 0xffff) {
      valid >>= 2 * key_pair(g);
#pragma unroll
      for (int i = 0; i < 4; i++) if (!((valid >> (i >> 1)) & 1)) S[i] = -INF;
    }
    bool grew = false;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float x = fmaxf(S[e], S[2 + e]);
      grew |= x > m[e] + threshold;
      if (WITH_MAX) top[e] = fmaxf(top[e], x);
    }
    return grew;
  }
  // End of the CTA's token number n: its maximum and sums, for the value role (of every CTA of the cluster).
  DI void finish(int n, int rank) {
    const uint32_t end = base + (n & 1) * END_BYTES;
    if (SPLITS > 1) { __syncwarp(); cluster_wait(); }        // the others have started
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const uint32_t at = end + SUMS + warp * HEAD_BYTES + (2 * t + e) * 4;
      float x = l[e];
      x += __shfl_xor_sync(~0u, x, 4); x += __shfl_xor_sync(~0u, x, 8); x += __shfl_xor_sync(~0u, x, 16);
      if (g == 0) store_float(at, x);
      if (WITH_MAX) {
        float y = top[e];
        y = fmaxf(y, __shfl_xor_sync(~0u, y, 4)); y = fmaxf(y, __shfl_xor_sync(~0u, y, 8)); y = fmaxf(y, __shfl_xor_sync(~0u, y, 16));
        if (g == 0) store_float(at + TRUE_MAX - SUMS, y);
      }
      if (warp == 0 && g == 0) store_float(end + MAXIMUM + (2 * t + e) * 4, m[e]);
    }
    __syncwarp();
#if SPLITS == 1
    if (WARP == 32 || lane == 0) arrive(base + FINAL_FULL + 8 * (n & 1));
    meet<1>();                 // nobody needs the query any more
#else
    meet<1>();
    if (warp > 0 || lane >= HEADS) return;
    const EndOfToken x = end_of_token(end, lane);
#pragma unroll
    for (int r = 0; r < SPLITS; r++) send4(remote(base + FINAL + (rank * HEADS + lane) * 16, r), x.maximum, x.sum, x.top, 0.f, remote(base + FINAL_FULL, r));
#endif
  }
  // Word of a tile, whose weights are there, to the value role.
  DI void publish(uint32_t work, int parity) {
    if (warp == 0 && lane == 0) store_shared4(base + TILE + 4 * parity, work);
    if (WARP == 32 || (warp == 0 && lane == 0)) arrive(base + WEIGHTS_FULL + 8 * parity);
  }
  // A tile: scores, weights, and word to the value role.
  DI void tile(Work work, bool first, Ring ring, int parity) {
    const bool active = warp < work.blocks();
    const bool grew = active && score(work, ring, parity);
    float sum[2];
    bool moves = true;
    if (!first) {
      weigh(active, parity, sum);
      moves = meet_or<1>(grew);
    }
    if (moves) move(active, parity, sum);
    publish(work.bits | (moves ? 1024 : 0), parity);
    l[0] += sum[0]; l[1] += sum[1];
  }
  // The query of the CTA's first token, its lengths and position are under way.
  DI void run(int rank, int step) {
    int item = blockIdx.x / SPLITS, parity = 0;
    uint32_t round = 1;          // parity of the weights' round that must be over
    Ring ring = {0, 0};
    Cursor cursor;
    if (warp == 7) {
      copy_wait<0>();            // the position is there, not the query
      __syncwarp();
      ask_angles(p, base, lane, 0);
    }
    copies_wait();
    __syncwarp();
    for (int n = 0; token_of(p, item) < p.tokens; n++, item += step) {
      const bool more = SPLITS == 1 && token_of(p, item + step) < p.tokens;
      finish_query(p, base + QUERY, base + ANGLES + (n & 3) * 256, warp, lane);
      meet<1>();
      const uint2 lengths = load_shared8(base + LENGTHS + (n & 1) * 8);
      cursor.enter(p, item, rank, p.a.lengths ? lengths.x : p.a.width, p.b.lengths ? lengths.y : p.b.width);
      if (warp == 0 || warp == 7) ask_ahead(p, base, warp, lane, item + step, n + 1);
      q.load(base + QUERY, lane);
#pragma unroll
      for (int e = 0; e < 2; e++) { m[e] = -INF; l[e] = 0.f; top[e] = -INF; }
      Work work;
      int tiles = 0;
      do {
        work = cursor.take();
        wait(base + WEIGHTS_EMPTY + 8 * parity, round);
        if (tiles == 0 && warp == 1 && SPLITS == 1) ask_sinks(p, base, lane, item, n);   // now the values are done with those of token n - 2
        tile(work, tiles == 0, ring, parity);
        tiles++;
        // By now everyone has loaded the query, and the position asked for above should be there.
        if (more && (tiles == 2 || (tiles == 1 && work.last()))) {
          if (warp == 7) { copies_wait(); __syncwarp(); ask_angles(p, base, lane, n + 1); }
          ask_query(p, base + QUERY, item + step, warp, g, t);
        }
        ring = ring.ahead(work.blocks());
        round ^= parity; parity ^= 1;
      } while (!work.last());
      copies_wait();           // what this warp asked for; others see it after the next meeting
      __syncwarp();
      finish(n, rank);
    }
    wait(base + WEIGHTS_EMPTY + 8 * parity, round);
    publish(0, parity);
  }
};
