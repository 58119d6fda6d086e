
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
[[kernel]] void custom_kernel_turboquant_rotate_warps_7e8e7a32c0c716ce_float16_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device float16_t* multiplier [[buffer(2)]],
  const constant int* multiplier_shape [[buffer(3)]],
  device float16_t* y [[buffer(4)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using Y = float16_t;
  constexpr int BLOCK = 768;
  constexpr int POWER = 64;
  constexpr int NORM = 605396;
  constexpr int WARPS = 4;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  constexpr int N = BLOCK / 32, P = POWER / 32;  // values of a lane, and those that S mixes
  const uint width = uint(multiplier_shape[0]);
  const uint blocks = width / uint(BLOCK);
  const uint task = tq_bx * uint(WARPS) + tq_warp;
  const uint row = task / blocks;
  if (row < uint(x_shape[0])) {
    const uint start = task % blocks * uint(BLOCK) + tq_lane;
    const uint base = row * width + start;
    const float norm = NORM / 16777216.0f;
    float v[N];
    TQ_UNROLL for (int i = 0; i < N; ++i) {
      v[i] = float(x[base + uint(32 * i)]) * float(multiplier[start + uint(32 * i)]);
    }
    TQ_UNROLL for (int s = 0; s < 5; ++s) {
      const int half_of = 1 << s;
      if (half_of < P) {
        TQ_UNROLL for (int j = 0; j < N / 2; ++j) {
          const int i = (j / half_of) * (2 * half_of) + j % half_of;
          const int k = i + half_of < N ? i + half_of : 0;  // of a branch that is not taken
          const float a = v[i], b = v[k];
          v[i] = a + b;
          v[k] = a - b;
        }
      }
    }
    TQ_UNROLL for (int s = 0; s < 5; ++s) {
      const float sign = (tq_lane & (1u << s)) != 0u ? -1.0f : 1.0f;
      TQ_UNROLL for (int i = 0; i < N; ++i) {
        const float other = TQ_SHUFFLE_XOR(v[i], 1u << s);
        v[i] = other + sign * v[i];
      }
    }
    if (N == P) {
      TQ_UNROLL for (int i = 0; i < N; ++i) y[base + uint(32 * i)] = Y(norm * v[i]);
    } else {
      TQ_UNROLL for (int i = 0; i < P; ++i) {
        float t[12];
        TQ_UNROLL for (int j = 0; j < 12; ++j) t[j] = v[(j * P + i) % N];
        y[base + uint(32 * (0 * P + i))] = Y(norm * (+ t[0] - t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7] + t[8] + t[9] + t[10] + t[11]));
        y[base + uint(32 * (1 * P + i))] = Y(norm * (- t[0] - t[1] + t[2] - t[3] + t[4] - t[5] + t[6] - t[7] + t[8] - t[9] + t[10] - t[11]));
        y[base + uint(32 * (2 * P + i))] = Y(norm * (+ t[0] + t[1] + t[2] - t[3] + t[4] + t[5] - t[6] - t[7] - t[8] - t[9] + t[10] + t[11]));
        y[base + uint(32 * (3 * P + i))] = Y(norm * (+ t[0] - t[1] - t[2] - t[3] + t[4] - t[5] - t[6] + t[7] - t[8] + t[9] + t[10] - t[11]));
        y[base + uint(32 * (4 * P + i))] = Y(norm * (+ t[0] + t[1] + t[2] + t[3] + t[4] - t[5] + t[6] + t[7] - t[8] - t[9] - t[10] - t[11]));
        y[base + uint(32 * (5 * P + i))] = Y(norm * (+ t[0] - t[1] + t[2] - t[3] - t[4] - t[5] + t[6] - t[7] - t[8] + t[9] - t[10] + t[11]));
        y[base + uint(32 * (6 * P + i))] = Y(norm * (+ t[0] + t[1] - t[2] - t[3] + t[4] + t[5] + t[6] - t[7] + t[8] + t[9] - t[10] - t[11]));
        y[base + uint(32 * (7 * P + i))] = Y(norm * (+ t[0] - t[1] - t[2] + t[3] + t[4] - t[5] - t[6] - t[7] + t[8] - t[9] - t[10] + t[11]));
        y[base + uint(32 * (8 * P + i))] = Y(norm * (+ t[0] + t[1] - t[2] - t[3] - t[4] - t[5] + t[6] + t[7] + t[8] - t[9] + t[10] + t[11]));
        y[base + uint(32 * (9 * P + i))] = Y(norm * (+ t[0] - t[1] - t[2] + t[3] - t[4] + t[5] + t[6] - t[7] - t[8] - t[9] + t[10] - t[11]));
        y[base + uint(32 * (10 * P + i))] = Y(norm * (+ t[0] + t[1] + t[2] + t[3] - t[4] - t[5] - t[6] - t[7] + t[8] + t[9] + t[10] - t[11]));
        y[base + uint(32 * (11 * P + i))] = Y(norm * (+ t[0] - t[1] + t[2] - t[3] - t[4] + t[5] - t[6] + t[7] + t[8] - t[9] - t[10] - t[11]));
      }
    }
  }

}
