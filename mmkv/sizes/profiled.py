"""Layer and head sizes by what was measured of each head; `mmkv.wrap` makes them of a profile.

In proportion to how much it copies (retrieval) or reads from pictures (visual), or by what it costs
to shrink it: its curve is the divergence of the next-token distribution, in nats a token, when that
head alone keeps a share of the prompt's tokens. `mmkv.calibrate` measures the curves.

Related: head budgets measured offline (SparseMM, arXiv 2506.05344; LU-KV).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
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
        """Tokens of each head of a measured layer, of mean `spare`; there are `most` to keep."""
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

    Weights are of the compressed `layers`, not negative. Uniform layer sizes give way to those that
    follow from their heads; other ones stay, and each layer's is split among its heads. What must
    be kept anyway, the observation window too, comes on top of each head's size.
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


class _Measured(Heads):
    """Sizes that a profile brings; equal without one."""

    equal = True

    def check(self, policy: Policy) -> None:
        """Each head has a ranking."""
        if policy.score.average_heads:
            raise ValueError(
                f"heads={self.name!r} gives heads of a layer different sizes; average_heads=True "
                "and score='recency' rank tokens once for all of them"
            )


@register_part("retrieval")
@dataclass(frozen=True, kw_only=True)
class RetrievalHeads(_Measured):
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
    profile = FILE


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
class VisualHeads(_Measured):
    """Sizes over the whole model by how visual each head is (SparseMM, arXiv 2506.05344).

    The visual scores are of a profile of `mmkv.calibrate`; without one all heads keep as much.

    Options:
        rho: the share of the mean size that every head keeps, in [0, 1]; the rest is shared out in
            proportion to visual scores.
    """

    rho: Share = 0.1
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
        super().check(policy)


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


@register_part("calibrated")
@dataclass(frozen=True, kw_only=True)
class CalibratedHeads(Heads):
    """Sizes by what each head costs, from a profile of `mmkv.calibrate`; equal without one."""

    equal = True
    profile = FILE


@dataclass(frozen=True, kw_only=True)
class HeadsByCost(ProfiledHeads):
    """A layer's size is split so that its heads lose least, by `curves`."""

    curves: Curves
    least = 1

    def wished(self, place: int, spare: int, most: int) -> Sequence[float]:
        """By the layer's own curves."""
        (shares,) = self.curves.shares(spare / most, [place])
        return [most * share for share in shares]


@dataclass(frozen=True)
class LayersByCost(Layers):
    """The total is shared so that all heads together lose least."""

    curves: Curves

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """The mean of each layer's heads, of what is not kept anyway."""
        found = list[list[float]]()
        for total, length, floor in zip(rows.totals, rows.lengths, rows.floors, strict=True):
            budget = (total / rows.n_layers - floor) / (length - floor)
            found.append([floor + (length - floor) * x for x in self.curves.by_layer(budget)])
        return found


def sized(policy: Policy, curves: Curves, layers: tuple[int, ...]) -> Policy:
    """A policy with the sizes of cost curves, of the compressed `layers`.

    Heads that share one ranking of tokens keep as many each; only layers are sized then.
    """
    policy = replace(policy, layers=LayersByCost(curves))
    if policy.score.average_heads:
        return policy
    return replace(policy, heads=HeadsByCost(curves=curves, layers=layers))


@dataclass(frozen=True)
class Curves:
    """Cost curves of L compressed layers and H key-value heads at R levels.

    Attributes:
        levels: `[R]`, shares of the prompt's tokens, rising, in (0, 1].
        costs: `[L, H, R]`, nats a token, not negative.

    Raises:
        ValueError: they are not such numbers.
    """

    levels: tuple[float, ...]
    costs: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        """Check shapes and numbers."""
        levels = self.levels
        rising = all(a < b for a, b in pairwise((0, *levels)))
        if not levels or not rising or not levels[-1] <= 1:
            raise ValueError(f"levels must rise in (0, 1], got {list(levels)[:9]}")
        heads = {len(layer) for layer in self.costs}
        if len(heads) != 1 or 0 in heads:
            raise ValueError("costs need as many heads in every layer, at least one")
        for i, layer in enumerate(self.costs):
            for h, curve in enumerate(layer):
                if len(curve) != len(levels):
                    raise ValueError(f"head {i, h}: {len(curve)} costs for {len(levels)} levels")
                if not all(0 <= c < math.inf for c in curve):
                    raise ValueError(f"head {i, h}: costs must be 0 or more, got {list(curve)[:9]}")

    def shares(self, budget: float, layers: Sequence[int]) -> list[list[float]]:
        """The share of the prompt that each head of some layers keeps, so that least is lost.

        Every head starts at the lowest level; the head and higher level with the largest drop of
        cost per slot is raised, while the budget lasts.

        Args:
            budget: mean share over these heads, in [0, 1].
            layers: which of the L.

        Returns:
            `[len(layers)][H]`, in [0, 1], of mean `budget`, or less where no curve asks for more.
        """
        heads = len(self.costs[0])
        low = min(budget, self.levels[0])
        found = {layer: [low] * heads for layer in layers}
        left = len(layers) * heads * (budget - low)
        for _, _, width, layer, head in self._raises:
            if layer in found and left > 0:
                found[layer][head] += min(width, left)
                left -= width
        return [found[layer] for layer in layers]

    def by_layer(self, budget: float) -> list[float]:
        """The mean share of each layer's heads, `[L]`."""
        shares = self.shares(budget, range(len(self.costs)))
        return [sum(heads) / len(heads) for heads in shares]

    @cached_property
    def _raises(self) -> list[tuple[float, float, float, int, int]]:
        """What lowers a cost, steepest first: slope, level, by which share, layer and head.

        Those of a head are its curve's lower hull, in order.
        """
        levels, found = self.levels, list[tuple[float, float, float, int, int]]()
        for i, layer in enumerate(self.costs):
            for h, curve in enumerate(layer):
                falling = list(accumulate(curve, min))  # noise that rises is levelled
                at = 0
                while falling[at] > falling[-1]:
                    slope, to = min(
                        ((falling[k] - falling[at]) / (levels[k] - levels[at]), -k)
                        for k in range(at + 1, len(levels))
                    )
                    found.append((slope, levels[at], levels[-to] - levels[at], i, h))
                    at = -to
        return sorted(found)
