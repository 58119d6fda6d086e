"""Rules of models with recurrences, convolutions or linear attention, alone or among others."""

from __future__ import annotations

from ..pieces import Attention, Layer, State, UnknownGeometryError
from .attention import full_layer, plain, window_layer
from .latent import latent_piece
from .settings import Rule, Settings, divide


def mamba1(inner: int, state: int, kernel: int) -> Layer:
    return (State(values=(kernel - 1) * inner + inner * state),)


def mamba2_state(heads: int, dim: int, state: int, groups: int, kernel: int) -> State:
    inner = heads * dim
    return State(values=(kernel - 1) * (inner + 2 * groups * state), floats=inner * state)


def pure_mamba(c: Settings) -> list[Layer]:
    inner = c.first_number("intermediate_size", "d_inner")
    state = c.first_number("state_size", "d_state")
    kernel = c.first_number("conv_kernel", "d_conv")
    return [mamba1(inner, state, kernel)] * c.first_number(
        "num_hidden_layers", "n_layer", "n_layers"
    )


def pure_mamba2(c: Settings) -> list[Layer]:
    names = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    return [(mamba2_state(*(c.number(name) for name in names)),)] * c.layers


def jamba(c: Settings) -> list[Layer]:
    types = c.sequence("layers_block_type", c.layers)
    if types is None:
        period, offset = c.number("attn_layer_period"), c.number("attn_layer_offset")
        types = ["attention" if i % max(period, 1) == offset else "mamba" for i in range(c.layers)]
    inner = c.number("mamba_expand") * c.number("hidden_size")
    mamba = mamba1(inner, c.number("mamba_d_state"), c.number("mamba_d_conv"))
    full: Layer = (Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)
    return [full if t == "attention" else mamba for t in types[: c.layers]]


def granite_hybrid(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers) or []
    full: Layer = (Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)
    if "mamba" not in types:
        return [full for t in types[: c.layers] if t == "attention"]
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    mamba: Layer = (mamba2_state(*(c.number(name) for name in names)),)
    return [mamba if t == "mamba" else full for t in types[: c.layers]]


def falcon_h1(c: Settings) -> list[Layer]:
    inner, groups = c.number("mamba_d_ssm"), c.number("mamba_n_groups")
    state, kernel = c.number("mamba_d_state"), c.number("mamba_d_conv")
    floats = c.number("mamba_n_heads") * c.number("mamba_d_head") * state
    mamba = State(values=(kernel - 1) * (inner + 2 * groups * state), floats=floats)
    return [(mamba, *full_layer(c))] * c.layers


_NEMOTRON_BLOCKS = {
    "full_attention": "*",
    "attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "conv": "M",
    "moe": "E",
    "mlp": "-",
}


def nemotron_h(c: Settings) -> list[Layer]:
    pattern = c.get("hybrid_override_pattern")
    if pattern is None:
        types = c.sequence("layers_block_type") or c.sequence("layer_types") or []
        pattern = [_NEMOTRON_BLOCKS.get(str(t), "?") for t in types]
    if not pattern or set(pattern) - set("*M-E"):
        raise UnknownGeometryError("config.json does not say what kind each layer is")
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    mamba: Layer = ()
    if "M" in pattern:
        mamba = (mamba2_state(*(c.number(name) for name in names)),)
    return [mamba if kind == "M" else full_layer(c) for kind in pattern if kind in "M*"]


