"""What an engine is made of, and the file of `mmkv serve`'s options."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

if TYPE_CHECKING:
    from .engine import Engine

_MOST_BYTES = 2**20
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What `make_engine` goes by, also in another process.

    Model, device and dtype are as for `mmkv.chat.load`; policy, budget, options, profile and
    kv_dtype as for `mmkv.wrap`; `plugins` are files for `mmkv.registry.load_plugin`; `engine` has
    the engine's own options.
    """

    model: str = "builtin"
    device: str = "auto"
    dtype: str = "auto"
    policy: str = "condense"
    budget: float | int | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    profile: str | None = None
    kv_dtype: str | None = None
    plugins: tuple[str, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict[str, Any])


def make_engine(settings: EngineSettings) -> Engine:
    """Load a model, wrap it, and start its engine.

    Raises:
        ValueError: what `mmkv.chat.load`, `mmkv.wrap` and the engine refuse.
    """
    from mmkv import chat
    from mmkv.registry import load_plugin
    from mmkv.wrapping import wrap

    from .engine import Engine

    for file in settings.plugins:
        load_plugin(file)
    loaded = chat.load(settings.model, settings.device, settings.dtype)
    more = {"profile": settings.profile, "kv_dtype": settings.kv_dtype}
    wrap(loaded.model, settings.policy, settings.budget, **more, **settings.options)
    return Engine(loaded.model, loaded.processor, **settings.engine)


def parse_size(text: str) -> int:
    """Bytes from a text such as "8GiB", "500MB" or "1000000".

    Raises:
        ValueError: none of these.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"size {text!r}: expected bytes such as 8GiB, 500MB or 1000000")
    number, unit, binary = found.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".find(unit.lower() or " "))


def read_config(path: Path, context: Any) -> dict[str, Any]:
    """The options that a file names, checked as on the command line.

    Args:
        path: a file in YAML.
        context: of typer's command.

    Raises:
        ValueError: no YAML, an unknown option, or a value that is none of its own.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{path}: more than {_MOST_BYTES} bytes")
    try:
        given = yaml.safe_load(raw) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: no YAML: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path}: expected options by name, such as max_batch: 16")
    options = {x.name: x for x in context.command.params if x.name != "config"}
    found = dict[str, Any]()
    for name, value in given.items():
        if name not in options:
            raise ValueError(f"{path}: {name}: no option of mmkv serve")
        if value is None:
            continue
        texts = [str(x) for x in (value if isinstance(value, list) else [value])]
        found[name] = texts if options[name].multiple else ", ".join(texts)
        try:
            if options[name].callback is None:
                options[name].process_value(context, found[name])
        except typer.BadParameter as error:
            raise ValueError(f"{path}: {name}: {error.message}") from None
    return found
