"""The built-in scores as parts; what they compute is in `mmkv.scores`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mmkv.parts import Score, register_part
from mmkv.parts.checks import NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs
    from mmkv.policy import Policy

# torch is imported where it is used: to list policies and their options takes none of it.
Pooling = Literal["avg", "max"]
Value = Literal["norm", "output", "residual"]
# CriticalKV: attention so small that it says less than the value does.
_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True)
class PerHead(Score):
    """A score of each key-value head.

    Options:
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    average_heads: bool = False
    by_head = True

    def of_heads(self, layer: LayerInputs) -> Tensor:
        """Float32 [B, H, N]."""
        raise NotImplementedError

    def __call__(self, layer: LayerInputs) -> Tensor:
        """By head, or their mean."""
        found = self.of_heads(layer)
        return found.mean(dim=1, keepdim=True) if self.average_heads else found

    @property
    def shared_ranking(self) -> bool:
        """As `average_heads` says."""
        return self.average_heads


class Windowed(Score):
    """A score by the last `window` queries, whose own tokens are always kept."""

    window: int

    @property
    def window_size(self) -> int:
        """The window."""
        return self.window

    def with_window(self, last: int) -> Score:
        """With another window."""
        return replace(self, window=last)

    @property
    def queries(self) -> int:
        """Those of the window."""
        return self.window


def _attention_alone(policy: Policy, **options: Any) -> None:
    """Refuse options that weigh attention where decoding goes on by attention alone.

    Raises:
        ValueError: one is set.
    """
    for name, value in options.items():
        if value and policy.decode.name in ("fixed", "least"):
            raise ValueError(
                f"{name}={value!r} weighs attention, but decode={policy.decode.name!r} goes on by "
                f"attention alone: leave {name} out, or use decode='ratio' or 'grow'"
            )


@register_part("window")
@dataclass(frozen=True, kw_only=True)
class WindowAttention(Windowed, PerHead):
    """Attention from the prompt's last queries (SnapKV, arXiv 2404.14469, section 4).

    Options:
        window: how many last queries observe; their own tokens are always kept.
        kernel_size: scores are pooled over this many neighbouring keys, an odd number.
        pooling: "max", "avg", or None for none.
        recency_weighted: weigh the queries by how recent they are (PyramidInfer).
        value: what a token's value adds: "norm", times its L1 norm (VATP); "output", plus 1e-4,
            times its L1 norm behind the output projection; "critical", the same for the half of a
            budget in tokens or as a fraction that attention alone has not filled (CriticalKV);
            "residual", how far a query's output moves without the token (DropKV); None: nothing.
        diversity: mix with values and with how unlike others a key is (MixKV).
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    window: int = 32
    kernel_size: int = 7
    pooling: Pooling | None = "max"
    recency_weighted: bool = False
    value: Value | Literal["critical"] | None = None
    diversity: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.window < 1 or self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(
                f"window={self.window}, kernel_size={self.kernel_size}: "
                "the window must be at least 1, the kernel size odd"
            )

    @property
    def uses_size(self) -> bool:
        """With CriticalKV's two stages."""
        return self.value == "critical"

    def check(self, policy: Policy) -> None:
        """While decoding, attention alone is counted; what is mixed has no stages.

        Raises:
            ValueError: it would be otherwise.
        """
        _attention_alone(policy, value=self.value, diversity=self.diversity)
        if self.diversity and self.value == "critical":
            raise ValueError(
                "value='critical' has two stages, which diversity=True would mix: use "
                "value='output', or leave diversity out"
            )

    def of_heads(self, layer: LayerInputs) -> Tensor:
        """The window's own tokens, which stay, score 0."""
        import torch

        from mmkv import value_scores

        weights = None
        if self.recency_weighted:
            weights = torch.arange(1, self.window + 1, dtype=torch.float32)
        found = self._observed(layer, weights)
        n = found.shape[2]
        if self.value == "norm":
            found = found * value_scores.value_norms(layer, n)
        elif self.value in ("output", "critical"):
            attention = found
            found = (found + _EPSILON) * value_scores.output_norms(layer, n)
            if self.value == "critical" and layer.size is not None:
                half = (layer.size / 2).int() - self.window
                found = value_scores.with_first(found, attention, half)
        if self.diversity:
            found = value_scores.mixed(found, layer)
        return torch.nn.functional.pad(found, (0, self.window))

    def _observed(self, layer: LayerInputs, weights: Tensor | None) -> Tensor:
        """What the window's queries find: float32 [B, H, N - window]."""
        from mmkv import scores, value_scores

        if self.value == "residual":
            return value_scores.window_residuals(
                layer, self.window, self.kernel_size, self.pooling, weights
            )
        return scores.window_attention(
            layer.query,
            layer.key,
            window=self.window,
            kernel_size=self.kernel_size,
            pooling=self.pooling,
            weights=weights,
            **layer.attention,
        )


