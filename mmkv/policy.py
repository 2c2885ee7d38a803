"""What a policy is: a frozen value that names its parts. State lives on the cache, never here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_type_hints

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs

Score = Literal["window", "accumulated", "recency", "observers"]
Pooling = Literal["avg", "max"]
Layers = Literal["uniform", "pyramid", "geometric", "squeeze", "prefix", "pooled"]
Allocation = Literal["one-pass", "mini-prefill"]
Heads = Literal["uniform", "adaptive"]
Decode = Literal["grow", "ratio", "fixed"]
Merge = Literal["position", "feature", "groups"]
Protect = Literal["none", "instruction"]

# The options that only one choice of a part reads. Setting one without its part would do nothing,
# so `get_policy` refuses it, and the policy table leaves it out.
_READ_ONLY_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "window": ("score", ("window",)),
    "kernel_size": ("score", ("window",)),
    "pooling": ("score", ("window",)),
    "recency_weighted": ("score", ("window",)),
    "average_heads": ("score", ("window", "accumulated", "observers")),
    "beta": ("layers", ("pyramid",)),
    "decay": ("layers", ("geometric",)),
    "p": ("layers", ("squeeze",)),
    "allocation": ("layers", ("prefix", "pooled")),
    "retention": ("layers", ("pooled",)),
    "alpha": ("heads", ("adaptive",)),
    "distance": ("decode", ("ratio",)),
    "chunk": ("score", ("observers",)),
    "exact": ("merge", ("groups",)),
    "newest": ("merge", ("groups",)),
    "group_run": ("merge", ("groups",)),
    "rounds": ("merge", ("groups",)),
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a cache is made smaller: score, layer sizes, head sizes, decoding, merging, protection.

    A policy of your own is a subclass with other defaults; one with a score of its own overrides
    `importance`. Each part can be overridden by its option, so the parts combine freely.

    Options:
        score: what makes a token important. "window": attention from the last `window` queries,
            pooled over `kernel_size` keys with `pooling` (SnapKV); "accumulated": attention from
            all queries (H2O); "recency": its position; "observers": the most that any query of
            its `chunk` of the prompt, asked at the prompt's end, would lose without it.
        average_heads: rank tokens once per layer, by the mean over heads, not once per head.
        recency_weighted: weigh the window's queries by how recent they are (PyramidInfer).
        sinks: how many first tokens are always kept (StreamingLLM).
        recent: the share of a layer's size given to the most recent tokens (H2O: half).
        layers: how many tokens each layer keeps. "uniform"; "pyramid" (slope `beta`); "geometric"
            (`decay` per layer); "squeeze" (share `p` for layers that change little); "prefix"
            (equal retention); "pooled" (largest mean retention, or the smallest size that reaches
            the mean `retention`).
        allocation: when "prefix" and "pooled" learn their scores: "one-pass", after a prefill that
            holds every layer whole, or "mini-prefill", in a first pass that stores nothing.
        heads: "uniform", or "adaptive" between heads with the floor `alpha` (Ada-KV).
        decode: what the budget means for generated tokens. "grow": they are kept, on top of it.
            "ratio": a float is the share of all tokens seen that a layer may hold, an int their
            number; the token `distance` behind the newest is dropped while it holds more, and the
            prompt's kept tokens and the `distance` most recent ones never are. "fixed": a layer
            goes on with the size the prompt left it (filled up to an int budget that is larger),
            and each new token takes the place of the lowest accumulated score, or with
            score="recency" of the oldest.
        merge: average evicted pairs into the kept one nearest in "position" or "feature"; or
            "groups": the share `exact` of the slots, the best-scored tokens and the `newest` ones,
            holds tokens as they are, and the other slots hold groups of all other tokens, which
            attention weighs by their number. Groups are found by `rounds` of k-means inside runs
            of `group_run` tokens.
        protect: "instruction" keeps the prompt's text in every layer; image tokens compete.
        reposition: give keys consecutive positions inside the cache (StreamingLLM as published).

    Raises:
        ValueError: an option out of its range, or a combination that means nothing.
    """

    score: Score = "window"
    window: int = 32
    kernel_size: int = 7
    pooling: Pooling | None = "max"
    recency_weighted: bool = False
    average_heads: bool = False
    sinks: int = 0
    recent: float = 0.0
    layers: Layers = "uniform"
    beta: float = 20.0
    decay: float = 0.9
    p: float = 0.35
    allocation: Allocation = "one-pass"
    retention: float | None = None
    heads: Heads = "uniform"
    alpha: float = 0.5
    decode: Decode = "grow"
    distance: int = 25
    merge: Merge | None = None
    protect: Protect = "none"
    reposition: bool = False
    chunk: int = 128
    exact: float = 0.25
    newest: int = 1
    group_run: int = 512
    rounds: int = 2

    name: ClassVar[str] = "policy"
    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = False
    # Whether its score reads `LayerInputs.rotary`, or queries and keys before it.
    uses_rotary: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate every option; each message shows the value received."""
        for field, hint in get_type_hints(type(self)).items():
            value, choices = getattr(self, field), _literals(hint)
            if choices and value not in choices:
                raise ValueError(f"{field}={value!r}: expected one of {choices}")
            if expected := _other_type(value, hint):
                raise ValueError(f"{field}={value!r}: expected {expected}")
        if self.window < 1 or self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(
                f"window={self.window}, kernel_size={self.kernel_size}: "
                "the window must be at least 1, the kernel size odd"
            )
        for field in ("sinks", "distance", "newest"):
            if (value := getattr(self, field)) < 0:
                raise ValueError(f"{field}={value}: expected 0 or more")
        for field in ("chunk", "group_run", "rounds"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"{field}={value}: expected 1 or more")
        for field in ("alpha", "recent", "exact"):
            if not 0 <= (value := getattr(self, field)) <= 1:
                raise ValueError(f"{field}={value}: expected a number in [0, 1]")
        for field in ("p", "decay", "retention"):
            if (value := getattr(self, field)) is not None and not 0 < value <= 1:
                raise ValueError(f"{field}={value}: expected a number in (0, 1]")
        if self.beta < 1:
            raise ValueError(f"beta={self.beta}: expected 1 or more")
        if self.heads == "adaptive" and (self.average_heads or self.score == "recency"):
            raise ValueError(
                "heads='adaptive' compares heads by their scores; average_heads=True and "
                "score='recency' give all heads the same"
            )
        if self.decode == "fixed" and self.score in ("window", "observers"):
            raise ValueError(
                "decode='fixed' drops the lowest accumulated score or the oldest token; "
                f"score={self.score!r} has neither: use score='accumulated' or 'recency'"
            )
        if self.decode == "fixed" and self.average_heads:
            raise ValueError(
                "average_heads=True ranks tokens once per layer, but decode='fixed' drops the "
                "lightest token of each head: use average_heads=False, or decode='ratio' or 'grow'"
            )
        if self.merge == "groups" and self.reposition:
            raise ValueError(
                "merge='groups' averages keys of many positions, and reposition=True turns each "
                "key from its own: use one of them"
            )
        if self.layers in ("prefix", "pooled") and self.score == "recency":
            raise ValueError(
                f"layers={self.layers!r} compares layers by their scores; "
                "score='recency' gives all layers the same"
            )

    def importance(self, layer: LayerInputs) -> Tensor:
        """Score the prompt's tokens in one layer; higher = keep.

        Args:
            layer: what its attention had to work with: N tokens, queries of the last Q. Q = N in a
                prompt; in a later turn they are those of the new tokens.

        Returns:
            float32 [B, H, N], or [B, 1, N] for one ranking per layer. The last `window` entries of
            a window score are 0: those tokens are always kept.
        """
        import torch

        from mmkv import scores

        if self.score == "recency":
            return scores.recency(layer.valid)
        if self.score == "observers":
            s = self._observed(layer)
        elif self.score == "accumulated":
            s = scores.accumulated_attention(layer.query, layer.key, **layer.attention)
        else:
            weights = None
            if self.recency_weighted:
                device = layer.key.device
                weights = torch.arange(1, self.window + 1, dtype=torch.float32, device=device)
            s = scores.window_attention(
                layer.query,
                layer.key,
                window=self.window,
                kernel_size=self.kernel_size,
                pooling=self.pooling,
                weights=weights,
                **layer.attention,
            )
            s = torch.nn.functional.pad(s, (0, self.window))
        return s.mean(dim=1, keepdim=True) if self.average_heads else s

    def _observed(self, layer: LayerInputs) -> Tensor:
        from mmkv.layer_inputs import turn
        from mmkv.observers import observer_scores, output_gram

        query = layer.query
        if layer.rotary is not None:
            query = turn(layer.plain_query, *layer.rotary.ahead(1))
        gram = None if layer.weight is None else output_gram(layer.output_weight)
        return observer_scores(
            query,
            layer.key,
            layer.value,
            gram,
            run=self.chunk,
            scale=layer.scale,
            softcap=layer.softcap,
            bias=layer.bias,
            valid=layer.valid,
        )

    @property
    def reads_rotary(self) -> bool:
        """Whether its score needs the layer's rotary embedding."""
        return self.uses_rotary or self.score == "observers"

    @property
    def observed(self) -> int:
        """How many last tokens observe and are themselves always kept."""
        return self.window if self.score == "window" and not self.keeps_all else 0

    @property
    def scores_itself(self) -> bool:
        """Whether a subclass computes a score of its own."""
        return type(self).importance is not Policy.importance

    @property
    def additive(self) -> bool:
        """Whether the scores of a prompt's chunks, and of turns, add up to the score of all."""
        return self.score == "accumulated" and not self.scores_itself

    @property
    def queries(self) -> int | None:
        """How many of a prompt's last queries its score needs at the end; None: all of them."""
        if self.keeps_all or self.additive:
            return 0
        return None if self.scores_itself or self.score == "observers" else self.observed

    @property
    def needs_all_layers(self) -> bool:
        """Whether a layer's size is known only once every layer has been seen."""
        return self.layers in ("prefix", "pooled", "squeeze")

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options this policy reads as it stands, with their defaults."""
        policy = cls()
        return {
            f.name: getattr(policy, f.name)
            for f in dataclasses.fields(cls)
            if not cls.keeps_all and policy.reads(f.name)
        }

    def reads(self, option: str) -> bool:
        """Whether this policy's parts read `option`; setting one they do not read does nothing."""
        part, choices = _READ_ONLY_WITH.get(option, (option, ()))
        return not choices or getattr(self, part) in choices


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


def _literals(hint: Any) -> list[Any]:
    """The allowed values of a Literal, or of a union of one with None; [] for any other hint."""
    if getattr(hint, "__origin__", None) is Literal:
        return list(get_args(hint))
    found = [v for arg in get_args(hint) for v in _literals(arg)]
    return [*found, None] if found and type(None) in get_args(hint) else found
