// Rows of keys: how a tile of them lies in shared memory, where those to come are, and their copies.
#pragma once

// What others need to know of a tile, in a word: that it is of the compressed set, or none; first or last of its token or of its group
// in the token, second of the token, all its keys exist (by `note`); and, from bit TOKENS_BEFORE on, tokens with tiles before this one, modulo TURNS.
constexpr uint32_t COMPRESSED = 1, NONE = 2, TOKEN_FIRST = 4, GROUP_FIRST = 8, GROUP_LAST = 16, TOKEN_LAST = 32, TOKEN_SECOND = 512, ALL_EXIST = 1024;
constexpr int TOKENS_BEFORE = 6;
DI bool is_tile(uint32_t word) { return (word & (COMPRESSED | NONE)) != NONE; }
DI uint32_t token_number(const uint32_t& word) { return (word >> TOKENS_BEFORE) & (TURNS - 1); }

// Where the rows of tiles to come are. Warp 0 of a group of scores looks them up at the head of each of its tiles, n: it
// notes where those of tile n + AHEAD are, whose slots it asked for GROUPS tiles before, and asks for the slots of the tile
// that is as many further. While the values of tile n are added up the rows of tile n + AHEAD are copied.
struct Walk {
  uint64_t list;               // of the tile's slots
  int left, set_tiles;         // keys of the set from this tile on, tiles of the set after it
  int item, token_tiles, number;   // tiles of the token after this one, before this one
  int flags;                   // compressed set | tokens with tiles before this one << 1

  DI uint32_t word(int items) const {
    if (item >= items) return NONE;
    return (flags & COMPRESSED) | (number == 0) * TOKEN_FIRST | (number < GROUPS) * GROUP_FIRST | (token_tiles < GROUPS) * GROUP_LAST | (token_tiles < 1) * TOKEN_LAST
         | (flags & (2 * TURNS - 2)) << (TOKENS_BEFORE - 1) | (number == 1) * TOKEN_SECOND;
  }
};

struct Lookup {
  const Args& p;
  uint32_t base;
  int warp, lane, rank, item_step;

