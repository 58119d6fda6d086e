"""Bodies of the matvec kernels, see ``matvec``.

A body is SIZES (which differs between the kernels), a table, and for each step of a warp the words
of R outputs (STEP) and what is done with them; at the end the sums are added over the lanes. There
are three ways to multiply:

* MULTIPLY: float32 multiply-adds, for Metal and CUDA and all dtypes.
* TENSOR: the matrix units of an NVIDIA GPU. An instruction multiplies two outputs' weights of a
  warp with its activations. Its rows are the two outputs times the eight groups of four lanes, and
  its columns are those groups again, so that only the products of a group with itself count: one in
  eight, the diagonal. That is the price of reading codes and activations in consecutive order; it
  is low, for the matrix units would idle otherwise, and it takes an eighth of the instructions. The
  levels, divided by a power of two, and the activations are in the dtype of the activation, sums in
  float32.
* TENSOR_ROWS: the same units for several activations. An instruction's rows are sixteen outputs and
  its columns eight rows of activations, so all its products count, and eight activations take as
  many instructions as one. Lane 4 g + q decodes outputs g and g + 8 and reads row g of the
  activations, both in the q-th of four neighbouring units: which place along the input is which
  does not matter where both operands agree. So codes are read from eight rows at once, by four
  lanes each. The instruction adds up the four units, which must have one scale, hence the condition
  on groups (``matvec._unit_of_tiles``). A lane fetches the next step's codes before it looks up
  this one's.

TERNARY takes words of ternary digits instead (``ternary.MULTIPLY``).
"""

from __future__ import annotations

from . import ternary, unpack

_COUNTS = """
  constexpr int M = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
  constexpr int SUMS = M * R;
  constexpr int PARTIALS = SPLIT > 1 ? WARPS * SUMS : 1;
  TQ_FIND_SIZES
  const uint width = groups * uint(GROUP);
"""
_SIZES = unpack.CONSTANTS + _COUNTS + "  const uint units = width / uint(UNIT);\n"

_STEP = (
    """
  TQ_SHARED(float, partial, PARTIALS);
  const uint part = tq_warp % uint(SPLIT);
  const uint first = (block * uint(WARPS / SPLIT) + tq_warp / uint(SPLIT)) * uint(R);

  float sum[SUMS];
  TQ_UNROLL for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
  const uint spans = (units + uint(32 * SPAN - 1)) / uint(32 * SPAN);
  for (uint span = part; span < spans; span += uint(SPLIT)) {
    TQ_START_SPAN
    for (uint step = span * uint(SPAN); step < (span + 1u) * uint(SPAN); ++step) {
    const uint unit = step * 32u + tq_lane;
    const bool inside = unit < units;
    const uint at = inside ? unit : units - 1u;
"""
    + unpack.FIND_WORDS
    + """
    uint codes_of[R * WORDS];
    TQ_UNROLL for (int r = 0; r < R; ++r) {
      const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) {
        codes_of[r * WORDS + j] = codes[int(matrix + o) * words + place[j]];
      }
    }
"""
)

_MULTIPLY = (
    """
    float inputs[M * UNIT];
    TQ_UNROLL for (int m = 0; m < M; ++m) {
      const uint row = first_row + uint(m < ROWS ? m : ROWS - 1);
      TQ_READ((inputs + m * UNIT), UNIT, x, row * width + at * uint(UNIT));
    }
    if (!inside) {
      TQ_UNROLL for (int i = 0; i < M * UNIT; ++i) inputs[i] = 0.0f;
    }
    TQ_UNROLL for (int r = 0; r < R; ++r) {
      uint code[WORDS];
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) code[j] = codes_of[r * WORDS + j];
      float dot[M];
      TQ_UNROLL for (int m = 0; m < M; ++m) dot[m] = 0.0f;
#define TQ_USE(i, value) \\
  TQ_UNROLL for (int m = 0; m < M; ++m) dot[m] += (value) * inputs[m * UNIT + (i)]
"""
    + unpack.DECODE
    + """
#undef TQ_USE
      if (SPAN > 1) {
        TQ_UNROLL for (int m = 0; m < M; ++m) unscaled[m * R + r] += dot[m];
      } else {
        const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
        const uint where = (matrix + o) * groups + at * uint(UNIT) / uint(GROUP);
"""
    + unpack.READ_SCALE
    + """
        TQ_UNROLL for (int m = 0; m < M; ++m) sum[m * R + r] += scale * dot[m];
      }
    }
    }
    if (SPAN > 1) {
      TQ_UNROLL for (int r = 0; r < R; ++r) {
        const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
        const uint where = (matrix + o) * groups + span * uint(SPAN * 32 * UNIT) / uint(GROUP);
"""
    + unpack.READ_SCALE
    + """
        TQ_UNROLL for (int m = 0; m < M; ++m) sum[m * R + r] += scale * unscaled[m * R + r];
      }
    }
  }
"""
)

