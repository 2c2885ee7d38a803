"""Compression of one module's heads, all at once, by the parts of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.selection import ranked
from mmkv.layer_inputs import LayerInputs, Rotary, Rotation
from mmkv.policy import Policy
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.layers import UniformLayers


@dataclass(frozen=True, eq=False)
class TableRotary(Rotary):
    """A rotary embedding whose positions ahead are read from vLLM's table.

    `inv_freq` is not used, as vLLM keeps no frequencies: only cos and sin of each position.
    """

    table: tuple[Tensor, Tensor] | None = None  # cos and sin [positions, R] after the last token

    def ahead(self, n: int) -> Rotation:
        """Return cos and sin [1, 1, R] of the position `n` after the last token."""
        assert self.table is not None
        cos, sin = self.table
        return Rotation(cos[None, n - 1 : n], sin[None, n - 1 : n], self.interleaved)

    def mean_ahead(self, n: int) -> Rotation:
        """Return the mean cos and sin [1, 1, R] of the next `n` positions, those that exist."""
        assert self.table is not None
        cos, sin = (x[None, :n].mean(1, keepdim=True) for x in self.table)
        return Rotation(cos, sin, self.interleaved)


@dataclass(frozen=True)
class Prompt:
    """What a module knows of a prompt of N tokens.

    Attributes:
        query: [Hq, Q, D], of the last Q tokens.
        keys, values: [H, N, D].
        scale: factor of query-key products.
        rotary: cos and sin [positions, R], at least N + 1 of them, and whether dimensions
            interleave; None: the layer has none.
        output: function that returns the output projection [Hq, hidden, D] of these heads.
        of_output: function that returns what a function computes of that, and keeps it.
        image: bool [N], tokens of pictures.
        layer_idx: the layer's number.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    rotary: tuple[Tensor, Tensor, bool] | None
    output: Callable[[], Tensor]
    of_output: Callable[[Callable[[Tensor], Tensor]], Tensor]
    image: Tensor
    layer_idx: int = 0


def compress(x: Prompt, size: int, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs that each head keeps, or that its tokens are merged into.

    The policy has equal heads and layers: all heads keep `size` (M) pairs, fewer than tokens.

    Returns:
        keys and values [H, M, D], and float32 [H, M], the logarithm of each pair's weight.
    """
    (H, N, _), device = x.keys.shape, x.keys.device
    valid = torch.ones(1, N, dtype=torch.bool, device=device)
    plan = CacheConfig(policy=policy, budget=size)
    masks = TokenMasks.of(plan, valid, x.image.to(device)[None], n_layers=1)
    keys, values = x.keys[None], x.values[None]
    kv = PromptKV(keys, values, torch.arange(N, device=device)[None, None])
    layer = LayerInputs(
        query=x.query[None],
        key=keys,
        value=values,
        valid=valid,
        scale=x.scale,
        rotary=_rotary(x),
        weight=x.output,
        of_weight=x.of_output,
        layer_idx=x.layer_idx,
    )
    kv.score(policy, layer, masks, [size])
    ranking = ranked(plan, kv, masks, [size], x.layer_idx)
    kept = ranking.kept(kv) if policy.merge is None else policy.merge(kv, ranking)
    if kept.keys is not None and kept.values is not None:
        keys, values = kept.keys, kept.values
    else:
        at = kept.indices.expand(1, H, -1)[..., None]
        keys, values = (y.gather(2, at.expand(*at.shape[:3], y.shape[-1])) for y in (keys, values))
    weights = kept.log_weights
    weights = torch.zeros(1, H, size, device=device) if weights is None else weights
    return keys[0], values[0], weights[0]


def _rotary(x: Prompt) -> TableRotary | None:
    if x.rotary is None:
        return None
    cos, sin, interleaved = x.rotary
    N, Q = x.keys.shape[1], x.query.shape[1]
    own = slice(N - Q, N)
    return TableRotary(cos[None, own], sin[None, own], cos, interleaved, (cos[N:], sin[N:]))


def with_equal_sizes(policy: Policy) -> Policy:
    """Return the policy with equal heads and layers, as its module's heads all keep as much."""
    return replace(policy, heads=UniformHeads(), layers=UniformLayers(), least=0)
