// Paged attention on a CPU: writes this step's K and V, then attends straight from the blocks, with no gather.
//
// One pass over the keys (online softmax, Milakov and Gimelshein 2018, as in FlashAttention) for all query heads of a KV
// head and, in a prefill, for several queries; products accumulate in float32. Long sequences of few queries are cut
// into pieces that are merged by whoever finishes last (Flash-Decoding). Threads take tiles from a shared counter.
#include "attention.h"

#include <limits>

#include "amx.h"
#include "plan.h"

namespace minivllm {

constexpr float LOG2E = 1.44269504f;

struct Call {
  Plan& plan;
  View& view;
  const minivllm_tensors& tensors;
  std::atomic<int> next{0};

  char* page(int block, int head) const {
    return (char*)tensors.kv + (size_t(block) * plan.layout.kv_heads + head) * plan.layout.page_bytes;
  }
  Kind kind() const { return Kind(tensors.kind); }
  const char* input(const void* rows, int64_t stride, int token, int head) const {
    return (const char*)rows + (token * stride + int64_t(head) * plan.layout.head_size) * item_size(kind());
  }
};

// ---- writing

// float of magnitude up to 448 -> the nearest e4m3 number, ties to even.
inline int8_t to_e4m3(float x) {
  uint32_t bits = load<uint32_t>(&x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x3c800000u) {  // under 2^-6 steps are 2^-9, as they are at 2^14
    float shifted = std::fabs(x) + 16384.0f;
    return int8_t(sign | (load<uint32_t>(&shifted) - 0x46800000u));
  }
  return int8_t(sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20));
}

// One head to codes -> the scale that a page keeps: what a code, read as simd.h reads it, is multiplied by.
template <Kind K>
inline float quantise(const char* from, Kind kind, int size, int8_t* to) {
  constexpr float LIMIT = K == I8 ? 127 : 448, UNIT = K == I8 ? 1 : 256;
  float largest = 0, sum = 0;
  for (int d = 0; d < size; d++) {
    const float x = to_float(kind, from + d * item_size(kind));
    largest = std::max(largest, std::fabs(x));
    sum += x - x;  // NaN if any is infinite or NaN: the scale then carries it to every score
  }
  const float inverse = largest > 0 && sum == 0 ? LIMIT / largest : 0;
  for (int d = 0; d < size; d++) {
    const float x = inverse == 0 ? 0 : to_float(kind, from + d * item_size(kind)) * inverse;
    to[d] = K == I8 ? int8_t(std::lrintf(x)) : to_e4m3(x);
  }
  return largest / LIMIT * UNIT + sum;
}

// One head to the nearest float16.
void round_to_float16(const char* from, Kind kind, int size, int8_t* to) {
  int d = 0;
  if (kind == F32)
    for (; d + LANES <= size; d += LANES) store(to + d * 2, to_float16(load<Floats>(from + d * 4)));
  for (; d < size; d++) store(to + d * 2, to_float16(to_float(kind, from + d * item_size(kind))));
}

