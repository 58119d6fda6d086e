"""Checks of a model's own files."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...checkpoint.schema import FORMAT_VERSION, MANIFEST_KEY, has_manifest
from ...convert.report import format_bytes
from ...errors import CheckpointError, TurboQuantError, UnsupportedModelError
from ...kvcache.geometry import text_config
from ..headers import ModelFiles
from ..weights import read_manifest
from .check import Check, attempt, counted, failed, passed, warned


def check_files(model: ModelFiles) -> list[Check]:
    """All of them; an opened model has already passed those of its index and headers."""
    checks = [
        passed(
            "model.files",
            _describe_files(model),
        ),
        check_manifest(model),
        check_type(model),
        check_remote_code(model),
    ]
    if model.path is None:
        checks.append(_presence(model))
        return checks
    if all(check.status != "fail" for check in checks):
        checks.append(check_loads(model))
    checks += check_tokenizer(model)
    return checks


def _describe_files(model: ModelFiles) -> str:
    one = len(model.file_bytes) == 1
    whose = "its header says" if one else "their headers say"
    size = format_bytes(model.weight_bytes)
    return (
        f"{counted(len(model.file_bytes), 'weight file')}, complete and of the length {whose}: "
        f"{size} in {counted(len(model.tensors), 'tensor')}"
    )


def check_manifest(model: ModelFiles) -> Check:
    """Every tensor that the manifest promises, with its type and shape."""

    def work() -> str:
        manifest = read_manifest(model.config, model.tensors)
        if manifest is None:
            return "no TurboQuant model: nothing promised beyond the index"
        count = len(manifest.modules)
        if not has_manifest(model.config):
            return f"predecessor's format, {count} modules, all tensors there and of their shape"
        version = model.config[MANIFEST_KEY].get("format_version")
        return (
            f"format version {version} of {FORMAT_VERSION}, {count} modules, all tensors there "
            "and of their shape"
        )

    return attempt("model.manifest", work)


def check_type(model: ModelFiles) -> Check:
    """Whether the installed mlx-lm or mlx-vlm has a class for the model type."""
    name = model.model_type or ""
    inner = text_config(model.config).get("model_type")
    if _has_module("mlx_lm", [name]):
        return passed("model.type", f"{name}, which the installed mlx-lm knows")
    if _has_module("mlx_vlm", [name.lower()]):
        return warned(
            "model.type",
            f"{name} is known to mlx-vlm only",
            "mlx-vlm's own commands run it: python -m mlx_vlm.generate",
        )
    if importlib.util.find_spec("mlx_lm") is None:
        return warned("model.type", f"{name}: mlx-lm is not installed, nobody can tell")
    inside = f" (text part {inner})" if inner and inner != name else ""
    return failed(
        "model.type",
        f"neither mlx-lm nor mlx-vlm knows the model type {name}{inside}",
        "a newer mlx-lm may; this package needs one of the versions above",
    )


def _has_module(package: str, names: Iterable[str]) -> bool:
    """Whether a library has a file for one of the model types, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return False
    root = Path(next(iter(spec.submodule_search_locations)))
    renamed = _remapping(root / "utils.py")
    for name in names:
        for module in {name, renamed.get(name, name)}:
            if not module.replace("_", "").replace("-", "").isalnum():
                continue
            folder = root / "models" / module
            if (
                folder.with_name(folder.name + ".py").is_file()
                or (folder / "__init__.py").is_file()
            ):
                return True
    return False


def _remapping(file: Path) -> dict[str, str]:
    """The library's table of model types that another type's class loads."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == "MODEL_REMAPPING":
                return ast.literal_eval(node.value)
    return {}


def check_remote_code(model: ModelFiles) -> Check:
    """Whether code that comes with the model has to run."""
    ours = has_manifest(model.config)
    code = model.config.get("model_file")
    tokenizer_code = sorted(
        name
        for name in model.other_files
        if name.startswith("tokenization_") and name.endswith(".py")
    )
    if code is not None and not ours:
        return warned(
            "model.code",
            f"config.json names code of its own ({code})",
            "--trust-remote-code lets it run; do so only if you trust where it came from",
        )
    if tokenizer_code:
        return warned(
            "model.code",
            f"the tokenizer may need code of its own ({tokenizer_code[0]})",
            "--trust-remote-code lets it run; do so only if you trust where it came from",
        )
    return passed("model.code", "no code of its own has to run")


def check_loads(model: ModelFiles) -> Check:
    """Whether the model's class takes these tensors, all of them and no others; reads none."""
    path = model.path
    assert path is not None
    if (
        not _has_module("mlx_lm", [model.model_type or ""])
        and model.config.get("model_file") is None
    ):
        return warned(
            "model.loads",
            "mlx-lm has no class for it, so nothing was asked whether it takes these tensors",
            "mlx-vlm says so when it loads the model",
        )

    def work() -> str:
        from ...checkpoint.loader import load_model

        try:
            load_model(path, lazy=True, cpu_expand="never")
        except TurboQuantError as error:
            kind = type(error)
            raise kind(error.message.removeprefix(f"{path}: "), error.hint) from None
        return "the model's class takes every tensor (no weights were read)"

    return attempt("model.loads", work)


def check_tokenizer(model: ModelFiles) -> list[Check]:
    """Whether tokenizer and chat template load."""
    assert model.path is not None
    if not model.has_tokenizer:
        return [_no_tokenizer()]
    path = model.path
    loaded: list[Any] = []

    def work() -> str:
        from ...checkpoint.loader import load_tokenizer

        tokenizer = load_tokenizer(path, model.config)
        if not tokenizer.encode("a b"):
            raise CheckpointError("the tokenizer makes no tokens of a text")
        loaded.append(tokenizer)
        return f"loads, {len(tokenizer)} tokens"

    checks = [attempt("model.tokenizer", work)]
    if loaded:
        checks.append(check_chat_template(loaded[0]))
    return checks


def check_chat_template(tokenizer: Any) -> Check:
    """Whether the template turns a question into a prompt."""
    name = "model.chat_template"
    if not tokenizer.has_chat_template:
        return warned(name, "there is none: prompts are continued as they are, not answered")
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program, and may raise anything
        text = " ".join(str(error).split()) or type(error).__name__
        return failed(
            name,
            f"the chat template cannot be used: {text}",
            "copy chat_template.jinja or tokenizer_config.json from the model that this one was "
            "made from",
        )
    return passed(name, "there is one, and it makes a prompt of a question")


def _presence(model: ModelFiles) -> Check:
    if model.has_tokenizer:
        return passed("model.tokenizer", "its files are in the repository")
    return _no_tokenizer()


def _no_tokenizer() -> Check:
    return failed(
        "model.tokenizer",
        "there are no tokenizer files",
        "copy them from the model that this one was made from",
    )


def unreadable(error: TurboQuantError) -> Check:
    """The check of a model that could not even be opened."""
    kind = "model.format" if isinstance(error, UnsupportedModelError) else "model.files"
    return failed(kind, error.message, error.hint or "")
