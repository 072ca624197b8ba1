// A decoder layer of the Llama family around its products: norms, rotation, gate, residual; and, where all weights are
// packed, the whole stack in one call. At few tokens a step of separate tensor operations costs as much as its products.
//
// Each function rounds to the model's dtype wherever the model as written does (minivllm/models/llama.py, its twin), so
// the two differ by the order of sums and by the last bit of exp alone. Products and attention are the other
// libraries' functions, which come in by address.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "simd.h"

namespace {

using namespace minivllm;

typedef uint16_t bf16;
constexpr int64_t ALONE = 1 << 15;  // elements: below, waking another thread takes longer than the work

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

template <typename T>
void norm(const T* x, const T* weight, int64_t size, float eps, T* y) {
  const float inverse = inverse_rms(x, size, eps);
  each_vector(size, [&](int64_t i, auto count) {
    put(y + i, get(x + i, count) * inverse * get(weight + i, count), count);
  });
}

// One head, in place. weight: null, or of the norm of q and k, whose result is rounded before it is multiplied.
template <typename T>
void rotate(T* x, const T* weight, float eps, const T* cos, const T* sin, int64_t half) {
  if (weight != nullptr) {
    const float inverse = inverse_rms(x, 2 * half, eps);
    each_vector(2 * half, [&](int64_t i, auto count) {
      put(x + i, rounded(x, get(x + i, count) * inverse) * get(weight + i, count), count);
    });
  }
  each_vector(half, [&](int64_t i, auto count) {
    const Floats a = get(x + i, count), b = get(x + half + i, count), c = get(cos + i, count), s = get(sin + i, count);
    put(x + i, rounded(x, a * c) - b * s, count);
    put(x + half + i, rounded(x, b * c) + a * s, count);
  });
}

inline Floats silu(Floats x) {
  const Floats e = exp2_of_negative((x < 0 ? x : -x) * 1.44269504f);  // of -|x|: never overflows
  return (x < 0 ? x * e : x) * reciprocal(1 + e);
}

template <typename Work>
struct Rows {
  const Work& work;
  int64_t count, share;
  std::atomic<int64_t> next{0};

  static void run(void* data) {
    Rows& rows = *static_cast<Rows*>(data);
    for (int64_t begin; (begin = rows.next.fetch_add(rows.share, std::memory_order_relaxed)) < rows.count;)
      for (int64_t i = begin; i < std::min(rows.count, begin + rows.share); i++) rows.work(i);
  }
};

}  // namespace

extern "C" {

struct minivllm_matrix;  // packed_linear.cpp
typedef void (*minivllm_product)(const minivllm_matrix* matrix, const void* x, void* y, int64_t tokens, int64_t x_bf16,
                                int64_t y_bf16, int64_t path, minivllm_parallel parallel, int64_t num_threads);
typedef decltype(&minivllm_attend) minivllm_attention;
typedef void (*minivllm_adapters)(const void* slots, const void* groups, const void* x, void* y, int64_t n_in,
                                  int64_t n_out, int64_t is_bf16, minivllm_parallel parallel, int64_t num_threads);

struct minivllm_layer {
  const void *attention_norm, *mlp_norm;             // [hidden]
  const void* qk_norm;                               // [heads + kv_heads][head_size], or null
  const minivllm_matrix *qkv, *o, *gate_up, *down;   // minivllm_decode alone needs these and what follows
  void* kv;
  int64_t view;  // which of the attention plan's
  const void* slots[4];  // of lora.cpp, for qkv, o, gate_up and down; null: nobody may change them
};

struct minivllm_decoder {
  const minivllm_layer* layers;
  const void *norm, *embedding;  // [hidden], [vocab][hidden]
  const void *cos, *sin;         // [max_position][head_size / 2]
  int64_t num_layers, hidden, heads, kv_heads, head_size, intermediate;
  int64_t kind;  // of all tensors: 0 float32, 2 bfloat16
  float eps, qk_eps;
  int64_t path;  // of minivllm_linear
  minivllm_product linear;
  minivllm_attention attend;
  minivllm_adapters adapt;
  minivllm_parallel parallel;
};
}

namespace {

typedef minivllm_decoder Decoder;

struct Step {
  const Decoder& d;
  int64_t tokens, threads;
  const void* groups = nullptr;  // of lora.cpp: which tokens have an adapter

  template <typename Work>
  void each(int64_t count, int64_t size, const Work& work) const {
    if (d.parallel == nullptr || threads == 1 || count * size < ALONE) {
      for (int64_t i = 0; i < count; i++) work(i);
      return;
    }
    Rows<Work> rows{work, count, std::max<int64_t>(1, count / (8 * threads))};
    d.parallel(Rows<Work>::run, &rows, threads, 0);
  }

  // x = the tokens' embeddings, y = x normalised. All three [tokens][hidden].
  template <typename T>
  void embed(const int64_t* ids, const void* weight, T* x, T* y) const {
    each(tokens, d.hidden, [&](int64_t t) {
      std::memcpy(x + t * d.hidden, (const T*)d.embedding + ids[t] * d.hidden, sizeof(T) * d.hidden);
      norm(x + t * d.hidden, (const T*)weight, d.hidden, d.eps, y + t * d.hidden);
    });
  }

  // x += delta, y = x normalised.
  template <typename T>
  void add_norm(const T* delta, const void* weight, T* x, T* y) const {
    each(tokens, d.hidden, [&](int64_t t) {
      T* row = x + t * d.hidden;
      each_vector(d.hidden, [&](int64_t i, auto count) {
        put(row + i, get(row + i, count) + get(delta + t * d.hidden + i, count), count);
      });
      norm(row, (const T*)weight, d.hidden, d.eps, y + t * d.hidden);
    });
  }

