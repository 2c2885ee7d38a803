"""Names of policies and options, read without torch, so that a wrong one is refused at once.

Plugin files and installed packages can add names. If there are any, nothing is refused here: only
`mmkv.registry`, which imports them, knows all names.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Entry points of policies, and of parts.
GROUPS = ("mmkv.policies", "mmkv.parts")
# Options of an evaluation's policies, added to their own (`mmkv.eval.variants`).
OF_VARIANTS = ("profile", "kv_dtype", "evict_chunks", "question")
# Arguments of `mmkv.wrap` beside policy and options.
OF_WRAP = ("budget", "memory", "kv_dtype", "profile", "evict_chunks", "graph")
# How names of the modules of plugin files begin.
PLUGIN = "mmkv_plugin_"
# What other libraries call the share that is dropped; `get_policy` says what to give instead.
DROPPED = "compression_ratio"


def unknown(what: str, name: str, candidates: Sequence[str], of: str = "") -> str:
    """Return an error's text for a name that is none of the candidates: the closest, or them all.

    `of` follows the name, such as "of policy 'snapkv'".
    """
    close = difflib.get_close_matches(name.lower(), candidates, n=1)
    close = close or [x for x in candidates if x.startswith(name.lower()) and name]
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(candidates)}"
    return f"unknown {what} {name!r}{of and ' ' + of}. {hint}"


def key(name: str) -> str:
    """Return the key of a name: that of "Ada-PyramidKV" and "ada_pyramidkv" is the same."""
    return re.sub("[-_ ]", "", name).casefold()


def check_new(what: str, name: str) -> None:
    """Raise ValueError unless a command line can take this name of a policy or part."""
    if not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(f"{what} name {name!r}: expected letters, digits, '-', '_', '.' and '+'")


def check_policy(name: str) -> None:
    """Raise ValueError if no policy has this name."""
    if _all_built_in() and key(name) not in map(key, policies()):
        raise ValueError(unknown("policy", name, sorted(policies())))


def check_pair(pair: str, *more: str) -> None:
    """Raise ValueError unless a text is "name=value" of a policy's option or one of `more`."""
    name, _ = split_pair(pair)
    if _all_built_in() and name not in (known := {*options(), *more, DROPPED}):
        raise ValueError(unknown("option", name, sorted(known - {DROPPED})))


def split_pair(pair: str) -> tuple[str, str]:
    """Return the name and the value of "name=value"; - in the name counts as _."""
    name, equals, value = pair.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise ValueError(f"option {pair!r}: expected name=value, such as window=16")
    return name, value.strip()


def check_variant(text: str) -> None:
    """Raise ValueError for "policy:option=value:..." with an unknown policy or option."""
    name, *pairs = text.strip().split(":")
    check_policy(name)
    for pair in pairs:
        check_pair(pair, *OF_VARIANTS)


def check_plugin(path: Path) -> None:
    """Raise ValueError unless the path is a Python file."""
    if not path.exists():
        raise ValueError(f"plugin {str(path)!r}: no such file")
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"plugin {str(path)!r}: expected a Python file")


def _all_built_in() -> bool:
    """Return whether all policies are mmkv's own: no package adds any, nor a plugin loaded yet."""
    return "mmkv.registry" not in sys.modules and not _packages_add_names()


@cache
def _packages_add_names() -> bool:
    """Return whether an installed package adds policies or parts."""
    return any(entry_points(group=x) for x in GROUPS)


@cache
def policies() -> tuple[str, ...]:
    """Return the built-in policies' names and aliases."""
    names = list[str]()
    for call in (call for _, call in _registered(("register_policy",))):
        names += [ast.literal_eval(x) for x in call.args]
        names += [alias for x in call.keywords for alias in ast.literal_eval(x.value)]
    return tuple(names)


@cache
def options() -> frozenset[str]:
    """Return the options of built-in policies and their parts."""
    names, chosen = set[str](), [x for x, _ in _registered(("register_policy", "register_part"))]
    while chosen:
        node = chosen.pop()
        bases = {x.id for x in node.bases if isinstance(x, ast.Name)}
        chosen += [x for x in _classes() if x.name in bases]
        if any("dataclass" in ast.unparse(x) for x in node.decorator_list):
            fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
            names |= {ast.unparse(x.target) for x in fields if "ClassVar" not in ast.dump(x)}
    return frozenset(names)


def _registered(by: Sequence[str]) -> Iterator[tuple[ast.ClassDef, ast.Call]]:
    """Yield the classes that one of these decorators registers, with its call."""
    for node in _classes():
        for x in node.decorator_list:
            if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id in by:
                yield node, x


@cache
def _classes() -> list[ast.ClassDef]:
    """Return the classes of policies and parts, parsed and not imported."""
    files = [Path(__file__).with_name(name) for name in ("policy.py", "parts.py")]
    for name in ("policies", "scores", "sizes", "merge", "decode"):
        spec: Any = find_spec(f"mmkv.{name}")
        files += [file for x in spec.submodule_search_locations for file in Path(x).glob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_bytes()).body]
    return [node for node in nodes if isinstance(node, ast.ClassDef)]
