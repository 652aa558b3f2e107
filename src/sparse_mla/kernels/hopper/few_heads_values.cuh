// The value role of few_heads.cu: O^T += V^T P^T, the merge of a cluster, the output.
#pragma once

// Where a lane reads in a block, and in the table of its scales.
template <int KIND> DI uint32_t value_place(int warp, int g, int t) { return 2 * t * Record<KIND>::PITCH + (KIND == KIND_NVFP4 ? 32 * warp + 4 * g : 64 * warp + 8 * g); }
template <int KIND> DI uint32_t value_scale(int warp, int g, int t) { return table_word<KIND>(t, KIND == KIND_V4 ? 0 : KIND == KIND_MXFP8 ? g >> 2 : g >> 1, warp); }
// What a lane reads of a block: codes (or bf16) of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9, and the scales of both pairs.
struct Keys { uint32_t words[HAS_V4 ? 4 : 2][4], scales[2]; };
template <int KIND> DI void load_keys(Keys& k, uint32_t row, uint32_t table, int warp, int g) {
  using R = Record<KIND>;
  if (KIND == KIND_V4 && warp == 7) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 x = load_shared16(row + ((i & 1) + (i >> 1) * 8) * R::PITCH + 8 * g);   // 448 + 16 g
      uint32_t (&w)[4] = k.words[HAS_V4 ? i : 0];
      w[0] = x.x; w[1] = x.y; w[2] = x.z; w[3] = x.w;
    }
    return;
  }
  k.scales[0] = load_shared4(table); k.scales[1] = load_shared4(table + table_word<KIND>(4, 0, 0));
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint32_t (&w)[4] = k.words[h];
    const uint32_t x = row + 8 * h * R::PITCH, y = x + R::PITCH;
    if (KIND == KIND_NVFP4) { w[0] = load_shared4(x); w[1] = load_shared4(y); continue; }
    const uint2 first = load_shared8(x), second = load_shared8(y);
    w[0] = first.x; w[1] = first.y; w[2] = second.x; w[3] = second.y;
  }
}
// acc[m tile] += 64 dims of the warp x 16 keys of a block; b: their weights.
template <int KIND> DI void add_keys(float (&acc)[4][4], const uint32_t (&b)[2], const Keys& k, int warp) {
  if (KIND == KIND_V4 && warp == 7) {   // bf16
#pragma unroll
    for (int m = 0; m < 4; m++) {
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t x = k.words[HAS_V4 ? 2 * h : 0][m], y = k.words[HAS_V4 ? 2 * h + 1 : 0][m];
        a[2 * h] = bf16_to_f16(permute(x, y, 0x5410)); a[2 * h + 1] = bf16_to_f16(permute(x, y, 0x7632));
      }
      mma(acc[m], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
    return;
  }
  uint32_t w[2][4];            // [key pair][two dims of both keys]
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t (&x)[4] = k.words[h];
    if (KIND == KIND_NVFP4) {  // dims 0 2 | 4 6 | 1 3 | 5 7
      const uint32_t x0 = e2m1_even(x[0]), y0 = e2m1_even(x[1]), x1 = e2m1_odd(x[0]), y1 = e2m1_odd(x[1]);
      w[h][0] = permute(x0, y0, 0x5140); w[h][1] = permute(x0, y0, 0x7362); w[h][2] = permute(x1, y1, 0x5140); w[h][3] = permute(x1, y1, 0x7362);
    } else {                   // dims 0 1 | 2 3 | 4 5 | 6 7
      w[h][0] = permute(x[0], x[2], 0x5140); w[h][1] = permute(x[0], x[2], 0x7362); w[h][2] = permute(x[1], x[3], 0x5140); w[h][3] = permute(x[1], x[3], 0x7362);
    }
  }
#pragma unroll
  for (int m = 0; m < 4; m++) {
    uint32_t a[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t s = k.scales[h];
      if (KIND == KIND_NVFP4) {
        a[2 * h] = times((m & 1) ? e4m3_high(w[h][m >> 1]) : e4m3_low(w[h][m >> 1]), s);
        a[2 * h + 1] = times((m & 1) ? e4m3_high(w[h][2 + (m >> 1)]) : e4m3_low(w[h][2 + (m >> 1)]), s);
      } else {
        a[2 * h] = times(e4m3_low(w[h][m]), s); a[2 * h + 1] = times(e4m3_high(w[h][m]), s);
      }
    }
    mma(acc[m], a[0], a[1], a[2], a[3], b[0], b[1]);
  }
}

