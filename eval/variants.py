"""What a run compares: policies with their options, at budgets."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmkv.budgets import note, number, parse

logger = logging.getLogger(__name__)

FULL = "full"
# What a run can measure.
METRICS = ("ppl", "divergence", "next", "rouge", "score")
# The built-in prompts are short: with a window of 32 tokens, a tenth of them could not be honoured.
BUILTIN_WINDOW = 8
PROFILE, KV_DTYPE, CHUNKS = "profile", "kv_dtype", "evict_chunks"
QUESTION, HIDDEN = "question", "hidden"
QUESTIONS = ("visible", HIDDEN, "both")


@dataclass(frozen=True)
class Variant:
    """A policy as one run uses it."""

    label: str  # how it was asked for, such as "prefixkv:layers=uniform"
    name: str  # the registered policy
    options: dict[str, Any]  # what differs from its defaults
    profile: str | None = None  # a path, in which "{budget}" is the kept fraction
    kv_dtype: str | None = None  # "int8" or "int4" where kept pairs are quantised
    evict_chunks: int | None = None  # tokens after each of which is evicted; None: read at once
    hidden: bool = False  # prompts are compressed without their questions, which stand behind

    def budgets(self, budgets: Sequence[float | int]) -> list[float | int]:
        """The budgets it runs at: the full cache has only one."""
        from mmkv.registry import get_policy

        return [1.0] if get_policy(self.name, **self.options).keeps_all else list(budgets)

    @contextmanager
    def wrapped(self, model: Any, budget: float | int) -> Generator[Any]:
        """The model with this policy, for the length of a `with` block."""
        from mmkv.wrapping import comparing, wrapped

        how: dict[str, Any] = {PROFILE: self.profile_at(budget), KV_DTYPE: self.kv_dtype}
        how |= {CHUNKS: self.evict_chunks is not None}
        with comparing(), wrapped(model, self.name, budget, **how, **self.options):
            yield model

    def profile_at(self, budget: float | int) -> str | None:
        """The profile's path at a budget, None without one."""
        return self.profile and self.profile.replace("{budget}", f"{budget:g}")

    @property
    def recorded(self) -> dict[str, Any]:
        """The options as rows hold them."""
        how: dict[str, Any] = {PROFILE: self.profile, KV_DTYPE: self.kv_dtype}
        how |= {CHUNKS: self.evict_chunks, QUESTION: HIDDEN if self.hidden else None}
        return self.options | {k: v for k, v in how.items() if v}


def parse_variants(
    policies: Sequence[str], options: Mapping[str, Any] | None = None, *, builtin: bool = False
) -> list[Variant]:
    """Policies by name, each with the options it reads, and least=0 unless these say otherwise.

    Args:
        policies: "name" or "name:option=value:option=value"; besides the policy's options,
            "profile", "kv_dtype", "evict_chunks" with the tokens of a chunk, and "question=hidden".
        options: given to every policy that reads them; one that none reads is refused.
        builtin: of the built-in data: windows are 8 tokens, unless told otherwise.

    Raises:
        ValueError: names the policy or option.
    """
    options, used = dict(options or {}), set[str]()
    variants: dict[str, Variant] = {}
    for text in policies:
        variant, known = _parse(text, options, builtin)
        used |= known
        if variant.label in variants:
            raise ValueError(f"policy {variant.label!r} is named twice")
        variants[variant.label] = variant
    if unread := [name for name in options if name not in used]:
        labels = ", ".join(variants)
        raise ValueError(f"option {unread[0]!r} is read by none of the policies {labels}")
    return list(variants.values())


def _parse(text: str, options: Mapping[str, Any], builtin: bool) -> tuple[Variant, set[str]]:
    """One policy, and the names of its options."""
    from mmkv.cache import quantize
    from mmkv.registry import exact_share, get_policy, policy_class

    name, *parts = text.strip().split(":")
    name = policy_class(name).name
    own = parse_options(parts)
    profile, kv_dtype, chunk = (own.pop(x, None) for x in (PROFILE, KV_DTYPE, CHUNKS))
    question = own.pop(QUESTION, "visible")
    if question not in QUESTIONS[:2]:
        raise ValueError(f"question={question!r}: expected visible or hidden")
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"evict_chunks={chunk!r}: expected the tokens of a chunk, 1 or more")
    if kv_dtype is not None:
        quantize.check(kv_dtype)
    reads = get_policy(name, **own)
    known = set(reads.flat())
    shared = {k: v for k, v in options.items() if k in known}
    if builtin and "window" in known and reads.window_size:
        shared = {"window": BUILTIN_WINDOW} | shared
    chosen = exact_share(name) | shared | own
    if get_policy(name, **chosen).layers.learns:
        raise ValueError(
            f"policy {text!r}: allocation='sampled' goes by the order of requests, which a run "
            "that stops and goes on has not: give it a profile of `mmkv calibrate`, or use "
            "allocation='mini-prefill'"
        )
    label = ":".join([name, *parts])
    return Variant(label, name, chosen, profile, kv_dtype, chunk, question == HIDDEN), known


def with_question(policies: Sequence[str], question: str) -> list[str]:
    """The policies with the question "visible", "hidden" or "both", each of them twice then.

    The full cache is the same with either, and stays as it is. Raises ValueError.
    """
    from mmkv.registry import policy_class

    if question not in QUESTIONS:
        raise ValueError(f"question={question!r}: expected one of {', '.join(QUESTIONS)}")
    found: list[str] = []
    for text in policies:
        hides = not policy_class(text.split(":")[0].strip()).keeps_all
        found += [text] if question != HIDDEN or not hides else []
        found += [f"{text}:{QUESTION}={HIDDEN}"] if question != "visible" and hides else []
    return found


def split(text: str) -> list[str]:
    """Names with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options from "key=value" texts; a value is JSON, or else a word. Raises ValueError."""
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or key in options:
            raise ValueError(f"option {text!r}: expected key=value, each key once")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = {"True": True, "False": False, "None": None}.get(value, value)
    return options


def percent(budget: float | int) -> str:
    """A budget in words."""
    return f"{100 * budget:g}%" if isinstance(budget, float) else f"{budget} tokens"


def plugin_arguments(
    policy: str, budget: float | int | str | None, profile: str | None, kwargs: dict[str, Any]
) -> tuple[float | int | None, dict[str, Any], dict[str, Any]]:
    """Budget, the policy's options with "kv_dtype" and least=0, and what is left for the harness.

    A "plugin" is a file with policies or parts of one's own, which is read first. Raises
    ValueError: an unknown policy, option or budget, or a file that registers nothing.
    """
    from mmkv.registry import exact_share, get_policy, load_plugin, option_types, policy_class

    if plugin := kwargs.get("plugin"):
        load_plugin(plugin)
    names = {*option_types(policy_class(policy)), KV_DTYPE}
    given = parse_options([f"{k}={v}" for k, v in kwargs.items() if k in names])
    mine = exact_share(policy) | given
    chosen = get_policy(policy, **{k: v for k, v in mine.items() if k != KV_DTYPE})
    size = None
    if chosen.retention is None and profile is None and budget is not None:
        size = parse(budget) if isinstance(budget, str) else number(budget)
        if doubt := note(size):
            logger.warning(doubt)
    return size, mine, {k: v for k, v in kwargs.items() if k not in names | {"plugin"}}
