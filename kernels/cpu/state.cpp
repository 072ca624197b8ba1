// The gated delta rule over states in pages (minivllm/attention/state.py has the rule, and the oracle): what a step's tokens
// do to the states of their requests, and what these answer.
//
// A task is a request with one key head and the value heads that share it: nobody else writes its matrices, or its
// channels of the convolution's inputs. It takes tokens in blocks: the convolution of all first, then, of some columns of a
// matrix that stay in the first-level cache meanwhile, token after token. Columns are independent: what a state says of a
// key, how it is corrected and what it answers is one number each a column. All is computed in float. No torch header.
#include <algorithm>
#include <cmath>
#include <vector>

#include "items.h"
#include "simd.h"

namespace minivllm {

constexpr int TOKENS = 32;  // of a block: their q, k and v stay in the caches that are a core's own
constexpr float EPS = 1e-6f;

struct Span {  // of one request's tokens: those that end in one block
  int32_t first, end, read, write;  // token rows; blocks, read < 0: nothing came before
};

struct States {
  const void* qkv;        // [tokens][qkv_stride], of `kind`
  const float* gates;     // [tokens][2][value heads]
  const float* taps;      // [kernel][channels]
  char* pages;            // [blocks], each of page_bytes: matrices [value heads][keys][values], inputs [kernel - 1][channels]
  float* out;             // [tokens][value heads][values]
  const Span* spans;
  const int32_t* starts;  // [requests + 1]: which spans are whose
  int64_t qkv_stride, page_bytes, requests, key_heads, value_heads, keys, values, kernel;
  int32_t kind;  // F32, F16 or BF16

