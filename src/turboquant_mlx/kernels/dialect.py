"""One kernel body, rendered for Metal and for CUDA.

A body is plain C++ that both compilers take, with a few macros for what differs:

===================== =============================================================================
``TQ_SHARED(T, n, c)`` an array of the threadgroup (block): ``T n[c]``
``TQ_SYNC()``          barrier of the threadgroup
``TQ_IN(T), TQ_OUT(T)`` pointers to an input of at least eight elements, and to an output
``TQ_SHUFFLE_XOR``     exchange within 32 lanes
``TQ_FUNNEL(a, b, s)`` bits s .. s + 31 of the 64-bit number whose low half is a; s below 32
``TQ_EXP2(x)``         2**x for |x| < 100, to a few units in the last place
``TQ_READ``            ``TQ_READ(to, count, from, offset)``: consecutive elements, as float
``TQ_WRITE``           ``TQ_WRITE(to, offset, values, count)``: consecutive floats, as ``T``
``TQ_PICK_BYTE``       the entry of a table that byte j of a word names
``TQ_PICK_PAIR``       the two entries that some bits of a word name together
``TQ_UNROLL``          before a loop whose bounds are constants
===================== =============================================================================

``tq_tid``, ``tq_lane``, ``tq_warp``, ``tq_bx`` and ``tq_by`` say where a thread is. Rules for
bodies: threadgroups are one-dimensional and multiples of 32; nobody returns before a barrier;
every access is checked against its bounds, for CUDA rounds the grid up; no pointer to an input of
fewer than eight elements (those lie in another address space on Metal); at most 32 KiB of shared
memory.

Tables that all lanes look up at once are stored in several copies side by side, entry by entry, so
that lanes with different copies never meet in one memory bank.

Kernels are specialised by template arguments, which become constants in their text, and built once
for each back-end; MLX compiles each specialisation at its first use and keeps it. (MLX has template
arguments as well, but goes through those of every call with a regular expression, which takes as
long as all the rest of a call.) MLX also assembles the text at each call and hashes it at each
evaluation, so for CUDA it is in files (``text_files``), without comments and indentation and with
no more of the prelude than the kernel uses.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx

from .text_files import shortened

Dialect = Literal["metal", "cuda"]

_METAL_PRELUDE = """
#define TQ_UNROLL MLX_MTL_PRAGMA_UNROLL
#define TQ_SHARED(T, name, count) threadgroup T name[count]
#define TQ_IN(T) const device T*
#define TQ_OUT(T) device T*
#define TQ_SYNC() threadgroup_barrier(mem_flags::mem_threadgroup)
#define TQ_SHUFFLE_XOR(value, mask) simd_shuffle_xor(value, ushort(mask))
#define TQ_FUNNEL(low, high, shift) \\
  (((low) >> (shift)) | (((high) << 1) << (31u - (shift))))
#define TQ_EXP2(x) exp2(x)
#define TQ_READ(to, count, from, offset) \\
  TQ_UNROLL for (int tq_i = 0; tq_i < (count); ++tq_i) to[tq_i] = float(from[(offset) + tq_i])
#define TQ_WRITE(to, offset, values, count) \\
  TQ_UNROLL for (int tq_i = 0; tq_i < (count); ++tq_i) to[(offset) + tq_i] = T(values[tq_i])
#define TQ_PICK_BYTE(table, word, j, copies, copy) \\
  table[(((word) >> (8 * (j))) & 255u) * (copies) + (copy)]
#define TQ_PICK_PAIR(first, second, table, word, shift, bits, copies, copy) \\
  { \\
    const uint tq_key = ((word) >> (shift)) & ((1u << (bits)) - 1u); \\
    const uint tq_slot = (tq_key * uint(copies) + (copy)) * 2u; \\
    first = table[tq_slot]; \\
    second = table[tq_slot + 1u]; \\
  }
"""

_METAL_PROLOGUE = """
  const uint tq_tid = thread_index_in_threadgroup;
  const uint tq_lane = thread_index_in_simdgroup;
  const uint tq_warp = simdgroup_index_in_threadgroup;
  const uint tq_bx = threadgroup_position_in_grid.x;
  const uint tq_by = threadgroup_position_in_grid.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;
