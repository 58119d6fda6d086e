"""Ternary digits, twenty to a word, in kernels: word = sum of t_j * 3**j, the first digit lowest.

A unit is a word. It is taken apart into five *quads* of four digits, numbers below 81, by dividing
by 81 (the compilers make a product of that), and a table gives the four weights of a quad at once.
Groups are multiples of four weights, so a quad never has two scales, and of at least sixteen, so a
word has two at most. The last word of a row may stand for more weights than the row has; quads
beyond its end are left out.

Most of what a weight costs is the multiply-add with its scale and a quarter of a look-up: about
three instructions.

Template arguments as in ``unpack``; BITS, WINDOW, TILE and UNIT are not used.
"""

from __future__ import annotations

from . import unpack

# What the other kernels' preludes do not have: four elements from where only the dtype's size times
# four aligns them.
METAL = """
#define TQ_READ_FOUR(to, from, offset) \\
  TQ_UNROLL for (int tq_i = 0; tq_i < 4; ++tq_i) (to)[tq_i] = float(from[(offset) + tq_i])
#define TQ_WRITE_FOUR(to, offset, values) \\
  TQ_UNROLL for (int tq_i = 0; tq_i < 4; ++tq_i) to[(offset) + tq_i] = T(values[tq_i])
#define TQ_PICK_QUAD(to, table, key, copies, copy) \\
  TQ_UNROLL for (int tq_i = 0; tq_i < 4; ++tq_i) { \\
    to[tq_i] = table[((key) * uint(copies) + (copy)) * 4u + uint(tq_i)]; \\
  }
"""

CUDA = """
__device__ __forceinline__ void tq_read_four(float* to, const float* from) {
  if ((reinterpret_cast<size_t>(from) & 15u) == 0u) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  } else {
    TQ_UNROLL for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
}
template <typename S>
__device__ __forceinline__ void tq_read_four(float* to, const S* from) {
  if ((reinterpret_cast<size_t>(from) & 7u) == 0u) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    float2 f = tq_widen(from, v.x); to[0] = f.x; to[1] = f.y;
    f = tq_widen(from, v.y); to[2] = f.x; to[3] = f.y;
  } else {
    TQ_UNROLL for (int i = 0; i < 4; ++i) to[i] = float(from[i]);
  }
}
__device__ __forceinline__ void tq_write_four(float* to, const float* values) {
  *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
}
template <typename S>
__device__ __forceinline__ void tq_write_four(S* to, const float* values) {
  __align__(8) S part[4];
  TQ_UNROLL for (int i = 0; i < 4; ++i) part[i] = S(values[i]);
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(part);
}
#define TQ_READ_FOUR(to, from, offset) tq_read_four(to, from + (offset))
#define TQ_WRITE_FOUR(to, offset, values) tq_write_four(to + (offset), values)
#define TQ_PICK_QUAD(to, table, key, copies, copy) \\
  { \\
    const float4 tq_quad = *reinterpret_cast<const float4*>( \\
        table + ((key) * uint(copies) + (copy)) * 4u); \\
    to[0] = tq_quad.x; to[1] = tq_quad.y; to[2] = tq_quad.z; to[3] = tq_quad.w; \\
  }
"""

CONSTANTS = """
  constexpr int DIGITS = 20;
  constexpr int QUADS = 5;
  constexpr uint QUAD = 81u;
"""

# TQ_LEVEL(i): entry i of the table of three levels.
FILL_TABLE = """
  TQ_SHARED(float, lut, 4 * 81 * COPIES);
  for (uint i = tq_tid; i < 4u * QUAD * uint(COPIES); i += uint(WARPS * 32)) {
    const uint digit = i & 3u;
    const uint power = digit == 0u ? 1u : digit == 1u ? 3u : digit == 2u ? 9u : 27u;
    const uint level = i / uint(4 * COPIES) / power % 3u;
    lut[i] = TQ_LEVEL(level);
  }
  TQ_SYNC();
  const uint copy = tq_lane % uint(COPIES);
"""

