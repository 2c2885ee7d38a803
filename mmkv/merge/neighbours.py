"""Merging: evicted pairs are averaged into a kept one instead of being dropped.

ElasticCache (arXiv 2407.18121, section 3) merges into the nearest kept position; PrefixKV (arXiv
2412.03409, "combination with merging") also into the kept key of highest cosine similarity. Shape
letters are those of `mmkv.scores`; M slots a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.merge.weights import means
from mmkv.parts import Merge, register_part

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV
    from mmkv.cache.selection import Kept, Ranking

_BLOCK = 256  # keys compared at a time


class _IntoKept(Merge):
    """Every evicted pair is averaged into a kept one, its anchor."""

    def anchors(self, keys: Tensor, positions: Tensor, kept: Tensor, filler: Tensor) -> Tensor:
        """The anchor of each token, int64 [B, H, U], among the M that are kept.

        Those are `kept`, int64 [B, H, M] among the U, but for fillers; padding is at position -1.
        """
        raise NotImplementedError

    def __call__(self, held: PromptKV, ranking: Ranking) -> Kept:
        """Each kept pair is the plain mean of itself and of what is merged into it."""
        kept = ranking.kept(held)
        B, H, U, _ = held.keys.shape
        positions, indices = held.positions.expand(B, H, U), kept.indices.expand(B, H, -1)
        M, filler = indices.shape[-1], indices < 0
        anchor = positions.clamp(max=0)  # none
        if M:
            anchor = self.anchors(held.keys, positions, indices.clamp(min=0), filler)
        # A kept token is its own. Fillers write past the end, into a column that is cut off.
        own = torch.arange(M, device=indices.device).expand_as(indices)
        anchor = torch.cat([anchor, torch.zeros_like(anchor[..., :1])], dim=-1)
        anchor = anchor.scatter(-1, indices.masked_fill(filler, U), own)[..., :U]
        pairs = held.keys.detach(), held.values.detach()
        keys, values = means(pairs, anchor, (positions >= 0).float(), M)
        return replace(kept, keys=keys, values=values)


@register_part("position")
@dataclass(frozen=True, kw_only=True)
class MergeByPosition(_IntoKept):
    """Evicted pairs are averaged into the nearest kept position (ElasticCache)."""

    def anchors(self, keys: Tensor, positions: Tensor, kept: Tensor, filler: Tensor) -> Tensor:
        """The nearest position, the earlier one of two equally near."""
        far = torch.iinfo(torch.int64).max // 4
        stands = positions.gather(-1, kept).masked_fill(filler, far)
        ordered, order = stands.sort(dim=-1)
        right = torch.searchsorted(ordered, positions.contiguous()).clamp(max=kept.shape[-1] - 1)
        left = (right - 1).clamp(min=0)
        above = (ordered.gather(-1, right) - positions).abs()
        below = (positions - ordered.gather(-1, left)).abs()
        return order.gather(-1, torch.where(below <= above, left, right))


@register_part("feature")
@dataclass(frozen=True, kw_only=True)
class MergeByFeature(_IntoKept):
    """Evicted pairs are averaged into the kept key of highest cosine similarity (PrefixKV)."""

    def anchors(self, keys: Tensor, positions: Tensor, kept: Tensor, filler: Tensor) -> Tensor:
        """By the cosine of keys."""
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        centres = unit.gather(2, kept[..., None].expand(-1, -1, -1, unit.shape[-1])).mT
        gone = filler[:, :, None]
        alike = ((x @ centres).masked_fill(gone, -torch.inf) for x in unit.split(_BLOCK, dim=2))
        return torch.cat([x.argmax(dim=-1) for x in alike], dim=2)
