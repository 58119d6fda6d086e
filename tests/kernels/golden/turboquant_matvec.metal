
#define TQ_UNROLL MLX_MTL_PRAGMA_UNROLL
#define TQ_SHARED(T, name, count) threadgroup T name[count]
#define TQ_IN(T) const device T*
#define TQ_OUT(T) device T*
#define TQ_SYNC() threadgroup_barrier(mem_flags::mem_threadgroup)
#define TQ_SHUFFLE_XOR(value, mask) simd_shuffle_xor(value, ushort(mask))
#define TQ_FUNNEL(low, high, shift) \
  (((low) >> (shift)) | (((high) << 1) << (31u - (shift))))
#define TQ_EXP2(x) exp2(x)
#define TQ_READ(to, count, from, offset) \
  TQ_UNROLL for (int tq_i = 0; tq_i < (count); ++tq_i) to[tq_i] = float(from[(offset) + tq_i])
#define TQ_WRITE(to, offset, values, count) \
  TQ_UNROLL for (int tq_i = 0; tq_i < (count); ++tq_i) to[(offset) + tq_i] = T(values[tq_i])
#define TQ_PICK_BYTE(table, word, j, copies, copy) \
  table[(((word) >> (8 * (j))) & 255u) * (copies) + (copy)]
#define TQ_PICK_PAIR(first, second, table, word, shift, bits, copies, copy) \
  { \
    const uint tq_key = ((word) >> (shift)) & ((1u << (bits)) - 1u); \
    const uint tq_slot = (tq_key * uint(copies) + (copy)) * 2u; \
    first = table[tq_slot]; \
    second = table[tq_slot + 1u]; \
  }
