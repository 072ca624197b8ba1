// The gated delta rule: states of any size in scattered pages, tokens cut into spans, several threads, against plain loops.
#include "../../kernels/cpu/state.cpp"
#include "check.h"

using minivllm::Span;

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  double worst = 0;
  for (int c = 0; c < cases; c++) {
    const bool bf16 = draw(0, 1);
    const int64_t key_heads = draw(1, 3), share = draw(1, 3), value_heads = key_heads * share, kernel = draw(1, 5);
    const int64_t keys = draw(1, 40), values = draw(1, 150), channels = 2 * key_heads * keys + value_heads * values;
    const int64_t floats = value_heads * keys * values + (kernel - 1) * channels, page = floats + draw(0, 9);
    const int64_t requests = draw(1, 3), stride = channels + draw(0, 5);
    std::vector<Span> spans;
    std::vector<int32_t> starts{0};
    int32_t tokens = 0;
    for (int64_t r = 0; r < requests; r++) {
      int32_t read = -1;
      for (int s = draw(1, 3); s > 0; s--) {
        const int32_t end = tokens + draw(1, 50), write = read >= 0 && draw(0, 1) ? read : int32_t(spans.size());
        spans.push_back({tokens, end, read, write});
        tokens = end, read = write;
      }
      starts.push_back(int32_t(spans.size()));
    }
    Values qkv(bf16, tokens * stride);
    qkv.fill_normal();
    std::vector<float> gates(tokens * 2 * value_heads), taps(kernel * channels), out(tokens * value_heads * values, NAN);
    for (size_t i = 0; i < gates.size(); i++) {
      const float uniform = draw(0, 1000) / 1000.0f;
      gates[i] = int64_t(i) / value_heads % 2 ? uniform : -2 * uniform;
    }
    for (float& x : taps) x = normal();
    std::vector<float> pages(spans.size() * page, NAN);
    const minivllm::States of{qkv.bytes.data(), gates.data(), taps.data(), reinterpret_cast<char*>(pages.data()), out.data(),
                              spans.data(), starts.data(), stride, 4 * page, requests, key_heads, value_heads, keys, values, kernel,
                              bf16 ? minivllm::BF16 : minivllm::F32};
    minivllm_take(&of, parallel, draw(1, 4));
    const auto channel = [&](int64_t first, int64_t t, int64_t c) {  // after the convolution; first: of the request
      double sum = 0;
      for (int64_t j = 0; j < kernel; j++)
        if (const int64_t at = t - kernel + 1 + j; at >= first) sum += double(qkv.get(at * stride + c)) * taps[j * channels + c];
      return sum / (1 + std::exp(-sum));
    };
    for (int64_t r = 0; r < requests; r++)
      for (int64_t h = 0; h < value_heads; h++) {
        std::vector<double> state(keys * values), q(keys), k(keys);
        const int64_t first = spans[starts[r]].first, end = spans[starts[r + 1] - 1].end;
        for (int64_t t = first; t < end; t++) {
          double q_sum = 1e-6, k_sum = 1e-6;
          for (int64_t i = 0; i < keys; i++) {
            q[i] = channel(first, t, h / share * keys + i), k[i] = channel(first, t, (key_heads + h / share) * keys + i);
            q_sum += q[i] * q[i], k_sum += k[i] * k[i];
          }
          const float* const gate = gates.data() + t * 2 * value_heads + h;
          for (double& x : state) x *= std::exp(double(gate[0]));
          for (int64_t j = 0; j < values; j++) {
            double said = 0, answer = 0;
            for (int64_t i = 0; i < keys; i++) said += state[i * values + j] * k[i] / std::sqrt(k_sum);
            const double v = channel(first, t, 2 * key_heads * keys + h * values + j);
            for (int64_t i = 0; i < keys; i++) {
              state[i * values + j] += k[i] / std::sqrt(k_sum) * gate[value_heads] * (v - said);
              answer += state[i * values + j] * q[i] / std::sqrt(q_sum * keys);
            }
            const double found = out[(t * value_heads + h) * values + j];
            worst = std::max(worst, std::abs(found - answer));
            if (!(std::abs(found - answer) < 2e-4)) return std::printf("case %d: %g, not %g\n", c, found, answer), 1;
          }
        }
      }
  }
  std::printf("gated delta rule: %d random batches, at most %.1e off\n", cases, worst);
}
