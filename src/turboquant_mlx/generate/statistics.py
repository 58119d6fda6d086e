"""What a generation cost: tokens, speed, memory. Imports MLX only to read its memory counter."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

_HOW_IT_ENDED = {
    "stop": "ended by the model",
    "length": "cut off by --max-tokens",
    None: "interrupted",
}


@dataclass
class Statistics:
    """Counters of one generation, filled from mlx-lm's responses as they come.

    Attributes:
        prompt_tokens, generated_tokens: counts; the end token counts as generated.
        prompt_rate: prompt tokens per second until the first generated token.
        generation_rate: tokens per second after the first generated token, or None when there
            was only that one, which belongs to the prompt's time.
        finish_reason: "stop", "length", or None as long as it goes on.
    """

    prompt_tokens: int = 0
    prompt_rate: float = 0.0
    generated_tokens: int = 0
    generation_rate: float | None = None
    finish_reason: str | None = None

    def update(self, response: Any) -> None:
        """Take over the counters of an mlx-lm ``GenerationResponse``."""
        count = response.generation_tokens
        self.prompt_tokens = response.prompt_tokens
        self.prompt_rate = response.prompt_tps
        self.generated_tokens = count
        # mlx-lm divides all tokens by the time since the first one was there; that time made
        # only the others.
        self.generation_rate = response.generation_tps * (count - 1) / count if count > 1 else None
        self.finish_reason = response.finish_reason

    def lines(self, mlx_bytes: int, process_bytes: int) -> list[str]:
        """The report for people, one fact per line.

        Args:
            mlx_bytes: peak of MLX's own counter.
            process_bytes: peak resident size of the process, which also holds what MLX does not
                count (numpy arrays, Python, the libraries).
        """
        speed = "" if self.generation_rate is None else f", {self.generation_rate:.1f} tokens/s"
        return [
            f"prompt: {_tokens(self.prompt_tokens)}, {self.prompt_rate:.1f} tokens/s",
            f"generated: {_tokens(self.generated_tokens)}{speed} "
            f"({_HOW_IT_ENDED[self.finish_reason]})",
            f"peak memory: {mlx_bytes / 1e9:.2f} GB counted by MLX, "
            f"{process_bytes / 1e9:.2f} GB of the whole process",
        ]


def mlx_peak_bytes() -> int:
    """Peak of MLX's memory counter in bytes."""
    import mlx.core as mx

    return int(mx.get_peak_memory())


def process_peak_bytes() -> int:
    """Peak resident size of this process in bytes.

    Linux keeps ``ru_maxrss`` across ``exec``, so a command started by a large program would be
    charged with that program's size: the kernel's per-image figure is read instead.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
