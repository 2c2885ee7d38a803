"""Attention from the prompt's last queries (SnapKV, arXiv 2404.14469, section 4).

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.parts import Score, register_part
from mmkv.scores import values
from mmkv.scores.attention import (
    Pooling,
    Value,
    check_decoding,
    checked,
    drop_full_mask,
    pooled,
    window_rows,
)
from mmkv.tensors import no_autocast

if TYPE_CHECKING:
    from mmkv.layer_inputs import LayerInputs
    from mmkv.policy import Policy

# CriticalKV adds this to attention, so that values decide where attention is near 0.
_EPSILON = 1e-4


@register_part("window")
@dataclass(frozen=True, kw_only=True)
class WindowAttention(Score):
    """Attention from the prompt's last queries (SnapKV, arXiv 2404.14469, section 4).

    Options:
        window: how many last queries observe; their own tokens are pinned.
        kernel_size: scores are pooled over this many neighbouring keys, an odd number.
        pooling: "max", "avg", or None for none.
        recency_weighted: weigh the queries by how recent they are (PyramidInfer).
        value: how a token's value counts: "norm", attention times the value's L1 norm (VATP);
            "output", attention plus 1e-4, times its L1 norm after the output projection; "critical"
            (CriticalKV), half of the budget by attention alone, the rest as "output";
            "residual", how far a query's output moves without the token (DropKV); None: not at all.
        diversity: mix with the norms of values and the dissimilarity of keys (MixKV).
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    average_heads: bool = False
    window: int = 32
    kernel_size: int = 7
    pooling: Pooling | None = "max"
    recency_weighted: bool = False
    value: Value | Literal["critical"] | None = None
    diversity: bool = False
    by_head = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.window < 1 or self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(
                f"window={self.window}, kernel_size={self.kernel_size}: "
                "the window must be at least 1, the kernel size odd"
            )

    def check(self, policy: Policy) -> None:
        """Refuse combinations in which `value` or `diversity` would have no defined effect."""
        check_decoding(policy, value=self.value, diversity=self.diversity)
        if self.diversity and self.value == "critical":
            raise ValueError(
                "value='critical' has two stages, which diversity=True would mix: use "
                "value='output', or leave diversity out"
            )

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the scores; the window's tokens are pinned and score 0."""
        weights = None
        if self.recency_weighted:
            weights = torch.arange(1, self.window + 1, dtype=torch.float32, device="cpu")
        n, window = layer.key.shape[2] - self.window, self.window
        if self.value == "residual":
            by_query_head = values.residuals(layer, window, weights)[..., :n]
            scores = pooled(by_query_head, self.kernel_size, self.pooling)
            scores = scores.masked_fill(~layer.valid[:, None, :n], 0.0)
        else:
            scores = window_attention(
                layer.query,
                layer.key,
                window=window,
                kernel_size=self.kernel_size,
                pooling=self.pooling,
                weights=weights,
                **layer.attention,
            )
        if self.value == "norm":
            scores = scores * values.value_norms(layer, n)
        elif self.value in ("output", "critical"):
            attention = scores
            scores = (scores + _EPSILON) * values.output_norms(layer, n)
            if self.value == "critical" and layer.size is not None:
                half = (layer.size / 2).int() - self.window
                scores = values.with_first(scores, attention, half)
        if self.diversity:
            scores = values.mixkv_score(scores, layer)
        return F.pad(scores, (0, self.window))


@torch.no_grad()
def window_attention(
    query: Tensor,
    key: Tensor,
    *,
    window: int,
    kernel_size: int,
    pooling: Pooling | None,
    scale: float | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    log_weights: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the mean attention of the last `window` queries on each earlier token, pooled.

    Args:
        query: `[B, Hq, Q, D]` with `window <= Q <= N`, of which the last `window` rows are used.
        key: `[B, H, N, D]`.
        window: number of queries in the observation window.
        kernel_size: odd width of the pooling, in tokens; unused without pooling.
        pooling: "avg" (with zeros beyond the edges), "max", or None; per query head, before the
            mean over the query heads of a group.
        scale: factor of the logits, `D ** -0.5` by default.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        valid: bool `[B, N]`, False for padding.
        mask: bool `[B, 1, Q, N]`, True where a query sees a key; None: causal. A query that sees
            no key counts as 0.
        log_weights: float `[B, H, N]`, the logarithm of each key's weight, added to its logits;
            None: 0.
        weights: `[window]`, non-negative, for a weighted mean over the window's queries
            (PyramidInfer's recency weights); uniform by default.

    Returns:
        float32 `[B, H, N - window]`, in [0, 1].

    Raises:
        ValueError: shapes do not fit, the prompt is not longer than the window, or an option is
            out of range.

    Source: SnapKV, arXiv 2404.14469, section 4; weights: PyramidInfer, arXiv 2405.12532, section 3.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    per_query = _window_weights(weights, window, query.device)
    B, _, Q, _ = checked(query, key, valid, mask, softcap)
    valid = drop_full_mask(valid)
    H, N = key.shape[1], key.shape[2]
    if window >= N:
        raise ValueError(f"the prompt has {N} tokens, not more than the window of {window}")
    if not window <= Q <= N:
        raise ValueError(
            f"query must have between window = {window} and N = {N} rows, got {tuple(query.shape)}"
        )
    if pooling not in ("avg", "max", None):
        raise ValueError(f'pooling must be "avg", "max" or None, got {pooling!r}')
    if pooling is not None and (kernel_size < 1 or kernel_size % 2 == 0):
        raise ValueError(f"kernel_size must be a positive odd number, got {kernel_size}")
    if valid is not None:
        per_query = per_query * valid[:, -window:].float()[:, None, None, None, :]
    per_query = per_query / per_query.sum(-1, keepdim=True).clamp_min(torch.finfo().tiny)
    attention = window_rows(
        query[:, :, -window:],
        key,
        window,
        scale=scale,
        softcap=softcap,
        valid=valid,
        mask=mask,
        log_weights=log_weights,
    )
    with no_autocast(key.device):
        scores = (per_query @ attention[..., : N - window]).view(B, H, -1, N - window)
    scores = pooled(scores, kernel_size, pooling)
    return scores if valid is None else scores.masked_fill(~valid[:, None, : N - window], 0.0)


def _window_weights(weights: Tensor | None, window: int, device: torch.device) -> Tensor:
    if weights is None:
        return torch.ones(window, dtype=torch.float32, device=device)
    if tuple(weights.shape) != (window,):
        raise ValueError(f"weights must be [window] = ({window},), got {tuple(weights.shape)}")
    if not (bool(weights.isfinite().all()) and weights.min() >= 0 and weights.max() > 0):
        raise ValueError(
            f"weights must be finite, not negative and not all 0, got {weights.tolist()}"
        )
    return weights.detach().to(device, torch.float32, non_blocking=True)
