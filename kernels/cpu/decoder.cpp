// A decoder layer around its products: norms, rotation, gate, residual; and the whole stack in one call, where all
// weights are kept in codes or all are dense.h's. At few tokens a step of separate tensor operations costs as much as its
// products. Which norms a layer has, which activation and which rotation is data (minivllm/layers/description.py).
//
// Many tokens cost something else: each operation by itself reads and writes more than a cache holds. But what lies
// between two attentions concerns each token alone. So a block of tokens goes through all of it at once: output projection,
// residual, norm, both halves of the MLP, the next layer's norm, projection and rotation. With dense.h's each thread has a
// block of its own, and what it works on stays in the second-level cache, past which only weights stream.
//
// Each function rounds to the model's dtype wherever the model as written does (minivllm/models, its reference), so
// the two differ by the order of sums and by the last bit of exp alone. Products and attention are the other
// libraries' functions, which come in by address.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "attention.h"
#include "dense.h"
#include "items.h"
#include "simd.h"
#include "team.h"

namespace {

using namespace minivllm;

typedef uint16_t bf16;
constexpr int64_t ALONE = 1 << 15;  // elements: below, waking another thread takes longer than the work
constexpr int64_t TOGETHER = 256;  // tokens: fewer would widen codes more often, of more less stays in caches
constexpr int64_t FEW_A_THREAD = 128;  // tokens for each thread: below, threads share each product instead

template <typename T>
constexpr Kind KIND = sizeof(T) == 2 ? BF16 : F32;

// `count` elements from p, of which there are LANES or, at a row's end, fewer. A count known to the compiler is a type.
typedef std::integral_constant<int, LANES> Whole;

template <typename T>
inline Floats get(const T* p, Whole) {
  return load_floats<KIND<T>>(p);
}
template <typename T>
inline Floats get(const T* p, int count) {
  return load_some<KIND<T>>(p, count);
}
inline void put(float* p, Floats x, int count) { std::memcpy(p, &x, count * sizeof(float)); }
inline void put(bf16* p, Floats x, int count) {  // to nearest, ties to even; NaN stays NaN
  const Halves halves = to_bf16(x);
  std::memcpy(p, &halves, count * sizeof(bf16));
}
inline Floats rounded(const float*, Floats x) { return x; }
inline Floats rounded(const bf16*, Floats x) {
  const Halves halves = to_bf16(x);
  return load_floats<BF16>(&halves);
}

// work(i, count) for all vectors of a row.
template <typename Work>
inline void each_vector(int64_t size, const Work& work) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) work(i, Whole{});
  if (i < size) work(i, int(size - i));
}

// Of a sum of squares; several sums at once, since each addition waits for the one before it.
template <typename T>
float inverse_rms(const T* x, int64_t size, float eps) {
  Floats sums[4] = {};
  each_vector(size, [&](int64_t i, auto count) {
    const Floats value = get(x + i, count);
    sums[i / LANES % 4] += value * value;
  });
  return 1 / std::sqrt(sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / size + eps);
}

// to(i): where element i of the result goes. weight: null, and the result is x.
template <typename T, typename To>
void norm(const T* x, const float* weight, int64_t size, float eps, const To& to) {
  if (weight == nullptr) {
    each_vector(size, [&](int64_t i, auto count) { put(to(i), get(x + i, count), count); });
    return;
  }
  const float inverse = inverse_rms(x, size, eps);
  each_vector(size, [&](int64_t i, auto count) {
    put(to(i), get(x + i, count) * inverse * get(weight + i, count), count);
  });
}
template <typename T>
void norm(const T* x, const float* weight, int64_t size, float eps, T* y) {
  norm(x, weight, size, eps, [&](int64_t i) { return y + i; });
}

// x += scale * delta, or what its norm makes of it. post: null, or the norm's weight.
template <typename T>
void add(const T* delta, const float* post, int64_t size, float eps, float scale, T* x) {
  if (post == nullptr) {
    each_vector(size, [&](int64_t i, auto count) {
      put(x + i, get(x + i, count) + rounded(x, get(delta + i, count) * scale), count);
    });
    return;
  }
  const float inverse = inverse_rms(delta, size, eps);
  each_vector(size, [&](int64_t i, auto count) {
    const Floats normed = get(delta + i, count) * inverse * get(post + i, count);
    put(x + i, get(x + i, count) + rounded(x, rounded(x, normed) * scale), count);
  });
}

