"""KVzip: a token's score is its largest attention while the model repeats the prompt.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv 2505.23416, section 3; one ranking over the heads of all layers. After the prefill the prompt
is fed again in pieces, against the full cache; a query's attention is shared among 4 sinks, the
piece and its repetition. In the authors' code, https://github.com/snu-mllab/KVzip, the whole system
prompt serves as sinks; 4 sinks are as in kvpress (`KVzipPress`). This costs one more prefill.
Pictures are repeated by their embeddings.

A policy has no tokenizer, so the instruction to repeat is given as token ids (`instruction`); by
default there is none. From the second piece on, the authors' code uses another instruction, with
the 8 tokens before the piece; here all pieces have the same one. In a later turn only that turn is
repeated, and earlier tokens keep their scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.option_types import PositiveInt
from mmkv.parts import register_part
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.attention import window_rows
from mmkv.scores.values import head_output_norms
from mmkv.sizes.heads import GlobalHeads
from mmkv.tensors import tile


@register_part("repetition")
@dataclass(frozen=True, kw_only=True)
class Repetition(Score):
    """The largest attention while the model repeats the prompt (KVzip, arXiv 2505.23416).

    The prompt is fed a second time, as the model's own reply, before anything is evicted.

    Options:
        instruction: ids of tokens to insert before the repetition, separated by blanks, such as
            those of "Repeat the previous context exactly." and of a reply's start; None: no tokens.
        repeated: how many tokens are repeated in one pass; 1 or more.
        outputs: multiply attention by the norm of what it adds to the residual stream (KVzip+).
    """

    instruction: str | None = None
    repeated: PositiveInt = 2048
    outputs: bool = False
    queries = 0  # those of the prompt itself are not used
    turn_reduction = "max"
    repeats = True
    by_head = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not all(x.isdecimal() for x in (self.instruction or "").split()):
            raise ValueError(
                f"instruction={self.instruction!r}: expected token ids separated by blanks, "
                "such as '9690 279'"
            )

    @property
    def ids(self) -> list[int]:
        """Token ids of the instruction."""
        return [int(x) for x in (self.instruction or "").split()]

    def check(self, policy: Policy) -> None:
        """Check that no part needs scores before the repetition, or scores of generated tokens."""
        if policy.layers.needs == "mini-prefill":
            raise ValueError(
                f"allocation={policy.flat().get('allocation')!r} sizes layers before the prompt is "
                f"repeated, which score={self.name!r} needs: use allocation='one-pass'"
            )
        if policy.decode.every:
            raise ValueError(
                f"decode={policy.decode.name!r} scores generated tokens, which "
                f"score={self.name!r} does not repeat: use decode='grow' or 'ratio'"
            )

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the largest attention of the last Q queries on each token, in [0, 1].

        The layer's tokens are the sinks, a piece of the prompt and the repetition of this piece;
        the queries are those of the repetition. With `outputs`, attention is multiplied by
        `||W_O v|| / ||h||`: the norm of what it adds to the residual stream, divided by the norm of
        the attention block's input at the query (`layer.hidden`).
        """
        (B, Hq, Q, _), (H, N) = layer.query.shape, layer.key.shape[1:3]
        scores = torch.zeros(B, H, Hq // H, N, dtype=torch.float32, device=layer.key.device)
        inverse = None
        if self.outputs:
            assert layer.hidden is not None
            inverse = 1 / layer.hidden.float().norm(dim=-1).clamp(min=torch.finfo().tiny)
            inverse = inverse.masked_fill(~layer.valid[:, -Q:], 0.0)[:, None, None, :, None]
        size = max(1, tile(layer.key.device) // (B * Hq * N))
        for start in range(0, Q, size):
            stop = min(start + size, Q)
            last = N - Q + stop
            query, key = layer.query[:, :, start:stop], layer.key[:, :, :last]
            valid = layer.valid[:, :last]
            attention = window_rows(
                query, key, stop - start, scale=layer.scale, softcap=layer.softcap, valid=valid
            )
            if inverse is not None:
                attention = attention * inverse[:, :, :, start:stop]
            scores[..., :last] = scores[..., :last].maximum(attention.amax(3))
        if self.outputs:
            scores = scores * head_output_norms(layer, N, 2)
        return scores.amax(2)


@register_policy("kvzip")
@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Keep the tokens that repeating the prompt attends to most; one ranking over all heads."""

    paper = "KVzip, arXiv 2505.23416"
    score: Score = Repetition()
    heads: Heads = GlobalHeads()
    sinks: int = 4
