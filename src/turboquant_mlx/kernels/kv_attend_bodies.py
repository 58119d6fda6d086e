"""What the attention kernels over packed keys and values have in common, see ``kv_attend``.

The first pass is SIZES, then either the packed part, by multiply-adds (``kv_attend_multiply``) or
on matrix units (``kv_attend_tensor``), or RAW, the last threadgroup of a head. Both begin by
rotating the queries of the threadgroup and end by adding up what its warps found.

A partial result is a reference ``top``, a ``total`` and sums with

    total = sum_t 2**(score_t - top),  sums = sum_t 2**(score_t - top) * value_t,

in the stored domain of the values; COMBINE adds such partial results and rotates back.

Template arguments: LENGTH (query tokens), REPEATS (queries' heads of a key head), HEADS (of keys),
D and DV (head sizes), KB and VB (bits), KGROUP and VGROUP (values to a scale), KAFFINE and VAFFINE
(scale and bias in place of scale times level), KPOWER, KBASE, VPOWER, VBASE (Hadamard blocks of
POWER * BASE), RB (queries of a threadgroup), WARPS, KCOPIES and VCOPIES (of the tables), MASK (0
none, 1 boolean, 2 additive), CAUSAL, SINKS, SHIFT, RAW.
"""

from __future__ import annotations

SIZES = """
  constexpr int ROWS = REPEATS * LENGTH;
  constexpr int ROW_BLOCKS = (ROWS + RB - 1) / RB;
  constexpr int THREADS = WARPS * 32;
  constexpr int WIDEST = D > DV ? D : DV;
  constexpr int KROW = (D * KB + 31) / 32;    // words of a key
  constexpr int VROW = (DV * VB + 31) / 32;
  constexpr int KGROUPS = D / KGROUP;
  constexpr int VGROUPS = DV / VGROUP;
  constexpr bool KWHOLE = KGROUPS == 1 && !KAFFINE;  // scales are factors of scores
  constexpr bool VWHOLE = VGROUPS == 1 && !VAFFINE;  // scales are factors of weights
  // the parts of `facts`
  constexpr int V_SIGNS = D;
  constexpr int K_MATRIX = D + DV;
  constexpr int V_MATRIX = K_MATRIX + KBASE * KBASE;
  constexpr int K_LEVELS = V_MATRIX + VBASE * VBASE;
  constexpr int V_LEVELS = K_LEVELS + (1 << KB);
  constexpr float HIDDEN = -3.0e38f;
  constexpr float LOWEST = -1.0e30f;
  constexpr float LOG2_E = 1.4426950408889634f;
  const int splits = meta[0];
  const int columns = meta[1];
  const int capacity = meta[2];
  const int parts = RAW ? splits + 1 : splits;
  const int pair = int(tq_by) / ROW_BLOCKS;
  const int first_row = int(tq_by) % ROW_BLOCKS * RB;
  const int batch_row = pair / HEADS;
  const int head = pair % HEADS;
  const int padding = meta[8 + 4 * batch_row];
  const int raw_tokens = meta[9 + 4 * batch_row];
  const int start = meta[10 + 4 * batch_row];
  const int end = meta[11 + 4 * batch_row];
  const int out_at = (pair * parts + int(tq_bx)) * ROWS + first_row;

  const bool packed = int(tq_bx) < splits;
  TQ_SHARED(float, line, RB * WIDEST);
"""

# The threadgroup's queries times the scale in `line`; with the keys' signs for the packed part.
QUERIES = """
    for (int i = int(tq_tid); i < RB * D; i += THREADS) {
      const int row = first_row + i / D;
      float value = 0.0f;
      if (row < ROWS) value = float(queries[(pair * ROWS + row) * D + i % D]) * factor[0];
      line[i] = packed ? value * facts[i % D] : value;
    }
    TQ_SYNC();
"""

# What a mask makes of the score of a row's query and a column.
MASKED = """
#define TQ_MASKED(score, row, column) \\
  { \\
    if (CAUSAL && (column) > columns - LENGTH + (row) % LENGTH) score = HIDDEN; \\
    if (MASK > 0) { \\
      const int tq_seen = batch_row * meta[4] + (head * REPEATS + (row) / LENGTH) * meta[5] \\
          + (row) % LENGTH * meta[6] + (column); \\
      if (MASK == 1) { \\
        if (float(mask[tq_seen]) == 0.0f) score = HIDDEN; \\
      } else { \\
        score += float(mask[tq_seen]) * LOG2_E; \\
      } \\
    } \\
  }
"""


