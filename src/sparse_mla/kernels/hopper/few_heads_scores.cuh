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
// Byte of this lane's pair of words of a k16 step and head tile.
DI uint32_t query_place(int step, int n, int lane) {
  return (HEAD_TILES == 1 ? (step >> 1) * 512 + (step & 1) * 8 : (step * HEAD_PAIRS + (n >> 1)) * 512 + (n & 1) * 8) + lane * 16;
}
// Byte of 8 bf16 of this lane, half `h` of its 16 dims, as they are loaded: where only this lane's words will be.
DI uint32_t raw_place(int d, int n, int h, int lane) {
  return (HEAD_TILES == 1 ? 2 * d + h : (4 * d + 2 * (n & 1) + h) * HEAD_PAIRS + (n >> 1)) * 512 + lane * 16;
}
// Asks for the warp's part of an item's query: dims 64 d .. of head g of each head tile, zero for heads that do not exist. Lanes
// that are side by side read what lies side by side: bytes 16 c of a head's 128, half c & 1 of lane c / 2.
DI void ask_query(const Args& p, uint32_t query, int item, int d, int g, int t) {
  const int token = token_of(p, item), head0 = first_head(p, item) + g;
#pragma unroll
  for (int n = 0; n < HEAD_TILES; n++) {
    const int head = head0 + n * 8;
    const bool here = head < p.heads && token < p.tokens;
    const uint8_t* from = p.q + (here ? (int64_t)token * p.q_token_stride + (p.query_chunked ? (4 * d * p.heads + head) * 32 : head * p.q_head_stride + d * 128) : 0);
#pragma unroll
    for (int c = t; c < t + 8; c += 4) {
      const int place = p.query_chunked ? (c >> 1) * p.heads * 32 + (c & 1) * 16 : c * 16;
      copy_async<16>(query + raw_place(d, n, c & 1, 4 * g + (c >> 1)), from + (here ? place : 0), here ? 16 : 0);
    }
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
#pragma unroll
  for (int first = 0; first < HEAD_TILES; first += 2) {
    uint32_t q[2][8];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (first + e >= HEAD_TILES) break;
      uint32_t (&w)[8] = q[e];
      const uint4 x = load_shared16(query + raw_place(d, first + e, 0, lane)), y = load_shared16(query + raw_place(d, first + e, 1, lane));
      w[0] = x.x; w[1] = x.y; w[2] = x.z; w[3] = x.w; w[4] = y.x; w[5] = y.y; w[6] = y.z; w[7] = y.w;
      if (p.rotate_query && d == 7) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float4 c = load_float4(angles + (lane & 3) * 32 + 16 * h), s = load_float4(angles + 128 + (lane & 3) * 32 + 16 * h);
          w[4 * h] = turn(w[4 * h], c.x, s.x); w[4 * h + 1] = turn(w[4 * h + 1], c.y, s.y);
          w[4 * h + 2] = turn(w[4 * h + 2], c.z, s.z); w[4 * h + 3] = turn(w[4 * h + 3], c.w, s.w);
        }
      }
      order(w);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (first + e >= HEAD_TILES) break;
#pragma unroll
      for (int c = 0; c < 4; c++) store_shared8(query + query_place(4 * d + c, first + e, lane), bf16_to_f16(q[e][2 * c]), bf16_to_f16(q[e][2 * c + 1]));
    }
  }
}

// The query of a score warp: all of it in registers, or read for each product.
struct Query {
  uint32_t w[QUERY_IN_REGISTERS ? 32 : 1][HEAD_TILES][2];
  uint32_t at;                 // shared memory of this lane's words

