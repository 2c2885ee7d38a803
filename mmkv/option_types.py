"""Types of options with their ranges, and checks of values by annotations.

Each error shows the value received.
"""

from __future__ import annotations

import math
from functools import partial
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin


def check(name: str, value: Any, hint: Any) -> None:
    """Check an option against its annotation; `Annotated` gives a range as a `partial` of a check.

    Raises:
        ValueError: the value has another type, or is out of range.
    """
    notes = getattr(hint, "__metadata__", ())
    hint = hint.__origin__ if notes else hint
    choices = _literals(hint)
    if choices and value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {choices}")
    if expected := _other_type(value, hint):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    for note in notes:
        if isinstance(note, partial):
            note(**{name: value})


def at_least(least: float, /, **options: float) -> None:
    """Raise a ValueError for an option below `least`."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name}={value}: expected {least:g} or more")


def share(*, zero: bool, **options: float | None) -> None:
    """Raise a ValueError for an option outside (0, 1], or [0, 1] with `zero`; None is allowed."""
    for name, value in options.items():
        if value is not None and not (0 <= value <= 1 if zero else 0 < value <= 1):
            raise ValueError(f"{name}={value}: expected a number in {'[' if zero else '('}0, 1]")


NonNegativeInt = Annotated[int, partial(at_least, 0)]
PositiveInt = Annotated[int, partial(at_least, 1)]
NonNegativeFloat = Annotated[float, partial(at_least, 0)]
Share = Annotated[float, partial(share, zero=True)]
PositiveShare = Annotated[float, partial(share, zero=False)]


def _literals(hint: Any) -> list[Any]:
    """Return the allowed values of a Literal, or of one or None; [] for any other hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    values = [v for arg in get_args(hint) for v in _literals(arg)]
    return [*values, None] if values and type(None) in get_args(hint) else values


def _other_type(value: Any, hint: Any) -> str:
    """Return what a field expects, if the value is of another type; "" if it fits.

    Containers, and all other types than these, are not checked.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    expected = {
        type(None): (value is None, ""),
        bool: (isinstance(value, bool), "True or False"),
        int: (isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
        float: (is_number and math.isfinite(value), f"a {'finite ' * is_number}number"),
        str: (isinstance(value, str), "a text"),
    }
    is_choice = get_origin(hint) in (Union, UnionType, ClassVar)
    choices = [expected.get(x, (True, "")) for x in (get_args(hint) if is_choice else (hint,))]
    if any(fits for fits, _ in choices):
        return ""
    return " or ".join(text for _, text in choices if text)