def rotation(side: str, total: str, inverse: bool = False) -> str:
    """Text that multiplies ``total`` values in ``line`` by Hadamard blocks, not normalised.

    A block is kron(B, S): S the Sylvester matrix of order POWER, B of order BASE in ``facts``.
    """
    entry = f"{side}_MATRIX + (j * {side}BASE + a)" if inverse else (
        f"{side}_MATRIX + (a * {side}BASE + j)")  # fmt: skip
    return f"""
    TQ_UNROLL for (int half_of = 1; half_of < {side}POWER; half_of *= 4) {{
      if (2 * half_of < {side}POWER) {{
        for (int j = int(tq_tid); j < {total} / 4; j += THREADS) {{
          const int i = j / half_of * (4 * half_of) + j % half_of;
          const float a = line[i] + line[i + half_of];
          const float b = line[i] - line[i + half_of];
          const float c = line[i + 2 * half_of] + line[i + 3 * half_of];
          const float d = line[i + 2 * half_of] - line[i + 3 * half_of];
          line[i] = a + c;
          line[i + half_of] = b + d;
          line[i + 2 * half_of] = a - c;
          line[i + 3 * half_of] = b - d;
        }}
      }} else {{
        for (int j = int(tq_tid); j < {total} / 2; j += THREADS) {{
          const int i = j / half_of * (2 * half_of) + j % half_of;
          const float a = line[i];
          const float b = line[i + half_of];
          line[i] = a + b;
          line[i + half_of] = a - b;
        }}
      }}
      TQ_SYNC();
    }}
    if ({side}BASE > 1) {{
      constexpr int EACH = ({total} + THREADS - 1) / THREADS;
      float held[EACH];
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {{
        const int i = int(tq_tid) + e * THREADS;
        float sum = 0.0f;
        if (i < {total}) {{
          const int a = i / {side}POWER % {side}BASE;
          const int from = i - a * {side}POWER;
          for (int j = 0; j < {side}BASE; ++j) {{
            sum += facts[{entry}] * line[from + j * {side}POWER];
          }}
        }}
        held[e] = sum;
      }}
      TQ_SYNC();
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {{
        const int i = int(tq_tid) + e * THREADS;
        if (i < {total}) line[i] = held[e];
      }}
      TQ_SYNC();
    }}
"""


# Tokens in 16 bits, and sinks: a warp takes one query after the other. Packed keys are stored less
# the shift, so their scores lack the query's product with it; here it is taken off instead.
RAW = (
    """
    if (RAW) {
"""
    + QUERIES
    + """
    constexpr int MINE = (RB + WARPS - 1) / WARPS;
    constexpr int OF_LANE = (DV + 31) / 32;
    const int raw_capacity = meta[3];
    float sum[MINE * OF_LANE];
    TQ_UNROLL for (int i = 0; i < MINE * OF_LANE; ++i) sum[i] = 0.0f;
    TQ_UNROLL for (int mine = 0; mine < MINE; ++mine) {
      const int r = int(tq_warp) + mine * WARPS;
      const int row = first_row + r;
      float top = LOWEST;
      float total = 0.0f;
      if (r < RB && row < ROWS) {
        float common = 0.0f;
        if (SHIFT) {
          for (int d = int(tq_lane); d < D; d += 32) {
            common += line[r * D + d] * float(shift[pair * D + d]);
          }
          TQ_UNROLL for (int s = 16; s > 0; s >>= 1) common += TQ_SHUFFLE_XOR(common, s);
        }
        if (SINKS) {
          top = float(sinks[head * REPEATS + row / LENGTH]) * LOG2_E - common;
          total = 1.0f;
        }
        for (int first = 0; first < raw_tokens; first += 32) {
          const int token = first + int(tq_lane);
          float score = HIDDEN;
          if (token < raw_tokens) {
            const int at = (pair * raw_capacity + token) * D;
            float dot = 0.0f;
            for (int d = 0; d < D; d += 8) {
              float key[8];
              TQ_READ(key, 8, raw_keys, at + d);
              TQ_UNROLL for (int i = 0; i < 8; ++i) dot += key[i] * line[r * D + d + i];
            }
            score = dot - common;
            TQ_MASKED(score, row, padding + token);
          }
          float highest = score;
          TQ_UNROLL for (int s = 16; s > 0; s >>= 1) {
            const float other = TQ_SHUFFLE_XOR(highest, s);
            highest = other > highest ? other : highest;
          }
          const float before = top;
          top = highest > top ? highest : top;
          const float keep = TQ_EXP2(before - top);
          const float weight = TQ_EXP2(score - top);
          float added = weight;
          TQ_UNROLL for (int s = 16; s > 0; s >>= 1) added += TQ_SHUFFLE_XOR(added, s);
          total = total * keep + added;
          TQ_UNROLL for (int i = 0; i < OF_LANE; ++i) sum[mine * OF_LANE + i] *= keep;
          const int count = raw_tokens - first < 32 ? raw_tokens - first : 32;
          for (int t = 0; t < count; ++t) {
            const float part = TQ_SHUFFLE(weight, t);
            const int at = (pair * raw_capacity + first + t) * DV;
            TQ_UNROLL for (int i = 0; i < OF_LANE; ++i) {
              const int d = int(tq_lane) + 32 * i;
              if (d < DV) sum[mine * OF_LANE + i] += part * float(raw_values[at + d]);
            }
          }
        }
        if (tq_lane == 0u) {
          marks[(out_at + r) * 2] = top;
          marks[(out_at + r) * 2 + 1] = total;
        }
      }
    }
    TQ_SYNC();
    TQ_UNROLL for (int mine = 0; mine < MINE; ++mine) {
      const int r = int(tq_warp) + mine * WARPS;
      TQ_UNROLL for (int i = 0; i < OF_LANE; ++i) {
        const int d = int(tq_lane) + 32 * i;
        if (r < RB && d < DV) line[r * DV + d] = sum[mine * OF_LANE + i] * facts[V_SIGNS + d];
      }
    }
    TQ_SYNC();
"""
    + rotation("V", "(RB * DV)")
    + """
    for (int i = int(tq_tid); i < RB * DV; i += THREADS) {
      if (first_row + i / DV < ROWS) sums[out_at * DV + i] = line[i];
    }
    }
"""
)

