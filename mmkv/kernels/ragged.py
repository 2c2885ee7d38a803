"""What decoding kernels are given: rows of different length side by side in flat memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RaggedStore(NamedTuple):
    """Slots of R rows in flat memory: slot `s` of row `r` lies at `starts[r] + s`.

    Attributes:
        keys: [N, D].
        values: [N, Dv].
        positions: int32 [N], where each slot's token stood.
        log_weights: float32 [N], the logarithm of what a slot weighs, which is added to its logits;
            None: every slot stands for one token.
        mass: float32 [N], attention accumulated by each slot; None where nothing reads it.
        starts: int64 [R].
        lengths: int32 [R], slots in use; what lies behind them is never read.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_weights: Tensor | None
    mass: Tensor | None
    starts: Tensor
    lengths: Tensor


class StepInputs(NamedTuple):
    """What a step reads on the device, so that it does not depend on the host.

    Attributes:
        slots: int64 [A, R], the new token's slot by step; [A, 1] for all rows,
            [A, U] with `entries`, or [1, R] for whatever step.
        entries: int64 [R], the column of `slots` that is each row's, where there are U; else None.
        line: int64 [1], the line of `slots` that is this step's.
        position: int32 [], the new token's.
        most: slots that a row has room for, at the most.
    """

    slots: Tensor
    entries: Tensor | None
    line: Tensor
    position: Tensor
    most: int


class Lightest(NamedTuple):
    """Which token a step drops where that depends on attention (H2O, TOVA).

    Attributes:
        freed: int64 [R], the slot that the next token takes; the step's own before.
        protected: int32 [R], how many first slots are never freed.
        recent: int32 [R], how many of the newest tokens are not, at least 1.
        capacity: int32 [R], tokens held; until a row has them, fresh slots are taken.
        places: int64 [R, n], where the prompt's last tokens stand, over whose padding recent ones
            are counted; None where there is no padding between.
        end: where the prompt ends.
        heads: rows that hold the same tokens in the same slots and drop together, by the mean of
            this step's attention alone; 1: each by itself, by what it has accumulated.
    """

    freed: Tensor
    protected: Tensor
    recent: Tensor
    capacity: Tensor
    places: Tensor | None
    end: int
    heads: int
