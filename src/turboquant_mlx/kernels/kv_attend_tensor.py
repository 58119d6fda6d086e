"""The first pass of attention over packed keys and values on the matrix units of an NVIDIA GPU.

Tokens (for the scores) and dimensions (for the sums) are the 16 rows of a product, queries its 8
columns. So a pair of levels is an operand as it comes out of the table, and the products themselves
cost a quarter of an instruction a pair. What an operand's place means may be chosen freely, as long
as both operands agree:

* A lane decodes a quarter of the dimensions of two keys, one run of bits each: for 128 values of 3
  bits that is three words.
* For the sums a pair is two tokens' levels of one dimension. Two streams of codes are merged before
  they are looked up: where a stream has its odd codes the other's even ones are put, so that a
  field of twice the bits names both.
* Scores come out with a token in a row and a query in a column; the weights go in the other way
  round. One instruction turns an 8 by 8 matrix.

Queries are divided by powers of two, and weights are measured against the largest product of weight
and scale, so 16 bits hold both; all sums are float32. The reference of the running maximum grows
only when it is exceeded by 2**SLACK: as good as the maximum itself, and mostly it costs one vote.
"""

from __future__ import annotations

from .kv_attend_bodies import MASKED, QUERIES, RAW, SIZES, TILES_OF_SPLIT, rotation

_SIZES = """
  // A lane is row `of_eight` and column pair `of_four` of the matrix units' operands. For scores it
  // decodes a quarter of the dimensions of two tokens, for sums an eighth of those of four tokens.
  constexpr int NT = RB / 8;
  constexpr int TOKENS = 16 * TILES;
  constexpr int KSTEPS = D / 16;
  constexpr int VSTEPS = DV / 16;
  constexpr int KOWN = D / 4 * KB;            // bits
  constexpr int VOWN = DV / 8 * VB;
  // a lane's bits begin so far into a word at most
  constexpr int KGAP = KOWN % 32 == 0 ? 0 : KOWN % 16 == 0 ? 16 : KOWN % 8 == 0 ? 24 : 28;
  constexpr int VGAP = VOWN % 32 == 0 ? 0 : VOWN % 16 == 0 ? 16 : VOWN % 8 == 0 ? 24 : 30;
  constexpr int KFLUSH = (KOWN + 31) / 32;    // words once the stream begins with the lane's bits
  constexpr int VFLUSH = (VOWN + 31) / 32;
  constexpr int KWORDS = (KGAP + KOWN + 31) / 32;
  constexpr int VWORDS = (VGAP + VOWN + 31) / 32;
  constexpr int KEVEN = KGAP > 0 ? 1 : KROW % 4 == 0 && KFLUSH % 4 == 0 ? 4
      : KROW % 2 == 0 && KFLUSH % 2 == 0 ? 2 : 1;
  constexpr int VEVEN = VGAP > 0 ? 1 : VROW % 4 == 0 && VFLUSH % 4 == 0 ? 4
      : VROW % 2 == 0 && VFLUSH % 2 == 0 ? 2 : 1;
  constexpr int KENTRIES = 1 << (KB <= 4 ? 2 * KB : KB);
  constexpr int VENTRIES = 1 << (VB <= 4 ? 2 * VB : VB);
  constexpr bool ONE_TABLE = KB == VB && KCOPIES == VCOPIES;
  constexpr int KTABLE = KENTRIES * KCOPIES;
  constexpr int TABLES = ONE_TABLE ? KTABLE : KTABLE + VENTRIES * VCOPIES;
  // the same memory holds the sums of as many warps as fit, when the tables are done with
  constexpr int OF_WARP = RB * DV / 32 * 33;
  constexpr int POOL = TABLES > OF_WARP ? TABLES : OF_WARP;
  constexpr int TOGETHER = POOL / OF_WARP < WARPS ? POOL / OF_WARP : WARPS;
  constexpr float SLACK = 8.0f;               // weights may grow to 2**SLACK
"""

