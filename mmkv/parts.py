"""The parts of a policy, each a frozen value with its own options and behaviour.

There are six kinds: a token's score, layer sizes, head sizes, what happens while tokens are
generated, how evicted pairs are merged, and which tokens are pinned. A part is a dataclass
that inherits from its kind and is registered by a name; its file may lie in `mmkv.scores`,
`mmkv.sizes`, `mmkv.merge`, `mmkv.decode`, with its policy in `mmkv.policies`, or in another
package.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_type_hints

from mmkv.names import check_new
from mmkv.option_types import check

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mmkv.cache.prompt_kv import PromptKV
    from mmkv.cache.selection import Kept, Ranking
    from mmkv.decode.slots import SlotSchedule
    from mmkv.layer_inputs import LayerInputs
    from mmkv.policy import Policy

KINDS = ("score", "layers", "heads", "decode", "merge", "protect")
# Kinds that may be missing in a policy: `None`, or "none" as a name.
OPTIONAL = ("merge", "protect")
# Part classes by kind and name. `mmkv.registry` adds those of installed packages.
registered: dict[tuple[str, str], type[Part]] = {}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a policy; its fields are its options.

    Raises:
        ValueError: an option, or another annotated attribute, has another type or is out of its
            range.
    """

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every annotated attribute against its annotation."""
        for name, hint in _hints(type(self)).items():
            if hasattr(self, name):
                check(name, getattr(self, name), hint)

    def check(self, policy: Policy) -> None:
        """Check that this part goes together with the policy's other parts and options.

        Raises:
            ValueError: it does not.
        """

    def options(self) -> dict[str, Any]:
        """Return the options with their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


class Score(Part):
    """The importance of a token: call it with a layer's inputs.

    Attributes:
        window: how many last tokens observe; these tokens are pinned.
        queries: how many of a prompt's last queries the score needs at its end; None: those of the
            window, or all queries if there is no window.
        turn_reduction: how a token's score is updated in later turns: "sum", the new score is added
            (and the scores of a prompt's chunks add up to the score of the whole prompt); "max",
            the larger score counts, and all scores must be 0 or more; "", only the new score
            counts.
        average_heads: a layer's heads share one ranking.
        ranks: scores differ between layers and heads; False for scores by position alone.
        by_head: a head's scores depend on that head alone, so they can be computed where the
            layer's other heads are missing (tensor parallelism).
        uses_rotary: the score reads `LayerInputs.rotary`, or queries and keys before rotation.
        repeats: the score reads the queries of the prompt fed again (`mmkv.attach.repetition`).
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
            layer: keys and values of N tokens, and queries of the last Q. Q = N in a prompt; in a
                later turn the Q queries are those of the new tokens.

        Returns:
            float32 [B, H, N], or [B, 1, N] for one ranking per layer.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SizeInputs:
    """The inputs from which the sizes of L layers are computed, for B rows of a batch.

    Attributes:
        totals: [B], tokens kept over all layers, at least L times the row's `pinned`; with
            `Layers.retention` a minimum.
        lengths: [B], tokens of each row.
        pinned: [B], how many tokens every layer must keep.
        n_layers: L, the number of compressed layers.
        measured: float32 [B, L], on the host, what `Layers.needs` asked for; None: nothing.
        scores: [B, L, C], scores of the tokens that compete, largest first.
        n_candidates: int64 [B], how many of the C scores are tokens; the others are 0.
    """

    totals: Sequence[int]
    lengths: Sequence[int]
    pinned: Sequence[int]
    n_layers: int
    measured: Tensor | None = None
    scores: Tensor | None = None
    n_candidates: Tensor | None = None


class Layers(Part):
    """How many tokens each layer keeps: call it with the `SizeInputs` of all layers.

    Attributes:
        needs: what must be known of every layer before any is sized: "scores"; "mini-prefill", the
            scores of a first pass over the prompt, which stores nothing; "similarity" of the
            residual stream around attention; "measure", the results of `measure`; "": nothing.
        retention: the share of importance that sets the total; None: the budget sets it.
        learns: how many first requests of a task set the sizes for all its requests; 0: none.
    """

    kind = "layers"
    needs: Literal["", "scores", "mini-prefill", "similarity", "measure"] = ""
    retention: float | None = None
    learns: int = 0

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return how many tokens each layer keeps, [B][L]; `fit` adjusts them to the total."""
        raise NotImplementedError

    def measure(self, layer: LayerInputs) -> Tensor:
        """Measure one layer, where `needs` is "measure": float32 [B]."""
        raise NotImplementedError