// K and V of `count` tokens from `token` on, whose slots follow each other in one page. Word by word, so that what is
// written lies together: a token by itself would touch a line of the cache for each of its words.
void write_run(const Call& call, int token, int count, int head, std::vector<int8_t>& converted) {
  const Layout& layout = call.plan.layout;
  const int64_t slot = call.plan.slots[token];
  const int offset = slot % layout.block_size, size = layout.head_size, bytes = size * item_size(layout.kv);
  char* page = call.page(slot / layout.block_size, head);
  const char* k = call.input(call.tensors.k, call.tensors.k_stride, token, head);
  const char* v = call.input(call.tensors.v, call.tensors.v_stride, token, head);
  size_t k_stride = call.tensors.k_stride * item_size(call.kind());  // bytes between two tokens
  size_t v_stride = call.tensors.v_stride * item_size(call.kind());
  if (layout.kv != call.kind()) {
    const auto encode = layout.kv == I8 ? quantise<I8> : quantise<E4M3>;
    converted.resize(size_t(count) * 2 * bytes);
    for (int t = 0; t < count; t++) {
      int8_t* to = converted.data() + size_t(t) * 2 * bytes;
      if (is_quantised(layout.kv)) {
        store(page + layout.k_scales_at + (offset + t) * 4, encode(k + t * k_stride, call.kind(), size, to));
        store(page + layout.v_scales_at + (offset + t) * 4, encode(v + t * v_stride, call.kind(), size, to + bytes));
      } else {
        round_to_float16(k + t * k_stride, call.kind(), size, to);
        round_to_float16(v + t * v_stride, call.kind(), size, to + bytes);
      }
    }
    k = (const char*)converted.data(), v = k + bytes, k_stride = v_stride = 2 * bytes;
  }
  char* column = page + offset * 4;
  const int whole = bytes / 4;
  for (int w = 0; w < whole; w++, column += size_t(layout.block_size) * 4)
    for (int t = 0; t < count; t++) std::memcpy(column + t * 4, k + t * k_stride + w * 4, 4);
  if (whole < layout.words)
    for (int t = 0; t < count; t++) {
      char last[4] = {};
      std::memcpy(last, k + t * k_stride + whole * 4, bytes - whole * 4);
      std::memcpy(column + t * 4, last, 4);
    }
  char* rows = page + layout.v_at;
  if (!layout.pairs) {
    for (int t = 0; t < count; t++) std::memcpy(rows + size_t(offset + t) * bytes, v + t * v_stride, bytes);
    return;
  }
  for (int t = 0; t < count;) {
    uint16_t* pair = (uint16_t*)rows + size_t((offset + t) / 2) * size * 2;
    const uint16_t *first = (const uint16_t*)(v + t * v_stride), *second = (const uint16_t*)(v + (t + 1) * v_stride);
    if ((offset + t) % 2 == 0 && t + 1 < count) {
      for (int d = 0; d < size; d++) ((uint32_t*)pair)[d] = first[d] | uint32_t(second[d]) << 16;
      t += 2;
    } else {
      for (int d = 0; d < size; d++) pair[2 * d + (offset + t) % 2] = first[d];
      t++;
    }
  }
}

void write_runs(void* data) {
  Call& call = *(Call*)data;
  std::vector<int8_t> converted;
  const int heads = call.plan.layout.kv_heads, num_items = int(call.plan.runs.size()) * heads;
  for (int i; (i = call.next++) < num_items;)
    write_run(call, call.plan.runs[i / heads].first, call.plan.runs[i / heads].second, i % heads, converted);
}

// ---- attending

// A thread's buffers, all [rows][...].
struct Scratch {
  std::vector<float> scores, query, weights, mean;
  std::vector<float> peak, sum, base, shrink;  // of the softmax: [rows], whole vectors
  std::vector<float> pieces;  // results of a tile's pieces, as they lie in Plan::partials
  std::vector<uint32_t> packed;  // K of a chunk, if pages are too narrow to be read as they lie
  std::vector<int8_t> converted;
  float k_scales[CHUNK], v_scales[CHUNK];
  Segment segments[CHUNK];
  const uint32_t* keys[CHUNK / LANES + BEHIND];

  void fit(const Layout& layout, int rows) {
    rows = round_up(rows, 16);  // whole tiles of the matrix unit
    scores.resize(size_t(rows) * CHUNK);
    weights.resize(size_t(rows) * CHUNK);
    query.resize(size_t(rows) * layout.words * (4 / item_size(layout.kv)));
    mean.resize(size_t(rows) * layout.padded_head());
    for (auto* of_rows : {&peak, &sum, &base, &shrink}) of_rows->resize(rows);
    if (!layout.direct) packed.resize(size_t(layout.words) * CHUNK);
  }
};

