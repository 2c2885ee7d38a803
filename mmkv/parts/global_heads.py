"""Head sizes from one ranking over the heads of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv.parts import Heads, register_part
from mmkv.parts.sizing import UniformLayers

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.policy import Policy


@register_part("global")
@dataclass(frozen=True, kw_only=True)
class GlobalHeads(Heads):
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
        if policy.score.shared_ranking:
            raise ValueError(
                "heads='global' compares heads by their scores; average_heads=True and "
                "score='recency' give all heads the same"
            )

    def split_all(self, scores: Tensor, spare: int) -> Tensor:
        """By the owners of the `spare` largest scores."""
        import torch

        # Token-major and stable, so that equal scores go round the layers and heads.
        flat = scores.flatten(0, 1).T.reshape(-1)
        heads = scores.shape[0] * scores.shape[1]
        owners = flat.argsort(descending=True, stable=True)[:spare] % heads
        return torch.bincount(owners, minlength=heads).view(scores.shape[:2])
