"""Checks of options by their annotations: each message shows the value received."""

from __future__ import annotations

import dataclasses
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


def check_fields(value: Any) -> None:
    """Check every field of a dataclass against its annotation.

    Raises:
        ValueError: a value of another type, none of a `Literal`'s, or out of its range.
    """
    hints = get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        check(field.name, getattr(value, field.name), hints[field.name])


def check(name: str, value: Any, hint: Any) -> None:
    """Check one option; `Annotated` may say its range by a `partial` of a check by name.

    Raises:
        ValueError: it does not fit its annotation.
    """
    notes = getattr(hint, "__metadata__", ())
    hint = hint.__origin__ if notes else hint
    choices = literals(hint)
    if choices and value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {choices}")
    if expected := _other_type(value, hint):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    for note in notes:
        if isinstance(note, partial):
            note(**{name: value})


def at_least(least: float, /, **options: float) -> None:
    """Check options that are `least` or more.

    Raises:
        ValueError: one is less.
    """
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name}={value}: expected {least:g} or more")


def share(*, zero: bool, **options: float | None) -> None:
    """Check options that are at most 1, and above 0 (or 0 where `zero`); None passes.

    Raises:
        ValueError: one is out of range.
    """
    for name, value in options.items():
        if value is not None and not (0 <= value <= 1 if zero else 0 < value <= 1):
            raise ValueError(f"{name}={value}: expected a number in {'[' if zero else '('}0, 1]")


NonNegativeInt = Annotated[int, partial(at_least, 0)]
PositiveInt = Annotated[int, partial(at_least, 1)]
NonNegativeFloat = Annotated[float, partial(at_least, 0)]
Share = Annotated[float, partial(share, zero=True)]
PositiveShare = Annotated[float, partial(share, zero=False)]


def literals(hint: Any) -> list[Any]:
    """The allowed values of a Literal, or of a union of one with None; [] for any other hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    found = [v for arg in get_args(hint) for v in literals(arg)]
    return [*found, None] if found and type(None) in get_args(hint) else found


def _other_type(value: Any, hint: Any) -> str:
    """What a field takes, where its value is of another type; "" where it fits."""
    hints = get_args(hint) or (hint,)
    if value is None and type(None) in hints:
        return ""
    for kind, fits, expected in (
        (bool, isinstance(value, bool), "True or False"),
        (int, isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
        (float, isinstance(value, Real) and not isinstance(value, bool), "a number"),
    ):
        if kind in hints:
            return "" if fits else expected
    return ""
