"""What a policy is made of: parts, each a frozen value with its own options and behaviour.

There are six kinds: what scores a token, how a budget is spread over layers and over heads, what
happens while tokens are generated, what becomes of evicted pairs, and what is always kept. A part
is a dataclass that inherits from its kind and is registered by a name; its file may lie in
`mmkv.scores`, `mmkv.sizes`, `mmkv.merge`, beside its policy, or in another package.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral, Real
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mmkv.cache.prompt_kv import PromptKV
    from mmkv.cache.selection import Kept, Ranking
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
        """Check every option against its annotation."""
        hints = get_type_hints(type(self), include_extras=True)
        for name, value in self.options().items():
            check(name, value, hints[name])

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
        window: so many last tokens observe, and are themselves always kept.
        queries: how many of a prompt's last queries it needs at the end; None: those of the window,
            or all of them without one.
        turn_reduction: how a token's score goes on in later turns: "sum", what later queries find
            is added, and the scores of a prompt's chunks add up to the score of all; "max", the
            larger one counts; "", it is forgotten, and only the new queries decide.
        average_heads: a layer's heads share one ranking.
        ranks: it tells layers and heads apart; a token's position does not.
        by_head: what a head scores follows from that head alone, so that it can be found where the
            layer's other heads are not (tensor parallelism).
        uses_rotary: it reads `LayerInputs.rotary`, or queries and keys before it.
        repeats: it is given the queries of the prompt fed again, see `mmkv.attach.repetition`.
    """

    kind = "score"
    window: int = 0
    queries: int | None = None
    turn_reduction: Literal["", "sum", "max"] = ""
    average_heads: bool = False
    ranks: bool = True
    by_head: bool = False
    uses_rotary: bool = False
    repeats: bool = False

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


@dataclass(frozen=True, kw_only=True)
class SizeInputs:
    """What the sizes of L layers follow from, for B rows of a batch.

    Attributes:
        totals: tokens kept over all layers of each row, at least L times its floor; the fewest,
            with `Layers.retention`.
        lengths: each row's tokens.
        floors: how many of them every layer must keep.
        n_layers: L, the compressed layers.
        measured: float32 [B, L], on the host, what was measured of each layer.
        scores: [B, L, C], those of the tokens that compete, largest first.
        offered: int64 [B], how many of the C there are of each row; the others are 0.
    """

    totals: Sequence[int]
    lengths: Sequence[int]
    floors: Sequence[int]
    n_layers: int
    measured: Tensor | None = None
    scores: Tensor | None = None
    offered: Tensor | None = None


class Layers(Part):
    """How many tokens each layer keeps: call it with what is known of all of them.

    Attributes:
        needs: what it must know of every layer before it can size any: "scores", "similarity" of
            the residual stream around attention, "measure", what its `measure` finds, or nothing.
        retention: the share of importance that decides the total; None: a budget does.
    """

    kind = "layers"
    needs: ClassVar[str] = ""
    retention: float | None = None

    @property
    def mini_prefill(self) -> bool:
        """Whether a first pass that stores nothing learns the scores."""
        return False

    @property
    def learns(self) -> int:
        """On how many first requests of a task sizes are learned for all; 0: none."""
        return 0

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Tokens that each layer keeps of each row, [B][L], fitted to total and bounds later."""
        raise NotImplementedError

    def measure(self, layer: LayerInputs) -> Tensor:
        """What sizes follow from, where it `needs` "measure": float32 [B], of one layer."""
        raise NotImplementedError


class Heads(Part):
    """How a layer's size is split among its key-value heads: call it with their scores.

    Attributes:
        equal: all heads keep as many; nothing is split.
        is_global: the heads of all layers are split at once, as if they were one layer's.
        profile: the file beside a model's weights whose sizes replace these; "": none does.
        without_profile: what a user is told where there is none; "": nothing.
    """

    kind = "heads"
    equal: ClassVar[bool] = False
    is_global: ClassVar[bool] = False
    profile: ClassVar[str] = ""
    without_profile: ClassVar[str] = ""

    def __call__(self, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
        """How many of the competing tokens each head keeps.

        Args:
            scores: [B, H, C]; -inf for what does not compete.
            totals: int64 [B], over the heads of each row; 0 where nothing is to be split.
            layer_idx: which layer of the model.

        Returns:
            int64 [B, H], which adds up to `totals`, each at most what competes.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """What the slots of a block's R rows follow from.

    Attributes:
        counts: [R], tokens kept.
        lengths: [R], tokens of the prompt.
        protected: [R], kept tokens that may never be dropped; they lie in the first slots.
        capacity: [R], the tokens that a budget in tokens, `policy.least`, or the prompt gives.
        share: [R], of the tokens seen, what a budget as a fraction gives; None for others.
        heads: H; row b * H + h is head h of row b of the batch, unless heads differ in size.
    """

    counts: np.ndarray
    lengths: np.ndarray
    protected: np.ndarray
    capacity: np.ndarray
    share: np.ndarray | None
    heads: int


