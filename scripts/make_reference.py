#!/usr/bin/env python3
"""Write docs/reference/command-line.md from what every command's --help prints.

    python scripts/make_reference.py           # write the page
    python scripts/make_reference.py --check   # only say whether it is up to date

The page is made with Python 3.11 or 3.12: argparse words options in another way from 3.13 on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "command-line.md"
COLUMNS = 100

HEAD = """# Command line

Every command's own `--help`. Written by `scripts/make_reference.py`: do not edit it by hand.

Results go to standard output, everything else (progress, notes, statistics, errors) to standard
error. Exit codes: 0 done, 2 an error or a bad option, 130 interrupted with Ctrl-C. An error is one
line that begins with `error:`, sometimes with a `hint:` line below it.
"""


def commands() -> dict[str, str]:
    """Command name -> entry point, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]["scripts"]


def help_of(entry: str) -> str:
    """What the console script of this entry point prints for --help."""
    module, _, function = entry.partition(":")
    program = f"import sys; from {module} import {function} as f; sys.exit(f(['--help']))"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"COLUMNS": str(COLUMNS), "PYTHONPATH": path, "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {entry} --help failed: {done.stderr.strip()}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page() -> str:
    parts = [HEAD]
    for name, entry in commands().items():
        module = entry.partition(":")[0].removesuffix(".command")
        parts.append(f"## {name}\n\nAlso `python -m {module}`.\n\n```text\n{help_of(entry)}\n```\n")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if it is stale")
    args = parser.parse_args(argv)
    if sys.version_info >= (3, 13):
        print("error: the page is made with Python 3.11 or 3.12", file=sys.stderr)
        return 2
    text = page()
    if args.check:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is stale", file=sys.stderr)
        print("hint: run scripts/make_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
