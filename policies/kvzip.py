"""KVzip: a token is worth what repeating the prompt asks of it, whatever the question will be.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv 2505.23416, section 3; one ranking over the heads of all layers. After the prefill the prompt
is fed again in pieces, against the full cache; a query's attention is shared among 4 sinks, the
piece and what is repeated of it. In the authors' code, https://github.com/snu-mllab/KVzip, all of
the system prompt is the sinks; 4 of them are kvpress' (`KVzipPress`). That costs one prefill more.
Pictures are repeated by their embeddings.

mmkv knows no tokenizer: the words that ask for a repetition are `instruction`, token ids, and by
default none. The code asks in other words from the second piece on, and names the 8 tokens before
it; here every piece is asked for alike. In a later turn the turn alone is repeated, and earlier
tokens keep their scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.parts import PositiveInt, register_part
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.attention import tile, window_rows
from mmkv.scores.values import head_output_norms
from mmkv.sizes.heads import GlobalHeads


@register_part("repetition")
@dataclass(frozen=True, kw_only=True)
class Repetition(Score):
    """The most attention that a token gets while the prompt is repeated (KVzip, arXiv 2505.23416).

    The prompt is fed a second time, as the model's own reply, before anything is evicted.

    Options:
        instruction: ids of tokens before the repetition, with blanks between: the tokenizer's for
            "Repeat the previous context exactly." and what begins a reply; None for none.
        repeated: tokens repeated at a time, 1 or more.
        outputs: weigh attention by what it adds to the residual stream (KVzip+).
    """

    instruction: str | None = None
    repeated: PositiveInt = 2048
    outputs: bool = False
    queries = 0  # none of the prompt's own
    turn_reduction = "max"
    repeats = True
    by_head = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not all(x.isdecimal() for x in (self.instruction or "").split()):
            raise ValueError(
                f"instruction={self.instruction!r}: expected ids of tokens with blanks between, "
                "such as '9690 279'"
            )

    @property
    def ids(self) -> list[int]:
        """The instruction's tokens."""
        return [int(x) for x in (self.instruction or "").split()]

    def check(self, policy: Policy) -> None:
        """The prompt is repeated once it is read, and generated tokens never are."""
        if policy.layers.mini_prefill:
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
        """The most that any of the Q last tokens' queries pays to each token, in [0, 1].

        The layer is that of sinks, a part of the prompt, and its repetition, whose queries these
        are. With `outputs` times `||W_O v|| / ||h||`, what is added to the residual stream beside
        the attention's input at the query, `layer.hidden`.
        """
        (B, Hq, Q, _), (H, N) = layer.query.shape, layer.key.shape[1:3]
        most = torch.zeros(B, H, Hq // H, N, device=layer.key.device)
        per_query = None
        if self.outputs:
            assert layer.hidden is not None
            per_query = 1 / layer.hidden.float().norm(dim=-1).clamp(min=torch.finfo().tiny)
            per_query = per_query.masked_fill(~layer.valid[:, -Q:], 0.0)[:, None, None, :, None]
        size = max(1, tile(layer.key.device) // (B * Hq * N))
        options: Any = {"scale": layer.scale, "softcap": layer.softcap}
        for start in range(0, Q, size):
            stop = min(start + size, Q)
            last = N - Q + stop
            query, key = layer.query[:, :, start:stop], layer.key[:, :, :last]
            valid = layer.valid[:, :last]
            attention = window_rows(query, key, stop - start, valid=valid, **options)
            if per_query is not None:
                attention = attention * per_query[:, :, :, start:stop]
            most[..., :last] = most[..., :last].maximum(attention.amax(3))
        if self.outputs:
            most = most * head_output_norms(layer, N, 2)
        return most.amax(2)


@register_policy("kvzip")
@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Keep what the model needs to repeat the prompt; one ranking over all heads."""

    paper = "KVzip, arXiv 2505.23416"
    score: Score = Repetition()
    heads: Heads = GlobalHeads()
    sinks: int = 4
