"""Importing this makes mlx-lm's models importable where transformers is not installed.

A machine with a GPU may have MLX and little else. mlx-lm's model classes need nothing more, but the
package imports its tokenizers first.
"""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec

if find_spec("transformers") is None and "mlx_lm" not in sys.modules:
    _spec = find_spec("mlx_lm")
    if _spec is None or _spec.submodule_search_locations is None:
        raise SystemExit("error: mlx-lm is not installed")
    _package = types.ModuleType("mlx_lm")
    _package.__path__ = list(_spec.submodule_search_locations)
    sys.modules["mlx_lm"] = _package
