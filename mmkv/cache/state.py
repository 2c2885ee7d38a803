"""A compressed cache between passes: made, continued, reordered and reset, and what it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from mmkv import adapters
from mmkv.cache import checks
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.forward_pass import (
    Decoding,
    GraphInputs,
    NotCapturableError,
    Reading,
    outside_inference_mode,
)
from mmkv.cache.layer import CompressedLayer, KeptKV, nbytes
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.layer_inputs import rows_of
from mmkv.report import CacheReport


class CacheState(Cache):
    """What a `CompressedCache` holds and knows from pass to pass.

    The arguments are those of `CompressedCache`.

    Attributes:
        plan: policy, budget and profile.
        compressed: the layers that are compressed; those with a sliding window or linear attention
            are not.
        masks: those of all tokens up to the end of the last prompt; None before any.
    """

    def __init__(self, config: Any, plan: CacheConfig, *, max_length: int = 0) -> None:
        # The inputs of replayed steps (`mmkv.attach.graph`), and whether this step reads them.
        self.graph_inputs: GraphInputs | None = None
        self.in_graph = False
        layers = layers_of(config)
        super().__init__(layers=layers)
        self.compressed = [x for x in layers if isinstance(x, CompressedLayer)]
        numbers = [i for i, x in enumerate(layers) if isinstance(x, CompressedLayer)]
        # The place of each compressed layer among these, by layer index.
        self.ordinal = {i: n for n, i in enumerate(numbers)}
        self.plan = plan
        self.max_length = max_length
        self.phase: Reading | Decoding = Reading()
        # Length of the context that later turns are questions about (`mmkv.contexts`), which evict
        # nothing; None: they are turns of a conversation, which do.
        self.context_length: int | None = None
        # After how many positions rotary frequencies change (longrope), and whether all tokens are
        # read with the later ones, see `mmkv.attach.longrope`.
        self.short_positions = adapters.short_positions(config)
        self.long = False
        # Whether this cache's layer sizes were added to the sample, see `mmkv.cache.sampling`.
        self.sizes_learned = False
        self.masks: TokenMasks | None = None
        # The position offset of each row's text after pictures, int64 [B, 1]; None: not known.
        self.rope_deltas: Tensor | None = None
        # Ids of the first t tokens seen, int64 [B, t]; None: not known.
        self.ids: Tensor | None = None
        self.shape = checks.shape(config)
        # Whether a pass has begun and not ended: it runs, or an error or Ctrl-C stopped it.
        self.in_pass = False
        # The argument of `expect`, from the beginning of a `generate` call to its first pass; until
        # then the call may fail and must not change the cache. None: no call is beginning.
        self.expected: tuple[int | None] | None = None
        # The model's type when it read the latest prompt; None: not known.
        self.dtype: torch.dtype | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether a prompt was read, by which PaliGemma chooses the mask of new tokens."""
        return all(x.is_initialized for x in self.compressed)

    def expect(self, until: int | None = None) -> None:
        """Expect a prompt or a new turn next, which is complete once `until` tokens are seen.

        It may be the rest of a prompt whose first chunks were read.
        """
        phase = Reading(until, keeps_all=self.context_length is not None)
        if isinstance(self.phase, Reading):
            phase.similarity, phase.chunks = self.phase.similarity, self.phase.chunks
        self.phase, self.expected = phase, None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, not kept."""
        if self.in_graph:
            raise NotCapturableError("the model asks the cache for the number of tokens each step")
        return self.get_query_offset(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next token, at which a mask begins, see `get_mask_sizes`."""
        if layer_idx in self.ordinal:
            return self.compressed[self.ordinal[layer_idx]].seen
        return super().get_seq_length(layer_idx)

    def is_empty(self, layer_idx: int) -> bool:
        """Whether a layer holds nothing yet, so that the model's own attention sees all tokens."""
        return self.compressed_layer(layer_idx).state is None

    @property
    def reading(self) -> Reading | None:
        """The prompt, or the round of generated tokens, of this pass; None if it only decodes."""
        return self.phase if isinstance(self.phase, Reading) else self.phase.reading

    @property
    def expects_prompt(self) -> bool:
        """Whether the next pass reads a prompt or a chunk of one, not a generated token."""
        return isinstance(self.phase, Reading)

    @property
    def observes_replies(self) -> bool:
        """Whether queries of generated tokens are stored, to score with them in a later round."""
        return self.plan.policy.decode.every > 0 and not self.plan.keeps_all

    @property
    def drops_tokens(self) -> bool:
        """Whether kept tokens are dropped while others are generated, in each step or in rounds."""
        return self.observes_replies or any(b.schedule.drops for b in self.blocks)

    @property
    def tokens_until_round(self) -> int:
        """How many tokens must be generated before the next round."""
        assert isinstance(self.phase, Decoding)
        decode = self.plan.policy.decode
        return max(0, decode.every + decode.latest - self.phase.waiting)

    def crosses(self, q: int) -> bool:
        """Return whether the next q tokens may pass the position at which frequencies change."""
        if self.short_positions is None or self.long or self.masks is None:
            return False
        n = max(self.lengths) + self.get_query_offset() - self.masks.valid.shape[1]
        return n <= self.short_positions < n + q

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue the former row beam_idx[i], for beam search."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._select_rows(torch.arange(len(self.lengths), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, given by index or by a bool mask of all rows.

        Raises:
            IndexError: a row does not exist, or the mask has another length.
        """
        if indices.dtype == torch.bool:
            if self.masks is not None and len(indices) != len(self.lengths):
                raise IndexError(f"mask of {len(indices)}: the cache has {len(self.lengths)} rows")
            indices = indices.nonzero()[:, 0]
        self._select_rows(indices)

    def _select_rows(self, batch: Tensor) -> None:
        """Keep the rows `batch`, which may repeat, with all their state.

        Raises:
            IndexError: a row does not exist.
        """
        if self.masks is not None:
            B = len(self.lengths)
            if wrong := [row for row in batch.tolist() if not -B <= row < B]:
                raise IndexError(f"row {wrong[0]}: the cache has {B} rows, numbered from 0")
            batch = batch % B
        self.graph_inputs = None
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                with outside_inference_mode():
                    layer.select_rows(batch)
            elif isinstance(layer, DynamicLayer):
                layer.batch_select_indices(batch)
            elif isinstance(layer, LinearAttentionLayer):
                layer.reorder_cache(cast(torch.LongTensor, batch))
        if self.masks is not None:
            self.masks = self.masks.rows(batch)
        self.rope_deltas, self.ids = rows_of(self.rope_deltas, batch), rows_of(self.ids, batch)
        if isinstance(self.phase, Reading):
            self.phase.select_rows(batch)

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        super().reset()
        self.masks, self.phase, self.graph_inputs = None, Reading(), None
        self.plan = replace(self.plan, task="", learned=None)
        self.sizes_learned = self.in_pass = False
        self.expected = None
        self.rope_deltas = self.ids = self.context_length = None
        self.long = False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: evicted tokens cannot be restored."""
        raise ValueError(
            "a compressed cache cannot be cropped, so assisted and contrastive decoding cannot "
            "use it: generate without them, or mmkv.unwrap(model) first"
        )

    def record_ids(self, ids: Tensor, total: int) -> None:
        """Store the ids [B, n] of the tokens read in this pass, the last of `total`."""
        first = total - ids.shape[1]
        if first == 0:  # the caller may write into a prompt's ids later
            self.ids = ids if self.get_query_offset() else ids.clone()
        elif self.ids is not None and self.ids.shape[1] >= first:
            self.ids = torch.cat([self.ids[:, :first], ids], dim=1)

    def valid_tokens(self, seen: int) -> Tensor | None:
        """Return which tokens seen are not padding, bool [B, seen]; None before any prompt."""
        if self.masks is None:
            return None
        valid = self.masks.valid
        return torch.cat([valid, valid.new_ones(len(valid), seen - valid.shape[1])], dim=1)

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
        assert self.masks is not None
        return state.groups(self.masks.valid.shape[1])

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
        return [] if self.masks is None else self.masks.lengths

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
        """Bytes of the storages of slots, empty ones included, and of group indices.

        A slot holds a pair, its position, and a score and a bias where these are needed. Buffers of
        a step do not count.
        """
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


def layers_of(config: Any) -> list[Any]:
    """Return the layers of a new cache: a `CompressedLayer` where attention is full."""
    layers = DynamicCache(config=config).layers
    return [CompressedLayer() if type(x) is DynamicLayer else x for x in layers]