// One head, in place. rounds: x / rms(x) is rounded before it is multiplied.
template <typename T>
void norm_head(T* x, const float* weight, float eps, bool rounds, int64_t size) {
  const float inverse = inverse_rms(x, size, eps);
  each_vector(size, [&](int64_t i, auto count) {
    const Floats unit = get(x + i, count) * inverse;
    put(x + i, (rounds ? rounded(x, unit) : unit) * get(weight + i, count), count);
  });
}

// The first 2 half elements of one head, in place.
template <typename T>
void rotate(T* x, const T* cos, const T* sin, int64_t half) {
  each_vector(half, [&](int64_t i, auto count) {
    const Floats a = get(x + i, count), b = get(x + half + i, count), c = get(cos + i, count), s = get(sin + i, count);
    put(x + i, rounded(x, a * c) - b * s, count);
    put(x + half + i, rounded(x, b * c) + a * s, count);
  });
}

// The same, where the two of a pair are neighbours.
template <typename T>
void rotate_neighbours(T* x, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++, x += 2) {
    const Floats pair = get(x, 2), c = splat(get(cos + i, 1)[0]), s = splat(get(sin + i, 1)[0]);
    const Floats kept = rounded(x, pair * c), other = pair * s;
    Floats turned{};
    turned[0] = kept[0] - other[1];
    turned[1] = kept[1] + other[0];
    put(x, turned, 2);
  }
}

// x / (1 + e^-z), z of the sign of x.
inline Floats gated_by(Floats x, Floats z) {
  const Floats e = exp2_of_negative((z < 0 ? z : -z) * 1.44269504f);  // of -|z|: never overflows
  return (z < 0 ? x * e : x) * reciprocal(1 + e);
}
inline Floats silu(Floats x) { return gated_by(x, x); }
// (1 + tanh u) / 2 is 1 / (1 + e^-2u), and u is sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats gelu_tanh(Floats x) { return gated_by(x, x * (1.59576912f + 0.0713548163f * x * x)); }

enum Activation : int { SILU = 0, GELU_TANH = 1 };
inline Floats activated(int64_t activation, Floats x) { return activation == GELU_TANH ? gelu_tanh(x) : silu(x); }

// Memory that is kept from step to step, cut into pieces that begin with lines of the cache.
class Arena {
 public:
  void reserve(int64_t bytes) {
    if (bytes > size) memory.reset((char*)std::aligned_alloc(64, size = bytes));
    used = 0;
  }
  template <typename T>
  T* take(int64_t count) {
    T* found = (T*)(memory.get() + used);
    used += bytes_of<T>(count);
    return found;
  }
  template <typename T>
  static int64_t bytes_of(int64_t count) {
    return (sizeof(T) * count + 63) / 64 * 64;
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory;
  int64_t size = 0, used = 0;
};

}  // namespace

extern "C" {

struct minivllm_matrix;  // of whichever library: packed_linear.cpp, block_linear.cpp, float_linear.cpp, dense_linear.cpp
typedef void (*minivllm_product)(const minivllm_matrix* matrix, const void* x, void* y, int64_t tokens, int64_t x_bf16,
                                int64_t y_bf16, int64_t path, minivllm_parallel parallel, int64_t num_threads);
typedef decltype(&minivllm_attend) minivllm_attention;
typedef void (*minivllm_adapters)(const void* slots, const void* groups, const void* x, void* y, int64_t n_in,
                                  int64_t n_out, int64_t is_bf16, minivllm_parallel parallel, int64_t num_threads);

struct minivllm_layer {
  const float *attention_norm, *mlp_norm;            // [hidden], or null: none
  const float *attention_post_norm, *mlp_post_norm;  // [hidden], or null: of what is added to x
  const float* qk_norm;                              // [heads + kv_heads][head_size], or null
  const void *cos, *sin;                             // [max_position][rotary_half], or null: nothing is rotated
  const minivllm_matrix *qkv, *o, *gate_up, *down;   // minivllm_decode alone needs these and what follows
  void* kv;
  int64_t view;  // which of its attention plan's
  int64_t plan;  // which of the attention plans: of the layer's KV group
  minivllm_product products[4];  // whose calls multiply with qkv, o, gate_up and down
  const void* slots[4];          // of lora.cpp, for the same; null: nobody may change them
};

struct minivllm_decoder {
  const minivllm_layer* layers;
  const float* norm;  // [hidden]
  int64_t num_layers, hidden, heads, kv_heads, head_size, intermediate;
  int64_t kind;        // of all tensors but norms: 0 float32, 2 bfloat16
  int64_t activation;  // Activation
  int64_t qk_rounds;   // 1: norm_head() rounds between
  int64_t qk_whole;    // 1: the norm of q is one of all of its heads, and that of k
  int64_t rotary_half;
  int64_t neighbours;  // 1: the two of a pair that is rotated are neighbours, not of two halves
  float eps;
  float residual_scale;   // of what is added to x
  float embedding_scale;  // of rows that are looked up
  int64_t path;   // of packed_linear.cpp's calls
  int64_t dense;  // 1: all matrices are minivllm_dense
  minivllm_attention attend;
  minivllm_adapters adapt;
  minivllm_parallel parallel;
};
}

