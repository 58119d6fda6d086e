
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
[[kernel]] void custom_kernel_turboquant_rotate_fe357d1dfb59560e_float16_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const device float16_t* multiplier [[buffer(1)]],
  const constant int* multiplier_shape [[buffer(2)]],
  device float16_t* y [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using Y = float16_t;
  constexpr int BLOCK = 192;
  constexpr int POWER = 16;
  constexpr int NORM = 1210791;
  constexpr int THREADS = 32;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  constexpr uint N = BLOCK, P = POWER;
  TQ_SHARED(float, line, BLOCK);
  const uint start = tq_bx * N;
  const uint base = tq_by * uint(multiplier_shape[0]) + start;
  const float norm = NORM / 16777216.0f;
  for (uint i = tq_tid; i < N; i += uint(THREADS)) {
    line[i] = float(x[base + i]) * float(multiplier[start + i]);
  }
  TQ_SYNC();
  TQ_UNROLL for (uint half_of = 1u; half_of < P; half_of *= 4u) {
    if (2u * half_of < P) {
      for (uint j = tq_tid; j < N / 4u; j += uint(THREADS)) {
        const uint i = (j / half_of) * (4u * half_of) + j % half_of;
        const float a = line[i] + line[i + half_of];
        const float b = line[i] - line[i + half_of];
        const float c = line[i + 2u * half_of] + line[i + 3u * half_of];
        const float d = line[i + 2u * half_of] - line[i + 3u * half_of];
        line[i] = a + c;
        line[i + half_of] = b + d;
        line[i + 2u * half_of] = a - c;
        line[i + 3u * half_of] = b - d;
      }
    } else {
      for (uint j = tq_tid; j < N / 2u; j += uint(THREADS)) {
        const uint i = (j / half_of) * (2u * half_of) + j % half_of;
        const float a = line[i];
        const float b = line[i + half_of];
        line[i] = a + b;
        line[i + half_of] = a - b;
      }
    }
    TQ_SYNC();
  }
  if (N == P) {
    for (uint i = tq_tid; i < N; i += uint(THREADS)) y[base + i] = Y(norm * line[i]);
  } else {
    for (uint i = tq_tid; i < P; i += uint(THREADS)) {
      float v[12];
      TQ_UNROLL for (int j = 0; j < 12; ++j) v[j] = line[(uint(j) * P + i) % N];
      y[base + 0u * P + i] = Y(norm * (+ v[0] - v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7] + v[8] + v[9] + v[10] + v[11]));
      y[base + 1u * P + i] = Y(norm * (- v[0] - v[1] + v[2] - v[3] + v[4] - v[5] + v[6] - v[7] + v[8] - v[9] + v[10] - v[11]));
      y[base + 2u * P + i] = Y(norm * (+ v[0] + v[1] + v[2] - v[3] + v[4] + v[5] - v[6] - v[7] - v[8] - v[9] + v[10] + v[11]));
      y[base + 3u * P + i] = Y(norm * (+ v[0] - v[1] - v[2] - v[3] + v[4] - v[5] - v[6] + v[7] - v[8] + v[9] + v[10] - v[11]));
      y[base + 4u * P + i] = Y(norm * (+ v[0] + v[1] + v[2] + v[3] + v[4] - v[5] + v[6] + v[7] - v[8] - v[9] - v[10] - v[11]));
      y[base + 5u * P + i] = Y(norm * (+ v[0] - v[1] + v[2] - v[3] - v[4] - v[5] + v[6] - v[7] - v[8] + v[9] - v[10] + v[11]));
      y[base + 6u * P + i] = Y(norm * (+ v[0] + v[1] - v[2] - v[3] + v[4] + v[5] + v[6] - v[7] + v[8] + v[9] - v[10] - v[11]));
      y[base + 7u * P + i] = Y(norm * (+ v[0] - v[1] - v[2] + v[3] + v[4] - v[5] - v[6] - v[7] + v[8] - v[9] - v[10] + v[11]));
      y[base + 8u * P + i] = Y(norm * (+ v[0] + v[1] - v[2] - v[3] - v[4] - v[5] + v[6] + v[7] + v[8] - v[9] + v[10] + v[11]));
      y[base + 9u * P + i] = Y(norm * (+ v[0] - v[1] - v[2] + v[3] - v[4] + v[5] + v[6] - v[7] - v[8] - v[9] + v[10] - v[11]));
      y[base + 10u * P + i] = Y(norm * (+ v[0] + v[1] + v[2] + v[3] - v[4] - v[5] - v[6] - v[7] + v[8] + v[9] + v[10] - v[11]));
      y[base + 11u * P + i] = Y(norm * (+ v[0] - v[1] + v[2] - v[3] - v[4] + v[5] - v[6] + v[7] + v[8] - v[9] - v[10] - v[11]));
    }
  }

}
