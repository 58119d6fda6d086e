"""Random packed weights, and the two ways in which tests run kernels.

Where the default device is a GPU, kernels run on it. Elsewhere their Metal text runs on the CPU
(see ``metal_on_cpu``), and so does their CUDA text, with CUDA's functions put in terms of Metal's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.kernels import dispatch, expand, kv_selection, matvec, selection
from turboquant_mlx.kernels.dialect import Dialect, Kernel, stand_in
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import PackedWeight, dequantize_numpy

ON_GPU = mx.default_device().type == mx.DeviceType.gpu

# Relative error of a whole result. float32: other orders of at most some thousand additions, and
# 2**x to a few units in the last place. Else the worst rounding of a single element, of which the
# roundings of all results together come to half.
BOUNDS = {mx.float32: 2e-6, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


Code = tuple[int, int] | str
"""Bits and bits of the window, or "ternary"."""

CODES: list[Code] = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8)]
CODES += [(2, 8), (3, 8), (4, 8), (2, 5), (3, 12), "ternary"]


def spec_of(code: Code, **more) -> QuantSpec:
    if code == "ternary":
        return QuantSpec(code="ternary", **{**more, "tile": 0})
    bits, window = code
    return QuantSpec(bits=bits, window_bits=window, **more)


def packed(spec: QuantSpec, *shape: int, seed: int = 0) -> PackedWeight:
    """Random codes, scales (some zero) and table; nothing was quantized."""
    rng = np.random.default_rng([seed, *shape])
    *rows, width = shape
    words = spec.words_per_row(width)
    codes = rng.integers(0, 2**32, (*rows, words), dtype=np.uint32)
    if spec.code == "ternary":
        codes = rng.integers(0, 3**20, (*rows, words), dtype=np.uint32)
    elif width * spec.bits % 32:
        codes[..., -1] &= np.uint32((1 << (width * spec.bits % 32)) - 1)
    groups = (*rows, width // spec.group_size)
    if spec.scale_layout == "log8":
        scales = rng.integers(170, 241, groups).astype(np.uint8)
    else:
        scales = rng.uniform(0.1, 1, groups).astype(np.float16)
    scales[rng.random(groups) < 0.05] = 0
    weight = PackedWeight(
        spec=spec,
        shape=shape,
        codes=mx.array(codes),
        scales=mx.array(scales),
        table=mx.array(rng.standard_normal(spec.table_size).astype(np.float32)),
        multiplier=mx.ones((width,), mx.float16),
    )
    if spec.qjl:
        signs = rng.integers(0, 2**32, (*rows, -(-width // 32)), dtype=np.uint32)
        weight.qjl_codes = mx.array(signs)
        weight.qjl_norms = mx.array(rng.uniform(0.5, 2, tuple(rows)).astype(np.float16))
        weight.qjl_multiplier = mx.array(rng.choice([-1.0, 1.0], width).astype(np.float16))
    return weight


def activation(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 1) -> mx.array:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def dense(weight: PackedWeight, use_qjl: bool = True) -> np.ndarray:
    """The decoded weight in the stored domain: float64 of the weight's shape."""
    rows = math.prod(weight.shape[:-1])
    values = dequantize_numpy(weight, 0, rows, rotated=True, use_qjl=use_qjl)
    return values.astype(np.float64).reshape(weight.shape)