  // qkv [tokens][heads + 2 kv_heads][head_size]: q and k, in place.
  template <typename T>
  void turn(const void* weight, const int64_t* positions, T* qkv) const {
    const int64_t turned = d.heads + d.kv_heads, half = d.head_size / 2;
    each(tokens, turned * d.head_size, [&](int64_t t) {
      const int64_t at = positions[t] * half;
      for (int64_t h = 0; h < turned; h++)
        rotate(qkv + (t * (turned + d.kv_heads) + h) * d.head_size,
               weight == nullptr ? nullptr : (const T*)weight + h * d.head_size, d.qk_eps, (const T*)d.cos + at,
               (const T*)d.sin + at, half);
    });
  }

  // gate_up [tokens][2][intermediate] -> [tokens][intermediate]
  template <typename T>
  void gate(const T* gate_up, T* to) const {
    const int64_t size = d.intermediate;
    each(tokens, 2 * size, [&](int64_t t) {
      const T *gate = gate_up + 2 * t * size, *up = gate + size;
      each_vector(size, [&](int64_t i, auto count) {
        put(to + t * size + i, rounded(to, silu(get(gate + i, count))) * get(up + i, count), count);
      });
    });
  }

  template <typename T>
  void multiply(const minivllm_matrix* matrix, const void* slots, const T* x, T* y, int64_t n_in, int64_t n_out) const {
    d.linear(matrix, x, y, tokens, sizeof(T) == 2, sizeof(T) == 2, d.path, d.parallel, threads);
    if (groups != nullptr && slots != nullptr)
      d.adapt(slots, groups, x, y, n_in, n_out, sizeof(T) == 2, d.parallel, threads);
  }

  template <typename T>
  void decode(const int64_t* ids, const int64_t* positions, void* plan, T* y) const {
    const int64_t width = (d.heads + 2 * d.kv_heads) * d.head_size, q = d.heads * d.head_size;
    static thread_local std::vector<char> memory;  // the calling thread's, kept from step to step
    memory.resize(sizeof(T) * tokens * (2 * d.hidden + width + q + 3 * d.intermediate) + 64 * 6);
    char* free = memory.data();
    auto take = [&](int64_t row) {
      T* found = (T*)free;
      free += (sizeof(T) * tokens * row + 63) / 64 * 64;
      return found;
    };
    T *x = take(d.hidden), *delta = take(d.hidden), *qkv = take(width), *attended = take(q);
    T *gate_up = take(2 * d.intermediate), *gated = take(d.intermediate);
    embed(ids, d.layers[0].attention_norm, x, y);
    for (int64_t i = 0; i < d.num_layers; i++) {
      const minivllm_layer& layer = d.layers[i];
      multiply(layer.qkv, layer.slots[0], y, qkv, d.hidden, width);
      turn(layer.qk_norm, positions, qkv);
      const minivllm_tensors tensors{qkv,   qkv + q, qkv + q + d.kv_heads * d.head_size, layer.kv, attended, width,
                                     width, width,   int32_t(d.kind)};
      d.attend(plan, layer.view, &tensors, d.parallel, threads);
      multiply(layer.o, layer.slots[1], attended, delta, q, d.hidden);
      add_norm(delta, layer.mlp_norm, x, y);
      multiply(layer.gate_up, layer.slots[2], y, gate_up, d.hidden, 2 * d.intermediate);
      gate(gate_up, gated);
      multiply(layer.down, layer.slots[3], gated, delta, d.intermediate, d.hidden);
      add_norm(delta, i + 1 < d.num_layers ? d.layers[i + 1].attention_norm : d.norm, x, y);
    }
  }
};

template <typename Work>
void typed(const Decoder* d, const Work& work) {
  if (d->kind == 2) work((bf16*)nullptr);
  else work((float*)nullptr);
}

}  // namespace

extern "C" {

void minivllm_embed(const Decoder* d, int64_t tokens, int64_t threads, const int64_t* ids, void* x, void* y) {
  typed(d, [&](auto* t) {
    using T = decltype(t);
    Step{*d, tokens, threads}.embed(ids, d->layers[0].attention_norm, T(x), T(y));
  });
}

void minivllm_add_norm(const Decoder* d, int64_t tokens, int64_t threads, const void* delta, const void* weight,
                       void* x, void* y) {
  typed(d, [&](auto* t) {
    using T = decltype(t);
    Step{*d, tokens, threads}.add_norm(T(delta), weight, T(x), T(y));
  });
}

void minivllm_rotate(const Decoder* d, int64_t tokens, int64_t threads, int64_t layer, const int64_t* positions,
                     void* qkv) {
  typed(d, [&](auto* t) { Step{*d, tokens, threads}.turn(d->layers[layer].qk_norm, positions, decltype(t)(qkv)); });
}

void minivllm_gate(const Decoder* d, int64_t tokens, int64_t threads, const void* gate_up, void* to) {
  typed(d, [&](auto* t) {
    using T = decltype(t);
    Step{*d, tokens, threads}.gate(T(gate_up), T(to));
  });
}

// The whole stack, the final norm included: ids, positions [tokens] -> y [tokens][hidden]. plan: minivllm_plan's;
// groups: of the tokens that have an adapter, or null.
void minivllm_decode(const Decoder* d, int64_t tokens, int64_t threads, const int64_t* ids, const int64_t* positions,
                     void* plan, const void* groups, void* y) {
  typed(d, [&](auto* t) { Step{*d, tokens, threads, groups}.decode(ids, positions, plan, decltype(t)(y)); });
}

}  // extern "C"
