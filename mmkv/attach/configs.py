"""A config that names our attention implementation, beside the one that a model was made with.

Several models may be made with one config object, and wrapping one must not change the others. So
the original stays as it is, and a wrapped model's decoder looks at it through a view.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from mmkv.attach.attention import NAMES


def is_view(config: Any) -> bool:
    """Whether it is the view that a wrapped model's decoder has."""
    return hasattr(type(config), "_mmkv_original")


def view(config: Any) -> Any:
    """The same config, live in both directions, with the attention implementation renamed.

    A copy of a view, deep or pickled, is a view of the copied config.
    """
    made = object.__new__(_view_class(type(config)))
    object.__setattr__(made, "__dict__", vars(config))
    object.__setattr__(made, "_mmkv_original", config)
    return made


@cache
def _view_class(kind: type[Any]) -> type[Any]:
    chosen: property = kind._attn_implementation

    def get(self: Any) -> str | None:
        name = chosen.__get__(self)
        return NAMES.get(name, name)

    def put(self: Any, value: Any) -> None:
        if isinstance(value, dict) and "" not in value:  # names those of sub-configs alone
            value = {"": chosen.__get__(self), **value}
        chosen.__set__(self, value)

    def reduce(self: Any, protocol: Any) -> Any:
        return view, (self._mmkv_original,)

    def shallow(self: Any) -> Any:
        return copy.copy(self._mmkv_original)

    # It must not name `kind` as its __class__: torch.compile would read that one's properties.
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__slots__": ("_mmkv_original",),
        "_attn_implementation": property(get, put),
        "__copy__": shallow,
        "__reduce_ex__": reduce,
    }
    return type(kind.__name__, (kind,), members)
