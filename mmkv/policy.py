"""What a policy is: a frozen composition of parts. State lives on the cache, never here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar, get_type_hints

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
    at_least,
    check,
    discover,
    registered,
    share,
)
from mmkv.parts.slots import Grow
from mmkv.scores.window import WindowAttention
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.layers import UniformLayers

__all__ = ["Decode", "Heads", "Layers", "Merge", "Part", "Policy", "Protect", "Score"]

P = TypeVar("P", bound="Policy")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a cache is made smaller: score, layer sizes, head sizes, decoding, merging, protection.

    A policy of your own is a subclass with other parts. `Policy.of(...)`, `mmkv.get_policy` and
    `mmkv.wrap` also take the names of parts and the options of parts, flat.

    Options:
        score: what makes a token important.
        layers: how many tokens each layer keeps.
        heads: how a layer's size is split among its heads.
        decode: what the budget means for generated tokens.
        merge: what becomes of evicted pairs; None: they are dropped.
        protect: what every layer keeps whatever the scores say; None: nothing more.
        sinks: how many first tokens are always kept (StreamingLLM).
        least: how many tokens a head keeps, in the mean over layers and heads, however small a
            share the budget is; a budget in tokens is not raised.
        recent: the share of a layer's size given to the most recent tokens (H2O: half).
        reposition: give keys consecutive positions inside the cache (StreamingLLM as published).
        text_prior: tokens of images leave before any other of the prompt does (LOOK-M).
        postpone: a prompt is evicted after so many generated tokens, as if these had ended it:
            their queries join those of the prompt, and they stay (nearest: LAQ, arXiv 2505.20334).

    Raises:
        ValueError: an option out of its range, or a combination that means nothing.
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
    reposition: bool = False
    text_prior: bool = False
    postpone: int = 0

    name: ClassVar[str] = "policy"
    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = False
    # Options that follow from others, and so cannot be set.
    settled: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check every option, and that the parts go together."""
        for kind in KINDS:
            object.__setattr__(self, kind, as_part(kind, getattr(self, kind)))
        hints = self.hints()
        for field in dataclasses.fields(self):
            if field.name not in KINDS:
                check(field.name, getattr(self, field.name), hints[field.name])
        at_least(0, sinks=self.sinks, least=self.least, postpone=self.postpone)
        share(zero=True, recent=self.recent)
        if self.text_prior and self.decode.name in ("fixed", "least"):
            raise ValueError(
                f"text_prior=True lets image tokens leave first, but decode={self.decode.name!r} "
                "drops tokens whatever they are: leave it out, or use decode='ratio' or 'grow'"
            )
        if self.postpone:
            self._check_postponed()
        for part in self.parts.values():
            part.check(self)

    def _check_postponed(self) -> None:
        """Refuse `postpone` where generated tokens cannot observe a prompt that waits for them."""
        score, asked = self.score, f"postpone={self.postpone}"
        if score.repeats or (score.queries == 0 and score.turn_reduction != "sum"):
            raise ValueError(
                f"{asked} lets the queries of generated tokens observe, and score={score.name!r} "
                "asks none of them: use postpone=0, or score='window' or 'accumulated'"
            )
        if self.layers.mini_prefill:
            raise ValueError(
                f"{asked} sizes layers after the prefill, and "
                f"allocation={self.flat().get('allocation')!r} before it: use allocation='one-pass'"
            )
        if self.decode.every:
            raise ValueError(
                f"{asked} and decode={self.decode.name!r} both let generated tokens observe: use "
                "one of them"
            )

    @property
    def parts(self) -> dict[str, Part]:
        """Its parts by kind, without those that are None."""
        found = {kind: getattr(self, kind) for kind in KINDS}
        return {kind: part for kind, part in found.items() if part is not None}

    @classmethod
    def of(cls: type[P], **options: Any) -> P:
        """Its defaults with other parts, by name or as values, and options of parts, flat.

        Raises:
            ValueError: an option that none of its parts reads, or what the parts refuse.
        """
        for option in options:
            if option in cls.settled:
                raise ValueError(
                    f"option {option!r} has no effect on policy {cls.name!r}, where it follows "
                    "from others: remove it"
                )
        common = {f.name for f in dataclasses.fields(Policy)} - set(KINDS)
        own = {f.name for f in dataclasses.fields(cls)} - set(KINDS) - common
        policy = cls.start(**{k: v for k, v in options.items() if k in own})
        # With the parts they go together with, which may be others than the policy's own.
        chosen = {k: v for k, v in options.items() if k in common}
        for kind in KINDS:
            before: Part | None = getattr(policy, kind)
            part = before
            if kind in options:
                part = as_part(kind, options[kind])
                given_by_name = not isinstance(options[kind], Part)
                if given_by_name and type(part) is type(before):
                    part = before
                elif given_by_name and part is not None and before is not None:
                    # What both have (average_heads) stays as the policy has it.
                    kept = {k: v for k, v in before.options().items() if k in part.options()}
                    part = dataclasses.replace(part, **kept)
            if part is not None:
                mine = {k: v for k, v in options.items() if k in part.options()}
                part = dataclasses.replace(part, **mine) if mine else part
            chosen[kind] = part
        policy = dataclasses.replace(policy, **chosen)
        read = policy.flat()
        for option in options:
            if option not in read:
                parts = ", ".join(f"{k}={v.name!r}" for k, v in policy.parts.items())
                raise ValueError(
                    f"option {option!r} has no effect on policy {cls.name!r} as configured "
                    f"({parts}): remove it, or choose the part that reads it"
                )
        return policy

    @classmethod
    def start(cls: type[P], **own: Any) -> P:
        """The policy with options that are its alone, before `of` sets parts and the others."""
        return cls(**own)

    def flat(self) -> dict[str, Any]:
        """All that it reads: parts by name, their options, and its own, with their values."""
        if self.keeps_all:
            return {}
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found[field.name] = value
            if field.name in KINDS:
                found[field.name] = "none" if value is None else value.name
                found |= {} if value is None else value.options()
        return {k: v for k, v in found.items() if k not in self.settled}

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options this policy reads as it stands, with their defaults."""
        return cls().flat()

    @classmethod
    @cache
    def hints(cls) -> dict[str, Any]:
        """The annotations of its own fields; those that name what cannot be found are `Any`."""
        try:
            return get_type_hints(cls)
        except NameError:  # defined inside a function, with annotations that are texts
            known = {} if cls is Policy else Policy.hints()
            return {f.name: known.get(f.name, Any) for f in dataclasses.fields(cls)}

    @cached_property
    def window_size(self) -> int:
        """How many last tokens observe and are themselves always kept."""
        return 0 if self.keeps_all else self.score.window + self.postpone

    @cached_property
    def queries(self) -> int | None:
        """How many of a prompt's last queries its score needs at the end; None: all of them."""
        if self.keeps_all:
            return 0
        return self.score.window or None if self.score.queries is None else self.score.queries

    @property
    def retention(self) -> float | None:
        """The share of importance that sizes the cache in place of a budget, or None."""
        return self.layers.retention


def as_part(kind: str, value: Any) -> Any:
    """A part from its name, or as it is."""
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
