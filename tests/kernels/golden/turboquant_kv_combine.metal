
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

#define TQ_SHUFFLE(value, lane) simd_shuffle(value, ushort(lane))
#define TQ_ANY(x) simd_any(x)
#define TQ_WARP_SYNC() simdgroup_barrier(mem_flags::mem_threadgroup)
#define TQ_FLOAT_OF(u) as_type<float>(u)
#define TQ_BITS_OF(f) as_type<uint>(f)
#define TQ_MUL(a, b) ((a) * (b))
[[kernel]] void custom_kernel_turboquant_kv_combine_6695189d357ee59a_float_float_float_int32_t_float16_t(
  const device float* sums [[buffer(0)]],
  const device float* marks [[buffer(1)]],
  const device float* facts [[buffer(2)]],
  const device int32_t* meta [[buffer(3)]],
  device float16_t* y [[buffer(4)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using T = float16_t;
  constexpr int D = 128;
  constexpr int DV = 128;
  constexpr int KBASE = 1;
  constexpr int VBASE = 1;
  constexpr int VPOWER = 128;
  constexpr bool RAW = true;
  constexpr int WARPS = 16;
  constexpr int ROWS = 4;
  constexpr int MOST_PARTS = 512;
  constexpr int SLICES = 4;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

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

    TQ_UNROLL for (int half_of = 1; half_of < VPOWER; half_of *= 4) {
      if (2 * half_of < VPOWER) {
        for (int j = int(tq_tid); j < DV / 4; j += THREADS) {
          const int i = j / half_of * (4 * half_of) + j % half_of;
          const float a = line[i] + line[i + half_of];
          const float b = line[i] - line[i + half_of];
          const float c = line[i + 2 * half_of] + line[i + 3 * half_of];
          const float d = line[i + 2 * half_of] - line[i + 3 * half_of];
          line[i] = a + c;
          line[i + half_of] = b + d;
          line[i + 2 * half_of] = a - c;
          line[i + 3 * half_of] = b - d;
        }
      } else {
        for (int j = int(tq_tid); j < DV / 2; j += THREADS) {
          const int i = j / half_of * (2 * half_of) + j % half_of;
          const float a = line[i];
          const float b = line[i + half_of];
          line[i] = a + b;
          line[i + half_of] = a - b;
        }
      }
      TQ_SYNC();
    }
    if (VBASE > 1) {
      constexpr int EACH = (DV + THREADS - 1) / THREADS;
      float held[EACH];
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        float sum = 0.0f;
        if (i < DV) {
          const int a = i / VPOWER % VBASE;
          const int from = i - a * VPOWER;
          for (int j = 0; j < VBASE; ++j) {
            sum += facts[V_MATRIX + (j * VBASE + a)] * line[from + j * VPOWER];
          }
        }
        held[e] = sum;
      }
      TQ_SYNC();
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        if (i < DV) line[i] = held[e];
      }
      TQ_SYNC();
    }

  for (int d = int(tq_tid); d < DV; d += THREADS) {
    y[int(tq_bx) * DV + d] = T(line[d] * facts[V_SIGNS + d]);
  }

}