  DI int items() const { return p.tokens * p.head_blocks; }
  // To tile `number` of a token whose keys are `x`; false if it has none.
  DI bool place(Walk& s, int token, const Span& x, int number, int tokens) const {
    const int j = x.first + number;
    if (j >= x.last) return false;
    const bool compressed = j >= x.window_tiles;
    const KeyArgs& k = compressed ? p.b : p.a;
    const int before = (compressed ? j - x.window_tiles : j) * 64;
    s.list = (uint64_t)(k.indices + token * k.indices_stride + before);
    s.left = (compressed ? x.compressed_keys : x.window_keys) - before;
    s.set_tiles = (compressed ? x.last : min(x.window_tiles, x.last)) - j - 1;
    s.token_tiles = x.last - j - 1; s.number = number; s.flags = (int)compressed | tokens << 1;
    return true;
  }
  // To tile `number` of an item, or of those after it.
  DI void seek(Walk& s, int item, int number, int tokens) const {
    s.item = item; s.list = 0; s.left = s.set_tiles = s.token_tiles = s.number = s.flags = 0;
    for (; item < items(); item += item_step) {
      const int token = token_of(p, item);
      const Span x = span_of(p, p.a.lengths ? __ldg(p.a.lengths + token) : p.a.width, p.b.lengths ? __ldg(p.b.lengths + token) : p.b.width, rank);
      if (place(s, token, x, number, tokens)) break;
      number -= x.last - x.first;
      tokens += x.last > x.first;
    }
    s.item = item;
  }
  // To the next tile of the same group.
  DI void advance(Walk& s) const {
    if (s.set_tiles < GROUPS) { seek(s, s.item, s.number + GROUPS, s.flags >> 1); return; }
    s.list += 256 * GROUPS; s.left -= 64 * GROUPS; s.set_tiles -= GROUPS; s.token_tiles -= GROUPS; s.number += GROUPS;
  }
  // `stage`: where its rows will lie.
  DI void note(uint32_t tile, int stage, uint32_t word, int item, int slot0, int slot1) const {
    const uint32_t place = tile & (TILES - 1);
    tile &= 7;
    if (!is_tile(word)) {
      if (one_lane()) store_shared8(base + WHICH + 8 * place, word, item);
      if (lane < 8) store_shared1(base + HOW + 8 * tile + lane, NO_TILE);
      return;
    }
    const Places k = word & COMPRESSED ? p.b.places : p.a.places;
    uint32_t valid[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int slot = i ? slot1 : slot0;
      const bool ok = (uint32_t)slot < k.num_slots;
      const uint32_t page = page_of(k, slot);
      const uint32_t at = base + UNITS + stage * 256 + i * 128 + lane * 4;
      store_shared4(at, ok ? row_units(k, slot, page) : ~0u);
      if (APART) store_shared4(at - UNITS + SCALE_UNITS, scale_units(k, slot, page));
      valid[i] = __ballot_sync(~0u, ok);
    }
    if (one_lane()) {
      store_shared8(base + WHICH + 8 * place, word | ((valid[0] & valid[1]) == ~0u) * ALL_EXIST, item);
      store_shared8(base + VALID + 8 * tile, valid[0], valid[1]);
    }
    const uint32_t eight = (lane & 4 ? valid[1] : valid[0]) >> (8 * (lane & 3));
    if (lane < 8) store_shared1(base + HOW + 8 * tile + lane, (word & COMPRESSED) | ((eight & 255) == 255 ? 0 : MISSING));
  }
  DI void ask(int group, const Walk& s) const {
    const uint32_t slots = base + SLOTS + group * 256 + lane * 4, walk = base + WALK + group * 32;
    const int* list = (const int*)s.list + lane;
    if (lane < s.left) copy_async<4>(slots, list); else store_shared4(slots, ~0u);
    if (lane + 32 < s.left) copy_async<4>(slots + 128, list + 32); else store_shared4(slots + 128, ~0u);
    copy_commit();
    store_shared16(walk, (uint32_t)s.list, (uint32_t)(s.list >> 32), s.left, s.set_tiles);
    store_shared16(walk + 16, s.item, s.token_tiles, s.number, s.flags);
  }
  DI Walk recall(int group) const {
    const uint4 x = load_shared16(base + WALK + group * 32), y = load_shared16(base + WALK + group * 32 + 16);
    return {x.x | (uint64_t)x.y << 32, (int)x.z, (int)x.w, (int)y.x, (int)y.y, (int)y.z, (int)y.w};
  }
  DI static void load_slots(const Walk& s, int lane, int (&slots)[2]) {
    const int* list = (const int*)s.list + lane;
    slots[0] = lane < s.left ? __ldg(list) : -1;
    slots[1] = lane + 32 < s.left ? __ldg(list + 32) : -1;
  }
  // Tile number `warp` of the CTA, by a warp of values before all else. Slots are loaded together with the lengths, as if
  // all lists were full, and once more if that was wrong.
  DI void begin(int item0) const {
    Walk s, guess;
    guess.list = 0; guess.left = 0;
    if (item0 < items()) place(guess, token_of(p, item0), span_of(p, p.a.width, p.b.width, rank), warp, 0);
    wait_for_launch_before();
    if (warp >= AHEAD) return;
    int slots[2];
    load_slots(guess, lane, slots);
    seek(s, item0, warp, 0);
    if (s.list != guess.list) load_slots(s, lane, slots);
    note(warp, warp, s.word(items()), s.item, lane < s.left ? slots[0] : -1, lane + 32 < s.left ? slots[1] : -1);
  }
  // What the first `next` of this warp, of a group, will note.
  DI void ask_first(int item0, int group) const {
    Walk s;
    seek(s, item0, AHEAD + group, 0);
    ask(group, s);
  }
  // At the head of tile `tile` of a group; `stage`: of tile + AHEAD. Returns the item that begins with that one, or one that does not exist.
  DI int next(uint32_t tile, int group, int stage) const {
    copy_wait<0>();
    __syncwarp();
    const uint32_t slots = base + SLOTS + group * 256 + lane * 4;
    Walk s = recall(group);
    note(tile + AHEAD, stage, s.word(items()), s.item, load_shared4(slots), load_shared4(slots + 128));
    const int begins = s.number == 0 ? s.item : items();
    advance(s);
    __syncwarp();              // all lanes have recalled
    ask(group, s);
    __syncwarp();
    return begins;
  }
};

// The rows of a tile to come that this warp copies: 8 of them, two at a time between its products; all at once if one
// of them does not exist.
struct Coming {
  const Args& p;
  int lane;
  uint32_t to, full;           // shared memory of its first row; barrier
  const uint8_t* pages;
  uint32_t how, at, units[8];  // see HOW; where the units are, and they

