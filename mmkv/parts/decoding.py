"""What the budget means for generated tokens, as parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv.parts import Decode, NonNegativeInt, PositiveInt, register_part

if TYPE_CHECKING:
    import numpy as np

    from mmkv.parts.slots import SlotSchedule
    from mmkv.policy import Policy


@register_part("grow")
@dataclass(frozen=True, kw_only=True)
class Grow(Decode):
    """Generated tokens are kept, on top of the budget."""

    def schedule(self, policy: Policy, *, counts: np.ndarray, **known: Any) -> SlotSchedule:
        """Every token takes a new slot."""
        from mmkv.parts.slots import GrowingSlots

        return GrowingSlots(counts=counts)


@register_part("ratio")
@dataclass(frozen=True, kw_only=True)
class Ratio(Decode):
    """A float budget is the share of all tokens seen that a layer may hold, an int their number.

    The token `distance` behind the newest is dropped while it holds more; the prompt's kept tokens
    and the `distance` most recent ones never are (PrefixKV, ElasticCache).

    Options:
        distance: how far behind the newest token the one lies that is dropped; 0 or more.
    """

    distance: NonNegativeInt = 25

    def schedule(
        self,
        policy: Policy,
        *,
        counts: np.ndarray,
        lengths: np.ndarray,
        capacity: np.ndarray,
        share: np.ndarray | None,
        **known: Any,
    ) -> SlotSchedule:
        """A queue: the slots are known in advance."""
        from mmkv.parts.slots import Distance

        share = 0.0 * counts if share is None else share
        return Distance(self.distance, counts=counts, lengths=lengths, base=capacity, share=share)


@register_part("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(Decode):
    """A layer goes on with the size the prompt left it, filled up to a larger budget in tokens.

    Each new token takes the place of the lowest accumulated score (H2O), or with score="recency" of
    the oldest (StreamingLLM).
    """

    def check(self, policy: Policy) -> None:
        """Something must say which token goes."""
        if policy.score.ranks and policy.score.turn_reduction != "sum":
            raise ValueError(
                "decode='fixed' drops the lowest accumulated score or the oldest token; "
                f"score={policy.score.name!r} has neither: use score='accumulated' or 'recency'"
            )
        if policy.score.ranks and policy.score.average_heads:
            raise ValueError(
                "average_heads=True ranks tokens once per layer, but decode='fixed' drops the "
                "lightest token of each head: use average_heads=False, or decode='ratio' or 'grow'"
            )

    def schedule(
        self,
        policy: Policy,
        *,
        counts: np.ndarray,
        protected: np.ndarray,
        capacity: np.ndarray,
        **known: Any,
    ) -> SlotSchedule:
        """A ring of slots, or what attention finds lightest."""
        from mmkv.parts.slots import Ring
        from mmkv.parts.victims import HeavyHitterSlots

        protected = protected.clip(max=capacity)
        if not policy.score.ranks:
            return Ring(counts=counts, protected=protected, capacity=capacity)
        recent = (policy.recent * capacity).astype(int)
        return HeavyHitterSlots(
            counts=counts, protected=protected, capacity=capacity, recent=recent
        )


@register_part("least")
@dataclass(frozen=True, kw_only=True)
class Least(Decode):
    """As "fixed", but each new token takes the place of the one that it attends to least (TOVA).

    The mean over a layer's heads decides, arXiv 2401.06104, section 3; the newest token stays.
    """

    needs_decode_attention = True

    def check(self, policy: Policy) -> None:
        """All heads of a layer hold the same tokens, and nothing is added up over steps."""
        if policy.score.turn_reduction:
            raise ValueError(
                "decode='least' looks at the newest query alone, and "
                f"score={policy.score.name!r} goes on from step to step: use score='window'"
            )
        if not (policy.score.average_heads and policy.heads.equal):
            raise ValueError(
                "decode='least' drops a token from all heads of a layer: use average_heads=True "
                f"(score={policy.score.name!r}) and heads='uniform' (heads={policy.heads.name!r})"
            )
        if policy.merge is not None and policy.merge.weighted:
            raise ValueError(
                "decode='least' needs heads that hold the same tokens, and merge='groups' makes "
                "groups of each head's own: use one of them"
            )

    def schedule(
        self,
        policy: Policy,
        *,
        counts: np.ndarray,
        protected: np.ndarray,
        capacity: np.ndarray,
        heads: int,
        **known: Any,
    ) -> SlotSchedule:
        """What the newest query finds lightest."""
        from mmkv.parts.victims import LeastAttended

        recent = (policy.recent * capacity).astype(int)
        protected = protected.clip(max=capacity)
        return LeastAttended(
            heads, counts=counts, protected=protected, capacity=capacity, recent=recent
        )


@register_part("rounds")
@dataclass(frozen=True, kw_only=True)
class Rounds(Decode):
    """Generated tokens compete in rounds, so that the budget holds for all tokens seen.

    A float budget is the share of them that a layer may hold, an int their number. In a round
    tokens are scored, evicted and merged as in a new turn; their own queries observe.

    Options:
        every: a round takes place after so many generated tokens; 1 or more.
        latest: how many of the last tokens stay as they are; 0 or more.
    """

    every: PositiveInt = 64
    latest: NonNegativeInt = 64

    def check(self, policy: Policy) -> None:
        """Sizes must follow from what a layer holds."""
        if policy.layers.needs == "similarity":
            raise ValueError(
                f"decode='rounds' sizes layers anew, and layers={policy.layers.name!r} measures "
                "them on prompts alone: use other layer sizes, or decode='grow'"
            )

    def schedule(self, policy: Policy, *, counts: np.ndarray, **known: Any) -> SlotSchedule:
        """Between rounds every token takes a new slot."""
        from mmkv.parts.slots import GrowingSlots

        return GrowingSlots(counts=counts)
