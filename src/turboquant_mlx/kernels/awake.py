"""Keep processors from falling asleep while a model generates on them.

For each generated token Python hands work to MLX's thread and waits for it about a hundred times.
Where nothing else runs the processor sleeps in each gap, and on a virtual machine waking it costs
more than many a gap is long. A process per processor that loops in the gaps prevents that. It has
the scheduling class SCHED_IDLE, so whatever else wants the processor takes it at once: everything
in the same container and login session, that is, for between those the system shares out time
without regard to the class of their processes. The price is power.

These are processes and not threads of ours: a thread of that class that holds the interpreter
lock would wait for other programs to finish, and we for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import OptionError
from .dispatch import backend

MOST_CORES = 8  # a token's work is spread over few; more would cost power for nothing

# Looks every few milliseconds whether the parent is still there.
_LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def cores_awake(cores: int | None = None) -> Iterator[list[int]]:
    """Keep processors awake inside a ``with`` block; gives the ids of the processes that do it.

    They are gone when the block is left, however that happens, and soon after this process when
    it is killed. They stay in its process group: a terminal that stops it (Ctrl-Z) stops them.

    Args:
        cores: how many of the CPUs that this process may use, the first ones; default and limit
            MOST_CORES.

    Raises:
        OptionError: it cannot be done here (``why_not_awake``), or the system refuses.
    """
    reason = why_not_awake()
    if reason:
        raise OptionError(f"processors cannot be kept awake: {reason}")
    cpus = sorted(os.sched_getaffinity(0))[: min(cores or MOST_CORES, MOST_CORES)]
    loops: list[subprocess.Popen[bytes]] = []
    try:
        try:
            for cpu in cpus:
                loops.append(_start_loop(cpu))
        except OSError as error:
            raise OptionError(
                f"processors cannot be kept awake: {error.strerror or error}"
            ) from error
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            # On a busy machine one of class SCHED_IDLE would take a second to die.
            if loop.poll() is None:
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(loop.pid, os.SCHED_OTHER, os.sched_param(0))
                loop.kill()
        for loop in loops:
            loop.wait()


def why_not_awake() -> str:
    """Why processors cannot be kept awake here, in words that follow a colon; "" if they can."""
    if sys.platform != "linux":
        return "this works on Linux only"
    if backend() != "cpu":
        return "MLX runs on the GPU here"
    if not hasattr(os, "SCHED_IDLE"):
        return "this system has no scheduling class for idle time"
    if _is_limited(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        return "the processor time of this container is limited, and this would use it up"
    return ""


def _start_loop(cpu: int) -> subprocess.Popen[bytes]:
    """A process that loops on one CPU when nothing else wants it.

    Raises:
        OSError: it cannot be started, or not with these properties; none is left then.
    """
    command = [sys.executable, "-I", "-S", "-c", _LOOP, str(os.getpid())]
    none = subprocess.DEVNULL
    loop = subprocess.Popen(command, stdin=none, stdout=none, stderr=none)
    try:
        # From here rather than by itself: a refusal is then ours to report.
        os.sched_setaffinity(loop.pid, {cpu})
        os.sched_setscheduler(loop.pid, os.SCHED_IDLE, os.sched_param(0))
    except BaseException:
        loop.kill()
        loop.wait()
        raise
    return loop


def _is_limited(mount: Path, membership: Path) -> bool:
    """Whether a control group, version 1 or 2, limits the processor time of this process.

    Args:
        mount: where control groups are mounted.
        membership: the file that says which groups the process is in. A container may see other
            names in it than those below ``mount``, where its own group is then on top.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops, limit = [mount, mount / "unified"], "cpu.max"
        elif "cpu" in controllers.split(","):
            tops, limit = [mount / "cpu", mount / controllers], "cpu.cfs_quota_us"
        else:
            continue
        for top in tops:
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(top):
                    break
                quota = _read(folder / limit).split()
                if quota and quota[0] not in ("max", "-1"):
                    return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
