"""A budget in bytes: how many tokens fit in a share of the full cache, and in which type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

# From this share of the bytes in 16 bits on, pairs are held in 8 bits, below it in 4: of policies
# that merge evicted tokens into groups, and of those that drop them (docs/quality-more.md).
EIGHT_BITS_FROM, EIGHT_BITS_FROM_DROPPING = 0.12, 0.27
# The prompt, in tokens, whose bytes decide whether all of its tokens fit.
USUAL = 4000
# Types of kept pairs other than the model's own, and their bits.
BITS = {"int8": 8, "int4": 4}
_STEP = 2  # bytes of a step of codes
POSITION = 4  # bytes of a slot's position


class Memory(float):
    """A share, in (0, 1], of the bytes of the full cache in the model's own type."""

    @classmethod
    def of(cls, memory: Any) -> Memory:
        """Return the share that a number or a text gives: 1/16, "6%", "16x", "1/16" or "0.06".

        Raises:
            ValueError: it is no number, or out of range.
        """
        share = math.nan
        try:
            if isinstance(memory, str):
                share = _parsed(memory.strip())
            elif isinstance(memory, Real | Decimal) and not isinstance(memory, bool):
                share = float(memory)
        except (ValueError, ArithmeticError):  # no number, or a division by zero
            pass
        if not 0 < share <= 1:
            raise ValueError(
                f"memory={memory!r}: expected a share of the full cache's bytes above 0 and up to "
                "1, such as 1/16, '6%' or '16x'"
            )
        return cls(share)

    def __str__(self) -> str:
        """Return the share in percent."""
        return f"{100 * self:.3g}%"


def _parsed(text: str) -> float:
    """Return the number of a text such as "16x", or one that `ratio` reads."""
    if text.lower().endswith("x"):
        return 1 / float(text[:-1])
    return ratio(text)


def ratio(text: str) -> float:
    """Return the number of a text such as "1/16", "6%" or "0.06".

    Raises:
        ValueError, ArithmeticError: it is no number, or a division by zero.
    """
    if text.endswith("%"):
        return float(Decimal(text[:-1].strip()) / 100)
    above, slash, below = text.partition("/")
    return float(above) / float(below) if slash else float(above)


# The memory of `mmkv.wrap(model)` without a size: of a 16-bit model, a fifth of the tokens in 8
# bits.
DEFAULT = Memory(1 / 8)


@dataclass(frozen=True)
class Allotment:
    """How a share of the full cache's bytes is used in each key-value head.

    Attributes:
        memory: the share.
        kv_dtype: the type of kept pairs; None: the model's.
        full_pair_bytes: bytes of a pair in the model's type.
        slot_bytes: bytes of a slot: a pair, and what is held beside it.
        group_run: tokens of a run inside which groups are made; 0: no groups are stored.
        fixed_bytes: bytes that a head needs once, for its mean key and exact first tokens.
        keeps_all: whether all tokens fit.
        empty_share: empty slots for each kept pair.
    """

    memory: Memory
    kv_dtype: str | None
    full_pair_bytes: int
    slot_bytes: int
    group_run: int
    fixed_bytes: int
    keeps_all: bool
    empty_share: float = 0.0

    def budget(self, length: int = USUAL) -> float:
        """Return the share of a prompt's tokens that fit, in [0, 1]."""
        if self.keeps_all:
            return 1.0
        slot = self.slot_bytes * (1 + self.empty_share)
        per_token = self.memory * self.full_pair_bytes - self.fixed_bytes / length
        most = min(1.0, max(0.0, per_token / slot))
        index = index_bytes(self.group_run, most) if self.group_run else 0
        return min(1.0, max(0.0, (per_token - index) / slot))


def index_bytes(run: int, share: float) -> float:
    """Return the bytes of a token's code in a head's index of groups, made in runs of `run` tokens.

    The code counts the leaders of its run, forwards or backwards, if the head keeps `share`.
    """
    return ((int(run * share) + 1).bit_length() + 1) / 8


def group(numbers: int) -> int:
    """Return how many of a key's or a value's numbers share a step in 8 or 4 bits."""
    return 64 if numbers % 64 == 0 else numbers


def allot(
    memory: Memory,
    *,
    itemsize: int,
    head_dim: int,
    first: int = 1,
    run: int = 0,
    beside: int = POSITION,
    keeps_all: bool = False,
) -> Allotment:
    """Return how many tokens, and in which type, fit in a share of the full cache's bytes.

    The type is the model's own for a share of 1, 8 bits from `EIGHT_BITS_FROM` of the bytes in 16
    bits on (without groups `EIGHT_BITS_FROM_DROPPING`), else 4 bits. If all tokens fit in that
    type, all are kept.

    Args:
        memory: the share.
        itemsize: bytes of a number in the model's type.
        head_dim: numbers of a key, and of a value.
        first: how many first tokens stay in the model's type if others are in 8 or 4 bits.
        run: tokens of a run inside which evicted tokens are put into groups; 0: they are not.
        beside: bytes that a slot holds beside its pair, see `bytes_beside_pair`.
        keeps_all: whether the policy evicts nothing, so that only the type can change.

    Raises:
        ValueError: the policy keeps all tokens, and these do not fit in 4 bits; or not one fits.
    """
    numbers = 2 * head_dim
    full = itemsize * numbers
    if memory == 1:
        return Allotment(memory, None, full, full, 0, 0, keeps_all=True)
    # float32 or wider; a slot number of 8 bytes for each exact pair.
    once = max(4, itemsize) * head_dim + first * (full + 8)
    groups = numbers // group(head_dim)

    def slot(kv_dtype: str) -> int:
        return -(-numbers * BITS[kv_dtype] // 8) + groups * _STEP + beside

    def fits(kv_dtype: str) -> bool:
        return slot(kv_dtype) * USUAL + once <= memory * full * USUAL

    least = EIGHT_BITS_FROM if run else EIGHT_BITS_FROM_DROPPING
    kv_dtype = "int8" if memory * itemsize / 2 >= least else "int4"
    if keeps_all and not fits(kv_dtype):
        kv_dtype = "int4"
        if not fits(kv_dtype):
            least = (slot(kv_dtype) + once / USUAL) / full
            raise ValueError(
                f"memory={float(memory):.3g} is too little for a policy that keeps all tokens, "
                f"which need {least:.1%} in 4 bits: give more, or use another policy"
            )
    if fits(kv_dtype):
        return Allotment(memory, kv_dtype, full, slot(kv_dtype), 0, once, keeps_all=True)
    found = Allotment(memory, kv_dtype, full, slot(kv_dtype), run, once, keeps_all=False)
    if found.budget() * USUAL < 1:
        raise ValueError(
            f"memory={float(memory):.3g} is too little for one of {USUAL:,} tokens: give more"
        )
    return found
