"""How far a compressed cache's predictions are from the full cache's, on a user's own prompts.

The model's own greedy reply with the full cache is fed again behind each cache. Kullback-Leibler
divergences of the next-token distributions are in nats a token, over the tokens that a cache has a
say in: a reply's first token is predicted while its prompt is read, before anything is evicted.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv import budgets as sizes
from mmkv.cache.quantize import BITS
from mmkv.check_report import FULL, CheckReport, Row, summed_up
from mmkv.forcing import Scored, checked_inputs, log_probabilities, replies, score_answers
from mmkv.registry import get_policy
from mmkv.terminal import bar
from mmkv.wrapping import wrapped

if TYPE_CHECKING:
    import os

    from mmkv.policy import Policy
    from mmkv.profiles import Profile

BUDGETS, WITHIN, REPLY = (0.05, 0.1, 0.2, 0.3, 0.5), 0.05, 48


@dataclass(frozen=True)
class Setting:
    """A cache that is compared with the full one; `label` is its row's `policy`."""

    policy: Policy
    budget: float | int
    kv_dtype: str | None = None
    profile: Profile | str | os.PathLike[str] | None = None

    @property
    def label(self) -> str:
        """The policy as evaluations name it."""
        return self.policy.name + (f":kv_dtype={self.kv_dtype}" if self.kv_dtype else "")

    def wrapped(self, model: Any) -> AbstractContextManager[Any]:
        """The model with this cache, for the length of a `with` block."""
        how: Any = {"profile": self.profile, "kv_dtype": self.kv_dtype}
        return wrapped(model, self.policy, self.budget, **how)


def check(
    model: Any,
    inputs: Iterable[Mapping[str, Any]],
    policy: str | Policy = "condense",
    budgets: Sequence[float | int] = BUDGETS,
    *,
    within: float = WITHIN,
    max_new_tokens: int = REPLY,
    profile: Profile | str | os.PathLike[str] | None = None,
    kv_dtype: str | None = None,
    **policy_options: Any,
) -> CheckReport:
    """Measure on prompts what a policy costs at each budget, and what 8 and 4 bits cost.

    Args:
        model: not wrapped; it is wrapped for parts of the call.
        inputs: what `model(**x)` takes, such as a processor returns, for each prompt; each row of
            a left-padded batch counts as a prompt.
        policy: as for `mmkv.wrap`; so are `profile`, `kv_dtype` and `policy_options`.
        budgets: fractions of the prompt, or tokens per layer and head.
        within: the tolerance, nats a token.
        max_new_tokens: most tokens of a reply.

    Returns:
        A row a budget, and the smallest budget within the tolerance.

    Raises:
        ValueError: no prompts, one of a single token or longer than the model's positions, a
            tolerance or budget out of range, or what `mmkv.wrap` refuses.
    """
    if policy_options and not isinstance(policy, str):
        raise ValueError(f"options {sorted(policy_options)} beside a Policy: give them to it")
    chosen = get_policy(policy, **policy_options) if isinstance(policy, str) else policy
    check_arguments(chosen, budgets, within, max_new_tokens)
    samples = [checked_inputs(x, i, "check") for i, x in enumerate(inputs)]
    check_prompts(model, samples, max_new_tokens)
    settings, notes = settings_of(model, chosen, budgets, profile=profile, kv_dtype=kv_dtype)
    rows = measured(model, samples, settings, max_new_tokens)
    return summed_up((row for found in rows for row in found), within, notes)


def measured(
    model: Any,
    samples: Sequence[Mapping[str, Any]],
    settings: Sequence[Setting],
    max_new_tokens: int,
    done: Container[tuple[str, str, int]] = (),
) -> Iterator[list[Row]]:
    """The rows of all samples, those of one cache and sample at a time, with a bar of progress.

    What is `done`, by policy, budget and number of the row, is left out.
    """
    first = 0
    with bar(len(samples) * len(settings)) as advance:
        for i, inputs in enumerate(samples, start=1):
            left = [x for x in settings if (x.label, repr(x.budget), first) not in done]
            name = f"prompt {i} of {len(samples)}"
            advance(len(settings) - len(left), name)
            if left:
                answers = replies(model, inputs, max_new_tokens)
                full, whole = log_probabilities(model, inputs, answers)
                for setting in left:
                    with setting.wrapped(model):
                        scored = score_answers(model, inputs, answers, full=full)
                    yield _rows(setting, scored, _lengths(inputs), whole, first)
                    advance(1, name)
            first += len(inputs["input_ids"])