// The value role.
struct Values {
  const Args& p;
  uint32_t base;
  int warp, lane, g, t;
  float c1;
  uint32_t group_mul;
  float acc[4][4];

  // What a lane needs of a block, and the walk over the blocks of a tile.
  struct Block { Keys keys; uint32_t weights[2]; };
  struct Walk { uint32_t block, table, weights, empty; };

  DI void load(Block& x, Walk& at, bool window) const {
    load_matrices2(x.weights, at.weights);
    if (A_KIND == B_KIND || window) load_keys<A_KIND>(x.keys, at.block + value_place<A_KIND>(warp, g, t), (A_KIND == KIND_NVFP4 ? at.block + Record<KIND_NVFP4>::TABLE : at.table) + value_scale<A_KIND>(warp, g, t), warp, g);
    else load_keys<B_KIND>(x.keys, at.block + value_place<B_KIND>(warp, g, t), (B_KIND == KIND_NVFP4 ? at.block + Record<KIND_NVFP4>::TABLE : at.table) + value_scale<B_KIND>(warp, g, t), warp, g);
    at.weights += 32; at.table += 512; at.block += BLOCK_BYTES;
    if (at.block == base + ROWS + RING * BLOCK_BYTES) at.block = base + ROWS;
  }
  DI void multiply(const Block& x, bool window) {
    if (A_KIND == B_KIND || window) add_keys<A_KIND>(acc, x.weights, x.keys, warp);
    else add_keys<B_KIND>(acc, x.weights, x.keys, warp);
  }
  // COUNT blocks have been read.
  template <int COUNT> DI void release(Walk& at) const {
    fence_async();             // the reads come before the copies that overwrite the blocks
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (WARP == 32 || lane == 0) arrive(at.empty);
      at.empty += 8;
      if (at.empty == base + EMPTY + 8 * RING) at.empty = base + EMPTY;
    }
  }
  // Two blocks at a time, if there are registers for them.
  DI void add(Work work, Ring ring, int parity) {
    const int blocks = work.blocks(), window = work.window();
    Walk at = {base + ROWS + ring.place * BLOCK_BYTES, base + TABLES + parity * TABLES_BYTES,
               base + WEIGHTS + parity * WEIGHTS_BYTES + (lane & 7) * WEIGHT_PITCH + ((lane >> 3) & 1) * 16, base + EMPTY + 8 * ring.place};
    int i = 0;
#pragma unroll 1
    for (; PAIRS && i + 1 < blocks; i += 2) {
      Block x, y;
      load(x, at, i < window); load(y, at, i + 1 < window);
      multiply(x, i < window); multiply(y, i + 1 < window);
      release<2>(at);
    }
#pragma unroll 1
    for (; i < blocks; i++) {
      Block x;
      load(x, at, i < window);
      multiply(x, i < window);
      release<1>(at);
    }
  }
  DI void pick(float (&v)[8], int e) const {
#pragma unroll
    for (int i = 0; i < 4; i++) { v[2 * i] = e ? acc[i][1] : acc[i][0]; v[2 * i + 1] = e ? acc[i][3] : acc[i][2]; }
  }
#if SPLITS == 1
  // The CTA's token number k.
  DI void finish(int item, int k, uint32_t weights_empty) {
    const uint32_t end = base + (k & 1) * END_BYTES;
    const int token = token_of(p, item), head0 = first_head(p, item);
    float weight[2];
    wait(base + FINAL_FULL + 8 * (k & 1), (k >> 1) & 1);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int local = 2 * t + e, head = head0 + local;
      const EndOfToken x = end_of_token(end, local);
      weight[e] = weight_of(x.maximum, x.sum, p.sink && head < p.heads ? load_float(end + SINKS + local * 4) : -INF, c1);
      if (warp == 0 && g == 0) write_statistics(p, token, head, x.maximum, x.sum, x.top);
    }
    const uint32_t angles = p.unrotate_output ? base + ANGLES + (k & 3) * 256 : 0;
    __syncwarp();
    if (WARP == 32 || lane == 0) arrive(weights_empty);
    int even = head0 + 2 * t;
    asm volatile("" : "+r"(even));   // addresses are found here, not kept in registers from token to token
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float v[8];
      pick(v, e);
      store_head(p, token, even + e, v, weight[e], angles, warp, g, group_mul);
    }
  }
