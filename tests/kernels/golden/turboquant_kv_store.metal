
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
[[kernel]] void custom_kernel_turboquant_kv_store_24ec32c776f29a08_float16_t_float16_t_float16_t_float_uint8_t_uint8_t_uint32_t_uint8_t_uint32_t_uint8_t(
  const device float16_t* keys [[buffer(0)]],
  const constant int* keys_shape [[buffer(1)]],
  const device float16_t* values [[buffer(2)]],
  const device float16_t* shift [[buffer(3)]],
  const device float* facts [[buffer(4)]],
  const device uint8_t* kcells [[buffer(5)]],
  const device uint8_t* vcells [[buffer(6)]],
  device uint32_t* kcodes [[buffer(7)]],
  device uint8_t* kscales [[buffer(8)]],
  device uint32_t* vcodes [[buffer(9)]],
  device uint8_t* vscales [[buffer(10)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
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
  constexpr bool SHIFT = true;
  constexpr int CELLS = 4096;
  constexpr int TRIALS = 7;
  constexpr int WARPS = 8;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  constexpr int THREADS = WARPS * 32;
  constexpr int WIDE = D > DV ? D : DV;
  constexpr int V_SIGNS = D;
  constexpr int K_MATRIX = D + DV;
  constexpr int V_MATRIX = K_MATRIX + KBASE * KBASE;
  constexpr int K_LEVELS = V_MATRIX + VBASE * VBASE;
  constexpr int V_LEVELS = K_LEVELS + (1 << KB);
  constexpr int K_NUMBERS = V_LEVELS + (1 << VB);
  constexpr int V_NUMBERS = K_NUMBERS + 4;
  constexpr int MOST_GROUPS = D / KGROUP > DV / VGROUP ? D / KGROUP : DV / VGROUP;
  const int tokens = keys_shape[2];
  const int vector = int(tq_bx);
  TQ_SHARED(float, line, WIDE);
  TQ_SHARED(float, squares, TRIALS * WIDE);
  TQ_SHARED(float, errors, TRIALS * MOST_GROUPS);
  TQ_SHARED(int, trial, TRIALS * MOST_GROUPS);
  TQ_SHARED(float, chosen, MOST_GROUPS);
  TQ_SHARED(uint, code_of, WIDE);
// the cell of a value that was divided by the scale, and the cell's code
#define TQ_CODE_OF(scaled, numbers, cells) \
  uint(cells[int(fmin(fmax(((scaled) + facts[numbers]) * facts[numbers + 1], 0.0f), float(CELLS - 1)))])
  if (tq_by == 0u) {
    constexpr int GROUPS = D / KGROUP;
    constexpr int WORDS = (D * KB + 31) / 32;
    for (int i = int(tq_tid); i < D; i += THREADS) {
      float value = float(keys[vector * D + i]);
      if (SHIFT) value = value - float(shift[vector / tokens * D + i]);
      line[i] = value * facts[0 + i];
    }
    TQ_SYNC();

    TQ_UNROLL for (int half_of = 1; half_of < KPOWER; half_of *= 4) {
      if (2 * half_of < KPOWER) {
        for (int j = int(tq_tid); j < D / 4; j += THREADS) {
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
        for (int j = int(tq_tid); j < D / 2; j += THREADS) {
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
      constexpr int EACH = (D + THREADS - 1) / THREADS;
      float held[EACH];
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        float sum = 0.0f;
        if (i < D) {
          const int a = i / KPOWER % KBASE;
          const int from = i - a * KPOWER;
          for (int j = 0; j < KBASE; ++j) {
            sum += facts[K_MATRIX + (a * KBASE + j)] * line[from + j * KPOWER];
          }
        }
        held[e] = sum;
      }
      TQ_SYNC();
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        if (i < D) line[i] = held[e];
      }
      TQ_SYNC();
    }

    for (int i = int(tq_tid); i < D; i += THREADS) {
      line[i] = TQ_MUL(line[i], facts[K_NUMBERS + 2]);
    }
    TQ_SYNC();
    if (int(tq_warp) < TRIALS) {
      const int mine = int(tq_warp) * WIDE;
      for (int i = int(tq_lane); i < D; i += 32) squares[mine + i] = TQ_MUL(line[i], line[i]);
      TQ_WARP_SYNC();

      TQ_UNROLL for (int n = KGROUP; n > 1; n /= 2) {
        for (int j = int(tq_lane); j < D / KGROUP * (n / 2); j += 32) {
          const int first = mine + j / (n / 2) * KGROUP;
          const int i = j % (n / 2);
          float sum = squares[first + i] + squares[first + i + n / 2];
          if (n % 2 == 1 && i == 0) sum = sum + squares[first + n - 1];
          squares[first + i] = sum;
        }
        TQ_WARP_SYNC();
      }

      float scale[(GROUPS + 31) / 32];
      TQ_UNROLL for (int k = 0; k < (GROUPS + 31) / 32; ++k) {
        const int g = int(tq_lane) + 32 * k;
        scale[k] = 1.0f;
        if (g < GROUPS) {
          const float mean = TQ_MUL(squares[mine + g * KGROUP], facts[K_NUMBERS + 3]);
          const uint nearest = (TQ_BITS_OF(sqrt(mean)) + (1u << 19)) >> 20;
          int byte = int(nearest) - 888 + int(tq_warp) - 3;
          byte = byte < 1 ? 1 : byte > 255 ? 255 : byte;
          scale[k] = TQ_FLOAT_OF(uint(byte + 888) << 20);
          errors[int(tq_warp) * MOST_GROUPS + g] = 1.0f / scale[k];
          trial[int(tq_warp) * MOST_GROUPS + g] = mean == 0.0f ? -byte : byte;
        }
      }
      TQ_WARP_SYNC();
      for (int i = int(tq_lane); i < D; i += 32) {
        const float scaled =
            TQ_MUL(line[i], errors[int(tq_warp) * MOST_GROUPS + i / KGROUP]);
        const uint code = TQ_CODE_OF(scaled, K_NUMBERS, kcells);
        const float away = scaled - facts[K_LEVELS + code];
        squares[mine + i] = TQ_MUL(away, away);
      }
      TQ_WARP_SYNC();

      TQ_UNROLL for (int n = KGROUP; n > 1; n /= 2) {
        for (int j = int(tq_lane); j < D / KGROUP * (n / 2); j += 32) {
          const int first = mine + j / (n / 2) * KGROUP;
          const int i = j % (n / 2);
          float sum = squares[first + i] + squares[first + i + n / 2];
          if (n % 2 == 1 && i == 0) sum = sum + squares[first + n - 1];
          squares[first + i] = sum;
        }
        TQ_WARP_SYNC();
      }

      TQ_UNROLL for (int k = 0; k < (GROUPS + 31) / 32; ++k) {
        const int g = int(tq_lane) + 32 * k;
        if (g < GROUPS) {
          errors[int(tq_warp) * MOST_GROUPS + g] =
              TQ_MUL(squares[mine + g * KGROUP], TQ_MUL(scale[k], scale[k]));
        }
      }
    }
    TQ_SYNC();
    for (int g = int(tq_tid); g < GROUPS; g += THREADS) {
      int best = 0;
      TQ_UNROLL for (int t = 1; t < TRIALS; ++t) {
        if (errors[t * MOST_GROUPS + g] < errors[best * MOST_GROUPS + g]) best = t;
      }
      const int byte = trial[best * MOST_GROUPS + g];
      chosen[g] = 1.0f / TQ_FLOAT_OF(uint((byte < 0 ? -byte : byte) + 888) << 20);
      kscales[vector * GROUPS + g] = byte < 0 ? 0 : byte;
    }
    TQ_SYNC();
    for (int i = int(tq_tid); i < D; i += THREADS) {
      const float scaled = TQ_MUL(line[i], chosen[i / KGROUP]);
      code_of[i] = TQ_CODE_OF(scaled, K_NUMBERS, kcells);
    }
    TQ_SYNC();
    for (int w = int(tq_tid); w < WORDS; w += THREADS) {
      uint word = 0u;
      for (int i = 32 * w / KB; i < D && i * KB < 32 * w + 32; ++i) {
        const int shift_by = i * KB - 32 * w;
        word |= shift_by < 0 ? code_of[i] >> -shift_by : code_of[i] << shift_by;
      }
      kcodes[vector * WORDS + w] = word;
    }
  } else {
    constexpr int GROUPS = DV / VGROUP;
    constexpr int WORDS = (DV * VB + 31) / 32;
    for (int i = int(tq_tid); i < DV; i += THREADS) {
      float value = float(values[vector * DV + i]);
      
      line[i] = value * facts[V_SIGNS + i];
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
            sum += facts[V_MATRIX + (a * VBASE + j)] * line[from + j * VPOWER];
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

    for (int i = int(tq_tid); i < DV; i += THREADS) {
      line[i] = TQ_MUL(line[i], facts[V_NUMBERS + 2]);
    }
    TQ_SYNC();
    if (int(tq_warp) < TRIALS) {
      const int mine = int(tq_warp) * WIDE;
      for (int i = int(tq_lane); i < DV; i += 32) squares[mine + i] = TQ_MUL(line[i], line[i]);
      TQ_WARP_SYNC();

      TQ_UNROLL for (int n = VGROUP; n > 1; n /= 2) {
        for (int j = int(tq_lane); j < DV / VGROUP * (n / 2); j += 32) {
          const int first = mine + j / (n / 2) * VGROUP;
          const int i = j % (n / 2);
          float sum = squares[first + i] + squares[first + i + n / 2];
          if (n % 2 == 1 && i == 0) sum = sum + squares[first + n - 1];
          squares[first + i] = sum;
        }
        TQ_WARP_SYNC();
      }

      float scale[(GROUPS + 31) / 32];
      TQ_UNROLL for (int k = 0; k < (GROUPS + 31) / 32; ++k) {
        const int g = int(tq_lane) + 32 * k;
        scale[k] = 1.0f;
        if (g < GROUPS) {
          const float mean = TQ_MUL(squares[mine + g * VGROUP], facts[V_NUMBERS + 3]);
          const uint nearest = (TQ_BITS_OF(sqrt(mean)) + (1u << 19)) >> 20;
          int byte = int(nearest) - 888 + int(tq_warp) - 3;
          byte = byte < 1 ? 1 : byte > 255 ? 255 : byte;
          scale[k] = TQ_FLOAT_OF(uint(byte + 888) << 20);
          errors[int(tq_warp) * MOST_GROUPS + g] = 1.0f / scale[k];
          trial[int(tq_warp) * MOST_GROUPS + g] = mean == 0.0f ? -byte : byte;
        }
      }
      TQ_WARP_SYNC();
      for (int i = int(tq_lane); i < DV; i += 32) {
        const float scaled =
            TQ_MUL(line[i], errors[int(tq_warp) * MOST_GROUPS + i / VGROUP]);
        const uint code = TQ_CODE_OF(scaled, V_NUMBERS, vcells);
        const float away = scaled - facts[V_LEVELS + code];
        squares[mine + i] = TQ_MUL(away, away);
      }
      TQ_WARP_SYNC();

      TQ_UNROLL for (int n = VGROUP; n > 1; n /= 2) {
        for (int j = int(tq_lane); j < DV / VGROUP * (n / 2); j += 32) {
          const int first = mine + j / (n / 2) * VGROUP;
          const int i = j % (n / 2);
          float sum = squares[first + i] + squares[first + i + n / 2];
          if (n % 2 == 1 && i == 0) sum = sum + squares[first + n - 1];
          squares[first + i] = sum;
        }
        TQ_WARP_SYNC();
      }

      TQ_UNROLL for (int k = 0; k < (GROUPS + 31) / 32; ++k) {
        const int g = int(tq_lane) + 32 * k;
        if (g < GROUPS) {
          errors[int(tq_warp) * MOST_GROUPS + g] =
              TQ_MUL(squares[mine + g * VGROUP], TQ_MUL(scale[k], scale[k]));
        }
      }
    }
    TQ_SYNC();
    for (int g = int(tq_tid); g < GROUPS; g += THREADS) {
      int best = 0;
      TQ_UNROLL for (int t = 1; t < TRIALS; ++t) {
        if (errors[t * MOST_GROUPS + g] < errors[best * MOST_GROUPS + g]) best = t;
      }
      const int byte = trial[best * MOST_GROUPS + g];
      chosen[g] = 1.0f / TQ_FLOAT_OF(uint((byte < 0 ? -byte : byte) + 888) << 20);
      vscales[vector * GROUPS + g] = byte < 0 ? 0 : byte;
    }
    TQ_SYNC();
    for (int i = int(tq_tid); i < DV; i += THREADS) {
      const float scaled = TQ_MUL(line[i], chosen[i / VGROUP]);
      code_of[i] = TQ_CODE_OF(scaled, V_NUMBERS, vcells);
    }
    TQ_SYNC();
    for (int w = int(tq_tid); w < WORDS; w += THREADS) {
      uint word = 0u;
      for (int i = 32 * w / VB; i < DV && i * VB < 32 * w + 32; ++i) {
        const int shift_by = i * VB - 32 * w;
        word |= shift_by < 0 ? code_of[i] >> -shift_by : code_of[i] << shift_by;
      }
      vcodes[vector * WORDS + w] = word;
    }
  }

}
