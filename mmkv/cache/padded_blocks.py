"""Storage of kept keys and values: a few rectangular blocks of rows of similar length.

A row is one key-value head of one sequence; a layer has R = B * H rows. Rows that keep similar
numbers of tokens share a block [R', S, D]; equal rows make a single block. Each block is one
attention call, so per-head sizes free memory without a loop over heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmkv.cache.forward_pass import GraphInputs
from mmkv.cache.plain import PlainKV
from mmkv.cache.products import Coded, mixed, needs_gradient, products
from mmkv.cache.quantize import QuantizedKV
from mmkv.parts.slots import SlotSchedule, spare

aten: Any = torch.ops.aten

# A position: a tensor while a clock drives the steps, which are then replayed on the device.
Place = int | Tensor


@dataclass(eq=False)
class PaddedBlock:
    """Rows of similar length and the slots they share.

    Attributes:
        row_numbers: numbers of these rows among the layer's B * H, ascending, on the host.
        rows: the same as an index: a slice if they are evenly spaced, so that indexing returns a
            view, else int64 [R].
        stored: keys [R, S, D] and values [R, S, Dv]; S is the capacity, of which the schedule's
            `width` is in use.
        positions: int32 [R, S], original position of each slot's token, -1 if empty; if decoding
            drops no token, also the positions of tokens to come, which `held` leaves out.
        bias: [R, 1, S], added to the logits: 0 for filled slots, -inf for empty ones; None while
            all slots in use are filled. A bool mask would be converted to a bias in every step.
        mass: float32 [R, S], accumulated attention of each slot, for policies that score by it;
            if decoding also drops by it (H2O), each step adds to it, and empty slots have inf.
        schedule: chooses the slot of each new token.
        log_weights: float32 [R, S], the logarithm of each slot's weight, which is part of the
            bias; None: every slot stands for one token.
    """

    row_numbers: np.ndarray
    rows: slice | Tensor = field(init=False)
    stored: PlainKV | QuantizedKV
    positions: Tensor
    mass: Tensor | None
    schedule: SlotSchedule
    log_weights: Tensor | None = None
    bias: Tensor | None = None
    # The attention weights [R, G, S] of a step; allocated when first needed.
    weights: Tensor | None = None
    # Whether a clock drives the steps (`freeze`).
    frozen: bool = False
    # How many slots have positions written ahead, and the difference between position and slot.
    positions_ahead: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Make an index of the row numbers."""
        numbers, device = self.row_numbers, self.positions.device
        distances = set(np.diff(numbers).tolist()) or {1}
        if len(distances) == 1:
            self.rows = slice(int(numbers[0]), int(numbers[-1]) + 1, distances.pop())
        else:
            self.rows = torch.from_numpy(numbers).to(device, non_blocking=True)

    def freeze(self, steps: int) -> None:
        """Allocate for up to `steps` steps of fixed shape, whose changes stay on the device.

        These steps attend to every slot; the bias masks the empty ones.
        """
        self._ensure(self.schedule.most(steps))
        self.frozen = True
        self.bias = self.slot_bias()

    def thaw(self) -> None:
        """Return to steps that the host drives: shapes follow the schedule's `width`."""
        self.frozen = False
        self.set_bias(self.schedule.width - 1)

    def set_bias(self, width: int) -> None:
        """Set the bias of steps that attend to the first `width` slots and the new token."""
        self.bias = None
        if self.schedule.gapless and self.log_weights is None:
            return
        self.bias = self.slot_bias()
        if self.schedule.shared:  # slots from there on are not attended to before they are filled
            self.bias[:, :, width:] = 0.0

    def slot_bias(self) -> Tensor:
        """Return the bias [R, 1, S]: -inf for empty slots, else the logarithm of the weight."""
        empty = (self.held if self.positions_ahead[0] else self.positions)[:, None] < 0
        bias = torch.zeros(empty.shape, dtype=self.stored.dtype, device=empty.device)
        if self.log_weights is not None:
            bias += self.log_weights[:, None]
        return bias.masked_fill_(empty, -torch.inf)

    @property
    def fits(self) -> bool:
        """Whether a clock can drive the next step: the block is frozen and has a slot for it."""
        return self.frozen and self.schedule.width <= self.positions.shape[1]

    @property
    def accumulators(self) -> list[Tensor]:
        """Tensors that a step updates from their old values; a repeated step would change them."""
        tensors = (self.mass, getattr(self.schedule, "freed", None))
        return [x for x in tensors if x is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of keys, values and weights, empty slots included."""
        weight_bytes = (
            0 if self.log_weights is None else self.log_weights.untyped_storage().nbytes()
        )
        return self.stored.nbytes + weight_bytes

    def nbytes_of(self, slots: int) -> int:
        """Return the bytes of the block with so many slots."""
        weight_bytes = 0 if self.log_weights is None else self.log_weights.element_size()
        return len(self.positions) * (self.stored.nbytes_of(slots) + slots * weight_bytes)

    @property
    def held(self) -> Tensor:
        """Positions [R, S] of kept tokens, -1 if empty; the next token's slot counts as empty."""
        if not self.schedule.drops:
            slot_numbers = torch.arange(self.positions.shape[1], device=self.positions.device)
            return self.positions.masked_fill(slot_numbers >= self.schedule.used, -1)
        slots = self.schedule.slots(self.positions.device)
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
        """Write the pairs of q new tokens, attend to all slots, and drop the tokens they displace.

        Queries are [R, G * q, D], keys and values [R, q, D], `first` is the first one's position.
        A clock, unless it is None, drives the step instead of the host.
        """
        q = key.shape[1]
        place: Place = first if clock is None else clock.position
        if clock is None:
            self.append(key, value, first)
        else:
            slots = self.schedule.slots_at(clock.row)
            self.stored.place(key, value, slots, clock.place)
            self._fill(slots, clock.position)
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
        if (width := width + q - 1) > self.stored.slots:
            self._ensure(width, spare(width, position + q))
        self.stored.write(key, value, slots, position)
        if not isinstance(slots, int):
            self._fill(slots, position)
        elif self.schedule.drops:
            where = (slice(None), slice(slots, slots + q))
            new = torch.arange(position, position + q, device=key.device) if q > 1 else position
            self.positions[where] = new
            if self.bias is not None and self.log_weights is not None:
                self.bias[:, 0, slots : slots + q] = 0.0
            for x in self._zero_for_new:
                x[where] = 0.0
        elif self.positions_ahead[0] < slots + q or self.positions_ahead[1] != position - slots:
            # These slots and all after them are empty, so their later positions are known.
            end, offset = self.positions.shape[1], position - slots
            self.positions[:, slots:] = torch.arange(position, end + offset, device=key.device)
            self.positions_ahead = end, offset

    def _fill(self, slots: Tensor, position: Place) -> None:
        """Put one token into each row's slot [R or 1]."""
        # On CUDA `x[rows, slots] = number` sends the number, which makes the host wait and cannot
        # be captured; `scatter_` takes it as an argument.
        index = slots.expand(len(self.positions))[:, None]
        if isinstance(position, int):
            self.positions.scatter_(1, index, position)
        else:
            self.positions.scatter_(1, index, position.expand(index.shape))
        if self.bias is not None:
            self.bias[:, 0].scatter_(1, index, 0.0)
        for x in self._zero_for_new:
            x.scatter_(1, index, 0.0)

    @property
    def _zero_for_new(self) -> list[Tensor]:
        """Tensors [R, S] that are 0 for a new token: log weight and accumulated attention."""
        mass = self.mass if self.schedule.needs_decode_attention else None
        return [x for x in (mass, self.log_weights) if x is not None]

    def attend(
        self,
        query: Tensor,
        q: int,
        position: Place,
        *,
        scale: float,
        softcap: float | None,
        masked: Tensor | None = None,
    ) -> Tensor:
        """Attend from q new tokens, already appended, to the slots in use; causal among the new.

        `position` is that of the first; `masked`, bool [R, T], is True at the positions that the
        attention mask hides. Queries, scale and softcap are those of the function `attend`.
        """
        width = self.stored.slots
        if not self.frozen:
            assert self.schedule.now is not None
            width = self.schedule.now[1] + q - 1
        visible = self._visible(query, q, width, position, masked)
        accumulates = self.mass is not None and self.schedule.needs_decode_attention
        if accumulates and (self.weights is None or self.weights.shape[2] != width):
            self.weights = torch.empty(*query.shape[:2], width, device=query.device)
        whole, out = softcap is not None, list[Tensor]()
        options: Any = {"scale": scale, "softcap": softcap}
        for rows, keys, values in self.stored.parts(width, whole=whole):
            seen = None if visible is None else visible[rows]
            if accumulates and self.weights is not None:
                with torch.no_grad():
                    weigh(query[rows], keys, seen, self.weights[rows], **options)
                if not query.requires_grad:
                    out.append(mixed(self.weights[rows], values))
                    continue
            out.append(attend(query[rows], keys, values, seen, **options))
        if accumulates and self.mass is not None and self.weights is not None:
            R, G, _ = query.shape
            mean = self.weights.new_full((1, 1, 1), 1 / G).expand(R, 1, G)
            self.mass[:, None, :width].baddbmm_(mean, self.weights)
        return out[0] if len(out) == 1 else torch.cat(out)

    def _visible(
        self, query: Tensor, q: int, width: int, position: Place, masked: Tensor | None
    ) -> Tensor | None:
        """Return what the queries of q new tokens see, as `visible` of the function `attend`."""
        visible = None if self.bias is None else self.bias[:, :, :width]
        places = self.positions[:, :width]
        if q > 1 and isinstance(position, int):
            place, offset = places[:, None], torch.arange(q, device=query.device)
            visible = (place >= 0) & (place <= position + offset[:, None])
            if self.log_weights is not None:
                bias = self.log_weights[:, None, :width].to(query.dtype)
                visible = bias.masked_fill(~visible, -torch.inf)
        if masked is not None:
            place = places.long()
            in_range = (place >= 0) & (place < masked.shape[1])
            unseen = (masked.gather(1, place.clamp(0, masked.shape[1] - 1)) & in_range)[:, None]
            if visible is None:
                visible = torch.zeros(unseen.shape, dtype=query.dtype, device=query.device)
            masked_value = False if visible.dtype == torch.bool else -torch.inf
            visible = visible.masked_fill(unseen, masked_value)
        return visible

    def select(self, chosen: np.ndarray, rows: np.ndarray) -> PaddedBlock:
        """Return a copy of the block's rows `chosen`, which become the layer's rows `rows`."""
        if self.frozen:
            self.thaw()
        index = torch.from_numpy(chosen).to(self.positions.device)
        return replace(
            self,
            row_numbers=rows,
            stored=self.stored.index_select(index),
            positions=self.positions[index],
            bias=None if self.bias is None else self.bias[index],
            mass=None if self.mass is None else self.mass[index],
            log_weights=None if self.log_weights is None else self.log_weights[index],
            schedule=self.schedule.select(chosen),
            weights=None,
            frozen=False,
        )

    def _ensure(self, width: int, n_reserved: int = 0) -> None:
        """Grow to at least `width` slots; if it has to grow, then for `n_reserved` more tokens."""
        if width <= self.stored.slots:
            return
        steps = width - self.schedule.width + 1 + n_reserved
        n_new = max(width, self.schedule.most(steps)) - self.stored.slots

        def grown(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((x.shape[0], n_new, *x.shape[2:]), fill)], dim=1)

        lightest = self.schedule.needs_decode_attention
        self.stored = self.stored.grown(n_new)
        self.positions = grown(self.positions, -1)
        if self.mass is not None:
            self.mass = grown(self.mass, torch.inf if lightest else 0)
        if self.log_weights is not None:
            self.log_weights = grown(self.log_weights, 0)
        if self.bias is not None:
            self.bias = grown(self.bias[:, 0], 0 if self.schedule.shared else -torch.inf)[:, None]


