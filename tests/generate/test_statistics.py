"""The report after a generation."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from turboquant_mlx.generate.statistics import Statistics, mlx_peak_bytes, process_peak_bytes


def response(generated, finish_reason=None, generation_tps=10.0):
    return SimpleNamespace(
        prompt_tokens=41,
        prompt_tps=155.25,
        generation_tokens=generated,
        generation_tps=generation_tps,
        finish_reason=finish_reason,
    )


def report(*responses):
    statistics = Statistics()
    for one in responses:
        statistics.update(one)
    return statistics.lines(mlx_bytes=520_000_000, process_bytes=1_814_000_000)


def test_the_report_names_tokens_speeds_and_both_peaks():
    assert report(response(20), response(40, "stop")) == [
        "prompt: 41 tokens, 155.2 tokens/s",
        "generated: 40 tokens, 9.8 tokens/s (ended by the model)",
        "peak memory: 0.52 GB counted by MLX, 1.81 GB of the whole process",
    ]


def test_the_speed_counts_only_tokens_made_in_the_time_measured():
    # mlx-lm's clock starts when the first token is there: 4 tokens in 1 s after that are 4/s.
    statistics = Statistics()
    statistics.update(response(5, "length", generation_tps=5 / 1.0))
    assert statistics.generation_rate == pytest.approx(4.0)


def test_a_single_token_has_no_speed():
    line = report(response(1, "length", generation_tps=1e6))[1]
    assert line == "generated: 1 token (cut off by --max-tokens)"


def test_an_unfinished_generation_is_called_interrupted():
    assert report(response(3))[1].endswith("(interrupted)")


def test_the_process_peak_sees_what_mlx_does_not():
    import numpy as np

    before, counted = process_peak_bytes(), mlx_peak_bytes()
    block = np.ones(before // 8 + 25_000_000)
    assert process_peak_bytes() >= block.nbytes
    assert mlx_peak_bytes() == counted


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss survives exec only on Linux")
def test_the_process_peak_does_not_include_who_started_it():
    import numpy as np

    block = np.ones(40_000_000)
    code = "from turboquant_mlx.generate.statistics import *; print(process_peak_bytes())"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert int(child.stdout) < block.nbytes
