"""What all commands share: how they end."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from turboquant_mlx import cli


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


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("how", ["keeps it", "makes another fault of it"])
def test_a_signal_that_a_library_keeps_to_itself_ends_a_command(name, code, how):
    done = python(
        "import signal, sys\n"
        "from turboquant_mlx import cli\n"
        "def command(argv):\n"
        "    try:\n"
        f"        signal.raise_signal(signal.{name})\n"
        "    except BaseException as error:\n"
        f"        if {how != 'keeps it'}:\n"
        "            raise RuntimeError('a descriptor') from error\n"
        "    return 0\n"
        "sys.exit(cli.run(command, []))\n"
    )
    assert done.returncode == code
    assert done.stderr == ("interrupted\n" if code == 130 else "")


def test_what_comes_after_a_command_is_not_ended_by_its_signals():
    done = python(
        "import signal\n"
        "from turboquant_mlx import cli\n"
        "print(cli.run(lambda argv: signal.raise_signal(signal.SIGINT), []))\n"
        "cli.raise_if_interrupted()\n"
        "print(cli.run(lambda argv: 0, []))\n"
    )
    assert (done.returncode, done.stdout) == (0, "130\n0\n")


def test_a_signal_between_commands_is_not_the_next_ones():
    done = python(
        "import signal, threading\n"
        "from turboquant_mlx import cli\n"
        "cli.run(lambda argv: 0, [])\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    cli.raise_if_interrupted()\n"
        "print(cli.run(lambda argv: 0, []))\n"
        "def keeps_it(argv):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        other = threading.Thread(target=cli.run, args=(lambda argv: 0, []))\n"
        "        other.start(), other.join()\n"
        "print(cli.run(keeps_it, []))\n"
    )
    assert (done.returncode, done.stdout) == (0, "0\n130\n")


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


def test_an_interval_of_progress_that_is_no_number_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv("TQDM_MININTERVAL", "often")
    assert cli.run(lambda argv: pytest.fail("the command ran"), []) == 2
    assert capsys.readouterr().err == "error: TQDM_MININTERVAL 'often' is not a number of seconds\n"


@pytest.mark.parametrize(
    "value, off", [("1", True), ("true", True), ("0", False), ("", False), (None, False)]
)
def test_a_variable_switches_progress_bars_off(monkeypatch, value, off):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("TQDM_DISABLE", value)
    assert cli.bars_are_off(True) is off
    assert cli.bars_are_off(False)
