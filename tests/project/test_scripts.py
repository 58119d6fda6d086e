"""scripts/*.sh: they do each thing once, and say in one line what keeps them from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEN_MINUTES = 600


def bash(*arguments: str, **env: str | Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURBOQUANT")}
    kept.pop("PYTHON", None)
    values = {name: str(value) for name, value in env.items()}
    return subprocess.run(
        ["bash", *arguments], cwd=ROOT, env=kept | values, capture_output=True, text=True
    )


def shared(command: str, **env: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with the functions of environment.sh."""
    program = f'set -euo pipefail; root="{ROOT}"; source scripts/environment.sh; {command}'
    return bash("-c", program, **env)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ["test.sh", "quickstart.sh"])
def test_help_is_the_comment_at_the_top(script):
    done = bash(f"scripts/{script}", "--help")
    assert done.returncode == 0
    assert f"bash scripts/{script}" in done.stdout


@pytest.mark.parametrize("script", ["test.sh", "quickstart.sh"])
def test_an_unknown_option_is_refused(script):
    done = bash(f"scripts/{script}", "--fast")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown ")
    assert "--fast" in done.stderr


def test_without_python_the_reason_is_said(tmp_path):
    done = shared("find_python", PYTHON=tmp_path / "nothing")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: no Python was found"


def test_an_old_python_is_named(tmp_path):
    old = program(tmp_path / "python3", "exit 1")
    done = shared("find_python", PYTHON=old)
    assert done.returncode == 2
    assert str(old) in done.stderr.splitlines()[0]
    assert "3.11 or newer" in done.stderr


def test_a_python_that_cannot_make_environments_is_named(tmp_path):
    """Debian splits that off into a package of its own."""
    bare = program(tmp_path / "python3", 'case "$2" in *ensurepip*) exit 1;; esac')
    done = shared("find_python", PYTHON=bare)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {bare} cannot make virtual environments",
        "hint: on Debian and Ubuntu: apt install python3-venv",
    ]


def test_the_first_python_that_will_do_is_taken(tmp_path):
    old = program(tmp_path / "old", "exit 1")
    good = program(tmp_path / "good", "exit 0")
    done = shared("find_python", PYTHON=f"{old} {good}")
    assert done.stdout == f"{good}\n"


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="Macs have one back-end")
@pytest.mark.parametrize(("driver", "backend"), [("exit 0", "cuda"), ("exit 9", "cpu")])
def test_the_backend_is_cuda_where_the_driver_answers(tmp_path, driver, backend):
    program(tmp_path / "nvidia-smi", driver)
    done = shared("find_backend", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout == f"{backend}\n"


def test_the_backend_can_be_chosen():
    assert shared("find_backend", TURBOQUANT_BACKEND="cuda").stdout == "cuda\n"
    done = shared("find_backend", TURBOQUANT_BACKEND="rocm")
    assert done.returncode == 2
    assert done.stderr.startswith("error: TURBOQUANT_BACKEND is rocm")


def test_an_environment_is_filled_once(tmp_path):
    """Python is replaced by programs that note what they are asked for."""
    notes = tmp_path / "notes"
    fill = f'mkdir -p "$4/bin"; cp {tmp_path}/inner "$4/bin/python"'
    program(tmp_path / "inner", f'case "$*" in *--editable*) echo "$@" >> {notes};; esac')
    python = program(tmp_path / "python3", f'case "$*" in *"-m venv"*) {fill};; esac')
    folder = tmp_path / "environment"

    def make(extras: str, *packages: str) -> list[str]:
        done = shared(f"make_environment {folder} {extras} {' '.join(packages)}", PYTHON=python)
        assert done.returncode == 0, done.stderr
        return notes.read_text().splitlines()

    assert len(make("cpu")) == 1
    assert len(make("cpu")) == 1
    assert make("cpu,dev", "gguf")[1].endswith(f"--editable {ROOT}[cpu,dev] gguf")
    (folder / "installed").unlink()  # as after an installation that was cut short
    assert len(make("cpu,dev", "gguf")) == 3


def test_a_failed_installation_is_not_taken_for_a_good_one(tmp_path):
    fill = f'mkdir -p "$4/bin"; cp {tmp_path}/inner "$4/bin/python"'
    program(tmp_path / "inner", "exit 1")
    python = program(tmp_path / "python3", f'case "$*" in *"-m venv"*) {fill};; esac')
    done = shared(f"make_environment {tmp_path}/environment cpu", PYTHON=python)
    assert done.returncode == 2
    assert "error: pip could not install the package" in done.stderr
    assert not (tmp_path / "environment" / "installed").exists()


@pytest.mark.heavy
@pytest.mark.model
def test_the_quickstart_answers_from_nothing_in_ten_minutes(tmp_path):
    clone = tmp_path / "clone"
    leave = shutil.ignore_patterns(".git", ".venv*", "models", "*_cache", "__pycache__")
    shutil.copytree(ROOT, clone, ignore=leave)
    quickstart = str(clone / "scripts" / "quickstart.sh")

    start = time.monotonic()
    done = bash(quickstart, XDG_CACHE_HOME=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert time.monotonic() - start < TEN_MINUTES

    again = bash(quickstart, XDG_CACHE_HOME=tmp_path / "cache")
    assert again.stdout == done.stdout
    assert "installing" not in again.stderr
    assert "converting" not in again.stderr
