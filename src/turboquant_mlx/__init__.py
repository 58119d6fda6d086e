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


class _ConvertPackage(ModuleType):
    """``turboquant_mlx.convert`` is a package and a function of the public API at once.

    The import system binds the package to the name whenever a module inside it is imported, so a
    function under the same name would come and go; a package that can be called is both, always.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Convert a checkpoint into a small one: ``convert(hf_path, mlx_path, **options)``.

        The options are those of ``convert.pipeline.convert`` (``overwrite``, ``progress``) and of
        ``convert.options.ConvertOptions`` (``bits=4``, ``group_size=64``, ...); the result is a
        ``convert.report.ConvertReport``.
        """
        return importlib.import_module(".pipeline", self.__name__).convert(*args, **kwargs)


if not TYPE_CHECKING:
    importlib.import_module(".convert", __name__).__class__ = _ConvertPackage


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
