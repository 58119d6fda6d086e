"""Imports run one way: mathematics below, commands above, and the planner's share free of MLX."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "turboquant_mlx"
SOURCE = Path(__file__).resolve().parents[2] / "src" / PACKAGE

# A module may import from its own room and from rooms with a lower number.
ROOMS = {
    "errors": 0,
    "cli": 0,
    "quant": 1,
    "kernels": 2,
    "layers": 3,
    "kvcache": 3,
    "checkpoint": 4,
    "convert": 5,
    "generate": 6,
    "evaluate": 6,
    "stream": 6,
    "serve": 6,
    "vlm": 6,
    "plan": 6,
}

# What the planner and every --help use.
MLX_FREE = [
    "errors",
    "cli",
    "quant.spec",
    "checkpoint.card",
    "checkpoint.config",
    "checkpoint.headers",
    "checkpoint.predecessor",
    "checkpoint.schema",
    "checkpoint.source",
    "checkpoint.writer",
    "convert.options",
    "convert.recipe",
    "convert.report",
    "kvcache.options",
    "kvcache.spec",
]
HEAVY = {"mlx", "mlx_lm", "mlx_vlm", "torch", "transformers"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(name: str) -> set[str]:
    """Absolute names of all modules that a module imports, at the top or late; imports that only
    a type checker follows do not count."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in live_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            inside = {f"{base}.{alias.name}" for alias in node.names}
            # "from .quant import spec" imports the module spec, "from .spec import X" only spec.
            found |= {n for n in inside if n in MODULES} or {base}
    return found


def live_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from live_nodes(other)
            continue
        yield node
        yield from live_nodes(node)


def room_of(name: str) -> str:
    return name.split(".")[1]


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == PACKAGE}


@pytest.mark.parametrize("name", [name for name in MODULES if name != PACKAGE])
def test_a_module_imports_only_from_its_own_room_and_rooms_below(name):
    assert room_of(name) in ROOMS, f"{name} is in no known room"
    for target in ours(imports_of(name)) - {PACKAGE}:
        same = room_of(target) == room_of(name)
        below = ROOMS[room_of(target)] < ROOMS[room_of(name)]
        level = ROOMS[room_of(name)] == 0 == ROOMS[room_of(target)]
        assert same or below or level, f"{name} imports {target}, which stands above or beside it"


@pytest.mark.parametrize("name", [name for name in MODULES if name != PACKAGE])
def test_a_module_takes_nothing_but_the_version_from_the_package_itself(name):
    """Its public names lead upwards: load lives in checkpoint, convert in convert."""
    for node in live_nodes(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            depth = name.count(".") + (MODULES[name].name == "__init__.py")
            whole = node.module == PACKAGE or (node.level == depth and node.module is None)
            for alias in node.names if whole else []:
                module = f"{PACKAGE}.{alias.name}" in MODULES
                assert module or alias.name == "__version__", f"{name} imports {alias.name}"


def test_there_are_no_circles():
    graph = {name: ours(imports_of(name)) - {PACKAGE} for name in MODULES if name != PACKAGE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("short", MLX_FREE)
def test_mlx_free_modules_do_not_import_mlx_not_even_late(short):
    """What they import of ours may do so late, in functions for arrays (quant.rotation does)."""
    top_level = {target.split(".")[0] for target in imports_of(f"{PACKAGE}.{short}")}
    assert not top_level & HEAVY


def loaded_by(*names: str) -> set[str]:
    """Top-level names in sys.modules after a fresh Python has imported these modules."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_mlx_free_modules_loads_no_heavy_library():
    assert not loaded_by(*(f"{PACKAGE}.{short}" for short in MLX_FREE)) & HEAVY


def test_importing_a_command_loads_no_heavy_library():
    commands = [name for name in MODULES if name.endswith((".command", ".__main__"))]
    assert len(commands) >= 4
    assert not loaded_by(*commands) & HEAVY


def test_importing_the_packages_loads_not_even_numpy():
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    assert not loaded_by(*packages) & (HEAVY | {"numpy", "safetensors", "huggingface_hub"})