def plamo2(c: Settings) -> list[Layer]:
    dim = c.number("hidden_size_per_head")
    full: Layer = (Attention(c.kv_heads, dim, dim),)
    if not c.get("mamba_enabled"):
        return [full] * c.layers
    inner = c.number("mamba_num_heads") * dim
    state = c.number("mamba_d_state")
    conv = (c.number("mamba_d_conv") - 1) * inner
    mamba: Layer = (State(values=conv, floats=inner * state),)
    step = max(c.number("mamba_step"), 1)
    if c.layers <= step // 2:
        return [mamba if i != c.layers - 1 else full for i in range(c.layers)]
    return [full if i % step == step // 2 else mamba for i in range(c.layers)]


def delta_net(c: Settings, full: Rule, interval: int) -> list[Layer]:
    """Gated delta rule: one convolution over queries, keys and values together."""
    keys, values = c.number("linear_num_key_heads"), c.number("linear_num_value_heads")
    key_dim, value_dim = c.number("linear_key_head_dim"), c.number("linear_value_head_dim")
    conv = (c.number("linear_conv_kernel_dim") - 1) * (2 * keys * key_dim + values * value_dim)
    linear: Layer = (State(values=conv, floats=values * value_dim * key_dim),)
    whole = next(iter(full(c)))
    return [linear if (i + 1) % max(interval, 1) else whole for i in range(c.layers)]


def qwen3_next(c: Settings) -> list[Layer]:
    return delta_net(c, plain, c.number("full_attention_interval"))


def olmo_hybrid(c: Settings) -> list[Layer]:
    types = c.sequence("layer_types", c.layers)
    if types is None:
        types = (["linear_attention"] * 3 + ["full_attention"]) * c.layers
    heads, value_heads = c.number("linear_num_key_heads"), c.number("linear_num_value_heads")
    key_dim, value_dim = c.number("linear_key_head_dim"), c.number("linear_value_head_dim")
    conv = (c.number("linear_conv_kernel_dim") - 1) * (
        2 * heads * key_dim + value_heads * value_dim
    )
    linear: Layer = (State(values=conv, floats=value_heads * value_dim * key_dim),)
    return [linear if t == "linear_attention" else full_layer(c) for t in types[: c.layers]]


def kimi_linear(c: Settings) -> list[Layer]:
    linear_config = c.nested("linear_attn_config")
    kda = set(linear_config.sequence("kda_layers") or [])
    heads, dim = linear_config.number("num_heads"), linear_config.number("head_dim")
    kernel = linear_config.number("short_conv_kernel_size", 4)
    linear: Layer = (State(3 * (kernel - 1) * heads * dim, heads * dim * dim),)
    return [linear if i + 1 in kda else (latent_piece(c),) for i in range(c.layers)]


def grouped_global(c: Settings) -> list[bool]:
    """The last layer of every group, and those behind the last whole group."""
    group = max(c.number("layer_group_size"), 1)
    whole = c.layers // group * group
    return [(i + 1) % group == 0 or i >= whole for i in range(c.layers)]


def bailing_hybrid(c: Settings) -> list[Layer]:
    linear: Layer = (State(floats=c.heads * c.head_dim * c.head_dim),)
    return [(latent_piece(c),) if flag else linear for flag in grouped_global(c)]


def bailing_linear(c: Settings) -> list[Layer]:
    dim = c.derived_head_dim
    linear: Layer = (State(values=c.heads * dim * dim),)
    full: Layer = (Attention(c.kv_heads, c.head_dim, c.head_dim),)
    return [full if flag else linear for flag in grouped_global(c)]


def bailing_v3(c: Settings) -> list[Layer]:
    dim, kernel = c.head_dim, c.number("short_conv_kernel_size")
    linear: Layer = (State(3 * (kernel - 1) * c.heads * dim, c.heads * dim * dim),)
    return [(latent_piece(c),) if flag else linear for flag in grouped_global(c)]


def lfm2(c: Settings) -> list[Layer]:
    full_layers = c.sequence("full_attn_idxs")
    if full_layers is None:
        types = c.sequence("layer_types", c.layers)
        if types is None:
            raise UnknownGeometryError("config.json has no layer_types")
        full_layers = [i for i, t in enumerate(types) if t == "full_attention"]
    conv: Layer = (State(values=(c.number("conv_L_cache") - 1) * c.number("hidden_size")),)
    full: Layer = (Attention(c.kv_heads, c.derived_head_dim, c.derived_head_dim),)
    return [full if i in full_layers else conv for i in range(c.layers)]


def gear(c: Settings) -> list[Layer]:
    """Attention of all tokens, of a window, or convolutions over keys and over values."""
    types = c.sequence("layer_types", c.layers) or ["full_attention"] * c.layers
    taps = c.number("conv_L_cache") - 1
    kinds: dict[str, Layer] = {
        "full_attention": full_layer(c),
        "sliding_attention": window_layer(c, c.number("sliding_window")),
        "conv_mixer": (State(values=2 * taps * c.kv_heads * c.head_dim),),
    }
    for t in types[: c.layers]:
        if t not in kinds:
            raise UnknownGeometryError(f"config.json: layer type {t!r} is none of gear's")
    return [kinds[t] for t in types[: c.layers]]


def baichuan_m1(c: Settings) -> list[Layer]:
    """Each layer keeps the last key and value besides, for a convolution of two taps."""
    sliding = set(c.sequence("sliding_window_layers") or [])
    dim, kv_heads = c.derived_head_dim, c.kv_heads
    layers: list[Layer] = []
    for i in range(c.layers):
        if i in sliding:
            own = divide(c.number("hidden_size"), c.number("num_swa_attention_heads", c.heads))
            heads = c.number("num_swa_key_value_heads", kv_heads)
            window = Attention(heads, own, own, "window", c.number("sliding_window"))
            layers.append((State(values=2 * heads * own), window))
        else:
            layers.append((State(values=2 * kv_heads * dim), Attention(kv_heads, dim, dim)))
    return layers


def recurrent_gemma(c: Settings) -> list[Layer]:
    blocks = c.sequence("block_types") or c.sequence("_block_types")
    if not blocks:
        raise UnknownGeometryError("config.json has no block_types")
    width, dim = c.number("hidden_size"), c.derived_head_dim
    recurrent: Layer = (State(values=(c.number("conv1d_width") - 1) * width + width),)
    attention: Layer = (Attention(1, dim, dim, "window", c.number("attention_window_size")),)
    return [
        recurrent if blocks[i % len(blocks)] == "recurrent" else attention for i in range(c.layers)
    ]


def rwkv7(c: Settings) -> list[Layer]:
    width = c.number("hidden_size")
    return [(State(values=2 * width + width * c.number("head_dim")),)] * c.layers
