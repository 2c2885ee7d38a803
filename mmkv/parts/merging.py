"""What becomes of evicted pairs, as parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from mmkv.parts import Merge, register_part
from mmkv.parts.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, Share

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.policy import Policy


class _MergeIntoKept(Merge):
    """Evicted pairs are averaged into a kept one, `how` says which."""

    how: ClassVar[Literal["position", "feature"]]

    def __call__(
        self, keys: Tensor, values: Tensor, indices: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `mmkv.parts.averaging.merge`."""
        from mmkv.parts.averaging import merge

        return merge(keys, values, indices, positions, how=self.how)


@register_part("position")
@dataclass(frozen=True, kw_only=True)
class MergeByPosition(_MergeIntoKept):
    """Evicted pairs are averaged into the nearest kept position (ElasticCache)."""

    how = "position"


@register_part("feature")
@dataclass(frozen=True, kw_only=True)
class MergeByFeature(_MergeIntoKept):
    """Evicted pairs are averaged into the kept key of highest cosine similarity (PrefixKV)."""

    how = "feature"


@register_part("groups")
@dataclass(frozen=True, kw_only=True)
class MergeIntoGroups(Merge):
    """Weighted groups stand for all tokens that are not kept as they are (condense).

    Attention adds the logarithm of a group's weight to its logit. See `mmkv.cache.grouping`.

    Options:
        exact: the share of the slots that hold the best-scored tokens, in [0, 1].
        newest: how many of the last tokens are kept as they are; 0 or more.
        group_run: groups are formed inside runs of this many positions; 1 or more.
        rounds: rounds of k-means; 1 or more.
        value_weight: how much values count beside keys where alike pairs are grouped; 0 or more.
        fit: a group weighs as much as its tokens do for so many queries, of those that the score
            remembers; 0: as many as they are.
    """

    exact: Share = 0.3
    newest: NonNegativeInt = 8
    group_run: PositiveInt = 512
    rounds: PositiveInt = 3
    value_weight: NonNegativeFloat = 0.35
    fit: NonNegativeInt = 16

    def check(self, policy: Policy) -> None:
        """Every key must have one position, if positions are counted anew."""
        if policy.reposition:
            raise ValueError(
                "merge='groups' averages keys of many positions, and reposition=True turns each "
                "key from its own: use one of them"
            )
