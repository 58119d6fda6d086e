"""The part of the Metal language that the shim knows, checked against numpy and MLX."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest

from metal_on_cpu import missing_compiler, on_cpu, run

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())

AND, XOR = np.bitwise_and.reduce, np.bitwise_xor.reduce
FLOATS = np.random.default_rng(5).standard_normal(32).astype(np.float32) * 3
INTEGERS = np.random.default_rng(1).integers(-50, 50, 32).astype(np.int32)
WORDS = np.array([0, 1, 5, 255, 1000, 0x80000000, 0xFFFFFFFF, 0x12345678] * 4, np.uint32)
HALVES = (mx.float16, mx.bfloat16)


def evaluate(statements, *inputs, size=32, dtype=mx.float32, header="", **more) -> mx.array:
    """`out` after ``statements`` ran in ``size`` threads `i`; inputs are named a, b, c."""
    kernel = mx.fast.metal_kernel(
        name="language",
        input_names=list("abc")[: len(inputs)],
        output_names=["out"],
        source=f"uint i = thread_position_in_grid.x;\n{statements}",
        header=header,
    )
    call = {"grid": (size, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(size,)]}
    return on_cpu(kernel)(inputs=list(inputs), output_dtypes=[dtype], **call, **more)[0]


@functools.cache
def all_of(type_, expressions) -> dict[str, np.ndarray]:
    """The values of ``expressions`` in 32 threads: one kernel for all of them, to compile once."""
    lines = [f"out[{32 * k} + i] = {text};" for k, text in enumerate(expressions)]
    x = {"float": FLOATS, "int": INTEGERS, "uint": WORDS}[type_]
    kernel = mx.fast.metal_kernel(
        name="expressions",
        input_names=["a"],
        output_names=["out"],
        source="\n".join([f"uint i = thread_position_in_grid.x; {type_} x = a[i];", *lines]),
    )
    call = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "inputs": [mx.array(x)]}
    dtype = mx.array(x).dtype
    shape = (len(expressions), 32)
    (out,) = run(kernel, output_shapes=[shape], output_dtypes=[dtype], **call)
    return dict(zip(expressions, out, strict=True))


def random(seed, size=32, dtype=mx.float32) -> mx.array:
    return (mx.random.normal((size,), key=mx.random.key(seed)) * 3).astype(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_arithmetic_rounds_after_every_operation(dtype):
    a, b, c = (random(seed, 512, dtype) for seed in range(3))
    template = [("T", dtype)]
    out = evaluate("out[i] = a[i] * b[i] + c[i] / b[i] - a[i];", a, b, c, size=512, dtype=dtype)
    np.testing.assert_array_equal(out.view(mx.uint16), (a * b + c / b - a).view(mx.uint16))
    out = evaluate(
        "T t = a[i]; t += b[i]; t *= 2; out[i] = -t;",
        a,
        b,
        size=512,
        dtype=dtype,
        template=template,
    )
    np.testing.assert_array_equal(out.view(mx.uint16), (-((a + b) * 2)).view(mx.uint16))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_numbers_become_float_beside_a_float(dtype):
    a, b = random(0, dtype=dtype), random(1)
    out = evaluate("out[i] = a[i] * b[i];", a, b)
    np.testing.assert_array_equal(out, a.astype(mx.float32) * b)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_conversion_from_float_rounds_to_nearest_even_and_keeps_infinity_and_nan(dtype):
    special = [0.0, -0.0, 1e-8, -6e-8, 65504, 65520, 1e38, float("inf"), -float("inf")]
    halfway = [1 + 2.0**-9, 1 + 3 * 2.0**-9, 1 + 2.0**-12, 1 + 3 * 2.0**-12]
    a = mx.concatenate([mx.array(special + halfway + [float("nan")]), random(3, 50)])
    out = evaluate("out[i] = T(a[i]);", a, size=a.size, dtype=dtype, template=[("T", dtype)])
    expected = a.astype(dtype)
    assert mx.array_equal(out, expected, equal_nan=True)


def test_a_literal_without_suffix_is_a_float():
    out = evaluate("out[i] = a[i] * 0.1 + 1.0 / 3;", random(0))
    expected = np.array(random(0)) * np.float32(0.1) + np.float32(1.0) / np.float32(3)
    np.testing.assert_array_equal(out, expected)


OF_FLOATS = {
    "exp(x)": np.exp,
    "metal::exp(x)": np.exp,
    "fast::exp(x)": np.exp,
    "metal::precise::exp(x)": np.exp,
    "exp2(x)": np.exp2,
    "sin(x)": np.sin,
    "cos(x)": np.cos,
    "tan(x)": np.tan,
    "tanh(x)": np.tanh,
    "sinh(x)": np.sinh,
    "atan(x)": np.arctan,
    "log(abs(x))": lambda x: np.log(np.abs(x)),
    "log2(abs(x))": lambda x: np.log2(np.abs(x)),
    "log10(abs(x))": lambda x: np.log10(np.abs(x)),
    "sqrt(abs(x))": lambda x: np.sqrt(np.abs(x)),
    "rsqrt(abs(x))": lambda x: 1 / np.sqrt(np.abs(x)),
    "floor(x) + ceil(x) + trunc(x)": lambda x: np.floor(x) + np.ceil(x) + np.trunc(x),
    "rint(x)": np.rint,
    "round(2.5f)": lambda x: 0 * x + 3,
    "clamp(x, -1.0f, 1.0f)": lambda x: x.clip(-1, 1),
    "select(x, 5.0f, x > 0)": lambda x: np.where(x > 0, 5, x),
    "min(x, 0.5f) + max(x, 0.5f)": lambda x: np.minimum(x, 0.5) + np.maximum(x, 0.5),
    "max(NAN, x)": lambda x: x,
    "fma(x, 2.0f, 1.0f)": lambda x: 2 * x + 1,
    "sign(x) * copysign(3.0f, x)": lambda x: 0 * x + 3,
    "pow(abs(x), 1.5f)": lambda x: np.abs(x) ** 1.5,
    "isnan(x / 0.0f - x / 0.0f) && isinf(x / 0.0f)": lambda x: 0 * x + 1,
    "as_type<float>(as_type<uint>(x) & 0x7fffffffu)": np.abs,
    "metal::numeric_limits<float>::max() > x": lambda x: 0 * x + 1,
    "Limits<bfloat>::min < x && Limits<half>::finite_max > 65503.0f": lambda x: 0 * x + 1,
    "float(half(x)) - float(1.0h)": lambda x: np.float32(np.float16(x)) - 1,
    "float2(x, 1).y + float4(x).w": lambda x: 1 + x,
}


@pytest.mark.parametrize("expression", OF_FLOATS)
def test_expressions(expression):
    out = all_of("float", tuple(OF_FLOATS))[expression]
    np.testing.assert_allclose(out, OF_FLOATS[expression](FLOATS), rtol=4e-6)


OF_WORDS = {
    "popcount(x)": lambda x: x.bit_count(),
    "clz(x)": lambda x: 32 - x.bit_length(),
    "ctz(x)": lambda x: 32 if x == 0 else (x & -x).bit_length() - 1,
    "reverse_bits(x)": lambda x: int(f"{x:032b}"[::-1], 2),
    "rotate(x, 7u)": lambda x: (x << 7 | x >> 25) & 0xFFFFFFFF,
    "extract_bits(x, 5u, 9u)": lambda x: x >> 5 & 511,
    "insert_bits(x, 6u, 4u, 3u)": lambda x: x & ~(7 << 4) | 6 << 4,
    "mulhi(x, 0x9e3779b9u)": lambda x: x * 0x9E3779B9 >> 32,
    "absdiff(x, 1000u)": lambda x: abs(x - 1000),
    "as_type<ushort2>(x).y": lambda x: x >> 16,
    "as_type<uchar4>(x)[2]": lambda x: x >> 16 & 255,
    "uint(uchar(x) + ushort(1))": lambda x: (x & 255) + 1,
}


@pytest.mark.parametrize("expression", OF_WORDS)
def test_integers(expression):
    out = all_of("uint", tuple(OF_WORDS))[expression]
    assert out.tolist() == [OF_WORDS[expression](int(x)) for x in WORDS]


def test_vectors():
    statements = """
    float4 v = float4(a[i], 2, 3, 4), w = v * 2 + float4(float2(1), float2(2));
    v.xy = w.zw;
    half4 h = half4(v);
    h.x += 1;
    uint3 u = uint3(1, 2, 3) << 2;
    bool good = all(v == float4(8, 10, 3, 4)) && any(w < 3.0f) && sizeof(float3) == 16
        && dot(w, float4(1)) == 2 * a[i] + 24 && float(h.x) == 9 && v.xyz[2] == 3 && -u.y + 8 == 0u
        && length(float2(3, 4)) == 5 && max(v, w).w == 10;
    out[i] = good;
    """
    assert evaluate(statements, mx.full((32,), -1.0)).min() == 1


def test_a_vector_read_and_written_through_a_pointer():
    statements = """
    const device float4* in = (const device float4*)a;
    if (i < 8) ((device float4*)out)[i] = in[i].x + in[7 - i];
    """
    x = np.array(random(2))
    expected = x.reshape(8, 4)[:, :1] + x.reshape(8, 4)[::-1]
    np.testing.assert_array_equal(evaluate(statements, mx.array(x)), expected.reshape(-1))


def test_what_a_header_may_hold():
    header = """
    #include <metal_stdlib>
    #include <metal_simdgroup>
    using namespace metal;
    #define TWICE(x) \\
        (2 * (x))
    constexpr constant float TABLE[4] = {1, 2, 3, 4};
    struct Pair { float a, b; };
    template <typename T, typename P> METAL_FUNC T total(P values, uint n) {
        T sum = T(0);
        MLX_MTL_PRAGMA_UNROLL
        for (uint k = 0; k < n; ++k) sum += values[k];
        return sum;
    }
    inline float shared_total(threadgroup const float* values, thread Pair& pair) {
        pair.b = values[1];
        return values[0] + values[1];
    }
    #if __METAL_VERSION__ < 300
    #error "too old"
    #endif
    """
    statements = """
    threadgroup float s[2][3], one;
    if (i < 6) s[i / 3][i % 3] = TABLE[i % 4];
    if (i == 6) one = a[6];
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    threadgroup const float* row = s[1]; thread Pair pair = {0, 0};
    float local[3] = {1, 2, 3};
    out[i] = TWICE(total<float>(a, 2)) + one + shared_total(row, pair) + pair.b
        + total<int>(local, 3);
    """
    x = np.arange(32, dtype=np.float32)
    assert evaluate(statements, mx.array(x), header=header)[0] == 2 * 1 + 6 + (4 + 1) + 1 + 6


@pytest.mark.parametrize(
    "declaration",
    [
        "threadgroup float s[X > 1 ? Y : 1];",
        "threadgroup float s[X < 2 ? 1 : Y];",
        "threadgroup float s[X >= 2 ? Y : 1];",
        "threadgroup float s[X <= 2 ? Y : 1];",
        "threadgroup float s[X == 2 ? Y : 1];",
        "threadgroup float s[1 << 5], other[Y >> 2][X < 2 ? 1 : 3];",
        "threadgroup metal::vec<float, (X > 1 ? 2 : 4)> pairs[X < 2 ? 1 : 3], other; "
        "threadgroup float s[(Y << X) >> X];",
    ],
)
def test_the_size_of_a_threadgroup_array_is_any_constant_expression(declaration):
    """Comparisons and shifts are no brackets: all threads must see one array."""
    statements = f"""
    {declaration}
    s[i] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = s[31 - i];
    """
    x = random(4)
    np.testing.assert_array_equal(evaluate(statements, x, template=[("X", 2), ("Y", 32)]), x[::-1])


OF_LANES = {
    "simd_sum(x)": lambda x, i: x.sum(),
    "simd_product(i < 3 ? x : 1)": lambda x, i: x[:3].prod(),
    "simd_max(x) - simd_min(x)": lambda x, i: x.max() - x.min(),
    "simd_or(1 << (i % 8))": lambda x, i: 255,
    "simd_and(x | 64) & simd_xor(x)": lambda x, i: AND(x | 64) & XOR(x),
    "simd_shuffle(x, ushort((i * 7) % 32))": lambda x, i: x[i * 7 % 32],
    "simd_shuffle_xor(x, 5)": lambda x, i: x[i ^ 5],
    "simd_shuffle_down(x, 3)": lambda x, i: x[i + 3] if i + 3 < 32 else x[i],
    "simd_shuffle_up(x, 3)": lambda x, i: x[i - 3] if i >= 3 else x[i],
    "simd_shuffle_rotate_down(x, 3)": lambda x, i: x[(i + 3) % 32],
    "simd_shuffle_rotate_up(x, 3)": lambda x, i: x[(i - 3) % 32],
    "simd_broadcast(x, 9)": lambda x, i: x[9],
    "simd_broadcast_first(x)": lambda x, i: x[0],
    "simd_prefix_inclusive_sum(x)": lambda x, i: x[: i + 1].sum(),
    "simd_prefix_exclusive_sum(x)": lambda x, i: x[:i].sum(),
    "int(ulong(simd_ballot(i < 4)))": lambda x, i: 15,
    "int(simd_any(i == 3)) * 2 + simd_all(i < 31)": lambda x, i: 2,
    "simd_sum(float2(x, 1)).y": lambda x, i: 32,
    "int(simd_is_first())": lambda x, i: int(i == 0),
}


@pytest.mark.parametrize("expression", OF_LANES)
def test_simdgroup_operations(expression):
    out = all_of("int", tuple(OF_LANES))[expression]
    assert out.tolist() == [OF_LANES[expression](INTEGERS, i) for i in range(32)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_simd_operations_keep_16_bits(dtype):
    x = random(7, dtype=dtype)
    out = evaluate("out[i] = simd_max(a[i]);", x, dtype=dtype)
    assert mx.array_equal(out, mx.full((32,), x.max(), dtype=dtype))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("add", 4960), ("max", 31 * 10), ("min", 0), ("or", 510), ("xor", 0), ("sub", -4960)],
)
def test_atomics_on_threadgroup_memory(name, expected):
    statements = f"""
    threadgroup atomic_int n;
    if (i == 0) atomic_store_explicit(&n, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_{name}_explicit(&n, a[0] + int(i) * 10, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = atomic_load_explicit(&n, memory_order_relaxed);
    """
    values = [i * 10 for i in range(32)]
    wanted = {"or": np.bitwise_or.reduce(values), "xor": np.bitwise_xor.reduce(values)}
    out = evaluate(statements, mx.array([0]), dtype=mx.int32)
    assert out.tolist() == [wanted.get(name, expected)] * 32


def test_an_atomic_exchange_that_depends_on_the_old_value():
    source = """
    int seen = 0;
    while (!atomic_compare_exchange_weak_explicit(
        &out[0], &seen, seen + a[0], memory_order_relaxed, memory_order_relaxed));
    """
    kernel = mx.fast.metal_kernel(
        name="cas", input_names=["a"], output_names=["out"], source=source, atomic_outputs=True
    )
    call = {"grid": (40, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(1,)]}
    (out,) = run(kernel, inputs=[mx.array([3])], output_dtypes=[mx.int32], init_value=0, **call)
    assert out[0] == 120