"""

# Byte offsets into shared memory are built with one instruction where that is possible: the dot
# product of four bytes picks a byte, multiplies it by the size of a row of copies and adds the
# offset of this lane's copy.
_CUDA_PRELUDE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int tq_uint;
#define uint tq_uint
#define TQ_UNROLL _Pragma("unroll")
#define TQ_SHARED(T, name, count) __shared__ __align__(16) T name[count]
#define TQ_IN(T) const T*
#define TQ_OUT(T) T*
#define TQ_SYNC() __syncthreads()
#define TQ_SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define TQ_FUNNEL(low, high, shift) __funnelshift_r(low, high, shift)
#define TQ_EXP2(x) exp2f(x)
"""

# Parts of the prelude that a kernel has if its text names what they are for.
_CUDA_PARTS = [
    (
        r"\btq_widen\b|\bTQ_READ\b|\btq_read\b",
        """
__device__ __forceinline__ float2 tq_widen(const __half*, tq_uint v) {
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}
__device__ __forceinline__ float2 tq_widen(const __nv_bfloat16*, tq_uint v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
""",
    ),
    (
        r"\bTQ_READ\b|\btq_read\b",
        """
template <int N>
__device__ __forceinline__ void tq_read(float* to, const float* from) {
  if ((reinterpret_cast<size_t>(from) & 15u) == 0u) {
    TQ_UNROLL for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      to[i] = v.x; to[i + 1] = v.y; to[i + 2] = v.z; to[i + 3] = v.w;
    }
  } else {
    TQ_UNROLL for (int i = 0; i < N; ++i) to[i] = from[i];
  }
}
template <int N, typename S>
__device__ __forceinline__ void tq_read(float* to, const S* from) {
  if ((reinterpret_cast<size_t>(from) & 15u) == 0u) {
    TQ_UNROLL for (int i = 0; i < N; i += 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i);
      float2 f = tq_widen(from, v.x); to[i] = f.x; to[i + 1] = f.y;
      f = tq_widen(from, v.y); to[i + 2] = f.x; to[i + 3] = f.y;
      f = tq_widen(from, v.z); to[i + 4] = f.x; to[i + 5] = f.y;
      f = tq_widen(from, v.w); to[i + 6] = f.x; to[i + 7] = f.y;
    }
  } else {
    TQ_UNROLL for (int i = 0; i < N; ++i) to[i] = float(from[i]);
  }
}
#define TQ_READ(to, count, from, offset) tq_read<count>(to, from + (offset))
""",
    ),
    (
        r"\bTQ_WRITE\b|\btq_write\b",
        """
template <int N>
__device__ __forceinline__ void tq_write(float* to, const float* values) {
  TQ_UNROLL for (int i = 0; i < N; i += 4) {
    *reinterpret_cast<float4*>(to + i) =
        make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
  }
}
template <int N, typename S>
__device__ __forceinline__ void tq_write(S* to, const float* values) {
  TQ_UNROLL for (int i = 0; i < N; i += 8) {
    __align__(16) S part[8];
    TQ_UNROLL for (int j = 0; j < 8; ++j) part[j] = S(values[i + j]);
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(part);
  }
}
#define TQ_WRITE(to, offset, values, count) tq_write<count>(to + (offset), values)
""",
    ),
    (
        r"\bTQ_PICK_PAIR\b|\bTQ_PICK_WORD\b|\btq_shifted\b",
        """
// `shift` is a constant after unrolling, so the compiler sees through these conditions.
__device__ __forceinline__ tq_uint tq_shifted(
    tq_uint word, int shift, int bits, int size, tq_uint low) {
  if (bits == 8 && size < 256 && shift % 8 == 0) return __dp4a(word, tq_uint(size) << shift, low);
  const int log = 31 - __clz(size);
  const tq_uint mask = ((1u << bits) - 1u) << log;
  return ((shift >= log ? word >> (shift - log) : word << (log - shift)) & mask) | low;
}
""",
    ),
    (
        r"\bTQ_PICK_BYTE\b",
        """
#define TQ_PICK_BYTE(table, word, j, copies, copy) \\
  (*reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + \\
      __dp4a(word, (4u * (copies)) << (8 * (j)), 4u * (copy))))
""",
    ),
    (
        r"\bTQ_PICK_PAIR\b",
        """
#define TQ_PICK_PAIR(first, second, table, word, shift, bits, copies, copy) \\
  { \\
    const float2 tq_pair = *reinterpret_cast<const float2*>( \\
        reinterpret_cast<const char*>(table) + \\
        tq_shifted(word, shift, bits, 8 * (copies), 8u * (copy))); \\
    first = tq_pair.x; \\
    second = tq_pair.y; \\
  }
""",
    ),
    (
        r"\bTQ_PICK_WORD\b",
        """
#define TQ_PICK_WORD(table, word, shift, bits, copies, copy) \\
  (*reinterpret_cast<const tq_uint*>(reinterpret_cast<const char*>(table) + \\
      tq_shifted(word, shift, bits, 4 * (copies), 4u * (copy))))
""",
    ),
    (
        r"\btq_narrow\b|\btq_read_pairs\b",
        """
__device__ __forceinline__ tq_uint tq_narrow(const __half*, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const tq_uint*>(&pair);
}
__device__ __forceinline__ tq_uint tq_narrow(const __nv_bfloat16*, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const tq_uint*>(&pair);
}
""",
    ),
    (
        r"\btq_read_pairs\b",
        """
template <int N, typename S>
__device__ __forceinline__ void tq_read_pairs(tq_uint* to, const S* from) {
  if ((reinterpret_cast<size_t>(from) & 15u) == 0u) {
    TQ_UNROLL for (int i = 0; i < N / 2; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + 2 * i);
      to[i] = v.x; to[i + 1] = v.y; to[i + 2] = v.z; to[i + 3] = v.w;
    }
  } else {
    TQ_UNROLL for (int i = 0; i < N / 2; ++i) {
      to[i] = tq_narrow(from, float(from[2 * i]), float(from[2 * i + 1]));
    }
  }
}
""",
    ),
    (
        r"\btq_tensor\b|\bTQ_TENSOR\b",
        """
#ifndef TQ_TENSOR
#define TQ_TENSOR(type, sums, a0, a1, a2, a3, b0, b1) \\
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 " \\
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \\
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \\
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
#endif
// sums += a b for a 16 by 16 and b 16 by 8, spread over the lanes as PTX defines it
__device__ __forceinline__ void tq_tensor(const __half*, float* sums, tq_uint a0, tq_uint a1,
                                          tq_uint a2, tq_uint a3, tq_uint b0, tq_uint b1) {
  TQ_TENSOR("f16", sums, a0, a1, a2, a3, b0, b1);
}
__device__ __forceinline__ void tq_tensor(const __nv_bfloat16*, float* sums, tq_uint a0,
                                          tq_uint a1, tq_uint a2, tq_uint a3, tq_uint b0,
                                          tq_uint b1) {
  TQ_TENSOR("bf16", sums, a0, a1, a2, a3, b0, b1);
}
""",
    ),
]