_FINISH = """
// Halve the sums of each lane while there is more than one; then lanes hold the same sum.
  constexpr int LEFT = SUMS > 32 ? SUMS / 32 : 1;
  uint index = 0u;
  TQ_UNROLL for (int s = 0; s < 5; ++s) {
    constexpr_half
    const bool upper = (tq_lane & (16u >> s)) != 0u;
    if (half_of > 0) {
      TQ_UNROLL for (int i = 0; i < SUMS / 2; ++i) {
        if (i < half_of) {
          const float give = upper ? sum[i] : sum[i + half_of];
          const float keep = upper ? sum[i + half_of] : sum[i];
          sum[i] = keep + TQ_SHUFFLE_XOR(give, 16u >> s);
        }
      }
      if (upper) index += uint(half_of);
    } else {
      sum[0] += TQ_SHUFFLE_XOR(sum[0], 16u >> s);
    }
  }

  if (SPLIT > 1) {
    TQ_UNROLL for (int i = 0; i < LEFT; ++i) {
      if (SUMS >= 32 || tq_lane % uint(32 / (SUMS < 32 ? SUMS : 32)) == 0u) {
        partial[tq_warp * uint(SUMS) + index + uint(i)] = sum[i];
      }
    }
    TQ_SYNC();
    if (part == 0u) {
      for (uint i = tq_lane; i < uint(SUMS); i += 32u) {
        float total = 0.0f;
        TQ_UNROLL for (int p = 0; p < SPLIT; ++p) {
          total += partial[(tq_warp + uint(p)) * uint(SUMS) + i];
        }
        const uint m = i / uint(R);
        const uint o = first + i % uint(R);
        if (o < outputs && m < uint(ROWS)) y[(out_row + m) * outputs + o] = T(total);
      }
    }
  } else {
    TQ_UNROLL for (int i = 0; i < LEFT; ++i) {
      if (SUMS >= 32 || tq_lane % uint(32 / (SUMS < 32 ? SUMS : 32)) == 0u) {
        const uint m = (index + uint(i)) / uint(R);
        const uint o = first + (index + uint(i)) % uint(R);
        if (o < outputs && m < uint(ROWS)) y[(out_row + m) * outputs + o] = T(sum[i]);
      }
    }
  }
""".replace("constexpr_half\n", "const int half_of = SUMS >> (s + 1);\n")

_SPAN_OF_SUMS = """
    float unscaled[SUMS];
    TQ_UNROLL for (int i = 0; i < SUMS; ++i) unscaled[i] = 0.0f;
"""

MULTIPLY = (
    _SIZES + unpack.FILL_TABLE + _STEP.replace("    TQ_START_SPAN\n", _SPAN_OF_SUMS) + _MULTIPLY
) + _FINISH

