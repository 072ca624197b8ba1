// Recurrent states: of both rules and any size in scattered pages, tokens cut into spans, two steps, several threads, against plain loops.
#include "../../kernels/cpu/state.cpp"
#include "check.h"

using minivllm::Span;

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  double worst = 0;
  for (int c = 0; c < cases; c++) {
    const bool bf16 = draw(0, 1), corrects = draw(0, 1);
    const int64_t key_heads = draw(1, 3), share = draw(1, 3), value_heads = key_heads * share, kernel = draw(1, 5);
    const int64_t keys = draw(1, 40), values = draw(1, 150), channels = 2 * key_heads * keys + value_heads * values;
    const int64_t floats = value_heads * keys * values + (kernel - 1) * channels, page = floats + draw(0, 9);
    const bool first_v = draw(0, 1);  // its channels; then k's, then q's
    const int64_t q_at = first_v ? channels - key_heads * keys : 0, v_at = first_v ? 0 : 2 * key_heads * keys;
    const int64_t k_at = first_v ? q_at - key_heads * keys : key_heads * keys;
    const int64_t requests = draw(1, 3), stride = channels + draw(0, 5);
    struct { std::vector<Span> spans; std::vector<int32_t> starts{0}; } steps[2];  // a step writes each page once
    std::vector<int32_t> bounds{0};  // of requests
    int32_t tokens = 0, blocks = 0;
    for (int64_t r = 0; r < requests; r++) {
      int32_t read = -1;
      for (auto& [spans, starts] : steps) {
        for (int s = 0, count = draw(1, 3); s < count; s++) {
          const int32_t end = tokens + draw(1, 50), write = s == 0 && read >= 0 && draw(0, 1) ? read : blocks++;
          spans.push_back({tokens, end, read, write});
          tokens = end, read = write;
        }
        starts.push_back(int32_t(spans.size()));
      }
      bounds.push_back(tokens);
    }
    Values qkv(bf16, tokens * stride);
    qkv.fill_normal();
    std::vector<float> gates(tokens * 2 * value_heads), weights((kernel + 2) * channels), out(tokens * value_heads * values, NAN);
    for (size_t i = 0; i < gates.size(); i++) {
      const float uniform = draw(0, 1000) / 1000.0f;
      gates[i] = int64_t(i) / value_heads % 2 ? uniform : -2 * uniform;
    }
    for (float& x : weights) x = normal();
    std::vector<float> pages(blocks * page, NAN);
    for (const auto& [spans, starts] : steps) {
      const minivllm::States of{qkv.bytes.data(), gates.data(), weights.data(), reinterpret_cast<char*>(pages.data()), out.data(),
                                spans.data(), starts.data(), stride, 4 * page, requests, key_heads, value_heads, keys, values,
                                kernel, q_at, k_at, v_at, bf16 ? minivllm::BF16 : minivllm::F32, corrects};
      minivllm_take(&of, parallel, draw(1, 4));
    }
    const auto channel = [&](int64_t first, int64_t t, int64_t c) {  // after the convolution; first: of the request
      double sum = weights[kernel * channels + c];
      for (int64_t j = 0; j < kernel; j++)
        if (const int64_t at = t - kernel + 1 + j; at >= first) sum += double(qkv.get(at * stride + c)) * weights[j * channels + c];
      return sum / (1 + std::exp(-sum));
    };
    for (int64_t r = 0; r < requests; r++)
      for (int64_t h = 0; h < value_heads; h++) {
        std::vector<double> state(keys * values), q(keys), k(keys);
        const int64_t first = bounds[r], end = bounds[r + 1];
        for (int64_t t = first; t < end; t++) {
          double q_sum = 1e-6, k_sum = 1e-6;
          for (int64_t i = 0; i < keys; i++) {
            q[i] = channel(first, t, q_at + h / share * keys + i), k[i] = channel(first, t, k_at + h / share * keys + i);
            q_sum += q[i] * q[i], k_sum += k[i] * k[i];
          }
          for (int64_t i = 0; i < keys && corrects; i++) q[i] /= std::sqrt(q_sum * keys), k[i] /= std::sqrt(k_sum);
          const float* const gate = gates.data() + t * 2 * value_heads + h;
          for (double& x : state) x *= std::exp(double(gate[0]));
          for (int64_t j = 0; j < values; j++) {
            const int64_t own = v_at + h * values + j;
            const double v = channel(first, t, own);
            double said = 0, size = 1, answer = weights[(kernel + 1) * channels + own] * v;
            for (int64_t i = 0; i < keys && corrects; i++) said += state[i * values + j] * k[i];
            for (int64_t i = 0; i < keys; i++) {
              state[i * values + j] += k[i] * gate[value_heads] * (v - said);
              answer += state[i * values + j] * q[i], size += std::abs(state[i * values + j] * q[i]);
            }
            const double found = out[(t * value_heads + h) * values + j];
            worst = std::max(worst, std::abs(found - answer) / size);
            if (!(std::abs(found - answer) < 2e-4 * size)) return std::printf("case %d: %g, not %g\n", c, found, answer), 1;
          }
        }
      }
  }
  std::printf("recurrent states: %d random batches, at most %.1e of an answer's terms off\n", cases, worst);
}