  static constexpr bool SAME = A_KIND == B_KIND && (A_ROW_UNITS * 16 == A_SCALE_STRIDE) == (B_ROW_UNITS * 16 == B_SCALE_STRIDE);
  DI bool compressed() const { return how & 1; }
  template <int KIND, bool TOGETHER> DI static constexpr int bytes_of() { return TOGETHER ? Raw<KIND>::DATA + Raw<KIND>::SCALES : Raw<KIND>::DATA; }
  DI int pitch() const { return SAME || !compressed() ? Raw<A_KIND>::PITCH : Raw<B_KIND>::PITCH; }
  DI int bytes() const { return SAME || !compressed() ? bytes_of<A_KIND, A_ROW_UNITS * 16 == A_SCALE_STRIDE>() : bytes_of<B_KIND, B_ROW_UNITS * 16 == B_SCALE_STRIDE>(); }

  template <int KIND, bool TOGETHER> DI void start_set(uint32_t base, int stage, int warp, uint32_t at, const KeyArgs& k) {
    using R = Raw<KIND>;
    pages = k.pages;
    to = base + RAW + stage * STAGE + warp * 8 * R::PITCH + (warp >> 1) * 32;
    // By one warp for all: bytes may come before they are expected.
    if (warp == 0 && one_lane()) arrive_and_expect(full, 64 * (TOGETHER || KIND != KIND_V4 ? R::DATA + R::SCALES : R::DATA));
    if (!TOGETHER) {
      if (KIND == KIND_V4) {   // 8 bytes are too few for a bulk copy
        const uint32_t row = at + (lane & 7) * 4;
        if (lane < 8) copy_async<8>(to + lane * R::PITCH + R::DATA, load_shared4(row) == ~0u ? p.zeros : k.pages + (uint64_t)load_shared4(row - UNITS + SCALE_UNITS) * 8);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; i++) {
          const uint32_t u = uniform_least(load_shared4(at + 4 * i)), s = uniform_least(load_shared4(at + 4 * i - UNITS + SCALE_UNITS));
          copy_row_together(to + i * R::PITCH + R::DATA, u == ~0u ? p.zeros : k.pages + (uint64_t)s * 8, R::SCALES, full, p.row_policy);
        }
      }
    }
    if (HAS_V4 && lane < 8) copies_arrive(full);
  }
  // Asks shared memory for what `start` needs of tile `tile`, whose rows go to `stage`.
  DI void look(uint32_t base, uint32_t tile, int stage, int warp) {
    how = load_shared1(base + HOW + 8 * (tile & 7) + warp);
    at = base + UNITS + stage * 256 + warp * 32;
    if (SPLITS > 1 && how == NO_TILE) return;      // FINAL may be there
    const uint4 x = load_shared16(at), y = load_shared16(at + 16);
    units[0] = x.x; units[1] = x.y; units[2] = x.z; units[3] = x.w; units[4] = y.x; units[5] = y.y; units[6] = y.z; units[7] = y.w;
  }
  // Its rows go to `stage`: they are left to `copy`, or copied here if one of them does not exist.
  DI void start(uint32_t base, int stage, int warp) {
    if (how == NO_TILE) return;
    full = base + RAW_FULL + 8 * stage;
    if (HAS_V4 && A_KIND != B_KIND) fence_async();   // what other threads copied here were scales, now rows may come
    if (SAME || !compressed()) start_set<A_KIND, A_ROW_UNITS * 16 == A_SCALE_STRIDE>(base, stage, warp, at, compressed() ? p.b : p.a);
    else start_set<B_KIND, B_ROW_UNITS * 16 == B_SCALE_STRIDE>(base, stage, warp, at, p.b);
    if (!(how & MISSING)) {
      if (SAME) return;        // the compiler has them in uniform registers already; with two records there are too few, and all would spill
#pragma unroll
      for (int i = 0; i < 8; i++) units[i] = uniform_least(units[i]);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      const uint32_t u = uniform_least(load_shared4(at + 4 * i));
      copy_row_together(to + i * pitch(), u == ~0u ? p.zeros : pages + (uint64_t)u * 16, bytes(), full, p.row_policy);
    }
  }
  // Two neighbouring rows, `pair` of 4.
  DI void copy(int pair) const {
    const uint32_t row = to + 2 * pair * pitch();
    const uint8_t *from0 = pages + (uint64_t)units[2 * pair] * 16, *from1 = pages + (uint64_t)units[2 * pair + 1] * 16;
    if (!(how & MISSING)) copy_two_rows_together(row, row + pitch(), from0, from1, bytes(), full, p.row_policy);
  }
};
