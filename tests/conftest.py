"""Fixtures of all tests; `helpers` prepares the environment.

What takes seconds to import is imported where it is used: pytest-xdist's first process, which only
starts the others, reads this file too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import helpers  # noqa: F401  before transformers

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session", autouse=True)
def cache_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in the user's cache folder, nor for another run but the built-in models."""
    folder = tmp_path_factory.mktemp("cache")
    for name in ("gguf", "smollm2-vision"):
        shared = Path(__file__).parents[1] / "out" / f"tests-{name}"
        shared.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMKV_CACHE", str(folder))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable garbage collection while tests are collected: imports leave little garbage."""
    gc.disable()


@pytest.fixture(scope="session", autouse=True)
def nothing_imported_is_collected() -> None:
    """Exempt imported objects from garbage collection, and collect less often."""
    gc.set_threshold(20_000)
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors are tiny: more threads only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def told_of_equal_heads() -> None:
    """Mark the notice about equal heads as logged, so that it is in no test's log."""
    from mmkv import planning, registry

    planning._logged_policies.update(registry.list_policies())


@pytest.fixture(autouse=True)
def groups_of_other_tests_are_forgotten() -> Iterator[None]:
    """The masked reference finds a group's pair among those that it noted."""
    yield
    if masking := sys.modules.get("helpers.masking"):
        masking.noted.clear()


@pytest.fixture
def registering() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    from mmkv import parts, registry

    registry.list_policies()  # now all others are known
    before = [(x, dict(x)) for x in (registry._policies, parts.registered)]
    before.append((registry.plugins, dict(registry.plugins)))
    yield
    for known, old in before:
        known.clear()
        known.update(old)


@pytest.fixture(scope="session")
def models() -> Any:
    """Tiny models by name, one of each a session; tests must leave them unwrapped."""
    from helpers.models import make_model

    made: dict[tuple[str, int | None], torch.nn.Module] = {}

    def get(name: str, layers: int | None = None) -> torch.nn.Module:
        if (name, layers) not in made:
            made[name, layers] = make_model(name, layers=layers)
        return made[name, layers]

    return get


@pytest.fixture
def text_model() -> Any:
    """A tiny Llama of a test's own."""
    from helpers.models import make_model

    return make_model("llama")
