// Products with packed weights, on every path of this machine, against plain loops in double; and the dense copy.
#include "../../kernels/cpu/packed_linear.cpp"
#include "check.h"

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  double worst = 0;
  for (int c = 0; c < cases; c++) {
    const int64_t bits = draw(0, 1) ? 4 : 8, outputs = draw(1, 90), groups = draw(1, 6), inputs = groups * K;
    const int64_t tokens = draw(0, 19), row_bytes = inputs * bits / 8;
    std::vector<uint8_t> codes(outputs * row_bytes), scales(2 * outputs * groups), minima(bits == 4 ? scales.size() : 0);
    for (uint8_t& code : codes) code = rng();
    auto half = [&](std::vector<uint8_t>& to, int64_t i, bool sign) {
      const uint16_t h = draw(5, 12) << 10 | draw(0, 1023) | (sign ? draw(0, 1) << 15 : 0);
      std::memcpy(&to[2 * i], &h, 2);
    };
    for (int64_t i = 0; i < outputs * groups; i++) half(scales, i, false);
    for (size_t i = 0; i < minima.size() / 2; i++) half(minima, i, true);
    const bool is_q4_0 = bits == 4 && draw(0, 1);
    if (is_q4_0)
      for (int64_t i = 0; i < outputs * groups; i++) {
        const uint16_t minimum = times_minus_8(scales[2 * i] | scales[2 * i + 1] << 8);
        std::memcpy(&minima[2 * i], &minimum, 2);
      }
    auto stored = [&](int64_t first, int64_t count) {
      std::vector<uint8_t> rows;
      for (int64_t at = first * groups; at < (first + count) * groups; at++) {
        rows.insert(rows.end(), &scales[2 * at], &scales[2 * at] + 2);
        if (bits == 4 && !is_q4_0) rows.insert(rows.end(), &minima[2 * at], &minima[2 * at] + 2);
        rows.insert(rows.end(), &codes[at * K * bits / 8], &codes[at * K * bits / 8] + K * bits / 8);
      }
      return rows;
    };
    std::vector<uint8_t> weight(minivllm_packed_bytes(outputs, inputs, bits));
    const int64_t above = draw(0, outputs), halves = bits == 4 && !is_q4_0 ? 2 : 1;
    bool finite = true;
    for (auto [first, count] : {std::pair(int64_t(0), above), std::pair(above, outputs - above)})
      finite &= minivllm_pack(stored(first, count).data(), first, count, inputs, bits, halves, weight.data(), parallel, draw(1, 4));
    if (!finite) return std::printf("case %d: finite minima are said to be none\n", c), 1;
    auto w = [&](int64_t n, int64_t i) {
      const int64_t at = n * groups + i / K, k = i % K;
      const uint8_t* code = &codes[at * K * bits / 8];
      const double value = bits == 8 ? int8_t(code[k]) : k < 16 ? code[k] & 15 : code[k - 16] >> 4;
      return double(from_half(&scales[2 * at])) * value + (bits == 4 ? from_half(&minima[2 * at]) : 0.f);
    };
    Values x(draw(0, 1), tokens * inputs);
    x.fill_normal();
    std::vector<float> bias(draw(0, 1) ? outputs : 0);
    for (float& b : bias) b = normal();
    const minivllm_matrix matrix{weight.data(), bias.empty() ? nullptr : bias.data(), outputs, inputs, bits};
    for (int64_t path = kPortable; path <= minivllm_best_path(); path++) {
      Values y(draw(0, 1), tokens * outputs);
      minivllm_linear(&matrix, x.bytes.data(), y.bytes.data(), tokens, x.bf16, y.bf16, path, parallel, draw(1, 4));
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t n = 0; n < outputs; n++) {
          double wanted = bias.empty() ? 0 : bias[n], rounding = 0;
          for (int64_t g = 0; g < groups; g++) {
            double size = 0, largest = 0, weights = 0;
            for (int64_t i = g * K; i < (g + 1) * K; i++) {
              const double xi = x.get(t * inputs + i), wi = w(n, i);
              wanted += xi * wi;
              size += std::fabs(xi * wi);
              weights += std::fabs(wi);
              largest = std::max(largest, std::fabs(xi));
            }
            // A minimum is as large as all codes together: its own product is rounded in fp32.
            rounding += 1e-5 * (size + weights * largest) + (path == kVnni ? (bits == 4 ? 0x1p-12 : 0x1p-15) * weights * largest : 0);
          }
          const double error = std::fabs(y.get(t * outputs + n) - wanted) / (rounding + 2 * y.unit() * std::fabs(wanted));
          worst = error <= worst ? worst : error;  // NaN is worst of all
        }
    }
    Values dense(true, outputs * inputs);
    minivllm_unpack(&matrix, (uint16_t*)dense.bytes.data(), parallel, draw(1, 4));
    for (int64_t n = 0; n < outputs; n++)
      for (int64_t i = 0; i < inputs; i++) {
        const double code = 16 * double(from_half(&scales[2 * (n * groups + i / K)]));  // fp32 rounds the largest term
        const double error = std::fabs(dense.get(n * inputs + i) - w(n, i)) / (0x1p-8 * std::fabs(w(n, i)) + 1e-6 * code);
        worst = error <= worst ? worst : error;
      }
    if (!(worst <= 1)) return std::printf("linear: case %d, %d bits: %g of what is allowed\n", c, int(bits), worst), 1;
  }
  std::printf("packed linear: %d random products, worst error %.2f of what is allowed\n", cases, worst);
}