def _rows(
    setting: Setting, scored: Scored, lengths: list[int], whole: int, first: int
) -> list[Row]:
    """What a cache scored on each prompt of a batch, whose full cache has `whole` bytes."""
    if not all(map(math.isfinite, scored.divergence)):
        raise ValueError(
            f"{setting.label} {sizes.named(setting.budget)}: the model's next-token "
            "probabilities are not finite: use another dtype, such as bfloat16 or float32"
        )
    kept = kept_shares(scored.cache)
    return [
        {
            "policy": setting.label,
            "budget": setting.budget,
            "index": first + i,
            "prompt_tokens": lengths[i],
            "tokens": n,
            "divergence": scored.divergence[i] / n if n else None,
            "same": scored.same[i] / n if n else None,
            "kept": kept[i],
            "nbytes": scored.held_bytes // len(kept),
            "full_nbytes": whole // len(kept),
        }
        for i, n in enumerate(scored.compared)
    ]


def check_arguments(
    policy: Policy, budgets: Sequence[float | int], within: float, max_new_tokens: int
) -> None:
    """What can be checked without a model."""
    if not 0 < within < math.inf:
        raise ValueError(f"within={within}: expected nats a token above 0, such as {WITHIN}")
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: expected 2 or more; the first token is predicted "
            "before anything is evicted"
        )
    if not budgets:
        raise ValueError("check: no budgets: give some, such as 0.1 and 0.2")
    if policy.keeps_all:
        raise ValueError(f"policy {policy.name!r} keeps everything: there is nothing to check")
    for budget in budgets:
        sizes.checked(policy, budget)
    if policy.layers.learns:
        raise ValueError(
            "check measures each prompt alone, and allocation='sampled' learns from one for the "
            "next: use allocation='mini-prefill'"
        )


def check_prompts(model: Any, samples: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
    """Refuse a prompt with nothing to compress, or too long for the model with its reply."""
    if not samples:
        raise ValueError("check: no prompts: give one or more")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    lengths = [n for sample in samples for n in _lengths(sample)]
    for i, n in enumerate(lengths, start=1):
        if n < 2:
            raise ValueError(
                f"prompt {i} has {n} token: there is nothing to compress; give a longer one"
            )
        if most is not None and n + max_new_tokens > most:
            raise ValueError(
                f"prompt {i} has {n:,} tokens, and with {max_new_tokens} of a reply more than the "
                f"model's {most:,} positions: shorten it"
            )


def settings_of(
    model: Any,
    policy: Policy,
    budgets: Sequence[float | int],
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    kv_dtype: str | None = None,
) -> tuple[list[Setting], list[str]]:
    """The caches to compare, each put on the model once, and notes on those that cannot be had."""
    found = [Setting(policy, sizes.number(b), kv_dtype, profile) for b in budgets]
    for setting in found:
        with setting.wrapped(model):
            pass
    notes = list[str]()
    for dtype in BITS:
        setting = Setting(get_policy(FULL), 1.0, dtype)
        try:
            with setting.wrapped(model):
                found.append(setting)
        except ValueError as error:
            notes.append(f"the full cache in {dtype} is left out: {error}")
    return found, notes


def kept_shares(cache: Any) -> list[float]:
    """The share of each row's pairs that a compressed cache holds of its prompt."""
    layers = [x.keeping() for x in cache.compressed]
    return [
        sum(x.sizes[row] for x in layers) / (n * len(layers)) for row, n in enumerate(cache.lengths)
    ]


def _lengths(inputs: Mapping[str, Any]) -> list[int]:
    """Tokens of each row, without padding."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    return [ids.shape[1]] * len(ids) if mask is None else mask.sum(-1).tolist()