@register_part("accumulated")
@dataclass(frozen=True, kw_only=True)
class AccumulatedAttention(PerHead):
    """Attention from all queries, added up (H2O, arXiv 2306.14048, section 4).

    Options:
        value: what a token's value adds: "norm", times its L1 norm (VATP); "output", times its L1
            norm behind the output projection (CriticalKV); "residual", how far a query's output
            moves without the token (DropKV); None: nothing.
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    value: Value | None = None
    turn_reduction = "sum"

    def check(self, policy: Policy) -> None:
        """While decoding, attention alone is counted."""
        _attention_alone(policy, value=self.value)

    def of_heads(self, layer: LayerInputs) -> Tensor:
        """Without `value`, every query adds 1 to its row in total."""
        from mmkv import scores, value_scores

        if self.value == "residual":
            return value_scores.residuals(layer, layer.query.shape[2]).mean(2)
        found = scores.accumulated_attention(layer.query, layer.key, **layer.attention)
        if self.value == "norm":
            found = found * value_scores.value_norms(layer, found.shape[2])
        elif self.value == "output":  # nothing is added: scores of chunks add up
            found = found * value_scores.output_norms(layer, found.shape[2])
        return found

    @property
    def queries(self) -> int:
        """None: what earlier ones paid is added up already."""
        return 0


@register_part("recency")
@dataclass(frozen=True, kw_only=True)
class Recency(Score):
    """A token's position: the newest stay (StreamingLLM, arXiv 2309.17453)."""

    ranks = False
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """One ranking for all heads."""
        from mmkv import scores

        return scores.recency(layer.valid)

    @property
    def queries(self) -> int:
        """None."""
        return 0

    @property
    def shared_ranking(self) -> bool:
        """All heads alike."""
        return True


@register_part("observers")
@dataclass(frozen=True, kw_only=True)
class Observers(PerHead):
    """The most that a query of a token's run, asked at the prompt's end, would lose without it.

    See `mmkv.observers` (condense).

    Options:
        chunk: queries observe runs of about this many tokens; 1 or more.
        stride: every how many queries one observes; 1 or more.
        whole: how many queries observe the whole prompt, half of them its last; 0: none.
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    chunk: PositiveInt = 128
    stride: PositiveInt = 1
    whole: NonNegativeInt = 32
    turn_reduction = "max"
    uses_rotary = True

    def of_heads(self, layer: LayerInputs) -> Tensor:
        """What the layer's output would change by."""
        from mmkv.observers import observer_scores, output_gram

        query = layer.query
        if layer.rotary is not None:
            query = layer.rotary.moved(layer.query, layer.rotary.ahead(1))
        gram = None if layer.weight is None else output_gram(layer.output_weight)
        return observer_scores(
            query,
            layer.key,
            layer.value,
            gram,
            run=self.chunk,
            stride=self.stride,
            whole=self.whole,
            scale=layer.scale,
            softcap=layer.softcap,
            bias=layer.bias,
            valid=layer.valid,
        )
