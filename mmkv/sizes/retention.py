"""Layer sizes by the share of importance that each layer retains (PrefixKV, XKV)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mmkv.parts import Layers, SizeInputs, at_least, register_part, share
from mmkv.sizes.heads import count_first

if TYPE_CHECKING:
    from mmkv.policy import Policy


@dataclass(frozen=True, kw_only=True)
class _ByScores(Layers):
    """Layer sizes from the scores of all layers, with options for when these are learned."""

    allocation: Literal["one-pass", "mini-prefill", "sampled"] = "one-pass"
    samples: int | None = None
    requests: int | None = None
    needs = "scores"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        given = {"samples": self.samples, "requests": self.requests}
        given = {name: n for name, n in given.items() if n is not None}
        at_least(1, **given)
        if self.allocation == "sampled" and len(given) != 1:
            raise ValueError(
                f"allocation='sampled' with samples={self.samples}, requests={self.requests}: give "
                "one, such as samples=20 to learn from 20 requests, or requests=200 for a tenth"
            )
        if given and self.allocation != "sampled":
            ((name, n), *_) = given.items()
            raise ValueError(
                f"{name}={n} is read with allocation='sampled', and here it is "
                f"{self.allocation!r}: leave it out, or use allocation='sampled'"
            )

    @property
    def learns(self) -> int:
        """As `samples` or `requests` say."""
        return self.samples or -(-(self.requests or 0) // 10)

    @property
    def mini_prefill(self) -> bool:
        """As `allocation` says."""
        return self.allocation != "one-pass"

    def check(self, policy: Policy) -> None:
        """Scores must tell layers apart."""
        if not policy.score.ranks:
            raise ValueError(
                f"layers={self.name!r} compares layers by their scores; "
                f"score={policy.score.name!r} gives all layers the same"
            )


@register_part("prefix")
@dataclass(frozen=True, kw_only=True)
class PrefixLayers(_ByScores):
    """Every layer retains the same share of importance (PrefixKV, arXiv 2412.03409, section 3.2).

    Options:
        allocation: when scores are learned: "one-pass", after a prefill that holds every layer
            whole; "mini-prefill", in a first pass that stores nothing; or "sampled", so for the
            first requests of each `mmkv.task` alone, whose mean sizes all others get.
        samples: how many requests to learn from, with "sampled"; 1 or more.
        requests: in its place, how many will come: a tenth of them are learned from.
    """

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Equal retention."""
        return beyond_floors(prefix, rows)


@register_part("pooled")
@dataclass(frozen=True, kw_only=True)
class PooledLayers(_ByScores):
    """The largest mean retention over layers (XKV, arXiv 2412.05896, section IV-B).

    Options:
        allocation: when scores are learned, as for "prefix".
        samples: how many requests to learn from, as for "prefix".
        requests: how many will come, as for "prefix".
        retention: instead of a budget, the mean share of importance to be retained, in (0, 1]; the
            smallest sizes that reach it.
    """

    retention: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        share(zero=False, retention=self.retention)
        if self.retention is not None and self.learns:
            raise ValueError(
                f"allocation='sampled' shares out a budget, and retention={self.retention} gives "
                "none: use one of them"
            )

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """By the scores of all layers, pooled."""
        return beyond_floors(partial(pooled, retention=self.retention), rows)


def beyond_floors(by: Callable[..., list[list[int]]], rows: SizeInputs) -> list[list[float]]:
    """What each layer must keep, and of what competes as much as `by` gives it."""
    L, scores, offered = rows.n_layers, rows.scores, rows.offered
    assert scores is not None
    assert offered is not None
    spare = torch.tensor(rows.totals) - L * torch.tensor(rows.floors)
    # In a later turn what competes may be less than there is room for.
    spare = spare.to(scores.device, non_blocking=True).clamp(min=0).minimum(L * offered)
    found = by(scores, spare, offered)
    return [[floor + n for n in row] for floor, row in zip(rows.floors, found, strict=True)]