  int64_t channels() const { return 2 * key_heads * keys + value_heads * values; }
  float* matrix(int32_t block, int64_t head) const {
    return reinterpret_cast<float*>(pages + block * page_bytes) + head * keys * values;
  }
  float* inputs(int32_t block) const { return matrix(block, value_heads); }
};

// Channels of a task, one after the other: those of a key head's q and k, and of its value heads' v.
struct Part {
  int64_t from, size;
};

// What a task writes to: kept by its thread from call to call.
struct Rows {
  std::vector<float> inputs;  // [kernel - 1 + TOKENS][channels of the task]
  std::vector<float> mixed;   // [TOKENS][channels of the task]: q, k and v
  std::vector<float> decays, rates;
};

template <Kind K>
inline void widen(const char* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load_floats<K>(from + i * item_size(K)));
  for (; i < count; i++) to[i] = load_some<K>(from + i * item_size(K), 1)[0];
}

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline Floats silu(Floats x) {
  const Floats e = exp2_of_negative((x < 0.0f ? x : -x) * 1.44269504f);  // e^-|x|
  return x * (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// to[c] = silu(sum over j of inputs[j][c] * taps[j][c]); taps have another stride.
inline void convolve(const float* inputs, int64_t stride, const float* taps, int64_t channels, int64_t kernel, int64_t count,
                     float* to) {
  int64_t c = 0;
  for (; c + LANES <= count; c += LANES) {
    Floats sum = {};
    for (int64_t j = 0; j < kernel; j++) sum += load<Floats>(inputs + j * stride + c) * load<Floats>(taps + j * channels + c);
    store(to + c, silu(sum));
  }
  for (; c < count; c++) {
    float sum = 0;
    for (int64_t j = 0; j < kernel; j++) sum += inputs[j * stride + c] * taps[j * channels + c];
    to[c] = silu(sum);
  }
}

// To unit length, times `scale`.
inline void normalise(float* x, int64_t count, float scale) {
  Floats sums = {};
  float sum = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Floats v = load<Floats>(x + i);
    sums += v * v;
  }
  for (; i < count; i++) sum += x[i] * x[i];
  const float factor = scale / std::sqrt(sum_of(sums) + sum + EPS);
  for (i = 0; i < count; i++) x[i] *= factor;
}

// W vectors of columns, of one token. from: the matrix as it was, which may be `to`.
template <int W>
inline void take(const float* from, float* to, int64_t values, const float* q, const float* k, int64_t keys, const float* v,
                 float decay, float rate, float* out) {
  Floats said[2][W] = {};  // two rows at a time: a sum waits for the one before it
  int64_t i = 0;
  for (; i + 2 <= keys; i += 2)
    for (int r = 0; r < 2; r++)
      for (int w = 0; w < W; w++) said[r][w] += load<Floats>(from + (i + r) * values + w * LANES) * k[i + r];
  if (i < keys)
    for (int w = 0; w < W; w++) said[0][w] += load<Floats>(from + i * values + w * LANES) * k[i];
  Floats correction[W], answer[W] = {};
  for (int w = 0; w < W; w++) correction[w] = (load<Floats>(v + w * LANES) - (said[0][w] + said[1][w]) * decay) * rate;
  for (i = 0; i < keys; i++)
    for (int w = 0; w < W; w++) {
      const Floats x = load<Floats>(from + i * values + w * LANES) * decay + correction[w] * k[i];
      store(to + i * values + w * LANES, x);
      answer[w] += x * q[i];
    }
  for (int w = 0; w < W; w++) store(out + w * LANES, answer[w]);
}

// The same of one column.
inline void take_one(const float* from, float* to, int64_t values, const float* q, const float* k, int64_t keys, float v,
                     float decay, float rate, float* out) {
  float said = 0, answer = 0;
  for (int64_t i = 0; i < keys; i++) said += from[i * values] * k[i];
  const float correction = (v - said * decay) * rate;
  for (int64_t i = 0; i < keys; i++) {
    const float x = from[i * values] * decay + correction * k[i];
    to[i * values] = x;
    answer += x * q[i];
  }
  *out = answer;
}

// `count` tokens of one value head. mixed: of the first, each `stride` further; out likewise.
inline void take_all(const States& of, const float* from, float* to, const float* mixed, int64_t stride, int64_t v_at,
                     const float* decays, const float* rates, int64_t count, float* out) {
  const int64_t values = of.values, step = of.value_heads * values;
  const auto each_token = [&](int64_t at, const auto& one) {
    for (int64_t t = 0; t < count; t++) {
      const float* const q = mixed + t * stride;
      one((t == 0 ? from : to) + at, q, q + of.keys, q + v_at + at, decays[t], rates[t], out + t * step + at);
    }
  };
  int64_t at = 0;
  for (; at + 4 * LANES <= values; at += 4 * LANES)
    each_token(at, [&](const float* here, const float* q, const float* k, const float* v, float decay, float rate, float* y) {
      take<4>(here, to + at, values, q, k, of.keys, v, decay, rate, y);
    });
  for (; at + LANES <= values; at += LANES)
    each_token(at, [&](const float* here, const float* q, const float* k, const float* v, float decay, float rate, float* y) {
      take<1>(here, to + at, values, q, k, of.keys, v, decay, rate, y);
    });
  for (; at < values; at++)
    each_token(at, [&](const float* here, const float* q, const float* k, const float* v, float decay, float rate, float* y) {
      take_one(here, to + at, values, q, k, of.keys, *v, decay, rate, y);
    });
}

template <Kind K>
void take_span(const States& of, const Span& span, int64_t head) {
  static thread_local Rows own;
  const int64_t share = of.value_heads / of.key_heads, before = of.kernel - 1, channels = of.channels();
  const Part parts[3] = {{head * of.keys, of.keys},
                         {(of.key_heads + head) * of.keys, of.keys},
                         {2 * of.key_heads * of.keys + head * share * of.values, share * of.values}};
  const int64_t stride = 2 * of.keys + share * of.values;
  own.inputs.resize((before + TOKENS) * stride), own.mixed.resize(TOKENS * stride);
  own.decays.resize(TOKENS), own.rates.resize(TOKENS);
  const auto each_part = [&](const auto& one) {
    int64_t at = 0;
    for (const Part& part : parts) one(part.from, at, part.size), at += part.size;
  };
  for (int64_t j = 0; j < before; j++)
    each_part([&](int64_t from, int64_t at, int64_t size) {
      float* const to = own.inputs.data() + j * stride + at;
      if (span.read < 0) std::fill_n(to, size, 0.0f);
      else std::copy_n(of.inputs(span.read) + j * channels + from, size, to);
    });
  for (int64_t h = 0; h < share && span.read < 0; h++)
    std::fill_n(of.matrix(span.write, head * share + h), of.keys * of.values, 0.0f);
  for (int64_t first = span.first; first < span.end; first += TOKENS) {
    const int64_t count = std::min<int64_t>(TOKENS, span.end - first);
    for (int64_t t = 0; t < count; t++) {
      const char* const row = static_cast<const char*>(of.qkv) + (first + t) * of.qkv_stride * item_size(K);
      each_part([&](int64_t from, int64_t at, int64_t size) {
        widen<K>(row + from * item_size(K), size, own.inputs.data() + (before + t) * stride + at);
      });
    }
    for (int64_t t = 0; t < count; t++) {
      float* const mixed = own.mixed.data() + t * stride;
      each_part([&](int64_t from, int64_t at, int64_t size) {
        convolve(own.inputs.data() + t * stride + at, stride, of.taps + from, channels, of.kernel, size, mixed + at);
      });
      normalise(mixed, of.keys, 1.0f / std::sqrt(float(of.keys)));
      normalise(mixed + of.keys, of.keys, 1.0f);
    }
    for (int64_t h = 0; h < share; h++) {
      const int64_t value_head = head * share + h;
      for (int64_t t = 0; t < count; t++) {
        const float* const gates = of.gates + (first + t) * 2 * of.value_heads + value_head;
        own.decays[t] = std::exp(gates[0]), own.rates[t] = gates[of.value_heads];
      }
      float* const to = of.matrix(span.write, value_head);
      const float* const from = first == span.first && span.read >= 0 ? of.matrix(span.read, value_head) : to;
      take_all(of, from, to, own.mixed.data(), stride, 2 * of.keys + h * of.values, own.decays.data(), own.rates.data(), count,
               of.out + (first * of.value_heads + value_head) * of.values);
    }
    std::copy_n(own.inputs.data() + count * stride, before * stride, own.inputs.data());  // forwards: they may overlap
  }
  for (int64_t j = 0; j < before; j++)
    each_part([&](int64_t from, int64_t at, int64_t size) {
      std::copy_n(own.inputs.data() + j * stride + at, size, of.inputs(span.write) + j * channels + from);
    });
}

}  // namespace minivllm

// parallel: as minivllm_mask's.
extern "C" void minivllm_take(const minivllm::States* of, minivllm_parallel parallel, int64_t num_threads) {
  using namespace minivllm;
  const auto work = [&](int64_t i) {
    const int64_t request = i / of->key_heads, head = i % of->key_heads;
    for (int64_t s = of->starts[request]; s < of->starts[request + 1]; s++) {
      if (of->kind == F32) take_span<F32>(*of, of->spans[s], head);
      else if (of->kind == F16) take_span<F16>(*of, of->spans[s], head);
      else take_span<BF16>(*of, of->spans[s], head);
    }
  };
  each(of->requests * of->key_heads, work, parallel, num_threads);
}