[[kernel]] void custom_kernel_turboquant_matvec_37188fd42488ac8b_float16_t_uint32_t_uint8_t_float_float16_t(
  const device float16_t* x [[buffer(0)]],
  const device uint32_t* codes [[buffer(1)]],
  const constant int* codes_shape [[buffer(2)]],
  const device uint8_t* scales [[buffer(3)]],
  const constant int* scales_shape [[buffer(4)]],
  const device float* table [[buffer(5)]],
  device float16_t* y [[buffer(6)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using T = float16_t;
  using S = uint8_t;
  constexpr int BITS = 3;
  constexpr int WINDOW = 8;
  constexpr int TILE = 0;
  constexpr int GROUP = 64;
  constexpr bool LOG8 = true;
  constexpr int UNIT = 16;
  constexpr int COPIES = 8;
  constexpr int ROWS = 1;
  constexpr int R = 2;
  constexpr int SPLIT = 1;
  constexpr int SPAN = 1;
  constexpr int WARPS = 8;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  constexpr bool TRELLIS = WINDOW > BITS;
  constexpr bool BYTES = TRELLIS && WINDOW == 8;  // windows are bytes of the shifted stream
  constexpr int PER_ENTRY = !TRELLIS && BITS <= 4 ? 2 : 1;
  constexpr int ENTRIES = 1 << (TRELLIS ? WINDOW : PER_ENTRY * BITS);
  constexpr int OWN = UNIT * BITS;            // bits that belong to a unit
  constexpr int NEED = OWN + WINDOW - BITS;   // and those that its windows reach
  // a unit begins so many bits into a word at most
  constexpr int GAP = OWN % 32 == 0 ? 0 : OWN % 16 == 0 ? 16 : 24;
  constexpr int WORDS = (GAP + NEED + 31) / 32;
  constexpr int FLUSH = (NEED + 31) / 32;     // words once the stream begins with the unit
  // trellis: after PERIOD windows the place in a byte recurs, STRIDE bytes on
  constexpr int PERIOD = BITS % 8 == 0 ? 1 : BITS % 4 == 0 ? 2 : BITS % 2 == 0 ? 4 : 8;
  constexpr int STRIDE = BITS * PERIOD / 8;
  constexpr int REACH = 3 / STRIDE + 1;       // windows in the bytes of one word

  constexpr int M = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
  constexpr int SUMS = M * R;
  constexpr int PARTIALS = SPLIT > 1 ? WARPS * SUMS : 1;

  // constant subscripts: CUDA passes shapes by value, and any others cost a chain of selections
  const uint outputs = uint(codes_shape[0]), block = tq_bx;
  const int words = codes_shape[1];
  const uint groups = uint(scales_shape[1]);
  const uint matrix = 0u, first_row = 0u, out_row = 0u;
#define TQ_LEVEL(i) table[i]
  const uint width = groups * uint(GROUP);
  const uint units = width / uint(UNIT);

  TQ_SHARED(float, lut, ENTRIES * PER_ENTRY * COPIES);
  for (uint i = tq_tid; i < uint(ENTRIES * COPIES); i += uint(WARPS * 32)) {
    const uint entry = i / uint(COPIES);
    if (PER_ENTRY == 2) {
      lut[2u * i] = TQ_LEVEL(entry & ((1u << BITS) - 1u));
      lut[2u * i + 1u] = TQ_LEVEL(entry >> BITS);
    } else {
      lut[i] = TQ_LEVEL(entry);
    }
  }
  TQ_SYNC();
  const uint copy = tq_lane % uint(COPIES);

  TQ_SHARED(float, partial, PARTIALS);
  const uint part = tq_warp % uint(SPLIT);
  const uint first = (block * uint(WARPS / SPLIT) + tq_warp / uint(SPLIT)) * uint(R);

  float sum[SUMS];
  TQ_UNROLL for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
  const uint spans = (units + uint(32 * SPAN - 1)) / uint(32 * SPAN);
  for (uint span = part; span < spans; span += uint(SPLIT)) {

    float unscaled[SUMS];
    TQ_UNROLL for (int i = 0; i < SUMS; ++i) unscaled[i] = 0.0f;
    for (uint step = span * uint(SPAN); step < (span + 1u) * uint(SPAN); ++step) {
    const uint unit = step * 32u + tq_lane;
    const bool inside = unit < units;
    const uint at = inside ? unit : units - 1u;

    uint gap;
    int place[WORDS];
    {
      const int bit = int(at) * OWN;
      const int word = bit >> 5;
      const int tile_words = TILE > 0 ? TILE * BITS / 32 : words;
      const int tile_end = TILE > 0 ? (word / tile_words + 1) * tile_words : words;
      gap = uint(bit) & 31u;
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) {
        place[j] = word + j;
        if (32 * j >= OWN && place[j] >= tile_end) {
          place[j] = TRELLIS ? place[j] - tile_words : words - 1;
        }
      }
    }

    uint codes_of[R * WORDS];
    TQ_UNROLL for (int r = 0; r < R; ++r) {
      const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) {
        codes_of[r * WORDS + j] = codes[int(matrix + o) * words + place[j]];
      }
    }

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
#define TQ_USE(i, value) \
  TQ_UNROLL for (int m = 0; m < M; ++m) dot[m] += (value) * inputs[m * UNIT + (i)]

      uint flush[FLUSH + 1];
      TQ_UNROLL for (int j = 0; j <= FLUSH; ++j) flush[j] = 0u;
      TQ_UNROLL for (int j = 0; j < FLUSH; ++j) {
        if (GAP == 0) {
          flush[j] = code[j];
        } else {
          flush[j] = TQ_FUNNEL(code[j], j + 1 < WORDS ? code[j + 1 < WORDS ? j + 1 : 0] : 0u, gap);
        }
      }

      if (BYTES) {
        TQ_UNROLL for (int phase = 0; phase < PERIOD; ++phase) {
          TQ_UNROLL for (int from = phase; from < UNIT; from += PERIOD * REACH) {
            const uint shifted = TQ_FUNNEL(
                flush[from * BITS / 32], flush[from * BITS / 32 + 1], uint(from * BITS % 32));
            TQ_UNROLL for (int j = 0; j < REACH; ++j) {
              if (from + j * PERIOD < UNIT) {
                const float value = TQ_PICK_BYTE(lut, shifted, j * STRIDE, uint(COPIES), copy);
                TQ_USE(from + j * PERIOD, value);
              }
            }
          }
        }
      } else if (PER_ENTRY == 2) {
        TQ_UNROLL for (int i = 0; i < UNIT; i += 2) {
          // where the key lies within one word it is read from there
          const bool whole = i * BITS % 32 + 2 * BITS <= 32;
          const uint key = whole ? flush[i * BITS / 32]
              : TQ_FUNNEL(flush[i * BITS / 32], flush[i * BITS / 32 + 1], uint(i * BITS % 32));
          float one, two;
          TQ_PICK_PAIR(one, two, lut, key, whole ? i * BITS % 32 : 0, 2 * BITS, COPIES, copy);
          TQ_USE(i, one);
          TQ_USE(i + 1, two);
        }
      } else {
        TQ_UNROLL for (int i = 0; i < UNIT; ++i) {
          const uint key = TQ_FUNNEL(
              flush[i * BITS / 32], flush[i * BITS / 32 + 1], uint(i * BITS % 32));
          const float value = lut[(key & ((1u << WINDOW) - 1u)) * uint(COPIES) + copy];
          TQ_USE(i, value);
        }
      }

#undef TQ_USE
      if (SPAN > 1) {
        TQ_UNROLL for (int m = 0; m < M; ++m) unscaled[m * R + r] += dot[m];
      } else {
        const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
        const uint where = (matrix + o) * groups + at * uint(UNIT) / uint(GROUP);

      float scale = float(scales[where]);
      if (LOG8) scale = scale == 0.0f ? 0.0f : TQ_EXP2((scale - 240.0f) * 0.0625f);

        TQ_UNROLL for (int m = 0; m < M; ++m) sum[m * R + r] += scale * dot[m];
      }
    }
    }
    if (SPAN > 1) {
      TQ_UNROLL for (int r = 0; r < R; ++r) {
        const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
        const uint where = (matrix + o) * groups + span * uint(SPAN * 32 * UNIT) / uint(GROUP);

      float scale = float(scales[where]);
      if (LOG8) scale = scale == 0.0f ? 0.0f : TQ_EXP2((scale - 240.0f) * 0.0625f);

        TQ_UNROLL for (int m = 0; m < M; ++m) sum[m * R + r] += scale * unscaled[m * R + r];
      }
    }
  }

// Halve the sums of each lane while there is more than one; then lanes hold the same sum.
  constexpr int LEFT = SUMS > 32 ? SUMS / 32 : 1;
  uint index = 0u;
  TQ_UNROLL for (int s = 0; s < 5; ++s) {
    const int half_of = SUMS >> (s + 1);
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

}
