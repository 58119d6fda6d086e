"""Rules of language models that only mlx-vlm has and that follow no rule of mlx-lm's."""

from __future__ import annotations

from ..pieces import Attention, Layer, State, UnknownGeometryError
from .attention import by_layer_types, every, full_layer, plain, plain_derived, window_layer
from .latent import expanded_latent
from .settings import Settings, divide


def deepseek_v2_of_vision(c: Settings) -> list[Layer]:
    """Expanded latents, or plain attention where the config gives the latent no width."""
    if c.number("qk_nope_head_dim") == 0:
        return plain_derived(c)
    return expanded_latent(c)


def cohere2_moe(c: Settings) -> list[Layer]:
    if c.has("layer_types"):
        return list(by_layer_types()(c))
    return every(c, "sliding_window_pattern")


def flint(c: Settings) -> list[Layer]:
    if c.get("use_sliding_window") is False:
        return plain(c)
    return list(by_layer_types()(c))


def diffusion_gemma(c: Settings) -> list[Layer]:
    """Windows with five to one layer of all tokens, which has heads of its own."""
    types = c.sequence("layer_types", c.layers)
    if types is None:
        types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(c.layers)]
        types[-1] = "full_attention"
    dim = c.number("global_head_dim") or c.head_dim
    heads = c.number("num_global_key_value_heads", c.kv_heads)
    window = window_layer(c, c.number("sliding_window"))
    full: Layer = (Attention(heads, dim, dim),)
    return [full if t == "full_attention" else window for t in types[: c.layers]]


def hrm_text(c: Settings) -> list[Layer]:
    """A stack that is run through several times, each time with caches of its own."""
    times = 1
    if not c.has("num_layers_per_stack"):
        times = c.number("H_cycles") * (c.number("L_cycles") + 1)
    return plain(c) * times


def molmo(c: Settings) -> list[Layer]:
    dim = divide(c.number("d_model"), c.number("n_heads"))
    heads = c.number("n_kv_heads", c.number("n_heads"))
    return [(Attention(heads, dim, dim),)] * c.number("n_layers")


def zaya(c: Settings) -> list[Layer]:
    """Besides keys and values, the inputs of two convolutions over queries and keys, and the last
    hidden state."""
    taps = c.number("cca_time0") + c.number("cca_time1") - 2
    values = taps * (c.heads + c.kv_heads) * c.head_dim + c.number("hidden_size")
    return [(*full_layer(c), State(values=values))] * c.layers


def inkling(c: Settings) -> list[Layer]:
    """Sliding layers have heads of their own but full caches; every layer keeps the inputs of four
    convolutions in float32."""
    types, local = c.sequence("layer_types", c.layers), c.sequence("local_layer_ids")
    taps, hidden = c.number("sconv_kernel_size") - 1, c.number("hidden_size")
    layers: list[Layer] = []
    for i in range(c.layers):
        if types is not None:
            sliding = types[i] == "hybrid_sliding"
        else:
            sliding = i in local if local is not None else bool((i + 1) % 6)
        prefix = "swa_" if sliding else ""
        heads, dim = c.number(prefix + "num_key_value_heads"), c.number(prefix + "head_dim")
        conv = State(floats=taps * (2 * heads * dim + 2 * hidden))
        layers.append((Attention(heads, dim, dim), conv))
    return layers


def deepseek_v4(c: Settings) -> list[Layer]:
    """A window of one vector per token, which is key and value at once, and vectors that stand for
    ``compress_ratios`` tokens each; where that is 4, index keys too, and both overlap: twice the
    width waits in the open group."""
    dim, index = c.number("head_dim"), c.number("index_head_dim")
    window = Attention(1, dim, 0, "window", c.number("sliding_window"))
    ratios = c.sequence("compress_ratios")
    if not ratios:
        inner = [4 if i % 2 else 128 for i in range(c.layers - 2)]
        ratios = [0, *inner, 0][: c.layers]
    if len(ratios) < c.layers:
        raise UnknownGeometryError("config.json: compress_ratios does not name every layer")
    layers: list[Layer] = []
    for ratio in ratios[: c.layers]:
        if ratio not in (0, 4, 128):
            raise UnknownGeometryError(f"config.json: compress ratio {ratio!r} is not supported")
        layer: list[Attention | State] = [window]
        if ratio:
            widths = (dim, index) if ratio == 4 else (dim,)
            for width in widths:
                layer.append(Attention(1, width, 0, "compressed", ratio=ratio, step=1))
                open_group = 2 * ratio * width * (2 if ratio == 4 else 1)
                layer.append(State(values=open_group))
        layers.append(tuple(layer))
    return layers
