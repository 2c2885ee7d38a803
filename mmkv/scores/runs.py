"""Runs of a prompt's tokens, and which queries observe each, for `mmkv.scores.observers`.

Shape letters are those of `mmkv.scores`; a run has C positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmkv.tensors import rows, spans


class Places(NamedTuple):
    """C tokens or queries of each of n runs.

    Attributes:
        at: int64 [B or 1, n, C], their indices, -1 as filler.
        starts: where each run starts, if it is a slice, the same in all rows; otherwise None.
    """

    at: Tensor
    starts: list[int] | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return them of x [B, H, N, D]: [B, H, n, C, D]; any values for fillers."""
        (n, C), starts = self.at.shape[1:], self.starts
        if starts is not None and starts[-1] - starts[0] == (n - 1) * C:  # a view
            return x[:, :, starts[0] : starts[-1] + C].unflatten(2, (n, C))
        if starts is not None and x.device.type == "cpu":
            return torch.stack([x[:, :, i : i + C] for i in starts], dim=2)
        return rows(x, self.at.clamp(min=0).flatten(1)[:, None]).unflatten(2, (n, C))


# n runs of tokens, and the queries that observe each of them, or all of them.
Observed = tuple[Places, Places]


def placed(runs: list[tuple[Tensor, Tensor]], device: torch.device) -> list[Observed]:
    """Send runs without padding, which the host knows, to the device."""

    def sent(at: Tensor) -> Places:
        sliced = bool((at.diff(dim=-1) == 1).all())
        return Places(at.to(device, non_blocking=True), at[0, :, 0].tolist() if sliced else None)

    return [(sent(tokens), sent(observers)) for tokens, observers in runs]


def runs_observed(
    valid: Tensor, Q: int, run: int, stride: int, limit: int, *, sliced: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return the runs of a prompt, and the queries that observe each, as `Places.at`.

    Args:
        valid: bool [B, N], False for padding.
        Q: how many tokens have queries, the last ones.
        run, stride: those of `observer_scores`.
        limit: several runs are joined in one item if their queries and keys have at most so many
            products in a head.
        sliced: whether there is no padding, so that all rows have the same runs; the host waits.
    """
    N, observed = valid.shape[1], list[tuple[Tensor, Tensor]]()
    for first, last in ((0, N - Q), (N - Q, N)):
        for tokens in _runs(valid[:, first:last], run, alike=sliced) if first < last else ():
            for part in tokens.split(max(1, limit // min(run, N) ** 2), dim=1):
                if last == N:
                    observers = part[..., ::stride]
                else:  # the queries of earlier turns are not kept
                    observers = _latest(valid[:, N - Q :], run)[:, None].flip(-1)[..., ::stride]
                observed.append((part.add(first).masked_fill_(part < 0, -1), observers))
    return observed


def whole_observed(
    valid: Tensor, Q: int, run: int, whole: int, limit: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the whole prompt as one run, and the `whole` queries that observe it.

    An item has at most `limit` products of a query and a key in a head, or a single query. There is
    no item if no query observes the whole prompt, or if the prompt is a single run anyway. Other
    arguments are those of `runs_observed`.
    """
    N = valid.shape[1]
    if not whole or run >= N:
        return []
    tokens = torch.arange(N, device=valid.device).masked_fill(~valid, -1)[:, None]
    observers = _spread_tokens(valid[:, N - Q :], whole)[:, None]
    return [(tokens, part) for part in observers.split(max(1, limit // N), dim=-1)]


def _runs(valid: Tensor, run: int, *, alike: bool) -> list[Tensor]:
    """Return the runs of each row's valid tokens [B, N]: int64 [B, R, C], with -1 as filler.

    Lengths differ by one at most. If all rows are `alike`, without padding, return one tensor per
    length.
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


def _latest(valid: Tensor, number: int) -> Tensor:
    """Return up to `number` last valid tokens of each row [B, Q]: int64 [B, C], -1 as filler."""
    Q = valid.shape[1]
    index = torch.arange(Q, device=valid.device).expand_as(valid).masked_fill(~valid, -1)
    return index.sort(dim=-1).values[:, -min(number, Q) :]


def _spread_tokens(valid: Tensor, number: int) -> Tensor:
    """Return valid tokens of each row [B, Q], half of them its last: int64 [B, number].

    The others are evenly spread before. -1 is filler.
    """
    count, last = valid.sum(-1, keepdim=True), -(-number // 2)
    steps = torch.arange(number, device=valid.device)
    before = (steps - last) * (count - last).clamp(min=0) // max(1, number - last)
    index = torch.where(steps < last, count - 1 - steps, before)
    index = index.masked_fill(count == 0, -1)
    order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
    return order.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)