namespace {

typedef minivllm_decoder Decoder;

// The tokens' rows of the embedding.
struct Embedded {
  const void* rows;    // [vocab][hidden], or without ids, [tokens][hidden]
  const int64_t* ids;  // [tokens], or null

  template <typename T>
  void copy(int64_t token, int64_t hidden, float scale, T* x) const {
    const T* row = (const T*)rows + (ids == nullptr ? token : ids[token]) * hidden;
    if (ids == nullptr || scale == 1) std::memcpy(x, row, sizeof(T) * hidden);
    else each_vector(hidden, [&](int64_t i, auto count) { put(x + i, get(row + i, count) * scale, count); });
  }
};

struct Step {
  const Decoder& d;
  int64_t tokens, threads;
  minivllm_parallel parallel = d.parallel;
  const void* groups = nullptr;  // of lora.cpp: which tokens have an adapter

  template <typename Work>
  void each(int64_t count, int64_t size, const Work& work) const {
    minivllm::each(count, work, count * size < ALONE ? nullptr : parallel, threads);
  }

  // x = the tokens' embeddings, y = x normalised. All three [tokens][hidden].
  template <typename T>
  void embed(const Embedded& embedded, const float* weight, T* x, T* y) const {
    each(tokens, d.hidden, [&](int64_t t) {
      embedded.copy(t, d.hidden, d.embedding_scale, x + t * d.hidden);
      norm(x + t * d.hidden, weight, d.hidden, d.eps, y + t * d.hidden);
    });
  }

  // x += delta, or post's norm of it, scaled; y = x normalised.
  template <typename T>
  void add_norm(const T* delta, const float* post, const float* weight, T* x, T* y) const {
    each(tokens, d.hidden, [&](int64_t t) {
      T* row = x + t * d.hidden;
      add(delta + t * d.hidden, post, d.hidden, d.eps, d.residual_scale, row);
      norm(row, weight, d.hidden, d.eps, y + t * d.hidden);
    });
  }

  // qkv [tokens][heads + 2 kv_heads][head_size]: q and k, in place.
  template <typename T>
  void turn(const minivllm_layer& layer, const int64_t* positions, T* qkv) const {
    each(tokens, (d.heads + d.kv_heads) * d.head_size,
         [&](int64_t t) { turn_token(layer, positions[t], qkv + t * qkv_width()); });
  }

  template <typename T>
  void turn_token(const minivllm_layer& layer, int64_t position, T* qkv) const {
    const int64_t at = position * d.rotary_half, size = d.head_size;
    const float* weight = layer.qk_norm;
    if (weight != nullptr && d.qk_whole) {
      T* const k = qkv + q_width();
      norm(qkv, weight, q_width(), d.eps, qkv);
      norm(k, weight + q_width(), d.kv_heads * size, d.eps, k);
    }
    for (int64_t h = 0; h < d.heads + d.kv_heads; h++) {
      T* const head = qkv + h * size;
      if (weight != nullptr && !d.qk_whole) norm_head(head, weight + h * size, d.eps, d.qk_rounds, size);
      if (layer.cos == nullptr) continue;
      const T *cos = (const T*)layer.cos + at, *sin = (const T*)layer.sin + at;
      d.neighbours ? rotate_neighbours(head, cos, sin, d.rotary_half) : rotate(head, cos, sin, d.rotary_half);
    }
  }

