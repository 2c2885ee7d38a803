"""The built-in layer and head sizes as parts; what they compute is in `mmkv.allocation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mmkv.parts import Heads, Layers, register_part
from mmkv.parts.checks import PositiveShare, Share, at_least, share

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.policy import Policy

Allocation = Literal["one-pass", "mini-prefill", "sampled"]


@register_part("uniform")
@dataclass(frozen=True, kw_only=True)
class UniformLayers(Layers):
    """Every layer keeps as many tokens."""

    def sizes(self, total: int, *, n_layers: int, length: int, **known: Any) -> Sequence[float]:
        """Equal to one token."""
        from mmkv import allocation

        return allocation.uniform(n_layers, total, max_size=length)


@register_part("pyramid")
@dataclass(frozen=True, kw_only=True)
class PyramidLayers(Layers):
    """Sizes fall in equal steps with depth (PyramidKV, arXiv 2406.02069, section 4.1).

    What is always kept stays outside the series, as in the paper's own code.

    Options:
        beta: the slope: the last layer's size is the mean over `beta`; 1 or more.
    """

    beta: Annotated[float, partial(at_least, 1)] = 20.0

    def sizes(
        self, total: int, *, n_layers: int, length: int, floor: int, **known: Any
    ) -> Sequence[float]:
        """An arithmetic series over what is not kept anyway."""
        from mmkv import allocation

        spare, most = total - n_layers * floor, length - floor
        falling = allocation.pyramid(n_layers, spare, beta=self.beta, max_size=most)
        return [floor + n for n in falling]


@register_part("geometric")
@dataclass(frozen=True, kw_only=True)
class GeometricLayers(Layers):
    """Sizes fall by one factor with depth (PyramidInfer, arXiv 2405.12532, section 3).

    Options:
        decay: each layer's size as a share of the one before, in (0, 1].
    """

    decay: PositiveShare = 0.9

    def sizes(self, total: int, *, n_layers: int, length: int, **known: Any) -> Sequence[float]:
        """A geometric series."""
        from mmkv import allocation

        return allocation.geometric(n_layers, total, decay=self.decay, max_size=length)


@register_part("squeeze")
@dataclass(frozen=True, kw_only=True)
class SqueezeLayers(Layers):
    """Layers that change the residual stream least keep little (SqueezeAttention, section 3).

    Options:
        p: their size as a share of the mean size, in (0, 1].
    """

    p: PositiveShare = 0.35
    needs = "similarity"

    def sizes(
        self,
        total: int,
        *,
        length: int,
        similarity: Tensor | None = None,
        **known: Any,
    ) -> Sequence[float]:
        """By groups of the layers' similarity."""
        from mmkv import allocation

        assert similarity is not None
        # A layer that overflowed is one that changes the stream.
        similarity = similarity.nan_to_num(nan=0.0)
        return allocation.squeeze(similarity, total, p=self.p, max_size=length)


@dataclass(frozen=True, kw_only=True)
class _ByScores(Layers):
    """Layer sizes from the scores of all layers.

    Options:
        allocation: when scores are learned: "one-pass", after a prefill that holds every layer
            whole; "mini-prefill", in a first pass that stores nothing; or "sampled", so for the
            first requests of each `mmkv.task` alone, whose mean sizes all others get.
        samples: how many requests to learn from, with "sampled"; 1 or more.
        requests: in its place, how many will come: a tenth of them are learned from.
    """

    allocation: Allocation = "one-pass"
    samples: int | None = None
    requests: int | None = None
    needs = "scores"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        given = {"samples": self.samples, "requests": self.requests}
        given = {name: n for name, n in given.items() if n is not None}
        at_least(1, **given)
        if self.allocation == "sampled" and len(given) != 1:
            raise ValueError(
                f"allocation='sampled' with samples={self.samples}, requests={self.requests}: give "
                "one, such as samples=20 to learn from 20 requests, or requests=200 for a tenth"
            )
        if given and self.allocation != "sampled":
            ((name, n), *_) = given.items()
            raise ValueError(
                f"{name}={n} is read with allocation='sampled', and here it is "
                f"{self.allocation!r}: leave it out, or use allocation='sampled'"
            )

    @property
    def learns(self) -> int:
        """As `samples` or `requests` say."""
        return self.samples or -(-(self.requests or 0) // 10)

    @property
    def mini_prefill(self) -> bool:
        """As `allocation` says."""
        return self.allocation != "one-pass"

    def check(self, policy: Policy) -> None:
        """Scores must tell layers apart."""
        if not policy.score.ranks:
            raise ValueError(
                f"layers={self.name!r} compares layers by their scores; "
                f"score={policy.score.name!r} gives all layers the same"
            )


@register_part("prefix")
@dataclass(frozen=True, kw_only=True)
class PrefixLayers(_ByScores):
    """Every layer retains the same share of importance (PrefixKV, arXiv 2412.03409, section 3.2).

    Options:
        allocation: when scores are learned: "one-pass", after a prefill that holds every layer
            whole; "mini-prefill", in a first pass that stores nothing; or "sampled", so for the
            first requests of each `mmkv.task` alone, whose mean sizes all others get.
        samples: how many requests to learn from, with "sampled"; 1 or more.
        requests: in its place, how many will come: a tenth of them are learned from.
    """

    def share_out(
        self, importance: Tensor, spare: Tensor, offered: Tensor
    ) -> Sequence[Sequence[float]]:
        """Equal retention."""
        from mmkv import allocation

        return allocation.prefix_rows(importance, spare, offered)


@register_part("pooled")
@dataclass(frozen=True, kw_only=True)
class PooledLayers(_ByScores):
    """The largest mean retention over layers (XKV, arXiv 2412.05896, section IV-B).

    Options:
        allocation: when scores are learned, as for "prefix".
        samples: how many requests to learn from, as for "prefix".
        requests: how many will come, as for "prefix".
        retention: instead of a budget, the mean share of importance to be retained, in (0, 1]; the
            smallest sizes that reach it.
    """

    retention: float | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        share(zero=False, retention=self.retention)
        if self.retention is not None and self.learns:
            raise ValueError(
                f"allocation='sampled' shares out a budget, and retention={self.retention} gives "
                "none: use one of them"
            )

    def share_out(
        self, importance: Tensor, spare: Tensor, offered: Tensor
    ) -> Sequence[Sequence[float]]:
        """By the scores of all layers, pooled."""
        from mmkv import allocation

        return allocation.pooled_rows(importance, spare, offered, retention=self.retention)


@register_part("uniform")
@dataclass(frozen=True, kw_only=True)
class UniformHeads(Heads):
    """Every head keeps as many tokens."""

    equal = True


@register_part("adaptive")
@dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(Heads):
    """A layer's size is split by how widely each head attends (Ada-KV, arXiv 2407.11550).

    Options:
        alpha: the share of it that is spread evenly, in [0, 1].
    """

    alpha: Share = 0.5

    def check(self, policy: Policy) -> None:
        """Scores must tell heads apart."""
        if policy.score.shared_ranking:
            raise ValueError(
                "heads='adaptive' compares heads by their scores; average_heads=True and "
                "score='recency' give all heads the same"
            )

    def split_rows(self, scores: Tensor, spare: Tensor, *, layer_idx: int) -> Tensor:
        """Algorithm 1 of the paper, with the floor of algorithm 2."""
        from mmkv import allocation

        return allocation.adaptive_heads(scores, spare, alpha=self.alpha)
