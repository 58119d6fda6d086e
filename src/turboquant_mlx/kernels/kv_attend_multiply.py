"""The first pass of attention over packed keys and values by float32 multiply-adds.

For Metal and CUDA, all dtypes and all codes. A lane takes a token for the scores (the queries lie
in shared memory, and every level serves all of them), and four dimensions of the head for the sums;
between the two the weights of 32 tokens lie in shared memory.

A unit of a key is 32 dimensions where that is possible: whole words of its stream; else 8.
"""

from __future__ import annotations

from .kv_attend_bodies import MASKED, QUERIES, RAW, SIZES, TILES_OF_SPLIT, rotation

_SIZES = """
  constexpr int TOKENS = 32;
  // a lane decodes so many dimensions of a key at a time: whole words where that is possible
  constexpr int UNIT = D % 32 == 0 && KGROUP % 32 == 0 ? 32 : 8;
  constexpr int KOWN = UNIT * KB;             // bits
  constexpr int KFLUSH = (KOWN + 31) / 32;
  constexpr int KGAP = KOWN % 32 == 0 ? 0 : KOWN % 16 == 0 ? 16 : 24;
  constexpr int KWORDS = (KGAP + KOWN + 31) / 32;
  // and four of a value
  constexpr int VUNITS = DV / 4;
  constexpr int OF_LANE = (VUNITS + 31) / 32;
  constexpr int KENTRIES = 1 << (KB <= 4 ? 2 * KB : KB);
  constexpr int VENTRIES = 1 << (VB <= 4 ? 2 * VB : VB);
  constexpr int KSLOT = KB <= 4 ? 2 : 1;
  constexpr int VSLOT = VB <= 4 ? 2 : 1;
"""

# A table of pairs of levels, or of single ones, entry by entry in copies.
_FILL = """
    for (int i = int(tq_tid); i < {side}ENTRIES * {side}COPIES; i += THREADS) {{
      const int entry = i / {side}COPIES;
      if ({side}SLOT == 2) {{
        {table}[2 * i] = facts[{side}_LEVELS + entry % (1 << {side}B)];
        {table}[2 * i + 1] = facts[{side}_LEVELS + (entry >> {side}B) % (1 << {side}B)];
      }} else {{
        {table}[i] = facts[{side}_LEVELS + entry];
      }}
    }}
"""

# Both sides' scales: a byte, or MLX's own where there is a bias too.
_SCALE_OF = """
#define TQ_SCALE_OF(affine, value) \\
  (affine ? float(value) : float(value) == 0.0f ? 0.0f : TQ_FLOAT_OF((uint(value) + 888u) << 20))
"""