def as_double(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def assert_close(got: mx.array, expected: np.ndarray, dtype: mx.Dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == expected.shape
    distance = np.linalg.norm(as_double(got) - expected)
    assert distance <= BOUNDS[dtype] * np.linalg.norm(expected)


def assert_product(got: mx.array, x: mx.array, weight: PackedWeight, use_qjl: bool = True) -> None:
    """That ``got`` is ``x W'^T``, in the dtype of ``x``.

    Where products happen to cancel, the error is measured by what independent numbers of these
    sizes would give.
    """
    matrix, values = dense(weight, use_qjl), as_double(x)
    expected = values @ matrix.T
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    typical = np.linalg.norm(matrix) * np.linalg.norm(values) / matrix.shape[-1] ** 0.5
    distance = np.linalg.norm(as_double(got) - expected)
    # Where matrix units multiply, the few levels of a table are rounded as well, and all weights of
    # a level with it in one direction.
    by_matrix_units = x.dtype != mx.float32 and weight.spec.bits <= 4
    bound = BOUNDS[x.dtype] * (2 if by_matrix_units else 1)
    assert distance <= bound * max(typical, np.linalg.norm(expected))


def all_pairs(**axes: list) -> Iterator[dict]:
    """Few combinations in which every two values of two axes meet, the same ones each time."""
    names = list(axes)
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    rng = np.random.default_rng(0)

    def pairs(row: tuple[int, ...]) -> set:
        combinations = itertools.combinations(enumerate(row), 2)
        return {(a, i, b, j) for (a, i), (b, j) in combinations} & left

    while left:
        a, i, b, j = min(left)
        best: tuple[int, ...] = ()
        for _ in range(40):
            row = [int(rng.integers(len(axes[name]))) for name in names]
            row[a], row[b] = i, j
            if not best or len(pairs(tuple(row))) > len(pairs(best)):
                best = tuple(row)
        left -= pairs(best)
        yield {name: axes[name][value] for name, value in zip(names, best, strict=True)}


def each_of_all(axes: dict[str, list], *names: str) -> Iterator[dict]:
    """All combinations of the values of some axes; the other axes take turns."""
    others = [name for name in axes if name not in names]
    for turn, values in enumerate(itertools.product(*(axes[name] for name in names))):
        case = dict(zip(names, values, strict=True))
        # steps that have no divisor in common with the lengths of axes
        for step, name in zip((1, 7, 11, 13, 17), others, strict=False):
            case[name] = axes[name][turn * step // 2 % len(axes[name])]
        yield {name: case[name] for name in axes if name in case}


def name_of(case: dict) -> str:
    """The values of a case, for the name of a test."""
    return "-".join(map(str, case.values()))


@contextlib.contextmanager
def counting(launches: list[str]) -> Iterator[None]:
    """Note the names of kernels as they are launched."""
    launch = Kernel.launch

    def noted(self, *args, **kwargs):
        launches.append(self.name)
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", noted)
        yield


@contextlib.contextmanager
def running(dialect: Dialect) -> Iterator[None]:
    """Let the kernels of a dialect run, on the GPU or on the CPU."""
    with dispatch.force_backend(dialect):
        if ON_GPU:
            yield
            return
        from metal_on_cpu import missing_compiler, on_cpu

        if missing_compiler():
            pytest.skip(missing_compiler())

        def make(kernel: Kernel, dialect: Dialect):
            return on_cpu(kernel.build("metal") if dialect == "metal" else cuda_in_metal(kernel))

        with stand_in(make), _metal_limits():
            yield


@contextlib.contextmanager
def _metal_limits() -> Iterator[None]:
    """CUDA blocks may have more shared memory than the Metal that stands for it."""
    before = selection.TABLE_BYTES["cuda"], kv_selection.SHARED_BYTES["cuda"]
    selection.TABLE_BYTES["cuda"] = 16 * 2**10
    kv_selection.SHARED_BYTES["cuda"] = 24 * 2**10
    try:
        yield
    finally:
        selection.TABLE_BYTES["cuda"], kv_selection.SHARED_BYTES["cuda"] = before
        matvec.plan.cache_clear()
        expand.template.cache_clear()


def dialects() -> list[Dialect]:
    """Those that can run here."""
    if not ON_GPU:
        return ["metal", "cuda"]
    return ["metal"] if mx.metal.is_available() else ["cuda"]


# CUDA's types and functions as our bodies use them, in Metal with the CPU's C++ types.
_CUDA_IN_METAL = """
#define __device__
#define __forceinline__ inline
#define __shared__ threadgroup
#define __align__(n)
#define __syncthreads() threadgroup_barrier(mem_flags::mem_threadgroup)
#define __shfl_xor_sync(lanes, value, mask) simd_shuffle_xor(value, ushort(mask))
#define __shfl_sync(lanes, value, lane) simd_shuffle(value, ushort(lane))
#define __any_sync(lanes, x) int(simd_any(x))
#define __syncwarp() simdgroup_barrier(mem_flags::mem_threadgroup)
#define __uint_as_float(x) as_type<float>(x)
#define threadIdx thread_position_in_threadgroup
#define blockIdx threadgroup_position_in_grid
typedef half __half;
typedef bfloat __nv_bfloat16;
struct __half2 { half x, y; };
struct __nv_bfloat162 { bfloat x, y; };
inline __half2 __floats2half2_rn(float x, float y) { return __half2{half(x), half(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return __nv_bfloat162{bfloat(x), bfloat(y)};
}
inline uint __float_as_uint(float x) { return as_type<uint>(x); }
inline float fabsf(float x) { return abs(x); }
inline float fmaxf(float x, float y) { return max(x, y); }
inline uint __byte_perm(uint a, uint b, uint) { return (a & 0xffffu) | (b << 16); }  // 0x5410
inline float2 __half22float2(__half2 v) { return float2(float(v.x), float(v.y)); }
inline float2 make_float2(float x, float y) { return float2(x, y); }
inline float4 make_float4(float x, float y, float z, float w) { return float4(x, y, z, w); }
inline float exp2f(float x) { return exp2(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline uint __funnelshift_r(uint low, uint high, uint shift) {
  return uint(((ulong(high) << 32) | ulong(low)) >> (shift & 31u));
}
inline uint __dp4a(uint a, uint b, uint c) {
  for (int i = 0; i < 32; i += 8) c += ((a >> i) & 255u) * ((b >> i) & 255u);
  return c;
}
// The matrix units' product, by its definition: lanes hold pairs of a row of a, of a column of b.
inline float pair_product(const char* type, uint a, uint b) {
  if (type[0] == 'b') {
    const bfloat2 p = as_type<bfloat2>(a), q = as_type<bfloat2>(b);
    return float(p.x) * float(q.x) + float(p.y) * float(q.y);
  }
  const half2 p = as_type<half2>(a), q = as_type<half2>(b);
  return float(p.x) * float(q.x) + float(p.y) * float(q.y);
}
inline void tensor_product(const char* type, uint lane, float* sums, const uint* a, const uint* b) {
  for (uint q = 0; q < 4; ++q) {
    for (uint half_of = 0; half_of < 2; ++half_of) {
      const uint row = lane / 4 * 4 + q, column = lane % 4 * 8 + q;
      const uint upper = simd_shuffle(a[2 * half_of], ushort(row));
      const uint lower = simd_shuffle(a[2 * half_of + 1], ushort(row));
      const uint one = simd_shuffle(b[half_of], ushort(column));
      const uint two = simd_shuffle(b[half_of], ushort(column + 4));
      sums[0] += pair_product(type, upper, one);
      sums[1] += pair_product(type, upper, two);
      sums[2] += pair_product(type, lower, one);
      sums[3] += pair_product(type, lower, two);
    }
  }
}
#define TQ_TENSOR(type, sums, a0, a1, a2, a3, b0, b1) \\
  { \\
    const uint a_of[4] = {a0, a1, a2, a3}, b_of[2] = {b0, b1}; \\
    tensor_product(type, msl_lane(), sums, a_of, b_of); \\
  }
// A lane holds the elements 2 c and 2 c + 1 of row r, c its number modulo 4, r that divided by 4.
inline uint transposed(uint value, uint lane) {
  const uint from = lane % 4 * 8 + lane / 8, side = lane / 4 % 2 * 16;
  const uint low = simd_shuffle(value, ushort(from)) >> side;
  const uint high = simd_shuffle(value, ushort(from + 4)) >> side;
  return (low & 0xffffu) | (high << 16);
}
#define TQ_TRANSPOSE(value) transposed(value, msl_lane())
#define TQ_TABLE(name, pointer) const threadgroup uint* name = pointer
#define TQ_PICK(table, word, shift, bits, copies) \\
  table[(((word) >> (shift)) & ((1u << (bits)) - 1u)) * uint(copies)]
#define TQ_SELECT(mask, a, b) (((a) & (mask)) | ((b) & ~(mask)))
#define TQ_FAST_EXP2(x) exp2(x)
"""


@functools.cache
def cuda_in_metal(kernel: Kernel):
    """A Metal kernel whose text is the CUDA rendering (it names Metal's attributes once)."""
    header = kernel.header("cuda").replace("#include", "//")
    return mx.fast.metal_kernel(
        name=kernel.name + "_cuda",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source="// thread_position_in_threadgroup threadgroup_position_in_grid\n"
        + kernel.source("cuda"),
        header=_CUDA_IN_METAL + header,
    )
