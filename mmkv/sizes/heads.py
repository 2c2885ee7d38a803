"""How a layer's size is split among its heads, by their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.option_types import Share
from mmkv.parts import Heads, register_part
from mmkv.sizes.layers import NOISE, UniformLayers

if TYPE_CHECKING:
    from mmkv.policy import Policy


@register_part("uniform")
@dataclass(frozen=True, kw_only=True)
class UniformHeads(Heads):
    """All heads of a layer keep the same number of tokens."""

    scope = ""


class OwnRankings(Heads):
    """Head sizes that need a ranking of tokens for each head of a layer."""

    def check(self, policy: Policy) -> None:
        """Check that the policy's score does not rank tokens once for all heads."""
        score = policy.score
        if not score.average_heads:
            return
        if "average_heads" in score.options():
            why, remedy = "average_heads=True", "average_heads=False or "
        else:
            why, remedy = f"score={score.name!r}", ""
        raise ValueError(
            f"heads={self.name!r} needs a ranking of tokens for each head, and {why} ranks them "
            f"once for all heads of a layer: use {remedy}heads='uniform'"
        )


@register_part("adaptive")
@dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(OwnRankings):
    """A layer's size is split by how spread each head's attention is (Ada-KV, arXiv 2407.11550).

    Options:
        alpha: the share of the layer's size that is split equally, in [0, 1].
    """

    alpha: Share = 0.5

    def __call__(self, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
        """Return head sizes by algorithm 2 of the paper's v1, with alpha of its algorithm 3."""
        return adaptive_heads(scores, totals, alpha=self.alpha)


@register_part("global")
@dataclass(frozen=True, kw_only=True)
class GlobalHeads(OwnRankings):
    """One ranking of the tokens of all heads in all layers (KVzip, arXiv 2505.23416).

    Scores are compared without normalisation, and no head has a floor beyond its pinned tokens, as
    in the code of KVzip and Layer-DefensiveKV (arXiv 2510.13334).
    """

    scope = "model"

    def check(self, policy: Policy) -> None:
        """Check that no other part sizes layers, and that scores differ between heads."""
        if not isinstance(policy.layers, UniformLayers):
            raise ValueError(
                f"heads='global' shares the budget among all layers and leaves "
                f"layers={policy.layers.name!r} nothing to decide: use layers='uniform'"
            )
        super().check(policy)

    def __call__(self, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
        """Return how many of the largest scores each head has."""
        return adaptive_heads(scores, totals, alpha=0.0)


def adaptive_heads(scores: Tensor, totals: Tensor, *, alpha: float = 0.5) -> Tensor:
    """Return head sizes by how many of a row's largest scores each head has.

    Args:
        scores: `[B, H, N]`, higher = keep. NaN counts as 0.
        totals: int64 `[B]`, tokens over all heads of each row, at most `H * N`.
        alpha: share of the budget that is split equally, in [0, 1]: 1 is uniform, 0 depends on the
            scores alone and keeps the highest sum of scores of all splits.

    Returns:
        LongTensor `[B, H]`, in [0, N]; each row sums to its total.

    Source: Ada-KV, arXiv 2407.11550v1, algorithm 2; alpha: algorithm 3.
    """
    B, H, N = scores.shape
    totals = totals.to(scores.device)[:, None]
    # Token-major and stable, so that tokens of equal scores are given to the heads in turn.
    flat = scores.nan_to_num(nan=0.0).mT.reshape(B, N * H)
    order = flat.argsort(dim=-1, descending=True, stable=True)
    adaptive = count_first(order, totals, H)

    targets = (1 - alpha) * adaptive.double() + alpha * totals.double() / H
    rounded = (targets + NOISE).floor()
    missing = totals - rounded.sum(-1, keepdim=True)
    fraction = ((targets - rounded) / NOISE).round()
    rank = fraction.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (rounded + (rank < missing)).long()


def count_first(order: Tensor, total: Tensor, n: int) -> Tensor:
    """Return how often each residue modulo n is among the first `total` entries: int64 `[B, n]`.

    `order`, the entries, is int64 `[B, ...]`; `total` is `[B, 1]`.
    """
    counted = torch.arange(order.shape[-1], device=order.device) < total
    return order.new_zeros(len(order), n).scatter_add_(1, order % n, counted.long())
