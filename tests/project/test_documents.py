"""The documents agree with the repository: option reference, links, file tree, commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="argparse words options differently from Python 3.13 on"
)
def test_the_option_reference_is_what_help_prints():
    command = [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{name_of(document)} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_scripts_that_are_named_exist(document):
    for script in re.findall(r"\bscripts/[\w.-]+\.(?:py|sh)", document.read_text(encoding="utf-8")):
        assert (ROOT / script).exists(), f"{name_of(document)} names {script}"


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    linked = re.findall(r"\]\(([^)#\s]+\.md)", index.read_text(encoding="utf-8"))
    pages = {path.resolve() for path in (ROOT / "docs").rglob("*.md")} - {index.resolve()}
    assert pages <= {(index.parent / link).resolve() for link in linked}


def test_the_tree_in_the_readme_lists_what_is_there():
    """Indented names below a fence that begins with ``.``; a comment follows two spaces and #."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"```text\n\.\n(.*?)```", text, flags=re.S)
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = line.split("#")[0].split()
        folders[depth - 1 :] = [names[0]]
        for name in names:
            path = ROOT.joinpath(*folders[: depth - 1], name)
            assert path.exists(), f"the README's tree lists {path.relative_to(ROOT)}"
            assert path.is_dir() == name.endswith("/")
