"""What users install: the built wheel, alone in a clean environment.

The environment is new and holds nothing but the wheel. Downloading MLX and transformers again
would take minutes, so a .pth file lets it see the packages of the environment that runs the
tests. That cannot lend it this package: an editable installation is a .pth file too, and Python
reads no .pth files in folders that a .pth file names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, turboquant_mlx
for module in pkgutil.walk_packages(turboquant_mlx.__path__, "turboquant_mlx."):
    print(importlib.import_module(module.name).__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    run(*command, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(lent)) + "\n")
    return folder


def test_the_wheel_holds_the_package_its_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "turboquant_mlx",
        f"turboquant_mlx_kit-{wheel.name.split('-')[1]}.dist-info",
    }
    assert "turboquant_mlx/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    files = {path for path in (ROOT / "src" / "turboquant_mlx").rglob("*") if path.is_file()}
    sources = {str(path.relative_to(ROOT / "src")) for path in files if path.suffix != ".pyc"}
    assert sources == {name for name in names if name.startswith("turboquant_mlx/")}


def test_the_metadata_says_what_pyproject_says(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = HeaderParser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "turboquant-mlx-kit"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {"cpu", "cuda", "dev", "eval", "vlm"}
    base = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(base) == len(PROJECT["dependencies"])


def test_every_module_can_be_imported_from_the_wheel(environment):
    files = run(environment / "bin" / "python", "-c", IMPORT_EVERYTHING, cwd=environment)
    assert files.split()
    for file in files.split():
        assert Path(file).is_relative_to(environment), f"{file} is not from the wheel"
    assert len(files.split()) == len(list((ROOT / "src" / "turboquant_mlx").rglob("*.py"))) - 1


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_every_command_is_installed_and_explains_itself(environment, command):
    assert f"usage: {command} " in run(environment / "bin" / command, "--help", cwd=environment)


@pytest.mark.parametrize("module", ["convert", "generate"])
def test_commands_run_as_modules_too(environment, module):
    python = environment / "bin" / "python"
    help_text = run(python, "-m", f"turboquant_mlx.{module}", "--help", cwd=environment)
    assert help_text.startswith(f"usage: turboquant-{module} ")