# Entries are one level, in the low half of a word, or two.
_TENSOR_TABLE = """
  TQ_SHARED(uint, lut, ENTRIES * COPIES);
  constexpr int LEVELS = 1 << (TRELLIS ? WINDOW : BITS);
  float largest = 0.0f;
  for (uint i = tq_lane; i < uint(LEVELS); i += 32u) largest = fmaxf(largest, fabsf(TQ_LEVEL(i)));
  TQ_UNROLL for (int s = 16; s > 0; s >>= 1) {
    largest = fmaxf(largest, TQ_SHUFFLE_XOR(largest, s));
  }
  // the power of two next below; 1 for a table of zeros
  const uint exponent = __float_as_uint(largest) & 0x7f800000u;
  const float power = exponent == 0u ? 1.0f : __uint_as_float(exponent);
  const float inverse = 1.0f / power;
  constexpr int BESIDE = COPIES < 4 ? COPIES : 4;  // copies that one store writes
  for (uint i = tq_tid; i < uint(ENTRIES * COPIES / BESIDE); i += uint(WARPS * 32)) {
    const uint entry = i / uint(COPIES / BESIDE);
    uint levels;
    if (PER_ENTRY == 2) {
      const uint low = entry & ((1u << BITS) - 1u);
      levels = tq_narrow(x, TQ_LEVEL(low) * inverse, TQ_LEVEL(entry >> BITS) * inverse);
    } else {
      levels = tq_narrow(x, TQ_LEVEL(entry) * inverse, 0.0f);
    }
    TQ_UNROLL for (int c = 0; c < BESIDE; ++c) lut[i * uint(BESIDE) + uint(c)] = levels;
  }
  TQ_SYNC();
"""

_SPAN_OF_TILES = """
    float tile[SPAN > 1 ? M * R * 2 : 1];
    TQ_UNROLL for (int i = 0; i < (SPAN > 1 ? M * R * 2 : 1); ++i) tile[i] = 0.0f;
"""

_READ_PAIR_OF_SCALES = (
    """
        float pair_of_scales[2];
        TQ_UNROLL for (int h = 0; h < 2; ++h) {
          const uint o = first + uint(r + h) < outputs ? first + uint(r + h) : outputs - 1u;
          const uint where = (matrix + o) * groups + TQ_GROUP_OF_LANE;
"""
    + unpack.READ_SCALE
    + """
          pair_of_scales[h] = scale;
        }
"""
)

# From `code[WORDS]`, `weights[h]`: the levels of a unit, two in a word.
# TQ_LOOK(word, shift, bits): the entry of the table that a field of a word names.
_LOOK_UP = (
    unpack.FLUSH
    + """
      if (TRELLIS) {
        uint value[UNIT];
        TQ_UNROLL for (int phase = 0; phase < PERIOD; ++phase) {
          TQ_UNROLL for (int from = phase; from < UNIT; from += PERIOD * REACH) {
            const uint shifted = TQ_FUNNEL(
                flush[from * BITS / 32], flush[from * BITS / 32 + 1], uint(from * BITS % 32));
            TQ_UNROLL for (int j = 0; j < REACH; ++j) {
              if (from + j * PERIOD < UNIT) {
                value[from + j * PERIOD] = TQ_LOOK(shifted, 8 * j * STRIDE, 8);
              }
            }
          }
        }
        TQ_UNROLL for (int i = 0; i < UNIT; i += 2) {
          weights[h][i / 2] = __byte_perm(value[i], value[i + 1], 0x5410u);
        }
      } else {
        TQ_UNROLL for (int i = 0; i < UNIT; i += 2) {
          const bool whole = i * BITS % 32 + 2 * BITS <= 32;
          const uint key = whole ? flush[i * BITS / 32]
              : TQ_FUNNEL(flush[i * BITS / 32], flush[i * BITS / 32 + 1], uint(i * BITS % 32));
          weights[h][i / 2] = TQ_LOOK(key, whole ? i * BITS % 32 : 0, 2 * BITS);
        }
      }
"""
)

