"""Layer and head sizes that follow from what a profile holds, and not from scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mmkv.parts import Heads, Layers
from mmkv.parts.sizing import UniformLayers

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.policy import Policy

Weights = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ProfiledHeads(Heads):
    """A layer's size is split as a profile says.

    Attributes:
        layers: numbers of the layers that were measured.
        least: tokens that each head keeps where there are any to keep.
    """

    layers: tuple[int, ...]
    least: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Nothing to check: `mmkv.wrap` makes it."""

    def wished(self, place: int, spare: int, most: int) -> Sequence[float]:
        """Tokens of each head, whole or not.

        Args:
            place: which of the measured layers.
            spare: the mean over heads.
            most: what there is to keep.
        """
        raise NotImplementedError

    def split_rows(self, scores: Tensor, spare: Tensor, *, layer_idx: int) -> Tensor:
        """As its layer's size was found; the host waits once for the rows' numbers of tokens.

        Raises:
            ValueError: the profile is of another number of heads.
        """
        import torch

        from mmkv import allocation

        H, place = scores.shape[1], self.layers.index(layer_idx)
        offered = (scores > -torch.inf).any(1).sum(-1)
        rows, found = (
            torch.stack([spare, offered], dim=1).tolist(),
            dict[tuple[int, int], list[int]](),
        )
        for spared, most in map(tuple, rows):
            if (spared, most) in found:
                continue
            wished = self.wished(place, spared, most) if spared else [0.0] * H
            if len(wished) != H:
                raise ValueError(f"profile: it has {len(wished)} heads a layer, this model {H}")
            least = min(self.least, spared)
            found[spared, most] = allocation.fit(wished, H * spared, floor=least, max_size=most)
        sizes = torch.tensor([found[spared, most] for spared, most in rows])
        return sizes.to(scores.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class HeadsByWeight(ProfiledHeads):
    """A layer's size is split in proportion to `weights` [L][H]."""

    weights: Weights

    def wished(self, place: int, spare: int, most: int) -> Sequence[float]:
        """In proportion."""
        weights = self.weights[place]
        return proportional(weights, len(weights) * spare, most)


@dataclass(frozen=True)
class LayersByWeight(Layers):
    """Each layer keeps what its heads do, by `weights` [L][H]."""

    weights: Weights

    def sizes(
        self, total: int, *, n_layers: int, length: int, floor: int, **known: Any
    ) -> Sequence[float]:
        """What is not kept anyway is shared out to the heads of all layers."""
        H = len(self.weights[0])
        flat = [w for layer in self.weights for w in layer]
        found = proportional(flat, H * (total - n_layers * floor), length - floor)
        return [floor + sum(found[i * H : (i + 1) * H]) / H for i in range(n_layers)]


def by_weight(policy: Policy, weights: Weights, layers: tuple[int, ...]) -> Policy:
    """A policy whose head sizes are in proportion to weights [L][H], but at most the whole prompt.

    Uniform layer sizes give way to those that follow from their heads; other ones stay, and each
    layer's is split among its heads. What must be kept anyway, the observation window too, comes
    on top of each head's size.

    Args:
        policy: its `heads` are replaced.
        weights: of the heads of the compressed layers, not negative.
        layers: numbers of these layers.
    """
    heads = HeadsByWeight(weights=weights, layers=layers)
    if isinstance(policy.layers, UniformLayers):
        return replace(policy, layers=LayersByWeight(weights), heads=heads)
    return replace(policy, heads=heads)


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
