"""Layer and head sizes in proportion to what was measured of each head before.

How much it copies (retrieval) or reads from pictures (visual); `mmkv.wrap` makes them of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mmkv.parts import Heads, Layers, PositiveShare, Share, SizeInputs, register_part
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.layers import UniformLayers, fit

if TYPE_CHECKING:
    from mmkv.policy import Policy

Weights = tuple[tuple[float, ...], ...]
# Where `mmkv.wrap` looks for a profile beside a model's weights.
FILE = "mmkv-profile.json"
VISUAL_FILE = "mmkv-visual-heads.json"


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

    def __call__(self, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
        """As its layer's size was found; the host waits once for the rows' numbers of tokens.

        Raises:
            ValueError: the profile is of another number of heads.
        """
        H, place = scores.shape[1], self.layers.index(layer_idx)
        offered = (scores > -torch.inf).any(1).sum(-1)
        found = list[list[int]]()
        for spare, most in torch.stack([totals // H, offered], dim=1).tolist():
            wished = self.wished(place, spare, most) if spare else [0.0] * H
            if len(wished) != H:
                raise ValueError(f"profile: it has {len(wished)} heads a layer, this model {H}")
            found.append(fit(wished, H * spare, floor=min(self.least, spare), max_size=most))
        return torch.tensor(found).to(scores.device, non_blocking=True)


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

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """What is not kept anyway is shared out to the heads of all layers."""
        H, L, found = len(self.weights[0]), rows.n_layers, list[list[float]]()
        flat = [w for layer in self.weights for w in layer]
        for total, length, floor in zip(rows.totals, rows.lengths, rows.floors, strict=True):
            sizes = proportional(flat, H * (total - L * floor), length - floor)
            found.append([floor + sum(sizes[i * H : (i + 1) * H]) / H for i in range(L)])
        return found


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
    profile = FILE

    def check(self, policy: Policy) -> None:
        """Each head has a ranking."""
        if policy.score.average_heads:
            raise ValueError(
                "heads='retrieval' gives heads of a layer different sizes; average_heads=True and "
                "score='recency' rank tokens once for all of them"
            )


def sized_by_copying(policy: Policy, scores: Weights, layers: tuple[int, ...]) -> Policy:
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
    profile = VISUAL_FILE
    without_profile = (
        "{policy} has no profile of visual heads and gives all heads the same size: measure one "
        "with mmkv.calibrate(model, samples, policy='sparsemm') and pass it as profile="
    )

    def check(self, policy: Policy) -> None:
        """Layers follow from their heads, and each head has a ranking."""
        if policy.layers.name and not isinstance(policy.layers, UniformLayers):
            raise ValueError(
                f"heads='visual' sizes the heads of all layers and leaves layers="
                f"{policy.layers.name!r} nothing to decide: use layers='uniform'"
            )
        if policy.score.average_heads:
            raise ValueError(
                "heads='visual' gives heads of a layer different sizes; average_heads=True and "
                "score='recency' rank tokens once for all of them"
            )


def sized_by_pictures(policy: Policy, scores: Weights, layers: tuple[int, ...]) -> Policy:
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
    return by_weight(policy, weights, layers)
