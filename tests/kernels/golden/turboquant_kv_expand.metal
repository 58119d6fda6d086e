
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
[[kernel]] void custom_kernel_turboquant_kv_expand_054d0f682442f28e_uint32_t_uint8_t_float_uint32_t_uint8_t_float_float_int32_t_float16_t_float16_t_float16_t_float16_t_float16_t(
  const device uint32_t* kcodes [[buffer(0)]],
  const device uint8_t* kscales [[buffer(1)]],
  const device float* kbiases [[buffer(2)]],
  const device uint32_t* vcodes [[buffer(3)]],
  const device uint8_t* vscales [[buffer(4)]],
  const device float* vbiases [[buffer(5)]],
  const device float* facts [[buffer(6)]],
  const device int32_t* meta [[buffer(7)]],
  const device float16_t* raw_keys [[buffer(8)]],
  const device float16_t* raw_values [[buffer(9)]],
  const device float16_t* shift [[buffer(10)]],
  device float16_t* keys [[buffer(11)]],
  device float16_t* values [[buffer(12)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using T = float16_t;
  constexpr int HEADS = 2;
  constexpr int D = 128;
  constexpr int DV = 128;
  constexpr int KB = 3;
  constexpr int VB = 4;
  constexpr int KGROUP = 128;
  constexpr int VGROUP = 128;
  constexpr int KBASE = 1;
  constexpr int VBASE = 1;
  constexpr int KPOWER = 128;
  constexpr int VPOWER = 128;
  constexpr bool KAFFINE = false;
  constexpr bool VAFFINE = false;
  constexpr bool SHIFT = true;
  constexpr bool RAW = true;
  constexpr int TOKENS = 16;
  constexpr int WARPS = 8;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  constexpr int THREADS = WARPS * 32;
  constexpr int WIDEST = D > DV ? D : DV;
  constexpr int V_SIGNS = D;
  constexpr int K_MATRIX = D + DV;
  constexpr int V_MATRIX = K_MATRIX + KBASE * KBASE;
  constexpr int K_LEVELS = V_MATRIX + VBASE * VBASE;
  constexpr int V_LEVELS = K_LEVELS + (1 << KB);
  const int columns = meta[1];
  const int capacity = meta[2];
  const int raw_capacity = meta[3];
  const int pair = int(tq_by) / 2;
  const int padding = meta[8 + 4 * (pair / HEADS)];
  const int raw_tokens = RAW ? meta[9 + 4 * (pair / HEADS)] : 0;
  const int first = int(tq_bx) * TOKENS;
  TQ_SHARED(float, line, TOKENS * WIDEST);
  TQ_SHARED(float, levels, 256);
  if (tq_by % 2u == 0u) {
    for (int i = int(tq_tid); i < (1 << KB); i += THREADS) {
      levels[i] = facts[K_LEVELS + i];
    }
    TQ_SYNC();
    constexpr int WORDS = (D * KB + 31) / 32;
    for (int i = int(tq_tid); i < TOKENS * D; i += THREADS) {
      const int wanted = first + i / D;
      const int at = pair * capacity + (wanted < columns ? wanted : columns - 1);
      const int bit = i % D * KB;
      const uint low = kcodes[at * WORDS + bit / 32];
      const uint high = kcodes[at * WORDS + (bit / 32 + 1 < WORDS ? bit / 32 + 1 : bit / 32)];
      const uint code = TQ_FUNNEL(low, high, uint(bit) & 31u) & ((1u << KB) - 1u);
      const int where = at * (D / KGROUP) + i % D / KGROUP;
      const float scale = float(kscales[where]);
      if (KAFFINE) {
        line[i] = scale * float(code) + float(kbiases[where]);
      } else {
        line[i] = scale == 0.0f ? 0.0f : levels[code] * TQ_FLOAT_OF((uint(scale) + 888u) << 20);
      }
    }
    TQ_SYNC();

    TQ_UNROLL for (int half_of = 1; half_of < KPOWER; half_of *= 4) {
      if (2 * half_of < KPOWER) {
        for (int j = int(tq_tid); j < (TOKENS * D) / 4; j += THREADS) {
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
        for (int j = int(tq_tid); j < (TOKENS * D) / 2; j += THREADS) {
          const int i = j / half_of * (2 * half_of) + j % half_of;
          const float a = line[i];
          const float b = line[i + half_of];
          line[i] = a + b;
          line[i + half_of] = a - b;
        }
      }
      TQ_SYNC();
    }
    if (KBASE > 1) {
      constexpr int EACH = ((TOKENS * D) + THREADS - 1) / THREADS;
      float held[EACH];
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        float sum = 0.0f;
        if (i < (TOKENS * D)) {
          const int a = i / KPOWER % KBASE;
          const int from = i - a * KPOWER;
          for (int j = 0; j < KBASE; ++j) {
            sum += facts[K_MATRIX + (j * KBASE + a)] * line[from + j * KPOWER];
          }
        }
        held[e] = sum;
      }
      TQ_SYNC();
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        if (i < (TOKENS * D)) line[i] = held[e];
      }
      TQ_SYNC();
    }

    for (int i = int(tq_tid); i < TOKENS * D; i += THREADS) {
      const int token = first + i / D;
      const int own = token - padding;
      const int d = i % D;
      float value = line[i] * facts[0 + d];
      if (SHIFT) value += float(shift[pair * D + d]);
      if (own >= 0 && own < raw_tokens) {
        value = float(raw_keys[(pair * raw_capacity + own) * D + d]);
      }
      if (token < columns) keys[(pair * columns + token) * D + d] = T(value);
    }
  } else {
    for (int i = int(tq_tid); i < (1 << VB); i += THREADS) {
      levels[i] = facts[V_LEVELS + i];
    }
    TQ_SYNC();
    constexpr int WORDS = (DV * VB + 31) / 32;
    for (int i = int(tq_tid); i < TOKENS * DV; i += THREADS) {
      const int wanted = first + i / DV;
      const int at = pair * capacity + (wanted < columns ? wanted : columns - 1);
      const int bit = i % DV * VB;
      const uint low = vcodes[at * WORDS + bit / 32];
      const uint high = vcodes[at * WORDS + (bit / 32 + 1 < WORDS ? bit / 32 + 1 : bit / 32)];
      const uint code = TQ_FUNNEL(low, high, uint(bit) & 31u) & ((1u << VB) - 1u);
      const int where = at * (DV / VGROUP) + i % DV / VGROUP;
      const float scale = float(vscales[where]);
      if (VAFFINE) {
        line[i] = scale * float(code) + float(vbiases[where]);
      } else {
        line[i] = scale == 0.0f ? 0.0f : levels[code] * TQ_FLOAT_OF((uint(scale) + 888u) << 20);
      }
    }
    TQ_SYNC();

    TQ_UNROLL for (int half_of = 1; half_of < VPOWER; half_of *= 4) {
      if (2 * half_of < VPOWER) {
        for (int j = int(tq_tid); j < (TOKENS * DV) / 4; j += THREADS) {
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
        for (int j = int(tq_tid); j < (TOKENS * DV) / 2; j += THREADS) {
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
      constexpr int EACH = ((TOKENS * DV) + THREADS - 1) / THREADS;
      float held[EACH];
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        float sum = 0.0f;
        if (i < (TOKENS * DV)) {
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
        if (i < (TOKENS * DV)) line[i] = held[e];
      }
      TQ_SYNC();
    }

    for (int i = int(tq_tid); i < TOKENS * DV; i += THREADS) {
      const int token = first + i / DV;
      const int own = token - padding;
      const int d = i % DV;
      float value = line[i] * facts[V_SIGNS + d];
      
      if (own >= 0 && own < raw_tokens) {
        value = float(raw_values[(pair * raw_capacity + own) * DV + d]);
      }
      if (token < columns) values[(pair * columns + token) * DV + d] = T(value);
    }
  }

}
