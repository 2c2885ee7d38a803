"""Fixtures of the tests that load checkpoints."""

import pytest

from helpers import zoo
from helpers.checkpoints import write_original


@pytest.fixture(scope="session")
def native():
    """A tiny LLaVA; tests must leave it as it is."""
    return zoo.make("LlavaForConditionalGeneration")


@pytest.fixture
def write(native, tmp_path):
    """Writes the native model as an original checkpoint; returns its folder."""

    def make(shards: int = 1, tower: str = "inside", **changes):
        folder = tmp_path / "llava-tiny"
        write_original(native, folder, shards, tower, **changes)
        return folder

    return make
