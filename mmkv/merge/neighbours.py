"""Merging by averages: evicted pairs are averaged into a kept pair.

ElasticCache (arXiv 2407.18121, section 3) merges into the nearest kept position; PrefixKV (arXiv
2412.03409, "combination with merging") also into the kept key of highest cosine similarity. Shape
letters are those of `mmkv.scores`; M is the number of slots of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.merge.groups import means
from mmkv.parts import Merge, register_part

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV
    from mmkv.cache.selection import Kept, Ranking

_BLOCK = 256  # keys compared at a time


class _IntoKept(Merge):
    """Every evicted pair is averaged into a kept one, its anchor."""

    def anchors(self, keys: Tensor, positions: Tensor, kept: Tensor, filler: Tensor) -> Tensor:
        """Return the anchor of each token, int64 [B, H, U], among the M kept ones.

        `kept` is int64 [B, H, M], their indices, unless `filler`; padding has position -1.
        """
        raise NotImplementedError

    def __call__(self, prompt_kv: PromptKV, ranking: Ranking) -> Kept:
        """Return the kept pairs, each the mean of itself and the pairs merged into it."""
        kept = ranking.kept(prompt_kv)
        B, H, U, _ = prompt_kv.keys.shape
        positions, indices = prompt_kv.positions.expand(B, H, U), kept.indices.expand(B, H, -1)
        M, filler = indices.shape[-1], indices < 0
        anchor = positions.clamp(max=0)  # unused without slots
        if M:
            anchor = self.anchors(prompt_kv.keys, positions, indices.clamp(min=0), filler)
        # A kept token is its own anchor. Fillers write to one more column, which is cut off.
        slot_numbers = torch.arange(M, device=indices.device).expand_as(indices)
        anchor = torch.cat([anchor, torch.zeros_like(anchor[..., :1])], dim=-1)
        anchor = anchor.scatter(-1, indices.masked_fill(filler, U), slot_numbers)[..., :U]
        pairs = prompt_kv.keys.detach(), prompt_kv.values.detach()
        keys, values = means(pairs, anchor, (positions >= 0).float(), M)
        return replace(kept, keys=keys, values=values)


@register_part("position")
@dataclass(frozen=True, kw_only=True)
class MergeByPosition(_IntoKept):
    """Evicted pairs are averaged into the nearest kept position (ElasticCache)."""

    def anchors(self, keys: Tensor, positions: Tensor, kept: Tensor, filler: Tensor) -> Tensor:
        """Return the nearest kept position, the earlier one of two equally near."""
        far = torch.iinfo(torch.int64).max // 4
        kept_positions = positions.gather(-1, kept).masked_fill(filler, far)
        ordered, order = kept_positions.sort(dim=-1)
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
        """Return the kept key of highest cosine similarity."""
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        centres = unit.gather(2, kept[..., None].expand(-1, -1, -1, unit.shape[-1])).mT
        absent = filler[:, :, None]
        cosines = ((x @ centres).masked_fill(absent, -torch.inf) for x in unit.split(_BLOCK, dim=2))
        return torch.cat([x.argmax(dim=-1) for x in cosines], dim=2)
