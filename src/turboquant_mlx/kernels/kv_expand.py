"""Packed keys and values back to plain ones, in one launch for both.

For prompts, whose attention is MLX's own on one layer's plain keys and values, and for whoever
computes with a packed cache's keys directly.

Thread map: a threadgroup takes some tokens of one head and side; its threads look up one value
after the other, rotate all of them together and write consecutive memory. Tokens that are held in
16 bits are copied. Bytes moved: codes and scales once, the plain values once, which is most of it.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .dialect import Dialect
from .kv_attend_bodies import rotation
from .kv_dialect import kv_kernel
from .kv_sides import KVRows, KVSide, meta_of, packed_inputs, sizes_of

VALUES = 2048
"""Values of a threadgroup. Unmeasured default."""
WARPS = 8

_SIZES = """
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
"""

_SIDE = """
    for (int i = int(tq_tid); i < (1 << {side}B); i += THREADS) {{
      levels[i] = facts[{side}_LEVELS + i];
    }}
    TQ_SYNC();
    constexpr int WORDS = ({width} * {side}B + 31) / 32;
    for (int i = int(tq_tid); i < TOKENS * {width}; i += THREADS) {{
      const int wanted = first + i / {width};
      const int at = pair * capacity + (wanted < columns ? wanted : columns - 1);
      const int bit = i % {width} * {side}B;
      const uint low = {low}codes[at * WORDS + bit / 32];
      const uint high = {low}codes[at * WORDS + (bit / 32 + 1 < WORDS ? bit / 32 + 1 : bit / 32)];
      const uint code = TQ_FUNNEL(low, high, uint(bit) & 31u) & ((1u << {side}B) - 1u);
      const int where = at * ({width} / {side}GROUP) + i % {width} / {side}GROUP;
      const float scale = float({low}scales[where]);
      if ({side}AFFINE) {{
        line[i] = scale * float(code) + float({low}biases[where]);
      }} else {{
        line[i] = scale == 0.0f ? 0.0f : levels[code] * TQ_FLOAT_OF((uint(scale) + 888u) << 20);
      }}
    }}
    TQ_SYNC();
{rotation}
    for (int i = int(tq_tid); i < TOKENS * {width}; i += THREADS) {{
      const int token = first + i / {width};
      const int own = token - padding;
      const int d = i % {width};
      float value = line[i] * facts[{signs} + d];
      {shift}
      if (own >= 0 && own < raw_tokens) {{
        value = float({raw}[(pair * raw_capacity + own) * {width} + d]);
      }}
      if (token < columns) {out}[(pair * columns + token) * {width} + d] = T(value);
    }}
"""


def _side(side: str, width: str, signs: str, raw: str, out: str, shift: str) -> str:
    return _SIDE.format(
        side=side,
        low=side.lower(),
        width=width,
        signs=signs,
        raw=raw,
        out=out,
        shift=shift,
        rotation=rotation(side, f"(TOKENS * {width})", inverse=True),
    )


EXPAND = kv_kernel(
    "turboquant_kv_expand",
    (
        "kcodes",
        "kscales",
        "kbiases",
        "vcodes",
        "vscales",
        "vbiases",
        "facts",
        "meta",
        "raw_keys",
        "raw_values",
        "shift",
    ),
    ("keys", "values"),
    _SIZES
    + "  if (tq_by % 2u == 0u) {"
    + _side("K", "D", "0", "raw_keys", "keys", "if (SHIFT) value += float(shift[pair * D + d]);")
    + "  } else {"
    + _side("V", "DV", "V_SIGNS", "raw_values", "values", "")
    + "  }\n",
)


def why_no_kernel(sides: tuple[KVSide, KVSide], codes: tuple[mx.array, mx.array]) -> str:
    """What keeps the kernel from codes [B, Hkv, capacity, words] of keys and values, or ""."""
    for side in sides:
        if side.width % 4 or side.width > 1024:
            return f"a head of {side.width} values"
    if max(c.size for c in codes) >= 2**31:
        return "more words than 32 bits can count"
    return ""


@lru_cache(maxsize=64)
def _template(
    sides: tuple[KVSide, KVSide], kv_heads: int, dtype: mx.Dtype, shift: bool, raw: bool
) -> tuple[int, list]:
    key, value = sides
    tokens = 1
    while 2 * tokens * max(key.width, value.width) <= VALUES:
        tokens *= 2
    return tokens, [
        ("T", dtype),
        ("HEADS", kv_heads),
        *sizes_of(sides),
        ("KAFFINE", key.affine),
        ("VAFFINE", value.affine),
        ("SHIFT", shift),
        ("RAW", raw),
        ("TOKENS", tokens),
        ("WARPS", WARPS),
    ]


def kv_expand(
    keys: tuple[mx.array, ...],
    values: tuple[mx.array, ...],
    dialect: Dialect,
    *,
    sides: tuple[KVSide, KVSide],
    facts: mx.array,
    rows: KVRows,
    raw: tuple[mx.array, mx.array],
    shift: mx.array | None,
    dtype: mx.Dtype,
) -> tuple[mx.array, mx.array]:
    """Plain keys [B, Hkv, columns, D] and values that ``why_no_kernel`` has nothing against.

    Args:
        keys, values: (codes, scales) or (codes, scales, biases), [B, Hkv, capacity, n].
        dialect: of the kernel.
        sides: how they are packed.
        facts: ``kv_sides.constants`` of them.
        rows: where the tokens are; ``columns`` of them are decoded.
        raw: keys and values [B, Hkv, n, D] of the tokens in 16 bits.
        shift: [B, Hkv, 1, D] that was taken off every packed key, or None.
        dtype: of the result.

    Returns:
        keys, values; lazy. Columns before a row's first token hold anything finite.
    """
    batch, kv_heads, capacity = keys[0].shape[:3]
    lead = (batch, kv_heads, rows.columns)
    has_raw = max(rows.raw) > 0
    tokens, template = _template(sides, kv_heads, dtype, shift is not None, has_raw)
    raw_keys, raw_values = raw if has_raw else (facts, facts)
    raw_capacity = raw_keys.shape[2] if has_raw else 0
    # Not traced: the result's shape is another one for each token. Mostly nobody looks at it.
    one, two = EXPAND.launch(
        dialect,
        [
            *packed_inputs(keys, values, facts),
            facts,
            meta_of(rows, 0, capacity, raw_capacity, (0, 0, 0)),
            raw_keys,
            raw_values,
            facts if shift is None else shift,
        ],
        template=template,
        groups=(-(-rows.columns // tokens), 2 * batch * kv_heads),
        threads=32 * WARPS,
        shapes=[(*lead, side.width) for side in sides],
        dtypes=[dtype, dtype],
    )
    return one, two
