"""The two phases of a compressed cache: reading a prompt, and decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Similarity = dict[int, tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Reading:
    """The next pass reads a prompt or the next turn of a conversation, whole or a chunk of it.

    Attributes:
        until: tokens seen when the prompt is complete; None: the next pass completes it.
        evicts: whether this pass evicts: the last pass of a prompt does, and with
            `CacheConfig.evict_chunks` every pass in which no row is padding alone.
        keeps_all: whether no token is evicted, as for a question about a context.
        postpones: whether eviction waits until some tokens are generated.
        scores: whether this pass scores the tokens of each layer.
        mean_sizes: [B], mean number of tokens a head keeps; None if the score does not use it.
        sizes: tokens that each compressed layer keeps of each row, [L][B]; None until known.
        similarity: for each layer, the mean similarity [B] of the residual stream before and after
            its attention, and the number of tokens [B], over all chunks (SqueezeAttention).
        masks_earlier: whether the mask hides tokens kept from earlier turns.
        chunks: embeddings [B, q, hidden] and positions [A, B, q] of each chunk, for a score that
            reads the prompt again.
    """

    until: int | None = None
    evicts: bool = False
    keeps_all: bool = False
    postpones: bool = False
    scores: bool = False
    mean_sizes: list[float] | None = None
    sizes: list[list[int]] | None = None
    similarity: Similarity = field(default_factory=dict[int, "tuple[Tensor, Tensor]"])
    masks_earlier: bool = False
    chunks: list[tuple[Tensor, Tensor]] = field(default_factory=list["tuple[Tensor, Tensor]"])

    def compare(self, layer_idx: int, similarity: Tensor, tokens: Tensor) -> None:
        """Add a chunk's similarity [B], a mean over `tokens` [B] tokens, to the running mean."""
        if layer_idx in self.similarity:
            mean, n_tokens = self.similarity[layer_idx]
            total = n_tokens + tokens
            weighted_sum = mean * n_tokens + similarity * tokens
            similarity, tokens = weighted_sum / total.clamp(min=1), total
        self.similarity[layer_idx] = similarity, tokens

    def select_rows(self, batch: Tensor) -> None:
        """Keep the rows `batch`."""
        self.similarity = _rows(self.similarity, batch)
        self.chunks = [(x[batch.to(x.device)], p[:, batch.to(p.device)]) for x, p in self.chunks]


@dataclass(eq=False)
class Decoding:
    """The prompt is complete: each pass reads generated tokens.

    Attributes:
        waiting: generated tokens that have not competed yet (decode="rounds", postpone).
        reading: the round, or the postponed eviction, of this pass; None if there is none.
        postponed: whether the prompt is still to be evicted.
        similarity: that of the prompt, see `Reading`.
    """

    waiting: int = 0
    reading: Reading | None = None
    postponed: bool = False
    similarity: Similarity = field(default_factory=dict[int, "tuple[Tensor, Tensor]"])

    def select_rows(self, batch: Tensor) -> None:
        """Keep the rows `batch`."""
        self.similarity = _rows(self.similarity, batch)


def _rows(similarity: Similarity, batch: Tensor) -> Similarity:
    return {i: (x[batch.to(x.device)], n[batch.to(n.device)]) for i, (x, n) in similarity.items()}
