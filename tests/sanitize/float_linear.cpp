// Products in float32 with weights of three kinds: each is the product, and each row's own.
#include "../../kernels/cpu/float_linear.cpp"

#include "check.h"

int main(int argc, char** argv) {
  const int cases = num_cases(argc, argv);
  for (int c = 0; c < cases; c++) {
    const Kind kind = Kind(draw(0, 2));
    const int64_t inputs = kind == F32 ? draw(1, 150) : 2 * draw(1, 200), outputs = draw(1, 100);
    const int64_t tokens = draw(0, 4) == 0 ? draw(240, 500) : draw(0, 40);
    std::vector<uint8_t> weight(outputs * inputs * item_size(kind));
    std::vector<float> bias(outputs), exact(outputs * inputs);
    for (int64_t i = 0; i < outputs * inputs; i++) {
      const float x = normal();
      const uint16_t half = kind == F16 ? to_float16(x) : to_bf16(x);
      std::memcpy(&weight[i * item_size(kind)], kind == F32 ? (const void*)&x : &half, item_size(kind));
      exact[i] = to_float(kind, (const char*)&weight[i * item_size(kind)]);
    }
    for (float& b : bias) b = normal();
    Values x(draw(0, 1), tokens * inputs), y(draw(0, 1), tokens * outputs);
    x.fill_normal();
    minivllm_floats matrix{nullptr, draw(0, 1) ? bias.data() : nullptr, outputs, inputs, kind};
    std::vector<uint8_t> packed(minivllm_floats_bytes(&matrix));
    minivllm_floats_pack(&matrix, weight.data(), packed.data(), parallel, draw(1, 4));
    matrix.weight = packed.data();
    minivllm_floats_linear(&matrix, x.bytes.data(), y.bytes.data(), tokens, x.bf16, y.bf16, 0, parallel, draw(1, 4));
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t n = 0; n < outputs; n++) {
        double sum = matrix.bias == nullptr ? 0 : bias[n], size = std::fabs(sum);
        for (int64_t k = 0; k < inputs; k++) {
          const double term = double(x.get(t * inputs + k)) * exact[n * inputs + k];
          sum += term;
          size += std::fabs(term);
        }
        const double error = std::fabs(y.get(t * outputs + n) - sum);
        if (!(error <= size * (inputs + 1) * 0x1p-24 + y.unit() * std::fabs(sum)))
          return std::printf("case %d: token %ld output %ld is off by %g\n", c, long(t), long(n), error), 1;
      }
    if (tokens == 0) continue;
    const int64_t one = draw(0, int(tokens) - 1), in = inputs * (x.bf16 ? 2 : 4), out = outputs * (y.bf16 ? 2 : 4);
    std::vector<uint8_t> alone(out);
    minivllm_floats_linear(&matrix, &x.bytes[one * in], alone.data(), 1, x.bf16, y.bf16, 0, nullptr, 1);
    if (std::memcmp(alone.data(), &y.bytes[one * out], out) != 0)
      return std::printf("case %d: token %ld has other bits alone than among %ld\n", c, long(one), long(tokens)), 1;
  }
  std::printf("float_linear: %d random products\n", cases);
}
