"""Score by the queries around a token: the largest change of their outputs without the token.

The prompt is cut into runs. In a run every query, or every `stride`-th one, observes all keys of
the run, earlier and later ones, as if it came after the prompt. A token's score is the largest
change of any observer's output if that token alone were dropped. Only the first run has attention
sinks, so the observers of other runs give their tokens more attention than the model does; a few
queries, the last ones and some before, therefore observe the whole prompt. The cost is linear in
the prompt's length, and no operation synchronises with the host. Shape letters are those of
`mmkv.scores`; a run has C positions.

Related: queries of the whole prompt observe (KVzip, arXiv 2505.23416); a score is the change of an
output without one token (DropKV).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.layer_inputs import Rotation, rotate
from mmkv.option_types import NonNegativeInt, PositiveInt
from mmkv.parts import Score, register_part
from mmkv.scores.attention import scale_of
from mmkv.scores.runs import Observed, Places, placed, runs_observed, whole_observed
from mmkv.tensors import largest, rows, tile

if TYPE_CHECKING:
    from mmkv.layer_inputs import LayerInputs


@register_part("observers")
@dataclass(frozen=True, kw_only=True)
class Observers(Score):
    """The largest change of a nearby query's output if the token were dropped.

    Options:
        chunk: queries observe their own run, of at most this many tokens; 1 or more.
        stride: every `stride`-th query observes; 1 or more.
        whole: how many queries observe the whole prompt, half of them its last ones; 0: none.
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    average_heads: bool = False
    chunk: PositiveInt = 128
    stride: PositiveInt = 1
    whole: NonNegativeInt = 32
    turn_reduction = "max"
    by_head = True
    uses_rotary = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the largest change of the layer's output without each token."""
        root = layer.of_output_weight(output_root)
        return observer_scores(
            layer.query,
            layer.key,
            layer.value,
            root=root,
            rotation=None if layer.rotary is None else layer.rotary.to_next,
            run=self.chunk,
            stride=self.stride,
            whole=self.whole,
            scale=layer.scale,
            softcap=layer.softcap,
            log_weights=layer.log_weights,
            valid=layer.valid if layer.padded else None,
        )


@dataclass(frozen=True)
class _Settings:
    """Options of `observer_scores`."""

    run: int
    stride: int
    whole: int
    scale: float
    softcap: float | None


