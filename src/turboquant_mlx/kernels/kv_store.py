"""New keys and values to packed ones in one launch: shift, rotate, search the scale, code, pack.

The same arithmetic as ``kvcache.codec``, addition by addition: butterflies in the same order, sums
by adding halves, no product fused into a sum. So the bits are those of the reference wherever the
compiler keeps to that; where it does not (Metal may fuse), a value within a rounding of a border
may get the neighbouring code.

Thread map: a threadgroup for each vector of a head. All threads rotate it; then each of seven
warps tries one scale, and the best one's codes are looked up and packed by all. In plain MLX it
takes some forty launches a side, which would be most of the time of a decode step.

Bytes moved: the vectors once, their codes and scales once; the tables of cells stay in caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx
import numpy as np

from .dialect import Dialect
from .kv_attend_bodies import rotation
from .kv_dialect import kv_kernel
from .kv_sides import KVSide, base_matrix, sizes_of
from .replay import traced

TRIALS = 7
WIDEST = 768
"""Values of a head whose seven trials fit shared memory."""

_SIZES = """
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
#define TQ_CODE_OF(scaled, numbers, cells) \\
  uint(cells[int(fmin(fmax(((scaled) + facts[numbers]) * facts[numbers + 1], 0.0f), LAST_CELL))])
"""

# Adds the halves of each group in `squares` from `mine` on until one value is left.
_FOLD = """
      TQ_UNROLL for (int n = {side}GROUP; n > 1; n /= 2) {{
        for (int j = int(tq_lane); j < {width} / {side}GROUP * (n / 2); j += 32) {{
          const int first = mine + j / (n / 2) * {side}GROUP;
          const int i = j % (n / 2);
          float sum = squares[first + i] + squares[first + i + n / 2];
          if (n % 2 == 1 && i == 0) sum = sum + squares[first + n - 1];
          squares[first + i] = sum;
        }}
        TQ_WARP_SYNC();
      }}
"""

_SIDE = """
    constexpr int GROUPS = {width} / {side}GROUP;
    constexpr int WORDS = ({width} * {side}B + 31) / 32;
    for (int i = int(tq_tid); i < {width}; i += THREADS) {{
      float value = float({source}[vector * {width} + i]);
      {shift}
      line[i] = value * facts[{signs} + i];
    }}
    TQ_SYNC();
{rotation}
    for (int i = int(tq_tid); i < {width}; i += THREADS) {{
      line[i] = TQ_MUL(line[i], facts[{side}_NUMBERS + 2]);
    }}
    TQ_SYNC();
    if (int(tq_warp) < TRIALS) {{
      const int mine = int(tq_warp) * WIDE;
      for (int i = int(tq_lane); i < {width}; i += 32) squares[mine + i] = TQ_MUL(line[i], line[i]);
      TQ_WARP_SYNC();
{fold}
      float scale[(GROUPS + 31) / 32];
      TQ_UNROLL for (int k = 0; k < (GROUPS + 31) / 32; ++k) {{
        const int g = int(tq_lane) + 32 * k;
        scale[k] = 1.0f;
        if (g < GROUPS) {{
          const float mean = TQ_MUL(squares[mine + g * {side}GROUP], facts[{side}_NUMBERS + 3]);
          const uint nearest = (TQ_BITS_OF(sqrt(mean)) + (1u << 19)) >> 20;
          int byte = int(nearest) - 888 + int(tq_warp) - 3;
          byte = byte < 1 ? 1 : byte > 255 ? 255 : byte;
          scale[k] = TQ_FLOAT_OF(uint(byte + 888) << 20);
          errors[int(tq_warp) * MOST_GROUPS + g] = 1.0f / scale[k];
          trial[int(tq_warp) * MOST_GROUPS + g] = mean == 0.0f ? -byte : byte;
        }}
      }}
      TQ_WARP_SYNC();
      for (int i = int(tq_lane); i < {width}; i += 32) {{
        const float scaled =
            TQ_MUL(line[i], errors[int(tq_warp) * MOST_GROUPS + i / {side}GROUP]);
        const uint code = TQ_CODE_OF(scaled, {side}_NUMBERS, {cells});
        const float away = scaled - facts[{side}_LEVELS + code];
        squares[mine + i] = TQ_MUL(away, away);
      }}
      TQ_WARP_SYNC();
{fold}
      TQ_UNROLL for (int k = 0; k < (GROUPS + 31) / 32; ++k) {{
        const int g = int(tq_lane) + 32 * k;
        if (g < GROUPS) {{
          errors[int(tq_warp) * MOST_GROUPS + g] =
              TQ_MUL(squares[mine + g * {side}GROUP], TQ_MUL(scale[k], scale[k]));
        }}
      }}
    }}
    TQ_SYNC();
    for (int g = int(tq_tid); g < GROUPS; g += THREADS) {{
      int best = 0;
      TQ_UNROLL for (int t = 1; t < TRIALS; ++t) {{
        if (errors[t * MOST_GROUPS + g] < errors[best * MOST_GROUPS + g]) best = t;
      }}
      const int byte = trial[best * MOST_GROUPS + g];
      chosen[g] = 1.0f / TQ_FLOAT_OF(uint((byte < 0 ? -byte : byte) + 888) << 20);
      {scales}[vector * GROUPS + g] = byte < 0 ? 0 : byte;
    }}
    TQ_SYNC();
    for (int i = int(tq_tid); i < {width}; i += THREADS) {{
      const float scaled = TQ_MUL(line[i], chosen[i / {side}GROUP]);
      code_of[i] = TQ_CODE_OF(scaled, {side}_NUMBERS, {cells});
    }}
    TQ_SYNC();
    for (int w = int(tq_tid); w < WORDS; w += THREADS) {{
      uint word = 0u;
      for (int i = 32 * w / {side}B; i < {width} && i * {side}B < 32 * w + 32; ++i) {{
        const int shift_by = i * {side}B - 32 * w;
        word |= shift_by < 0 ? code_of[i] >> -shift_by : code_of[i] << shift_by;
      }}
      {codes}[vector * WORDS + w] = word;
    }}
