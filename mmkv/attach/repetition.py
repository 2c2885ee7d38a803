"""A second pass over a prompt before it is evicted, for scores by its attention (KVzip).

The second pass stores nothing. Its queries attend to all tokens that the layers have stored, and
each layer scores the repeated tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.cache import selection
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import ForwardPass, Reading, outside_inference_mode
from mmkv.cache.prompt_kv import PromptKV
from mmkv.calls import without
from mmkv.layer_inputs import LayerInputs
from mmkv.policies.kvzip import Repetition
from mmkv.tensors import no_autocast

if TYPE_CHECKING:
    from mmkv.adapters import Adapter
    from mmkv.attach.attachment import Attachment
    from mmkv.policy import Policy


def check_instruction(parts: Adapter, policy: Policy) -> None:
    """Check that a model knows the tokens of the request to repeat, and has places for them.

    Raises:
        ValueError: an id is beyond its vocabulary, or the request fills all of its positions.
    """
    assert isinstance(policy.score, Repetition)
    config, ids = parts.config, policy.score.ids
    unknown = [x for x in ids if x >= config.vocab_size]
    if unknown:
        raise ValueError(
            f"instruction has the id {unknown[0]}, and this model's vocabulary has ids 0 to "
            f"{config.vocab_size - 1}: give ids of this model's tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and len(ids) >= positions:
        raise ValueError(
            f"instruction has {len(ids)} ids, and this model has {positions} positions for the "
            "prompt, the instruction and a repeated piece together: give a shorter one"
        )


def run(attachment: Attachment, running: ForwardPass, arguments: dict[str, Any]) -> None:
    """Store the inputs of this pass; if they complete the prompt, read all of its chunks again.

    Raises:
        ValueError: the model adds features of pictures inside its layers.
    """
    cache, decoder = running.cache, attachment.parts.decoder
    assert cache is not None
    phase = cache.phase
    if not isinstance(phase, Reading) or cache.plan.keeps_all or phase.keeps_all:
        return
    if arguments.get("deepstack_visual_embeds") is not None:
        raise ValueError(
            f"score={cache.plan.policy.score.name!r} feeds a prompt again, which a "
            f"{type(decoder).__name__} does not allow with pictures: use another score"
        )
    with outside_inference_mode(), torch.no_grad():
        phase.chunks.append(_decoder_inputs(decoder, cache, arguments))
        if not phase.evicts:
            return
        device = phase.chunks[0][0].device
        embeds = _joined([x.to(device) for x, _ in phase.chunks])
        positions = torch.cat([x for _, x in phase.chunks], dim=2)
        phase.chunks = []
        kwargs = without(arguments)
        kwargs |= {"input_ids": None, "attention_mask": None, "use_cache": False}
        kwargs.pop("cache_position", None)
        if cache.plan.policy.score.outputs:  # type: ignore[attr-defined]
            attachment.record_attention_inputs()
        running.valid, running.causal = None, True
        try:
            for tokens, present, piece, places in _pieces(decoder, cache, embeds, positions):
                running.collector = _Repeater(cache, tokens, present)
                places = places if len(places) > 1 else places[0]
                decoder.forward(**{**kwargs, "inputs_embeds": piece, "position_ids": places})
        finally:
            running.collector = None


def _decoder_inputs(
    decoder: Any, cache: CompressedCache, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return embeddings [B, q, hidden] and positions [A, B, q] of the decoder's arguments."""
    embeds = arguments.get("inputs_embeds")
    if embeds is None:
        embeds = decoder.get_input_embeddings()(arguments["input_ids"])
    B, q = embeds.shape[:2]
    positions = arguments.get("position_ids")
    if positions is None:
        seen = cache.get_query_offset()
        positions = torch.arange(seen - q, seen, device=embeds.device)[None]
    positions = positions if positions.ndim == 3 else positions[None]
    return embeds.detach(), positions.expand(-1, B, -1)


