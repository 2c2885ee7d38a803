"""What a compressed cache holds: kept tokens, groups, bytes and a report of them."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.layer import CompressedLayer, KeptKV, nbytes
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.report import CacheReport


class CacheContents(Cache):
    """The methods of a `CompressedCache` that change nothing.

    Attributes:
        plan: policy, budget and profile.
        compressed: the layers that are compressed; those with a sliding window or linear attention
            are not.
        prompt: the masks of all tokens up to the end of the last prompt; None before any.
    """

    plan: CacheConfig
    compressed: list[CompressedLayer]
    prompt: TokenMasks | None

    def kept(self, layer: int) -> Tensor:
        """Return original positions kept by a layer, int64 [B, H, n], ascending, -1 as filler.

        Positions count along the sequence axis of the batch, padding included, as
        `get_seq_length` does.

        Raises:
            ValueError: there is no such layer, it is not compressed (sliding, linear attention), or
                no prompt was read.
        """
        return self.compressed_layer(layer).keeping().kept()

    def groups(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the groups of a layer, for policies with merge="groups".

        Returns:
            weights: int64 [B, H, n], how many tokens each group stands for, 0 as filler.
            group: int64 [B, H, N], the group of each token of the prompt and of earlier turns; -1
                for tokens that are kept single, for evicted ones, and for padding.

        Raises:
            ValueError: there is no such layer, it is not compressed (sliding, linear attention), or
                no prompt was read.
        """
        state = self.compressed_layer(layer).keeping()
        assert self.prompt is not None
        return state.groups(self.prompt.valid.shape[1])

    def shares(self, layer: int) -> Tensor:
        """Return which share of a kept pair each token seen has in a layer, float32 [B, H, T].

        1 for a token that is kept single, 1 / m for one in a group of m tokens, 0 for an evicted
        one and for padding: the sum over tokens is the number of pairs kept.

        Raises:
            ValueError: there is no such layer, it is not compressed (sliding, linear attention), or
                no prompt was read.
        """
        compressed = self.compressed_layer(layer)
        return compressed.keeping().shares(compressed.seen)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row up to the end of the last prompt, without padding."""
        return [] if self.prompt is None else self.prompt.lengths

    def compressed_layer(self, layer: int) -> CompressedLayer:
        """Return a layer by its index, which may be negative; raise ValueError as `kept` does."""
        if not -len(self.layers) <= layer < len(self.layers):
            raise ValueError(f"layer {layer}: the cache has layers 0 to {len(self.layers) - 1}")
        found = self.layers[layer]
        if not isinstance(found, CompressedLayer):
            raise ValueError(
                f"layer {layer} has a sliding window or linear attention: it is not compressed"
            )
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of keys and values, empty slots included."""
        return sum(self.layer_nbytes)

    @property
    def layer_nbytes(self) -> list[int]:
        """`nbytes` of each layer."""
        return [nbytes(x) for x in self.layers]

    def report(self) -> CacheReport:
        """Return tokens kept per head, bytes and retained importance of each layer, and totals."""
        return CacheReport.of(self)

    @property
    def blocks(self) -> list[PaddedBlock]:
        """The blocks of all layers."""
        kept = [x.state for x in self.compressed if isinstance(x.state, KeptKV)]
        return [block for state in kept for block in state.blocks]
