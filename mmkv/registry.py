"""The registry: policies by name, the built-in ones, a user's own and those of installed packages.

A third-party package registers a policy class through the entry-point group `mmkv.policies`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from mmkv.policy import Policy

P = TypeVar("P", bound=type[Policy])
_policies: dict[str, type[Policy]] = {}
_aliases: dict[str, str] = {}


def register_policy(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[P], P]:
    """Class decorator: make a `Policy` subclass available under `name`.

    Raises:
        ValueError: the name or an alias is taken by another class.
        TypeError: the class is not a `Policy`.
    """

    def register(cls: P) -> P:
        if not (isinstance(cls, type) and issubclass(cls, Policy)):
            raise TypeError(f"register_policy({name!r}): {cls!r} is not a subclass of mmkv.Policy")
        for key in (name, *aliases):
            taken = _policies.get(_aliases.get(key, key))
            if taken is not None and taken.__qualname__ != cls.__qualname__:
                raise ValueError(f"policy name {key!r} is taken by {taken.__qualname__}")
        cls.name, cls.aliases = name, aliases
        _policies[name] = cls
        _aliases.update(dict.fromkeys(aliases, name))
        return cls

    return register


@cache
def _load_all() -> None:
    """Import every built-in policy file and every installed entry point, once."""
    import mmkv.policies

    for module in pkgutil.iter_modules(mmkv.policies.__path__):
        importlib.import_module(f"mmkv.policies.{module.name}")
    for entry in entry_points(group="mmkv.policies"):
        cls = entry.load()
        if entry.name not in _policies:
            register_policy(entry.name)(cls)


def list_policies() -> list[str]:
    """Names of all registered policies, sorted, without aliases."""
    _load_all()
    return sorted(_policies)


def policy_class(name: str) -> type[Policy]:
    """The class registered under a name or an alias.

    Raises:
        ValueError: no such policy; the message lists the candidates.
    """
    _load_all()
    found = _policies.get(_aliases.get(name, name))
    if found is None:
        raise ValueError(_unknown("policy", name, [*sorted(_policies), *sorted(_aliases)]))
    return found


def get_policy(name: str, **options: Any) -> Policy:
    """A policy by name, with options overriding its defaults.

    Raises:
        ValueError: unknown name or option (lists candidates), a value out of range, or an option
            that the policy's parts do not read.
    """
    cls = policy_class(name)
    known = [f.name for f in fields(cls)]
    for option in options:
        if option not in known:
            raise ValueError(_unknown(f"option of policy {cls.name!r}", option, known))
    policy = cls(**options)
    idle = [o for o in options if policy.keeps_all or not policy.reads(o)]
    if idle:
        raise ValueError(
            f"option {idle[0]!r} has no effect on policy {cls.name!r} as configured "
            f"(score={policy.score!r}, layers={policy.layers!r}, heads={policy.heads!r}, "
            f"decode={policy.decode!r}): remove it, or choose the part that reads it"
        )
    return policy


def _unknown(what: str, name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {name!r}.{hint} Known: {', '.join(candidates)}"