class Decode(Part):
    """What the budget means for generated tokens.

    Attributes:
        every, latest: after `every` generated tokens they compete with all that is held, as a new
            turn's do, but for the `latest` last ones; 0: they never do.
        needs_decode_attention: what is dropped depends on the attention that slots receive in
            decode steps.
    """

    kind = "decode"
    needs_decode_attention: ClassVar[bool] = False
    every: int = 0
    latest: int = 0

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """Which slots generated tokens take, from each row's sizes after the prefill."""
        raise NotImplementedError


class Merge(Part):
    """What becomes of evicted pairs: call it with all that a layer holds, and their ranking.

    Attributes:
        weighted: attention adds the logarithm of a weight to the logits of the pairs it makes.
        newest: so many of the last tokens are kept as they are.
        fit: for how many queries of the prompt weights are fitted (`PromptKV.readers`).
    """

    kind = "merge"
    weighted: ClassVar[bool] = False
    newest: int = 0
    fit: int = 0

    def __call__(self, held: PromptKV, ranking: Ranking) -> Kept:
        """The pairs that are kept, with what is evicted merged into them, and their weights.

        Args:
            held: the layer's tokens, whole: pairs, positions, and what each stands for already.
            ranking: which of them are kept, and how many; `ranking.kept(held)` drops the others.
        """
        raise NotImplementedError


class Protect(Part):
    """Tokens that every layer keeps, whatever the scores say."""

    kind = "protect"

    def marks(self, valid: Tensor, asked: Tensor, image: Tensor) -> Tensor:
        """Bool [B, T], the tokens that stay.

        All are bool [B, T]: `valid` is False for padding, `asked` True for tokens of a prompt and
        False for generated ones, `image` True for image tokens.
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
        if not (isinstance(cls, type) and issubclass(cls, tuple(BASES.values()))):
            kinds = ", ".join(base.__name__ for base in BASES.values())
            raise TypeError(f"register_part({name!r}): {cls!r} inherits from none of {kinds}")
        taken = registered.get((cls.kind, name))
        if taken is not None and _path(taken) != _path(cls):
            raise ValueError(f"{cls.kind} part {name!r} is taken by {_path(taken)}")
        cls.name = name
        registered[cls.kind, name] = cls
        return cls

    return register


@register_part("instruction")
@dataclass(frozen=True, kw_only=True)
class Instruction(Protect):
    """The prompt's text stays in every layer; image tokens compete, and so do generated ones."""

    def marks(self, valid: Tensor, asked: Tensor, image: Tensor) -> Tensor:
        """Text that was given in a prompt."""
        return valid & asked & ~image


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def discover() -> None:
    """Import every module of the folders that hold parts and policies; each registers its own."""
    for name in ("scores", "sizes", "merge", "parts", "policies"):
        package = importlib.import_module(f"mmkv.{name}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


# Checks of options by their annotations: each message shows the value received.


def check(name: str, value: Any, hint: Any) -> None:
    """Check one option; `Annotated` may say its range by a `partial` of a check by name.

    Raises:
        ValueError: it does not fit.
    """
    notes = getattr(hint, "__metadata__", ())
    hint = hint.__origin__ if notes else hint
    choices = literals(hint)
    if choices and value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {choices}")
    if expected := _other_type(value, hint):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    for note in notes:
        if isinstance(note, partial):
            note(**{name: value})


def at_least(least: float, /, **options: float) -> None:
    """Check that options are `least` or more; else a ValueError."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name}={value}: expected {least:g} or more")


def share(*, zero: bool, **options: float | None) -> None:
    """Check that options are None or at most 1 and above 0 (or 0, `zero`); else a ValueError."""
    for name, value in options.items():
        if value is not None and not (0 <= value <= 1 if zero else 0 < value <= 1):
            raise ValueError(f"{name}={value}: expected a number in {'[' if zero else '('}0, 1]")


NonNegativeInt = Annotated[int, partial(at_least, 0)]
PositiveInt = Annotated[int, partial(at_least, 1)]
NonNegativeFloat = Annotated[float, partial(at_least, 0)]
Share = Annotated[float, partial(share, zero=True)]
PositiveShare = Annotated[float, partial(share, zero=False)]


def literals(hint: Any) -> list[Any]:
    """The allowed values of a Literal, or of a union of one with None; [] for any other hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    found = [v for arg in get_args(hint) for v in literals(arg)]
    return [*found, None] if found and type(None) in get_args(hint) else found


def _other_type(value: Any, hint: Any) -> str:
    """What a field takes, where its value is of another type; "" where it fits."""
    hints = get_args(hint) or (hint,)
    if value is None and type(None) in hints:
        return ""
    for kind, fits, expected in (
        (bool, isinstance(value, bool), "True or False"),
        (int, isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
        (float, isinstance(value, Real) and not isinstance(value, bool), "a number"),
    ):
        if kind in hints:
            return "" if fits else expected
    return ""
