"""Scores by keys and values as parts; they compute with `mmkv.key_scores` and `mmkv.expected`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from mmkv.parts import Score, register_part
from mmkv.parts.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, at_least

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs


class _WithoutQueries(Score):
    """Nothing has to be remembered of a prompt's chunks, and later turns score all keys again."""

    @property
    def queries(self) -> int:
        """None."""
        return 0


@register_part("key-norm")
@dataclass(frozen=True, kw_only=True)
class KeyNorm(_WithoutQueries):
    """Keys of small norm: much attention goes to these (arXiv 2406.11430, section 3)."""

    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """The inverse of the norm."""
        from mmkv.key_scores import inverse_key_norm

        return inverse_key_norm(layer.key, layer.valid)


@register_part("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(_WithoutQueries):
    """Chance: the line that every other score must be above.

    Options:
        seed: another one gives other noise; 0 or more.
    """

    seed: NonNegativeInt = 0

    def __call__(self, layer: LayerInputs) -> Tensor:
        """The same for the same seed, also in a batch."""
        import torch

        from mmkv.key_scores import noise

        device = layer.key.device
        head = torch.arange(layer.key.shape[1], device=device)
        if layer.head is not None:
            head = layer.head.to(device)[:, None]
        return noise(layer.valid, head, seed=self.seed, layer_idx=layer.layer_idx)


@register_part("key-difference")
@dataclass(frozen=True, kw_only=True)
class KeyDifference(_WithoutQueries):
    """Keys unlike the mean of all normalised keys (KeyDiff, arXiv 2504.15364, section 3)."""

    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """By the cosine."""
        from mmkv.key_scores import key_difference

        return key_difference(layer.key, layer.valid)


@register_part("lag-relative")
@dataclass(frozen=True, kw_only=True)
class LagRelative(_WithoutQueries):
    """Channels that spread more than those of the next block (LagKV, arXiv 2504.04704, section 3).

    Options:
        lag: tokens of a block; 2 or more.
        skip: how many first tokens are left out of blocks and statistics, and score most.
    """

    lag: Annotated[int, partial(at_least, 2)] = 128
    skip: NonNegativeInt = 4
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Ranks within blocks; the last tokens score most."""
        from mmkv.key_scores import lag_relative

        return lag_relative(layer.key, layer.value, layer.valid, lag=self.lag, skip=self.skip)


@register_part("expected")
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Score):
    """The attention expected of queries to come, times the value's norm (arXiv 2510.00636).

    Options:
        positions: the mean rotation is that of so many positions behind the prompt; 1 or more.
        skip: how many first tokens are left out of blocks and statistics, and score most.
        epsilon: attention added to every token's, not negative.
    """

    positions: PositiveInt = 512
    skip: NonNegativeInt = 4
    epsilon: NonNegativeFloat = 0.02
    uses_rotary = True
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """In a later turn, of queries like the new ones."""
        from mmkv.expected import expected_attention

        return expected_attention(
            layer.plain_query,
            layer.key,
            layer.value,
            None if layer.rotary is None else layer.rotary.mean_ahead(self.positions),
            skip=self.skip,
            epsilon=self.epsilon,
            scale=layer.scale,
            valid=layer.valid,
            bias=layer.bias,
        )
