"""The state of a compressed cache between passes: its layers, kept tokens, bytes and rows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from mmkv import adapters
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.forward_pass import Decoding, GraphInputs, NotCapturableError, Reading
from mmkv.cache.layer import CompressedLayer, KeptKV, nbytes
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.cache.prompt_kv import PromptKV
from mmkv.layer_inputs import rows_of
from mmkv.report import CacheReport


class CacheState(Cache):
    """The state of a `CompressedCache`, the subclass that reads prompts and generated tokens."""

    def __init__(self, config: Any, plan: CacheConfig, *, max_length: int = 0) -> None:
        # The inputs of replayed steps (`mmkv.attach.graph`), and whether this step reads them.
        self.clock: GraphInputs | None = None
        self.on_clock = False
        plain = DynamicCache(config=config).layers
        layers = [CompressedLayer() if type(x) is DynamicLayer else x for x in plain]
        super().__init__(layers=layers)
        # The layers that are compressed, and their place among these by layer index.
        self.compressed = [x for x in layers if isinstance(x, CompressedLayer)]
        numbers = [i for i, x in enumerate(layers) if isinstance(x, CompressedLayer)]
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
        # The masks of all tokens up to the end of the last prompt.
        self.prompt: TokenMasks | None = None
        # The position offset of each row's text after pictures, int64 [B, 1]; None: not known.
        self.rope_deltas: Tensor | None = None
        # Ids of the first t tokens seen, int64 [B, t]; None: not known.
        self.ids: Tensor | None = None
        self.shape = _shape(config)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, not kept."""
        if self.on_clock:
            raise NotCapturableError("the model asks the cache for the number of tokens each step")
        return self.get_query_offset(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next token, at which a mask begins, see `get_mask_sizes`."""
        if layer_idx in self.ordinal:
            return self.compressed[self.ordinal[layer_idx]].seen
        return super().get_seq_length(layer_idx)

    @property
    def expects_prompt(self) -> bool:
        """Whether the next pass reads a prompt or a chunk of one, not a generated token."""
        return isinstance(self.phase, Reading)

    @property
    def blocks(self) -> list[PaddedBlock]:
        """The blocks of all layers."""
        kept = [x.state for x in self.compressed if isinstance(x.state, KeptKV)]
        return [block for state in kept for block in state.blocks]

    @property
    def observes_replies(self) -> bool:
        """Whether queries of generated tokens are stored, to score with them in a later round."""
        return self.plan.policy.decode.every > 0 and not self.plan.keeps_everything

    @property
    def due(self) -> int:
        """How many tokens must be generated before the next round."""
        assert isinstance(self.phase, Decoding)
        decode = self.plan.policy.decode
        return max(0, decode.every + decode.latest - self.phase.waiting)

    def crosses(self, q: int) -> bool:
        """Return whether the next q tokens may pass the position at which frequencies change."""
        if self.short_positions is None or self.long or self.prompt is None:
            return False
        n = max(self.lengths) + self.get_query_offset() - self.prompt.valid.shape[1]
        return n <= self.short_positions < n + q

    def kept(self, layer: int) -> Tensor:
        """Return original positions kept by a layer, int64 [B, H, n], ascending, -1 as filler.

        Positions count along the sequence axis of the batch, padding included, as
        `get_seq_length` does.

        Raises:
            ValueError: there is no such layer, it is not compressed (sliding, linear attention), or
                no prompt was read.
        """
        return self._compressed_layer(layer).keeping().kept()

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
        state = self._compressed_layer(layer).keeping()
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
        compressed = self._compressed_layer(layer)
        return compressed.keeping().shares(compressed.seen)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row up to the end of the last prompt, without padding."""
        return [] if self.prompt is None else self.prompt.lengths

    def _compressed_layer(self, layer: int) -> CompressedLayer:
        if not -len(self.layers) <= layer < len(self.layers):
            raise ValueError(f"layer {layer}: the cache has layers 0 to {len(self.layers) - 1}")
        compressed_layer = self.layers[layer]
        if not isinstance(compressed_layer, CompressedLayer):
            raise ValueError(
                f"layer {layer} has a sliding window or linear attention: it is not compressed"
            )
        return compressed_layer

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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue the former row beam_idx[i], for beam search."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._select_rows(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, given by index or by a bool mask."""
        self._select_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def _select_rows(self, batch: Tensor) -> None:
        """Keep the rows `batch`, which may repeat, with all their state."""
        self.clock = None
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.select_rows(batch)
            elif isinstance(layer, DynamicLayer):
                layer.batch_select_indices(batch)
            elif isinstance(layer, LinearAttentionLayer):
                layer.reorder_cache(cast(torch.LongTensor, batch))
        if self.prompt is not None:
            self.prompt = self.prompt.rows(batch)
        self.rope_deltas, self.ids = rows_of(self.rope_deltas, batch), rows_of(self.ids, batch)
        if isinstance(self.phase, Reading):
            self.phase.select_rows(batch)

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        super().reset()
        self.prompt, self.phase, self.clock, self.sizes_learned = None, Reading(), None, False
        self.rope_deltas = self.ids = None
        self.long = False

    def remember(self, ids: Tensor, total: int) -> None:
        """Store the ids [B, n] of the tokens read in this pass, the last of `total`."""
        first = total - ids.shape[1]
        if first == 0:  # the caller may write into a prompt's ids later
            self.ids = ids if self.get_query_offset() else ids.clone()
        elif self.ids is not None and self.ids.shape[1] >= first:
            self.ids = torch.cat([self.ids[:, :first], ids], dim=1)

    def check_read(self, ids: Tensor, mask: Tensor | None) -> None:
        """Check that a prompt's ids [B, T] begin with the ids that the cache has read.

        Padding may differ, and tokens for which `mask` [B, T] is 0.

        Raises:
            ValueError: another token differs.
        """
        read, prompt = self.ids, self.prompt
        if read is None or prompt is None or len(read) % len(ids):
            return
        n = min(read.shape[1], self.get_seq_length(), ids.shape[1])
        ids, counts = ids[:, :n], prompt.valid[:, :n].to(ids.device)
        differ = ids.repeat_interleave(len(read) // len(ids), 0) != read[:, :n].to(ids.device)
        differ[:, : counts.shape[1]] &= counts
        if mask is not None:
            hidden = mask[:, :n] == 0
            differ &= ~hidden.repeat_interleave(len(read) // len(hidden), 0)
        if bool(differ.any()):
            row, place = differ.nonzero()[0].tolist()
            raise ValueError(
                f"the cache has read another prompt: row {row} differs at token {place}; "
                "give all that it has read as it was, and new tokens behind it, or start without it"
            )

    def check_plan(self, config: Any, plan: CacheConfig) -> None:
        """Check that a model wrapped with `plan` can continue this cache.

        Raises:
            ValueError: the cache has another policy or budget, or belongs to another model.
        """
        if self.shape != _shape(config):
            raise ValueError(
                f"this CompressedCache was made by another model ({self.shape}, here "
                f"{_shape(config)}): start a new one"
            )
        if self.plan != plan:
            raise ValueError(
                f"this CompressedCache was made under {self.plan.describe()}, and the model is "
                f"wrapped with {plan.describe()} now: continue it under the wrap that made it, or "
                "start a new one"
            )

    def valid_tokens(self, seen: int) -> Tensor | None:
        """Return which tokens seen are not padding, bool [B, seen]; None before any prompt."""
        if self.prompt is None:
            return None
        valid = self.prompt.valid
        return torch.cat([valid, valid.new_ones(len(valid), seen - valid.shape[1])], dim=1)

    def _masks_earlier(self, valid: Tensor, earlier: Tensor) -> bool:
        """Return whether the mask `earlier` hides any `valid` token, bool [B, seen] both.

        Raises:
            ValueError: it shows a token that was masked when it was read and so was not stored, or
                hides a token that is part of a group or of the state of a linear layer.
        """
        hidden, shown = valid & ~earlier, earlier & ~valid
        any_hidden, any_shown = torch.stack([hidden.any(), shown.any()]).tolist()
        if any_shown:
            row, position = shown.nonzero()[0].tolist()
            raise ValueError(
                f"attention_mask shows row {row} its token {position}, which was padding or masked "
                "when it was read and is gone: keep masking it, or start a new cache"
            )
        if not any_hidden:
            return False
        if any(isinstance(x, LinearAttentionLayer) for x in self.layers):
            raise ValueError(
                "attention_mask hides tokens of an earlier pass, which are in the state of linear "
                "attention: keep showing them, or start a new cache"
            )
        states = [x.state for x in self.compressed]
        if any(isinstance(x, PromptKV) for x in states):
            raise ValueError(
                "the attention_mask of a later chunk hides tokens of an earlier chunk of the same "
                "prompt: mask them in every chunk"
            )
        for state in states:
            if not isinstance(state, KeptKV) or state.group_index is None:
                continue
            leaders = state.group_index.leaders()
            in_group = (leaders >= 0).any(1)
            grouped = hidden.to(leaders.device)[:, : leaders.shape[-1]] & in_group
            if bool(grouped.any()):
                row, position = grouped.nonzero()[0].tolist()
                raise ValueError(
                    f"attention_mask hides row {row} its token {position}, which a group holds "
                    "together with others: keep showing it, or start a new cache"
                )
        return True

    def _check_whole(self) -> None:
        """Raise ValueError after an interrupted pass: some layers have seen fewer tokens."""
        seen = {x.seen for x in self.compressed}
        if len(seen) > 1:
            raise ValueError(
                f"this CompressedCache was interrupted within a pass (its layers have seen "
                f"{min(seen)} to {max(seen)} tokens): start a new one"
            )


def _shape(config: Any) -> str:
    """Return the sizes of a decoder that a cache for it must agree with, in words."""
    return ", ".join(f"{name}={value}" for name, value in adapters.shape(config).items())
