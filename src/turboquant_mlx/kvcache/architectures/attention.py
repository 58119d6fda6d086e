"""Rules of models that keep keys and values: of all tokens, of a window, of a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..pieces import Attention, Layer, UnknownGeometryError
from .settings import Rule, Settings, divide


def plain(c: Settings) -> list[Layer]:
    """Every layer keeps all keys and values."""
    return [(Attention(c.kv_heads, c.head_dim, c.head_dim),)] * c.layers


def plain_derived(c: Settings) -> list[Layer]:
    """The same in classes that take the head size from the hidden size whatever ``head_dim``
    says."""
    return [(Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)] * c.layers


def all_heads(c: Settings) -> list[Layer]:
    """No sharing of keys and values among heads."""
    return [(Attention(c.heads, c.derived_head_dim, c.derived_head_dim),)] * c.layers


def plamo(c: Settings) -> list[Layer]:
    dim = c.derived_head_dim
    return [(Attention(divide(c.heads, c.number("n_shared_head")), dim, dim),)] * c.layers


def window_layer(
    c: Settings, window: int, kv_heads: int | None = None, dim: int | None = None
) -> Layer:
    dim = dim or c.head_dim
    return (Attention(kv_heads or c.kv_heads, dim, dim, "window", window),)


def full_layer(c: Settings) -> Layer:
    return (Attention(c.kv_heads, c.head_dim, c.head_dim),)


def mixed(c: Settings, sliding: Iterable[bool], window_key: str = "sliding_window") -> list[Layer]:
    flags = list(sliding)
    if not any(flags):
        return [full_layer(c)] * len(flags)
    window = c.number(window_key)
    return [window_layer(c, window) if flag else full_layer(c) for flag in flags]


def by_layer_types(default: str | None = None, other: str = "full") -> Rule:
    """Types in ``layer_types``. ``default``: the pattern where the config has none, one letter per
    layer and repeated (W window, F full). ``other``: what a type that is neither is taken for."""

    def rule(c: Settings) -> list[Layer]:
        types = c.sequence("layer_types", c.layers)
        if types is None:
            if default is None:
                return [full_layer(c)] * c.layers
            return mixed(c, (default[i % len(default)] == "W" for i in range(c.layers)))
        types = types[: c.layers]
        if other == "window":
            return mixed(c, (t != "full_attention" for t in types))
        return mixed(c, (t == "sliding_attention" for t in types))

    return rule


def every(c: Settings, key: str, window_key: str = "sliding_window") -> list[Layer]:
    """Each ``key``-th layer is full, the others have a window."""
    pattern = c.number(key)
    return mixed(c, ((i + 1) % max(pattern, 1) != 0 for i in range(c.layers)), window_key)


def gemma3(c: Settings) -> list[Layer]:
    name = "_sliding_window_pattern"
    if not c.has("sliding_window_pattern") and c.has(name):
        pattern = c.number(name)
        return mixed(c, ((i + 1) % max(pattern, 1) != 0 for i in range(c.layers)))
    return every(c, "sliding_window_pattern")


def gemma3n(c: Settings) -> list[Layer]:
    """The last layers read the keys and values of earlier ones."""
    types = c.sequence("layer_types", c.layers)
    if types is None:
        types = (["sliding_attention"] * 4 + ["full_attention"]) * c.layers
    own = c.layers - c.number("num_kv_shared_layers")
    return mixed(c, (t == "sliding_attention" for t in types[:own]))


def gemma4(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers)
    if types is None:
        pattern = c.number("sliding_window_pattern")
        types = (["sliding_attention"] * (pattern - 1) + ["full_attention"]) * c.layers
    own = c.layers - c.number("num_kv_shared_layers")
    shared = c.get("attention_k_eq_v") and c.has("num_global_key_value_heads")
    heads = c.number("num_global_key_value_heads") if shared else c.kv_heads
    dim = c.number("global_head_dim") or c.head_dim
    full: Layer = (Attention(heads, dim, dim),)
    window = window_layer(c, c.number("sliding_window"))
    return [full if t == "full_attention" else window for t in types[:own]]


def exaone4(c: Settings) -> list[Layer]:
    pattern = c.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return mixed(c, (pattern[i % len(pattern)] == "L" for i in range(c.layers)))
    types = c.sequence("layer_types", c.layers)
    if types is None or pattern is not None:
        return [full_layer(c)] * c.layers
    return mixed(c, (t == "sliding_attention" for t in types[: c.layers]))


def mimo_v2(c: Settings) -> list[Layer]:
    pattern = c.sequence("hybrid_layer_pattern", c.layers) or []
    size = c.first_number("sliding_window_size", "sliding_window")
    heads, k, v = (
        c.number(n) for n in ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
    )
    window: Layer = (Attention(heads, k, v, "window", size),)
    full: Layer = (Attention(c.kv_heads, c.number("head_dim"), c.number("v_head_dim")),)
    return [window if flag == 1 else full for flag in pattern[: c.layers]]


def step3p5(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers)
    dim = c.number("head_dim")
    heads = sliding_heads = c.number("num_attention_groups")
    if c.get("attention_other_setting"):
        sliding_heads = c.nested("attention_other_setting").number("num_attention_groups")
    window: Layer = (Attention(sliding_heads, dim, dim, "window", c.number("sliding_window")),)
    full: Layer = (Attention(heads, dim, dim),)
    flags = (
        [i % 2 == 0 for i in range(c.layers)]
        if not types
        else [t == "sliding_attention" for t in types[: c.layers]]
    )
    return [window if flag else full for flag in flags]


def llama4(c: Settings) -> list[Layer]:
    chunk = c.number("attention_chunk_size")
    chunked: Layer = (Attention(c.kv_heads, c.head_dim, c.head_dim, "chunked", chunk),)
    return [chunked if (i + 1) % 4 else full_layer(c) for i in range(c.layers)]


def loop_coder(c: Settings) -> list[Layer]:
    window = window_layer(c, c.number("loop_window_size"))
    return [full_layer(c)] * c.layers + [window] * c.layers


def nanbeige(c: Settings) -> list[Layer]:
    return [full_layer(c)] * (c.layers * c.number("num_loops"))


def nemotron_nas(c: Settings) -> list[Layer]:
    """Blocks without attention keep nothing, those with a linear layer in its place neither."""
    layers: list[Layer] = []
    for block in c.sequence("block_configs", c.layers) or []:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise UnknownGeometryError("config.json: block_configs does not describe attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        heads = divide(c.heads, attention.get("n_heads_in_group") or 0)
        layers.append((Attention(heads, c.derived_head_dim, c.derived_head_dim),))
    return layers


# --- types with names of their own for everything -------------------------------------------------


def gpt2(c: Settings) -> list[Layer]:
    dim = divide(c.number("n_embd"), c.number("n_head"))
    return [(Attention(c.number("n_head"), dim, dim),)] * c.number("n_layer")


def gpt_bigcode(c: Settings) -> list[Layer]:
    dim = divide(c.number("n_embd"), c.number("n_head"))
    heads = 1 if c.get("multi_query") else c.number("n_head")
    return [(Attention(heads, dim, dim),)] * c.number("n_layer")


def lille(c: Settings) -> list[Layer]:
    dim = divide(c.number("n_embd"), c.number("n_head"))
    return [(Attention(c.number("n_kv_heads"), dim, dim),)] * c.number("n_layer")


def dbrx(c: Settings) -> list[Layer]:
    dim = divide(c.number("d_model"), c.number("n_heads"))
    heads = c.nested("attn_config").number("kv_n_heads")
    return [(Attention(heads, dim, dim),)] * c.number("n_layers")


def openelm(c: Settings) -> list[Layer]:
    dim, number = c.number("head_dim"), c.number("num_transformer_layers")
    heads = c.sequence("num_kv_heads", number) or []
    return [(Attention(n, dim, dim),) for n in heads[:number]]


def phixtral(c: Settings) -> list[Layer]:
    dim = divide(c.number("model_dim"), c.number("num_heads"))
    return [(Attention(c.number("num_heads"), dim, dim),)] * c.number("num_layers")


def olmo(c: Settings) -> list[Layer]:
    dim = divide(c.number("d_model"), c.number("n_heads"))
    return [(Attention(c.number("n_heads"), dim, dim),)] * c.number("n_layers")


def qwen1(c: Settings) -> list[Layer]:
    dim = c.number("kv_channels")
    return [(Attention(c.heads, dim, dim),)] * c.layers


def talkie(c: Settings) -> list[Layer]:
    return [(Attention(c.heads, c.head_dim, c.head_dim),)] * c.layers


def exaone(c: Settings) -> list[Layer]:
    return [full_layer(c)] * c.number("num_layers")


def afm7(c: Settings) -> list[Layer]:
    """The last layers read the keys and values of an earlier one."""
    dim = divide(c.number("hidden_dim"), c.number("num_heads"))
    own = c.number("num_layers") - c.number("num_kv_reuse_layers")
    return [(Attention(c.number("num_kv_heads"), dim, dim),)] * own