# Which tiles of TOKENS tokens belong to this threadgroup: `tile` to `last`, of those from `base`.
TILES_OF_SPLIT = """
    const int base = start / 16 * 16;
    const int tiles = end > start ? (end - base + TOKENS - 1) / TOKENS : 0;
    const int of_split = (tiles + splits - 1) / splits;
    int tile = int(tq_bx) * of_split;
    const int last = tile + of_split < tiles ? tile + of_split : tiles;
    tile += int(tq_warp);
"""

COMBINE = (
    """
  constexpr int THREADS = WARPS * 32;
  constexpr int V_SIGNS = D;
  constexpr int V_MATRIX = D + DV + KBASE * KBASE;
  constexpr float LOWEST = -1.0e30f;
  const int parts = RAW ? meta[0] + 1 : meta[0];
  // a group of threads for each query
  const int from = int(tq_bx) / ROWS * parts * ROWS + int(tq_bx) % ROWS;
  TQ_SHARED(float, line, DV);
  TQ_SHARED(float, weights, MOST_PARTS);
  TQ_SHARED(float, slices, SLICES * DV);
  float top = LOWEST;
  for (int p = int(tq_lane); p < parts; p += 32) {
    const float mark = marks[(from + p * ROWS) * 2];
    top = mark > top ? mark : top;
  }
  TQ_UNROLL for (int s = 16; s > 0; s >>= 1) {
    const float other = TQ_SHUFFLE_XOR(top, s);
    top = other > top ? other : top;
  }
  float total = 0.0f;
  for (int p = int(tq_lane); p < parts; p += 32) {
    const float weight = TQ_EXP2(marks[(from + p * ROWS) * 2] - top);
    total += weight * marks[(from + p * ROWS) * 2 + 1];
    if (tq_warp == 0u) weights[p] = weight;
  }
  TQ_UNROLL for (int s = 16; s > 0; s >>= 1) total += TQ_SHUFFLE_XOR(total, s);
  TQ_SYNC();
  // several threads for each dimension, or they would wait for one part after the other
  for (int i = int(tq_tid); i < SLICES * DV; i += THREADS) {
    float sum = 0.0f;
    for (int p = i / DV; p < parts; p += SLICES) {
      sum += weights[p] * sums[(from + p * ROWS) * DV + i % DV];
    }
    slices[i] = sum;
  }
  TQ_SYNC();
  const float divisor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int d = int(tq_tid); d < DV; d += THREADS) {
    float sum = 0.0f;
    TQ_UNROLL for (int k = 0; k < SLICES; ++k) sum += slices[k * DV + d];
    line[d] = sum * divisor;
  }
  TQ_SYNC();
"""
    + rotation("V", "DV", inverse=True)
    + """
  for (int d = int(tq_tid); d < DV; d += THREADS) {
    y[int(tq_bx) * DV + d] = T(line[d] * facts[V_SIGNS + d]);
  }
"""
)