def prefix(importance: Tensor, totals: Tensor, offered: Tensor | None = None) -> list[list[int]]:
    """Give each layer the tokens that make the lowest retention over layers as high as it can be.

    With `P_l(o)` the share of layer `l`'s importance in its `o` largest entries, the paper
    bisects for one `p` and keeps `min{o : P_l(o) >= p}` tokens, which is the number of `o` with
    `P_l(o) < p`. So the `total` smallest of all `P_l(o)` are the answer, with the tokens that no
    `p` can place already at the layers of the lowest retention, and one sort finds them exactly.

    Args:
        importance: `[B, L, N]`, not negative; normalised per layer here. NaN counts as 0, inf as
            the largest finite entry of the layer, and a layer of zeros as uniform.
        totals: int64 `[B]`, tokens of each row over all layers, at most L times what is offered.
        offered: int64 `[B]`, how many of the N are there, the others being filler; None: all.

    Returns:
        `[B][L]`, tokens per layer, each row of sum `total`; in one transfer to the host.

    Raises:
        ValueError: an entry is negative.

    Source: PrefixKV, arXiv 2412.03409, section 3.3; its search may miss the sum, this one does not.
    """
    shares, filler = _shares(importance, offered)
    curve = shares.sort(dim=-1, descending=True).values.cumsum(-1)
    curve = torch.nn.functional.pad(curve / curve[..., -1:], (1, 0))
    reached = curve[..., :-1]  # [B, L, N]: P_l before the next token is added
    # Token-major, so that equal entries (the zeros of a tail) go round the layers.
    order = reached.masked_fill(filler, torch.inf).mT.flatten(1).argsort(dim=-1, stable=True)
    return _counted(order, totals, importance)


def pooled(
    importance: Tensor,
    totals: Tensor,
    offered: Tensor | None = None,
    *,
    retention: float | None = None,
) -> list[list[int]]:
    """Give each layer the tokens that make the mean retention over layers as high as it can be.

    The paper's greedy loop adds one token at a time where it adds most. As retention is concave in
    the size, that is the `total` largest of all layers' normalised entries: one sort, no loop.

    Args:
        importance, totals, offered: as of `prefix`.
        retention: the mean retention to reach with as few tokens as possible, in (0, 1], where that
            takes more than `totals`.

    Returns:
        `[B][L]`, as `prefix`.

    Raises:
        ValueError: an entry is negative.

    Source: XKV, arXiv 2412.05896, algorithm 1.
    """
    shares, filler = _shares(importance, offered)
    # Token-major, so that equal entries go round the layers.
    entries = shares.masked_fill(filler, -1.0).mT.flatten(1)
    entries, order = entries.sort(dim=-1, descending=True, stable=True)
    if retention is not None:
        mean = entries.clamp(min=0).cumsum(-1)
        mean = mean / mean[:, -1:]
        # Less a rounding error, or ten entries of 0.1 would not reach 0.8 with eight of them.
        totals = totals.maximum((mean < retention * (1 - 1e-12)).sum(-1) + 1)
    return _counted(order, totals, importance)


def _shares(importance: Tensor, offered: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Importance `[..., L, N]` with each layer normalised to sum 1, float64; 0 for filler.

    Also which of the N are filler, bool `[..., 1, N]`: all from `offered` `[...]` on.
    """
    N, device = importance.shape[-1], importance.device
    here = torch.arange(N, device=device)
    most = torch.tensor(N) if offered is None else offered
    filler = here >= most.to(device)[..., None, None]
    weights = importance.detach().double().nan_to_num(nan=0.0, posinf=torch.inf)
    infinite = weights.isinf()
    largest = weights.masked_fill(infinite, 0.0).amax(-1, keepdim=True)
    # A layer of nothing but inf and zeros has no finite scale: any positive number serves.
    largest = torch.where(largest > 0, largest, 1.0)
    # By the largest first: the sum of very large or very small entries is not finite or not exact.
    weights = torch.where(infinite, 1.0, weights / largest)
    weights = torch.where(weights.amax(-1, keepdim=True) > 0, weights, 1.0)
    weights = weights.masked_fill(filler, 0.0)
    return weights / weights.sum(-1, keepdim=True), filler


def _counted(order: Tensor, totals: Tensor, importance: Tensor) -> list[list[int]]:
    """Occurrences of each layer among the first `totals` `[B]` of token-major indices: `[B][L]`."""
    B, L, _ = importance.shape
    found = count_first(order, totals.to(order.device)[:, None], L)
    lowest = importance.nan_to_num(nan=0.0).amin().double()
    *flat, lowest = torch.cat([found.flatten().double(), lowest[None]]).tolist()
    if lowest < 0:
        raise ValueError(f"importance must not be negative, got {lowest}")
    return [[int(n) for n in flat[b * L : (b + 1) * L]] for b in range(B)]