_TENSOR = (
    """
    uint inputs[M * UNIT / 2];
    TQ_UNROLL for (int m = 0; m < M; ++m) {
      const uint row = first_row + uint(m < ROWS ? m : ROWS - 1);
      tq_read_pairs<UNIT>(inputs + m * UNIT / 2, x + row * width + at * uint(UNIT));
    }
    if (!inside) {
      TQ_UNROLL for (int i = 0; i < M * UNIT / 2; ++i) inputs[i] = 0u;
    }
    TQ_UNROLL for (int r = 0; r < R; r += 2) {
      uint weights[2][UNIT / 2];
      TQ_UNROLL for (int h = 0; h < 2; ++h) {
      uint code[WORDS];
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) code[j] = codes_of[(r + h) * WORDS + j];
"""
    + _LOOK_UP
    + """
      }
      if (SPAN > 1) {
        TQ_UNROLL for (int m = 0; m < M; ++m) {
          TQ_UNROLL for (int i = 0; i < UNIT / 2; i += 2) {
            tq_tensor(x, tile + (m * R + r) * (SPAN > 1 ? 2 : 0), weights[0][i], weights[1][i],
                weights[0][i + 1], weights[1][i + 1],
                inputs[m * UNIT / 2 + i], inputs[m * UNIT / 2 + i + 1]);
          }
        }
      } else {
#define TQ_GROUP_OF_LANE at * uint(UNIT) / uint(GROUP)
"""
    + _READ_PAIR_OF_SCALES
    + """
#undef TQ_GROUP_OF_LANE
        TQ_UNROLL for (int m = 0; m < M; ++m) {
          float one[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          TQ_UNROLL for (int i = 0; i < UNIT / 2; i += 2) {
            tq_tensor(x, one, weights[0][i], weights[1][i], weights[0][i + 1], weights[1][i + 1],
                inputs[m * UNIT / 2 + i], inputs[m * UNIT / 2 + i + 1]);
          }
          sum[m * R + r] += pair_of_scales[0] * (odd ? one[1] : one[0]);
          sum[m * R + r + 1] += pair_of_scales[1] * (odd ? one[3] : one[2]);
        }
      }
    }
    }
    if (SPAN > 1) {
      TQ_UNROLL for (int r = 0; r < R; r += 2) {
#define TQ_GROUP_OF_LANE span * uint(SPAN * 32 * UNIT) / uint(GROUP)
"""
    + _READ_PAIR_OF_SCALES
    + """
#undef TQ_GROUP_OF_LANE
        TQ_UNROLL for (int m = 0; m < M; ++m) {
          const int t = SPAN > 1 ? (m * R + r) * 2 : 0;
          const int u = SPAN > 1 ? 1 : 0;
          sum[m * R + r] += pair_of_scales[0] * (odd ? tile[t + u] : tile[t]);
          sum[m * R + r + 1] += pair_of_scales[1] * (odd ? tile[t + 3 * u] : tile[t + 2 * u]);
        }
      }
    }
  }
  // the other lanes hold products of one group of lanes with another
  const bool diagonal = (tq_lane & 3u) == tq_lane >> 3;
  TQ_UNROLL for (int i = 0; i < SUMS; ++i) sum[i] = diagonal ? sum[i] * power : 0.0f;
"""
)

TENSOR = (
    _SIZES
    + _TENSOR_TABLE
    + """
  const uint copy = tq_lane % uint(COPIES);
#define TQ_LOOK(word, shift, bits) TQ_PICK_WORD(lut, word, shift, bits, COPIES, copy)
  const bool odd = ((tq_lane >> 2) & 1u) != 0u;
"""
    + _STEP.replace("    TQ_START_SPAN\n", _SPAN_OF_TILES)
    + _TENSOR
    + _FINISH
)

_ROWS_SIZES = (
    unpack.CONSTANTS
    + """
  constexpr int TILES = R / 16;
  constexpr int HALVES = 2 * TILES;           // outputs that a lane decodes
  constexpr int SUMS = 2 * HALVES;            // of each output, two rows of activations
  constexpr int PARTIALS = SPLIT > 1 ? WARPS * SUMS * 32 : 1;
  TQ_FIND_SIZES
  const uint width = groups * uint(GROUP);
  const uint steps = width / uint(4 * UNIT);
"""
)

# Codes do not depend on the table, so the first are on their way while it is made.
_ROWS_FETCH = (
    """
  TQ_SHARED(float, partial, PARTIALS);
  const uint part = tq_warp % uint(SPLIT);
  const uint first = (block * uint(WARPS / SPLIT) + tq_warp / uint(SPLIT)) * uint(R);
  const uint of_four = tq_lane & 3u;
  const uint of_eight = tq_lane >> 2;
  // columns beyond the activations repeat the last one, and nobody reads them
  const uint row = first_row + (of_eight < uint(ROWS) ? of_eight : uint(ROWS - 1));

  uint output[HALVES];
  TQ_UNROLL for (int i = 0; i < HALVES; ++i) {
    const uint o = first + uint(8 * i) + of_eight;
    output[i] = matrix + (o < outputs ? o : outputs - 1u);
  }
  uint fetched[HALVES * WORDS];
  auto fetch = [&](uint step) {
    const uint at = step * 4u + of_four;
"""
    + unpack.FIND_WORDS
    + """
    TQ_UNROLL for (int i = 0; i < HALVES; ++i) {
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) {
        fetched[i * WORDS + j] = codes[int(output[i]) * words + place[j]];
      }
    }
  };
  if (part * uint(SPAN) < steps) fetch(part * uint(SPAN));
"""
)

