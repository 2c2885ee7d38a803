"""Head sizes by which heads look things up: those need the prompt, the others a summary of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mmkv.parts import Heads, register_part
from mmkv.parts.checks import PositiveShare, Share
from mmkv.parts.profiled import Weights, by_weight
from mmkv.parts.sizing import UniformHeads

if TYPE_CHECKING:
    from mmkv.policy import Policy


@register_part("retrieval")
@dataclass(frozen=True, kw_only=True)
class RetrievalHeads(Heads):
    """Sizes over the whole model by how much each head copies (see `mmkv.attach.copy_probe`).

    A few heads of a language model look up what followed the same text before ("induction" and
    "echo" heads); in a small cache they need the whole prompt. RazorAttention (arXiv 2407.15891)
    and DuoAttention (arXiv 2410.10819) keep such heads whole; here sizes are in proportion.

    Where the model comes with cost curves of `mmkv.calibrate`, these decide.

    Options:
        floor: a head's size is proportional to its copy score, in [0, 1], plus this.
        copying: where no head has this copy score, none looks things up and all keep as much.
    """

    floor: PositiveShare = 0.02
    copying: Share = 0.1
    equal = True

    def check(self, policy: Policy) -> None:
        """Each head has a ranking."""
        if policy.score.shared_ranking:
            raise ValueError(
                "heads='retrieval' gives heads of a layer different sizes; average_heads=True and "
                "score='recency' rank tokens once for all of them"
            )


def sized(policy: Policy, scores: Weights, layers: tuple[int, ...]) -> Policy:
    """A policy with the sizes of copy scores [L][H], of the compressed `layers`.

    The share of the prompt that head u keeps is `min(1, c * (r_u + floor))`, with c such that their
    mean is the budget. What must be kept anyway, the observation window too, comes on top.

    Raises:
        ValueError: its score leaves heads no sizes of their own.
    """
    chosen = policy.heads if isinstance(policy.heads, RetrievalHeads) else RetrievalHeads()
    chosen.check(policy)
    if max(map(max, scores)) < chosen.copying:
        return replace(policy, heads=UniformHeads())
    weights = tuple(tuple(r + chosen.floor for r in layer) for layer in scores)
    return by_weight(policy, weights, layers)
