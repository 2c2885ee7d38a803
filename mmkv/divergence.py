"""How far a compressed cache's predictions are from the full cache's, on a user's own prompts.

The model's own greedy reply with the full cache is fed again behind each cache. Kullback-Leibler
divergences of the next-token distributions are in nats a token, over the tokens that a cache has a
say in: a reply's first token is predicted while its prompt is read, before anything is evicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv import budgets as sizes
from mmkv.cache.layer import nbytes
from mmkv.cache.quantize import BITS
from mmkv.check_report import FULL, CheckReport, Row, summed_up
from mmkv.forcing import checked_inputs, forced, greedy
from mmkv.registry import get_policy
from mmkv.terminal import bar
from mmkv.wrapping import wrapped

if TYPE_CHECKING:
    import os

    from mmkv.policy import Policy
    from mmkv.profiles import Profile

BUDGETS, WITHIN, REPLY = (0.05, 0.1, 0.2, 0.3, 0.5), 0.05, 48
# Seconds between two lines of progress, where there is no terminal.
_EVERY = 10.0


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
    plain = None if isinstance(policy, str) else policy
    if plain is not None and policy_options:
        raise ValueError(f"options {sorted(policy_options)} beside a Policy: give them to it")
    chosen = get_policy(policy, **policy_options) if isinstance(policy, str) else policy
    check_arguments(chosen, budgets, within, max_new_tokens)
    samples = [checked_inputs(x, i, "check") for i, x in enumerate(inputs)]
    check_prompts(model, samples, max_new_tokens)
    settings, notes = settings_of(model, chosen, budgets, profile=profile, kv_dtype=kv_dtype)
    rows = list[Row]()
    with bar(len(samples) * len(settings), every=_EVERY) as advance:
        first = 0
        for sample in samples:
            for found in measure(model, sample, settings, max_new_tokens, first):
                rows += found
                advance(1, f"{found[0]['policy']} {sizes.named(found[0]['budget'])}")
            first += len(sample["input_ids"])
    return summed_up(rows, within, notes)


def check_arguments(
    policy: Policy, budgets: Sequence[float | int], within: float, max_new_tokens: int
) -> None:
    """What can be checked without a model.

    Raises:
        ValueError: says what is wrong.
    """
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
    """Whether every prompt has something to compress, and fits the model with its reply.

    Raises:
        ValueError: names the first that does not.
    """
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
    """The caches to compare, each put on the model once, and notes on those that cannot be had.

    Raises:
        ValueError: what `mmkv.wrap` refuses of the policy.
    """
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


def measure(
    model: Any,
    inputs: Mapping[str, Any],
    settings: Sequence[Setting],
    max_new_tokens: int = REPLY,
    first: int = 0,
) -> Iterator[list[Row]]:
    """Each setting's rows on one prompt, or on a left-padded batch of them.

    Args:
        model: not wrapped; it is wrapped while a setting is measured.
        inputs: what `model(**inputs)` takes.
        settings: what is compared with the full cache.
        max_new_tokens: most tokens of a reply.
        first: number of the first row.

    Raises:
        ValueError: a distribution is not finite.
    """
    reply, valid = greedy(model, inputs, max_new_tokens)
    full, log_p = 0, list[Tensor]()
    for step, (cache, logits) in enumerate(forced(model, inputs, reply)):
        if step:
            log_p.append(logits.float().log_softmax(-1))
        else:
            full = sum(map(nbytes, cache.layers))
    wanted = torch.cat(log_p, dim=1) if log_p else None
    del log_p
    for setting in settings:
        held, kept, at = 0, list[float](), 0
        nats, same = list[Tensor](), list[Tensor]()
        with setting.wrapped(model):
            for step, (cache, logits) in enumerate(forced(model, inputs, reply)):
                if not step:
                    held, kept = cache.nbytes, kept_shares(cache)
                    continue
                assert wanted is not None
                piece = wanted[:, at : at + logits.shape[1]].to(logits.device)
                nats.append(divergence(piece, logits))
                same.append(piece.argmax(-1) == logits.argmax(-1))
                at += logits.shape[1]
        yield [
            {
                "policy": setting.label,
                "budget": setting.budget,
                "index": first + row,
                "prompt_tokens": n,
                **_means(nats, same, valid, row, setting),
                "kept": kept[row],
                "nbytes": held // len(kept),
                "full_nbytes": full // len(kept),
            }
            for row, n in enumerate(_lengths(inputs))
        ]


def divergence(log_p: Tensor, logits: Tensor) -> Tensor:
    """Kullback-Leibler divergence of what logits say from `log_p`, nats: float64 [B, T].

    Args:
        log_p: float32 [B, T, V], logarithms of probabilities.
        logits: [B, T, V].
    """
    terms = log_p.exp() * (log_p - logits.float().log_softmax(-1))
    # What can never come adds nothing, whatever it has in the other.
    terms = terms.masked_fill(log_p == -math.inf, 0.0)
    return terms.sum(-1, dtype=torch.float64).clamp(min=0)


def kept_shares(cache: Any) -> list[float]:
    """The share of each row's pairs that a compressed cache holds of its prompt."""
    layers = [x.keeping() for x in cache.compressed]
    return [
        sum(x.sizes[row] for x in layers) / (n * len(layers)) for row, n in enumerate(cache.lengths)
    ]


def _means(
    nats: Sequence[Tensor], same: Sequence[Tensor], valid: Tensor, row: int, setting: Setting
) -> dict[str, Any]:
    """Of one row's tokens; None where it has none."""
    counts = valid[row].cpu()
    n = int(counts.sum())
    if not n:
        return {"tokens": 0, "divergence": None, "same": None}
    mean = float(torch.cat([x[row] for x in nats]).cpu()[counts].mean())
    if not math.isfinite(mean):
        raise ValueError(
            f"{setting.label} {sizes.named(setting.budget)}: the model's next-token probabilities "
            "are not finite: use another dtype, such as bfloat16 or float32"
        )
    alike = float(torch.cat([x[row] for x in same]).cpu()[counts].double().mean())
    return {"tokens": n, "divergence": mean, "same": alike}


def _lengths(inputs: Mapping[str, Any]) -> list[int]:
    """Tokens of each row, without padding."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    return [ids.shape[1]] * len(ids) if mask is None else mask.sum(-1).tolist()