"""


def _side(side: str, width: str, source: str, signs: str, shift: str) -> str:
    low = side.lower()
    return _SIDE.format(
        side=side,
        width=width,
        source=source,
        signs=signs,
        shift=shift,
        cells=f"{low}cells",
        scales=f"{low}scales",
        codes=f"{low}codes",
        rotation=rotation(side, width),
        fold=_FOLD.format(side=side, width=width),
    )


_BODY = (
    _SIZES.replace("LAST_CELL", "float(CELLS - 1)")
    + "  if (tq_by == 0u) {"
    + _side(
        "K",
        "D",
        "keys",
        "0",
        "if (SHIFT) value = value - float(shift[vector / tokens * D + i]);",
    )
    + "  } else {"
    + _side("V", "DV", "values", "V_SIGNS", "")
    + "  }\n"
)

STORE = kv_kernel(
    "turboquant_kv_store",
    ("keys", "values", "shift", "facts", "kcells", "vcells"),
    ("kcodes", "kscales", "vcodes", "vscales"),
    _BODY,
)


def why_no_kernel(sides: tuple[KVSide, KVSide], keys: mx.array) -> str:
    """What keeps the kernel from coding keys [B, Hkv, n, D]; "" if nothing does."""
    for side in sides:
        if side.affine:
            return "MLX's own quantization"
        if side.width > WIDEST or side.width % 8:
            return f"a head of {side.width} values"
    if keys.size >= 2**31 or keys.size == 0:
        return f"{keys.size} values"
    return ""


def constants(
    sides: tuple[KVSide, KVSide],
    signs: list[np.ndarray],
    levels: list[np.ndarray],
    spans: tuple[float, float],
    cells: int,
) -> mx.array:
    """What the kernel needs to know of the codecs, as one array.

    Args:
        sides: keys, values.
        signs: [width] of +1 and -1 for each.
        levels: [2**bits] for each.
        spans: the cells of each lie between -span and span.
        cells: how many there are.
    """
    parts: list[np.ndarray] = [*signs, *(base_matrix(s.base) for s in sides), *levels]
    for side, span in zip(sides, spans, strict=True):
        norm, share = np.float32(1.0 / np.sqrt(side.block)), np.float32(1.0 / side.group)
        parts.append(np.array([span, cells / (2 * span), norm, share], np.float32))
    return mx.array(np.concatenate([np.asarray(p, np.float32).reshape(-1) for p in parts]))


@lru_cache(maxsize=64)
def _template(sides: tuple[KVSide, KVSide], shift: bool, cells: int) -> list:
    return [
        *sizes_of(sides),
        ("SHIFT", shift),
        ("CELLS", cells),
        ("TRIALS", TRIALS),
        ("WARPS", 8),
    ]


Encoder = Callable[..., list[mx.array]]
"""Of keys [B, Hkv, n, D], values [B, Hkv, n, Dv] and, where it was asked for, a shift
[B, Hkv, 1, D]: codes and scales of keys and then of values, uint32 [B, Hkv, n, words] and uint8
[.., groups]; lazy."""


def encoder(
    sides: tuple[KVSide, KVSide],
    dialect: Dialect,
    *,
    shift: bool,
    facts: mx.array,
    cells: tuple[mx.array, mx.array],
) -> Encoder:
    """What codes keys and values that ``why_no_kernel`` has nothing against, in one launch.

    Args:
        sides: how keys and values are packed.
        dialect: of the kernel.
        shift: whether something is taken off every key.
        facts: ``constants`` of the sides.
        cells: uint8 codes of the cells, for keys and values.
    """
    template = _template(sides, shift, cells[0].size)

    def run(keys: mx.array, values: mx.array, shift_of_keys: mx.array = facts) -> list[mx.array]:
        lead = keys.shape[:3]
        shapes, dtypes = [], []
        for side in sides:
            shapes += [(*lead, -(-side.width * side.bits // 32)), (*lead, side.width // side.group)]
            dtypes += [mx.uint32, mx.uint8]
        return STORE.launch(
            dialect,
            [keys, values, shift_of_keys, facts, *cells],
            template=template,
            groups=(lead[0] * lead[1] * lead[2], 2),
            threads=256,
            shapes=shapes,
            dtypes=dtypes,
        )

    return traced(run)
