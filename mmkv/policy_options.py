"""Options of policies from texts, such as "window=16" of a command line.

Errors of a user are `ValueError`s whose message is one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from mmkv import budgets, memory
from mmkv.names import split_pair
from mmkv.policy import Policy
from mmkv.profiles import Profile
from mmkv.registry import option_types, policy_class


def parse_options(policy: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Parse policy options such as "window=16" by the types of the policy's fields.

    An unknown option is left to `mmkv.get_policy`, which lists the candidates.
    """
    return typed(policy, option_texts(pairs))


def option_texts(pairs: Sequence[str]) -> dict[str, str]:
    """Return the texts of options such as "window=16" by name. Raises ValueError."""
    options: dict[str, str] = {}
    for pair in pairs:
        name, text = split_pair(pair)
        if name in options:
            raise ValueError(f"option {pair!r}: {name} is given twice")
        options[name] = text
    return options


def typed(policy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with texts parsed by the types of the policy's fields. Raises ValueError."""
    types = option_types(policy_class(policy))
    return {
        name: parse_value(name, x, types.get(name, str)) if isinstance(x, str) else x
        for name, x in options.items()
    }


def default_budget(policy: Policy, profile: Path | None, kv_dtype: str | None) -> float | None:
    """Return the budget where none is given, or None where policy or profile gives the size.

    It is a share of bytes, or beside a type of kept pairs a share of tokens.
    """
    if not policy.takes_budget or (profile is not None and Profile.load(profile).fractions):
        return None
    return memory.DEFAULT if kv_dtype is None else budgets.DEFAULT


def parse_value(name: str, text: str, hint: Any) -> Any:
    """Return the text of the option `name` as a value of the annotated type."""
    choices = flat(hint)
    if text in choices:
        return text
    if text.lower() == "none" and type(None) in choices:
        return None
    for kind, expected in ((bool, "true or false"), (int, "a whole number"), (float, "a number")):
        if kind in choices:
            try:
                return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
            except (ValueError, KeyError):
                raise ValueError(f"option {name}={text!r}: expected {expected}") from None
    return text


def flat(hint: Any) -> list[Any]:
    """Return the types and literal values of an annotation."""
    args = get_args(hint)
    return [x for arg in args for x in flat(arg)] if args else [hint]
