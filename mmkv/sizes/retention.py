"""Layer sizes by the share of the scores that each layer retains (PrefixKV, XKV)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mmkv.option_types import at_least, share
from mmkv.parts import Layers, SizeInputs, register_part
from mmkv.sizes.heads import count_first

if TYPE_CHECKING:
    from mmkv.policy import Policy


@dataclass(frozen=True, kw_only=True)
class _ByScores(Layers):
    """Layer sizes from the scores of all layers, with options for when scores are collected."""

    allocation: Literal["one-pass", "mini-prefill", "sampled"] = "one-pass"
    samples: int | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        counts = {"samples": self.samples, "requests": self.requests}
        counts = {name: n for name, n in counts.items() if n is not None}
        at_least(1, **counts)
        if self.allocation == "sampled" and len(counts) != 1:
            raise ValueError(
                f"allocation='sampled' with samples={self.samples}, requests={self.requests}: give "
                "one, such as samples=20 to learn from 20 requests, or requests=200 for a tenth"
            )
        if counts and self.allocation != "sampled":
            ((name, n), *_) = counts.items()
            raise ValueError(
                f"{name}={n} needs allocation='sampled', got {self.allocation!r}: leave it out, or "
                "use allocation='sampled'"
            )

    @property
    def learns(self) -> int:  # type: ignore[override]
        """How many first requests of a task set its sizes: `samples`, or a tenth of `requests`."""
        return self.samples or -(-(self.requests or 0) // 10)

    @property
    def needs(self) -> Literal["scores", "mini-prefill"]:  # type: ignore[override]
        """The pass whose scores size the layers, by `allocation`."""
        return "scores" if self.allocation == "one-pass" else "mini-prefill"

    def check(self, policy: Policy) -> None:
        """Check that scores differ between layers."""
        if not policy.score.ranks:
            raise ValueError(
                f"layers={self.name!r} compares layers by their scores; "
                f"score={policy.score.name!r} gives all layers the same"
            )


@register_part("prefix")
@dataclass(frozen=True, kw_only=True)
class PrefixLayers(_ByScores):
    """Every layer retains the same share of importance (PrefixKV, arXiv 2412.03409, section 3).

    Options:
        allocation: when sizes are set: "one-pass", after a prefill that keeps every layer whole;
            "mini-prefill", after a first pass that stores nothing; "sampled", as "mini-prefill" for
            the first requests of each `mmkv.task`; later requests get the mean of these sizes.
        samples: for "sampled", how many first requests set the sizes; 1 or more.
        requests: in place of `samples`, how many requests will come; the first tenth is used.
    """

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return sizes of equal retention."""
        return beyond_pinned(prefix, rows)


@register_part("pooled")
@dataclass(frozen=True, kw_only=True)
class PooledLayers(_ByScores):
    """The largest mean retention over layers (XKV, arXiv 2412.05896, section IV-B).

    Options:
        allocation: when sizes are set, as for "prefix".
        samples: how many first requests set the sizes, as for "prefix".
        requests: how many requests will come, as for "prefix".
        retention: in place of a budget, the mean share of importance to retain, in (0, 1], with the
            smallest sizes that reach it.
    """

    retention: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        share(zero=False, retention=self.retention)
        if self.retention is not None and self.learns:
            raise ValueError(
                f"allocation='sampled' divides a budget, and retention={self.retention} replaces "
                "the budget: use one of them"
            )

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return sizes of the largest mean retention."""
        return beyond_pinned(partial(pooled, retention=self.retention), rows)


def beyond_pinned(allocate: Callable[..., list[list[int]]], rows: SizeInputs) -> list[list[float]]:
    """Return each row's pinned tokens, plus the sizes by `allocate` of tokens that compete."""
    L, scores, candidates = rows.n_layers, rows.scores, rows.n_candidates
    assert scores is not None
    assert candidates is not None
    totals, pinned = (torch.tensor(x, device="cpu") for x in (rows.totals, rows.pinned))
    to_split = totals - L * pinned
    # In a later turn fewer tokens may compete than the total allows.
    to_split = to_split.to(scores.device, non_blocking=True).clamp(min=0).minimum(L * candidates)
    sizes = allocate(scores, to_split, candidates)
    return [[pinned + n for n in row] for pinned, row in zip(rows.pinned, sizes, strict=True)]