# A table of pairs of levels (or of single ones in the low half), entry by entry in copies. Each
# thread writes an entry's copies, beginning with its own lane's, so that banks do not collide.
_FILL = """
    for (int entry = int(tq_tid); entry < {side}ENTRIES; entry += THREADS) {{
      float low = facts[{side}_LEVELS + (entry & ((1 << {side}B) - 1))];
      float high = {side}B <= 4 ? facts[{side}_LEVELS + (entry >> {side}B) % (1 << {side}B)] : 0.0f;
      const uint levels = tq_narrow(half_type, low, high);
      TQ_UNROLL for (int c = 0; c < {side}COPIES; ++c) {{
        const int copy = (c + int(tq_lane)) % {side}COPIES;
        {table}[entry * {side}COPIES + copy] = levels;
      }}
    }}
"""

# Two levels: of the pair `at` of a stream of pairs, or of one code of each of two streams.
_PICKS = """
#define TQ_PAIR(to, stream, at, bits, table, copies) \\
  { \\
    const int tq_bit = 2 * (bits) * (at); \\
    const bool tq_whole = tq_bit % 32 + 2 * (bits) <= 32; \\
    const uint tq_word = tq_whole ? stream[tq_bit / 32] \\
        : TQ_FUNNEL(stream[tq_bit / 32], stream[tq_bit / 32 + 1], uint(tq_bit % 32)); \\
    to = TQ_PICK(table, tq_word, tq_whole ? tq_bit % 32 : 0, 2 * (bits), copies); \\
  }
#define TQ_LEVEL_OF(to, stream, at, bits, table, copies) \\
  { \\
    const int tq_bit = (bits) * (at); \\
    const bool tq_whole = tq_bit % 32 + (bits) <= 32; \\
    const uint tq_word = tq_whole ? stream[tq_bit / 32] \\
        : TQ_FUNNEL(stream[tq_bit / 32], stream[tq_bit / 32 + 1], uint(tq_bit % 32)); \\
    to = TQ_PICK(table, tq_word, tq_whole ? tq_bit % 32 : 0, bits, copies); \\
  }
"""

_QUERIES = """
    // queries are divided by powers of two, so that 16 bits hold them
    for (int r = int(tq_warp); r < RB; r += WARPS) {
      float largest = 0.0f;
      for (int d = int(tq_lane); d < D; d += 32) largest = fmaxf(largest, fabsf(line[r * D + d]));
      TQ_UNROLL for (int s = 16; s > 0; s >>= 1) {
        largest = fmaxf(largest, TQ_SHUFFLE_XOR(largest, s));
      }
      const uint exponent = TQ_BITS_OF(largest) & 0x7f800000u;
      if (tq_lane == 0u) powers[r] = exponent == 0u ? 1.0f : TQ_FLOAT_OF(exponent);
    }
    TQ_SYNC();
    uint query[NT * KSTEPS * 2];
    float power[NT * 2];
    TQ_UNROLL for (int n = 0; n < NT; ++n) {
      const int r = n * 8 + of_eight;
      const float divisor = 1.0f / powers[r];
      TQ_UNROLL for (int i = 0; i < KSTEPS * 2; ++i) {
        const int at = r * D + of_four * (D / 4) + 2 * i;
        query[n * KSTEPS * 2 + i] =
            tq_narrow(half_type, line[at] * divisor, line[at + 1] * divisor);
      }
      power[n * 2] = powers[n * 8 + of_four * 2];
      power[n * 2 + 1] = powers[n * 8 + of_four * 2 + 1];
    }
"""

