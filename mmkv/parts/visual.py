"""Head sizes over the whole model from a profile of visual heads (SparseMM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmkv.parts import Heads, Layers, register_part
from mmkv.parts.checks import Share
from mmkv.parts.profiled import ProfiledHeads
from mmkv.parts.sizing import UniformLayers

if TYPE_CHECKING:
    from mmkv.policy import Policy

WITHOUT_PROFILE = (
    "{policy} has no profile of visual heads and gives all heads the same size: measure one with "
    "mmkv.calibrate(model, samples, policy='sparsemm') and pass it as profile="
)


@register_part("visual")
@dataclass(frozen=True, kw_only=True)
class VisualHeads(Heads):
    """Sizes over the whole model by how visual each head is (SparseMM, arXiv 2506.05344).

    The visual scores are of a profile of `mmkv.calibrate`; without one all heads keep as much.

    Options:
        rho: the share of the mean size that every head keeps, in [0, 1]; the rest is shared out in
            proportion to visual scores.
    """

    rho: Share = 0.1
    equal = True

    def check(self, policy: Policy) -> None:
        """Layers follow from their heads, and each head has a ranking."""
        if policy.layers.name and not isinstance(policy.layers, UniformLayers):
            raise ValueError(
                f"heads='visual' sizes the heads of all layers and leaves layers="
                f"{policy.layers.name!r} nothing to decide: use layers='uniform'"
            )
        if policy.score.ranks_once:
            raise ValueError(
                "heads='visual' gives heads of a layer different sizes; average_heads=True and "
                "score='recency' rank tokens once for all of them"
            )


@dataclass(frozen=True, kw_only=True)
class HeadsByVisualScore(ProfiledHeads):
    """A layer's size is split in proportion to `weights` [L][H]."""

    weights: tuple[tuple[float, ...], ...]

    def wished(self, place: int, spare: int, most: int) -> Sequence[float]:
        """In proportion."""
        weights = self.weights[place]
        return proportional(weights, len(weights) * spare, most)


@dataclass(frozen=True)
class LayersByVisualScore(Layers):
    """Each layer keeps what its heads do, by `weights` [L][H]."""

    weights: tuple[tuple[float, ...], ...]

    def sizes(
        self, total: int, *, n_layers: int, length: int, floor: int, **known: Any
    ) -> Sequence[float]:
        """What is not kept anyway is shared out to the heads of all layers."""
        H = len(self.weights[0])
        flat = [w for layer in self.weights for w in layer]
        found = proportional(flat, H * (total - n_layers * floor), length - floor)
        return [floor + sum(found[i * H : (i + 1) * H]) / H for i in range(n_layers)]


def proportional(weights: Sequence[float], total: float, most: float) -> list[float]:
    """Sizes in proportion to weights, but none above `most`; what these leave goes to the others.

    They add up to `total`, which is at most `len(weights) * most`. Weights of 0 get what no other
    can take, evenly.
    """
    sizes, open_ = [0.0] * len(weights), [i for i, w in enumerate(weights) if w > 0]
    left = total
    while open_:
        each = left / sum(weights[i] for i in open_)
        full = [i for i in open_ if weights[i] * each >= most]
        for i in full or open_:
            sizes[i] = most if full else weights[i] * each
        left = total - sum(sizes)
        open_ = [i for i in open_ if i not in full] if full else []
    idle = [i for i, w in enumerate(weights) if w <= 0]
    for i in idle:
        sizes[i] = max(0.0, left) / len(idle)
    return sizes


def sized(policy: Policy, scores: tuple[tuple[float, ...], ...], layers: tuple[int, ...]) -> Policy:
    """A policy with the sizes of visual scores [L][H], of the compressed `layers`.

    A head's size is `rho * b + (1 - rho) * b * L * H * s`, with b the mean and s the head's share
    of all scores. What must be kept anyway, the observation window too, comes on top, and b is the
    mean of what is left of the budget.

    Raises:
        ValueError: its layer sizes, or its score, leave heads no sizes of their own.
    """
    chosen = policy.heads if isinstance(policy.heads, VisualHeads) else VisualHeads()
    chosen.check(policy)
    total = sum(map(sum, scores))
    number = sum(map(len, scores))
    weights = tuple(
        tuple(chosen.rho + (1 - chosen.rho) * number * s / total for s in layer) for layer in scores
    )
    return replace(
        policy,
        layers=LayersByVisualScore(weights),
        heads=HeadsByVisualScore(weights=weights, layers=layers),
    )
