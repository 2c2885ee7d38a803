"""Checks of budgets, in Python and on a command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from mmkv.memory import Memory, ratio

if TYPE_CHECKING:
    from mmkv.policy import Policy

# The budget of commands that measure or serve, and of others beside a kv_dtype, if neither the user
# nor the profile gives a size; otherwise it is `mmkv.memory.DEFAULT`.
DEFAULT: float = 0.2
_MOST = 2**31  # more tokens than any prompt has, and small enough for arithmetic


def number(budget: Any) -> float | int:
    """Return a budget as a float, the fraction kept, or an int, the tokens per layer and head.

    NumPy's numbers, `Fraction` and `Decimal` are accepted too, and texts as on a command line. A
    share of bytes stays as it is.
    """
    if isinstance(budget, str):
        return parse(budget)
    if isinstance(budget, Memory):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, Real | Decimal):
        raise ValueError(
            f"budget={budget!r}: expected a float in (0, 1], a text such as '20%', or an int of at "
            "least 1"
        )
    return _in_range(budget, f"budget={budget}")


def _in_range(budget: Any, shown: str) -> float | int:
    """Return a number as a budget; the error for one out of range begins with `shown`."""
    if isinstance(budget, Integral):
        if budget < 1:
            raise ValueError(f"{shown}: must be above 0: a share up to 1.0, or a number of tokens")
        if int(budget) > _MOST:
            raise ValueError(f"{shown}: must be at most {_MOST} tokens")
        return int(budget)
    # By its text, so that a float32 of 0.2 is 0.2 and not 0.20000000298.
    exact = isinstance(budget, float | Fraction)
    try:
        fraction = float(budget) if exact else float(str(budget))
    except OverflowError:  # a large Fraction
        fraction = math.inf
    if not 0 < fraction <= 1:
        raise ValueError(
            f"{shown}: a share must be above 0 and up to 1.0; use an int for a number of tokens"
        )
    return fraction


def checked(policy: Policy, budget: Any) -> float | int | None:
    """Check a policy's budget; return None if its retention decides, 1.0 if it keeps all."""
    size = None if budget is None else number(budget)
    if policy.keeps_all:
        return 1.0
    if (retention := policy.layers.retention) is not None:
        if size is not None:
            raise ValueError(
                f"budget={size} and retention={retention} both size the cache: give one"
            )
        return None
    if size is None:
        raise ValueError(
            f"policy {policy.name!r} needs a budget: a float in (0, 1] for a fraction of the "
            "prompt, or an int for a number of tokens"
        )
    min_kept = policy.window_size + policy.sinks
    if isinstance(size, int) and size < min_kept:
        options = f"window={policy.window_size}, sinks={policy.sinks}"
        raise ValueError(
            f"budget={size} is below the {min_kept} tokens that {policy.name!r} always keeps "
            f"({options}): raise it, or lower those"
        )
    return size


def parse(text: str) -> float | int:
    """Return the budget of a text: "0.2", "1/5" and "20%" are fractions, "200" is tokens."""
    text = text.strip()
    try:
        budget = int(text) if text.lstrip("+-").isdigit() else ratio(text)
    except (ValueError, ArithmeticError):
        raise ValueError(
            f"budget {text!r}: expected a fraction such as 0.2 or 20%, or a number of tokens such "
            "as 200"
        ) from None
    return _in_range(budget, f"budget={text}")


def parse_list(
    text: str, one: Callable[[str], float | int] = parse, what: str = "budget"
) -> list[float | int]:
    """Return the budgets of a text, separated by commas, each by `one`; refuse duplicates."""
    budgets: list[float | int] = []
    for part in text.split(","):
        budget = one(part)
        if named(budget) in map(named, budgets):
            raise ValueError(f"{what} {part.strip()} is named twice")
        budgets.append(budget)
    return budgets


def note(budget: float | int | None) -> str:
    """Return a note on a budget that may not be meant; "" if there is no doubt."""
    if budget == 1 and isinstance(budget, int):
        return "a budget of 1 is one token per layer and head; 1.0 or 100% keeps everything"
    return ""


def named(budget: float | int) -> str:
    """Return a budget's label: "0.2", "1.0" for everything, "1" for one token, "6.25% of bytes"."""
    if isinstance(budget, Memory):
        return f"{budget} of bytes"
    return "1.0" if budget == 1 and isinstance(budget, float) else f"{budget:g}"
