"""The score of KVzip as a part; what it computes is in `mmkv.repetition`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv.parts import Score, register_part
from mmkv.parts.checks import PositiveInt

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs
    from mmkv.policy import Policy


@register_part("repetition")
@dataclass(frozen=True, kw_only=True)
class Repetition(Score):
    """The most attention that a token gets while the prompt is repeated (KVzip, arXiv 2505.23416).

    The prompt is fed a second time, as the model's own reply, before anything is evicted.

    Options:
        instruction: ids of tokens before the repetition, with blanks between: the tokenizer's for
            "Repeat the previous context exactly." and what begins a reply; None for none.
        repeated: tokens repeated at a time, 1 or more.
        outputs: weigh attention by what it adds to the residual stream (KVzip+).
    """

    instruction: str | None = None
    repeated: PositiveInt = 2048
    outputs: bool = False
    turn_reduction = "max"
    repeats = True
    by_head = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not all(x.isdecimal() for x in (self.instruction or "").split()):
            raise ValueError(
                f"instruction={self.instruction!r}: expected ids of tokens with blanks between, "
                "such as '9690 279'"
            )

    @property
    def ids(self) -> list[int]:
        """The instruction's tokens."""
        return [int(x) for x in (self.instruction or "").split()]

    @property
    def queries(self) -> int:
        """None of the prompt's own."""
        return 0

    def check(self, policy: Policy) -> None:
        """The prompt is repeated once it is read, and generated tokens never are."""
        if policy.layers.mini_prefill:
            raise ValueError(
                f"allocation={policy.flat().get('allocation')!r} sizes layers before the prompt is "
                f"repeated, which score={self.name!r} needs: use allocation='one-pass'"
            )
        if policy.decode.every:
            raise ValueError(
                f"decode={policy.decode.name!r} scores generated tokens, which "
                f"score={self.name!r} does not repeat: use decode='grow' or 'ratio'"
            )

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Of sinks, a part of the prompt, and its repetition, whose queries these are."""
        from mmkv.repetition import most_attention

        return most_attention(layer, outputs=self.outputs)
