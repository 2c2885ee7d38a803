"""What goes in and out of the backend: settings, answers, turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmkv.budgets import named, number
from mmkv.cache import quantize
from mmkv.registry import get_policy

from .outcome import Kept

if TYPE_CHECKING:
    from PIL import Image

    from mmkv.policy import Policy

MOST_TOKENS = 512  # of one answer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the controls say.

    Attributes:
        options: of the policy, where they differ from its defaults.
        kv_dtype: "int8" or "int4" to hold what is kept in 8 or 4 bits.
        temperature: 0 takes the likeliest token.
    """

    policy: str = "condense"
    budget: float = 0.2
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    kv_dtype: str | None = None
    max_new_tokens: int = 80
    temperature: float = 0.0
    seed: int = 0

    @property
    def label(self) -> str:
        """What the compressed answer is called."""
        policy, budget = self.chosen()
        size = "" if budget is None else f" {named(budget)}"
        return policy.name + size + ("" if self.kv_dtype is None else f" in {self.kv_dtype}")

    def chosen(self) -> tuple[Policy, float | int | None]:
        """The policy and its budget; None for a policy that takes none.

        Raises:
            ValueError: an unknown policy or type, a wrong option, or a number out of range.
        """
        quantize.check(self.kv_dtype)
        if not 1 <= self.max_new_tokens <= MOST_TOKENS:
            raise ValueError(
                f"max new tokens {self.max_new_tokens}: expected a number from 1 to {MOST_TOKENS}"
            )
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature {self.temperature}: expected a number from 0 to 2")
        policy = get_policy(self.policy, **self.options)
        unsized = policy.keeps_all or policy.retention is not None
        return policy, None if unsized else number(self.budget)


@dataclass(frozen=True)
class Side:
    """One of the two answers as it stands.

    Attributes:
        text: so far, of `tokens` tokens.
        first: seconds of the model's time to the first token, None before it.
        last: seconds to the last one so far, where a server answers.
        rate: tokens a second after the first, None before the second.
        nbytes: of the cache; 0 where that is not known yet.
        full_nbytes: of a full cache of the same tokens; 0 where that is not known.
        kept: the share of the prompt's key-value pairs that is held.
        done: nothing will follow.
    """

    text: str = ""
    tokens: int = 0
    first: float | None = None
    last: float = 0.0
    rate: float | None = None
    nbytes: int = 0
    full_nbytes: int = 0
    kept: float = 1.0
    done: bool = False


@dataclass(frozen=True)
class Turn:
    """A question, the picture that came with it, and its two answers.

    Attributes:
        label: the compressed side's policy and budget.
        full: None where a server answers, with one cache alone.
        notes: what a reader should know.
        kept: what the compressed cache kept of the prompt; None while the answers stream, and
            where a server answers, which does not tell.
        rouge: ROUGE-L F-measure between the answers; None likewise.
        done: the answers have ended.
    """

    question: str
    picture: Image.Image | None
    label: str
    full: Side | None = field(default_factory=Side)
    compressed: Side = field(default_factory=Side)
    notes: tuple[str, ...] = ()
    kept: Kept | None = None
    rouge: float | None = None
    done: bool = False
