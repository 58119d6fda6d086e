"""Source folders and conversions that the tests of the converter share."""

from __future__ import annotations

from pathlib import Path

import pytest

from converting import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def llama(workshop: Workshop) -> Path:
    """A dense model whose output head is its own."""
    return workshop.source("llama")


@pytest.fixture(scope="session")
def moe(workshop: Workshop) -> Path:
    """A mixture of experts: an ordinary MLP in layer 0, experts in layers 1 and 2."""
    return workshop.source("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0])
