"""What all commands share: how they end."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("command", ["convert", "generate", "evaluate"])
def test_ctrl_c_while_a_command_is_imported(command):
    """As a console script imports its command, before ``main`` is there to catch anything."""
    done = python(
        "import sys, types\n"
        "class Pressed(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        raise KeyboardInterrupt\n"
        "sys.modules['turboquant_mlx.errors'] = Pressed('errors')\n"
        f"from turboquant_mlx.{command}.command import main\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_other_faults_are_shown_as_ever():
    done = python("import turboquant_mlx.cli; 1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_progress_in_a_log_adds_to_it_every_few_seconds_only():
    done = python(
        "import time\n"
        "from turboquant_mlx import cli\n"
        "def command(argv):\n"
        "    from tqdm import tqdm\n"
        "    for _ in tqdm(range(50), desc='converting'):\n"
        "        time.sleep(0.02)\n"
        "cli.run(command, [])\n"
    )
    drawn = re.findall("converting: +[0-9]+%", done.stderr)
    assert drawn == ["converting:   0%", "converting: 100%"]