# The first tile is on its way while tables and queries are made.
_FETCH = """
    const __half* half_type = 0;
    const int of_four = int(tq_lane) & 3;
    const int of_eight = int(tq_lane) >> 2;
    const int kbit = of_four * KOWN;
    const int vbit = of_eight * VOWN;
    const uint kshift = uint(kbit) & 31u;
    const uint vshift = uint(vbit) & 31u;
    // tokens are dealt to rows so that four lanes' loads of values are of neighbours
    const int ktoken = of_eight / 2 + of_eight % 2 * 4;
    uint kcode[TILES * 2 * KWORDS];
    uint vcode[TILES * 4 * VWORDS];
    uint kscale[TILES * 2];
    uint vscale[TILES * 2];
    // A tile that would reach beyond the arrays begins earlier: what it has in common with the tile
    // before is hidden. So each address is one of a few plus a constant.
    auto fetch = [&](int from) {
      const int wanted = base + from * TOKENS;
      const int first = pair * capacity + (wanted < capacity - TOKENS ? wanted : capacity - TOKENS);
      const int key = first + ktoken;
      const int value = first + of_four;
      TQ_UNROLL for (int i = 0; i < TILES * 2; ++i) {
        if (KGAP > 0) {
          TQ_UNROLL for (int j = 0; j < KWORDS; ++j) {
            const int word = kbit / 32 + j < KROW ? kbit / 32 + j : KROW - 1;
            kcode[i * KWORDS + j] = kcodes[key * KROW + word + i * 8 * KROW];
          }
        } else {
          TQ_WORDS((kcode + i * KWORDS), KFLUSH, kcodes,
              key * KROW + kbit / 32 + i * 8 * KROW, KEVEN);
        }
        kscale[i] = uint(kscales[key + i * 8]);
        vscale[i] = uint(vscales[key + i * 8]);
      }
      TQ_UNROLL for (int i = 0; i < TILES * 4; ++i) {
        if (VGAP > 0) {
          TQ_UNROLL for (int j = 0; j < VWORDS; ++j) {
            const int word = vbit / 32 + j < VROW ? vbit / 32 + j : VROW - 1;
            vcode[i * VWORDS + j] = vcodes[value * VROW + word + i * 4 * VROW];
          }
        } else {
          TQ_WORDS((vcode + i * VWORDS), VFLUSH, vcodes,
              value * VROW + vbit / 32 + i * 4 * VROW, VEVEN);
        }
      }
    };

    if (tile < last) fetch(tile);
"""

