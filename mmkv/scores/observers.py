"""What a token is worth to the text around it: queries of the prompt observe their run.

The prompt is cut into runs. Inside a run every query, or every second one, is an observer of every
key, earlier or later, as if it were asked behind the prompt; a token's score is the most that any
observer would lose if that token alone were dropped. A run has no attention sinks but the first,
so what its observers give to tokens is more than they give in the model: a few more observe the
whole prompt, the last ones and some between. Cost is linear in the prompt, and nothing in it waits
for the host. Shape letters are those of `mmkv.scores`; a run has C positions.

Related: observers beyond the window (KVzip, arXiv 2505.23416), the leave-one-out unit (DropKV).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from mmkv.parts import NonNegativeInt, PositiveInt, Score, register_part
from mmkv.scores.attention import tile

if TYPE_CHECKING:
    from mmkv.layer_inputs import LayerInputs


@register_part("observers")
@dataclass(frozen=True, kw_only=True)
class Observers(Score):
    """The most that a query of a token's run, asked at the prompt's end, would lose without it.

    Options:
        chunk: queries observe runs of about this many tokens; 1 or more.
        stride: every how many queries one observes; 1 or more.
        whole: how many queries observe the whole prompt, half of them its last; 0: none.
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
        """What the layer's output would change by."""
        query = layer.query
        if layer.rotary is not None:
            query = layer.rotary.moved(layer.query, layer.rotary.ahead(1))
        gram = None if layer.weight is None else output_gram(layer.output_weight)
        own = {"run": self.chunk, "stride": self.stride, "whole": self.whole}
        given: Any = {"scale": layer.scale, "softcap": layer.softcap, "valid": layer.valid, **own}
        return observer_scores(query, layer.key, layer.value, gram, bias=layer.bias, **given)