# Between the sizes of a matvec and its end, see ``matvec_bodies``.
MULTIPLY = (
    CONSTANTS
    + FILL_TABLE
    + """
  TQ_SHARED(float, partial, PARTIALS);
  const uint part = tq_warp % uint(SPLIT);
  const uint first = (block * uint(WARPS / SPLIT) + tq_warp / uint(SPLIT)) * uint(R);

  float sum[SUMS];
  TQ_UNROLL for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
  const uint steps = (uint(words) + 31u) / 32u;
  for (uint step = part; step < steps; step += uint(SPLIT)) {
    const uint unit = step * 32u + tq_lane;
    const bool inside = unit < uint(words);
    const uint at = inside ? unit : uint(words) - 1u;
    const uint start = at * uint(DIGITS);
    const uint group = start / uint(GROUP);
    const uint next = group + 1u < groups ? group + 1u : group;
    uint code[R];
    float two_scales[R * 2];
    TQ_UNROLL for (int r = 0; r < R; ++r) {
      const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
      code[r] = codes[int(matrix + o) * words + int(at)];
      TQ_UNROLL for (int h = 0; h < 2; ++h) {
        const uint where = (matrix + o) * groups + (h == 0 ? group : next);
"""
    + unpack.READ_SCALE
    + """
        two_scales[2 * r + h] = scale;
      }
    }
    TQ_UNROLL for (int q = 0; q < QUADS; ++q) {
      const uint place = start + uint(4 * q);
      const bool used = inside && place < width;
      const bool in_next = place >= (group + 1u) * uint(GROUP);
      float inputs[M * 4];
      TQ_UNROLL for (int m = 0; m < M; ++m) {
        const uint row = first_row + uint(m < ROWS ? m : ROWS - 1);
        TQ_READ_FOUR((inputs + m * 4), x, row * width + (used ? place : 0u));
      }
      TQ_UNROLL for (int i = 0; i < M * 4; ++i) inputs[i] = used ? inputs[i] : 0.0f;
      TQ_UNROLL for (int r = 0; r < R; ++r) {
        const uint rest = code[r] / QUAD;
        const uint key = code[r] - rest * QUAD;
        code[r] = rest;
        float value[4];
        TQ_PICK_QUAD(value, lut, key, COPIES, copy);
        const float scale = two_scales[2 * r + 1];
        const float chosen = in_next ? scale : two_scales[2 * r];
        TQ_UNROLL for (int m = 0; m < M; ++m) {
          float dot = value[0] * inputs[4 * m];
          TQ_UNROLL for (int j = 1; j < 4; ++j) dot += value[j] * inputs[4 * m + j];
          sum[m * R + r] += chosen * dot;
        }
      }
    }
  }
"""
)

# After `outputs`, `words` and `groups` have been set, see ``expand``.
EXPAND = (
    CONSTANTS
    + """
  const uint width = groups * uint(GROUP);
"""
    + FILL_TABLE
    + """
  for (uint r = 0u; r < uint(R); ++r) {
    const uint o = (tq_bx * uint(R) + r) * uint(WARPS) + tq_warp;
    if (o >= outputs) break;
    for (uint at = tq_lane; at < uint(words); at += 32u) {
      uint code = codes[int(o) * words + int(at)];
      TQ_UNROLL for (int q = 0; q < QUADS; ++q) {
        const uint place = at * uint(DIGITS) + uint(4 * q);
        const uint rest = code / QUAD;
        const uint key = code - rest * QUAD;
        code = rest;
        if (place < width) {
          const uint where = o * groups + place / uint(GROUP);
"""
    + unpack.READ_SCALE
    + """
          float value[4];
          TQ_PICK_QUAD(value, lut, key, COPIES, copy);
          TQ_UNROLL for (int j = 0; j < 4; ++j) value[j] *= scale;
          TQ_WRITE_FOUR(y, o * width + place, value);
        }
      }
    }
  }
"""
)
