"""A kernel of real size against numpy in three types, and with oversights planted in it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal_on_cpu import KernelFault, missing_compiler, run
from metal_on_cpu.example import BODY, matvec, problem

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())

# One rounding of the result to T, and sums of 512 products in another order.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(64, 512, 64), (37, 256, 32), (1, 128, 128)]
)
def test_the_product_is_the_one_of_numpy(rows, columns, group, dtype):
    call, expected = problem(rows, columns, group, dtype)
    (out,) = run(matvec(), **call)
    worst = np.abs(out - expected).max() / np.abs(expected).max()
    assert worst < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        ("if (row < rows) {", "{", "bounds"),
        ("if (lane == 0u) sums[warp] = sum;", "sums[warp] = sum;", "race"),
        ("SYNC();\n    float sum", "float sum", "uninitialised"),
        ("sum = SIMD_SUM(sum);", "if (row < rows) sum = SIMD_SUM(sum); else return;", "barrier"),
        ("&& row < rows) out[row]", ") out[row]", "bounds"),
    ],
    ids=[
        "rows past the end",
        "all lanes write",
        "no barrier",
        "early return",
        "write past the end",
    ],
)
def test_an_oversight_in_it_is_found(right, wrong, kind):
    assert right in BODY
    call, _ = problem(37, 256, 32, mx.float16)
    with pytest.raises(KernelFault) as caught:
        run(matvec(BODY.replace(right, wrong)), **call)
    assert caught.value.kind == kind
