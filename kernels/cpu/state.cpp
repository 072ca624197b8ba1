// Recurrent states in pages (minivllm/attention/state.py has the two rules, and the oracle): what a step's tokens do to the
// states of their requests, and what these answer.
//
// A task is a request with a key head and some of the value heads that share it: nobody else writes their matrices. It takes
// tokens in blocks: the convolution of all first, then, of some columns of a matrix that stay in the first-level cache
// meanwhile, token after token. Columns are independent: what a state says of a key, what is added and what it answers is one
// number each a column. Where a key head has several tasks each convolves its q and k anew, so the last inputs, which they
// begin with, are written when all are done. All is computed in float. No torch header.
#include <algorithm>
#include <cmath>
#include <type_traits>
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
  const float* weights;   // [kernel + 2][channels]: taps, bias, and what of v is added to an answer
  char* pages;            // [blocks], each of page_bytes: matrices [value heads][keys][values], inputs [kernel - 1][channels]
  float* out;             // [tokens][value heads][values]
  const Span* spans;
  const int32_t* starts;  // [requests + 1]: which spans are whose
  int64_t qkv_stride, page_bytes, requests, key_heads, value_heads, keys, values, kernel;
  int64_t q_at, k_at, v_at;  // among the channels
  int32_t kind;      // F32, F16 or BF16
  int32_t corrects;  // 1: gated_delta; 0: ssd

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