struct Chunk {
  int begin, count, num_segments, num_vectors;
  size_t stride;
};

template <Kind K>
void load_queries(const Call& call, const Tile& tile, int head, Scratch& scratch) {
  const Layout& layout = call.plan.layout;
  const int group = call.view.heads_per_kv, padded = layout.words * (4 / item_size(K));
  for (int m = 0; m < tile.num_queries * group; m++) {
    const int token = call.plan.query_start[tile.request] + tile.first_query + m / group;
    const char* q = call.input(call.tensors.q, call.tensors.q_stride, token, head * group + m % group);
    if constexpr (BY_DOT<K>) {
      uint32_t* to = (uint32_t*)scratch.query.data() + m * layout.words;
      to[layout.words - 1] = 0;
      std::memcpy(to, q, layout.head_size * 2);
    } else {
      float* to = scratch.query.data() + m * padded;
      for (int d = 0; d < padded; d++)
        to[d] = d < layout.head_size ? to_float(call.kind(), q + d * item_size(call.kind())) : 0;
    }
  }
}

// Keys begin : end, of which a chunk has room for all: where they lie, and vectors of their words; and of those behind.
template <Kind K>
Chunk find_keys(const Call& call, const Tile& tile, int head, int begin, int end, Scratch& scratch) {
  const Layout& layout = call.plan.layout;
  const int* table = call.plan.block_tables.data() + size_t(tile.request) * call.plan.table_width;
  const int size = layout.block_size;
  const int row_bytes = layout.pairs ? layout.head_size * 2 : layout.head_size * item_size(K);
  Chunk chunk{begin, end - begin, 0, (end - begin + LANES - 1) / LANES, size_t(layout.direct ? size : CHUNK)};
  int vector = 0;
  for (int at = begin; at < end;) {
    const int offset = at % size, count = std::min(size - offset, end - at);
    const char* page = call.page(table[at / size], head);
    scratch.segments[chunk.num_segments++] = {page + offset * 4, page + layout.v_at + offset * row_bytes, count};
    if (layout.direct)
      for (int t = 0; t < count; t += LANES) scratch.keys[vector++] = (const uint32_t*)page + offset + t;
    else
      for (int w = 0; w < layout.words; w++)
        std::memcpy(&scratch.packed[w * CHUNK + at - begin], page + (size_t(w) * size + offset) * 4, count * 4);
    if constexpr (is_quantised(K)) {
      std::memcpy(scratch.k_scales + at - begin, page + layout.k_scales_at + offset * 4, count * 4);
      std::memcpy(scratch.v_scales + at - begin, page + layout.v_scales_at + offset * 4, count * 4);
    }
    at += count;
  }
  if (!layout.direct)
    for (; vector < chunk.num_vectors; vector++) scratch.keys[vector] = scratch.packed.data() + vector * LANES;
  for (int at = end; vector < chunk.num_vectors + BEHIND; at += LANES, vector++)
    scratch.keys[vector] = layout.direct && at < tile.key_end
                               ? (const uint32_t*)call.page(table[at / size], head) + at % size
                               : scratch.keys[vector - 1];
  return chunk;
}

int position_of(const Call& call, const Tile& tile, int m) {
  return call.plan.seq_lens[tile.request] - call.plan.num_queries(tile.request) + tile.first_query +
         m / call.view.heads_per_kv;
}

// The keys of the chunk that row m sees: first : last, counted from the chunk's first.
std::pair<int, int> seen(const Call& call, const Tile& tile, const Chunk& chunk, int m) {
  const int window = call.view.spec.window, position = position_of(call, tile, m);
  return {std::max(tile.key_begin, window ? position - window + 1 : 0) - chunk.begin,
          std::min(position + 1, tile.key_end) - chunk.begin};
}