  int64_t q_width() const { return d.heads * d.head_size; }
  int64_t qkv_width() const { return (d.heads + 2 * d.kv_heads) * d.head_size; }

  // gate_up [tokens][2][intermediate] -> [tokens][intermediate]
  template <typename T>
  void gate(const T* gate_up, T* to) const {
    const int64_t size = d.intermediate;
    each(tokens, 2 * size, [&](int64_t t) {
      const T *gate = gate_up + 2 * t * size, *up = gate + size;
      each_vector(size, [&](int64_t i, auto count) {
        put(to + t * size + i, rounded(to, activated(d.activation, get(gate + i, count))) * get(up + i, count), count);
      });
    });
  }

  template <typename T>
  void multiply(const minivllm_layer& layer, int which, const T* x, T* y, int64_t n_in, int64_t n_out) const {
    const minivllm_matrix* const matrices[]{layer.qkv, layer.o, layer.gate_up, layer.down};
    layer.products[which](matrices[which], x, y, tokens, sizeof(T) == 2, sizeof(T) == 2, d.path, parallel, threads);
    if (groups != nullptr && layer.slots[which] != nullptr)
      d.adapt(layer.slots[which], groups, x, y, n_in, n_out, sizeof(T) == 2, parallel, threads);
  }

  // qkv [tokens][heads + 2 kv_heads][head_size] -> to [tokens][heads][head_size]
  template <typename T>
  void attend(const minivllm_layer& layer, void* const* plans, const T* qkv, T* to) const {
    const int64_t width = qkv_width();
    const T *k = qkv + q_width(), *v = k + d.kv_heads * d.head_size;
    const minivllm_tensors tensors{qkv, k, v, layer.kv, to, width, width, width, int32_t(d.kind)};
    d.attend(plans[layer.plan], layer.view, &tensors, parallel, threads);
  }

  const float* norm_after(int64_t layer) const {
    return layer + 1 < d.num_layers ? d.layers[layer + 1].attention_norm : d.norm;
  }

  // Threads share each operation. TOGETHER tokens go through all that lies between two attentions, then the next.
  template <typename T>
  void decode(const Embedded& embedded, const int64_t* positions, void* const* plans, T* y) const {
    static thread_local Arena arena;  // the calling thread's
    const int64_t hidden = d.hidden, width = qkv_width(), q = q_width();
    const int64_t rows = groups == nullptr ? part_of(tokens, TOGETHER) : tokens;  // adapters' groups are of whole steps
    int64_t bytes = 0;
    for (int64_t row : {hidden, width, q}) bytes += Arena::bytes_of<T>(tokens * row);
    for (int64_t row : {hidden, 2 * d.intermediate, d.intermediate}) bytes += Arena::bytes_of<T>(rows * row);
    arena.reserve(bytes);
    auto take = [&](int64_t count, int64_t row) { return arena.take<T>(count * row); };
    T *x = take(tokens, hidden), *qkv = take(tokens, width), *attended = take(tokens, q);
    T *delta = take(rows, hidden), *gate_up = take(rows, 2 * d.intermediate), *gated = take(rows, d.intermediate);
    embed(embedded, d.layers[0].attention_norm, x, y);
    for (int64_t i = 0; i <= d.num_layers; i++) {
      if (i > 0) attend(d.layers[i - 1], plans, qkv, attended);
      for (int64_t first = 0; first < tokens; first += rows) {
        Step block = *this;
        block.tokens = std::min(rows, tokens - first);
        T* const normed = y + first * hidden;
        if (i > 0) {
          const minivllm_layer& before = d.layers[i - 1];
          block.multiply(before, 1, attended + first * q, delta, q, hidden);
          block.add_norm(delta, before.attention_post_norm, before.mlp_norm, x + first * hidden, normed);
          block.multiply(before, 2, normed, gate_up, hidden, 2 * d.intermediate);
          block.gate(gate_up, gated);
          block.multiply(before, 3, gated, delta, d.intermediate, hidden);
          block.add_norm(delta, before.mlp_post_norm, norm_after(i - 1), x + first * hidden, normed);
        }
        if (i == d.num_layers) continue;
        block.multiply(d.layers[i], 0, normed, qkv + first * width, hidden, width);
        block.turn(d.layers[i], positions + first, qkv + first * width);
      }
    }
  }

#ifdef MINIVLLM_DENSE
  // The same in bfloat16 with dense matrices, bit for bit, a block of tokens at a time. On the matrix unit, rows behind
  // the last token, up to a whole pass, take part, and nobody reads what becomes of them.
  void decode_in_blocks(const Embedded& embedded, const int64_t* positions, void* const* plans, bf16* y) const {
    static thread_local Arena arena;
    const int64_t width = qkv_width(), q = q_width(), padded = (tokens + BLOCK - 1) / BLOCK * BLOCK;
    int64_t bytes = 0;
    for (int64_t row : {d.hidden, width, q}) bytes += Arena::bytes_of<bf16>(padded * row);
    arena.reserve(bytes);
    auto take = [&](int64_t row) { return arena.take<bf16>(padded * row); };
    bf16 *x = take(d.hidden), *qkv = take(width), *attended = take(q);
    const int64_t most = (tokens + ROWS * threads - 1) / (ROWS * threads) * threads;  // as many for each thread
    const int64_t rows = (padded / BLOCK + most - 1) / most * BLOCK, count = (tokens + rows - 1) / rows;
    for (int64_t i = 0; i <= d.num_layers; i++) {
      if (i > 0) attend(d.layers[i - 1], plans, qkv, attended);
      each(count, rows * d.hidden, [&](int64_t block) {
        const int64_t first = block * rows, size = std::min(rows, tokens - first);
        between(i, first, size, embedded, positions + first, attended + first * q, x + first * d.hidden,
                qkv + first * width, y + first * d.hidden);
      });
    }
  }