def prefix(importance: Tensor, totals: Tensor, candidates: Tensor | None = None) -> list[list[int]]:
    """Return the layer sizes with the highest minimum retention over layers.

    With `P_l(o)` the share of layer `l`'s importance in its `o` largest entries, the paper searches
    one `p` by bisection and keeps `min{o : P_l(o) >= p}` tokens, the number of `o` with `P_l(o) <
    p`. So a layer's size is how many of the `total` smallest `P_l(o)` are its own, which one
    sort finds exactly; tokens that no `p` can place go to the layers of the lowest retention.

    Args:
        importance: `[B, L, N]`, not negative; normalised per layer here. NaN counts as 0, inf as
            the largest finite entry of the layer, and a layer of zeros as uniform.
        totals: int64 `[B]`, tokens over all layers, at most L times the row's candidates.
        candidates: int64 `[B]`, how many of the N are tokens; the others are filler; None: all.

    Returns:
        `[B][L]`, tokens per layer, each row of sum `total`; sent to the host at once.

    Raises:
        ValueError: an entry is negative.

    Source: PrefixKV, arXiv 2412.03409, section 3, whose bisection may miss the total.
    """
    shares, filler = _shares(importance, candidates)
    curve = shares.sort(dim=-1, descending=True).values.cumsum(-1)
    curve = torch.nn.functional.pad(curve / curve[..., -1:], (1, 0))
    reached = curve[..., :-1]  # [B, L, N]: P_l before the next token is added
    # Token-major, so that equal entries (zeros at the end) are given to the layers in turn.
    order = reached.masked_fill(filler, torch.inf).mT.flatten(1).argsort(dim=-1, stable=True)
    return _counted(order, totals, importance)


def pooled(
    importance: Tensor,
    totals: Tensor,
    candidates: Tensor | None = None,
    *,
    retention: float | None = None,
) -> list[list[int]]:
    """Return the layer sizes with the highest mean retention over layers.

    The paper's greedy loop adds one token at a time where it adds most. As retention is concave in
    the size, that selects the `total` largest normalised entries of all layers: one sort, no loop.

    Args:
        importance, totals, candidates: as for `prefix`.
        retention: the mean retention to reach with as few tokens as possible, in (0, 1]; `totals`
            are then minima.

    Returns:
        `[B][L]`, as `prefix`.

    Raises:
        ValueError: an entry is negative.

    Source: XKV, arXiv 2412.05896, algorithm 1.
    """
    shares, filler = _shares(importance, candidates)
    # Token-major, so that equal entries are given to the layers in turn.
    entries = shares.masked_fill(filler, -1.0).mT.flatten(1)
    entries, order = entries.sort(dim=-1, descending=True, stable=True)
    if retention is not None:
        mean = entries.clamp(min=0).cumsum(-1)
        mean = mean / mean[:, -1:]
        # Less a rounding error: eight entries of 0.1 must reach 0.8.
        totals = totals.maximum((mean < retention * (1 - 1e-12)).sum(-1) + 1)
    return _counted(order, totals, importance)


def _shares(importance: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return importance `[..., L, N]` with sum 1 in each layer: float64, 0 for filler.

    Also return which of the N are filler, bool `[..., 1, N]`: all after `candidates` `[...]`.
    """
    N, device = importance.shape[-1], importance.device
    index = torch.arange(N, device=device)
    count = torch.tensor(N, device=device) if candidates is None else candidates
    filler = index >= count.to(device)[..., None, None]
    weights = importance.detach().double().nan_to_num(nan=0.0, posinf=torch.inf)
    infinite = weights.isinf()
    largest = weights.masked_fill(infinite, 0.0).amax(-1, keepdim=True)
    # A layer of inf and zeros alone has no finite scale: any positive number will do.
    largest = torch.where(largest > 0, largest, 1.0)
    # Divided by the largest first: sums of very large or small entries overflow or underflow.
    weights = torch.where(infinite, 1.0, weights / largest)
    weights = torch.where(weights.amax(-1, keepdim=True) > 0, weights, 1.0)
    weights = weights.masked_fill(filler, 0.0)
    return weights / weights.sum(-1, keepdim=True), filler


def _counted(order: Tensor, totals: Tensor, importance: Tensor) -> list[list[int]]:
    """Return how many of the first `totals` `[B]` token-major indices each layer has: `[B][L]`."""
    B, L, _ = importance.shape
    sizes = count_first(order, totals.to(order.device)[:, None], L)
    lowest = importance.nan_to_num(nan=0.0).amin().double()
    *flat, lowest = torch.cat([sizes.flatten().double(), lowest[None]]).tolist()
    if lowest < 0:
        raise ValueError(f"importance must not be negative, got {lowest}")
    return [[int(n) for n in flat[b * L : (b + 1) * L]] for b in range(B)]