// Scores become weights relative to each row's new peak; sums and means so far shrink to it. In four loops over the
// rows: while one row waits for its peak or its power of two, the processor goes on with another.
template <Kind K, bool PAIRS>
void soften(const Call& call, const Tile& tile, int head, const Chunk& chunk, int rows, Scratch& scratch) {
  const minivllm_view& spec = call.view.spec;
  const float none = -std::numeric_limits<float>::infinity();
  const int num_vectors = chunk.num_vectors;
  const bool by_key = is_quantised(K) || spec.soft_cap || spec.slopes;  // scores are exponents of 2 already when their peak is looked for
  const float unit = by_key ? 1 : spec.scale * LOG2E;
  Ints lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int m = 0; m < rows; m++) {
    float* scores = &scratch.scores[m * CHUNK];
    const auto [first, last] = seen(call, tile, chunk, m);
    if (by_key) {
      const float scale = spec.soft_cap ? spec.scale / spec.soft_cap : spec.scale * LOG2E;
      const int group = call.view.heads_per_kv, behind = chunk.begin - position_of(call, tile, m);
      const float slope = spec.slopes ? spec.slopes[head * group + m % group] * LOG2E : 0;
      for (int j = 0; j < num_vectors; j++) {
        Floats x = load<Floats>(scores + j * LANES) * scale;
        if constexpr (is_quantised(K)) x *= load<Floats>(scratch.k_scales + j * LANES);
        if (spec.soft_cap) x = tanh_of(x) * (spec.soft_cap * LOG2E);
        if (spec.slopes) x += __builtin_convertvector(lane + (j * LANES + behind), Floats) * slope;
        store(scores + j * LANES, x);
      }
    }
    auto hide = [&, first = first, last = last](int j) {
      const Ints at = lane + j * LANES;
      store(scores + j * LANES, (at >= first) & (at < last) ? load<Floats>(scores + j * LANES) : splat(none));
    };
    const int open = std::clamp((first + LANES - 1) / LANES, 0, num_vectors);
    const int close = std::clamp(last / LANES, open, num_vectors);
    for (int j = 0; j < open; j++) hide(j);
    for (int j = close; j < num_vectors; j++) hide(j);
    Floats highest = splat(none), other = highest;
    int j = 0;
    for (; j + 2 <= num_vectors; j += 2) {
      highest = larger(load<Floats>(scores + j * LANES), highest);
      other = larger(load<Floats>(scores + (j + 1) * LANES), other);
    }
    if (j < num_vectors) highest = larger(load<Floats>(scores + j * LANES), highest);
    scratch.base[m] = std::max(scratch.peak[m], max_of(larger(other, highest)) * unit);
  }
  for (int m = 0; m < rows; m += LANES) {
    const Floats old = load<Floats>(&scratch.peak[m]), peak = load<Floats>(&scratch.base[m]);
    const Floats base = peak == none ? Floats{} : peak;  // nothing seen so far: weights are 2^-inf, not 2^NaN
    // Exactly 1 where the peak stays, which exp2_of_negative(0) is not on AVX-512: what a row sees nothing of may not
    // change its bits.
    const Floats shrink = old == base ? splat(1) : exp2_of_negative(old - base);
    store(&scratch.peak[m], peak);
    store(&scratch.base[m], base);
    store(&scratch.shrink[m], shrink);
    store(&scratch.sum[m], load<Floats>(&scratch.sum[m]) * shrink);
  }
  for (int m = 0; m < rows; m++) {
    const float* scores = &scratch.scores[m * CHUNK];
    auto* weights = (Weight<K, PAIRS>*)scratch.weights.data() + m * CHUNK;
    const float base = scratch.base[m];
    const auto [first, last] = seen(call, tile, chunk, m);
    Floats sum{};
    for (int j = 0; j < num_vectors; j++) {
      Floats p = exp2_of_negative(load<Floats>(scores + j * LANES) * unit - base);
      sum += p;
      if constexpr (is_quantised(K)) {
        const Ints at = lane + j * LANES;  // the scale of a slot that nobody wrote may be NaN
        p = (at >= first) & (at < last) ? p * load<Floats>(scratch.v_scales + j * LANES) : Floats{};
      }
      if constexpr (sizeof(Weight<K, PAIRS>) == 2)
        store(weights + j * LANES, to_bf16(p));
      else
        store(weights + j * LANES, p);
    }
    scratch.sum[m] += sum_of(sum);
  }
  const int stride = call.plan.layout.padded_head();
  for (int m = 0; m < rows; m++) {
    const float shrink = scratch.shrink[m];
    if (shrink == 1) continue;
    for (float* mean = &scratch.mean[m * stride]; mean < &scratch.mean[m * stride] + stride; mean += LANES)
      store(mean, load<Floats>(mean) * shrink);
  }
}