_LOOP = """
    float top[NT * 2];
    float total[NT * 2];
    float sum[NT * VSTEPS * 4];
    TQ_UNROLL for (int i = 0; i < NT * 2; ++i) {
      top[i] = LOWEST;
      total[i] = 0.0f;
    }
    TQ_UNROLL for (int i = 0; i < NT * VSTEPS * 4; ++i) sum[i] = 0.0f;
    while (tile < last) {
      const int own = base + tile * TOKENS;
      const int first_token = own < capacity - TOKENS ? own : capacity - TOKENS;
      const int lowest = own > start ? own : start;
      uint kstream[TILES * 2 * (KFLUSH + 1)];
      uint vstream[TILES * 4 * (VFLUSH + 1)];
      float kfactor[TILES * 2];
      float vfactor[TILES * 2];
      float vlog[TILES * 2];
      TQ_UNROLL for (int i = 0; i < TILES * 2; ++i) {
        TQ_UNROLL for (int j = 0; j < KFLUSH; ++j) {
          const uint low = kcode[i * KWORDS + j];
          const uint high = j + 1 < KWORDS ? kcode[i * KWORDS + (j + 1 < KWORDS ? j + 1 : 0)] : 0u;
          kstream[i * (KFLUSH + 1) + j] = KGAP == 0 ? low : TQ_FUNNEL(low, high, kshift);
        }
        kstream[i * (KFLUSH + 1) + KFLUSH] = 0u;
        kfactor[i] = kscale[i] == 0u ? 0.0f : TQ_FLOAT_OF((kscale[i] + 888u) << 20);
        vfactor[i] = vscale[i] == 0u ? 0.0f : TQ_FLOAT_OF((vscale[i] + 888u) << 20);
        vlog[i] = float(int(vscale[i])) * 0.125f - 16.0f;
      }
      TQ_UNROLL for (int i = 0; i < TILES * 4; ++i) {
        TQ_UNROLL for (int j = 0; j < VFLUSH; ++j) {
          const uint low = vcode[i * VWORDS + j];
          const uint high = j + 1 < VWORDS ? vcode[i * VWORDS + (j + 1 < VWORDS ? j + 1 : 0)] : 0u;
          vstream[i * (VFLUSH + 1) + j] = VGAP == 0 ? low : TQ_FUNNEL(low, high, vshift);
        }
        vstream[i * (VFLUSH + 1) + VFLUSH] = 0u;
      }
      tile += WARPS;
      if (tile < last) fetch(tile);

      float score[TILES * NT * 4];
      TQ_UNROLL for (int i = 0; i < TILES * NT * 4; ++i) score[i] = 0.0f;
      TQ_UNROLL for (int t = 0; t < TILES; ++t) {
        const uint* one = kstream + (2 * t) * (KFLUSH + 1);
        const uint* two = kstream + (2 * t + 1) * (KFLUSH + 1);
        TQ_UNROLL for (int i = 0; i < KSTEPS; ++i) {
          uint a[4];
          if (KB <= 4) {
            TQ_PAIR(a[0], one, 2 * i, KB, klut, KCOPIES);
            TQ_PAIR(a[1], two, 2 * i, KB, klut, KCOPIES);
            TQ_PAIR(a[2], one, 2 * i + 1, KB, klut, KCOPIES);
            TQ_PAIR(a[3], two, 2 * i + 1, KB, klut, KCOPIES);
          } else {
            TQ_UNROLL for (int j = 0; j < 2; ++j) {
              uint low, high;
              TQ_LEVEL_OF(low, one, 4 * i + 2 * j, KB, klut, KCOPIES);
              TQ_LEVEL_OF(high, one, 4 * i + 2 * j + 1, KB, klut, KCOPIES);
              a[2 * j] = __byte_perm(low, high, 0x5410u);
              TQ_LEVEL_OF(low, two, 4 * i + 2 * j, KB, klut, KCOPIES);
              TQ_LEVEL_OF(high, two, 4 * i + 2 * j + 1, KB, klut, KCOPIES);
              a[2 * j + 1] = __byte_perm(low, high, 0x5410u);
            }
          }
          TQ_UNROLL for (int n = 0; n < NT; ++n) {
            tq_tensor(half_type, score + (t * NT + n) * 4, a[0], a[1], a[2], a[3],
                query[(n * KSTEPS + i) * 2], query[(n * KSTEPS + i) * 2 + 1]);
          }
        }
      }

      // score[(t * NT + n) * 4 + 2 * h + e]: row of_eight of half h, query n * 8 + 2 of_four + e
      bool grows = false;
      TQ_UNROLL for (int t = 0; t < TILES; ++t) {
        TQ_UNROLL for (int h = 0; h < 2; ++h) {
          const int column = first_token + t * 16 + h * 8 + ktoken;
          const bool there = column >= lowest && column < end;
          TQ_UNROLL for (int n = 0; n < NT; ++n) {
            TQ_UNROLL for (int e = 0; e < 2; ++e) {
              const int i = (t * NT + n) * 4 + 2 * h + e;
              score[i] *= kfactor[2 * t + h] * power[n * 2 + e];
              if (CAUSAL || MASK > 0) {
                const int wanted = first_row + n * 8 + of_four * 2 + e;
                const int row = wanted < ROWS ? wanted : ROWS - 1;
                if (there) TQ_MASKED(score[i], row, column);
              }
              if (!there) score[i] = HIDDEN;
              grows = grows || score[i] + vlog[2 * t + h] > top[n * 2 + e] + SLACK;
            }
          }
        }
      }
      if (TQ_ANY(grows)) {
        TQ_UNROLL for (int n = 0; n < NT; ++n) {
          TQ_UNROLL for (int e = 0; e < 2; ++e) {
            float highest = top[n * 2 + e];
            TQ_UNROLL for (int i = 0; i < TILES * 2; ++i) {
              highest = fmaxf(highest, score[(i / 2 * NT + n) * 4 + i % 2 * 2 + e] + vlog[i]);
            }
            highest = fmaxf(highest, TQ_SHUFFLE_XOR(highest, 4));
            highest = fmaxf(highest, TQ_SHUFFLE_XOR(highest, 8));
            highest = fmaxf(highest, TQ_SHUFFLE_XOR(highest, 16));
            const float keep = TQ_EXP2(top[n * 2 + e] - highest);
            top[n * 2 + e] = highest;
            total[n * 2 + e] *= keep;
            TQ_UNROLL for (int i = 0; i < VSTEPS; ++i) {
              sum[(n * VSTEPS + i) * 4 + e] *= keep;
              sum[(n * VSTEPS + i) * 4 + 2 + e] *= keep;
            }
          }
        }
      }
      uint weight[TILES * NT * 2];
      TQ_UNROLL for (int t = 0; t < TILES; ++t) {
        TQ_UNROLL for (int n = 0; n < NT; ++n) {
          TQ_UNROLL for (int h = 0; h < 2; ++h) {
            const int i = (t * NT + n) * 4 + 2 * h;
            const float one = TQ_FAST_EXP2(score[i] - top[n * 2]);
            const float two = TQ_FAST_EXP2(score[i + 1] - top[n * 2 + 1]);
            total[n * 2] += one;
            total[n * 2 + 1] += two;
            const float by = vfactor[2 * t + h];
            weight[(t * NT + n) * 2 + h] = TQ_TRANSPOSE(tq_narrow(half_type, one * by, two * by));
          }
        }
      }

      TQ_UNROLL for (int t = 0; t < TILES; ++t) {
        // streams of the codes of two tokens: even dimensions, odd dimensions
        uint even[2 * (VFLUSH + 1)];
        uint odd[2 * (VFLUSH + 1)];
        if (VB <= 4) {
          TQ_UNROLL for (int h = 0; h < 2; ++h) {
            const uint* one = vstream + (4 * t + 2 * h) * (VFLUSH + 1);
            const uint* two = one + VFLUSH + 1;
            TQ_UNROLL for (int j = 0; j < VFLUSH; ++j) {
              uint of_even = 0u;
              TQ_UNROLL for (int b = 0; b < 32; ++b) {
                if ((32 * j + b) / VB % 2 == 0) of_even |= 1u << b;
              }
              uint up = two[j] << VB;
              uint down = one[j] >> VB;
              if (32 % (2 * VB) != 0) {
                up = TQ_FUNNEL(j > 0 ? two[j > 0 ? j - 1 : 0] : 0u, two[j], uint(32 - VB));
                down = TQ_FUNNEL(one[j], one[j + 1], uint(VB));
              }
              even[h * (VFLUSH + 1) + j] = TQ_SELECT(of_even, one[j], up);
              odd[h * (VFLUSH + 1) + j] = TQ_SELECT(of_even, down, two[j]);
            }
            even[h * (VFLUSH + 1) + VFLUSH] = 0u;
            odd[h * (VFLUSH + 1) + VFLUSH] = 0u;
          }
        }
        TQ_UNROLL for (int i = 0; i < VSTEPS; ++i) {
          uint a[4];
          TQ_UNROLL for (int h = 0; h < 2; ++h) {
            if (VB <= 4) {
              const uint* of_even = even + h * (VFLUSH + 1);
              const uint* of_odd = odd + h * (VFLUSH + 1);
              TQ_PAIR(a[2 * h], of_even, i, VB, vlut, VCOPIES);
              TQ_PAIR(a[2 * h + 1], of_odd, i, VB, vlut, VCOPIES);
            } else {
              const uint* one = vstream + (4 * t + 2 * h) * (VFLUSH + 1);
              const uint* two = one + VFLUSH + 1;
              TQ_UNROLL for (int j = 0; j < 2; ++j) {
                uint low, high;
                TQ_LEVEL_OF(low, one, 2 * i + j, VB, vlut, VCOPIES);
                TQ_LEVEL_OF(high, two, 2 * i + j, VB, vlut, VCOPIES);
                a[2 * h + j] = __byte_perm(low, high, 0x5410u);
              }
            }
          }
          TQ_UNROLL for (int n = 0; n < NT; ++n) {
            tq_tensor(half_type, sum + (n * VSTEPS + i) * 4, a[0], a[1], a[2], a[3],
                weight[(t * NT + n) * 2], weight[(t * NT + n) * 2 + 1]);
          }
        }
      }
    }
"""