_CUDA_PROLOGUE = """
  const uint tq_tid = threadIdx.x;
  const uint tq_lane = tq_tid & 31u;
  const uint tq_warp = tq_tid >> 5;
  const uint tq_bx = blockIdx.x;
  const uint tq_by = blockIdx.y;
  (void)tq_tid; (void)tq_lane; (void)tq_warp; (void)tq_bx; (void)tq_by;
"""

_TYPES: dict[Dialect, dict[mx.Dtype, str]] = {
    "metal": {
        mx.float16: "float16_t",
        mx.bfloat16: "bfloat16_t",
        mx.float32: "float",
        mx.uint8: "uint8_t",
    },
    "cuda": {
        mx.float16: "__half",
        mx.bfloat16: "__nv_bfloat16",
        mx.float32: "float",
        mx.uint8: "unsigned char",
    },
}
_PROLOGUES = {"metal": _METAL_PROLOGUE, "cuda": _CUDA_PROLOGUE}

Template = Sequence[tuple[str, Any]]
Call = Callable[..., list[mx.array]]


@dataclass(frozen=True)
class Kernel:
    """A kernel before it has a dialect.

    Attributes:
        name: C identifier; one body, one name.
        inputs: names of the inputs as the body uses them.
        outputs: names of the outputs.
        body: what the function does, see the module's description.
        metal, cuda: what this kernel alone needs before its function, in each dialect.
        constants: the template arguments of a specialisation.
        family: name of the kernel that this one specialises; "" if it is none.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    metal: str = ""
    cuda: str = ""
    constants: tuple[tuple[str, Any], ...] = ()
    family: str = ""
    _built: dict[str, Call] = field(default_factory=dict, repr=False, compare=False)
    _special: dict[int, tuple[Kernel, Template]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def header(self, dialect: Dialect) -> str:
        """What comes before the function."""
        if dialect == "metal":
            return _METAL_PRELUDE + self.metal
        text = self.cuda + self.body
        parts = [part for names, part in _CUDA_PARTS if re.search(names, text)]
        return _CUDA_PRELUDE + "".join(parts) + self.cuda

    def source(self, dialect: Dialect) -> str:
        """What comes between the function's braces."""
        return self._constants_in(dialect) + _PROLOGUES[dialect] + self.body

    def _constants_in(self, dialect: Dialect) -> str:
        lines = []
        for name, value in self.constants:
            if isinstance(value, mx.Dtype):
                lines.append(f"  using {name} = {_TYPES[dialect][value]};\n")
            else:
                kind = "bool" if isinstance(value, bool) else "int"
                lines.append(f"  constexpr {kind} {name} = {str(value).lower()};\n")
        return "".join(lines)

    def specialised(self, template: Template) -> Kernel:
        """This kernel with template arguments as constants; the same one for the same object."""
        if not template:
            return self
        found = self._special.get(id(template))
        if found is None:
            values = "_".join(f"{name}={value}" for name, value in template)
            digest = hashlib.sha256(values.encode()).hexdigest()[:16]
            kernel = replace(
                self,
                name=f"{self.name}_{digest}",
                constants=tuple(template),
                family=self.name,
                _built={},
                _special={},
            )
            # the template is held, so that no other gets its id
            found = self._special[id(template)] = (kernel, template)
        return found[0]

    def build(self, dialect: Dialect) -> Call:
        """MLX's own kernel object, made once.

        Raises:
            RuntimeError: for "cuda", where MLX has no CUDA.
        """
        if dialect not in self._built:
            make: Any = mx.fast.metal_kernel if dialect == "metal" else mx.fast.cuda_kernel
            source, header = self.source(dialect), self.header(dialect)
            if dialect == "cuda":
                header, source = shortened(compact(header), compact(source), self.inputs)
            self._built[dialect] = make(
                name=self.name,
                input_names=list(self.inputs),
                output_names=list(self.outputs),
                source=source,
                header=header,
            )
        return self._built[dialect]

    def launch(
        self,
        dialect: Dialect,
        inputs: Sequence[mx.array],
        *,
        template: Template,
        groups: tuple[int, int],
        threads: int,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Run ``groups[0]`` by ``groups[1]`` threadgroups of ``threads`` threads.

        Args:
            dialect: "metal" or "cuda".
            inputs: in the order of ``self.inputs``.
            template: names and values of the template arguments. Each object makes a specialisation
                of its own, so the caller keeps it and passes the same again.
            shapes, dtypes: of the outputs.

        Returns:
            the outputs, lazy.
        """
        make = getattr(_local, "stand_in", None)
        kernel = self.specialised(template)
        call = kernel.build(dialect) if make is None else make(kernel, dialect)
        return call(
            inputs=inputs,
            grid=(groups[0] * threads, groups[1], 1),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )


def compact(text: str) -> str:
    """C++ without comments, indentation and empty lines."""
    lines = (re.sub(r"//.*", "", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line) + "\n"


_local = threading.local()


@contextmanager
def stand_in(make: Callable[[Kernel, Dialect], Call]) -> Iterator[None]:
    """Call ``make(kernel, dialect)`` in place of every kernel of MLX's in this thread.

    For tests: it lets kernels run where there is no GPU.
    """
    previous = getattr(_local, "stand_in", None)
    _local.stand_in = make
    try:
        yield
    finally:
        _local.stand_in = previous


def has_stand_in() -> bool:
    """Whether something stands in for MLX's kernels in this thread."""
    return getattr(_local, "stand_in", None) is not None
