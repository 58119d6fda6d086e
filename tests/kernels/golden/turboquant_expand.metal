
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
[[kernel]] void custom_kernel_turboquant_expand_a5c04e456cd19985_uint32_t_uint8_t_float_float16_t(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device uint8_t* scales [[buffer(2)]],
  const constant int* scales_shape [[buffer(3)]],
  const device float* table [[buffer(4)]],
  device float16_t* y [[buffer(5)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using T = float16_t;
  constexpr int BITS = 3;
  constexpr int WINDOW = 8;
  constexpr int TILE = 0;
  constexpr int GROUP = 64;
  constexpr bool LOG8 = true;
  constexpr int UNIT = 16;
  constexpr int COPIES = 8;
  constexpr int R = 4;
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

  const uint outputs = uint(codes_shape[0]);
  const int words = codes_shape[1];
  const uint groups = uint(scales_shape[1]);
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

  for (uint r = 0u; r < uint(R); ++r) {
    const uint o = (tq_bx * uint(R) + r) * uint(WARPS) + tq_warp;
    if (o >= outputs) break;
    for (uint at = tq_lane; at < units; at += 32u) {

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

      uint code[WORDS];
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) code[j] = codes[int(o) * words + place[j]];
      const uint where = o * groups + at * uint(UNIT) / uint(GROUP);

      float scale = float(scales[where]);
      if (LOG8) scale = scale == 0.0f ? 0.0f : TQ_EXP2((scale - 240.0f) * 0.0625f);

      float values[UNIT];
#define TQ_USE(i, value) values[i] = scale * (value)

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
      TQ_WRITE(y, o * width + at * uint(UNIT), values, UNIT);
    }
  }

}
