// One kind of block (MINIVLLM_KIND, a name of block_formats.h): products with it, packing, de-quantised rows.
//
// For inputs in 16 bits and in 8, BITS.
//
// Few tokens: a tile goes by from front to back, and each code is widened once for all of them. One tile after the other:
// a single stream, which the processor reads ahead by itself, or else is asked for (ahead.h). Many: two tiles' codes, 256
// inputs at a time, are widened into a panel in the first-level cache, which groups of 6 tokens then meet. An output's sum
// is taken group by group in one order in both, so its bits do not depend on the number of tokens.

#include <type_traits>

#include "ahead.h"
#include "block_tiles.h"
#include "items.h"

namespace {

using namespace minivllm;

typedef minivllm_integers Integers;

constexpr int PANEL_UNITS = 8;   // of 32 inputs, widened at a time

// A token's inputs, from some unit on.
struct Token {
  const int8_t* q;
  const float* scales;
  const int32_t* sums;
};
template <int BITS>
constexpr int STEP_BYTES = unit_bytes(BITS) / 4;  // of q: of the 8 inputs of a `dot`

template <int BITS>
inline Token token_of(const Integers& x, int64_t token, int64_t unit) {
  const int64_t at = token * x.units + unit;
  return {x.q + at * unit_bytes(BITS), x.scales + 4 * at, x.sums + 2 * at};
}

constexpr int64_t AHEAD = 4096;  // bytes of a tile asked for before they are needed

// What is needed AHEAD bytes after unit u of a block.
template <BlockKind K>
inline void ask_ahead(const uint8_t* block, int u) {
  constexpr int64_t SHARE = Tile<K>::BYTES / Tile<K>::UNITS;
  if constexpr (!READS_AHEAD) ask_for<SECOND_LEVEL>(block + u * SHARE + AHEAD, SHARE);
}

template <BlockKind K>
constexpr int GROUPS_OF_UNIT = UNIT / format_of(K).group;  // 1, or 2 halves

// What the sums of a group of a unit begin with: the codes' offset, times the inputs that they meet.
template <BlockKind K, int BITS>
inline Sums<BITS> begin_group(const int32_t* sums, int group) {
  constexpr int OF_CODES = OFFSET<K, BITS>;
  if constexpr (OF_CODES == 0) return begin_sums<BITS>(0);
  else return begin_sums<BITS>(-OF_CODES * (GROUPS_OF_UNIT<K> == 2 ? sums[group] : sums[0] + sums[1]));
}

// sum + one group of a token.
template <int GROUPS, bool MINIMA>
inline __attribute__((always_inline)) Lanes plus(Lanes sum, Lanes exact, const float* scales, int g, const Group& group) {
  sum = fma(times(exact, lanes_of(scales[0])), group.scale, sum);
  if constexpr (MINIMA) sum = fma(lanes_of(scales[GROUPS == 2 ? 2 + g : 1]), group.minimum, sum);
  return sum;
}

// --------------------------------------------------------------------------------------------------- a few tokens

// sums [there][width], of which 8: T <= FEW tokens from `first` on, one tile. Where only `there` < T are, the last is taken
// again.
template <BlockKind K, int BITS, int T>
void multiply_few(const Integers& x, int64_t first, int64_t there, const uint8_t* tile, int64_t width, float* sums) {
  typedef Tile<K> L;
  constexpr int GROUPS = GROUPS_OF_UNIT<K>, STEPS = 4 / GROUPS;
  constexpr bool MINIMA = L::F.minima != 0;
  // Sums in turns, where few of them would leave additions waiting for each other.
  constexpr int TURNS = T <= 2 ? 2 : 1;
  Token tokens[T];
  Lanes sum[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    tokens[t] = token_of<BITS>(x, first + std::min<int64_t>(t, there - 1), 0);
    sum[t] = lanes_of(0.f);
  }
  const int64_t blocks = x.units / L::UNITS;
  int64_t at = 0;  // unit
  for (int64_t b = 0; b < blocks; b++, tile += L::BYTES) {
    for (int u = 0; u < L::UNITS; u++, at++) {
      ask_ahead<K>(tile, u);
      const uint8_t* codes = tile + L::CODES_AT + u * L::UNIT_CODES;
#pragma GCC unroll 2
      for (int g = 0; g < GROUPS; g++) {
        Sums<BITS> exact[T][TURNS];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
          for (int i = 0; i < TURNS; i++)
            exact[t][i] = i == 0 ? begin_group<K, BITS>(tokens[t].sums + 2 * at, g) : begin_sums<BITS>(0);
#pragma GCC unroll 4
        for (int s = 0; s < STEPS; s++) {
          const int j = g * STEPS + s;
          const Codes<BITS> widened = widen<K, BITS>(codes, j);
#pragma GCC unroll 8
          for (int t = 0; t < T; t++)
            exact[t][s % TURNS] =
                dot<K, BITS>(exact[t][s % TURNS], widened, tokens[t].q + at * unit_bytes(BITS) + STEP_BYTES<BITS> * j);
        }
        const Group group = group_of<K>(tile, u * GROUPS + g);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          Sums<BITS> all = exact[t][0];
#pragma GCC unroll 4
          for (int i = 1; i < TURNS; i++) all = all + exact[t][i];
          sum[t] = plus<GROUPS, MINIMA>(sum[t], to_lanes(all), tokens[t].scales + 4 * at, g, group);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
    if (t < there) store_lanes(sums + t * width, sum[t]);
}

// --------------------------------------------------------------------------------------------------- many tokens

// Some units of a tile, widened, and what of their groups is the same for all tokens.
template <int BITS>
struct alignas(64) Panel {
  Codes<BITS> codes[PANEL_UNITS][4];
  Group groups[2 * PANEL_UNITS];
};

// Units first .. first + count of a tile; they do not begin or end within a block of 256.
template <BlockKind K, int BITS>
void widen_panel(const uint8_t* tile, int64_t first, int count, Panel<BITS>& to) {
  typedef Tile<K> L;
  constexpr int GROUPS = GROUPS_OF_UNIT<K>;
  for (int i = 0; i < count; i++) {
    const int64_t unit = first + i;
    const uint8_t* block = tile + unit / L::UNITS * L::BYTES;
    const int u = int(unit % L::UNITS);
    ask_ahead<K>(block, u);
    for (int j = 0; j < 4; j++) to.codes[i][j] = widen<K, BITS>(block + L::CODES_AT + u * L::UNIT_CODES, j);
    for (int g = 0; g < GROUPS; g++) to.groups[GROUPS * i + g] = group_of<K>(block, u * GROUPS + g);
  }
}

// sums [T][N tiles][8] += T tokens, from unit `first` on, times N panels.
template <BlockKind K, int BITS, int N, int T>
void multiply_panels(const Integers& x, int64_t token, int64_t first, const Panel<BITS>* panels, int count, float* sums) {
  constexpr int GROUPS = GROUPS_OF_UNIT<K>, STEPS = 4 / GROUPS;
  constexpr bool MINIMA = format_of(K).minima != 0;
  Token tokens[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) tokens[t] = token_of<BITS>(x, token + t, first);
  for (int u = 0; u < count; u++)
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; g++) {
      Sums<BITS> exact[T][N];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const Sums<BITS> begin = begin_group<K, BITS>(tokens[t].sums + 2 * u, g);
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) exact[t][n] = begin;
      }
#pragma GCC unroll 4
      for (int s = 0; s < STEPS; s++) {
        const int j = g * STEPS + s;
        const Codes<BITS>* codes[N];
        const int8_t* q[T];
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) codes[n] = &panels[n].codes[u][j];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) q[t] = tokens[t].q + u * unit_bytes(BITS) + STEP_BYTES<BITS> * j;
        dots<K, BITS, T, N>(exact, codes, q);
      }
      keep_in_order();
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
          float* to = sums + (t * N + n) * OUTPUTS;
          store_lanes(to, plus<GROUPS, MINIMA>(load_lanes(to), to_lanes(exact[t][n]), tokens[t].scales + 4 * u, g,
                                               panels[n].groups[GROUPS * u + g]));
        }
    }
}