class Heads(Part):
    """How a layer's size is split among its key-value heads: call it with their scores.

    Attributes:
        scope: which heads share a size: "layer", those of a layer; "model", those of all layers;
            "": none, all heads of a layer keep the same number of tokens.
    """

    kind = "heads"
    scope: Literal["", "layer", "model"] = "layer"

    def __call__(self, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
        """Return how many of the competing tokens each head keeps.

        Args:
            scores: [B, H, C]; -inf for tokens that do not compete. With `scope` "model" the heads
                of all L layers follow each other, and H stands for L * H.
            totals: int64 [B], tokens over all heads of a row; 0 where there is nothing to split.
            layer_idx: the layer's number in the model; 0 with `scope` "model".

        Returns:
            int64 [B, H] of sum `totals`, each at most the number of tokens that compete.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Sizes of a block's R rows after the prefill, from which its slots are planned.

    Attributes:
        counts: [R], tokens kept.
        lengths: [R], tokens of the prompt.
        protected: [R], kept tokens that may never be dropped; they lie in the first slots.
        capacity: [R], the size in tokens: of the budget, `policy.least`, or what the prompt left.
        share: [R], the share of all tokens seen that may be kept; None for a budget in tokens.
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
        every, latest: after every `every` generated tokens all kept tokens compete again, as in a
            new turn, except the `latest` last ones; 0: never.
        needs_decode_attention: the token that is dropped depends on the attention that slots
            receive in decode steps.
    """

    kind = "decode"
    needs_decode_attention: ClassVar[bool] = False
    every: int = 0
    latest: int = 0

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """Return the slots that generated tokens take, from each row's sizes after the prefill."""
        raise NotImplementedError


class Merge(Part):
    """How evicted pairs are merged: call it with all pairs of a layer, and their ranking.

    Attributes:
        weighted: attention adds the logarithm of a weight to the logits of merged pairs.
        fit: the number of the prompt's queries to which weights are fitted (`PromptKV.reference`).
    """

    kind = "merge"
    weighted: ClassVar[bool] = False
    fit: int = 0

    def __call__(self, prompt_kv: PromptKV, ranking: Ranking) -> Kept:
        """Return the kept pairs, with the evicted ones merged into them, and their weights.

        Args:
            prompt_kv: all pairs of the layer, with their positions and weights.
            ranking: which tokens are kept; `ranking.kept(prompt_kv)` drops all others.
        """
        raise NotImplementedError


class Protect(Part):
    """Tokens that every layer keeps, whatever their scores.

    Attributes:
        needs_image: whether it has to know which tokens are image tokens.
    """

    kind = "protect"
    needs_image = False

    def marks(self, valid: Tensor, is_prompt: Tensor, image: Tensor) -> Tensor:
        """Return the tokens that are pinned, bool [B, T].

        The arguments are bool [B, T]: `valid` is False for padding, `is_prompt` is False for
        generated tokens, `image` is True for image tokens; without `needs_image` it is False for
        all if the model has no image tokens or was given embeddings.
        """
        raise NotImplementedError


BASES: dict[str, type[Part]] = {
    cls.kind: cls for cls in (Score, Layers, Heads, Decode, Merge, Protect)
}
P = TypeVar("P", bound=type[Part])


def register_part(name: str) -> Callable[[P], P]:
    """Class decorator: register a part under `name`, among those of its kind.

    Raises:
        ValueError: the name is taken by another class, or has characters that a command line cannot
            take.
        TypeError: the class inherits from none of the kinds, or an option of it is no field.
    """

    def register(cls: P) -> P:
        if not (isinstance(cls, type) and issubclass(cls, tuple(BASES.values()))):
            kinds = ", ".join(base.__name__ for base in BASES.values())
            raise TypeError(f"register_part({name!r}): {cls!r} inherits from none of {kinds}")
        check_fields(cls)
        if getattr(cls, "window", 0) and "window" not in {f.name for f in dataclasses.fields(cls)}:
            raise TypeError(
                f"register_part({name!r}): {cls.__name__}.window is no dataclass field, and only a "
                "field can be made smaller for a short row: write `window: int = ...`"
            )
        check_new(f"{cls.kind} part", name)
        registered_class = registered.get((cls.kind, name))
        if registered_class is not None and path_of(registered_class) != path_of(cls):
            raise ValueError(
                f"{cls.kind} part {name!r} is taken by {path_of(registered_class)}: choose another "
                "name, or load only one of the two"
            )
        cls.name = name
        registered[cls.kind, name] = cls
        return cls

    return register


def check_fields(cls: type[Any]) -> None:
    """Check that every option that the class of a part or policy sets is a dataclass field.

    Raises:
        TypeError: one is not, so instances would ignore its value.
    """
    lost: list[str] = []
    for field in dataclasses.fields(cls):
        value = getattr(cls, field.name, field.default)
        # With slots=True the class holds descriptors in place of the defaults.
        if value is not field.default and not isinstance(value, MemberDescriptorType):
            lost.append(field.name)
    if "__dataclass_fields__" not in vars(cls):
        inherited = {x for base in cls.__mro__[1:] for x in vars(base)}
        own = inspect.get_annotations(cls)
        lost += [x for x in own if x not in inherited and "ClassVar" not in str(own[x])]
    if lost:
        raise TypeError(
            f"{cls.__name__}.{lost[0]} is no field, so its value would be ignored: decorate the "
            f"class with @dataclass(frozen=True, kw_only=True) and write `{lost[0]}: TYPE = ...`"
        )


@register_part("instruction")
@dataclass(frozen=True, kw_only=True)
class Instruction(Protect):
    """The prompt's text stays in every layer; image tokens compete, and so do generated ones."""

    needs_image = True

    def marks(self, valid: Tensor, is_prompt: Tensor, image: Tensor) -> Tensor:
        """Return which tokens are text of a prompt."""
        return valid & is_prompt & ~image


def path_of(cls: type) -> str:
    """Return a class's module and name."""
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@cache
def discover() -> None:
    """Import every module that defines parts or policies, which registers them."""
    for name in ("scores", "sizes", "merge", "decode", "policies"):
        package = importlib.import_module(f"mmkv.{name}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
