// Pages and work: where K and V lie within a block, and how a step is cut into pieces for threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "tiles.h"

namespace minivllm {

constexpr int TILE_ROWS = 32;    // (query, head) rows that share one pass over the keys
constexpr int SPLIT = 512;       // keys of a piece; of one tile of queries, where it is all that a request has, each is an item
static_assert(SPLIT % CHUNK == 0);
constexpr int RUN_TOKENS = 64;   // tokens that are written at a time, at most

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

// A page holds K and V of one block and one KV head, side by side so that a token's two reads share a DRAM page:
//   K: words [head_size / elements a word][block_size]: LANES keys are one load, and a score is a sum down a column
//   V: [block_size / 2][head_size] pairs of keys (bfloat16, even block_size) or [block_size][head_size]
// With int8 and e4m3, block_size float scales follow K and V each.
struct Layout {
  Kind kv;
  int kv_heads, head_size, block_size, words;
  bool pairs, direct;  // direct: LANES divide a page, so scores come straight from it
  size_t v_at, k_scales_at, v_scales_at, page_bytes;

  Layout(int kv_heads, int head_size, int block_size, Kind kv)
      : kv(kv), kv_heads(kv_heads), head_size(head_size), block_size(block_size) {
    words = round_up(head_size * item_size(kv), 4) / 4;
    pairs = kv == BF16 && block_size % 2 == 0;
    direct = block_size % 16 == 0;
    size_t k_bytes = size_t(words) * 4 * block_size, scales = is_quantised(kv) ? 4 * size_t(block_size) : 0;
    size_t v_bytes = round_up(head_size * block_size * item_size(kv), 4);
    k_scales_at = k_bytes;
    v_at = k_bytes + scales;
    v_scales_at = v_at + v_bytes;
    page_bytes = v_scales_at + scales;
  }
  int padded_head() const { return round_up(head_size, LANES); }
};

// Queries first_query .. of a request against keys key_begin : key_end. Done once for every KV head.
struct Tile {
  int request, first_query, num_queries, key_begin, key_end;
  int group;  // of pieces whose partial results are merged; -1: this tile is all
  int slot;   // of its partial result, for KV head 0
};

struct Group {
  int first_slot, num_pieces;
};

struct Item {
  int tile, head;
};

struct View {
  minivllm_view spec;
  int heads_per_kv, rows;  // rows of the largest tile
  std::vector<Tile> tiles;
  std::vector<Item> items;  // in the order in which threads take them
  std::vector<Group> groups;
  std::unique_ptr<std::atomic<int>[]> done;  // [groups][kv_heads] pieces that are done
  double work = 0;                           // rows x keys
};

struct Plan {
  Layout layout;
  int num_requests, table_width, num_tokens, padded_tokens;
  std::vector<int> query_start, seq_lens, block_tables;
  std::vector<int64_t> slots;
  std::vector<std::pair<int, int>> runs;  // first token and count, of requests with several queries: slots in a row
  std::vector<View> views;
  std::unique_ptr<float[]> partials;  // [slots][rows x (padded head + 2)]

  Plan(const Layout& layout, const minivllm_view* specs, int num_views, const minivllm_batch& batch)
      : layout(layout),
        num_requests(batch.num_requests),
        table_width(batch.table_width),
        num_tokens(batch.num_tokens),
        padded_tokens(batch.padded_tokens),
        query_start(batch.query_start, batch.query_start + num_requests + 1),
        seq_lens(batch.seq_lens, batch.seq_lens + num_requests),
        block_tables(batch.block_tables, batch.block_tables + size_t(num_requests) * table_width),
        slots(batch.slots, batch.slots + num_tokens),
        views(num_views) {
    for (int r = 0; r < num_requests; r++)
      if (num_queries(r) > 1)
        for (int t = query_start[r], end; t < query_start[r + 1]; t = end) {
          for (end = t + 1; end < query_start[r + 1] && end - t < RUN_TOKENS && slots[end] == slots[end - 1] + 1 &&
                            slots[end] % layout.block_size != 0;)
            end++;
          runs.emplace_back(t, end - t);
        }
    size_t partial_floats = 0;
    for (int i = 0; i < num_views; i++) partial_floats = std::max(partial_floats, fill(views[i], specs[i]));
    partials.reset(new float[partial_floats]);
  }

