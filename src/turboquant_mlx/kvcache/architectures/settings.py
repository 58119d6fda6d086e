"""The settings that rules read from a config.json, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..pieces import Layer, UnknownGeometryError
from .defaults import DEFAULTS
from .vision_defaults import VISION_DEFAULTS

# The largest number that any field of an honest config has.
_LARGEST = 1 << 40
# Fields of which a model has as many layers, or runs through them so often.
_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"),
    *("num_loops", "H_cycles", "L_cycles"),
)
_MOST_LAYERS = 10_000


class Settings:
    """The language model's config, read strictly.

    Attributes:
        assumed: what was absent, with the value that was used instead.
    """

    def __init__(self, model_type: str, config: Mapping[str, Any], outer: Mapping[str, Any]):
        self.model_type = model_type
        self.outer = outer
        self.assumed: dict[str, Any] = {}
        self._config = config
        self._defaults = DEFAULTS.get(model_type) or VISION_DEFAULTS.get(model_type, {})

    def has(self, name: str) -> bool:
        """Whether a value is given (null counts as absent)."""
        return self._config.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of any type; else the class's default, else ``default``."""
        if self.has(name):
            return self._config[name]
        if name in self._defaults:
            self.assumed[name] = self._defaults[name]
            return self._defaults[name]
        return default

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            UnknownGeometryError: it is absent and has no default, or is no number of anything.
        """
        value = self.get(name, default)
        if value is None:
            raise UnknownGeometryError(f"config.json has no {name}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
            raise UnknownGeometryError(f"config.json: {name} {value!r} is not a size")
        if name in _COUNTS and value > _MOST_LAYERS:
            raise UnknownGeometryError(f"config.json: {name} {value} is not that of a model")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number of which a model needs at least one.

        Raises:
            UnknownGeometryError: as ``number``, or it is zero.
        """
        value = self.number(name, default)
        if value == 0:
            raise UnknownGeometryError(f"config.json: {name} is 0")
        return value

    def first_number(self, *names: str) -> int:
        """The first of several spellings that is given."""
        return self.number(next((name for name in names if self.has(name)), names[0]))

    def sequence(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, or None where it is absent.

        Raises:
            UnknownGeometryError: it is no list, or shorter than ``length``.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) < length):
            raise UnknownGeometryError(f"config.json: {name} does not name every layer")
        return list(value)

    def nested(self, name: str) -> Settings:
        """A nested object as settings of its own."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise UnknownGeometryError(f"config.json has no {name}")
        return Settings("", value, self.outer)

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.positive("num_hidden_layers")

    @property
    def heads(self) -> int:
        return self.positive("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        name = "num_key_value_heads"
        # null is not absent here: every class takes it for "as many as there are heads"
        if name in self._config and self._config[name] is None:
            return self.heads
        return self.positive(name, self.heads)

    @property
    def derived_head_dim(self) -> int:
        """Hidden size by heads, for the classes that know no ``head_dim``."""
        return divide(self.number("hidden_size"), self.heads)

    @property
    def head_dim(self) -> int:
        return self.number("head_dim") if self.get("head_dim") else self.derived_head_dim


Rule = Callable[[Settings], Iterable[Layer]]


def divide(size: int, parts: int) -> int:
    if not parts:
        raise UnknownGeometryError("config.json speaks of no attention heads")
    return size // parts