void write_output(const Call& call, const Tile& tile, int head, const float* mean, const float* sum) {
  const Layout& layout = call.plan.layout;
  const int group = call.view.heads_per_kv, size = layout.head_size, stride = layout.padded_head();
  const Kind kind = call.kind();
  for (int m = 0; m < tile.num_queries * group; m++) {
    const int64_t token = call.plan.query_start[tile.request] + tile.first_query + m / group;
    const int64_t row = token * call.view.spec.num_heads + head * group + m % group;
    char* to = (char*)call.tensors.out + row * size * item_size(kind);
    const float inverse = 1 / sum[m];
    int d = 0;
    if (kind != F16)
      for (; d + LANES <= size; d += LANES) {
        const Floats x = load<Floats>(mean + m * stride + d) * inverse;
        if (kind == F32)
          store(to + d * 4, x);
        else
          store(to + d * 2, to_bf16(x));
      }
    for (; d < size; d++) {
      const float x = mean[m * stride + d] * inverse;
      if (kind == F32) store(to + d * 4, x);
      if (kind == BF16) store(to + d * 2, uint16_t(to_bf16(splat(x))[0]));
      if (kind == F16) store(to + d * 2, to_float16(x));
    }
  }
}

void keep_piece(const Scratch& scratch, int rows, int stride, float* to) {
  std::copy_n(scratch.peak.data(), rows, to);
  std::copy_n(scratch.sum.data(), rows, to + rows);
  std::copy_n(scratch.mean.data(), rows * stride, to + 2 * rows);
}

// Mean and sum of all pieces: piece(p) is what keep_piece left. One in which a row sees nothing changes no bit of it.
template <typename Piece>
void merge_pieces(int num_pieces, const Piece& piece, int rows, int stride, Scratch& scratch) {
  for (int m = 0; m < rows; m++) {
    float peak = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int p = 0; p < num_pieces; p++) peak = std::max(peak, piece(p)[m]);
    float* mean = scratch.mean.data() + m * stride;
    std::fill_n(mean, stride, 0.0f);
    for (int p = 0; p < num_pieces; p++) {
      const float* part = piece(p);
      const float weight = std::exp2(part[m] - peak);
      sum += part[rows + m] * weight;
      for (int d = 0; d < stride; d++) mean[d] += part[2 * rows + m * stride + d] * weight;
    }
    scratch.sum[m] = sum;
  }
}

// Leaves a piece's result in its slot; the last piece of a group merges them all.
void merge(const Call& call, const Tile& tile, int head, Scratch& scratch) {
  const Layout& layout = call.plan.layout;
  const int rows = tile.num_queries * call.view.heads_per_kv, stride = layout.padded_head();
  const int slot_floats = call.plan.slot_floats(call.view);
  auto slot = [&](int index) { return call.plan.partials.get() + size_t(index) * slot_floats; };
  keep_piece(scratch, rows, stride, slot(tile.slot + head));
  const Group& group = call.view.groups[tile.group];
  std::atomic<int>& done = call.view.done[tile.group * layout.kv_heads + head];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < group.num_pieces) return;
  done.store(0, std::memory_order_relaxed);  // for the next layer
  auto piece = [&](int p) { return slot(group.first_slot + p * layout.kv_heads + head); };
  merge_pieces(group.num_pieces, piece, rows, stride, scratch);
  write_output(call, tile, head, scratch.mean.data(), scratch.sum.data());
}

