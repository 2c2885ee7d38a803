"""What a policy is made of: parts, each a frozen value with its own options and behaviour.

There are six kinds: what scores a token, how a budget is spread over layers and over heads, what
happens while tokens are generated, what becomes of evicted pairs, and what is always kept. A part
is a dataclass that inherits from its kind and is registered by a name; another package adds one as
it adds a policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from mmkv.parts.checks import check_fields

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs
    from mmkv.parts.slots import SlotSchedule
    from mmkv.policy import Policy

KINDS = ("score", "layers", "heads", "decode", "merge", "protect")
# Kinds that a policy may do without: `None`, or "none".
OPTIONAL = ("merge", "protect")
# By kind and name. `mmkv.registry` also knows those of installed packages.
registered: dict[tuple[str, str], type[Part]] = {}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a policy; its fields are its options.

    Raises:
        ValueError: an option of another type, or out of its range.
    """

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the options."""
        check_fields(self)

    def check(self, policy: Policy) -> None:
        """Whether it can be a part of this policy.

        Raises:
            ValueError: with the policy's other parts it means nothing.
        """

    def options(self) -> dict[str, Any]:
        """Its options with their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


class Score(Part):
    """What makes a token important: call it with a layer's inputs.

    Attributes:
        turn_reduction: how a token's score goes on in later turns: "sum", what later queries find
            is added, and the scores of a prompt's chunks add up to the score of all; "max", the
            larger one counts; "", it is forgotten, and only the new queries decide.
        ranks: it tells layers and heads apart; a token's position does not.
        uses_rotary: it reads `LayerInputs.rotary`, or queries and keys before it.
        repeats: it is given the queries of the prompt fed again, see `mmkv.attach.repetition`.
        by_head: what a head scores follows from that head alone, so that it can be found where the
            layer's other heads are not (tensor parallelism).
    """

    kind = "score"
    turn_reduction: ClassVar[Literal["", "sum", "max"]] = ""
    ranks: ClassVar[bool] = True
    uses_rotary: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    by_head: ClassVar[bool] = False

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Score the tokens of one layer; higher = keep.

        Args:
            layer: what its attention had to work with: N tokens, queries of the last Q. Q = N in a
                prompt; in a later turn they are those of the new tokens.

        Returns:
            float32 [B, H, N], or [B, 1, N] for one ranking per layer.
        """
        raise NotImplementedError

    @property
    def uses_size(self) -> bool:
        """Whether it reads `LayerInputs.size`."""
        return False

    @property
    def window_size(self) -> int:
        """How many last tokens observe and are themselves always kept."""
        return 0

    def with_window(self, last: int) -> Score:
        """The same with `last` tokens that observe, for a row too short for more."""
        return self

    @property
    def queries(self) -> int | None:
        """How many of a prompt's last queries it needs at the end; None: all of them."""
        return None

    @property
    def shared_ranking(self) -> bool:
        """Whether a layer's heads share one ranking."""
        return False


class Layers(Part):
    """How many tokens each layer keeps.

    Attributes:
        needs: what it must know of every layer before it can size any: "scores", "similarity" of
            the residual stream around attention, "measure", what its `measure` finds, or nothing.
        retention: the share of importance that decides the total in place of a budget, or None.
        mini_prefill: whether a first pass that stores nothing learns the scores.
        learns: on how many first requests of a task sizes are learned for all; 0: each has its own.
    """

    kind = "layers"
    needs: ClassVar[str] = ""

    @property
    def retention(self) -> float | None:
        """The share of importance that decides the total; None: a budget does."""
        return None

    @property
    def mini_prefill(self) -> bool:
        """Whether a first pass that stores nothing learns the scores."""
        return False

    @property
    def learns(self) -> int:
        """On how many first requests sizes are learned for all others; 0: each has its own."""
        return 0

    def sizes(
        self,
        total: int,
        *,
        n_layers: int,
        length: int,
        floor: int,
        similarity: Tensor | None = None,
        measured: Tensor | None = None,
    ) -> Sequence[float]:
        """Tokens that each layer keeps of one row, fitted to `total` and the bounds afterwards.

        A part that `needs` "scores" has `share_out` in its place.

        Args:
            total: tokens kept over all layers, at least `n_layers * floor`.
            n_layers: L, the compressed layers.
            length: the row's tokens.
            floor: how many of them every layer must keep.
            similarity: [L], of the residual stream around each layer's attention.
            measured: [L], what `measure` found of each layer.
        """
        raise NotImplementedError

    def share_out(
        self, importance: Tensor, spare: Tensor, offered: Tensor
    ) -> Sequence[Sequence[float]]:
        """Tokens that each layer keeps of each row beyond those that it must.

        Args:
            importance: [B, L, C], the scores of tokens that compete, largest first.
            spare: int64 [B], tokens to share out over all layers; the fewest, with `retention`.
            offered: int64 [B], how many of the C there are of each row; the others are 0.

        Returns:
            [B][L].
        """
        raise NotImplementedError

    def measure(self, layer: LayerInputs) -> Tensor:
        """What sizes follow from, where it `needs` "measure": float32 [B], of one layer."""
        raise NotImplementedError