  // From what layer i - 1's attention gave, or from the embedding, to what layer i's takes; after the last, to y.
  void between(int64_t i, int64_t first, int64_t count, const Embedded& embedded, const int64_t* positions,
               const bf16* attended, bf16* x, bf16* qkv, bf16* y) const {
    static thread_local Arena arena;
    const int64_t rows = (count + BLOCK - 1) / BLOCK * BLOCK, hidden = d.hidden, inner = d.intermediate;
    arena.reserve(2 * Arena::bytes_of<bf16>(rows * hidden) + Arena::bytes_of<bf16>(rows * inner));
    bf16 *normed = arena.take<bf16>(rows * hidden), *gated = arena.take<bf16>(rows * inner);
    bf16* const delta = arena.take<bf16>(rows * hidden);
    const Rows normed_rows{normed, hidden, true}, gated_rows{gated, inner, true};
    auto norm_all = [&](const float* weight) {
      for (int64_t t = 0; t < count; t++)
        norm(x + t * hidden, weight, hidden, d.eps, [&](int64_t i) { return normed + square_at(t, i, hidden); });
    };
    auto add_to_x = [=, scale = d.residual_scale](int64_t row, const Outputs& outputs, const float* both) {
      each_tile(outputs, both, [=](int64_t at, Floats sums, auto size) {
        bf16* to = x + row * hidden + at;
        put(to, get(to, size) + rounded(to, rounded(to, sums) * scale), size);
      });
    };
    auto keep = [=](int64_t row, const Outputs& outputs, const float* both) {
      each_tile(outputs, both, [=](int64_t at, Floats sums, auto size) { put(delta + row * hidden + at, sums, size); });
    };
    const int64_t height = on_tiles() ? rows : count;
    auto add_product = [&](const minivllm_matrix* matrix, const Rows& from, const float* post) {
      if (post == nullptr) return product(matrix, from, height, add_to_x);
      product(matrix, from, height, keep);
      for (int64_t t = 0; t < count; t++)
        add(delta + t * hidden, post, hidden, d.eps, d.residual_scale, x + t * hidden);
    };
    configure_dense(BLOCK);
    if (i == 0) {
      for (int64_t t = 0; t < count; t++) embedded.copy(first + t, hidden, d.embedding_scale, x + t * hidden);
    } else {
      const minivllm_layer& before = d.layers[i - 1];
      add_product(before.o, {attended, q_width(), false}, before.attention_post_norm);
      norm_all(before.mlp_norm);
      product(before.gate_up, normed_rows, height, [=, activation = d.activation](int64_t row, const Outputs& outputs, const float* both) {
        bf16* to = gated + square_at(row, outputs.first[0], inner);
        const Floats gate = rounded(to, load<Floats>(both)), up = rounded(to, load<Floats>(both + SIDE));
        sized(outputs.size[0], [=](auto size) { put(to, rounded(to, activated(activation, gate)) * up, size); });
      });
      add_product(before.down, gated_rows, before.mlp_post_norm);
    }
    if (i < d.num_layers) {
      const minivllm_layer& layer = d.layers[i];
      norm_all(layer.attention_norm);
      product(layer.qkv, normed_rows, height, [=, width = qkv_width()](int64_t row, const Outputs& outputs, auto* both) {
        each_tile(outputs, both, [=](int64_t at, Floats sums, auto size) { put(qkv + row * width + at, sums, size); });
      });
      for (int64_t t = 0; t < count; t++) turn_token(layer, positions[t], qkv + t * qkv_width());
    } else {
      for (int64_t t = 0; t < count; t++) norm(x + t * hidden, d.norm, hidden, d.eps, y + t * hidden);
    }
    release_dense();
  }