// to[c] = silu(weights[kernel][c] + sum over j of inputs[j][c] * weights[j][c]); weights have another stride.
inline void convolve(const float* inputs, int64_t stride, const float* weights, int64_t channels, int64_t kernel, int64_t count,
                     float* to) {
  const float* const bias = weights + kernel * channels;
  int64_t c = 0;
  for (; c + LANES <= count; c += LANES) {
    Floats sum = load<Floats>(bias + c);
    for (int64_t j = 0; j < kernel; j++)
      sum += load<Floats>(inputs + j * stride + c) * load<Floats>(weights + j * channels + c);
    store(to + c, silu(sum));
  }
  for (; c < count; c++) {
    float sum = bias[c];
    for (int64_t j = 0; j < kernel; j++) sum += inputs[j * stride + c] * weights[j * channels + c];
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

// W vectors of columns, of one token. from: the matrix as it was, which may be `to`. CORRECTS: by the delta rule. Two rows
// at a time, with sums of their own: a sum waits for the one before it.
template <int W, bool CORRECTS>
inline void take(const float* from, float* to, int64_t values, const float* q, const float* k, int64_t keys, const float* v,
                 float decay, float rate, const float* skip, float* out) {
  Floats known[2][W] = {}, answer[2][W] = {}, added[W];
  const auto each_row = [&](const auto& one) {
    int64_t i = 0;
    for (; i + 2 <= keys; i += 2) one(i, 0), one(i + 1, 1);
    if (i < keys) one(i, 0);
  };
  if constexpr (CORRECTS)
    each_row([&](int64_t i, int r) {
      for (int w = 0; w < W; w++) known[r][w] += load<Floats>(from + i * values + w * LANES) * k[i];
    });
  for (int w = 0; w < W; w++) added[w] = (load<Floats>(v + w * LANES) - (known[0][w] + known[1][w]) * decay) * rate;
  each_row([&](int64_t i, int r) {
    for (int w = 0; w < W; w++) {
      const Floats x = load<Floats>(from + i * values + w * LANES) * decay + added[w] * k[i];
      store(to + i * values + w * LANES, x);
      answer[r][w] += x * q[i];
    }
  });
  for (int w = 0; w < W; w++)
    store(out + w * LANES, answer[0][w] + answer[1][w] + load<Floats>(skip + w * LANES) * load<Floats>(v + w * LANES));
}

// The same of one column.
template <bool CORRECTS>
inline void take_one(const float* from, float* to, int64_t values, const float* q, const float* k, int64_t keys, float v,
                     float decay, float rate, float skip, float* out) {
  float known = 0, answer = 0;
  for (int64_t i = 0; i < keys && CORRECTS; i++) known += from[i * values] * k[i];
  const float added = (v - known * decay) * rate;
  for (int64_t i = 0; i < keys; i++) {
    const float x = from[i * values] * decay + added * k[i];
    to[i * values] = x;
    answer += x * q[i];
  }
  *out = answer + skip * v;
}

// `count` tokens of one value head. mixed: of the first, each `stride` further; out likewise. skip: of the head.
template <bool CORRECTS>
inline void take_all(const States& of, const float* from, float* to, const float* mixed, int64_t stride, int64_t v_at,
                     const float* decays, const float* rates, const float* skip, int64_t count, float* out) {
  const int64_t values = of.values, keys = of.keys, step = of.value_heads * values;
  int64_t at = 0;
  const auto each_token = [&](const auto& one) {
    for (int64_t t = 0; t < count; t++) {
      const float* const q = mixed + t * stride;
      one((t == 0 ? from : to) + at, q, q + keys, q + v_at + at, decays[t], rates[t], out + t * step + at);
    }
  };
  const auto columns = [&](auto width) {
    constexpr int W = decltype(width)::value;
    for (; at + W * LANES <= values; at += W * LANES)
      each_token([&](const float* here, const float* q, const float* k, const float* v, float decay, float rate, float* y) {
        take<W, CORRECTS>(here, to + at, values, q, k, keys, v, decay, rate, skip + at, y);
      });
  };
  columns(std::integral_constant<int, 4>{}), columns(std::integral_constant<int, 2>{}), columns(std::integral_constant<int, 1>{});
  for (; at < values; at++)
    each_token([&](const float* here, const float* q, const float* k, const float* v, float decay, float rate, float* y) {
      take_one<CORRECTS>(here, to + at, values, q, k, keys, *v, decay, rate, skip[at], y);
    });
}

// A request's tokens, in value heads `first` to `end` of a key head. Each span reads what the one before it wrote.
template <Kind K>
void take_request(const States& of, const Span* spans, const Span* last, int64_t head, int64_t first, int64_t end) {
  static thread_local Rows own;
  const int64_t before = of.kernel - 1, channels = of.channels(), stride = 2 * of.keys + (end - first) * of.values;
  const Part parts[3] = {{of.q_at + head * of.keys, of.keys},
                         {of.k_at + head * of.keys, of.keys},
                         {of.v_at + first * of.values, (end - first) * of.values}};
  own.inputs.resize((before + TOKENS) * stride), own.mixed.resize(TOKENS * stride);
  own.decays.resize(TOKENS), own.rates.resize(TOKENS);
  const auto each_part = [&](const auto& one) {
    int64_t at = 0;
    for (const Part& part : parts) one(part.from, at, part.size), at += part.size;
  };
  for (int64_t j = 0; j < before; j++)
    each_part([&](int64_t from, int64_t at, int64_t size) {
      float* const to = own.inputs.data() + j * stride + at;
      if (spans->read < 0) std::fill_n(to, size, 0.0f);
      else std::copy_n(of.inputs(spans->read) + j * channels + from, size, to);
    });
  for (; spans < last; spans++) {
    if (spans->read < 0)
      std::fill_n(of.matrix(spans->write, first), (end - first) * of.keys * of.values, 0.0f);
    for (int64_t row = spans->first; row < spans->end; row += TOKENS) {
      const int64_t count = std::min<int64_t>(TOKENS, spans->end - row);
      for (int64_t t = 0; t < count; t++) {
        const char* const qkv = static_cast<const char*>(of.qkv) + (row + t) * of.qkv_stride * item_size(K);
        each_part([&](int64_t from, int64_t at, int64_t size) {
          widen<K>(qkv + from * item_size(K), size, own.inputs.data() + (before + t) * stride + at);
        });
      }
      for (int64_t t = 0; t < count; t++) {
        float* const mixed = own.mixed.data() + t * stride;
        each_part([&](int64_t from, int64_t at, int64_t size) {
          convolve(own.inputs.data() + t * stride + at, stride, of.weights + from, channels, of.kernel, size, mixed + at);
        });
        if (!of.corrects) continue;
        normalise(mixed, of.keys, 1.0f / std::sqrt(float(of.keys)));
        normalise(mixed + of.keys, of.keys, 1.0f);
      }
      for (int64_t h = first; h < end; h++) {
        for (int64_t t = 0; t < count; t++) {
          const float* const gates = of.gates + (row + t) * 2 * of.value_heads + h;
          own.decays[t] = std::exp(gates[0]), own.rates[t] = gates[of.value_heads];
        }
        float* const to = of.matrix(spans->write, h);
        const float* const from = row == spans->first && spans->read >= 0 ? of.matrix(spans->read, h) : to;
        const float* const skip = of.weights + (of.kernel + 1) * channels + of.v_at + h * of.values;
        const auto take = of.corrects ? take_all<true> : take_all<false>;
        take(of, from, to, own.mixed.data(), stride, 2 * of.keys + (h - first) * of.values, own.decays.data(), own.rates.data(),
             skip, count, of.out + (row * of.value_heads + h) * of.values);
      }
      std::copy_n(own.inputs.data() + count * stride, before * stride, own.inputs.data());  // forwards: they may overlap
    }
  }
}

// Behind a request's spans the last inputs of the convolution. Several tasks read those that were there.
template <Kind K>
void leave_inputs(const States& of, const Span* spans, const Span* last) {
  const int64_t before = of.kernel - 1, channels = of.channels();
  for (; spans < last; spans++) {
    const int64_t added = std::min<int64_t>(before, spans->end - spans->first), kept = before - added;
    float* const to = of.inputs(spans->write);
    if (spans->read < 0) std::fill_n(to, kept * channels, 0.0f);
    else std::copy_n(of.inputs(spans->read) + added * channels, kept * channels, to);  // forwards: they may overlap
    for (int64_t j = 0; j < added; j++) {
      const int64_t row = spans->end - added + j;
      widen<K>(static_cast<const char*>(of.qkv) + row * of.qkv_stride * item_size(K), channels, to + (kept + j) * channels);
    }
  }
}

template <Kind K>
void take_step(const States& of, minivllm_parallel parallel, int64_t num_threads) {
  const int64_t share = of.value_heads / of.key_heads, pairs = std::max<int64_t>(1, of.requests * of.key_heads);
  const int64_t wanted = std::clamp<int64_t>((2 * num_threads + pairs - 1) / pairs, 1, share);
  const int64_t heads = (share + wanted - 1) / wanted, tasks = (share + heads - 1) / heads;  // of a task; of a key head
  const auto take = [&](int64_t i) {
    const int64_t request = i / tasks / of.key_heads, head = i / tasks % of.key_heads, first = head * share + i % tasks * heads;
    const int64_t end = std::min(first + heads, (head + 1) * share);
    take_request<K>(of, of.spans + of.starts[request], of.spans + of.starts[request + 1], head, first, end);
  };
  const auto leave = [&](int64_t r) { leave_inputs<K>(of, of.spans + of.starts[r], of.spans + of.starts[r + 1]); };
  each(of.requests * of.key_heads * tasks, take, parallel, num_threads);
  each(of.requests, leave, parallel, num_threads);
}

}  // namespace minivllm

// parallel: as minivllm_mask's.
extern "C" void minivllm_take(const minivllm::States* of, minivllm_parallel parallel, int64_t num_threads) {
  using namespace minivllm;
  if (of->kind == F32) take_step<F32>(*of, parallel, num_threads);
  else if (of->kind == F16) take_step<F16>(*of, parallel, num_threads);
  else take_step<BF16>(*of, parallel, num_threads);
}