// The matrix unit's turn, if there is one and this shape fits it.
template <Kind K, bool PAIRS>
bool by_matrix([[maybe_unused]] const Call& call, [[maybe_unused]] int rows) {
#ifdef MINIVLLM_AMX_BF16
  const Layout& layout = call.plan.layout;
  if constexpr (K == BF16 && PAIRS)
    return rows >= AMX_ROWS && !call.view.spec.row_wise && layout.direct && layout.head_size % 32 == 0 && amx_allowed();
#endif
  return false;
}

template <Kind K, bool PAIRS>
void multiply_keys(const Call& call, const Chunk& chunk, int rows, Scratch& scratch) {
  const Layout& layout = call.plan.layout;
  const auto* query = (const Query<K>*)scratch.query.data();
#ifdef MINIVLLM_AMX_BF16
  if constexpr (K == BF16 && PAIRS)
    if (by_matrix<K, PAIRS>(call, rows))
      return amx_scores_of(scratch.keys, chunk.num_vectors, chunk.stride, query, layout.words, rows,
                           scratch.scores.data());
#endif
  scores_of<K>(scratch.keys, chunk.num_vectors, chunk.stride, layout.direct ? layout.v_at : 0, query, layout.words, rows,
               scratch.scores.data());
}

template <Kind K, bool PAIRS>
void multiply_values(const Call& call, const Chunk& chunk, int rows, Scratch& scratch) {
  const Layout& layout = call.plan.layout;
  const auto* weights = (const Weight<K, PAIRS>*)scratch.weights.data();
#ifdef MINIVLLM_AMX_BF16
  if constexpr (K == BF16 && PAIRS)
    if (by_matrix<K, PAIRS>(call, rows)) {
      const int terms = layout.block_size % 32 == 0 && chunk.begin % 32 == 0 ? 16 : 8;
      return amx_add_means(scratch.segments, chunk.num_segments, layout.head_size, terms, rows, weights,
                           scratch.mean.data(), layout.padded_head());
    }
#endif
  add_means<K, PAIRS>(scratch.segments, chunk.num_segments, layout.head_size, rows, weights, scratch.mean.data(),
                      layout.padded_head());
}

template <Kind K, bool PAIRS>
void attend_tile(const Call& call, const Tile& tile, int head, Scratch& scratch) {
  const Layout& layout = call.plan.layout;
  const int group = call.view.heads_per_kv, rows = tile.num_queries * group;
  const int queries = call.plan.num_queries(tile.request), seq_len = call.plan.seq_lens[tile.request];
  if (queries == 1 && tile.key_end == seq_len)
    write_run(call, call.plan.query_start[tile.request], 1, head, scratch.converted);
  load_queries<K>(call, tile, head, scratch);
  // Chunks and pieces end at absolute positions, whatever the tile: a query's bits are the same in a prompt, in a part of
  // it and alone.
  const int stride = layout.padded_head(), size = rows * (stride + 2);
  const int first = tile.key_begin / SPLIT, last = (tile.key_end - 1) / SPLIT;  // one and the same in a group
  scratch.pieces.resize(last > first ? size_t(last - first + 1) * size : 0);
  for (int p = first; p <= last; p++) {
    std::fill_n(scratch.mean.data(), rows * stride, 0.0f);
    std::fill_n(scratch.peak.data(), rows, -std::numeric_limits<float>::infinity());
    std::fill_n(scratch.sum.data(), rows, 0.0f);
    const int begin = std::max(tile.key_begin, p * SPLIT) / 16 * 16;  // a read starts where vectors of a page do
    for (int at = begin, end; at < std::min(tile.key_end, (p + 1) * SPLIT); at = end) {
      end = std::min(tile.key_end, (at / CHUNK + 1) * CHUNK);
      const Chunk chunk = find_keys<K>(call, tile, head, at, end, scratch);
      multiply_keys<K, PAIRS>(call, chunk, rows, scratch);
      soften<K, PAIRS>(call, tile, head, chunk, rows, scratch);
      multiply_values<K, PAIRS>(call, chunk, rows, scratch);
    }
    if (last > first) keep_piece(scratch, rows, stride, &scratch.pieces[size_t(p - first) * size]);
  }
  if (tile.group >= 0) return merge(call, tile, head, scratch);
  auto piece = [&](int p) { return &scratch.pieces[size_t(p) * size]; };
  if (last > first) merge_pieces(last - first + 1, piece, rows, stride, scratch);
  write_output(call, tile, head, scratch.mean.data(), scratch.sum.data());
}

