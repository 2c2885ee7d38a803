"""Policies by name: the built-in ones, a user's own and those of installed packages.

A third-party package registers classes of policies and parts through the entry-point groups
`mmkv.policies` and `mmkv.parts`. If one fails to load, it is skipped with a warning, and looking it
up raises an error.
`load_plugin` runs a file that registers policies.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from mmkv import names
from mmkv.digest import of_file
from mmkv.parts import (
    KINDS,
    OPTIONAL,
    Part,
    check_fields,
    discover,
    path_of,
    register_part,
    registered,
)
from mmkv.policy import Policy

log = logging.getLogger(__name__)

P = TypeVar("P", bound=type[Policy])
_policies: dict[str, type[Policy]] = {}  # by name and alias
# Hashes of the plugin files that were loaded, by path.
plugins: dict[str, str] = {}
# Entry points that were skipped, by name: the distribution, and why.
_skipped: dict[str, tuple[str, BaseException]] = {}
# Reentrant, as a package may look up a policy while it is being loaded.
_loading = threading.RLock()
_loaded = False


def register_policy(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[P], P]:
    """Class decorator: register a `Policy` subclass under `name`.

    Raises:
        ValueError: the name or an alias is taken by another class, or has characters that a command
            line cannot take.
        TypeError: the class is not a `Policy`, or an option of it is no field.
    """

    def register(cls: P) -> P:
        if not (isinstance(cls, type) and issubclass(cls, Policy)):
            raise TypeError(f"register_policy({name!r}): {cls!r} is not a subclass of mmkv.Policy")
        check_fields(cls)
        if not _is_builtin(cls):
            discover()  # first, so that built-in names are taken
        for key in (name, *aliases):
            names.check_new("policy", key)
            registered_class = _find(key)
            if registered_class is not None and path_of(registered_class) != path_of(cls):
                raise ValueError(
                    f"policy name {key!r} is taken by {path_of(registered_class)}: choose another, "
                    "or load only one of the two"
                )
        cls.name, cls.aliases = name, aliases
        _policies.update(dict.fromkeys((name, *aliases), cls))
        return cls

    return register


def list_policies() -> list[str]:
    """Return the names of all registered policies, sorted, without aliases."""
    _load_all()
    return sorted({cls.name for cls in _policies.values()})


def policy_class(name: str) -> type[Policy]:
    """Return the class of a name or alias, ignoring case, - and _."""
    if not isinstance(name, str):
        if isinstance(name, Real) and not isinstance(name, bool):
            raise ValueError(f"policy={name!r}: to give a budget alone, say budget={name!r}")
        called = f": call it, {name.__name__}()" if isinstance(name, type) else ""
        raise ValueError(f"policy={name!r}: expected a name or a Policy object{called}")
    _load_all()
    if (cls := _find(name)) is not None:
        return cls
    for skipped, (where, error) in _skipped.items():
        if names.key(skipped) == names.key(name):
            raise ValueError(
                f"policy {skipped!r} of {where} could not be loaded: {_reason(error)}"
            ) from error
    for kind in KINDS:
        if name in list_parts(kind):
            raise ValueError(
                f"{name!r} is no policy but a part: give it as an option, {kind}={name!r}"
            )
    raise ValueError(names.unknown("policy", name, sorted(_policies)))


def get_policy(name: str, /, **options: Any) -> Policy:
    """Return a policy by name, with options overriding its defaults.

    Raises:
        ValueError: the name or an option is unknown (the message names the closest one, or all), a
            value is out of range, or the policy's parts do not read an option.
    """
    cls = policy_class(name)
    known = option_types(cls)
    for option in options:
        if option == names.DROPPED:
            share = options[option]
            budget = f"={1 - share:g}" if isinstance(share, float) else ""
            raise ValueError(
                f"compression_ratio={share} says what is dropped: give what is kept, budget{budget}"
            )
        if option not in known and option in names.OF_WRAP:
            raise ValueError(f"{option!r} is no option of a policy: give it to mmkv.wrap")
        if option not in known:
            candidates = [*known, *names.OF_WRAP]
            raise ValueError(names.unknown("option", option, candidates, f"of policy {cls.name!r}"))
    return cls.of(**options)


def exact_share(name: str) -> dict[str, Any]:
    """Return options with which a policy keeps at most a budget given as a share.

    Measurements of budgets start from these: with its default `least` a policy may keep more of a
    short prompt.
    """
    return {"least": 0} if policy_class(name).options().get("least") else {}


def list_parts(kind: str) -> dict[str, type[Part]]:
    """Return the registered parts of a kind ("score", "layers", ...) by name, sorted.

    Raises:
        ValueError: the kind does not exist.
    """
    if kind not in KINDS:
        raise ValueError(names.unknown("kind of part", kind, [*KINDS]))
    _load_all()
    return {name: cls for (k, name), cls in sorted(registered.items()) if k == kind}


def option_types(cls: type[Policy]) -> dict[str, Any]:
    """Return a policy's options with their types: its own, its parts, and options of all parts."""
    types: dict[str, Any] = {}
    own_types = cls.hints()
    for field in fields(cls):
        types[field.name] = own_types[field.name]
        if field.name in KINDS:
            parts = list_parts(field.name)
            choices = [*parts, *(["none"] if field.name in OPTIONAL else [])]
            types[field.name] = Literal[tuple(choices)]  # type: ignore[valid-type]
            for part in parts.values():
                hints = _hints(part)
                types |= {f.name: hints[f.name] for f in fields(part)}
    return types


