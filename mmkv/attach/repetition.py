"""A prompt fed again before anything of it is evicted, for scores that ask what that needs (KVzip).

The second pass stores nothing. Its queries attend to all that the layers still hold whole, and each
layer scores the tokens that are repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.cache import selection
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import AttentionCall, ForwardPass, outside_inference_mode
from mmkv.cache.phases import Reading
from mmkv.cache.prompt_kv import PromptKV
from mmkv.calls import without
from mmkv.policies.kvzip import Repetition

if TYPE_CHECKING:
    from mmkv.attach.attachment import Attachment


@dataclass(frozen=True)
class Piece:
    """A part of the prompt, of every row of the batch."""

    tokens: Tensor  # int64 [B, S], places among the tokens seen
    present: Tensor  # bool [B, S], False behind the end of a row
    embeds: Tensor  # [B, R, hidden], the instruction and the piece
    positions: Tensor  # [A, B, R]


def run(attachment: Attachment, running: ForwardPass, arguments: dict[str, Any]) -> None:
    """Feed what this pass brought, and the prompt's chunks before it, again if it is complete.

    Raises:
        ValueError: the model adds what it saw of pictures inside its layers.
    """
    cache, decoder = running.cache, attachment.parts.decoder
    assert cache is not None
    phase = cache.phase
    if not isinstance(phase, Reading) or cache.plan.keeps_everything or phase.keeps_all:
        return
    if arguments.get("deepstack_visual_embeds") is not None:
        raise ValueError(
            f"score={cache.plan.policy.score.name!r} feeds a prompt again, which a "
            f"{type(decoder).__name__} does not allow with pictures: use another score"
        )
    with outside_inference_mode(), torch.no_grad():
        phase.given.append(_given(decoder, cache, arguments))
        if not cache.repeats:
            return
        embeds = torch.cat([x.to(phase.given[0][0].device) for x, _ in phase.given], dim=1)
        positions = torch.cat([x for _, x in phase.given], dim=2)
        phase.given = []
        again = without(arguments)
        again |= {"input_ids": None, "attention_mask": None, "use_cache": False}
        again.pop("cache_position", None)
        if cache.plan.policy.score.outputs:  # type: ignore[attr-defined]
            attachment.remember_inputs()
        try:
            for piece in _pieces(decoder, cache, embeds, positions):
                running.collector = _Repeater(cache, running, piece)
                places = piece.positions if len(piece.positions) > 1 else piece.positions[0]
                decoder.forward(**{**again, "inputs_embeds": piece.embeds, "position_ids": places})
        finally:
            running.collector = None


def _given(
    decoder: Any, cache: CompressedCache, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Embeddings [B, q, hidden] and positions [A, B, q] of what the decoder was given."""
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
) -> Iterator[Piece]:
    """The new tokens of every row, some at a time: a row is cut as it is alone."""
    score: Any = cache.plan.policy.score
    assert isinstance(score, Repetition)
    assert cache.prompt is not None
    (B, q), device = embeds.shape[:2], embeds.device
    valid = cache.prompt.valid[:, -q:].to(device)
    first, number = cache.prompt.valid.shape[1] - q, valid.sum(-1, keepdim=True)
    order = (~valid).int().argsort(dim=-1, stable=True)  # its tokens, then its padding
    ids = torch.tensor(score.ids, dtype=torch.int64, device=device)
    asked = decoder.get_input_embeddings()(ids).to(embeds.dtype).expand(B, -1, -1)
    for start in range(0, int(number.max()), score.repeated):
        at = order[:, start : start + score.repeated]
        present = torch.arange(start, start + at.shape[1], device=device) < number
        again = embeds.gather(1, at[..., None].expand(-1, -1, embeds.shape[-1]))
        # The first of four axes, where there are four, counts tokens; the others are of pictures.
        axes = [positions] if len(positions) < 4 else [positions[:1], positions[1:]]
        moved = [_moved(x, at, present, len(ids)) for x in axes]
        yield Piece(at + first, present, torch.cat([asked, again], 1), torch.cat(moved))


def _moved(positions: Tensor, at: Tensor, present: Tensor, asked: int) -> Tensor:
    """Positions of `asked` tokens behind all, and behind those of the tokens `at`: [A, B, R]."""
    most = torch.iinfo(positions.dtype).max
    last = positions.amax((0, 2))[:, None]
    here = positions.gather(2, at.expand(len(positions), -1, -1))
    first = here.masked_fill(~present, most).amin((0, 2))[:, None]
    ahead = last + 1 + torch.arange(asked, device=positions.device)
    # What is absent from a row is anywhere.
    here = (here - first + last + 1 + asked).masked_fill(~present, 0)
    return torch.cat([ahead.expand(len(positions), -1, -1), here], dim=2)


@dataclass
class _Repeater:
    """Attends to what the layers hold, and scores the tokens that are repeated."""

    cache: CompressedCache
    running: ForwardPass
    piece: Piece
    # [B, R, hidden], what the attention of the running layer was given, where it is told.
    hidden: Tensor | None = None

    def add(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """One layer: its attention output [B, R, Hq, D]."""
        layer: Any = self.cache.layers[layer_idx]
        held: PromptKV = layer.state
        query = call.query
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        (B, _, R, _), device, T = query.shape, query.device, layer.seen
        present = self.piece.present.to(device)
        asked = present.new_ones(B, R - present.shape[1])
        here = torch.cat([asked, present], dim=1)
        positions = torch.arange(T, T + R, device=device).masked_fill(~here, -1)[:, None]
        held.scores = self._scored(held, layer_idx, call._replace(scale=scale), here)
        whole = held.extended(call.key, call.value, positions)
        return whole.attend(query, T, scale=scale, softcap=call.softcap)

    def _scored(self, held: PromptKV, layer_idx: int, call: AttentionCall, here: Tensor) -> Tensor:
        """The scores [B, H, U] of what a layer holds, with those of the tokens repeated."""
        policy, prompt, device = self.cache.plan.policy, self.cache.prompt, call.query.device
        assert prompt is not None
        B, H, U, D = held.keys.shape
        tokens, present = self.piece.tokens.to(device), self.piece.present.to(device)
        columns = tokens - prompt.valid.shape[1] + U  # new tokens are the last of every head
        # Sinks are held by every head; those of the piece itself are in it.
        n = min(policy.sinks, U)
        age = held.positions.masked_fill(held.positions < 0, prompt.valid.shape[1])
        first = age.argsort(dim=-1, stable=True)[..., :n]
        apart = age.gather(-1, first)[:, 0] < tokens[:, :1]
        at = torch.cat([first.expand(B, H, -1), columns[:, None].expand(B, H, -1)], dim=2)
        at = at[..., None].expand(-1, -1, -1, D)
        inputs = self.running.inputs(
            layer_idx,
            query=call.query,
            key=torch.cat([held.keys.gather(2, at), call.key], dim=2),
            value=torch.cat([held.values.gather(2, at), call.value], dim=2),
            valid=torch.cat([apart, present, here], dim=1),
            scale=call.scale,
            softcap=call.softcap,
            hidden=self.hidden,
        )
        found = selection.importance(policy, inputs, [0] * B)[..., n : n + tokens.shape[1]]
        scores = held.scores
        if scores is None:
            scores = torch.zeros(B, H, U, device=device)
        return scores.scatter(2, columns[:, None].expand(B, H, -1), found)  # 0 where absent