_FINISH = """
    TQ_UNROLL for (int i = 0; i < NT * 2; ++i) {
      total[i] += TQ_SHUFFLE_XOR(total[i], 4);
      total[i] += TQ_SHUFFLE_XOR(total[i], 8);
      total[i] += TQ_SHUFFLE_XOR(total[i], 16);
      const int r = i / 2 * 8 + of_four * 2 + i % 2;
      if (of_eight == 0) {
        tops[int(tq_warp) * RB + r] = top[i];
        totals[int(tq_warp) * RB + r] = total[i];
      }
    }
    TQ_SYNC();  // nobody needs the tables any more
    float keep[NT * 2];
    TQ_UNROLL for (int i = 0; i < NT * 2; ++i) {
      const int r = i / 2 * 8 + of_four * 2 + i % 2;
      float highest = LOWEST;
      TQ_UNROLL for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, tops[w * RB + r]);
      keep[i] = TQ_EXP2(top[i] - highest);
    }
    for (int r = int(tq_tid); r < RB; r += THREADS) {
      float highest = LOWEST;
      float added = 0.0f;
      TQ_UNROLL for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, tops[w * RB + r]);
      TQ_UNROLL for (int w = 0; w < WARPS; ++w) {
        added += totals[w * RB + r] * TQ_EXP2(tops[w * RB + r] - highest);
      }
      if (first_row + r < ROWS) {
        marks[(out_at + r) * 2] = highest;
        marks[(out_at + r) * 2 + 1] = added;
      }
    }
    constexpr int EACH = (RB * DV + THREADS - 1) / THREADS;
    float whole[EACH];
    TQ_UNROLL for (int e = 0; e < EACH; ++e) whole[e] = 0.0f;
    TQ_UNROLL for (int from = 0; from < WARPS; from += TOGETHER) {
      const int slot = int(tq_warp) - from;
      if (slot >= 0 && slot < TOGETHER) {
        TQ_UNROLL for (int i = 0; i < NT * VSTEPS * 4; ++i) {
          const float value = sum[i] * keep[i / (VSTEPS * 4) * 2 + i % 2];
          pool[slot * OF_WARP + i * 33 + int(tq_lane)] = TQ_BITS_OF(value);
        }
      }
      TQ_SYNC();
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        const int r = i / DV;
        const int d = i % DV;
        const int lane = d / (DV / 8) * 4 + r % 8 / 2;
        const int step = d % (DV / 8) / 2;
        const int at = ((r / 8 * VSTEPS + step) * 4 + d % 2 * 2 + r % 2) * 33 + lane;
        if (r < RB && first_row + r < ROWS) {
          for (int w = 0; w < TOGETHER && from + w < WARPS; ++w) {
            whole[e] += TQ_FLOAT_OF(pool[w * OF_WARP + at]);
          }
        }
      }
      TQ_SYNC();
    }
    TQ_UNROLL for (int e = 0; e < EACH; ++e) {
      const int i = int(tq_tid) + e * THREADS;
      if (i < RB * DV && first_row + i / DV < ROWS) sums[out_at * DV + i] = whole[e];
    }
"""

TENSOR = (
    SIZES
    + _SIZES
    + MASKED
    + _PICKS
    + """
  TQ_SHARED(uint, pool, POOL);
  TQ_SHARED(float, powers, RB);
  TQ_SHARED(float, tops, WARPS * RB);
  TQ_SHARED(float, totals, WARPS * RB);
  TQ_TABLE(klut, pool + tq_lane % uint(KCOPIES));
  TQ_TABLE(vlut, pool + (ONE_TABLE ? 0 : KTABLE) + tq_lane % uint(VCOPIES));
  if (packed) {
"""
    + TILES_OF_SPLIT
    + _FETCH
    + _FILL.format(side="K", table="pool")
    + """
    if (!ONE_TABLE) {
      uint* table = pool + KTABLE;
"""
    + _FILL.format(side="V", table="table")
    + "    }\n"
    + QUERIES
    + rotation("K", "(RB * D)")
    + _QUERIES
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
