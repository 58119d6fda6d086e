
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
[[kernel]] void custom_kernel_turboquant_kv_attend_d4620d53e108c863_float16_t_uint32_t_uint8_t_float_uint32_t_uint8_t_float_float_floatc_int32_t_float16_t_float16_t_float16_t_float_float_float_float(
  const device float16_t* queries [[buffer(0)]],
  const device uint32_t* kcodes [[buffer(1)]],
  const device uint8_t* kscales [[buffer(2)]],
  const device float* kbiases [[buffer(3)]],
  const device uint32_t* vcodes [[buffer(4)]],
  const device uint8_t* vscales [[buffer(5)]],
  const device float* vbiases [[buffer(6)]],
  const device float* facts [[buffer(7)]],
  const constant float* factor [[buffer(8)]],
  const device int32_t* meta [[buffer(9)]],
  const device float16_t* raw_keys [[buffer(10)]],
  const device float16_t* raw_values [[buffer(11)]],
  const device float16_t* shift [[buffer(12)]],
  const device float* sinks [[buffer(13)]],
  const device float* mask [[buffer(14)]],
  device float* sums [[buffer(15)]],
  device float* marks [[buffer(16)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  constexpr int D = 128;
  constexpr int DV = 128;
  constexpr int KBASE = 1;
  constexpr int VBASE = 1;
  constexpr int VPOWER = 128;
  constexpr bool RAW = true;
  constexpr int RB = 4;
  constexpr int LENGTH = 1;
  constexpr int REPEATS = 4;
  constexpr int HEADS = 2;
  constexpr int KB = 3;
  constexpr int VB = 4;
  constexpr int KGROUP = 128;
  constexpr int VGROUP = 128;
  constexpr bool KAFFINE = false;
  constexpr bool VAFFINE = false;
  constexpr int KPOWER = 128;
  constexpr int WARPS = 4;
  constexpr int TILES = 1;
  constexpr int KCOPIES = 16;
  constexpr int VCOPIES = 4;
  constexpr int MASK = 0;
  constexpr bool CAUSAL = false;
  constexpr bool SINKS = false;
  constexpr bool SHIFT = true;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  constexpr int ROWS = REPEATS * LENGTH;
  constexpr int ROW_BLOCKS = (ROWS + RB - 1) / RB;
  constexpr int THREADS = WARPS * 32;
  constexpr int WIDEST = D > DV ? D : DV;
  constexpr int KROW = (D * KB + 31) / 32;    // words of a key
  constexpr int VROW = (DV * VB + 31) / 32;
  constexpr int KGROUPS = D / KGROUP;
  constexpr int VGROUPS = DV / VGROUP;
  constexpr bool KWHOLE = KGROUPS == 1 && !KAFFINE;  // scales are factors of scores
  constexpr bool VWHOLE = VGROUPS == 1 && !VAFFINE;  // scales are factors of weights
  // the parts of `facts`
  constexpr int V_SIGNS = D;
  constexpr int K_MATRIX = D + DV;
  constexpr int V_MATRIX = K_MATRIX + KBASE * KBASE;
  constexpr int K_LEVELS = V_MATRIX + VBASE * VBASE;
  constexpr int V_LEVELS = K_LEVELS + (1 << KB);
  constexpr float HIDDEN = -3.0e38f;
  constexpr float LOWEST = -1.0e30f;
  constexpr float LOG2_E = 1.4426950408889634f;
  const int splits = meta[0];
  const int columns = meta[1];
  const int capacity = meta[2];
  const int parts = RAW ? splits + 1 : splits;
  const int pair = int(tq_by) / ROW_BLOCKS;
  const int first_row = int(tq_by) % ROW_BLOCKS * RB;
  const int batch_row = pair / HEADS;
  const int head = pair % HEADS;
  const int padding = meta[8 + 4 * batch_row];
  const int raw_tokens = meta[9 + 4 * batch_row];
  const int start = meta[10 + 4 * batch_row];
  const int end = meta[11 + 4 * batch_row];
  const int out_at = (pair * parts + int(tq_bx)) * ROWS + first_row;

  const bool packed = int(tq_bx) < splits;
  TQ_SHARED(float, line, RB * WIDEST);

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

#define TQ_MASKED(score, row, column) \
  { \
    if (CAUSAL && (column) > columns - LENGTH + (row) % LENGTH) score = HIDDEN; \
    if (MASK > 0) { \
      const int tq_seen = batch_row * meta[4] + (head * REPEATS + (row) / LENGTH) * meta[5] \
          + (row) % LENGTH * meta[6] + (column); \
      if (MASK == 1) { \
        if (float(mask[tq_seen]) == 0.0f) score = HIDDEN; \
      } else { \
        score += float(mask[tq_seen]) * LOG2_E; \
      } \
    } \
  }

#define TQ_SCALE_OF(affine, value) \
  (affine ? float(value) : float(value) == 0.0f ? 0.0f : TQ_FLOAT_OF((uint(value) + 888u) << 20))

  TQ_SHARED(float, klut, KAFFINE ? 1 : KENTRIES * KSLOT * KCOPIES);
  TQ_SHARED(float, vlut, VAFFINE ? 1 : VENTRIES * VSLOT * VCOPIES);
  TQ_SHARED(float, weights, WARPS * RB * 32);
  TQ_SHARED(float, tops, WARPS * RB);
  TQ_SHARED(float, totals, WARPS * RB);
  if (packed) {

    for (int i = int(tq_tid); i < RB * D; i += THREADS) {
      const int row = first_row + i / D;
      float value = 0.0f;
      if (row < ROWS) value = float(queries[(pair * ROWS + row) * D + i % D]) * factor[0];
      line[i] = packed ? value * facts[i % D] : value;
    }
    TQ_SYNC();

    TQ_UNROLL for (int half_of = 1; half_of < KPOWER; half_of *= 4) {
      if (2 * half_of < KPOWER) {
        for (int j = int(tq_tid); j < (RB * D) / 4; j += THREADS) {
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
        for (int j = int(tq_tid); j < (RB * D) / 2; j += THREADS) {
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
      constexpr int EACH = ((RB * D) + THREADS - 1) / THREADS;
      float held[EACH];
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        float sum = 0.0f;
        if (i < (RB * D)) {
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
        if (i < (RB * D)) line[i] = held[e];
      }
      TQ_SYNC();
    }
    if (!KAFFINE) {
    for (int i = int(tq_tid); i < KENTRIES * KCOPIES; i += THREADS) {
      const int entry = i / KCOPIES;
      if (KSLOT == 2) {
        klut[2 * i] = facts[K_LEVELS + entry % (1 << KB)];
        klut[2 * i + 1] = facts[K_LEVELS + (entry >> KB) % (1 << KB)];
      } else {
        klut[i] = facts[K_LEVELS + entry];
      }
    }
    }
    if (!VAFFINE) {
    for (int i = int(tq_tid); i < VENTRIES * VCOPIES; i += THREADS) {
      const int entry = i / VCOPIES;
      if (VSLOT == 2) {
        vlut[2 * i] = facts[V_LEVELS + entry % (1 << VB)];
        vlut[2 * i + 1] = facts[V_LEVELS + (entry >> VB) % (1 << VB)];
      } else {
        vlut[i] = facts[V_LEVELS + entry];
      }
    }
    }
    TQ_SYNC();

    const int base = start / 16 * 16;
    const int tiles = end > start ? (end - base + TOKENS - 1) / TOKENS : 0;
    const int of_split = (tiles + splits - 1) / splits;
    int tile = int(tq_bx) * of_split;
    const int last = tile + of_split < tiles ? tile + of_split : tiles;
    tile += int(tq_warp);

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

  } else {

    if (RAW) {

    for (int i = int(tq_tid); i < RB * D; i += THREADS) {
      const int row = first_row + i / D;
      float value = 0.0f;
      if (row < ROWS) value = float(queries[(pair * ROWS + row) * D + i % D]) * factor[0];
      line[i] = packed ? value * facts[i % D] : value;
    }
    TQ_SYNC();

    constexpr int MINE = (RB + WARPS - 1) / WARPS;
    constexpr int OF_LANE = (DV + 31) / 32;
    const int raw_capacity = meta[3];
    float sum[MINE * OF_LANE];
    TQ_UNROLL for (int i = 0; i < MINE * OF_LANE; ++i) sum[i] = 0.0f;
    TQ_UNROLL for (int mine = 0; mine < MINE; ++mine) {
      const int r = int(tq_warp) + mine * WARPS;
      const int row = first_row + r;
      float top = LOWEST;
      float total = 0.0f;
      if (r < RB && row < ROWS) {
        float common = 0.0f;
        if (SHIFT) {
          for (int d = int(tq_lane); d < D; d += 32) {
            common += line[r * D + d] * float(shift[pair * D + d]);
          }
          TQ_UNROLL for (int s = 16; s > 0; s >>= 1) common += TQ_SHUFFLE_XOR(common, s);
        }
        if (SINKS) {
          top = float(sinks[head * REPEATS + row / LENGTH]) * LOG2_E - common;
          total = 1.0f;
        }
        for (int first = 0; first < raw_tokens; first += 32) {
          const int token = first + int(tq_lane);
          float score = HIDDEN;
          if (token < raw_tokens) {
            const int at = (pair * raw_capacity + token) * D;
            float dot = 0.0f;
            for (int d = 0; d < D; d += 8) {
              float key[8];
              TQ_READ(key, 8, raw_keys, at + d);
              TQ_UNROLL for (int i = 0; i < 8; ++i) dot += key[i] * line[r * D + d + i];
            }
            score = dot - common;
            TQ_MASKED(score, row, padding + token);
          }
          float highest = score;
          TQ_UNROLL for (int s = 16; s > 0; s >>= 1) {
            const float other = TQ_SHUFFLE_XOR(highest, s);
            highest = other > highest ? other : highest;
          }
          const float before = top;
          top = highest > top ? highest : top;
          const float keep = TQ_EXP2(before - top);
          const float weight = TQ_EXP2(score - top);
          float added = weight;
          TQ_UNROLL for (int s = 16; s > 0; s >>= 1) added += TQ_SHUFFLE_XOR(added, s);
          total = total * keep + added;
          TQ_UNROLL for (int i = 0; i < OF_LANE; ++i) sum[mine * OF_LANE + i] *= keep;
          const int count = raw_tokens - first < 32 ? raw_tokens - first : 32;
          for (int t = 0; t < count; ++t) {
            const float part = TQ_SHUFFLE(weight, t);
            const int at = (pair * raw_capacity + first + t) * DV;
            TQ_UNROLL for (int i = 0; i < OF_LANE; ++i) {
              const int d = int(tq_lane) + 32 * i;
              if (d < DV) sum[mine * OF_LANE + i] += part * float(raw_values[at + d]);
            }
          }
        }
        if (tq_lane == 0u) {
          marks[(out_at + r) * 2] = top;
          marks[(out_at + r) * 2 + 1] = total;
        }
      }
    }
    TQ_SYNC();
    TQ_UNROLL for (int mine = 0; mine < MINE; ++mine) {
      const int r = int(tq_warp) + mine * WARPS;
      TQ_UNROLL for (int i = 0; i < OF_LANE; ++i) {
        const int d = int(tq_lane) + 32 * i;
        if (r < RB && d < DV) line[r * DV + d] = sum[mine * OF_LANE + i] * facts[V_SIGNS + d];
      }
    }
    TQ_SYNC();

    TQ_UNROLL for (int half_of = 1; half_of < VPOWER; half_of *= 4) {
      if (2 * half_of < VPOWER) {
        for (int j = int(tq_tid); j < (RB * DV) / 4; j += THREADS) {
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
        for (int j = int(tq_tid); j < (RB * DV) / 2; j += THREADS) {
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
      constexpr int EACH = ((RB * DV) + THREADS - 1) / THREADS;
      float held[EACH];
      TQ_UNROLL for (int e = 0; e < EACH; ++e) {
        const int i = int(tq_tid) + e * THREADS;
        float sum = 0.0f;
        if (i < (RB * DV)) {
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
        if (i < (RB * DV)) line[i] = held[e];
      }
      TQ_SYNC();
    }

    for (int i = int(tq_tid); i < RB * DV; i += THREADS) {
      if (first_row + i / DV < ROWS) sums[out_at * DV + i] = line[i];
    }
    }

  }

}