def _pieces(
    decoder: Any, cache: CompressedCache, embeds: Tensor, positions: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Cut the new tokens of each row into pieces, without padding, as if each row were alone.

    A piece has S tokens [B, S], indices among those seen; which of these are present, False after
    the end of a row; and embeddings [B, R, hidden] and positions [A, B, R] of the instruction
    followed by the piece.
    """
    score = cache.plan.policy.score
    assert isinstance(score, Repetition)
    assert cache.masks is not None
    (B, q), device = embeds.shape[:2], embeds.device
    valid = cache.masks.valid[:, -q:].to(device)
    first, number = cache.masks.valid.shape[1] - q, valid.sum(-1, keepdim=True)
    order = (~valid).int().argsort(dim=-1, stable=True)  # each row's tokens, then its padding
    ids = torch.tensor(score.ids, dtype=torch.int64, device=device)
    instruction = decoder.get_input_embeddings()(ids).to(embeds.dtype).expand(B, -1, -1)
    for start in range(0, int(number.max()), score.repeated):
        tokens = order[:, start : start + score.repeated]
        present = torch.arange(start, start + tokens.shape[1], device=device) < number
        piece = embeds.gather(1, tokens[..., None].expand(-1, -1, embeds.shape[-1]))
        # The first of four axes counts tokens, the other three are those of pictures.
        axes = [positions] if len(positions) < 4 else [positions[:1], positions[1:]]
        moved = [_moved(x, tokens, present, len(ids)) for x in axes]
        yield tokens + first, present, _joined([instruction, piece]), torch.cat(moved)


def _joined(embeds: list[Tensor]) -> Tensor:
    """Join embeddings [B, n, hidden]; autocast to bfloat16 cannot join those of float16."""
    with no_autocast(embeds[0].device):
        return torch.cat(embeds, dim=1)


def _moved(positions: Tensor, tokens: Tensor, present: Tensor, n_instruction: int) -> Tensor:
    """Return positions after the prompt, of the instruction and a piece's tokens: [A, B, R]."""
    largest = torch.iinfo(positions.dtype).max
    last = positions.amax((0, 2))[:, None]
    shifted = positions.gather(2, tokens.expand(len(positions), -1, -1))
    first = shifted.masked_fill(~present, largest).amin((0, 2))[:, None]
    instruction = last + 1 + torch.arange(n_instruction, device=positions.device)
    # The positions of fillers are ignored.
    shifted = (shifted - first + last + 1 + n_instruction).masked_fill(~present, 0)
    return torch.cat([instruction.expand(len(positions), -1, -1), shifted], dim=2)


@dataclass
class _Repeater:
    """Attends to the tokens that the layers have stored, and scores the repeated ones."""

    cache: CompressedCache
    tokens: Tensor  # of the piece, see `_pieces`
    present: Tensor
    # [B, R, hidden], the input of this layer's attention, if `record_attention_inputs` records it.
    hidden: Tensor | None = None

    def add(self, new: LayerInputs) -> Tensor:
        """Score the repeated tokens in one layer, and return its attention output [B, R, Hq, D]."""
        layer: Any = self.cache.layers[new.layer_idx]
        prompt_kv: PromptKV = layer.state
        assert new.scale is not None
        (B, _, R, _), device, T = new.query.shape, new.query.device, layer.seen
        present = self.present.to(device)
        instruction = present.new_ones(B, R - present.shape[1])
        valid = torch.cat([instruction, present], dim=1)
        positions = torch.arange(T, T + R, device=device).masked_fill(~valid, -1)[:, None]
        prompt_kv.scores = self._scored(prompt_kv, new, valid)
        extended = prompt_kv.extended(new.key, new.value, positions)
        return extended.attend(new.query, scale=new.scale, softcap=new.softcap)

    def _scored(self, kv: PromptKV, new: LayerInputs, valid: Tensor) -> Tensor:
        """Return the scores [B, H, U] of a layer's tokens, updated for the repeated tokens."""
        policy, masks, device = self.cache.plan.policy, self.cache.masks, new.query.device
        assert masks is not None
        B, H, U, D = kv.keys.shape
        tokens, present = self.tokens.to(device), self.present.to(device)
        columns = tokens - masks.valid.shape[1] + U  # new tokens are the last of every head
        # Every head has the sinks. Leave out those that are part of the piece itself.
        n = min(policy.sinks, U)
        age = kv.positions.masked_fill(kv.positions < 0, masks.valid.shape[1])
        sinks = age.argsort(dim=-1, stable=True)[..., :n]
        sink_valid = age.gather(-1, sinks)[:, 0] < tokens[:, :1]
        index = torch.cat([sinks.expand(B, H, -1), columns[:, None].expand(B, H, -1)], dim=2)
        index = index[..., None].expand(-1, -1, -1, D)
        inputs = replace(
            new,
            key=torch.cat([kv.keys.gather(2, index), new.key], dim=2),
            value=torch.cat([kv.values.gather(2, index), new.value], dim=2),
            valid=torch.cat([sink_valid, present, valid], dim=1),
            mask=None,
            hidden=self.hidden,
        )
        repeated = selection.importance(policy, inputs, [0] * B)[..., n : n + tokens.shape[1]]
        scores = kv.scores
        if scores is None:
            scores = torch.zeros(B, H, U, dtype=torch.float32, device=device)
        return scores.scatter(2, columns[:, None].expand(B, H, -1), repeated)  # 0 where absent
