"""Layer and head sizes by measurements of each head, which `mmkv.wrap` takes from a profile.

A head's size is proportional to how much it copies (retrieval) or reads from pictures (visual).

Related: head budgets measured offline (SparseMM, arXiv 2506.05344; LU-KV).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mmkv.option_types import PositiveShare, Share
from mmkv.parts import SizeInputs, register_part
from mmkv.sizes.heads import OwnRankings
from mmkv.sizes.layers import UniformLayers, fit

if TYPE_CHECKING:
    from mmkv.policy import Policy

Weights = tuple[tuple[float, ...], ...]
# Names of the profiles that `mmkv.wrap` reads from a model's folder.
FILE = "mmkv-profile.json"
VISUAL_FILE = "mmkv-visual-heads.json"
# Copy scores are raised to this power under budgets that are too small for the head that copies
# most to keep the whole prompt. Without it SmolLM2 loses planted numbers (docs/quality-more.md).
SCARCE_POWER = 1.5
# The notice about `VisualHeads` without a profile.
NO_VISUAL_PROFILE = (
    "{policy} has no profile of visual heads and gives all heads the same size: measure one "
    "with mmkv.calibrate(model, samples, policy='sparsemm') and pass it as profile="
)


@dataclass(frozen=True)
class HeadTable:
    """The sizes of all heads, in proportion to `scores` [L][H] of the L compressed layers.

    A head keeps at most the whole prompt. Pinned tokens, such as those of the observation window,
    are added to each head's size.

    Attributes:
        scores: not negative.
        layers: the indices of the layers in the model.
        sizes_layers: whether a layer's size is the mean of its heads' sizes; else the policy sizes
            layers, and the table splits them.
        floor: what is added to the scores, see `weights`.
        power: to which scores are raised under a small budget, see `weights`.
    """

    scores: Weights
    layers: tuple[int, ...]
    sizes_layers: bool
    floor: float = 0.0
    power: float = 1.0

    @classmethod
    def of(
        cls, policy: Policy, scores: Weights, layers: tuple[int, ...], **options: float
    ) -> HeadTable:
        """Make the table, which sizes layers too, unless a part of the policy does."""
        return cls(scores, layers, isinstance(policy.layers, UniformLayers), **options)

    def weights(self, share: float) -> Weights:
        """Return weights [L][H], to which the sizes of heads are proportional: score plus floor.

        `share` is the mean share of the tokens, without pinned ones, that a head keeps. If it is
        too small for the head of the largest score to keep all tokens, scores are raised to `power`
        first: the heads that copy most are larger then, and those that copy a little are smaller.
        """
        plain, raised, enough = self._weights
        return plain if share >= enough else raised

    @cached_property
    def _weights(self) -> tuple[Weights, Weights, float]:
        """Both results of `weights`, and the share from which on the first one is returned."""
        plain, raised = (
            tuple(tuple(score**power + self.floor for score in layer) for layer in self.scores)
            for power in (1.0, self.power)
        )
        flat = [weight for layer in plain for weight in layer]
        # A little less than the mean weight by the largest one, as sizes are rounded to tokens.
        return plain, raised, 0.999 * sum(flat) / (len(flat) * max(flat))

    def layer_sizes(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return each layer's size, [B][L]: pinned tokens, and its heads' share of the rest."""
        H, L, layer_sizes = len(self.scores[0]), rows.n_layers, list[list[float]]()
        for total, length, pinned in zip(rows.totals, rows.lengths, rows.pinned, strict=True):
            share = free_share(total, L, length, pinned)
            flat = [w for layer in self.weights(share) for w in layer]
            sizes = proportional(flat, H * (total - L * pinned), length - pinned)
            layer_sizes.append([pinned + sum(sizes[i * H : (i + 1) * H]) / H for i in range(L)])
        return layer_sizes

    def head_sizes(self, index: int, mean: int, max_size: int, share: float) -> Sequence[float]:
        """Return the sizes of the heads of layer `index` of the L, of this mean, in tokens.

        `share` is the mean share that the heads of all layers keep, see `weights`.
        """
        weights = self.weights(share)[index]
        return proportional(weights, len(weights) * mean, max_size)

    def split(
        self, n_candidates: Tensor, H: int, layer_idx: int, shares: Sequence[float], totals: Tensor
    ) -> Tensor:
        """Split a layer's size among its H heads, all on the host.

        Args:
            n_candidates: int64 [B], the most tokens that a head can keep.
            H: the number of heads; 1 if no token is dropped, as heads are not scored then.
            layer_idx: the index of the layer.
            shares: [B], the mean share that the heads of all layers keep, see `weights`.
            totals: int64 [B], what all heads keep together.

        Returns:
            int64 [B, H], the sizes of the heads.

        Raises:
            ValueError: the table has another number of heads.
        """
        index = self.layers.index(layer_idx)
        sizes = list[list[int]]()
        rows = (totals // H).tolist(), n_candidates.tolist(), shares
        for mean, n, share in zip(*rows, strict=True):
            targets = self.head_sizes(index, mean, n, share) if mean else [0.0] * H
            if len(targets) != H:
                raise ValueError(f"profile: it has {len(targets)} heads a layer, this model {H}")
            sizes.append(fit(targets, H * mean, max_size=n))
        return torch.tensor(sizes, device="cpu")


def free_share(total: int, n_layers: int, length: int, pinned: int) -> float:
    """Return the mean share of a row's tokens, without pinned ones, that a head keeps.

    All layers together keep `total` of `length` tokens, in tokens per head.
    """
    return (total - n_layers * pinned) / (n_layers * max(1, length - pinned))


def proportional(weights: Sequence[float], total: float, max_size: float) -> list[float]:
    """Return sizes in proportion to weights, at most `max_size`, of sum `total`.

    What exceeds `max_size` is split among the others; weights of 0 share equally what the others
    cannot use. `total` is at most `len(weights) * max_size`.
    """
    sizes, unfilled = [0.0] * len(weights), [i for i, w in enumerate(weights) if w > 0]
    left = total
    while unfilled:
        scale = left / sum(weights[i] for i in unfilled)
        full = [i for i in unfilled if weights[i] * scale >= max_size]
        for i in full or unfilled:
            sizes[i] = max_size if full else weights[i] * scale
        left = total - sum(sizes)
        unfilled = [i for i in unfilled if i not in full] if full else []
    zero_weights = [i for i, w in enumerate(weights) if w <= 0]
    for i in zero_weights:
        sizes[i] = max(0.0, left) / len(zero_weights)
    return sizes


class MeasuredHeads(OwnRankings):
    """Head sizes by a profile; equal without one.

    Attributes:
        profile: the name of the profile that `mmkv.wrap` reads from a model's folder.
    """

    scope = ""
    profile: ClassVar[str]


@register_part("retrieval")
@dataclass(frozen=True, kw_only=True)
class RetrievalHeads(MeasuredHeads):
    """Sizes over the whole model by how much each head copies (`mmkv.attach.copy_probe`).

    A few heads of a language model attend to what followed the same text before ("induction" and
    "echo" heads); in a small cache they need the whole prompt. RazorAttention (arXiv 2407.15891)
    and DuoAttention (arXiv 2410.10819) keep all tokens of such heads; here sizes are proportional.

    Options:
        floor: a head's size is proportional to its copy score, in [0, 1], plus this.
        copying: if all copy scores are below this, all heads keep the same number of tokens.
    """

    floor: PositiveShare = 0.02
    copying: Share = 0.1
    profile = FILE


def by_copying(policy: Policy, scores: Weights, layers: tuple[int, ...]) -> HeadTable | None:
    """Return the table of copy scores [L][H] of the compressed `layers`; None if no head copies.

    Head u keeps the share `min(1, c * (r_u + floor))` of the prompt, with c such that the mean is
    the budget; see `HeadTable.weights`. Pinned tokens, such as those of the observation window, are
    added.

    Raises:
        ValueError: the policy's score ranks tokens once for all heads of a layer.
    """
    chosen = policy.heads if isinstance(policy.heads, RetrievalHeads) else RetrievalHeads()
    chosen.check(policy)
    if max(map(max, scores)) < chosen.copying:
        return None
    return HeadTable.of(policy, scores, layers, floor=chosen.floor, power=SCARCE_POWER)


@register_part("visual")
@dataclass(frozen=True, kw_only=True)
class VisualHeads(MeasuredHeads):
    """Sizes over the whole model by how visual each head is (SparseMM, arXiv 2506.05344).

    Visual scores are read from a profile of `mmkv.calibrate`; without one all sizes are equal.

    Options:
        rho: the share of the mean size that every head keeps, in [0, 1]; the rest is split in
            proportion to visual scores.
    """

    rho: Share = 0.1
    profile = VISUAL_FILE

    def check(self, policy: Policy) -> None:
        """Check that no other part sizes layers, and that each head has its own ranking."""
        if policy.layers.name and not isinstance(policy.layers, UniformLayers):
            raise ValueError(
                f"heads='visual' sizes the heads of all layers and leaves layers="
                f"{policy.layers.name!r} nothing to decide: use layers='uniform'"
            )
        super().check(policy)


def by_pictures(policy: Policy, scores: Weights, layers: tuple[int, ...]) -> HeadTable:
    """Return the table of visual scores [L][H] of the compressed `layers`.

    A head's size is `rho * b + (1 - rho) * b * L * H * s`, with s the head's share of all scores
    and b the mean budget without pinned tokens (such as those of the observation window), which
    are added.

    Raises:
        ValueError: another part sizes layers, or the score ranks tokens once for all heads.
    """
    chosen = policy.heads if isinstance(policy.heads, VisualHeads) else VisualHeads()
    chosen.check(policy)
    total = sum(map(sum, scores))
    number = sum(map(len, scores))
    weights = tuple(
        tuple(chosen.rho + (1 - chosen.rho) * number * s / total for s in layer) for layer in scores
    )
    return HeadTable.of(policy, weights, layers)