#else
  // Sends the sums to those who write them; adds what this CTA was sent, a unit a warp, and writes it.
  DI void finish(int item, int rank) {
    const uint32_t angles = p.unrotate_output ? base + ANGLES : 0;   // the CTA's only token
    __syncwarp();
    cluster_wait();                          // the others have started
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float v[8];
      pick(v, e);
      const int unit = 2 * warp + e, owner = unit % SPLITS;
      const uint32_t to = remote(base + PARTS + (unit - owner + rank) * 1024 + lane * 16, owner), full = remote(base + FINAL_FULL, owner);
      send4(to, v[0], v[1], v[2], v[3], full); send4(to + 512, v[4], v[5], v[6], v[7], full);
    }
    const int token = token_of(p, item), head0 = first_head(p, item);
    wait_for_cluster(base + FINAL_FULL, 0);
    for (int first = SPLITS * warp; first + rank < UNITS; first += SPLITS * 8) {
      const int unit = first + rank, w = unit / 2, head = 2 * t + (unit & 1);
      float4 x[SPLITS], low[SPLITS], high[SPLITS];
      float M = -INF, L = 0.f, T = -INF, v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
      for (int r = 0; r < SPLITS; r++) {
        const uint32_t from = base + PARTS + (first + r) * 1024 + lane * 16;
        x[r] = load_float4(base + FINAL + 16 * (r * HEADS + head)); low[r] = load_float4(from); high[r] = load_float4(from + 512);
      }
#pragma unroll
      for (int r = 0; r < SPLITS; r++) { M = fmaxf(M, x[r].x); T = fmaxf(T, x[r].z); }
#pragma unroll
      for (int r = 0; r < SPLITS; r++) {
        const float e = M == -INF ? 0.f : exp2_fast((x[r].x - M) * c1);
        L += x[r].y * e;
        v[0] += low[r].x * e; v[1] += low[r].y * e; v[2] += low[r].z * e; v[3] += low[r].w * e;
        v[4] += high[r].x * e; v[5] += high[r].y * e; v[6] += high[r].z * e; v[7] += high[r].w * e;
      }
      if (w == 0 && g == 0) write_statistics(p, token, head0 + head, M, L, T);
      store_head(p, token, head0 + head, v, weight_of(M, L, sink_of(p, head0 + head), c1), angles, w, g, group_mul);
    }
  }
#endif
  DI void run(int rank, int step) {
    int item = blockIdx.x / SPLITS, parity = 0, k = 0;
    uint32_t round = 0;
    Ring ring = {0, 0};
    bool first = true;
    while (true) {
      wait(base + WEIGHTS_FULL + 8 * parity, round);
      Work work;
      work.bits = uniform_least(load_shared4(base + TILE + 4 * parity));
      if (!work.exists()) break;
      if (first) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) acc[i][e] = 0.f;
      } else if (work.moved()) {
        const float2 f = load_float2(base + FACTORS + parity * HEAD_BYTES + 8 * t);
#pragma unroll
        for (int i = 0; i < 4; i++) { acc[i][0] *= f.x; acc[i][1] *= f.y; acc[i][2] *= f.x; acc[i][3] *= f.y; }
      }
      add(work, ring, parity);
      const uint32_t weights_empty = base + WEIGHTS_EMPTY + 8 * parity;
      first = work.last();
      if (!first) {
        __syncwarp();
        if (WARP == 32 || lane == 0) arrive(weights_empty);
      } else {
#if SPLITS == 1
        finish(item, k, weights_empty);
#else
        finish(item, rank);
#endif
        item += step; k++;
      }
      ring = ring.ahead(work.blocks());
      round ^= parity; parity ^= 1;
    }
  }
};