_LOOP = """
    const uint copy_k = tq_lane % uint(KCOPIES);
    const uint copy_v = tq_lane % uint(VCOPIES);
    float top[RB];
    float total[RB];
    float sum[RB * OF_LANE * 4];
    TQ_UNROLL for (int r = 0; r < RB; ++r) {
      top[r] = LOWEST;
      total[r] = 0.0f;
    }
    TQ_UNROLL for (int i = 0; i < RB * OF_LANE * 4; ++i) sum[i] = 0.0f;
    const int mine = int(tq_warp) * RB * 32;
    for (; tile < last; tile += WARPS) {
      const int first_token = base + tile * TOKENS;
      const int column = first_token + int(tq_lane);
      const bool there = column >= start && column < end;
      const int key = pair * capacity + (there ? column : end - 1);
      float dot[RB];
      TQ_UNROLL for (int r = 0; r < RB; ++r) dot[r] = 0.0f;
      for (int u = 0; u < D / UNIT; ++u) {
        const int word = u * KOWN / 32;
        const uint gap = uint(u * KOWN) & 31u;
        uint code[KWORDS];
        uint stream[KFLUSH + 1];
        TQ_UNROLL for (int j = 0; j < KWORDS; ++j) {
          const int at = KGAP == 0 || word + j < KROW ? word + j : KROW - 1;
          code[j] = kcodes[key * KROW + at];
        }
        TQ_UNROLL for (int j = 0; j < KFLUSH; ++j) {
          stream[j] = KGAP == 0 ? code[j] : TQ_FUNNEL(
              code[j], j + 1 < KWORDS ? code[j + 1 < KWORDS ? j + 1 : 0] : 0u, gap);
        }
        stream[KFLUSH] = 0u;
        float factor_of = 1.0f;
        float bias = 0.0f;
        if (!KWHOLE) {
          const int where = key * KGROUPS + u * UNIT / KGROUP;
          factor_of = TQ_SCALE_OF(KAFFINE, kscales[where]);
          if (KAFFINE) bias = float(kbiases[where]);
        }
        TQ_UNROLL for (int i = 0; i < UNIT; i += KSLOT) {
          float level[2];
          if (KAFFINE) {
            TQ_UNROLL for (int j = 0; j < KSLOT; ++j) {
              const int bit = (i + j) * KB;
              const uint bits = TQ_FUNNEL(stream[bit / 32], stream[bit / 32 + 1], uint(bit % 32));
              level[j] = factor_of * float(bits & ((1u << KB) - 1u)) + bias;
            }
          } else {
            const int bit = i * KB;
            const bool whole = bit % 32 + KSLOT * KB <= 32;
            const uint bits = whole ? stream[bit / 32]
                : TQ_FUNNEL(stream[bit / 32], stream[bit / 32 + 1], uint(bit % 32));
            if (KSLOT == 2) {
              TQ_PICK_PAIR(level[0], level[1], klut, bits, whole ? bit % 32 : 0, 2 * KB, KCOPIES,
                  copy_k);
            } else {
              level[0] = klut[((bits >> (whole ? bit % 32 : 0)) & ((1u << KB) - 1u))
                  * uint(KCOPIES) + copy_k];
            }
            if (!KWHOLE) {
              level[0] *= factor_of;
              if (KSLOT == 2) level[1] *= factor_of;
            }
          }
          TQ_UNROLL for (int j = 0; j < KSLOT; ++j) {
            TQ_UNROLL for (int r = 0; r < RB; ++r) {
              dot[r] += level[j] * line[r * D + u * UNIT + i + j];
            }
          }
        }
      }

      float vfactor = 1.0f;
      float vlog = 0.0f;
      if (VWHOLE) {
        vfactor = TQ_SCALE_OF(false, vscales[key]);
        vlog = float(vscales[key]) * 0.125f - 16.0f;
      }
      const float kfactor = KWHOLE ? TQ_SCALE_OF(false, kscales[key]) : 1.0f;
      TQ_UNROLL for (int r = 0; r < RB; ++r) {
        float score = dot[r] * kfactor;
        const int row = first_row + r < ROWS ? first_row + r : ROWS - 1;
        if (there) TQ_MASKED(score, row, column);
        if (!there) score = HIDDEN;
        float highest = score + vlog;
        TQ_UNROLL for (int s = 16; s > 0; s >>= 1) {
          const float other = TQ_SHUFFLE_XOR(highest, s);
          highest = other > highest ? other : highest;
        }
        if (highest > top[r]) {
          const float keep = TQ_EXP2(top[r] - highest);
          top[r] = highest;
          total[r] *= keep;
          TQ_UNROLL for (int i = 0; i < OF_LANE * 4; ++i) sum[r * OF_LANE * 4 + i] *= keep;
        }
        const float weight = TQ_EXP2(score - top[r]);
        total[r] += weight;
        weights[mine + r * 32 + int(tq_lane)] = weight * vfactor;
      }
      TQ_WARP_SYNC();
      const int count = end - first_token < 32 ? end - first_token : 32;
      for (int t = 0; t < count; ++t) {
        const int at = pair * capacity + first_token + t;
        float weight[RB];
        TQ_UNROLL for (int r = 0; r < RB; ++r) weight[r] = weights[mine + r * 32 + t];
        TQ_UNROLL for (int i = 0; i < OF_LANE; ++i) {
          const int wanted = int(tq_lane) + 32 * i;
          const int unit = wanted < VUNITS ? wanted : VUNITS - 1;
          const int bit = unit * 4 * VB;
          const int word = bit / 32;
          const uint low = vcodes[at * VROW + word];
          const uint high = vcodes[at * VROW + (word + 1 < VROW ? word + 1 : word)];
          const uint stream = TQ_FUNNEL(low, high, uint(bit) & 31u);
          float level[4];
          if (VAFFINE) {
            TQ_UNROLL for (int j = 0; j < 4; ++j) {
              level[j] = float((stream >> (j * VB)) & ((1u << VB) - 1u));
            }
          } else if (VSLOT == 2) {
            TQ_PICK_PAIR(level[0], level[1], vlut, stream, 0, 2 * VB, VCOPIES, copy_v);
            TQ_PICK_PAIR(level[2], level[3], vlut, stream, 2 * VB, 2 * VB, VCOPIES, copy_v);
          } else {
            TQ_UNROLL for (int j = 0; j < 4; ++j) {
              level[j] = vlut[((stream >> (j * VB)) & ((1u << VB) - 1u)) * uint(VCOPIES) + copy_v];
            }
          }
          if (!VWHOLE) {
            const int where = at * VGROUPS + unit * 4 / VGROUP;
            const float factor_of = TQ_SCALE_OF(VAFFINE, vscales[where]);
            const float bias = VAFFINE ? float(vbiases[where]) : 0.0f;
            TQ_UNROLL for (int j = 0; j < 4; ++j) level[j] = factor_of * level[j] + bias;
          }
          TQ_UNROLL for (int r = 0; r < RB; ++r) {
            TQ_UNROLL for (int j = 0; j < 4; ++j) {
              sum[(r * OF_LANE + i) * 4 + j] += weight[r] * level[j];
            }
          }
        }
      }
      TQ_WARP_SYNC();
    }
"""