_ROWS_STEPS = (
    """
  TQ_TABLE(levels_of, lut + tq_lane % uint(COPIES));
#define TQ_LOOK(word, shift, bits) TQ_PICK(levels_of, word, shift, bits, COPIES)
  float sum[SUMS];
  float tile[SUMS];
  TQ_UNROLL for (int i = 0; i < SUMS; ++i) sum[i] = tile[i] = 0.0f;
  uint step = part * uint(SPAN);
  while (step < steps) {
    const bool ends = SPAN == 1 || step % uint(SPAN) == uint(SPAN - 1);
    const uint next = ends ? step + uint((SPLIT - 1) * SPAN + 1) : step + 1u;
    const uint at = step * 4u + of_four;
    const uint gap = at * uint(OWN) & 31u;
    uint codes_of[HALVES * WORDS];
    TQ_UNROLL for (int i = 0; i < HALVES * WORDS; ++i) codes_of[i] = fetched[i];
    if (next < steps) fetch(next);
    S stored[HALVES];
    if (ends) {
      TQ_UNROLL for (int i = 0; i < HALVES; ++i) {
        stored[i] = scales[output[i] * groups + step * uint(4 * UNIT) / uint(GROUP)];
      }
    }
    uint inputs[UNIT / 2];
    tq_read_pairs<UNIT>(inputs, x + row * width + at * uint(UNIT));
    TQ_UNROLL for (int t = 0; t < TILES; ++t) {
      uint weights[2][UNIT / 2];
      TQ_UNROLL for (int h = 0; h < 2; ++h) {
      uint code[WORDS];
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) code[j] = codes_of[(2 * t + h) * WORDS + j];
"""
    + _LOOK_UP
    + """
      }
      TQ_UNROLL for (int i = 0; i < UNIT / 2; i += 2) {
        tq_tensor(x, tile + 4 * t, weights[0][i], weights[1][i], weights[0][i + 1],
            weights[1][i + 1], inputs[i], inputs[i + 1]);
      }
    }
    if (ends) {
      TQ_UNROLL for (int i = 0; i < HALVES; ++i) {
"""
    + unpack.READ_SCALE.replace("scales[where]", "stored[i]")
    + """
        sum[2 * i] += scale * tile[2 * i];
        sum[2 * i + 1] += scale * tile[2 * i + 1];
        tile[2 * i] = tile[2 * i + 1] = 0.0f;
      }
    }
    step = next;
  }
"""
)

# Sum i of a lane is of output 8 (i / 2) + of_eight and row 2 of_four + i % 2.
_ROWS_FINISH = """
  if (SPLIT > 1) {
    TQ_UNROLL for (int i = 0; i < SUMS; ++i) {
      partial[(tq_warp * uint(SUMS) + uint(i)) * 32u + tq_lane] = sum[i];
    }
    TQ_SYNC();
    for (uint i = part; i < uint(SUMS); i += uint(SPLIT)) {
      float total = 0.0f;
      TQ_UNROLL for (int p = 0; p < SPLIT; ++p) {
        total += partial[((tq_warp - part + uint(p)) * uint(SUMS) + i) * 32u + tq_lane];
      }
      const uint o = first + i / 2u * 8u + of_eight;
      const uint m = of_four * 2u + i % 2u;
      if (o < outputs && m < uint(ROWS)) y[(out_row + m) * outputs + o] = T(total * power);
    }
  } else {
    TQ_UNROLL for (int i = 0; i < SUMS; ++i) {
      const uint o = first + uint(i / 2 * 8) + of_eight;
      const uint m = of_four * 2u + uint(i % 2);
      if (o < outputs && m < uint(ROWS)) y[(out_row + m) * outputs + o] = T(sum[i] * power);
    }
  }
"""

TENSOR_ROWS = _ROWS_SIZES + _ROWS_FETCH + _TENSOR_TABLE + _ROWS_STEPS + _ROWS_FINISH

TERNARY = _COUNTS + ternary.MULTIPLY + _FINISH
