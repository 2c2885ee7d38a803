"""The kernels in plain torch, to be read and to be compared with.

Each takes and returns what the kernel of its name does, and checks nothing. Memory of those that
attend grows with the whole matrix of attention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.kernels.ragged import Lightest, RaggedStore, StepInputs


@torch.no_grad()
def row_lse(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Log-sum-exp of each query's row of causal attention logits: float32 `[B, Hq, Q]`."""
    return _causal_logits(query, key, scale, softcap, valid).logsumexp(-1)


@torch.no_grad()
def column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    valid: Tensor | None = None,
    by_query_head: bool = False,
) -> Tensor:
    """Attention that each key receives from all queries, summed: float32 `[B, H or Hq, N]`."""
    B, Hq, Q, _ = query.shape
    H, N = key.shape[1], key.shape[2]
    attention = (_causal_logits(query, key, scale, softcap, valid) - lse[..., None]).exp()
    if valid is not None:
        attention = attention.masked_fill(~valid[:, None, N - Q :, None], 0.0)
    received = attention.sum(2)
    return received if by_query_head else received.view(B, H, Hq // H, N).mean(2)


@torch.no_grad()
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    store: RaggedStore,
    step: StepInputs,
    *,
    scale: float,
    softcap: float | None = None,
    lightest: Lightest | None = None,
) -> Tensor:
    """Write one token's pairs, attend, and find what is dropped: `[R, G, Dv]`."""
    slots = step.slots[step.line % len(step.slots)][0]
    slots = slots.expand(len(store.starts)) if step.entries is None else slots[step.entries]
    own = store.starts + slots
    store.keys[own], store.values[own], store.positions[own] = key, value, step.position
    store.lengths.copy_(torch.maximum(store.lengths, slots + 1))
    if store.log_weights is not None:
        store.log_weights[own] = 0.0
    slot = torch.arange(step.most, device=own.device)
    used = slot < store.lengths[:, None]  # [R, S]
    at = (store.starts[:, None] + slot).where(used, store.starts[:, None])

    logits = scale * query.float() @ store.keys[at].float().mT  # [R, G, S]
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if store.log_weights is not None:
        logits = logits + store.log_weights[at][:, None]
    weights = logits.masked_fill(~used[:, None], -torch.inf).softmax(-1)
    if lightest is not None:
        if store.mass is not None and lightest.heads == 1:
            store.mass[own] = 0.0
            store.mass.index_add_(0, at.flatten(), weights.mean(1).flatten())
        free_lightest(store, step, lightest, weights.mean(1))
    return (weights @ store.values[at].float()).to(query.dtype)


def free_lightest(
    store: RaggedStore, step: StepInputs, lightest: Lightest, weights: Tensor
) -> None:
    """Find the slots that the next token takes, after attention weights `[R, S]` were added."""
    slot = torch.arange(step.most, device=weights.device)
    used = slot < store.lengths[:, None]
    at = (store.starts[:, None] + slot).where(used, store.starts[:, None])
    if lightest.heads == 1:
        assert store.mass is not None
        mass = store.mass[at]
    else:
        mass = weights.unflatten(0, (-1, lightest.heads)).mean(1)
        mass = mass.repeat_interleave(lightest.heads, dim=0)
    until = step.position - lightest.recent
    if lightest.places is not None:
        n, wide = lightest.places.shape[1], lightest.end - 1 - until
        of_prompt = lightest.places.gather(1, (n - wide).clamp(0, n - 1).long()[:, None])[:, 0] - 1
        until = torch.where(wide > 0, of_prompt, until)
    positions = store.positions[at]
    free = used & (slot >= lightest.protected[:, None])
    old = free & (positions <= until[:, None])
    light = mass.masked_fill(~old, torch.inf).argmin(-1)
    oldest = positions.masked_fill(~free, torch.iinfo(torch.int32).max).argmin(-1)
    victim = torch.where(old.any(-1), light, oldest)
    full = store.lengths > lightest.capacity
    lightest.freed.copy_(torch.where(full, victim, store.lengths.long()))


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of `[..., D]` divided by its root mean square, then times the weight."""
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


@torch.no_grad()
def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of query `[B, Hq, N, D]` and key `[B, H, N, D]`."""

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    return turned(query), turned(key)


@torch.no_grad()
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return F.silu(gate) * up


def _causal_logits(
    query: Tensor, key: Tensor, scale: float, softcap: float | None, valid: Tensor | None
) -> Tensor:
    """float32 `[B, Hq, Q, N]`, -inf where a query does not see a key."""
    Q, N = query.shape[2], key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = scale * query.float() @ key.float().mT
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    seen = torch.ones(Q, N, dtype=torch.bool, device=key.device).tril(N - Q)
    if valid is not None:
        seen = seen & valid[:, None, None, :] & valid[:, None, N - Q :, None]
    return logits.masked_fill(~seen, -torch.inf)