_FINISH = """
    TQ_UNROLL for (int r = 0; r < RB; ++r) {
      TQ_UNROLL for (int s = 16; s > 0; s >>= 1) total[r] += TQ_SHUFFLE_XOR(total[r], s);
      if (tq_lane == 0u) {
        tops[int(tq_warp) * RB + r] = top[r];
        totals[int(tq_warp) * RB + r] = total[r];
      }
    }
    TQ_SYNC();  // and nobody needs the queries any more
    float keep[RB];
    TQ_UNROLL for (int r = 0; r < RB; ++r) {
      float highest = LOWEST;
      float added = 0.0f;
      TQ_UNROLL for (int w = 0; w < WARPS; ++w) {
        highest = tops[w * RB + r] > highest ? tops[w * RB + r] : highest;
      }
      TQ_UNROLL for (int w = 0; w < WARPS; ++w) {
        added += totals[w * RB + r] * TQ_EXP2(tops[w * RB + r] - highest);
      }
      keep[r] = TQ_EXP2(top[r] - highest);
      if (tq_tid == 0u && first_row + r < ROWS) {
        marks[(out_at + r) * 2] = highest;
        marks[(out_at + r) * 2 + 1] = added;
      }
    }
    TQ_UNROLL for (int w = 0; w < WARPS; ++w) {
      if (int(tq_warp) == w) {
        TQ_UNROLL for (int r = 0; r < RB; ++r) {
          TQ_UNROLL for (int i = 0; i < OF_LANE * 4; ++i) {
            const int d = (int(tq_lane) + i / 4 * 32) * 4 + i % 4;
            if (d < DV) {
              const float value = sum[r * OF_LANE * 4 + i] * keep[r];
              line[r * DV + d] = w == 0 ? value : line[r * DV + d] + value;
            }
          }
        }
      }
      TQ_SYNC();
    }
    for (int i = int(tq_tid); i < RB * DV; i += THREADS) {
      if (first_row + i / DV < ROWS) sums[out_at * DV + i] = line[i];
    }
"""

MULTIPLY = (
    SIZES
    + _SIZES
    + MASKED
    + _SCALE_OF
    + """
  TQ_SHARED(float, klut, KAFFINE ? 1 : KENTRIES * KSLOT * KCOPIES);
  TQ_SHARED(float, vlut, VAFFINE ? 1 : VENTRIES * VSLOT * VCOPIES);
  TQ_SHARED(float, weights, WARPS * RB * 32);
  TQ_SHARED(float, tops, WARPS * RB);
  TQ_SHARED(float, totals, WARPS * RB);
  if (packed) {
"""
    + QUERIES
    + rotation("K", "(RB * D)")
    + "    if (!KAFFINE) {"
    + _FILL.format(side="K", table="klut")
    + "    }\n    if (!VAFFINE) {"
    + _FILL.format(side="V", table="vlut")
    + "    }\n    TQ_SYNC();\n"
    + TILES_OF_SPLIT
    + _LOOP
    + _FINISH
    + """
  } else {
"""
    + RAW
    + """
  }
"""
)
