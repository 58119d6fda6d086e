"""The pictures of docs/concepts: there, small, described, and made by a script that says what it
needs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from turboquant_mlx.quant.codebook import lloyd_max

ROOT = Path(__file__).resolve().parents[2]
CONCEPTS = ROOT / "docs" / "concepts"
PICTURES = sorted((CONCEPTS / "images").glob("*.svg"))
PAGES = [CONCEPTS / f"{picture.stem}.md" for picture in PICTURES]
SCRIPT = ROOT / "scripts" / "plot_concepts.py"
LARGEST = 60_000


def pictures_in(page: Path) -> dict[str, str]:
    """File -> its description."""
    found = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    return {target: description for description, target in found}


def load_script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("plot_concepts", SCRIPT)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    return script


def plot(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script where matplotlib is not installed."""
    program = (
        "import runpy, sys; sys.modules['matplotlib'] = None; "
        f"sys.argv = [{str(SCRIPT)!r}, *{list(arguments)!r}]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_concept_has_a_picture_that_is_described_in_words(page):
    pictures = pictures_in(page)
    assert f"images/{page.stem}.svg" in pictures
    for target, description in pictures.items():
        assert (page.parent / target).is_file()
        assert len(description) > 80, "who does not see the picture should learn what it shows"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_concept_says_how_its_effect_was_measured(page):
    text = page.read_text(encoding="utf-8")
    assert "python scripts/bench_quality.py" in text
    assert f"--only {page.stem}`" in text
    assert "(../benchmarks.md)" in text


def test_the_script_draws_what_is_shown():
    script = load_script()
    assert {picture.stem for picture in PICTURES} == (script.WITH_MODEL | script.WITHOUT).keys()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_pictures_are_small_and_need_nothing_else(picture):
    source = picture.read_text(encoding="utf-8")
    assert len(source) < LARGEST
    ElementTree.fromstring(source)
    assert "<script" not in source
    links = re.findall(r'href="([^"]*)"', source)
    assert all(link.startswith("#") for link in links)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_pictures_have_no_background_of_their_own(picture):
    """They are shown on white and on black."""
    source = picture.read_text(encoding="utf-8").lower()
    for colour in ("#ffffff", "#000000", "fill: white", "fill: black"):
        assert f"fill: {colour}" not in source


def test_the_errors_in_the_text_are_those_of_the_tables():
    script = load_script()
    for name in ("codebooks", "trellis"):
        text = (CONCEPTS / f"{name}.md").read_text(encoding="utf-8")
        (table, *_) = re.findall(r"\| bits \|.*?Lloyd-Max.*?\n\n", text, flags=re.S)
        column = [cell.strip() for cell in table.splitlines()[0].split("|")].index("Lloyd-Max")
        rows = [[c.strip() for c in row.split("|")] for row in table.splitlines()[2:]]
        seen = {row[1]: float(row[column]) for row in rows if row[1:2] and row[1].isdigit()}
        assert seen.keys() == {"2", "3", "4"}
        for bits, error in seen.items():
            exact = script.lloyd_error(lloyd_max(int(bits)))
            assert error == pytest.approx(exact, abs=6e-5), f"{name}.md, {bits} bits"


def test_help_needs_no_matplotlib():
    done = plot("--help")
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout


def test_without_matplotlib_the_script_says_how_to_get_it(tmp_path):
    done = plot("--only", "codebooks", "--out", str(tmp_path / "images"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: matplotlib is not installed",
        'hint: pip install "matplotlib>=3.9"',
    ]
    assert not (tmp_path / "images").exists()


def test_a_picture_that_needs_a_model_is_refused_without_one():
    done = plot("--only", "rotation")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: the picture rotation needs the folder of a model"]
