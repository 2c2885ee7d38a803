"""Where kept keys and values lie: a few rectangular blocks of rows of similar length.

A row is one key-value head of one sequence, R = B * H of them. Rows that keep about as much share a
block [R', S, D]; a layer whose rows all agree is a single block. Each block is one attention call,
so per-head sizes free memory without a loop over heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmkv.cache import varlen
from mmkv.cache.forward_pass import GraphInputs
from mmkv.cache.quantize import QuantizedKV, Stored, mixed, nbytes, products, select
from mmkv.cache.rerotate import reposition
from mmkv.parts.slots import SlotSchedule, spare

# A position: on the device while a clock drives the steps.
Place = int | Tensor


@dataclass(eq=False)
class PaddedBlock:
    """Rows of similar length and the slots they share.

    Attributes:
        row_numbers: which of the layer's B * H rows, rising, on the host.
        rows: the same as an index: a slice where they are evenly apart, so that taking them is a
            view, or int64 [R].
        keys, values: [R, S, D]; S is the capacity, of which the schedule's `width` is in use. In 8
            or 4 bits they are read and written in the model's type all the same.
        positions: int32 [R, S], original position of each slot's token, -1 where empty; where no
            token is dropped, also those of tokens to come (`held` has none of them).
        bias: [R, 1, S], added to the logits: 0 for filled slots, -inf for empty ones; None while
            all in use are filled. A bool mask would be turned into one in every step.
        mass: float32 [R, S], attention accumulated by each slot, for policies that score by it;
            decoding adds to it where it also drops by it (H2O), and then inf marks empty slots.
        schedule: which slot is next.
        log_weights: float32 [R, S], the logarithm of what a slot weighs, which the bias adds to
            its logits; None: every slot stands for one token.
        inv_freq: [D / 2], to count positions inside the cache; None to keep the original ones.
    """

    row_numbers: np.ndarray
    rows: slice | Tensor
    keys: Stored
    values: Stored
    positions: Tensor
    bias: Tensor | None
    mass: Tensor | None
    schedule: SlotSchedule
    inv_freq: Tensor | None = None
    log_weights: Tensor | None = None
    # [R] numbers of the rows, and attention weights [R, G, S] of a step; made when first needed.
    numbers: Tensor | None = None
    weights: Tensor | None = None
    # While a clock drives the steps (`freeze`).
    frozen: bool = False
    # Slots whose positions are written, and what their tokens' positions are ahead of them by.
    dated: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls,
        keys: Stored,
        values: Stored,
        positions: Tensor,
        mass: Tensor | None,
        schedule: SlotSchedule,
        width: int,
        *,
        rows: np.ndarray,
        inv_freq: Tensor | None = None,
        log_weights: Tensor | None = None,
    ) -> PaddedBlock:
        """Take over storage [R, S, D] that holds kept pairs, at most `width` of them in a row."""
        if mass is not None and schedule.needs_decode_attention:
            mass = mass.masked_fill(positions < 0, torch.inf)
        where = _evenly(rows, positions.device)
        block = cls(
            rows, where, keys, values, positions, None, mass, schedule, inv_freq, log_weights
        )
        block._bias_for(width)
        return block

    def freeze(self, steps: int) -> None:
        """Let a clock drive up to `steps` steps: fixed shapes, and all that changes on the device.

        Every slot is looked at then, and the bias says which are empty.
        """
        self._ensure(self.schedule.most(steps))
        self.frozen = True
        self.bias = self.slot_bias()

    def thaw(self) -> None:
        """Back to steps that the host drives: shapes follow the schedule's `width`."""
        self.frozen = False
        self._bias_for(self.schedule.width - 1)

    def _bias_for(self, width: int) -> None:
        """The bias of steps that look no further than at the new token behind `width` slots."""
        self.bias = None
        if self.schedule.gapless and self.log_weights is None:
            return
        self.bias = self.slot_bias()
        if self.schedule.shared:  # what lies behind is never looked at
            self.bias[:, :, width:] = 0.0

    def slot_bias(self) -> Tensor:
        """[R, 1, S]: -inf where a slot is empty, the logarithm of its weight elsewhere."""
        empty = (self.held if self.dated[0] else self.positions)[:, None] < 0
        bias = torch.zeros(empty.shape, dtype=self.keys.dtype, device=empty.device)
        if self.log_weights is not None:
            bias += self.log_weights[:, None]
        return bias.masked_fill_(empty, -torch.inf)

    @property
    def taken(self) -> tuple[int, int]:
        """Slots in use, of rows that all use as many, and the rows."""
        return len(self.positions) * self.schedule.used, len(self.positions)

    @property
    def slots(self) -> int:
        """How many slots there are, empty ones included."""
        return self.positions.numel()

    @property
    def fits(self) -> bool:
        """Whether a clock can drive the next step."""
        return self.frozen and self.schedule.width <= self.positions.shape[1]

    @property
    def mutable(self) -> list[Tensor]:
        """What a step adds to; all else that it writes, the same step writes again."""
        found = (self.mass, getattr(self.schedule, "freed", None))
        return [x for x in found if x is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys, values and weights, empty slots included."""
        more = 0 if self.log_weights is None else nbytes(self.log_weights)
        return nbytes(self.keys) + nbytes(self.values) + more

    @property
    def held(self) -> Tensor:
        """Positions [R, S], -1 where empty: where the next token goes, nothing is held any more."""
        if not self.schedule.drops:
            behind = torch.arange(self.positions.shape[1], device=self.keys.device)
            return self.positions.masked_fill(behind >= self.schedule.used, -1)
        slots = self.schedule.slots(self.keys.device)
        if isinstance(slots, int):
            if slots >= self.positions.shape[1]:
                return self.positions
            slots = torch.full(self.positions.shape[:1], slots, device=self.positions.device)
        inside = slots.clamp(max=self.positions.shape[1] - 1)[:, None]
        kept = self.positions.gather(1, inside).masked_fill((slots[:, None] == inside), -1)
        return self.positions.scatter(1, inside, kept)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: int,
        clock: GraphInputs | None,
        **options: Any,
    ) -> Tensor:
        """Write the pairs of q new tokens, attend to all with them, and drop what they displace.

        Queries are [R, G * q, D], keys and values [R, q, D], the first of them at `first`. A clock,
        where one is given, drives the step in place of the host.
        """
        q = key.shape[1]
        place: Place = first if clock is None else clock.position
        if clock is None:
            self.append(key, value, first)
        else:
            self._write(key, value, self.schedule.slots_at(clock.row), clock.position)
        out = self.attend(query, q, place, **options)
        schedule = self.schedule
        schedule.now = None
        if self.mass is not None and schedule.needs_decode_attention:
            schedule.drop(self.mass, self.positions, place if q == 1 else first + q - 1)
            schedule.advance(q)
        elif q == 1:
            schedule.at += 1
        else:
            schedule.advance(q)
        return out

    def append(self, key: Tensor, value: Tensor, position: int) -> None:
        """Write the pairs [R, q, D] of q new tokens, the first at `position`, into their slots."""
        q = key.shape[1]
        if self.frozen:
            self.thaw()
        if self.schedule.now is None:
            self.schedule.look_up(self.positions.device)
        assert self.schedule.now is not None
        slots, width = self.schedule.now
        if (width := width + q - 1) > self.keys.shape[1]:
            self._ensure(width, spare(width, position + q))
        if isinstance(slots, int):
            where: tuple[Any, ...] = (slice(None), slice(slots, slots + q))
            self.keys[where], self.values[where] = key, value
            if self.schedule.drops:
                new = torch.arange(position, position + q, device=key.device) if q > 1 else position
                self.positions[where] = new
                if self.bias is not None and self.log_weights is not None:
                    self.bias[:, 0, slots : slots + q] = 0.0
                self._reset(where)
            elif self.dated[0] < slots + q or self.dated[1] != position - slots:
                # Nothing has been in these slots, nor behind them: all that will be is known.
                end, ahead = self.positions.shape[1], position - slots
                self.positions[:, slots:] = torch.arange(position, end + ahead, device=key.device)
                self.dated = end, ahead
        else:
            self._write(key, value, slots, position)

    def _write(self, key: Tensor, value: Tensor, slots: Tensor, position: Place) -> None:
        """Write the pair [R, 1, D] of one token into each row's slot [R]."""
        if self.numbers is None:
            self.numbers = torch.arange(len(self.positions), device=self.keys.device)
        where = (self.numbers, slots)
        self.keys[where], self.values[where] = key[:, 0], value[:, 0]
        self.positions[where] = position
        if self.bias is not None:
            self.bias[self.numbers, 0, slots] = 0.0
        self._reset(where)

    def _reset(self, where: tuple[Any, ...]) -> None:
        """A new token stands for itself, and has received no attention."""
        if self.mass is not None and self.schedule.needs_decode_attention:
            self.mass[where] = 0.0
        if self.log_weights is not None:
            self.log_weights[where] = 0.0

    def attend(
        self,
        query: Tensor,
        q: int,
        position: Place,
        *,
        scale: float,
        softcap: float | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Attention of q new tokens, appended before, over the slots in use; causal among them.

        The first is at `position`; `hidden`, bool [R, T], are earlier tokens, by position, that
        they do not see. Queries, scale and softcap are those of the function `attend`.
        """
        width = self.keys.shape[1]
        if not self.frozen:
            assert self.schedule.now is not None
            width = self.schedule.now[1] + q - 1

        def used(x: Stored) -> Any:
            if isinstance(x, QuantizedKV):
                return x.up_to(width)
            return x if width == x.shape[1] else x[:, :width]

        keys, values = used(self.keys), used(self.values)
        visible = None if self.bias is None else self.bias[:, :, :width]
        if q > 1 and isinstance(position, int):
            place, last = used(self.positions)[:, None], torch.arange(q, device=query.device)
            visible = (place >= 0) & (place <= position + last[:, None])
            if self.log_weights is not None:
                bias = used(self.log_weights)[:, None].to(query.dtype)
                visible = bias.masked_fill(~visible, -torch.inf)
        if hidden is not None:
            place = used(self.positions).long()
            known = (place >= 0) & (place < hidden.shape[1])
            unseen = (hidden.gather(1, place.clamp(0, hidden.shape[1] - 1)) & known)[:, None]
            if visible is None:
                visible = torch.zeros(unseen.shape, dtype=query.dtype, device=query.device)
            gone = False if visible.dtype == torch.bool else -torch.inf
            visible = visible.masked_fill(unseen, gone)
        if self.inv_freq is not None:
            whole = keys[:, :] if isinstance(keys, QuantizedKV) else keys
            keys = reposition(whole, used(self.positions), position + q - 1, self.inv_freq)
        weighed = self.mass is not None and self.schedule.needs_decode_attention
        plain = q == 1 and softcap is None and not weighed and isinstance(keys, Tensor)
        if varlen.ENABLED and plain and isinstance(values, Tensor) and varlen.applies(query):
            slot = torch.arange(1, width + 1, device=query.device, dtype=torch.int32)
            used_slots = (slot * (used(self.positions) >= 0)).amax(-1)
            return varlen.varlen_attend(query, keys, values, used_slots, visible, scale)
        if self.mass is None or not weighed:
            return attend(query, keys, values, visible, scale=scale, softcap=softcap)
        if self.weights is None or self.weights.shape[2] != width:
            self.weights = torch.empty(*query.shape[:2], width, device=query.device)
        with torch.no_grad():
            weigh(query, keys, visible, self.weights, scale=scale, softcap=softcap)
            R, G, _ = query.shape
            mean = self.weights.new_full((1, 1, 1), 1 / G).expand(R, 1, G)
            used(self.mass)[:, None].baddbmm_(mean, self.weights)
        if query.requires_grad:
            return attend(query, keys, values, visible, scale=scale, softcap=softcap)
        return mixed(self.weights, values)

    def select(self, chosen: np.ndarray, rows: np.ndarray) -> PaddedBlock:
        """A copy holding the block's rows `chosen`, which become the layer's rows `rows`."""
        if self.frozen:
            self.thaw()
        index = torch.from_numpy(chosen).to(self.keys.device)
        return replace(
            self,
            row_numbers=rows,
            rows=_evenly(rows, self.positions.device),
            keys=select(self.keys, index),
            values=select(self.values, index),
            positions=self.positions[index],
            bias=None if self.bias is None else self.bias[index],
            mass=None if self.mass is None else self.mass[index],
            log_weights=None if self.log_weights is None else self.log_weights[index],
            schedule=self.schedule.select(chosen),
            numbers=None,
            weights=None,
            frozen=False,
        )

    def _ensure(self, width: int, ahead: int = 0) -> None:
        """Have `width` slots; where that means to grow, what `ahead` more tokens need as well."""
        if width <= self.keys.shape[1]:
            return
        steps = width - self.schedule.width + 1 + ahead
        more = max(width, self.schedule.most(steps)) - self.keys.shape[1]

        def grown(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((x.shape[0], more, *x.shape[2:]), fill)], dim=1)

        def longer(x: Stored) -> Stored:
            return x.grown(more) if isinstance(x, QuantizedKV) else grown(x, 0)

        lightest = self.schedule.needs_decode_attention
        self.keys, self.values = longer(self.keys), longer(self.values)
        self.positions = grown(self.positions, -1)
        if self.mass is not None:
            self.mass = grown(self.mass, torch.inf if lightest else 0)
        if self.log_weights is not None:
            self.log_weights = grown(self.log_weights, 0)
        if self.bias is not None:
            self.bias = grown(self.bias[:, 0], 0 if self.schedule.shared else -torch.inf)[:, None]


def _evenly(rows: np.ndarray, device: torch.device) -> slice | Tensor:
    """Rising rows as a slice if they are evenly apart, or as an index."""
    apart = set(np.diff(rows).tolist()) or {1}
    if len(apart) == 1:
        return slice(int(rows[0]), int(rows[-1]) + 1, apart.pop())
    return torch.from_numpy(rows).to(device, non_blocking=True)


def gathered(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """The pairs of `rows` [...] at tokens `at` [...] of x [B, H, U, D], in storage of their own.

    [..., D]; where `at` is -1, for an empty slot, any token is copied.
    """
    _, H, U, D = x.shape
    at = at.clamp(min=0)
    if x.transpose(1, 2).is_contiguous():  # as a projection leaves it
        place = rows // H * U + at
        place, flat = place * H + rows % H, x.transpose(1, 2).reshape(-1, D)
    else:
        place, flat = rows * U + at, x.reshape(-1, D)
    return flat.index_select(0, place.flatten()).view(*at.shape, D)


def attend(
    query: Tensor,
    keys: Stored,
    values: Stored,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of G query heads of q tokens each over one row's keys; no key is repeated.

    Args:
        query: [R, G * q, D], the q tokens of each head side by side; so is what is returned.
        keys, values: [R, U, D].
        visible: bool [R, 1 or q, U], or a bias of the logits; None: all.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.
    """
    if visible is not None and (q := visible.shape[1]) not in (1, query.shape[1]):
        visible = visible.repeat(1, query.shape[1] // q, 1)  # for each head of the group
    if softcap is None and isinstance(keys, Tensor) and isinstance(values, Tensor):
        mask = None if visible is None else visible[:, None]
        out = scaled_dot_product_attention(
            query[:, None], keys[:, None], values[:, None], attn_mask=mask, scale=scale
        )
        return out[:, 0]
    return mixed(masked_logits(query, keys, visible, scale, softcap).softmax(dim=-1), values)


def masked_logits(
    query: Tensor, keys: Stored, visible: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """The logits of `attend` in float32 at least, [R, G * q, U]."""
    logits = products(query, keys, scale)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is None:
        return logits
    if visible.dtype == torch.bool:
        return logits.masked_fill(~visible, -torch.inf)
    return logits + visible


def weigh(
    query: Tensor,
    keys: Stored,
    bias: Tensor | None,
    weights: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """The attention weights of `attend`, in place into `weights`, float32 [R, G, U].

    Nothing as large as the cache is allocated in a step.
    """
    if isinstance(keys, Tensor) and query.dtype == weights.dtype:
        torch.bmm(query * scale, keys.mT, out=weights)
    else:
        weights.copy_(products(query, keys, scale))
    if softcap is not None:
        weights.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        weights.add_(bias)
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    weights.div_(weights.sum(-1, keepdim=True))
