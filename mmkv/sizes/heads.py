"""How a layer's size is split among its heads, by their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.parts import Heads, Share, register_part
from mmkv.sizes.layers import NOISE, UniformLayers

if TYPE_CHECKING:
    from mmkv.policy import Policy


@register_part("uniform")
@dataclass(frozen=True, kw_only=True)
class UniformHeads(Heads):
    """Every head keeps as many tokens."""

    equal = True


class _ByScores(Heads):
    """By the scores of each head."""

    def check(self, policy: Policy) -> None:
        """Scores must tell heads apart."""
        if policy.score.average_heads:
            raise ValueError(
                f"heads={self.name!r} compares heads by their scores; average_heads=True and "
                "score='recency' give all heads the same"
            )


@register_part("adaptive")
@dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(_ByScores):
    """A layer's size is split by how widely each head attends (Ada-KV, arXiv 2407.11550).

    Options:
        alpha: the share of it that is spread evenly, in [0, 1].
    """

    alpha: Share = 0.5

    def __call__(self, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
        """Algorithm 1 of the paper, with the floor of algorithm 2."""
        return adaptive_heads(scores, totals, alpha=self.alpha)


@register_part("global")
@dataclass(frozen=True, kw_only=True)
class GlobalHeads(_ByScores):
    """The best tokens of all heads of all layers stay, by one ranking (KVzip, arXiv 2505.23416).

    Scores are compared as they are, and no head has a floor beyond what must be kept: so do KVzip's
    code and that of Layer-DefensiveKV (arXiv 2510.13334).
    """

    is_global = True

    def check(self, policy: Policy) -> None:
        """It sizes the layers too, and scores must tell heads apart."""
        if not isinstance(policy.layers, UniformLayers):
            raise ValueError(
                f"heads='global' shares the budget among all layers and leaves "
                f"layers={policy.layers.name!r} nothing to decide: use layers='uniform'"
            )
        super().check(policy)

    def __call__(self, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
        """By the owners of the largest scores."""
        return adaptive_heads(scores, totals, alpha=0.0)


def adaptive_heads(scores: Tensor, totals: Tensor, *, alpha: float = 0.5) -> Tensor:
    """Split tokens among heads by where the largest scores are.

    Args:
        scores: `[B, H, N]`, higher = keep. NaN counts as 0.
        totals: int64 `[B]`, tokens over all heads of each row, at most `H * N`.
        alpha: share of the budget that is spread evenly, in [0, 1]: 1 is uniform, 0 follows the
            scores alone and retains the highest sum of scores of all splits.

    Returns:
        LongTensor `[B, H]`, in [0, N]; each row sums to its total.

    Source: Ada-KV, arXiv 2407.11550, algorithm 2.
    """
    B, H, N = scores.shape
    totals = totals.to(scores.device)[:, None]
    # Token-major and stable, so that equal scores go round the heads.
    flat = scores.nan_to_num(nan=0.0).mT.reshape(B, N * H)
    order = flat.argsort(dim=-1, descending=True, stable=True)
    adaptive = count_first(order, totals, H)

    reals = (1 - alpha) * adaptive.double() + alpha * totals.double() / H
    whole = (reals + NOISE).floor()
    missing = totals - whole.sum(-1, keepdim=True)
    fraction = ((reals - whole) / NOISE).round()
    rank = fraction.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (whole + (rank < missing)).long()


def count_first(order: Tensor, total: Tensor, n: int) -> Tensor:
    """How often each of `n` occurs among the first `total` `[B, 1]` of indices modulo n: `[B, n]`.

    `order` is int64 `[B, ...]`.
    """
    taken = torch.arange(order.shape[-1], device=order.device) < total
    return order.new_zeros(len(order), n).scatter_add_(1, order % n, taken.long())
