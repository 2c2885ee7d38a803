"""What an engine is made of, and the file of `mmkv serve`'s options."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from .engine import Engine

_MOST_BYTES = 2**20
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{x}b": 1000**i for i, x in enumerate("kmgt", start=1)},
    **{f"{x}ib": 1024**i for i, x in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


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
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"size {text!r}: expected bytes such as 8GiB, 500MB or 1000000")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _several(given: Any) -> Any:
    return given if isinstance(given, list) else [given]


class ServeConfig(BaseModel):
    """The options of `mmkv serve` by name; what is left out keeps its default."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    model: str | None = None
    policy: str | None = None
    budget: str | None = None
    option: list[str] | None = None
    plugin: list[Path] | None = None
    profile: Path | None = None
    kv_dtype: str | None = None
    device: str | None = None
    dtype: str | None = None
    cache_memory: str | None = None
    max_batch: int | None = Field(None, ge=1)
    max_waiting: int | None = Field(None, ge=1)
    prefill_chunk: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    timeout: float | None = Field(None, ge=0)
    name: str | None = None
    host: str | None = None
    port: int | None = Field(None, ge=0, le=65535)
    api_key: Annotated[list[str], BeforeValidator(_several)] | None = None
    share_prefixes: Literal["key", "all"] | None = None
    allow_host: list[str] | None = None
    allow_origin: list[str] | None = None
    ignore_unknown: bool | None = None
    grace: float | None = Field(None, ge=0)
    replicas: int | None = Field(None, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    target_requests: int | None = Field(None, ge=1)
    replica_gpus: float | None = Field(None, ge=0)
    ray_address: str | None = None


def read_config(path: Path) -> dict[str, Any]:
    """The options that a file names.

    Raises:
        ValueError: no YAML, an unknown option, or a value of another type or range.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"{path}: more than {_MOST_BYTES} bytes")
    try:
        found = ServeConfig.model_validate(yaml.safe_load(raw) or {})
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: no YAML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {place}: {first['msg']}") from None
    return found.model_dump(mode="json", exclude_none=True)
