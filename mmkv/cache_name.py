"""What transformers calls a cache: `past_key_values` up to 5.23, `cache` from 5.24.

Releases that say `cache` rename the old argument, with a warning, where a function begins: a hook
still sees what the caller wrote. Models that are not of transformers may know one name alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from transformers.generation.utils import GenerationMixin

_NAMES = ("cache", "past_key_values")


@cache
def _name(kind: type[Any], method: str = "forward") -> str | None:
    accepted = inspect.signature(getattr(kind, method)).parameters
    return next((name for name in _NAMES if name in accepted), None)


# In the arguments of `generate` and of its methods, and in what models return.
CACHE = _name(GenerationMixin, "prepare_inputs_for_generation") or _NAMES[0]


def passing(module: nn.Module, held: Any) -> dict[str, Any]:
    """A cache as the argument by which this model or decoder takes it."""
    return {_name(type(module)) or CACHE: held}


def without(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call but for the cache."""
    return {name: x for name, x in arguments.items() if name not in _NAMES}


def cache_in(found: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, or in what a model returned; None: there is none."""
    return next((found[name] for name in _NAMES if name in found), None)