@torch.no_grad()
def observer_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gram: Tensor | None = None,
    *,
    run: int = 128,
    stride: int = 1,
    whole: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """The most that dropping a token alone changes for any query of its run.

    With `p_ij` the attention of observer `i` over its run, whole and not causal, and `o_i` what it
    reads, a token's score is `max_i p_ij / (1 - p_ij) * |W_g (v_j - o_i)|`, over the run's
    observers and the query heads `g` of the group: how far the layer's output moves.

    With `whole`, so many queries observe all keys of a row that has several runs: half of them are
    its last ones, the others lie evenly before. What they find is scaled by head to the mean of
    what runs found, and the larger of both counts.

    A row's valid tokens, wherever they lie, are cut into `ceil(n / run)` runs of equal length (to
    one token), so padding changes nothing.

    Args:
        query: `[B, Hq, Q, D]`, turned to where the prompt's reader will ask from, of the last
            `Q <= N` tokens. Runs of earlier ones are observed by the last `run` of these.
        key, value: `[B, H, N, D]` after rotary embedding, and `[B, H, N, Dv]`.
        gram: `[1 or B, Hq, Dv, Dv]` from `output_gram`; None measures head outputs as they are.
        run: most positions in a run.
        stride: every how many queries of a run one observes: its first, and so on; where their own
            queries are gone, the last one, and so on backwards.
        scale, softcap, bias: those of `mmkv.scores.accumulated_attention`.
        valid: bool `[B, N]`, False for padding: it observes nothing and scores 0.

    Returns:
        float32 `[B, H, N]`, not negative, in units of the layer's output.
    """
    (B, H, N, D), Q = key.shape, query.shape[2]
    if valid is None:
        valid = torch.ones(B, N, dtype=torch.bool, device=key.device)
    root = None if gram is None else _root(gram).to(key.device).unflatten(1, (H, -1))
    how: dict[str, Any] = {"run": run, "stride": stride, "whole": whole, "softcap": softcap}
    how["scale"] = D**-0.5 if scale is None else scale
    if key.device.type != "cpu":
        return _scores(query, key, value, valid, bias, root, **how)
    # A row at a time, without its padding: what is computed stays near, and runs are slices.
    found = key.new_zeros(B, H, N, dtype=torch.float32)
    for b in range(B):
        row, start = slice(b, b + 1), int(valid[b].to(torch.uint8).argmax())
        if not valid[b, start:].all():
            start = 0
        found[row, :, start:] = _scores(
            query[row, :, max(0, start - (N - Q)) :],
            key[row, :, start:],
            value[row, :, start:],
            valid[row, start:],
            None if bias is None else bias[row, :, start:],
            root if root is None or len(root) < B else root[row],
            **how,
        )
    return found


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    bias: Tensor | None,
    root: Tensor | None,
    *,
    run: int,
    stride: int,
    whole: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`observer_scores` of rows together, with the gram matrices' `_root`."""
    (B, H, N, _), Q, G = key.shape, query.shape[2], query.shape[1] // key.shape[1]
    # Where the host knows without waiting that there is no padding, runs are slices.
    sliced = key.device.type == "cpu" and bool(valid.all())
    if not sliced:  # what padding holds may be anything, NaN included
        key, value = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (key, value))
        query = query.masked_fill(~valid[:, None, N - Q :, None], 0.0)
    # Some heads, and of these some runs, at a time: what is computed of them stays near.
    most = tile(key.device)
    heads = min(H, max(1, most // (B * G * N * min(run, N))))
    most = max(1, most // (B * G * heads))
    of_runs, of_all = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for first, last in ((0, N - Q), (N - Q, N)):
        for tokens in _runs(valid[:, first:last], run, alike=sliced) if first < last else ():
            for some in tokens.split(max(1, most // min(run, N) ** 2), dim=1):
                if last == N:
                    asking = some[..., ::stride]
                else:  # their own queries are gone
                    asking = _last(valid[:, N - Q :], run)[:, None].flip(-1)[..., ::stride]
                of_runs.append((some.add(first).masked_fill_(some < 0, -1), asking))
    if whole and run < N:
        tokens = torch.arange(N, device=key.device).masked_fill(~valid, -1)[:, None]
        asking = _spread(valid[:, N - Q :], whole)[:, None]
        of_all = [(tokens, some) for some in asking.split(max(1, most // N), dim=-1)]
    several, tiny = (valid.sum(-1) > run)[:, None, None], torch.finfo(torch.float32).tiny
    scores = key.new_zeros(B, H, N, dtype=torch.float32)
    for h in range(0, H, heads):
        found = scores[:, h : h + heads]
        k, v = (x[:, h : h + heads].float() for x in (key, value))
        given = (
            query[:, h * G : (h + heads) * G].float() * scale,
            k,
            _table(v, G, None if root is None else root[:, h : h + heads], valid),
            softcap,
            None if bias is None else bias[:, h : h + heads].float(),
        )
        found[:] = _observed(of_runs, *given, sliced=sliced)
        if of_all:
            wide = _observed(of_all, *given, sliced=sliced)
            wide *= found.sum(-1, keepdim=True) / wide.sum(-1, keepdim=True).clamp(min=tiny)
            found[:] = torch.where(several, torch.maximum(found, wide), found)
    return scores


def _observed(
    runs: Iterable[tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    table: Tensor,
    softcap: float | None,
    bias: Tensor | None,
    *,
    sliced: bool,
) -> Tensor:
    """The most that observers of runs lose without a token: float32 [B, H, N].

    Runs are tokens int64 [B, n, C] and who observes them, int64 [B, n or 1, O] among the queries;
    -1 as filler, and `sliced` if there is none and runs are alike in all rows. The other arguments
    are those of `observer_scores` in float32, queries times the scale, and what `_table` gives.
    """
    (B, H, N), G = key.shape[:3], query.shape[1] // key.shape[1]
    found = torch.zeros(B, H, N + 1, device=key.device)
    for tokens, asking in runs:
        absent = None if sliced else tokens < 0
        lost = _lost(
            rows(query, asking.clamp(min=0).flatten(1)[:, None])
            .unflatten(2, asking.shape[1:])
            .unflatten(1, (H, G)),
            _taken(key, tokens, sliced=sliced),
            _taken(table, tokens, sliced=sliced).unflatten(1, (H, G)),
            softcap,
            None if bias is None else _taken(bias[..., None], tokens, sliced=sliced),
            absent,
            asking >= 0,
        )
        # A token alone in its run leaves nothing that could be read in its place.
        lost.masked_fill_((tokens >= 0).sum(-1, keepdim=True)[:, None] == 1, 0.0)
        at = tokens.masked_fill(tokens < 0, N).flatten(1)[:, None].expand(-1, H, -1)
        found.scatter_reduce_(-1, at, lost.flatten(2), "amax")
    return found[..., :N]


def _lost(
    query: Tensor,
    key: Tensor,
    table: Tensor,
    softcap: float | None,
    bias: Tensor | None,
    absent: Tensor | None,
    observing: Tensor,
) -> Tensor:
    """Scores [B, H, n, C] of runs with O observers each.

    Query is [B, H, G, n, O, D], key [B, H, n, C, D], bias [B, H, n, C, 1]; `absent` is where there
    is no token, bool [B, n, C] (None: nowhere), `observing` where there is an observer, bool
    [B, n or 1, O].
    """
    logits = key[:, :, None] @ query.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits += bias[:, :, None]
    if absent is not None:  # finite: a run of padding must stay finite
        logits.masked_fill_(absent[:, None, None, ..., None], -1e30)
    tiny = torch.finfo(torch.float32).tiny
    # One token may have nearly all of an observer's attention: what the others then give is summed
    # without it, so that 1 - p and v - o keep their digits. No other has more than a half.
    most, first = largest(logits)
    weight = logits.sub_(most).exp_().scatter_(-2, first, 0.0)  # the largest's is 1
    others, rest = (weight.mT @ table[..., :-1]).split([table.shape[-1] - 2, 1], dim=-1)
    chosen, total = rows(table, first[..., 0, :])[..., :-2], rest + 1
    apart = torch.addcdiv(chosen, others, rest.clamp(min=tiny), value=-1)
    out = torch.addcmul(chosen, apart, rest / total, value=-1)
    lost_first = -_half_square(apart) / total.square()
    # Halves of negative squares, and in place: the elements [B, H, G, n, C, O] are what this costs.
    lost = table @ torch.cat([out, -_half_square(out), -torch.ones_like(rest)], dim=-1).mT
    odds = weight.div_(total.mT - weight)
    lost.mul_(odds).mul_(odds).scatter_(-2, first, lost_first.mT)
    if absent is not None:
        lost.masked_fill_(~observing[:, None, None, :, None], 0.0)
    found = lost.amin(-1).amin(2).mul_(-2).clamp_(min=0).sqrt_()
    return found if absent is None else found.masked_fill_(absent[:, None], 0.0)


def _table(value: Tensor, groups: int, root: Tensor | None, valid: Tensor) -> Tensor:
    """Values [B, H, N, Dv], a one, and half their squared length: float32 [B, H * G, N, Dv + 2].

    About their mean, and where lengths are those of the layer's output: `root` [1 or B, H, G, Dv,
    Dv] is of the gram matrices. Two products with these give sums of values and distances from a
    value.
    """
    # About their mean: differences of nearly equal values keep their digits.
    number = valid.sum(-1).clamp(min=1)[:, None, None, None]
    value = (value - value.sum(-2, keepdim=True) / number)[:, :, None]
    if root is not None:
        value = value @ root
    value = value.expand(-1, -1, groups, -1, -1).flatten(1, 2)
    return torch.cat([value, torch.ones_like(value[..., :1]), _half_square(value)], dim=-1)


def output_gram(weight: Tensor) -> Tensor:
    """How long a head's output becomes behind the output projection `[..., Hq, hidden, Dv]`.

    Returns:
        float32 `[..., Hq, Dv, Dv]`: `|weight[g] x| ** 2 = x' gram[g] x`.
    """
    weight = weight.detach().float()
    return weight.mT @ weight


def spans(starts: Tensor, width: int) -> Tensor:
    """The places from each of starts [..., R + 1], not falling, to the next: int64 [..., R, C].

    -1 as filler behind them; no two starts are further apart than `width`, C.
    """
    place = starts[..., :-1, None] + torch.arange(width, device=starts.device)
    return place.masked_fill(place >= starts[..., 1:, None], -1)


def _runs(valid: Tensor, run: int, *, alike: bool) -> list[Tensor]:
    """Each row's valid tokens [B, N] in runs of equal length, to one: int64 [B, R, C].

    -1 as filler; those of rows that are `alike`, without padding, are apart by length instead.
    """
    N = valid.shape[1]
    R, counts = -(-N // run), valid.sum(-1)[:, None]
    runs = (-(-counts // run)).clamp(min=1)
    starts = torch.arange(R + 1, device=valid.device).minimum(runs) * counts // runs
    places = spans(starts, min(run, N))  # [B, R, C]
    if alike:
        lengths = starts[0].diff()
        return [places[:, lengths == n, :n] for n in lengths.unique().tolist()]
    order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
    tokens = order.gather(1, places.clamp(min=0).flatten(1)).view_as(places)
    return [tokens.masked_fill(places < 0, -1)]


def _last(valid: Tensor, most: int) -> Tensor:
    """The last valid tokens of each row [B, Q], `most` of them: int64 [B, C], -1 as filler."""
    Q = valid.shape[1]
    place = torch.arange(Q, device=valid.device).expand_as(valid).masked_fill(~valid, -1)
    return place.sort(dim=-1).values[:, -min(most, Q) :]


def _spread(valid: Tensor, number: int) -> Tensor:
    """Valid tokens of each row [B, Q]: its last ones, and as many evenly before: int64 [B, number].

    -1 as filler.
    """
    count, last = valid.sum(-1, keepdim=True), -(-number // 2)
    steps = torch.arange(number, device=valid.device)
    before = (steps - last) * (count - last).clamp(min=0) // max(1, number - last)
    place = torch.where(steps < last, count - 1 - steps, before)
    place = place.masked_fill(count == 0, -1)
    order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
    return order.gather(1, place.clamp(min=0)).masked_fill(place < 0, -1)


def _taken(x: Tensor, tokens: Tensor, *, sliced: bool) -> Tensor:
    """The tokens [B, n, C] of x [B, H, N, D]: [B, H, n, C, D]; any where there is none."""
    n, C = tokens.shape[1:]
    if not sliced:
        return rows(x, tokens.clamp(min=0).flatten(1)[:, None]).unflatten(2, (n, C))
    starts = tokens[0, :, 0].tolist()
    if starts[-1] - starts[0] == (n - 1) * C:  # a view
        return x[:, :, starts[0] : starts[-1] + C].unflatten(2, (n, C))
    return torch.stack([x[:, :, i : i + C] for i in starts], dim=2)


def rows(x: Tensor, at: Tensor) -> Tensor:
    """Rows [..., K, D] of x [..., C, D] at int64 [..., K]; leading dimensions may be repeated."""
    step = 1
    if x.ndim == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous():
        # As projections leave heads: rows are taken from where they lie.
        step, flat = x.shape[1], x.transpose(1, 2).reshape(-1, x.shape[-1])
        first = torch.arange(len(flat), device=x.device).view(x.shape[0], -1, step).mT[..., :1]
    else:
        flat = x.reshape(-1, x.shape[-1])
        first = torch.arange(len(flat), device=x.device).view(x.shape[:-1])[..., :1]
    place = first + at * step
    return flat.index_select(0, place.flatten()).view(*place.shape, x.shape[-1])


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element of each column of float32 [..., C, O], and its row: [..., 1, O]."""
    if x.device.type != "cpu":
        return x.max(-2, keepdim=True)
    # Pooling computes on many columns at once, which `max` does not where it gives indices.
    flat = x.flatten(0, -3)[:, :, None].permute(0, 3, 1, 2)  # images of O channels and C rows
    most, row = max_pool2d(flat, (x.shape[-2], 1), return_indices=True)
    shape = (*x.shape[:-2], 1, x.shape[-1])
    return most.view(shape), row.view(shape)


def _root(gram: Tensor) -> Tensor:
    """float32 [..., Dv, Dv] with `x' gram x = |x' root| ** 2`, to a millionth."""
    found = gram.double()
    # Rounding may have left a product of deficient rank below zero.
    largest = found.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).clamp(min=1e-30)
    found.diagonal(dim1=-2, dim2=-1).add_(1e-6 * largest)
    return torch.linalg.cholesky_ex(found)[0].float()


def _half_square(x: Tensor) -> Tensor:
    """Half the squared length of each row: [..., 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(0.5)
