"""What an evaluation is asked to do: the options, their permitted values and combinations.

One frozen record that refuses what cannot be meant. No MLX here.
"""

from __future__ import annotations

import contextlib
import io
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert.command import build_parser as convert_parser
from ..convert.options import BITS, GROUP_SIZES, ConvertOptions, flag
from ..errors import OptionError

DEFAULT_BITS = (2, 3, 4)
DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 512
DEFAULT_CACHE_GB = 8.0
AFFINE_GROUP_SIZE = 64

# What a variant may not set: evaluate sets it itself, or it concerns the output alone.
_NOT_FOR_VARIANTS = ("hf_path", "mlx_path", "overwrite", "json", "bits", "trust_remote_code")
_NOBODY = "-"


@dataclass(frozen=True)
class EvaluateOptions:
    """Every choice of an evaluation besides the model and where the result goes.

    Attributes:
        bits: widths to quantize to; None is ``DEFAULT_BITS``, or none if ``compare`` names folders.
        group_size: of our code and of MLX's affine mode; None is each one's default.
        affine: include MLX's own formats.
        qjl: include our code with its 1-bit sketch.
        variants: further rows at each width, each a string of options of turboquant-convert.
        compare: folders of converted models to score as they are.
        noise_floor: also run the 16-bit model with 16-bit activations.
        num_samples, seq_len: chunks of text and tokens in each.
        text: file to score on; None is WikiText-2's test set from the hub.
        raw_text: leave WikiText's separated words apart.
        cache_dir: where the 16-bit model's log-probabilities are kept; None is the default.
        cache_gb: size that the cache may grow to, in units of 10**9 bytes.
        trust_remote_code: let code that comes with a model run.

    Raises:
        OptionError: a value that is not permitted, or options that contradict each other.
    """

    bits: tuple[int, ...] | None = None
    group_size: int | None = None
    affine: bool = True
    qjl: bool = True
    variants: tuple[str, ...] = ()
    compare: tuple[str, ...] = ()
    noise_floor: bool = True
    num_samples: int = DEFAULT_SAMPLES
    seq_len: int = DEFAULT_SEQ_LEN
    text: str | Path | None = None
    raw_text: bool = False
    cache_dir: str | Path | None = None
    cache_gb: float = DEFAULT_CACHE_GB
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "compare", tuple(map(str, self.compare)))
        for name in ("bits", "variants", "compare"):
            value = getattr(self, name)
            if value is not None:
                # each one once, in the order given
                object.__setattr__(self, name, tuple(dict.fromkeys(value)))
        for bits in self.bits or ():
            if bits not in BITS:
                raise OptionError(f"--bits {bits} is not one of {_listed(BITS)}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise OptionError(
                f"--group-size {self.group_size} is not one of {_listed(GROUP_SIZES)}"
            )
        if self.num_samples < 1:
            raise OptionError(f"--num-samples {self.num_samples} is not a positive number")
        if self.seq_len < 3:
            raise OptionError(
                f"--seq-len {self.seq_len} is too short: a chunk has 3 tokens or more"
            )
        if not (self.cache_gb >= 0 and math.isfinite(self.cache_gb * 1e9)):
            raise OptionError(f"--cache-limit {self.cache_gb} is not a size in GB")
        if self.variants and not self.widths:
            raise OptionError(
                "--variant has no effect without --bits when --compare is given",
                hint="name the widths of the variants, for example --bits 3",
            )
        if self.group_size is not None and not self.widths:
            raise OptionError(
                "--group-size has no effect without --bits when --compare is given",
                hint="name the widths that are quantized to, for example --bits 3",
            )
        if self.cache_dir is not None and not str(self.cache_dir):
            raise OptionError("--cache-dir is empty")
        for variant in self.variants:
            given = parse_variant(variant)
            for bits in self.widths:
                _check_variant(variant, bits, given)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that are quantized to."""
        if self.bits is not None:
            return self.bits
        return () if self.compare else DEFAULT_BITS


def parse_variant(text: str) -> dict[str, Any]:
    """Options of turboquant-convert written as on its command line, by their Python names.

    Raises:
        OptionError: nothing is given, an option or value that the converter does not know, one
            that is not for variants, or a bad combination.
    """
    complaint = io.StringIO()
    try:
        words = shlex.split(text)
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            given = vars(convert_parser().parse_args(["--hf-path", _NOBODY, *words]))
    except ValueError as error:
        raise OptionError(f"--variant {text!r} cannot be read: {error}") from None
    except SystemExit:
        reason = complaint.getvalue().partition("\n")[0].removeprefix("error: ")
        raise OptionError(
            f"--variant {text!r}: {reason}", hint="turboquant-convert --help lists every option"
        ) from None
    if not words:
        raise OptionError("--variant is empty", hint="for example --variant='--attn-bits 4'")
    if given.pop("hf_path") != _NOBODY:
        given["hf_path"] = text
    for name in _NOT_FOR_VARIANTS:
        if name in given:
            raise OptionError(f"--variant {text!r}: {flag(name)} is set by evaluate itself")
    if "target_bpw" in given:
        raise OptionError(
            f"--variant {text!r}: --target-bpw takes the place of a width, and variants run at "
            "each of --bits",
            hint="convert with --target-bpw first, then name that folder with --compare",
        )
    try:
        ConvertOptions(**given)
    except OptionError as error:
        raise OptionError(f"--variant {text!r}: {error.message}", error.hint) from None
    return given


def _check_variant(text: str, bits: int, given: dict[str, Any]) -> None:
    """Refuse a variant that cannot be converted at one of the widths that it is to run at."""
    try:
        ConvertOptions(**{"bits": bits} | given)
    except OptionError as error:
        raise OptionError(f"--variant {text!r}: {error.message}", error.hint) from None


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)