  DI void fetch(int step, uint32_t (&b)[HEAD_TILES][2]) const {
    if (HEAD_TILES == 1) { const uint2 x = load_shared8(at + query_place(step, 0, 0)); b[0][0] = x.x; b[0][1] = x.y; return; }
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n += 2) {
      const uint4 x = load_shared16(at + query_place(step, n, 0));
      b[n][0] = x.x; b[n][1] = x.y;
      if (n + 1 < HEAD_TILES) { b[(n + 1) % HEAD_TILES][0] = x.z; b[(n + 1) % HEAD_TILES][1] = x.w; }
    }
  }
  DI void load() {
    if (QUERY_IN_REGISTERS) {
#pragma unroll
      for (int step = 0; step < 32; step++) fetch(step, w[QUERY_IN_REGISTERS ? step : 0]);
    }
  }
  // Multiplies a k16 step of keys with it.
  DI void multiply(float (&c)[HEAD_TILES][4], int step, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) const {
    uint32_t b[HEAD_TILES][2];
    if (!QUERY_IN_REGISTERS) fetch(step, b);
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
      if (QUERY_IN_REGISTERS) mma(c[n], a0, a1, a2, a3, w[QUERY_IN_REGISTERS ? step : 0][n][0], w[QUERY_IN_REGISTERS ? step : 0][n][1]);
      else mma(c[n], a0, a1, a2, a3, b[n][0], b[n][1]);
    }
  }
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
template <int KIND> DI void score_block(float (&S)[HEAD_TILES][4], const Query& q, uint32_t block, uint32_t table, int g, int t) {
  using R = Record<KIND>;
  constexpr int BYTES = KIND == KIND_NVFP4 ? 8 : 16;   // of a lane's 16 codes
  const int pair = key_pair(g);
  const uint32_t row = block + 2 * pair * R::PITCH;
  const int group = KIND == KIND_V4 ? 0 : KIND == KIND_MXFP8 ? t >> 1 : t;
  float C[CHAINS][HEAD_TILES][4];
#pragma unroll
  for (int c = 0; c < CHAINS; c++)
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) C[c][n][i] = 0.f;
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
        for (int c = 0; c < 4; c++) q.multiply(C[c % CHAINS], 4 * d + c, x[2 * c], y[2 * c], x[2 * c + 1], y[2 * c + 1]);
        continue;
      }
      const uint4 x = load_codes<KIND>(row + d * 4 * BYTES + t * BYTES), y = load_codes<KIND>(row + R::PITCH + d * 4 * BYTES + t * BYTES);
      const uint32_t s0 = low_twice(scales[i]), s1 = high_twice(scales[i]);
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const uint32_t a0 = times(e4m3_low(xs[c]), s0), a1 = times(e4m3_low(ys[c]), s1), a2 = times(e4m3_high(xs[c]), s0), a3 = times(e4m3_high(ys[c]), s1);
        q.multiply(C[c % CHAINS], 4 * d + c, a0, a1, a2, a3);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (CHAINS == 4) S[n][i] = (C[0][n][i] + C[1 % CHAINS][n][i]) + (C[2 % CHAINS][n][i] + C[3 % CHAINS][n][i]);
      else S[n][i] = CHAINS == 2 ? C[0][n][i] + C[1 % CHAINS][n][i] : C[0][n][i];
    }
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
  float m[HEAD_TILES][2], l[HEAD_TILES][2], top[HEAD_TILES][2];  // reference and true maximum, sum, of heads 2 t, 2 t + 1
  float S[HEAD_TILES][4];

  // Weights of the warp's block to shared memory; their sums.
  DI void weigh(bool active, int parity, float (&sum)[HEAD_TILES][2]) {
    const uint32_t to = base + WEIGHTS + parity * WEIGHTS_BYTES + warp * 32 + key_pair(g) * 4 + 2 * t * WEIGHT_PITCH;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float reference = m[n][e] == -INF ? 0.f : m[n][e];
        const float x = exp2_fast(fmaf(S[n][e] - reference, c1, WEIGHT_SHIFT)), y = exp2_fast(fmaf(S[n][2 + e] - reference, c1, WEIGHT_SHIFT));
        sum[n][e] = active ? x + y : 0.f;
        if (active) store_shared4(to + (8 * n + e) * WEIGHT_PITCH, pack_f16(x, y));
      }
  }
  // All score warps: move the maxima of a tile and weigh again.
  DI void move(bool active, int parity, float (&sum)[HEAD_TILES][2]) {
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float x = active ? fmaxf(S[n][e], S[n][2 + e]) : -INF;
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 4)); x = fmaxf(x, __shfl_xor_sync(~0u, x, 8)); x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
        if (g == 0) store_float(base + TILE_MAX + warp * HEAD_BYTES + (8 * n + 2 * t + e) * 4, x);
      }
    meet<1>();
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
      const uint32_t at = base + TILE_MAX + (8 * n + 2 * t) * 4;
      float2 x = load_float2(at);
