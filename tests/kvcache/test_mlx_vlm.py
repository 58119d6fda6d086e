"""mlx-vlm's server and its generation with packed caches, end to end.

The server is asked over HTTP, in a process of its own, with a model that has layers with a sliding
window and full ones. It is started by the program of the guide.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiny
from turboquant_mlx.kvcache.install import CacheReport, install
from turboquant_mlx.kvcache.spec import KVSpec

pytest.importorskip("mlx_vlm", reason="the vlm extra is not installed")

WINDOW = 48
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "kv-cache.md").read_text(encoding="utf-8")
_, BY_HAND = re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.S | re.M)
# what every append leaves behind is written to a file
PROGRAM = """
import json, sys
from turboquant_mlx.kvcache import packed, rotating, views

report, seen = sys.argv.pop(1), {}

def counted(store, keys, values, original=views.view_pair):
    facts = seen.setdefault(str(store.widths), {"rows": 0, "steps": 0, "largest": 0, "plain": 0})
    facts["rows"] = max(facts["rows"], store.batch)
    facts["steps"] += 1
    if all(store.frozen):
        facts["largest"] = max(facts["largest"], store.nbytes - store.spare_nbytes)
        facts["plain"] = max(facts["plain"], store.plain_nbytes())
    open(report, "w").write(json.dumps(seen))
    return original(store, keys, values)

packed.view_pair = rotating.view_pair = counted
""" + BY_HAND.replace("KVSpec(5, 4)", "KVSpec(8, 8)")

QUESTIONS = ["why does ice float?", "tell me of the sea and of the wind " * 4, "and then? " * 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "gpt_oss"
    tiny.build_source(path, "gpt_oss", dtype="float32", sliding_window=WINDOW)
    return path


@contextmanager
def server(folder: Path, scratch: Path, **environment: str):
    """A function that asks the server, and one that tells what its caches were."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report, log = scratch / "report.json", scratch / "server.log"
    command = [sys.executable, "-c", PROGRAM, str(report), "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}
        )
    url = f"http://127.0.0.1:{port}"

    def ask(question: str) -> dict:
        body = {
            "model": str(folder),
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 60,
            "temperature": 0,
            "logit_bias": {"0": -100, "2": -100},  # no answer ends early
        }
        request = urllib.request.Request(
            url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(url + "/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield ask, lambda: json.loads(report.read_text())
    finally:
        process.terminate()
        process.wait(30)


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


@pytest.mark.heavy
def test_requests_over_http_are_answered_from_packed_caches(folder, tmp_path):
    """Three at once get the answers that each gets alone."""
    with server(folder, tmp_path) as (ask, caches):
        alone = [ask(question) for question in QUESTIONS]
        assert [a["usage"]["completion_tokens"] for a in alone] == [60] * len(QUESTIONS)
        assert max(a["usage"]["prompt_tokens"] for a in alone) > 2 * WINDOW
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            together = list(pool.map(ask, QUESTIONS))
        (facts,) = caches().values()
    assert [text_of(a) for a in together] == [text_of(a) for a in alone]
    assert facts["rows"] > 1
    assert facts["steps"] > 2 * 60
    assert 0 < facts["largest"] < facts["plain"] / 3  # 8 bits in place of 32


@pytest.mark.heavy
def test_the_prefix_cache_keeps_and_restores_packed_caches(folder, tmp_path):
    """The same question again: its tokens come from the prefix cache, the answer is the same."""
    with server(folder, tmp_path, APC_ENABLED="1", APC_DISK_ENABLED="0") as (ask, _):
        first, again = (ask(QUESTIONS[1]) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > WINDOW
    assert text_of(again) == text_of(first)


def test_generation_in_python(folder):
    import mlx_vlm
    from mlx_vlm.models.cache import make_prompt_cache

    model, processor = mlx_vlm.load(str(folder))

    def answer() -> tuple[str, CacheReport]:
        cache = make_prompt_cache(model.language_model)
        made = mlx_vlm.generate(
            model, processor, QUESTIONS[1], max_tokens=40, temperature=0.0, prompt_cache=cache
        )
        return made.text, CacheReport.of(cache)

    plain, before = answer()
    install(model.language_model, KVSpec(8, 8))
    packed, after = answer()
    assert packed == plain
    assert (before.packed, after.packed, after.pending, after.left) == (0, 2, 0, {})
    assert after.held < before.held
