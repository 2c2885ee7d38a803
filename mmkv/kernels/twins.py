"""The kernels in plain torch, to be read and to be compared with.

Each takes and returns what the kernel of its name does, and checks nothing. Memory grows with the
whole matrix of attention.
"""

import torch
from torch import Tensor


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
) -> Tensor:
    """Attention that each key receives from all queries, summed: float32 `[B, H, N]`."""
    B, Hq, Q, _ = query.shape
    H, N = key.shape[1], key.shape[2]
    attention = (_causal_logits(query, key, scale, softcap, valid) - lse[..., None]).exp()
    if valid is not None:
        attention = attention.masked_fill(~valid[:, None, N - Q :, None], 0.0)
    return attention.sum(2).view(B, H, Hq // H, N).mean(2)


@torch.no_grad()
def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one token on each row's first slots: `[R, G, Dv]`, and weights `[R, S]`."""
    S = keys.shape[1]
    empty = torch.arange(S, device=keys.device) >= lengths[:, None]  # [R, S]
    if bias is not None:
        empty = empty | bias.isneginf()
    keys = keys.float().masked_fill(empty[..., None], 0.0)
    values = values.float().masked_fill(empty[..., None], 0.0)

    logits = scale * query.float() @ keys.mT  # [R, G, S]
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if bias is not None:
        logits = logits + bias.float()[:, None]
    logits = logits.masked_fill(empty[:, None], -torch.inf)
    weights = logits.softmax(-1).masked_fill(empty[:, None], 0.0)
    return (weights @ values).to(query.dtype), weights.mean(1) if weigh else None


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