// For `rest` <= T tokens.
template <BlockKind K, int BITS, int N, int T = GROUP>
void multiply_group(const Integers& x, int64_t token, int64_t rest, int64_t first, const Panel<BITS>* panels, int count,
                    float* sums) {
  if constexpr (T > 0) {
    if (rest < T) return multiply_group<K, BITS, N, T - 1>(x, token, rest, first, panels, count, sums);
    multiply_panels<K, BITS, N, T>(x, token, first, panels, count, sums);
  }
}

// sums [tokens][N][8] of N neighbouring tiles, `stride` bytes apart.
template <BlockKind K, int BITS, int N>
void multiply_many(const Integers& x, int64_t first, int64_t tokens, const uint8_t* tile, int64_t stride, float* sums) {
  Panel<BITS> panels[N];
  std::fill(sums, sums + tokens * N * OUTPUTS, 0.f);
  for (int64_t unit = 0; unit < x.units; unit += PANEL_UNITS) {
    const int count = int(std::min<int64_t>(PANEL_UNITS, x.units - unit));
    for (int n = 0; n < N; n++) widen_panel<K>(tile + n * stride, unit, count, panels[n]);
    for (int64_t t = 0; t < tokens; t += GROUP)
      multiply_group<K, BITS, N>(x, first + t, std::min<int64_t>(GROUP, tokens - t), unit, panels, count,
                                 sums + t * N * OUTPUTS);
  }
}

