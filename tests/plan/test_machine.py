"""What machines say about themselves, played back; nothing here runs on them."""

from __future__ import annotations

import pytest

from turboquant_mlx.plan import machine
from turboquant_mlx.plan.machine import GIB, MIB


@pytest.fixture
def mac(monkeypatch):
    """A Mac whose sysctl gives these values."""

    def play(**values: str) -> machine.Machine:
        answers = {name.replace("__", "."): value for name, value in values.items()}
        monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
        monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
        monkeypatch.setattr(machine, "_output", lambda *command: answers.get(command[-1]))
        return machine.detect()

    return play


CHIP = {"machdep__cpu__brand_string": "Apple M4 Max"}


class TestMacs:
    def test_the_working_set_is_estimated_where_nobody_set_a_limit(self, mac):
        found = mac(hw__memsize=str(64 * GIB), iogpu__wired_limit_mb="0", **CHIP)
        assert found.backend == "metal"
        assert found.device_bytes == 48 * GIB
        assert found.device_basis.endswith("(estimated)")
        assert found.bandwidth_gb_s == 410

    def test_a_limit_that_was_set_is_the_ceiling(self, mac):
        found = mac(hw__memsize=str(64 * GIB), iogpu__wired_limit_mb="57344", **CHIP)
        assert found.ceiling_bytes == 57344 * MIB
        assert found.ceiling_basis == "iogpu.wired_limit_mb"

    def test_older_systems_have_no_such_setting(self, mac):
        found = mac(hw__memsize=str(16 * GIB), **CHIP)
        assert found.device_bytes == 16 * GIB * 2 // 3

    def test_a_mac_that_says_nothing_is_unknown(self, mac):
        found = mac()
        assert found.ram_bytes is None
        assert found.ceiling_bytes is None


class TestLinux:
    @pytest.fixture
    def linux(self, monkeypatch):
        def play(answer: str | None, build: bool) -> machine.Machine:
            monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
            monkeypatch.setattr(machine, "main_memory_bytes", lambda: 64 * GIB)
            monkeypatch.setattr(machine, "_has_cuda_build", lambda: build)
            monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
            monkeypatch.setattr(machine, "_output", lambda *command: answer)
            return machine.detect()

        return play

    def test_a_gpu_and_a_build_that_uses_it(self, linux):
        found = linux("NVIDIA GeForce RTX 4090, 24564\nNVIDIA T4, 15360", True)
        assert (found.backend, found.name) == ("cuda", "NVIDIA GeForce RTX 4090")
        assert found.device_bytes == 24564 * MIB
        assert found.bandwidth_gb_s == 1008

    def test_a_gpu_that_this_installation_cannot_use(self, linux):
        assert linux("NVIDIA T4, 15360", False).backend == "cpu"

    @pytest.mark.parametrize("answer", [None, "", "No devices were found"])
    def test_a_driver_without_a_gpu(self, linux, answer):
        assert linux(answer, True).backend == "cpu"