  template <typename Use>
  static void product(const minivllm_matrix* matrix, const Rows& x, int64_t count, const Use& use) {
    const Panels panels{*(const minivllm_dense*)matrix};
    for (int64_t p = 0; p < panels.count(); p++) multiply_panel(panels, p, x, count, use);
  }

  // use(first output, sums, how many) for a row's part of a panel.
  template <typename Use>
  static void each_tile(const Outputs& outputs, const float* both, const Use& use) {
    for (int tile = 0; tile < 2; tile++)
      if (const int64_t size = outputs.size[tile])
        sized(size, [&](auto size) { use(outputs.first[tile], load<Floats>(both + tile * SIDE), size); });
  }

  template <typename Use>
  static void sized(int64_t size, const Use& use) {
    static_assert(LANES == SIDE);
    size == LANES ? use(Whole{}) : use(int(size));
  }
#endif
};

template <typename Work>
void typed(const Decoder* d, const Work& work) {
  if (d->kind == 2) work((bf16*)nullptr);
  else work((float*)nullptr);
}

}  // namespace

extern "C" {

void minivllm_embed(const Decoder* d, int64_t tokens, int64_t threads, const void* rows, const int64_t* ids, void* x,
                    void* y) {
  typed(d, [&](auto* t) {
    using T = decltype(t);
    Step{*d, tokens, threads}.embed({rows, ids}, d->layers[0].attention_norm, T(x), T(y));
  });
}

void minivllm_add_norm(const Decoder* d, int64_t tokens, int64_t threads, const void* delta,
                       const float* post, const float* weight, void* x, void* y) {
  typed(d, [&](auto* t) {
    using T = decltype(t);
    Step{*d, tokens, threads}.add_norm(T(delta), post, weight, T(x), T(y));
  });
}

void minivllm_rotate(const Decoder* d, int64_t tokens, int64_t threads, int64_t layer, const int64_t* positions,
                     void* qkv) {
  typed(d, [&](auto* t) { Step{*d, tokens, threads}.turn(d->layers[layer], positions, decltype(t)(qkv)); });
}

void minivllm_gate(const Decoder* d, int64_t tokens, int64_t threads, const void* gate_up, void* to) {
  typed(d, [&](auto* t) {
    using T = decltype(t);
    Step{*d, tokens, threads}.gate(T(gate_up), T(to));
  });
}

// The whole stack, the final norm included: rows and ids as in Embedded, positions [tokens] -> y [tokens][hidden]. plans:
// minivllm_plan's, of each KV group; groups: of the tokens that have an adapter, or null.
void minivllm_decode(const Decoder* d, int64_t tokens, int64_t threads, const void* rows, const int64_t* ids,
                     const int64_t* positions, void* const* plans, const void* groups, void* y) {
  Team::with(d->parallel, threads, [&] {
    const Step step{*d, tokens, threads, d->parallel == nullptr ? nullptr : Team::parallel, groups};
#ifdef MINIVLLM_DENSE
    if (d->dense && groups == nullptr && tokens >= FEW_A_THREAD * threads)
      return step.decode_in_blocks({rows, ids}, positions, plans, (bf16*)y);
#endif
    typed(d, [&](auto* t) { step.decode(Embedded{rows, ids}, positions, plans, decltype(t)(y)); });
  });
}

}  // extern "C"
