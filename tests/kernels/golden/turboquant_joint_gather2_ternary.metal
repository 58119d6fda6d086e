
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
[[kernel]] void custom_kernel_turboquant_joint_gather2_ternary_a19db2a08075bffa_float16_t_uint32_t_float16_t_floatc_uint32_t_float16_t_floatc_uint32_tc_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const device uint32_t* codes0 [[buffer(2)]],
  const constant int* codes0_shape [[buffer(3)]],
  const device float16_t* scales0 [[buffer(4)]],
  const constant int* scales0_shape [[buffer(5)]],
  const constant float* table0 [[buffer(6)]],
  const device uint32_t* codes1 [[buffer(7)]],
  const constant int* codes1_shape [[buffer(8)]],
  const device float16_t* scales1 [[buffer(9)]],
  const constant float* table1 [[buffer(10)]],
  const constant uint32_t* experts [[buffer(11)]],
  const constant int* experts_shape [[buffer(12)]],
  device float16_t* y0 [[buffer(13)]],
  device float16_t* y1 [[buffer(14)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  using T = float16_t;
  using S = float16_t;
  constexpr int BITS = 2;
  constexpr int WINDOW = 2;
  constexpr int TILE = 0;
  constexpr int GROUP = 64;
  constexpr bool LOG8 = false;
  constexpr int UNIT = 20;
  constexpr int COPIES = 4;
  constexpr int ROWS = 1;
  constexpr int R = 4;
  constexpr int SPLIT = 1;
  constexpr int SPAN = 1;
  constexpr int WARPS = 8;

  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;

  constexpr int M = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
  constexpr int SUMS = M * R;
  constexpr int PARTIALS = SPLIT > 1 ? WARPS * SUMS : 1;
  constexpr uint EACH = uint(WARPS / SPLIT * R);
  uint block = tq_bx, which = 0u;
  uint outputs = uint(codes0_shape[1]);
  const int words = codes0_shape[2];
  const uint groups = uint(scales0_shape[2]);
  TQ_IN(uint) codes = codes0;
  TQ_IN(S) scales = scales0;
  TQ_OUT(T) y = y0;
  if (which == 0u && block >= (outputs + EACH - 1u) / EACH) {
    block -= (outputs + EACH - 1u) / EACH;
    which = 1u;
    outputs = uint(codes1_shape[1]);
    codes = codes1;
    scales = scales1;
    y = y1;
  }
  const uint matrix = uint(experts[tq_by]) * outputs;
  const uint first_row = tq_by / (uint(experts_shape[0]) / uint(x_shape[0]));
  const uint out_row = tq_by;
#define TQ_LEVEL(i) (which == 0u ? table0[i] : table1[i])
  const uint width = groups * uint(GROUP);

  constexpr int DIGITS = 20;
  constexpr int QUADS = 5;
  constexpr uint QUAD = 81u;

  TQ_SHARED(float, lut, 4 * 81 * COPIES);
  for (uint i = tq_tid; i < 4u * QUAD * uint(COPIES); i += uint(WARPS * 32)) {
    const uint digit = i & 3u;
    const uint power = digit == 0u ? 1u : digit == 1u ? 3u : digit == 2u ? 9u : 27u;
    const uint level = i / uint(4 * COPIES) / power % 3u;
    lut[i] = TQ_LEVEL(level);
  }
  TQ_SYNC();
  const uint copy = tq_lane % uint(COPIES);

  TQ_SHARED(float, partial, PARTIALS);
  const uint part = tq_warp % uint(SPLIT);
  const uint first = (block * uint(WARPS / SPLIT) + tq_warp / uint(SPLIT)) * uint(R);

  float sum[SUMS];
  TQ_UNROLL for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
  const uint steps = (uint(words) + 31u) / 32u;
  for (uint step = part; step < steps; step += uint(SPLIT)) {
    const uint unit = step * 32u + tq_lane;
    const bool inside = unit < uint(words);
    const uint at = inside ? unit : uint(words) - 1u;
    const uint start = at * uint(DIGITS);
    const uint group = start / uint(GROUP);
    const uint next = group + 1u < groups ? group + 1u : group;
    uint code[R];
    float two_scales[R * 2];
    TQ_UNROLL for (int r = 0; r < R; ++r) {
      const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
      code[r] = codes[int(matrix + o) * words + int(at)];
      TQ_UNROLL for (int h = 0; h < 2; ++h) {
        const uint where = (matrix + o) * groups + (h == 0 ? group : next);

      float scale = float(scales[where]);
      if (LOG8) scale = scale == 0.0f ? 0.0f : TQ_EXP2((scale - 240.0f) * 0.0625f);

        two_scales[2 * r + h] = scale;
      }
    }
    TQ_UNROLL for (int q = 0; q < QUADS; ++q) {
      const uint place = start + uint(4 * q);
      const bool used = inside && place < width;
      const bool in_next = place >= (group + 1u) * uint(GROUP);
      float inputs[M * 4];
      TQ_UNROLL for (int m = 0; m < M; ++m) {
        const uint row = first_row + uint(m < ROWS ? m : ROWS - 1);
        TQ_READ_FOUR((inputs + m * 4), x, row * width + (used ? place : 0u));
      }
      TQ_UNROLL for (int i = 0; i < M * 4; ++i) inputs[i] = used ? inputs[i] : 0.0f;
      TQ_UNROLL for (int r = 0; r < R; ++r) {
        const uint rest = code[r] / QUAD;
        const uint key = code[r] - rest * QUAD;
        code[r] = rest;
        float value[4];
        TQ_PICK_QUAD(value, lut, key, COPIES, copy);
        const float scale = two_scales[2 * r + 1];
        const float chosen = in_next ? scale : two_scales[2 * r];
        TQ_UNROLL for (int m = 0; m < M; ++m) {
          float dot = value[0] * inputs[4 * m];
          TQ_UNROLL for (int j = 1; j < 4; ++j) dot += value[j] * inputs[4 * m + j];
          sum[m * R + r] += chosen * dot;
        }
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
