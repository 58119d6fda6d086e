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
error. Exit codes: 0 done, 2 an error or a bad option, 130 interrupted with Ctrl-C. From
`turboquant-plan` and `turboquant-doctor`, 1 means that the model will not run or is damaged. An
error is one line that begins with `error:`, sometimes with a `hint:` line below it.
"""


def commands() -> dict[str, str]:
    """Module that is run with ``python -m`` -> name of the command: its console script if it has
    one, else how it is run."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    scripts = tomllib.loads(text)["project"]["scripts"]
    names = {entry.partition(".command:")[0]: name for name, entry in scripts.items()}
    for main_file in sorted((ROOT / "src").glob("*/**/__main__.py")):
        module = ".".join(main_file.parent.relative_to(ROOT / "src").parts)
        names.setdefault(module, f"python -m {module}")
    return names


def help_of(module: str) -> str:
    """What the command prints for --help."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"COLUMNS": str(COLUMNS), "PYTHONPATH": path, "NO_COLOR": "1"}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {module} --help failed: {done.stderr.strip()}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page() -> str:
    parts = [HEAD]
    for module, name in commands().items():
        also = "" if module in name else f"Also `python -m {module}`.\n\n"
        parts.append(f"## {name}\n\n{also}```text\n{help_of(module)}\n```\n")
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
