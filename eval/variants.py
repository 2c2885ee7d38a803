"""The policies that a run compares, with their options and budgets."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmkv.cache import codes
from mmkv.memory import Memory
from mmkv.names import split_pair
from mmkv.planning import comparing
from mmkv.policy import Policy
from mmkv.policy_options import option_texts, typed
from mmkv.registry import exact_share, get_policy, policy_class
from mmkv.wrapping import wrapped

from .store import HIDDEN, QUESTION, QUESTIONS

PROFILE, KV_DTYPE, CHUNKS = "profile", "kv_dtype", "evict_chunks"


@dataclass(frozen=True)
class Variant:
    """A policy with the options that a run gives it."""

    label: str  # as the user wrote it, such as "prefixkv:layers=uniform"
    policy: Policy
    options: dict[str, Any]  # of the policy, those that differ from its defaults
    profile: str | None = None  # a path, in which "{budget}" stands for the kept fraction
    kv_dtype: str | None = None  # "int8" or "int4" if kept pairs are quantised
    evict_chunks: int | None = None  # tokens between evictions; None: prompts are read at once
    hidden: bool = False  # prompts are compressed before their questions are read

    def budgets(self, budgets: Sequence[float | int]) -> list[float | int]:
        """Return the budgets it runs at: the full cache has only one.

        Raises:
            ValueError: `retention` sizes the policy's cache.
        """
        if self.policy.keeps_all:
            return [1.0]
        if not self.policy.takes_budget:
            raise ValueError(
                f"policy {self.label!r}: retention sizes its cache, and policies are compared here "
                "at budgets: leave retention out, or measure its bytes and speed with `mmkv bench`"
            )
        return list(budgets)

    @contextmanager
    def wrapped(self, model: Any, budget: float | int | None) -> Generator[Any]:
        """Wrap the model with this policy, for the length of a `with` block; a policy with
        `retention` needs no budget."""
        options: Any = {PROFILE: self.profile_at(budget), KV_DTYPE: self.kv_dtype}
        options |= {CHUNKS: self.evict_chunks is not None}
        with comparing(), wrapped(model, self.policy, budget, **options):
            yield model

    def profile_at(self, budget: float | int | None) -> str | None:
        """Return the profile's path at a budget; None without a profile."""
        if self.profile is None or budget is None:
            return self.profile
        return self.profile.replace("{budget}", f"{budget:g}")

    def call(self, budget: float | int) -> str:
        """Return the Python call that wraps a model with this policy at a budget."""
        size = repr(budget)
        if isinstance(budget, Memory):
            exact = Memory.of(text := str(budget)) == budget
            size = f'memory="{text}"' if exact else f"memory={float(budget)!r}"
        options = {**self.options, PROFILE: self.profile_at(budget), KV_DTYPE: self.kv_dtype}
        given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return f"mmkv.wrap({', '.join(['model', repr(self.policy.name), size, *given])})"

    @property
    def recorded(self) -> dict[str, Any]:
        """The options as rows record them."""
        run_options: dict[str, Any] = {PROFILE: self.profile, KV_DTYPE: self.kv_dtype}
        run_options |= {CHUNKS: self.evict_chunks, QUESTION: HIDDEN if self.hidden else None}
        return self.options | {k: v for k, v in run_options.items() if v}


def parse_variants(
    policies: Sequence[str], options: Mapping[str, Any] | None = None, *, exact: bool = True
) -> list[Variant]:
    """Return variants of policies by name, each with its options.

    Args:
        policies: "name" or "name:option=value:option=value"; besides the policy's options,
            "profile", "kv_dtype", "evict_chunks" with the tokens of a chunk, and "question=hidden".
        options: values or their texts, passed to every policy that has them; one that no policy
            has is refused.
        exact: whether `least` is 0 by default, in place of the policy's own.

    Raises:
        ValueError: a policy or option is wrong; the message names it.
    """
    options, used = dict(options or {}), set[str]()
    variants: dict[str, Variant] = {}
    for text in policies:
        variant, known = _parse(text, options, exact)
        used |= known
        if variant.label in variants:
            raise ValueError(f"policy {variant.label!r} is named twice")
        variants[variant.label] = variant
    if unread := [name for name in options if name not in used]:
        labels = ", ".join(variants)
        raise ValueError(f"option {unread[0]!r} is read by none of the policies {labels}")
    return list(variants.values())


def _parse(text: str, options: Mapping[str, Any], exact: bool) -> tuple[Variant, set[str]]:
    """Return one variant, and the names of its policy's options."""
    name, *parts = text.strip().split(":")
    name = policy_class(name).name
    texts = option_texts(parts)
    profile, kv_dtype, chunk_text = (texts.pop(x, None) for x in (PROFILE, KV_DTYPE, CHUNKS))
    question = texts.pop(QUESTION, "visible")
    if question not in QUESTIONS[:2]:
        raise ValueError(f"question={question!r}: expected visible or hidden")
    chunk = int(chunk_text) if chunk_text and chunk_text.isdecimal() else None
    if chunk_text is not None and not chunk:
        raise ValueError(f"evict_chunks={chunk_text!r}: expected the tokens of a chunk, 1 or more")
    if kv_dtype is not None:
        codes.check(kv_dtype)
    own_options = typed(name, texts)
    known = set(get_policy(name, **own_options).flat())
    shared = typed(name, {k: v for k, v in options.items() if k in known})
    policy_options = (exact_share(name) if exact else {}) | shared | own_options
    policy = get_policy(name, **policy_options)
    if policy.layers.learns:
        raise ValueError(
            f"policy {text!r}: allocation='sampled' learns from the first requests, and a resumed "
            "run has no fixed order of requests: give it a profile of `mmkv calibrate`, or use "
            "allocation='mini-prefill'"
        )
    hidden = question == HIDDEN
    parts = [x for x in parts if split_pair(x)[0] != QUESTION]
    label = ":".join([name, *parts, *([f"{QUESTION}={HIDDEN}"] if hidden else [])])
    return Variant(label, policy, policy_options, profile, kv_dtype, chunk, hidden), known


def with_question(policies: Sequence[str], question: str) -> list[str]:
    """Return policy texts with the question "visible", "hidden", or "both", which doubles each.

    The full cache is the same with either, so it is not changed. Raises ValueError.
    """
    if question not in QUESTIONS:
        raise ValueError(f"question={question!r}: expected one of {', '.join(QUESTIONS)}")
    texts: list[str] = []
    for text in policies:
        hides = not policy_class(text.split(":")[0].strip()).keeps_all
        texts += [text] if question != HIDDEN or not hides else []
        texts += [f"{text}:{QUESTION}={HIDDEN}"] if question != "visible" and hides else []
    return texts