@torch.no_grad()
def observer_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    root: Tensor | None = None,
    rotation: Rotation | None = None,
    run: int = 128,
    stride: int = 1,
    whole: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    log_weights: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Return the largest change of any output in a token's run if the token were dropped.

    With `p_ij` the attention of observer `i` over its whole run, not causal, and `o_i` its output,
    a token's score is `max_i p_ij / (1 - p_ij) * |W_g (v_j - o_i)|`, over the run's observers and
    the query heads `g` of the group: how far the layer's output moves.

    In a row of several runs `whole` queries also observe all keys: half of them are the last ones,
    the others are evenly spread before. Their scores are scaled so that each head has the same mean
    score as by runs, and the larger of both scores counts.

    A row's valid tokens are cut into `ceil(n / run)` runs of equal length (to one token), wherever
    they lie, so padding changes nothing.

    Args:
        query: `[B, Hq, Q, D]`, of the last `Q <= N` tokens. Runs of earlier tokens are observed by
            the last `run` of these.
        key, value: `[B, H, N, D]` after rotary embedding, and `[B, H, N, Dv]`.
        root: `[1 or B, Hq, Dv, Dv]` from `output_root`; None measures head outputs, unprojected.
        rotation: rotates the queries to the position after the prompt; None: they are not rotated.
        run: the largest number of tokens in a run.
        stride: every `stride`-th query of a run observes, from its first on; for runs of earlier
            tokens every `stride`-th of the last queries, from the last one backwards.
        scale, softcap, log_weights: those of `mmkv.scores.accumulated_attention`.
        valid: bool `[B, N]`, False for padding, which does not observe and scores 0; None: there is
            none, which takes fewer operations on a device.

    Returns:
        float32 `[B, H, N]`, not negative, in units of the layer's output.
    """
    (B, H, N, D), Q = key.shape, query.shape[2]
    settings = _Settings(run, stride, whole, scale_of(D, scale), softcap)
    if root is not None:
        root = root.to(key.device).unflatten(1, (H, -1))
    if key.device.type != "cpu":
        return _scores(query, key, value, valid, log_weights, root, rotation, settings)
    # A row at a time, without its padding: tensors stay in the CPU's cache, and runs are slices.
    scores = key.new_zeros(B, H, N, dtype=torch.float32)
    for b in range(B):
        row, start, gaps = slice(b, b + 1), 0, False
        if valid is not None:
            start = int(valid[b].to(torch.uint8).argmax())
            if gaps := not valid[b, start:].all():
                start = 0
        first = max(0, start - (N - Q))
        scores[row, :, start:] = _scores(
            query[row, :, first:],
            key[row, :, start:],
            value[row, :, start:],
            valid[row] if valid is not None and gaps else None,
            None if log_weights is None else log_weights[row, :, start:],
            root if root is None or len(root) < B else root[row],
            None
            if rotation is None
            else rotation.of(row if len(rotation.cos) == B else slice(1), slice(first, None)),
            settings,
        )
    return scores


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    log_weights: Tensor | None,
    root: Tensor | None,
    rotation: Rotation | None,
    settings: _Settings,
) -> Tensor:
    """Return `observer_scores` of all rows; without padding runs are slices."""
    (B, H, N, _), Q, G = key.shape, query.shape[2], query.shape[1] // key.shape[1]

    def heads_of(x: Tensor, first: int, last: int) -> Tensor:
        """Return some heads in float32; padding, which may hold any values, is 0."""
        x = x[:, first:last]
        if valid is not None:
            x = x.masked_fill(~valid[:, None, N - x.shape[2] :, None], 0.0)
        return x.to(torch.float32, memory_format=torch.contiguous_format)

    # Some heads, and of these some runs, at a time, so that tensors stay in the CPU's cache.
    # Runs that are no slices are copied, so that there is room for fewer.
    limit = tile(key.device) // (1 if valid is None else 2)
    heads = min(H, max(1, limit // (B * G * N * min(settings.run, N))))
    limit = max(1, limit // (B * G * heads))
    known = torch.ones(1, N, dtype=torch.bool, device="cpu") if valid is None else valid
    observed = (
        runs_observed(known, Q, settings.run, settings.stride, limit, sliced=valid is None),
        whole_observed(known, Q, settings.run, settings.whole, limit),
    )
    if valid is None:
        runs, whole = (placed(x, key.device) for x in observed)
    else:
        runs, whole = ([(Places(x), Places(y)) for x, y in pairs] for pairs in observed)
    has_runs = None if valid is None else (valid.sum(-1) > settings.run)[:, None, None]
    tiny = torch.finfo(torch.float32).tiny
    scores = key.new_zeros(B, H, N, dtype=torch.float32)
    for h in range(0, H, heads):
        local, queries = scores[:, h : h + heads], heads_of(query, h * G, (h + heads) * G)
        if rotation is None:
            queries = queries * settings.scale
        else:  # a copy, which may be written to
            queries = rotate(queries, *rotation).mul_(settings.scale)
        roots = None if root is None else root[:, h : h + heads]
        scores_of = partial(
            _observer_scores,
            query=queries,
            key=heads_of(key, h, h + heads),
            table=_table(heads_of(value, h, h + heads), G, roots, valid),
            softcap=settings.softcap,
            log_weights=None if log_weights is None else log_weights[:, h : h + heads].float(),
            padded=valid is not None,
        )
        local[:] = scores_of(runs)
        if whole:
            overall = scores_of(whole)
            overall *= local.sum(-1, keepdim=True) / overall.sum(-1, keepdim=True).clamp(min=tiny)
            if has_runs is not None:
                overall = torch.where(has_runs, overall, local)
            torch.maximum(local, overall, out=local)
        del queries, scores_of  # room for the next heads
    return scores


def _observer_scores(
    observed: Iterable[Observed],
    *,
    query: Tensor,
    key: Tensor,
    table: Tensor,
    softcap: float | None,
    log_weights: Tensor | None,
    padded: bool,
) -> Tensor:
    """Return the largest change of the observers' outputs without each token: float32 [B, H, N].

    Args:
        observed: runs and their observers; a token in no run scores 0.
        query, key: those of `observer_scores`, in float32, queries times the scale.
        table: the result of `_table`.
        softcap, log_weights: those of `observer_scores`.
        padded: whether `observed` may have fillers.
    """
    (B, H, N), G = key.shape[:3], query.shape[1] // key.shape[1]
    scores = torch.zeros(B, H, N + 1, dtype=torch.float32, device=key.device)
    for tokens, observers in observed:
        at = tokens.at
        change = _changes(
            observers.of(query).unflatten(1, (H, G)),
            tokens.of(key),
            tokens.of(table).unflatten(1, (H, G)),
            softcap,
            None if log_weights is None else tokens.of(log_weights[..., None]),
            at < 0 if padded else None,
            observers.at >= 0 if padded else None,
        )
        # Without the only token of a run there is no output to compare with.
        if padded:
            change.masked_fill_((at >= 0).sum(-1, keepdim=True)[:, None] == 1, 0.0)
            at = at.masked_fill(at < 0, N)
        elif at.shape[-1] == 1:
            change.zero_()
        index = at.flatten(1)[:, None].expand(B, H, -1)
        scores.scatter_reduce_(-1, index, change.flatten(2), "amax")
    return scores[..., :N]


def _changes(
    query: Tensor,
    key: Tensor,
    table: Tensor,
    softcap: float | None,
    log_weights: Tensor | None,
    absent: Tensor | None,
    observing: Tensor | None,
) -> Tensor:
    """Return the scores [B, H, n, C] of runs with O observers each.

    Query is [B, H, G, n, O, D], key [B, H, n, C, D], log_weights [B, H, n, C, 1]. `absent` is bool
    [B, n, C], True for fillers of tokens (None: none); `observing` is bool [B, n or 1, O], False
    for fillers of observers (None: none).
    """
    logits = key[:, :, None] @ query.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if log_weights is not None:
        logits += log_weights[:, :, None]
    if absent is not None:  # finite: a run of padding must stay finite
        logits.masked_fill_(absent[:, None, None, ..., None], -1e30)
    tiny = torch.finfo(torch.float32).tiny
    # One token may have nearly all of an observer's attention. The others are summed without it, so
    # that 1 - p and v - o keep their precision; none of them has more than half of the attention.
    top_logit, first = largest(logits)
    weight = logits.sub_(top_logit).exp_().scatter_(-2, first, 0.0)  # the largest weight is 1
    others, rest = (weight.mT @ table[..., :-1]).split([table.shape[-1] - 2, 1], dim=-1)
    right, total = rows(table, first[..., 0, :]), rest + 1
    chosen = right[..., :-2]
    apart = torch.addcdiv(chosen, others, rest.clamp(min=tiny), value=-1, out=others)
    first_change = _minus_half_square(apart).div_(total.square())
    # Minus half the squares are computed, and in place, as tensors [B, H, G, n, C, O] take most of
    # the time.
    output = chosen.addcmul_(apart, rest / total, value=-1)
    del apart, others, rest  # room for the next one
    right[..., -2:-1], right[..., -1] = _minus_half_square(output), 1.0
    odds = weight.div_(total.mT - weight).square_()
    change = (table @ right.mT).mul_(odds).scatter_(-2, first, first_change.mT)
    if observing is not None:
        change.masked_fill_(~observing[:, None, None, :, None], 0.0)
    scores = change.amin((2, -1)).mul_(-2).clamp_(min=0).sqrt_()
    return scores if absent is None else scores.masked_fill_(absent[:, None], 0.0)


def _table(value: Tensor, groups: int, root: Tensor | None, valid: Tensor | None) -> Tensor:
    """Return values, a one, and minus half their squared length: float32 [B, H * G, N, Dv + 2].

    Values [B, H, N, Dv] are multiplied by `root` [1 or B, H, G, Dv, Dv], so that lengths are those
    of the layer's output. A product with the result gives sums of values, or squared distances.
    """
    # Less their mean, so that differences of nearly equal values keep their precision.
    number = value.shape[-2] if valid is None else valid.sum(-1).clamp(min=1)[:, None, None, None]
    value = (value - value.sum(-2, keepdim=True) / number)[:, :, None]
    (B, H, _, N, Dv) = value.shape
    table = value.new_empty(B, H, groups, N, Dv + 2)
    values = table[..., :-2]
    if root is None:
        values.copy_(value)
    else:
        torch.matmul(value, root, out=values)
    table[..., -2], table[..., -1:] = 1.0, _minus_half_square(values)
    return table.flatten(1, 2)


def output_root(weight: Tensor) -> Tensor:
    """Return square matrices of an output projection `[..., Hq, hidden, Dv]`, by query head.

    Returns:
        float32 `[..., Hq, Dv, Dv]`: `|weight[g] x| ** 2 = |x' root[g]| ** 2`, to a millionth.
    """
    weight = weight.detach().float()
    matrix = (weight.mT @ weight).double()
    # Rounding may make a singular matrix slightly indefinite.
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).clamp(min=1e-30)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1e-6 * largest)
    return torch.linalg.cholesky_ex(matrix)[0].float()


def _minus_half_square(x: Tensor) -> Tensor:
    """Return minus half the squared length of each row: [..., 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(-0.5)