constexpr BlockKind KIND = BlockKind::MINIVLLM_KIND;
constexpr Format FORMAT = format_of(KIND);

// sums: see block_kind.h.
template <int BITS>
void multiply(const Integers& x, const uint8_t* tiles, int64_t tile, int64_t num_tiles, int64_t first, int64_t count,
              float* sums) {
  const int64_t stride = x.units / Tile<KIND>::UNITS * Tile<KIND>::BYTES;
  const uint8_t* at = tiles + tile * stride;
  if (count > FEW) {
    const auto many = num_tiles == 2 ? multiply_many<KIND, BITS, 2> : multiply_many<KIND, BITS, 1>;
    return many(x, first, count, at, stride, sums);
  }
  const auto few = count == 1   ? multiply_few<KIND, BITS, 1>
                   : count == 2 ? multiply_few<KIND, BITS, 2>
                                : multiply_few<KIND, BITS, FEW>;
  for (int64_t n = 0; n < num_tiles; n++) few(x, first, count, at + n * stride, num_tiles * OUTPUTS, sums + n * OUTPUTS);
}

}  // namespace

extern "C" {

void minivllm_kind_multiply_16(const Integers* x, const uint8_t* tiles, int64_t tile, int64_t num_tiles, int64_t first,
                               int64_t count, float* sums) {
  multiply<16>(*x, tiles, tile, num_tiles, first, count, sums);
}

void minivllm_kind_multiply_8(const Integers* x, const uint8_t* tiles, int64_t tile, int64_t num_tiles, int64_t first,
                              int64_t count, float* sums) {
  multiply<8>(*x, tiles, tile, num_tiles, first, count, sums);
}

int64_t minivllm_kind_packed_bytes(int64_t rows, int64_t inputs) {
  return (rows + OUTPUTS - 1) / OUTPUTS * (inputs / FORMAT.block) * Tile<KIND>::BYTES;
}

// rows of a file, [rows][bytes of a row] -> tiles; `to` is written whole.
void minivllm_kind_pack(const uint8_t* raw, int64_t rows, int64_t inputs, uint8_t* to, minivllm_parallel parallel,
                        int64_t num_threads) {
  const int64_t blocks = inputs / FORMAT.block, stride = blocks * Tile<KIND>::BYTES;
  auto pack = [&](int64_t tile) {
    std::memset(to + tile * stride, 0, stride);
    for (int64_t row = tile * OUTPUTS; row < std::min<int64_t>(rows, (tile + 1) * OUTPUTS); row++)
      for (int64_t b = 0; b < blocks; b++)
        pack_block<KIND>(raw + (row * blocks + b) * FORMAT.bytes, int(row % OUTPUTS),
                         to + tile * stride + b * Tile<KIND>::BYTES);
  };
  each((rows + OUTPUTS - 1) / OUTPUTS, pack, parallel, num_threads);
}

// to [count][inputs], fp32 or bf16: the rows of a file that `ids` names, or where it is null, the first `count`.
void minivllm_kind_rows(const uint8_t* raw, const int64_t* ids, int64_t count, int64_t inputs, void* to, int64_t bf16,
                        minivllm_parallel parallel, int64_t num_threads) {
  const int64_t blocks = inputs / FORMAT.block;
  auto dequantise = [&](int64_t i) {
    const uint8_t* row = raw + (ids ? ids[i] : i) * blocks * FORMAT.bytes;
    for (int64_t b = 0; b < blocks; b++) {
      float values[256];
      dequantise_block<KIND>(row + b * FORMAT.bytes, values);
      const int64_t at = i * inputs + b * FORMAT.block;
      if (!bf16) std::memcpy(static_cast<float*>(to) + at, values, 4 * FORMAT.block);
      else
        for (int64_t k = 0; k < FORMAT.block; k++) static_cast<uint16_t*>(to)[at + k] = to_bf16(values[k]);
    }
  };
  each(count, dequantise, count * inputs < 1 << 15 ? nullptr : parallel, num_threads);
}

}  // extern "C"