template <Kind K, bool PAIRS>
void attend_tiles(void* data) {
  Call& call = *(Call*)data;
  const int num_items = int(call.view.items.size());
  static thread_local Scratch scratch;
  scratch.fit(call.plan.layout, call.view.rows);
  for (int i; (i = call.next++) < num_items;)
    attend_tile<K, PAIRS>(call, call.view.tiles[call.view.items[i].tile], call.view.items[i].head, scratch);
}

using Work = void (*)(void*);

Work attend_work(const Layout& layout) {
  switch (layout.kv) {
    case F32: return attend_tiles<F32, false>;
    case F16: return attend_tiles<F16, false>;
    case I8: return attend_tiles<I8, false>;
    case E4M3: return attend_tiles<E4M3, false>;
    case BF16: return layout.pairs ? attend_tiles<BF16, true> : attend_tiles<BF16, false>;
  }
  return nullptr;
}

}  // namespace minivllm

using namespace minivllm;

extern "C" {

void* minivllm_layout(int kv_heads, int head_size, int block_size, int kv_kind) {
  return new Layout(kv_heads, head_size, block_size, Kind(kv_kind));
}
void minivllm_layout_free(void* layout) { delete (Layout*)layout; }
int64_t minivllm_page_bytes(const void* layout) { return ((const Layout*)layout)->page_bytes; }

void* minivllm_plan(const void* layout, const minivllm_view* views, int num_views, const minivllm_batch* batch) {
  return new Plan(*(const Layout*)layout, views, num_views, *batch);
}
void minivllm_plan_free(void* plan) { delete (Plan*)plan; }

void minivllm_attend(void* plan_, int view, const minivllm_tensors* tensors, minivllm_parallel parallel,
                     int num_threads) {
  Plan& plan = *(Plan*)plan_;
  Call call{plan, plan.views[view], *tensors};
  // Below this, waking the other threads takes longer than the work.
  const bool alone = parallel == nullptr || num_threads == 1 || call.view.work < 1024;
  auto run = [&](Work work) {
    call.next = 0;
    if (alone)
      work(&call);
    else
      parallel(work, &call, num_threads, 0);  // always the same number: libgomp ends the threads of a smaller team
  };
  if (!plan.runs.empty()) run(write_runs);
  run(attend_work(plan.layout));
  // Nobody reads padding rows, but they pass through the layers that follow.
  const size_t row = size_t(call.view.spec.num_heads) * plan.layout.head_size * item_size(call.kind());
  std::memset((char*)tensors->out + plan.num_tokens * row, 0, (plan.padded_tokens - plan.num_tokens) * row);
}

const char* minivllm_isa() {
#ifdef MINIVLLM_AMX_BF16
  if (amx_allowed()) return "AVX-512 with bfloat16 and AMX";
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  return "AVX-512 with bfloat16";
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "128-bit vectors";
#endif
}
}