  int num_queries(int r) const { return query_start[r + 1] - query_start[r]; }
  int slot_floats(const View& view) const { return view.rows * (layout.padded_head() + 2); }

 private:
  // Cut at absolute positions and by a request's own length, never by the batch: a result does not depend on who else
  // runs. Returns the floats that partial results need.
  size_t fill(View& view, const minivllm_view& spec) {
    view.spec = spec;
    view.heads_per_kv = spec.num_heads / layout.kv_heads;
    const int tile_queries = std::max(1, TILE_ROWS / view.heads_per_kv);
    view.rows = view.heads_per_kv;
    int num_slots = 0;
    for (int r = 0; r < num_requests; r++) {
      const int queries = num_queries(r), computed = seq_lens[r] - queries;
      view.rows = std::max(view.rows, view.heads_per_kv * std::min(queries, tile_queries));
      for (int first = 0; first < queries; first += tile_queries) {
        const int count = std::min(tile_queries, queries - first), end = computed + first + count;
        const int begin = spec.window ? std::max(0, computed + first - spec.window + 1) : 0;
        view.work += double(count * view.heads_per_kv) * (end - begin) * layout.kv_heads;
        const int pieces = queries <= tile_queries ? (end - 1) / SPLIT - begin / SPLIT + 1 : 1;
        if (pieces == 1) {
          view.tiles.push_back({r, first, count, begin, end, -1, 0});
          continue;
        }
        for (int p = 0; p < pieces; p++) {
          const int cut = (begin / SPLIT + p) * SPLIT;
          view.tiles.push_back({r, first, count, std::max(begin, cut), std::min(end, cut + SPLIT),
                                int(view.groups.size()), num_slots + p * layout.kv_heads});
        }
        view.groups.push_back({num_slots, pieces});
        num_slots += pieces * layout.kv_heads;
      }
    }
    order(view);
    const size_t num_done = view.groups.size() * layout.kv_heads;
    view.done.reset(new std::atomic<int>[num_done]);
    for (size_t i = 0; i < num_done; i++) view.done[i] = 0;
    return size_t(num_slots) * slot_floats(view);
  }

  // The tiles of one request and one KV head follow each other, since they read the same keys, which then stay in the
  // cache. The request with most work first, and of each its longest tiles: what is taken last is short, so threads end
  // together.
  void order(View& view) const {
    auto work = [&](int t) {
      const Tile& tile = view.tiles[t];
      return int64_t(tile.num_queries) * (tile.key_end - tile.key_begin);
    };
    std::vector<int64_t> of_request(num_requests);
    std::vector<int> tiles(view.tiles.size());
    for (size_t t = 0; t < tiles.size(); t++) of_request[view.tiles[tiles[t] = t].request] += work(t);
    std::stable_sort(tiles.begin(), tiles.end(), [&](int a, int b) {
      const int p = view.tiles[a].request, q = view.tiles[b].request;
      if (of_request[p] != of_request[q]) return of_request[p] > of_request[q];
      return p != q ? p < q : work(a) > work(b);
    });
    for (size_t begin = 0, end; begin < tiles.size(); begin = end) {
      const int request = view.tiles[tiles[begin]].request;
      for (end = begin; end < tiles.size() && view.tiles[tiles[end]].request == request;) end++;
      for (int head = 0; head < layout.kv_heads; head++)
        for (size_t t = begin; t < end; t++) view.items.push_back({tiles[t], head});
    }
  }
};

}  // namespace minivllm
