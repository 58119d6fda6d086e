
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

#define TQ_READ_FOUR(to, from, offset) \
  TQ_UNROLL for (int tq_i = 0; tq_i < 4; ++tq_i) (to)[tq_i] = float(from[(offset) + tq_i])
#define TQ_WRITE_FOUR(to, offset, values) \
  TQ_UNROLL for (int tq_i = 0; tq_i < 4; ++tq_i) to[(offset) + tq_i] = T(values[tq_i])
#define TQ_PICK_QUAD(to, table, key, copies, copy) \
  TQ_UNROLL for (int tq_i = 0; tq_i < 4; ++tq_i) { \
    to[tq_i] = table[((key) * uint(copies) + (copy)) * 4u + uint(tq_i)]; \
  }
[[kernel]] void custom_kernel_turboquant_expand_ternary_d19bf32e724d1d63_uint32_t_float16_t_floatc_float16_t(
  const device uint32_t* codes [[buffer(0)]],
  const constant int* codes_shape [[buffer(1)]],
  const device float16_t* scales [[buffer(2)]],
  const constant int* scales_shape [[buffer(3)]],
  const constant float* table [[buffer(4)]],
  device float16_t* y [[buffer(5)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using T = float16_t;
  constexpr int BITS = 2;
  constexpr int WINDOW = 2;
  constexpr int TILE = 0;
  constexpr int GROUP = 64;
  constexpr bool LOG8 = false;
  constexpr int UNIT = 20;
  constexpr int COPIES = 4;
  constexpr int R = 4;
  constexpr int WARPS = 8;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  const uint outputs = uint(codes_shape[0]);
  const int words = codes_shape[1];
  const uint groups = uint(scales_shape[1]);
#define TQ_LEVEL(i) table[i]

  constexpr int DIGITS = 20;
  constexpr int QUADS = 5;
  constexpr uint QUAD = 81u;

  const uint width = groups * uint(GROUP);

  TQ_SHARED(float, lut, 4 * 81 * COPIES);
  for (uint i = tq_tid; i < 4u * QUAD * uint(COPIES); i += uint(WARPS * 32)) {
    const uint digit = i & 3u;
    const uint power = digit == 0u ? 1u : digit == 1u ? 3u : digit == 2u ? 9u : 27u;
    const uint level = i / uint(4 * COPIES) / power % 3u;
    lut[i] = TQ_LEVEL(level);
  }
  TQ_SYNC();
  const uint copy = tq_lane % uint(COPIES);

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

      float scale = float(scales[where]);
      if (LOG8) scale = scale == 0.0f ? 0.0f : TQ_EXP2((scale - 240.0f) * 0.0625f);

          float value[4];
          TQ_PICK_QUAD(value, lut, key, COPIES, copy);
          TQ_UNROLL for (int j = 0; j < 4; ++j) value[j] *= scale;
          TQ_WRITE_FOUR(y, o * width + place, value);
        }
      }
    }
  }

}
