"""What a compressed cache expects next: more of a prompt, or generated tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Similarity = dict[int, tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Reading:
    """A prompt, or the next turn of a conversation, is being read, whole or in chunks.

    Attributes:
        until: tokens seen when it is complete; None: the next pass brings all of it.
        evicts: whether tokens are evicted after this pass: the last of the prompt, or with
            `CacheConfig.evict_chunks` every one since each row has begun.
        keeps_all: whether everything is kept, a question behind a context.
        postpones: whether everything is held until some tokens are generated.
        scores: whether this pass scores the tokens of each layer.
        mean_sizes: [B], tokens that a head keeps in the mean, where the score asks.
        sizes: tokens that each compressed layer keeps of each row, [L][B]; None until known.
        similarity: by layer, the mean similarity [B] of the residual stream around its attention,
            and the tokens [B] it is the mean of, over the chunks so far (SqueezeAttention).
        hides: whether tokens held from earlier turns are masked now.
        given: embeddings [B, q, hidden] and positions [A, B, q] of the chunks so far, where the
            score has them fed again.
    """

    until: int | None = None
    evicts: bool = False
    keeps_all: bool = False
    postpones: bool = False
    scores: bool = False
    mean_sizes: list[float] | None = None
    sizes: list[list[int]] | None = None
    similarity: Similarity = field(default_factory=dict[int, "tuple[Tensor, Tensor]"])
    hides: bool = False
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list["tuple[Tensor, Tensor]"])

    def compare(self, layer_idx: int, similarity: Tensor, tokens: Tensor) -> None:
        """Take in a chunk's similarity [B], the mean over `tokens` [B]."""
        if layer_idx in self.similarity:
            before, known = self.similarity[layer_idx]
            total = known + tokens
            both = before * known + similarity * tokens
            similarity, tokens = both / total.clamp(min=1), total
        self.similarity[layer_idx] = similarity, tokens

    def select_rows(self, batch: Tensor) -> None:
        """Choose rows of the batch."""
        self.similarity = _rows(self.similarity, batch)
        self.given = [(x[batch.to(x.device)], p[:, batch.to(p.device)]) for x, p in self.given]


@dataclass(eq=False)
class Decoding:
    """The prompt is read: each pass brings generated tokens.

    Attributes:
        waiting: how many of them did not compete yet, where they do (decode="rounds", postpone).
        reading: a round, or the postponed eviction, takes place in this pass; None: none does.
        postponed: whether the prompt is still to be evicted.
        similarity: of that prompt, see `Reading`.
    """

    waiting: int = 0
    reading: Reading | None = None
    postponed: bool = False
    similarity: Similarity = field(default_factory=dict[int, "tuple[Tensor, Tensor]"])

    def select_rows(self, batch: Tensor) -> None:
        """Choose rows of the batch."""
        self.similarity = _rows(self.similarity, batch)


def _rows(similarity: Similarity, batch: Tensor) -> Similarity:
    return {i: (x[batch.to(x.device)], n[batch.to(n.device)]) for i, (x, n) in similarity.items()}
