"""The attention that queries to come are expected to pay: from what the prompt's queries are like.

Shape letters, `valid` and padding are those of `mmkv.scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.layer_inputs import Turn, turn
from mmkv.scores import check_valid
from mmkv.tiling import autocast_off


@torch.no_grad()
def expected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ahead: Turn | None,
    *,
    skip: int = 4,
    epsilon: float = 0.02,
    scale: float | None = None,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`(p + epsilon) * |v|`, with p the attention of a query like the prompt's, asked later.

    With m and S the mean and the covariance of a head's queries before rotary embedding, and R the
    mean rotation of the positions to come, p is the softmax over keys of
    `scale * k'Rm + scale ** 2 * k'RSR'k / 2` (the logarithm of what a normal distribution's
    exponential is in the mean), averaged over the query heads of a group. The first `skip` tokens
    of a row are in none of these; they score as their head's highest.

    Args:
        query: `[B, Hq, Q, D]`, before rotary embedding, of the last `Q <= N` tokens.
        key: `[B, H, N, D]`, after rotary embedding.
        value: `[B, H, N, Dv]`.
        ahead: means of cos and sin `[B, 1, R]` over positions to come; None: no embedding.
        skip: first tokens of each row (attention sinks) to leave out.
        epsilon: attention added to all, so that a value's norm counts where little is expected.
        scale: factor of the logits, `D ** -0.5` by default.
        valid: bool `[B, N]`, False for padding.
        bias: float `[B, H, N]`, added to the logits of each key.

    Returns:
        float32 `[B, H, N]`.

    Raises:
        ValueError: shapes do not fit.

    Source: Expected Attention, arXiv 2510.00636, section 3 (kvpress: `ExpectedAttentionPress`). As
    there, without the softcap that some layers have.
    """
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value must be [B, heads, N, D], got {shapes}")
    (B, Hq, Q, D), (H, N) = query.shape, key.shape[1:3]
    fits = key.shape == (B, H, N, D) and value.shape[:3] == (B, H, N) and Q <= N
    if not fits or H < 1 or Hq % H:
        raise ValueError(f"query, key and value must be of the same tokens, got {shapes}")
    check_valid(valid, B, N)
    if valid is None:
        valid = torch.ones(B, N, dtype=torch.bool, device=key.device)
    factor = D**-0.5 if scale is None else scale
    counted = valid & (valid.cumsum(-1) > skip)
    with autocast_off(key):
        mean, spread = _statistics(query.float(), counted[:, N - Q :])
        if ahead is not None:
            # A mean of rotations is linear, so it is applied as one rotation is.
            mean = turn(mean[:, :, None], *ahead)[:, :, 0]
            spread = turn(turn(spread, *ahead).mT, *ahead)
        k = key.float().masked_fill(~valid[:, None, :, None], 0.0)
        expected = torch.zeros(B, H, N, device=key.device)
        # One query head of each group at a time: what is in flight is as large as the keys.
        for m, s in zip(
            mean.unflatten(1, (H, -1)).unbind(2),
            spread.unflatten(1, (H, -1)).unbind(2),
            strict=True,
        ):
            logits = factor * (k @ m[..., None])[..., 0]
            logits += factor**2 / 2 * ((k @ s) * k).sum(-1)
            if bias is not None:
                logits += bias
            # Finite, as a row of nothing that counts must stay finite.
            logits.masked_fill_(~counted[:, None], torch.finfo(logits.dtype).min)
            expected += logits.softmax(-1)
    found = (expected * (H / Hq) + epsilon) * value.float().norm(dim=-1)
    found = found.masked_fill(~counted[:, None], 0.0)
    first = (valid & ~counted)[:, None]
    return torch.where(first, found.amax(-1, keepdim=True), found)


def _statistics(query: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[B, Hq, D]` and covariance `[B, Hq, D, D]` of the queries `[B, Hq, Q, D]` counted."""
    n = counted.sum(-1).clamp(min=1)[:, None, None]
    absent = ~counted[:, None, :, None]
    # What padding holds may be anything, NaN included.
    query = query.masked_fill(absent, 0.0)
    mean = query.sum(2) / n
    apart = (query - mean[:, :, None]).masked_fill(absent, 0.0)
    return mean, apart.mT @ apart / n[..., None]
