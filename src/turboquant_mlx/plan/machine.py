"""The machine that a model is planned for: its memory, and how much of it a model may take.

Facts are values of a record, so that tests (and ``--ram-gb``, ``--wired-gb``) plan for any machine.
Nothing here imports MLX: a Mac is asked through sysctl, an NVIDIA driver through nvidia-smi.

Units: GB is 10**9 bytes everywhere in the output. Only ``--ram-gb`` counts as machines are sold
(16 means 16 * 2**30 bytes), as MLX and macOS do.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import OptionError

GIB = 2**30
GB = 10**9
MIB = 2**20
MOST_GB = 1e6
"""Memory of no machine that anybody has, in GB."""

BackendName = Literal["metal", "cuda", "cpu"]

# Metal's recommended working set of Macs that nobody changed: two thirds of small memories, three
# quarters of larger ones.
_SMALL_MAC = 36 * GIB
# What macOS needs for itself when the limit is raised by hand.
_MAC_RESERVE = 3 * GB
_MAC_SHARE = 0.9
# Context of the driver and of the libraries on the GPU, which no allocation can use.
_CUDA_RESERVE = 600 * MIB
_RAM_SHARE = 0.9

# GB/s of the memory of machines, from their makers' data sheets.
_BANDWIDTH = {
    "Apple M1": 68, "Apple M1 Pro": 200, "Apple M1 Max": 400, "Apple M1 Ultra": 800,
    "Apple M2": 100, "Apple M2 Pro": 200, "Apple M2 Max": 400, "Apple M2 Ultra": 800,
    "Apple M3": 100, "Apple M3 Pro": 150, "Apple M3 Max": 300, "Apple M3 Ultra": 819,
    "Apple M4": 120, "Apple M4 Pro": 273, "Apple M4 Max": 410, "Apple M5": 153,
    "NVIDIA H200": 4800, "NVIDIA H100 80GB HBM3": 3350, "NVIDIA A100-SXM4-80GB": 2039,
    "NVIDIA GeForce RTX 4090": 1008, "NVIDIA GeForce RTX 3090": 936,
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What a plan needs to know of a machine.

    Attributes:
        backend: where MLX would run: "metal", "cuda" or "cpu".
        name: processor or GPU, "" where unknown.
        ram_bytes: main memory, None where unknown.
        device_bytes: Metal's working set, or the GPU's memory; None on the CPU.
        device_basis: where that number comes from.
        assumed: whether the user described it, so that this machine was not asked.
        bandwidth_gb_s: memory bandwidth in GB/s, None where unknown.
    """

    backend: BackendName
    name: str = ""
    ram_bytes: int | None = None
    device_bytes: int | None = None
    device_basis: str = ""
    assumed: bool = False
    bandwidth_gb_s: float | None = None

    @property
    def ceiling_bytes(self) -> int | None:
        """Bytes that a model, its caches and workspace may take as the machine is set up now."""
        if self.backend == "cpu":
            return None if self.ram_bytes is None else int(self.ram_bytes * _RAM_SHARE)
        if self.device_bytes is None:
            return None
        if self.backend == "cuda":
            return max(self.device_bytes - _CUDA_RESERVE, 0)
        return self.device_bytes

    @property
    def raised_ceiling_bytes(self) -> int | None:
        """The same on a Mac whose wired limit is raised as far as is sensible; else None."""
        if self.backend != "metal" or self.ram_bytes is None:
            return None
        return max(min(int(self.ram_bytes * _MAC_SHARE), self.ram_bytes - _MAC_RESERVE), 0)

    @property
    def ceiling_basis(self) -> str:
        """Where the ceiling comes from, in words."""
        if self.backend == "cpu":
            return f"{_RAM_SHARE:.0%} of main memory"
        if self.backend == "cuda":
            return f"{self.device_basis} less {_CUDA_RESERVE / GB:.1f} GB for the driver"
        return self.device_basis


