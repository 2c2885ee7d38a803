"""A layer's blocks: which token each slot holds, and attention to the slots.

A row is one key-value head of one sequence; a layer has R = B * H rows. Rows that keep similar
numbers of tokens share a block [R', S, D]; equal rows make a single block. Each block is one
attention call, so per-head sizes free memory without a loop over heads. `PlainKV` and
`QuantizedKV` hold the pairs of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.forward_pass import GraphInputs
from mmkv.cache.kernels import attend, weigh
from mmkv.cache.products import Pairs, weighted_sums
from mmkv.decode.slots import SlotSchedule, spare
from mmkv.tensors import send


@dataclass(frozen=True)
class Step:
    """A step of q new tokens; the same for all blocks of a layer.

    Attributes:
        first: the position of the first new token.
        q: how many new tokens there are.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.
        graph_inputs: position and slots of a step that a CUDA graph replays; None: no graph does.
    """

    first: int
    q: int
    scale: float
    softcap: float | None = None
    graph_inputs: GraphInputs | None = None

    @property
    def position(self) -> int | Tensor:
        """The first position; a tensor in a replayed step."""
        return self.first if self.graph_inputs is None else self.graph_inputs.position


@dataclass(eq=False)
class PaddedBlock:
    """Rows of similar length and the slots they share.

    Attributes:
        row_numbers: numbers of these rows among the layer's B * H, ascending, on the host.
        positions: int32 [R, S], original position of each slot's token, -1 if empty; if decoding
            drops no token, also the positions of tokens to come, which `held` leaves out. S is the
            capacity, of which the schedule's `width` is in use.
        schedule: chooses the slot of each new token.
        dtype: the model's type, which `bias` has.
        scores: [R, S], the importance of the prompt's tokens, which the next turn updates; 0 for
            generated tokens. float32 if scores are added up, bfloat16 if the largest counts; None
            if no turn reads scores of earlier ones.
        bias: [R, 1, S], added to the logits: -inf for an empty slot, else the logarithm of its
            weight, 0 for one token; None if it would be 0 for all slots in use, unless a graph
            replays steps. It is no bool mask, which torch would convert to a bias in every step.
        weighted: whether slots have weights (`Merge.weighted`); if so, there is a `bias`.
    """

    row_numbers: np.ndarray
    positions: Tensor
    schedule: SlotSchedule
    dtype: torch.dtype
    scores: Tensor | None = None
    bias: Tensor | None = None
    weighted: bool = False
    # Whether shapes are fixed, so that a CUDA graph can replay steps (`freeze`).
    frozen: bool = False
    # If decoding drops no token: the number of slots that have a position, those of tokens to come
    # included, and the difference between position and slot.
    positions_ahead: tuple[int, int] = (0, 0)

    def freeze(self, steps: int) -> None:
        """Allocate slots for `steps` steps and fix shapes, so that a CUDA graph can replay them.

        These steps attend to all slots; the bias masks the empty ones.
        """
        self._ensure(self.schedule.slots_needed(steps))
        self.frozen = True
        self.bias = self._slot_bias()

    def thaw(self) -> None:
        """Undo `freeze`: a step attends to the first `width` slots of the schedule."""
        self.frozen = False
        self.set_bias(self.schedule.width - 1)

    def set_bias(self, width: int) -> None:
        """Set the bias of steps that attend to the first `width` slots and the new token."""
        if self.schedule.gapless and not self.weighted:
            self.bias = None
            return
        self.bias = self._slot_bias()
        if self.schedule.shared:  # slots from there on are not attended to before they are filled
            self.bias[:, :, width:] = 0.0

    def _slot_bias(self) -> Tensor:
        """Return the bias [R, 1, S]: -inf for empty slots, else the logarithm of the weight."""
        empty = (self.held if self.positions_ahead[0] else self.positions)[:, None] < 0
        if self.weighted and self.bias is not None:
            return self.bias.masked_fill(empty, -torch.inf)
        bias = torch.zeros(empty.shape, dtype=self.dtype, device=empty.device)
        return bias.masked_fill_(empty, -torch.inf)

    @property
    def log_weights(self) -> Tensor | None:
        """The logarithm of each slot's weight, [R, S], 0 if empty; None: each has one token."""
        if not self.weighted or self.bias is None:
            return None
        return self.bias[:, 0].masked_fill(self.held < 0, 0.0)

    @property
    def fits(self) -> bool:
        """Whether a graph can replay the next step: the block is frozen and has a slot for it."""
        return self.frozen and self.schedule.width <= self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of positions, scores and biases."""
        of_slots = self.positions, self.scores, self.bias
        return sum(x.untyped_storage().nbytes() for x in of_slots if x is not None)

    @property
    def capacity(self) -> int:
        """The number of slots of each row, S."""
        return self.positions.shape[1]

    @property
    def accumulators(self) -> list[Tensor]:
        """The tensors that a step adds to: they must be restored before the step is run again."""
        return []

    @property
    def held(self) -> Tensor:
        """Positions [R, S] of kept tokens, -1 for an empty slot and for the next token's."""
        if not self.schedule.drops:
            slot_numbers = torch.arange(self.capacity, device=self.positions.device)
            return self.positions.masked_fill(slot_numbers >= self.schedule.used, -1)
        if not self.capacity:  # no row keeps a token
            return self.positions
        slots = self.schedule.slots(self.positions.device)
        if isinstance(slots, int):
            if slots >= self.capacity:
                return self.positions
            slots = torch.full(self.positions.shape[:1], slots, device=self.positions.device)
        inside = slots.clamp(max=self.capacity - 1)[:, None]
        kept = self.positions.gather(1, inside).masked_fill((slots[:, None] == inside), -1)
        return self.positions.scatter(1, inside, kept)

    def append(self, step: Step) -> int | Tensor:
        """Give each new token a slot and record its position; the caller writes its pair.

        Returns:
            The first of q consecutive slots, the same for all rows; or int64 [R or 1], the
            slot of one token in each row.
        """
        if step.graph_inputs is None:
            return self._append(step.q, step.first)
        slots = self.schedule.slots_at(step.graph_inputs.row)
        self._fill(slots, step.graph_inputs.position)
        return slots

    def attend(self, query: Tensor, pairs: Pairs, masked: Tensor | None, step: Step) -> Tensor:
        """Attend from the q appended tokens to the slots in use, causal among them; count the step.

        Args:
            query: [R, G * q, D].
            pairs: of the slots in use, `width_of`.
            masked: bool [R, T], True at positions that the attention mask hides; None: none.
            step: the step.

        Returns:
            [R, G * q, Dv].
        """
        visible = self._visible(query, step, self.width_of(step.q), masked)
        out = self._attend(query, pairs, visible, step)
        self._advance(step)
        return out

    def _advance(self, step: Step) -> None:
        """Count the step, so that the schedule gives the next step's slots."""
        self.schedule.now = None
        self.schedule.advance(step.q)

    def _append(self, q: int, position: int) -> int | Tensor:
        """Do what `append` does in a step that is not replayed; `position` is the first."""
        device = self.positions.device
        if self.frozen:
            self.thaw()
        if self.schedule.now is None:
            self.schedule.set_now(device)
        assert self.schedule.now is not None
        slots, width = self.schedule.now
        if (width := width + q - 1) > self.capacity:
            self._ensure(width, spare(width, position + q))
        if not isinstance(slots, int):
            self._fill(slots, position)
        elif self.schedule.drops:
            at = torch.arange(position, position + q, device=device) if q > 1 else position
            self.positions[:, slots : slots + q] = at
            if self.bias is not None:
                self.bias[:, 0, slots : slots + q] = 0.0
        elif self.positions_ahead[0] < slots + q or self.positions_ahead[1] != position - slots:
            # These slots and all after them are empty, so their later positions are known.
            end, offset = self.capacity, position - slots
            self.positions[:, slots:] = torch.arange(position, end + offset, device=device)
            self.positions_ahead = end, offset
        return slots

    def _fill(self, slots: Tensor, position: int | Tensor) -> None:
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

    def _attend(self, query: Tensor, pairs: Pairs, visible: Tensor | None, step: Step) -> Tensor:
        """Attend to `visible` slots, see the function `attend`."""
        replayed = step.graph_inputs is not None
        return attend(query, *pairs, visible, step.scale, step.softcap, replayed=replayed)

    def width_of(self, q: int) -> int:
        """Return how many slots a step of q tokens attends to, theirs included."""
        if self.frozen:
            return self.capacity
        assert self.schedule.now is not None
        return self.schedule.now[1] + q - 1

    def _visible(
        self, query: Tensor, step: Step, width: int, masked: Tensor | None
    ) -> Tensor | None:
        """Return `visible` of the function `attend` for the queries of q new tokens."""
        visible = None if self.bias is None else self.bias[:, :, :width]
        places = self.positions[:, :width]
        if step.q > 1:
            place, offset = places[:, None], torch.arange(step.q, device=query.device)
            visible = (place >= 0) & (place <= step.first + offset[:, None])
            if self.weighted and self.bias is not None:
                bias = self.bias[:, :, :width].to(query.dtype)
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

    def select(self, chosen: np.ndarray, rows: np.ndarray) -> Self:
        """Return a copy of the block's rows `chosen`, which become the layer's rows `rows`."""
        if self.frozen:
            self.thaw()
        index = send(chosen, self.positions.device)

        def of(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[index]

        return replace(
            self,
            row_numbers=rows,
            positions=self.positions[index],
            schedule=self.schedule.select(chosen),
            scores=of(self.scores),
            bias=of(self.bias),
        )

    def _ensure(self, width: int, n_reserved: int = 0) -> None:
        """Grow to at least `width` slots; if it has to grow, then for `n_reserved` more tokens."""
        if width <= self.capacity:
            return
        steps = width - self.schedule.width + 1 + n_reserved
        self._grow(max(width, self.schedule.slots_needed(steps)) - self.capacity)

    def _grow(self, n_new: int) -> None:
        """Add empty slots to all tensors."""
        self.positions = pad(self.positions, (0, n_new), value=-1)
        if self.scores is not None:
            self.scores = pad(self.scores, (0, n_new))
        if self.bias is not None:
            self.bias = pad(self.bias, (0, n_new), value=0 if self.schedule.shared else -torch.inf)


@dataclass(eq=False)
class AccumulatingBlock(PaddedBlock):
    """A block that adds up the attention to each slot, by which decoding drops tokens (H2O, TOVA).

    Each step adds its attention to `scores`, which are never None here; an empty slot has inf.
    """

    # The attention weights [R, G, S] of a step; allocated when first needed.
    weights: Tensor | None = field(default=None, init=False)

    @property
    def accumulated(self) -> Tensor:
        """The attention that each slot got so far, float32 [R, S]."""
        assert self.scores is not None
        return self.scores

    @property
    def accumulators(self) -> list[Tensor]:
        """The accumulated attention, and the slots that the last step freed."""
        freed: Tensor | None = getattr(self.schedule, "freed", None)
        return [self.accumulated] if freed is None else [self.accumulated, freed]

    def append(self, step: Step) -> int | Tensor:
        """Append as other blocks do, and set the attention of the new tokens' slots to 0."""
        slots, scores = super().append(step), self.accumulated
        if isinstance(slots, int):
            scores[:, slots : slots + step.q] = 0.0
        else:
            scores.scatter_(1, slots.expand(len(scores))[:, None], 0.0)
        return slots

    def _advance(self, step: Step) -> None:
        """Choose the tokens to drop, and count the step."""
        self.schedule.drop(self.accumulated, self.positions, step.position)
        super()._advance(step)

    def _attend(self, query: Tensor, pairs: Pairs, visible: Tensor | None, step: Step) -> Tensor:
        """Attend as other blocks do, and add the attention that each slot gets to its score."""
        width = self.width_of(step.q)
        if self.weights is None or self.weights.shape[2] != width:
            self.weights = torch.empty(
                *query.shape[:2], width, dtype=torch.float32, device=query.device
            )
        weights, (R, G, _) = self.weights, query.shape
        with torch.no_grad():
            weigh(query, pairs[0], visible, weights, step.scale, step.softcap)
        mean = weights.new_full((1, 1, 1), 1 / G).expand(R, 1, G)
        self.accumulated[:, None, :width].baddbmm_(mean, weights)
        if query.requires_grad:
            return attend(query, *pairs, visible, step.scale, step.softcap)
        return weighted_sums(weights, pairs[1])

    def _grow(self, n_new: int) -> None:
        """Add empty slots, whose score is inf."""
        scores = pad(self.accumulated, (0, n_new), value=torch.inf)
        super()._grow(n_new)
        self.scores = scores


def block_of(
    row_numbers: np.ndarray,
    positions: Tensor,
    schedule: SlotSchedule,
    dtype: torch.dtype,
    scores: Tensor | None,
    log_weights: Tensor | None,
    width: int,
) -> PaddedBlock:
    """Return the block of these rows, of which the first `width` slots are in use."""
    if schedule.needs_decode_attention:
        assert scores is not None
        scores = scores.masked_fill(positions < 0, torch.inf)
    kind = AccumulatingBlock if schedule.needs_decode_attention else PaddedBlock
    bias = None if log_weights is None else log_weights[:, None].to(dtype)
    block = kind(row_numbers, positions, schedule, dtype, scores, bias, bias is not None)
    block.set_bias(width)
    return block