class Heads(Part):
    """How a layer's size is split among its key-value heads.

    Attributes:
        equal: all heads keep as many; nothing is split then.
        is_global: what the heads of all layers keep is shared at once, by `split_all`.
    """

    kind = "heads"
    equal: ClassVar[bool] = False
    is_global: ClassVar[bool] = False

    def split(self, scores: Tensor, spare: int, *, layer_idx: int) -> Tensor:
        """How many of the competing tokens each head keeps of one row.

        Args:
            scores: [H, C]; -inf where a head does not hold the token.
            spare: the mean over heads.
            layer_idx: which layer of the model.

        Returns:
            int64 [H], which adds up to H * spare, each at most C.
        """
        raise NotImplementedError

    def split_rows(self, scores: Tensor, spare: Tensor, *, layer_idx: int) -> Tensor:
        """`split` of B rows, one by one; a part that can do them at once says how.

        Args:
            scores: [B, H, U]; -inf for what does not compete.
            spare: int64 [B], the mean over heads of each row, where there is something to split.
            layer_idx: which layer of the model.

        Returns:
            int64 [B, H], 0 where `spare` is.
        """
        split = scores.new_zeros(scores.shape[:2]).long()
        for b, n in enumerate(spare.tolist()):
            if n > 0:
                row = scores[b][:, (scores[b] > -float("inf")).any(0)]
                split[b] = self.split(row, n, layer_idx=layer_idx).to(split.device)
        return split

    def split_all(self, scores: Tensor, spare: int) -> Tensor:
        """How many of the competing tokens each head of each layer keeps of one row.

        Args:
            scores: [L, H, C]; -inf where a head does not hold the token.
            spare: over all heads; there are as many.

        Returns:
            int64 [L, H], which adds up to `spare`.
        """
        raise NotImplementedError


class Decode(Part):
    """What the budget means for generated tokens.

    Attributes:
        every: after so many generated tokens they compete with all that is held, as a new turn's
            do, but for the `latest` last ones; 0: they never do.
        latest: see `every`.
        needs_decode_attention: what is dropped depends on the attention that slots receive in
            decode steps.
    """

    kind = "decode"
    needs_decode_attention: ClassVar[bool] = False
    every: int = 0
    latest: int = 0

    def schedule(
        self,
        policy: Policy,
        *,
        counts: np.ndarray,
        lengths: np.ndarray,
        protected: np.ndarray,
        capacity: np.ndarray,
        share: np.ndarray | None,
        heads: int,
    ) -> SlotSchedule:
        """Which slots generated tokens take, from each row's sizes after the prefill.

        Args:
            policy: whose part it is.
            counts: [R], tokens kept.
            lengths: [R], tokens of the prompt.
            protected: [R], kept tokens that may never be dropped; they lie in the first slots.
            capacity: [R], the tokens that a budget in tokens, `policy.least`, or the prompt gives.
            share: [R], of the tokens seen, what a budget as a fraction gives; None for others.
            heads: H; row b * H + h is head h of row b of the batch, unless heads differ in size.
        """
        raise NotImplementedError


class Merge(Part):
    """What becomes of the pairs that are evicted."""

    kind = "merge"

    def __call__(
        self, keys: Tensor, values: Tensor, indices: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The kept keys and values [B, H, M, D], with what was evicted merged into them.

        Args:
            keys, values: [B, H, N, D], keys after rotary embedding.
            indices: [B, H, M], kept tokens among the N, -1 as filler at the end.
            positions: [B, 1 or H, N], where each token stands; -1 for padding.
        """
        raise NotImplementedError


class Protect(Part):
    """Tokens that every layer keeps, whatever the scores say."""

    kind = "protect"

    def marks(self, valid: Tensor, asked: Tensor, image: Tensor) -> Tensor:
        """Bool [B, T], the tokens that stay.

        Args:
            valid: bool [B, T], False for padding.
            asked: bool [B, T], True for tokens given in a prompt, False for generated ones.
            image: bool [B, T], True where an image token stands.
        """
        raise NotImplementedError


BASES: dict[str, type[Part]] = {
    cls.kind: cls for cls in (Score, Layers, Heads, Decode, Merge, Protect)
}
P = TypeVar("P", bound=type[Part])


def register_part(name: str) -> Callable[[P], P]:
    """Class decorator: make a part available under `name`, among those of its kind.

    Raises:
        ValueError: the name is taken by another class.
        TypeError: the class inherits from none of the kinds.
    """

    def register(cls: P) -> P:
        if not (isinstance(cls, type) and any(issubclass(cls, base) for base in BASES.values())):
            kinds = ", ".join(base.__name__ for base in BASES.values())
            raise TypeError(f"register_part({name!r}): {cls!r} inherits from none of {kinds}")
        taken = registered.get((cls.kind, name))
        if taken is not None and _path(taken) != _path(cls):
            raise ValueError(f"{cls.kind} part {name!r} is taken by {_path(taken)}")
        cls.name = name
        registered[cls.kind, name] = cls
        return cls

    return register


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
