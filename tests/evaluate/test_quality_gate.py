"""The real SmolLM2 must not lose more text than it does today.

A conversion is scored on a few hundred tokens of WikiText-2 with the divergence from the
16-bit model. Budgets stand about 20 % above what was measured (in the comment of each): another
seed of the random signs moves one run by 10 %, a part of the method that is lost moves it by more
(without balancing 3 bits come to about 2 nats). Who improves the method lowers them; who has to
raise them says why. scripts/bench_quality.py makes the table with all methods and seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.evaluate.candidates import Candidate, prepare
from turboquant_mlx.evaluate.reference import ReferenceCache
from turboquant_mlx.evaluate.scorer import Scorer
from turboquant_mlx.evaluate.text import read_text

SLICE = Path(__file__).parents[1] / "fixtures" / "wikitext" / "slice.txt"

# (bits, codec): (divergence in nats per token, stored bits per weight)
BUDGETS = {
    (3, "trellis"): (0.39, 3.1),  # 0.327 @ 3.06; seed 43 came to 0.285
    (4, "scalar"): (0.12, 4.3),  # 0.101 @ 4.27; seed 43 came to 0.087
    (4, "trellis"): (0.098, 4.1),  # 0.077 @ 4.06; seed 43 came to 0.082
}
# the longest search, of a code that 3 bits and of a width that the scalar code stand for
HEAVY = (4, "trellis")
CASES = [
    pytest.param(*case, marks=[pytest.mark.heavy] if case == HEAVY else []) for case in BUDGETS
]


@pytest.fixture(scope="module")
def scorer(smollm2, tmp_path_factory) -> Scorer:
    """Scores models against SmolLM2 on 4 x 128 tokens."""
    cache = ReferenceCache(tmp_path_factory.mktemp("cache"), 10**9)
    text = read_text(SLICE).content
    scorer = Scorer(inspect_folder(smollm2), text, count=4, length=128, cache=cache)
    scorer.run_reference()
    return scorer


@pytest.mark.model
@pytest.mark.parametrize(("bits", "codec"), CASES)
def test_a_conversion_stays_within_its_budget(scorer, smollm2, bits, codec):
    options = {"bits": bits, "codec": codec}
    candidate = Candidate(f"{bits} bits", "turboquant", bits, options=options)
    prepared = prepare(candidate, smollm2)
    summary = scorer.score(prepared.model, candidate.name)
    divergence, bits_per_weight = BUDGETS[bits, codec]
    assert prepared.size.bits_per_weight <= bits_per_weight
    assert summary.divergence <= divergence
    # a quantized model that is this close to the 16-bit one in so few bits would be a mistake
    assert summary.divergence > divergence / 10
