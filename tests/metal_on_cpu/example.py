"""A kernel of real size, for tests of the harness: 4-bit codes with scales times a vector.

It is written as our kernels are: one body in a neutral dialect, a prelude of macros in the header.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

PRELUDE = """
#define SHARED(T, name, n) threadgroup T name[n]
#define SYNC() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SIMD_SUM(v) simd_sum(v)
inline uint nibble(uint word, uint j) { return (word >> (4u * j)) & 15u; }
"""

# 4 simdgroups a threadgroup. Two of them share a row, so their sums meet in threadgroup memory.
BODY = """
    const uint lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup;
    const uint row = 2u * threadgroup_position_in_grid.x + warp / 2u;
    const uint rows = w_shape[0];
    SHARED(float, table, 16);
    SHARED(float, sums, 4);
    if (thread_index_in_threadgroup < 16u)
        table[thread_index_in_threadgroup] = float(codebook[thread_index_in_threadgroup]);
    SYNC();
    float sum = 0.0f;
    if (row < rows) {
        for (uint k = (warp % 2u) * 32u + lane; k < uint(WORDS); k += 64u) {
            const uint word = w[row * WORDS + k];
            float part = 0.0f;
            for (uint j = 0; j < 8u; ++j) part += float(x[8u * k + j]) * table[nibble(word, j)];
            sum += part * float(scales[row * (8 * WORDS / GROUP) + 8u * k / GROUP]);
        }
    }
    sum = SIMD_SUM(sum);
    if (lane == 0u) sums[warp] = sum;
    SYNC();
    if (lane == 0u && warp % 2u == 0u && row < rows) out[row] = T(sums[warp] + sums[warp + 1u]);
"""


def problem(rows, columns, group, dtype):
    """Arguments of the kernel's call, and the product in float64."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (rows, columns))
    words = sum(codes[:, j::8].astype(np.uint32) << np.uint32(4 * j) for j in range(8))
    table, scales, x = (
        mx.array(random.standard_normal(shape)).astype(dtype)
        for shape in ((16,), (rows, columns // group), (columns,))
    )
    table64, scales64, x64 = (
        np.array(a.astype(mx.float32)).astype(np.float64) for a in (table, scales, x)
    )
    expected = (table64[codes] * np.repeat(scales64, group, axis=1)) @ x64
    call = {
        "inputs": [mx.array(words), scales, table, x],
        "template": [("T", dtype), ("WORDS", columns // 8), ("GROUP", group)],
        "grid": ((rows + 1) // 2 * 128, 1, 1),
        "threadgroup": (128, 1, 1),
        "output_shapes": [(rows,)],
        "output_dtypes": [dtype],
    }
    return call, expected


def matvec(body=BODY):
    names = ["w", "scales", "codebook", "x"]
    return mx.fast.metal_kernel(
        name="matvec", input_names=names, output_names=["out"], source=body, header=PRELUDE
    )