#pragma unroll
      for (int i = 1; i < BLOCKS; i++) { const float2 y = load_float2(at + i * HEAD_BYTES); x.x = fmaxf(x.x, y.x); x.y = fmaxf(x.y, y.y); }
      const float now[2] = {x.x, x.y};
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const bool moves = now[e] > m[n][e] + threshold;
        factor[e] = moves ? exp2_fast((m[n][e] - now[e]) * c1) : 1.f;
        m[n][e] = moves ? now[e] : m[n][e];
        l[n][e] *= factor[e];
      }
      if (warp == 0 && g == 0) store_float2(base + FACTORS + parity * HEAD_BYTES + (8 * n + 2 * t) * 4, factor[0], factor[1]);
    }
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
      for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) if (!((valid >> (i >> 1)) & 1)) S[n][i] = -INF;
    }
    bool grew = false;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float x = fmaxf(S[n][e], S[n][2 + e]);
        grew |= x > m[n][e] + threshold;
        if (WITH_MAX) top[n][e] = fmaxf(top[n][e], x);
      }
    return grew;
  }
  // End of the CTA's token number n: its maximum and sums, for the value role (of every CTA of the cluster).
  DI void finish(int n, int rank) {
    const uint32_t end = base + (n & 1) * END_BYTES;
    if (SPLITS > 1) { __syncwarp(); cluster_wait(); }        // the others have started
#pragma unroll
    for (int i = 0; i < HEAD_TILES; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const uint32_t at = end + SUMS + warp * HEAD_BYTES + (8 * i + 2 * t + e) * 4;
        float x = l[i][e];
        x += __shfl_xor_sync(~0u, x, 4); x += __shfl_xor_sync(~0u, x, 8); x += __shfl_xor_sync(~0u, x, 16);
        if (g == 0) store_float(at, x);
        if (WITH_MAX) {
          float y = top[i][e];
          y = fmaxf(y, __shfl_xor_sync(~0u, y, 4)); y = fmaxf(y, __shfl_xor_sync(~0u, y, 8)); y = fmaxf(y, __shfl_xor_sync(~0u, y, 16));
          if (g == 0) store_float(at + TRUE_MAX - SUMS, y);
        }
        if (warp == 0 && g == 0) store_float(end + MAXIMUM + (8 * i + 2 * t + e) * 4, m[i][e]);
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
    float sum[HEAD_TILES][2];
    bool moves = true;
    if (!first) {
      weigh(active, parity, sum);
      moves = meet_or<1>(grew);
    }
    if (moves) move(active, parity, sum);
    publish(work.bits | (moves ? 1024 : 0), parity);
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) { l[n][0] += sum[n][0]; l[n][1] += sum[n][1]; }
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
      const uint32_t query = base + QUERY + (n & 1) * QUERY_STEP;
      const bool more = SPLITS == 1 && token_of(p, item + step) < p.tokens;
      if (!QUERY_EARLY) { copies_wait(); __syncwarp(); }
      finish_query(p, query, base + ANGLES + (n & 3) * 256, warp, lane);
      meet<1>();
      const uint2 lengths = load_shared8(base + LENGTHS + (n & 1) * 8);
      cursor.enter(p, item, rank, p.a.lengths ? lengths.x : p.a.width, p.b.lengths ? lengths.y : p.b.width);
      if (warp == 0 || warp == 7) ask_ahead(p, base, warp, lane, item + step, n + 1);
      if (warp == 1 && SPLITS == 1) ask_sinks(p, base, lane, item, n);
      q.at = query + lane * 16;
      q.load();
#pragma unroll
      for (int i = 0; i < HEAD_TILES; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) { m[i][e] = -INF; l[i][e] = 0.f; top[i][e] = -INF; }
      Work work;
      int tiles = 0;
      do {
        work = cursor.take();
        wait(base + WEIGHTS_EMPTY + 8 * parity, round);
        tile(work, tiles == 0, ring, parity);
        tiles++;
        // By now everyone has loaded the query, and the position asked for above should be there.
        if (more && (tiles == 2 || (tiles == 1 && work.last()))) {
          if (warp == 7) { copies_wait(); __syncwarp(); ask_angles(p, base, lane, n + 1); }
          if (QUERY_EARLY) ask_query(p, base + QUERY + (~n & 1) * QUERY_STEP, item + step, warp, g, t);
        }
        ring = ring.ahead(work.blocks());
        round ^= parity; parity ^= 1;
      } while (!work.last());
      copies_wait();           // what this warp asked for; others see it after the next meeting
      __syncwarp();
      finish(n, rank);
      if (more && !QUERY_EARLY) ask_query(p, query, item + step, warp, g, t);
    }
    wait(base + WEIGHTS_EMPTY + 8 * parity, round);
    publish(0, parity);
  }
};
