"""What `make test` leaves to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def cases(names: str, values: Iterable[Any], *fast: Any, **more: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with values that are all slow but `fast`; see `slow_except`."""
    values = slow_except(values, *fast, several="," in names)
    return pytest.mark.parametrize(names, values, **more)


def slow_except(values: Iterable[Any], *fast: Any, several: bool = False) -> list[Any]:
    """Parameters of a test, all slow but `fast`, which are values or what `str` makes of them.

    With `several` each value is a tuple of what several arguments get.
    """
    values = list(values)
    missing = [x for x in fast if not any(x in (value, str(value)) for value in values)]
    if missing:
        raise ValueError(f"no such parameters: {missing}")
    return [
        value
        if value in fast or str(value) in fast
        else pytest.param(*(value if several else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
