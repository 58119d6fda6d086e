"""TurboQuant for MLX: convert language models to 2-4 bit weights and run them.

The public names are those of ``__all__``. They are imported from where they live when they are
first used, so importing this package brings in neither MLX nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "BatchTurboQuantKVCache",
    "KVSpec",
    "PackedWeight",
    "QuantSpec",
    "TurboQuantKVCache",
    "__version__",
    "convert",
    "dequantize_weight",
    "get_kv_quant_scheme",
    "get_quantized_kv_bits",
    "load",
    "maybe_quantize_kv_cache",
    "plan",
    "quantize_weight",
    "turboquant_enabled",
    "validate_bits",
]

if TYPE_CHECKING:
    from .checkpoint.loader import load
    from .convert.pipeline import convert
    from .kvcache.cache import BatchTurboQuantKVCache, TurboQuantKVCache
    from .kvcache.install import (
        get_kv_quant_scheme,
        get_quantized_kv_bits,
        maybe_quantize_kv_cache,
    )
    from .kvcache.spec import KVSpec, turboquant_enabled, validate_bits
    from .plan.library import plan
    from .quant.spec import QuantSpec
    from .quant.weight import PackedWeight, dequantize_weight, quantize_weight

_HOMES = {
    "BatchTurboQuantKVCache": ".kvcache.cache",
    "KVSpec": ".kvcache.spec",
    "PackedWeight": ".quant.weight",
    "QuantSpec": ".quant.spec",
    "TurboQuantKVCache": ".kvcache.cache",
    "dequantize_weight": ".quant.weight",
    "get_kv_quant_scheme": ".kvcache.install",
    "get_quantized_kv_bits": ".kvcache.install",
    "load": ".checkpoint.loader",
    "maybe_quantize_kv_cache": ".kvcache.install",
    "quantize_weight": ".quant.weight",
    "turboquant_enabled": ".kvcache.spec",
    "validate_bits": ".kvcache.spec",
}


class _CallablePackage(ModuleType):
    """A package that is a function of the public API at once.

    The import system binds a package to its name whenever a module inside it is imported, so a
    function under the same name would come and go; a package that can be called is both, always.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function that ``_FUNCTIONS`` names."""
        module, function = _FUNCTIONS[self.__name__.rpartition(".")[2]]
        return getattr(importlib.import_module(module, self.__name__), function)(*args, **kwargs)


# Package -> where the function of the same name lives in it.
_FUNCTIONS = {"convert": (".pipeline", "convert"), "plan": (".library", "plan")}

if not TYPE_CHECKING:
    for _name in _FUNCTIONS:
        importlib.import_module(f".{_name}", __name__).__class__ = _CallablePackage
    del _name


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