_hints = cache(get_type_hints)


def _find(name: str) -> type[Policy] | None:
    return next(
        (cls for spelled, cls in _policies.items() if names.key(spelled) == names.key(name)), None
    )


def _is_builtin(cls: type) -> bool:
    return cls.__module__.startswith("mmkv.policies.")


def _load_all() -> None:
    """Import every built-in policy file and every installed entry point, once."""
    global _loaded
    with _loading:
        if _loaded:
            return
        discover()
        _loaded = True
        # Parts first, as policies may use them.
        entries = [x for group in names.GROUPS for x in entry_points(group=group)]
        for entry in sorted(entries, key=lambda x: (x.group, _origin(x), x.name)):
            try:
                with _all_or_nothing():
                    _load(entry)
            except (Exception, SystemExit) as error:  # the package may raise any
                where = _origin(entry)
                _skipped[entry.name] = where, error
                kind = "part" if entry.group == "mmkv.parts" else "policy"
                log.warning("%s %r of %s is skipped: %s", kind, entry.name, where, _reason(error))


@contextmanager
def _all_or_nothing() -> Generator[None]:
    """Undo the registrations of this block if it fails."""
    saved: list[Any] = [(x, dict(x)) for x in (_policies, registered)]
    try:
        yield
    except BaseException:
        for registry, old in saved:
            registry.clear()
            registry.update(old)
        raise


def load_plugin(path: str | os.PathLike[str]) -> None:
    """Run a Python file that registers policies or parts."""
    _load_all()
    file = Path(path)
    names.check_plugin(file)
    # A name that no other module has, so that a file random.py does not replace Python's own.
    name = names.PLUGIN + file.stem
    spec: Any = importlib.util.spec_from_file_location(name, file.resolve())
    module, before = importlib.util.module_from_spec(spec), (dict(_policies), dict(registered))
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        with _all_or_nothing():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file may raise any
        raise ValueError(f"plugin {str(path)!r}: {_reason(error)}") from error
    if before == (_policies, registered):
        raise ValueError(
            f"plugin {str(path)!r} registers nothing: decorate its classes by "
            "mmkv.register_policy or mmkv.parts.register_part"
        )
    plugins[str(path)] = of_file(file)


def _load(entry: EntryPoint) -> None:
    """Register the class of one entry point."""
    if entry.group == "mmkv.parts":
        part: Any = entry.load()
        if not (isinstance(part, type) and issubclass(part, Part) and part.kind in KINDS):
            raise TypeError(f"{entry.value} is no part of a policy")
        part()  # checks its defaults
        if part not in registered.values():
            register_part(entry.name)(part)
        return
    registered_class = _find(entry.name)
    if registered_class is not None and _is_builtin(registered_class):
        raise ValueError(f"the name is taken by the built-in {registered_class.name!r}")
    cls: Any = entry.load()
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise TypeError(f"{entry.value} is not a subclass of mmkv.Policy")
    cls()  # checks its defaults, which every list of policies shows
    if cls in _policies.values() and _find(entry.name) is None:
        _policies[entry.name] = cls
    elif _find(entry.name) is not cls:
        register_policy(entry.name)(cls)


def _origin(entry: EntryPoint) -> str:
    """Return the distribution of an entry point, with its version."""
    dist = entry.dist
    return "an unknown distribution" if dist is None else f"{dist.name} {dist.version}"


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
