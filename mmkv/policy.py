"""Policies: frozen compositions of parts. State of a sequence lives on the cache, never here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Self, get_type_hints

from mmkv.decode.slots import Grow
from mmkv.option_types import at_least, check, share
from mmkv.parts import (
    BASES,
    KINDS,
    OPTIONAL,
    Decode,
    Heads,
    Layers,
    Merge,
    Part,
    Protect,
    Score,
    discover,
    registered,
)
from mmkv.scores.window import WindowAttention
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.layers import UniformLayers

__all__ = ["Decode", "Heads", "Layers", "Merge", "Part", "Policy", "Protect", "Score"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a cache is compressed: score, layer sizes, head sizes, decoding, merging, protection.

    Define a policy as a subclass with other parts. `Policy.of(...)`, `mmkv.get_policy` and
    `mmkv.wrap` also take parts by name, and the options of parts directly.

    Options:
        score: how important each token is.
        layers: how many tokens each layer keeps.
        heads: how a layer's size is split among its heads.
        decode: what the budget means for generated tokens.
        merge: how evicted pairs are merged; None: they are dropped.
        protect: which tokens every layer keeps, whatever their scores; None: no more.
        sinks: how many first tokens are pinned (StreamingLLM).
        least: the least mean number of tokens per layer and head, if the budget is a fraction; a
            budget in tokens is not raised.
        recent: the share of a layer's size given to the most recent tokens (H2O: half).

    Raises:
        ValueError: an option is out of range, or options contradict each other.
    """

    score: Score = WindowAttention()
    layers: Layers = UniformLayers()
    heads: Heads = UniformHeads()
    decode: Decode = Grow()
    merge: Merge | None = None
    protect: Protect | None = None
    sinks: int = 0
    least: int = 0
    recent: float = 0.0

    name: ClassVar[str] = "policy"
    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = False
    # Options that the class derives from others, so that they cannot be set.
    derived: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check every option and the combination of parts."""
        for kind in KINDS:
            object.__setattr__(self, kind, as_part(kind, getattr(self, kind)))
        hints = self.hints()
        for field in dataclasses.fields(self):
            if field.name not in KINDS:
                check(field.name, getattr(self, field.name), hints[field.name])
        at_least(0, sinks=self.sinks, least=self.least)
        share(zero=True, recent=self.recent)
        for part in self.parts.values():
            part.check(self)

    @property
    def takes_budget(self) -> bool:
        """Whether a budget sizes it: not if it keeps everything, or keeps a share of attention."""
        return not self.keeps_all and self.layers.retention is None

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by kind, without those that are None."""
        parts = {kind: getattr(self, kind) for kind in KINDS}
        return {kind: part for kind, part in parts.items() if part is not None}

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make the policy with these parts (names or values), options of parts and own options.

        Raises:
            ValueError: no part reads an option, or a part refuses a value or a combination.
        """
        for option in options:
            if option in cls.derived:
                raise ValueError(
                    f"option {option!r} has no effect on policy {cls.name!r}, where it follows "
                    "from others: remove it"
                )
        common = {f.name for f in dataclasses.fields(Policy)} - set(KINDS)
        own_names = {f.name for f in dataclasses.fields(cls)} - set(KINDS) - common
        policy = cls.start(**{k: v for k, v in options.items() if k in own_names})
        # These are set together with the parts, as their checks depend on each other.
        replaced = {k: v for k, v in options.items() if k in common}
        for kind in KINDS:
            default: Part | None = getattr(policy, kind)
            part = default
            if kind in options:
                part = as_part(kind, options[kind])
                by_name = not isinstance(options[kind], Part)
                if by_name and part is not None and default is not None:
                    # Options of both parts (average_heads) keep the policy's values.
                    shared = {k: v for k, v in default.options().items() if k in part.options()}
                    part = dataclasses.replace(part, **shared)
            if part is not None:
                of_part = {k: v for k, v in options.items() if k in part.options()}
                part = dataclasses.replace(part, **of_part) if of_part else part
            replaced[kind] = part
        policy = dataclasses.replace(policy, **replaced)
        readable = policy.flat()
        for option in options:
            if option not in readable:
                parts = ", ".join(f"{k}={v.name!r}" for k, v in policy.parts.items())
                raise ValueError(
                    f"option {option!r} has no effect on policy {cls.name!r} as configured "
                    f"({parts}): remove it, or choose the part that reads it"
                )
        return policy

    @classmethod
    def start(cls, **options: Any) -> Self:
        """Make the policy with the options of this class alone, before `of` sets all others."""
        return cls(**options)

    def flat(self) -> dict[str, Any]:
        """Return all options that it reads, with their values: parts by name, and their options."""
        if self.keeps_all:
            return {}
        options: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            options[field.name] = value
            if field.name in KINDS:
                options[field.name] = "none" if value is None else value.name
                options |= {} if value is None else value.options()
        return {k: v for k, v in options.items() if k not in self.derived}

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the options that this class reads by default, with their values."""
        return cls().flat()

    @classmethod
    @cache
    def hints(cls) -> dict[str, Any]:
        """Return the fields' types; `Any` where an annotation cannot be resolved."""
        try:
            return get_type_hints(cls)
        except NameError:  # a class inside a function, with annotations as strings
            known = {} if cls is Policy else Policy.hints()
            return {f.name: known.get(f.name, Any) for f in dataclasses.fields(cls)}

    @property
    def n_exact(self) -> int:
        """How many of a row's first tokens stay exact in 8 or 4 bits: sinks, and at least one."""
        return max(1, self.sinks)

    @cached_property
    def window_size(self) -> int:
        """How many last tokens observe, and are pinned."""
        return 0 if self.keeps_all else self.score.window

    @cached_property
    def uses_rotary(self) -> bool:
        """Whether rotary embeddings are needed: by the score, or for fitted weights of groups."""
        return self.score.uses_rotary or (self.merge is not None and self.merge.fit > 0)

    @cached_property
    def queries(self) -> int | None:
        """How many of a prompt's last queries the score needs at its end; None: all."""
        if self.keeps_all:
            return 0
        return self.score.window or None if self.score.queries is None else self.score.queries


def as_part(kind: str, value: Any) -> Any:
    """Return a part by its name; a part is returned unchanged."""
    if value is None or value == "none":
        if kind in OPTIONAL:
            return None
    elif isinstance(value, BASES[kind]):
        return value
    elif isinstance(value, str):
        discover()
        if (cls := registered.get((kind, value))) is not None:
            return cls()
    names = sorted(name for k, name in registered if k == kind)
    names += ["none"] if kind in OPTIONAL else []
    raise ValueError(f"{kind}={value!r}: expected one of {names}, or a {BASES[kind].__name__} part")
