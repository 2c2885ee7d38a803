"""From scores to kept tokens: what must stay, how large each layer is, which tokens it keeps.

Shape letters as in `mmkv.scores`. Budgets are per row: a row of a left-padded batch is sized by its
own length, so it keeps exactly what it keeps alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmkv import allocation
from mmkv.policy import Policy


@dataclass(frozen=True)
class Prompt:
    """What is known of the prompt before its first layer runs.

    Attributes:
        valid: bool [B, N], False for padding.
        lengths: valid tokens of each row, on the host.
        image: bool [B, N], True where an image token stands; None for a prompt without pictures.
        must: bool [B, N], kept in every layer whatever the scores say.
        protected: bool [B, N], the part of `must` that decoding may not drop either.
        floors: how many tokens each row must keep, on the host.
        anchored: how many of those decoding may not drop, on the host.
    """

    valid: Tensor
    lengths: list[int]
    image: Tensor | None
    must: Tensor
    protected: Tensor
    floors: list[int]
    anchored: list[int]

    @classmethod
    def of(cls, policy: Policy, valid: Tensor, image: Tensor | None) -> Prompt:
        """Mark what the policy always keeps: sinks, the observation window, protected text."""
        order = valid.cumsum(-1)
        length = order[:, -1:]
        protected = valid & (order <= policy.sinks)
        if policy.protect == "instruction":
            protected = protected | (valid & ~image if image is not None else valid)
        must = protected | (valid & (order > length - policy.observed))
        # One transfer to the host for all three.
        lengths, floors, anchored = torch.stack(
            [length[:, 0], must.sum(-1), protected.sum(-1)]
        ).tolist()
        return cls(valid, lengths, image, must, protected, floors, anchored)

    def to(self, device: torch.device) -> Prompt:
        """The same on another device, for models split over several."""
        if self.valid.device == device:
            return self
        names = ("valid", "must", "protected")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def importance(
    policy: Policy, query: Tensor, key: Tensor, *, scale: float | None, prompt: Prompt
) -> Tensor:
    """The policy's scores, made finite: a query or key that overflowed must not decide the rest.

    NaN and -inf count as no importance, inf as more than any finite score. Shapes as in
    `Policy.importance`.
    """
    valid = prompt.to(key.device).valid
    with torch.no_grad():
        found = policy.importance(query, key, scale=scale, valid=valid)
    return found.nan_to_num(nan=0.0, posinf=1e30, neginf=0.0)


def total_kept(budget: float | int, n_layers: int, length: int) -> int:
    """Tokens kept over all layers (per head): a float is a fraction, an int a mean per layer."""
    if isinstance(budget, float):
        return round(budget * n_layers * length)
    return min(budget, length) * n_layers


def row_sizes(
    policy: Policy,
    budget: float | int | None,
    *,
    n_layers: int,
    length: int,
    floor: int,
    fractions: Sequence[float] | None = None,
    importance: Tensor | None = None,
    similarity: Tensor | None = None,
) -> list[int]:
    """How many tokens each layer keeps of one row.

    Args:
        policy: its `layers` part decides.
        budget: see `total_kept`; None when `policy.retention` decides the total.
        n_layers: L, the compressed layers.
        length: the row's tokens, without padding.
        floor: how many of them must be kept in every layer.
        fractions: a profile's kept fraction per layer; it replaces the policy's layer part.
        importance: [L, C], the scores of the C tokens that compete; for "prefix" and "pooled".
        similarity: [L], for "squeeze".

    Raises:
        ValueError: the budget is below what must be kept; the message says both numbers.
    """
    if keeps_everything(policy, budget) or length <= policy.observed or length <= floor:
        return [length] * n_layers
    if policy.retention is not None and fractions is None:
        assert importance is not None
        chosen = allocation.pooled(importance, retention=policy.retention)
        return [floor + n for n in chosen]
    assert budget is not None
    total = total_kept(budget, n_layers, length)
    if total >= n_layers * length:
        return [length] * n_layers
    if total < n_layers * floor:
        raise ValueError(
            f"budget={budget} keeps {total / n_layers:.4g} of {length} tokens per layer and head, "
            f"but {floor} must be kept (window={policy.observed}, sinks={policy.sinks}, "
            f"protect={policy.protect!r}): raise the budget, or keep less of the prompt by force"
        )
    spare = total - n_layers * floor
    if fractions is not None:
        sizes = [f * length for f in fractions]
    elif policy.layers == "uniform":
        sizes = allocation.uniform(n_layers, total, max_size=length)
    elif policy.layers == "pyramid":
        sizes = allocation.pyramid(n_layers, total, beta=policy.beta, max_size=length)
    elif policy.layers == "geometric":
        sizes = allocation.geometric(n_layers, total, decay=policy.decay, max_size=length)
    elif policy.layers == "squeeze":
        assert similarity is not None
        sizes = allocation.squeeze(similarity, total, p=policy.p, max_size=length)
    else:
        assert importance is not None
        allocate = allocation.prefix if policy.layers == "prefix" else allocation.pooled
        sizes = [floor + n for n in allocate(importance, spare)]
    return allocation.fit(sizes, total, floor=floor, max_size=length)


def keeps_everything(policy: Policy, budget: float | int | None) -> bool:
    """Whether nothing is ever evicted. budget=1.0 is the full cache, in decoding too."""
    return policy.keeps_all or (isinstance(budget, float) and budget >= 1.0)


def competing(scores: Sequence[Tensor], prompt: Prompt, row: int) -> Tensor:
    """The scores of one row's competing tokens, [L, C], as the layer allocators want them.

    Heads that rank for themselves keep their own best, so a layer's n-th entry is the mean over
    heads of each head's n-th largest score: its prefix sums are what the layer then really retains.
    (The papers' R_l is defined on one ranking; with one ranking per layer this is the same.)
    """
    free = prompt.valid[row] & ~prompt.must[row]
    rows = []
    for s in scores:
        own = s[row][:, free.to(s.device)]
        if own.shape[0] > 1:
            own = own.sort(dim=-1, descending=True).values
        rows.append(own.mean(dim=0).cpu())
    return torch.stack(rows)


def select(
    policy: Policy, scores: Tensor | None, prompt: Prompt, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Choose the tokens one layer keeps.

    Args:
        policy: its `heads`, `recent` and always-kept parts decide.
        scores: [B, H or 1, N]; None when every row keeps everything.
        prompt: what is known of the prompt.
        sizes: tokens kept per head, for each of the B rows.

    Returns:
        indices: int64 [B, H or 1, M], original positions, -1 as filler at the end. Those that
            decoding must not drop come first, then by age: the order in which slots are filled.
        counts: int64 [B, H or 1] on the host.
    """
    valid, device = prompt.valid, prompt.valid.device
    B, N = valid.shape
    size = torch.tensor(list(sizes), device=device)
    if scores is None:
        scores = torch.zeros(B, 1, N, device=device)
    must = prompt.must
    if policy.recent:
        # The most recent tokens take their share of what is left over by the tokens kept anyway.
        free = valid & ~must
        share = torch.minimum((policy.recent * size).long(), size - must.sum(-1))
        age = free.flip(-1).cumsum(-1).flip(-1)
        must = must | (free & (age <= share[:, None]))
    counts = torch.tensor(list(sizes))[:, None].expand(B, scores.shape[1]).clone()
    if policy.heads == "adaptive":
        for b, n in enumerate(sizes):
            free = valid[b] & ~must[b]
            forced = int(must[b].sum())
            if forced < n < prompt.lengths[b]:
                split = allocation.adaptive_heads(
                    scores[b : b + 1, :, free], n - forced, alpha=policy.alpha
                )
                counts[b] = forced + split[0].cpu()
    rank = scores.masked_fill(must[:, None], float("inf"))
    rank = rank.masked_fill(~valid[:, None], float("-inf"))
    M = int(counts.max())
    chosen = rank.argsort(dim=-1, descending=True, stable=True)[..., :M]
    filler = torch.arange(M, device=device) >= counts.to(device)[..., None]
    late = ~prompt.protected[:, None].expand_as(rank).gather(-1, chosen)
    order = (chosen + N * late).masked_fill(filler, 3 * N).argsort(dim=-1)
    indices = chosen.masked_fill(filler, -1).gather(-1, order)
    return indices, counts


def retained(scores: Tensor, indices: Tensor, prompt: Prompt) -> Tensor:
    """The share of the competing tokens' importance that was kept, [B]; 1 where none compete."""
    free = (prompt.valid & ~prompt.must)[:, None]
    s = scores.clamp(min=0) * free
    kept = s.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0.0)
    total = s.sum(dim=(-1, -2))
    return torch.where(total > 0, kept.sum(dim=(-1, -2)) / total.clamp(min=1e-30), 1.0)