def with_overrides(
    machine: Machine | None, ram_gb: float | None, wired_gb: float | None
) -> Machine:
    """The machine that the user describes: a Mac, since only Macs have such a limit.

    Args:
        machine: this machine, used where nothing is said.
        ram_gb: main memory as the machine is sold (16 is 16 * 2**30 bytes).
        wired_gb: Metal's working set in GB (10**9 bytes).
    """
    if ram_gb is None and wired_gb is None:
        assert machine is not None
        return machine
    ram = None if ram_gb is None else int(ram_gb * GIB)
    if wired_gb is not None:
        return Machine("metal", "", ram, int(wired_gb * GB), "--wired-gb", assumed=True)
    assert ram is not None
    basis = "Metal's usual share of --ram-gb (estimated)"
    return Machine("metal", "", ram, metal_working_set(ram), basis, assumed=True)


def described(ram_gb: float | None, wired_gb: float | None) -> Machine:
    """The machine that the user describes, else this one.

    Raises:
        OptionError: a size that no machine has, or a working set larger than the memory.
    """
    if ram_gb is None and wired_gb is None:
        return detect()
    for value, name in ((ram_gb, "ram_gb"), (wired_gb, "wired_gb")):
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= MOST_GB:
            raise OptionError(f"{name} {value!r} is not a size in GB, above 0 and at most 10^6")
    if ram_gb is not None and wired_gb is not None and wired_gb * GB > ram_gb * GIB:
        raise OptionError(
            f"wired_gb {wired_gb:g} is more than all of the memory, ram_gb {ram_gb:g}",
            hint=f"{ram_gb:g} GiB of memory are {ram_gb * GIB / GB:.2f} GB; a working set is a "
            "part of them",
        )
    return with_overrides(None, ram_gb, wired_gb)


def metal_working_set(ram_bytes: int) -> int:
    """Metal's recommended working set of a Mac with so much memory, as an estimate."""
    return ram_bytes * 2 // 3 if ram_bytes <= _SMALL_MAC else ram_bytes * 3 // 4


def detect() -> Machine:
    """This machine."""
    if platform.system() == "Darwin":
        return _detect_mac()
    ram = main_memory_bytes()
    machine = Machine("cpu", platform.processor() or platform.machine(), ram)
    gpu = _nvidia() if _has_cuda_build() else None
    if gpu is None:
        return machine
    name, total = gpu
    return replace(
        machine,
        backend="cuda",
        name=name,
        device_bytes=total,
        device_basis="memory of the GPU",
        bandwidth_gb_s=_BANDWIDTH.get(name),
    )


def _detect_mac() -> Machine:
    values = _sysctl("hw.memsize", "machdep.cpu.brand_string", "iogpu.wired_limit_mb")
    size, name = values.get("hw.memsize", ""), values.get("machdep.cpu.brand_string", "")
    ram = int(size) if size.isdigit() else None
    if platform.machine() != "arm64":
        return Machine("cpu", name, ram)
    limit = values.get("iogpu.wired_limit_mb", "0")
    if limit.isdigit() and int(limit) > 0:
        device: int | None = int(limit) * MIB
        basis = "iogpu.wired_limit_mb"
    else:
        device = None if ram is None else metal_working_set(ram)
        basis = "Metal's usual share of main memory (estimated)"
    return Machine("metal", name, ram, device, basis, bandwidth_gb_s=_BANDWIDTH.get(name))


def _sysctl(*names: str) -> dict[str, str]:
    values = {}
    for name in names:
        output = _output("/usr/sbin/sysctl", "-n", name)
        if output is not None:
            values[name] = output
    return values


def main_memory_bytes() -> int | None:
    """Main memory, or what a container may use of it."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def _has_cuda_build() -> bool:
    """Whether MLX is installed with its CUDA back-end."""
    import importlib.metadata  # slow, and --help has no use for it

    for name in ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def _nvidia() -> tuple[str, int] | None:
    """Name and memory in bytes of the first NVIDIA GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    output = _output("nvidia-smi", *query)
    if not output:
        return None
    name, _, mebibytes = output.splitlines()[0].rpartition(",")
    return (name.strip(), int(mebibytes) * MIB) if mebibytes.strip().isdigit() else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