def gathered(x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Copy the pairs of `rows` [...] at `tokens` [...] out of x [B, H, U, D]: [..., D].

    For an empty slot `tokens` is -1, and any token is copied.
    """
    _, H, U, D = x.shape
    tokens = tokens.clamp(min=0)
    if x.transpose(1, 2).is_contiguous():  # the layout of a projection's output
        place = rows // H * U + tokens
        place, flat = place * H + rows % H, x.transpose(1, 2).reshape(-1, D)
    else:
        place, flat = rows * U + tokens, x.reshape(-1, D)
    return flat.index_select(0, place.flatten()).view(*tokens.shape, D)


def attend(
    query: Tensor,
    keys: Tensor | Coded,
    values: Tensor | Coded,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attend from q tokens of G query heads to one row's keys, without repeating keys.

    On CUDA the kernels are named, as the default choice (cuDNN on Hopper) plans a kernel for each
    new number of slots, half a second each. Flash attention takes no bias; the efficient kernel
    does not split a row; so with a bias two matrix products and a softmax are faster (docs/gpu).

    Args:
        query: [R, G * q, D], the q tokens of each head together; the output has the same shape.
        keys, values: [R, U, D].
        visible: bool [R, 1 or q, U], or a bias of the logits; None: all are visible.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.
    """
    if visible is not None and (q := visible.shape[1]) not in (1, query.shape[1]):
        visible = visible.repeat(1, query.shape[1] // q, 1)  # for each head of the group
    if softcap is None and isinstance(keys, Tensor) and isinstance(values, Tensor):
        rows = query[:, None], keys[:, None], values[:, None]
        if not query.is_cuda:
            mask = None if visible is None else visible[:, None]
            return scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale)[:, 0]
        if visible is None and flash_takes(query):
            return aten._scaled_dot_product_flash_attention(*rows, scale=scale)[0][:, 0]
    logits = products(query, keys, scale)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None and visible.dtype == torch.bool:
        logits = logits.masked_fill(~visible, -torch.inf)
    elif visible is not None:
        logits = logits + visible
    return mixed(logits.softmax(dim=-1), values)


def flash_takes(query: Tensor) -> bool:
    """Return whether torch's flash attention computes these queries [R, Q, D] on CUDA."""
    D = query.shape[-1]
    return query.itemsize == 2 and D % 8 == 0 and D <= 256 and not needs_gradient(query)


def weigh(
    query: Tensor,
    keys: Tensor | Coded,
    bias: Tensor | None,
    weights: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """Write the attention weights of `attend` into `weights`, float32 [R, G, U].

    In place, so that a step allocates nothing as large as the cache.
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
