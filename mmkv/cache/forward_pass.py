"""The state of one call of a wrapped model, and the two phases of its cache.

The state is one value in a context variable: the hooks of `mmkv.attach` set it, the cache and the
attention function read it. When the call ends, also by an exception, the variable is set back to
the state of the enclosing call, if a hook made this call, or to None. A cache keeps its phase from
call to call: it reads a prompt, or it decodes.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs, Rotary

if TYPE_CHECKING:
    from mmkv.adapters import Adapter
    from mmkv.cache.compressed import CompressedCache

Similarity = dict[int, tuple[Tensor, Tensor]]
NOT_ATTENDED = (
    "{what} passed keys and values to a compressed cache, but mmkv's attention function did not "
    "run, as after model.set_attn_implementation(...) or mmkv.unwrap(model): unwrap the model if "
    "it is wrapped, call mmkv.wrap(model, ...) again, and start a new cache"
)


class AttentionCall(NamedTuple):
    """The arguments of one layer's attention function."""

    query: Tensor  # [B, Hq, q, D]
    key: Tensor  # [B, H, q, D]
    value: Tensor
    mask: Tensor | None  # [B or 1, 1, q, K]
    scale: float  # factor of the query-key products
    softcap: float | None  # bound of the logits
    layer_idx: int


@dataclass(eq=False)
class ForwardPass:
    """One call of a wrapped model.

    Attributes:
        owner: a weak reference to the module that was called, the model or its decoder; None in
            `collecting`.
        outer: the pass inside which a hook makes this call; None if there is none.
        ids: int [B, q], the model's input ids; None if it was called with embeddings.
        mask: the attention mask that the model was called with.
        has_cache: whether the model was called with a cache.
        generating: whether `generate` makes the call: it only appends ones to its mask.
        entered: whether the decoder's forward has begun.
        cache: the cache of this pass; None before the decoder begins, and without a cache.
        valid: bool [B, q], which of the new tokens are no padding; None: all.
        causal: whether all masks are known to be causal, so that `view` need not read them.
        masked: bool [B, seen], kept tokens that the mask hides in this pass; None: none.
        streams: the residual stream [B, q, hidden] before each layer, for SqueezeAttention.
        collector: set in a pass that stores nothing: `add` takes each layer's inputs and returns
            the layer's output, or None to run the model's own attention.
        observes: whether to store the queries of this step, see `CompressedCache.observes_replies`.
        parts: the model's parts; None outside of the decoder.
        rotary: each layer's rotary embedding of the new tokens, if the score needs it.
        latest_rotary: the latest `position_embeddings`, and the `Rotary` made of them.
    """

    owner: ref[Any] | None = None
    outer: ForwardPass | None = None
    ids: Tensor | None = None
    mask: Any = None
    has_cache: bool = False
    generating: bool = False
    entered: bool = False
    cache: CompressedCache | None = None
    valid: Tensor | None = None
    causal: bool = False
    masked: Tensor | None = None
    streams: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    collector: Any = None
    observes: bool = False
    parts: Adapter | None = None
    rotary: dict[int, Rotary] = field(default_factory=dict[int, Rotary])
    latest_rotary: tuple[Any, Rotary] | None = None
    # The layer between the cache's `update` and its attention function; None: no layer is.
    pending: int | None = None
    # For each mask, by its id: the mask, which must not be freed, and the result of `view`.
    _views: dict[int, tuple[Tensor, Tensor | None]] = field(
        default_factory=dict[int, "tuple[Tensor, Tensor | None]"]
    )

    @classmethod
    def begin(cls, owner: Any, **fields: Any) -> ForwardPass:
        """Begin the pass of a call of `owner` and make it `current`; see `collecting`."""
        outer = current.get()
        # A call that was interrupted outside of its decoder ran no hook, and left its pass behind.
        while outer is not None and outer.is_of(owner) and outer.parts is None:
            outer = outer.outer
        collector = None if outer is None or outer.owner is not None else outer.collector
        running = cls(owner=ref(owner), outer=outer, collector=collector, **fields)
        current.set(running)
        return running

    @staticmethod
    def end(owner: Any) -> None:
        """End the pass of a call of `owner`, if it began one; the outer pass is `current` again."""
        running = current.get()
        while running is not None and not running.is_of(owner):
            running = running.outer
        if running is not None:
            current.set(running.outer)

    def is_of(self, module: Any) -> bool:
        """Return whether this is a call of `module`."""
        return self.owner is not None and self.owner() is module

    def check_attended(self) -> None:
        """Check that our attention function ran after the last `update` of a layer.

        Raises:
            ValueError: it did not.
        """
        if self.pending is not None:
            layer_idx, self.pending = self.pending, None
            raise ValueError(NOT_ATTENDED.format(what=f"layer {layer_idx}"))

    def inputs(self, call: AttentionCall) -> LayerInputs:
        """Return a layer's inputs of the new tokens, to which the cache adds earlier ones."""
        valid = self.valid
        if valid is None:
            valid = call.query.new_ones(len(call.query), call.query.shape[2], dtype=torch.bool)
        parts, i = self.parts, call.layer_idx
        return LayerInputs(
            query=call.query,
            key=call.key,
            value=call.value,
            valid=valid.to(call.key.device),
            scale=call.scale,
            softcap=call.softcap,
            mask=self.view(call.mask),
            layer_idx=i,
            rotary=self.rotary.get(i),
            weight=None if parts is None else partial(parts.output_weight, i),
            of_weight=None if parts is None else partial(parts.of_output_weight, i),
        )

    def view(self, mask: Tensor | None) -> Tensor | None:
        """Return which of the q new tokens see which, bool [B, 1, q, q]; None if it is causal.

        Prefix-LM masks (PaliGemma) and images whose tokens all see each other (Gemma 3) are not.
        The result is computed once a pass, not once a layer.

        Args:
            mask: [B or 1, 1, q, K], bool or added to the logits, the layer's attention mask; None
                if transformers passes none because it is causal. That of padding is ignored.
        """
        if self.causal or mask is None or mask.ndim != 4 or (q := mask.shape[2]) == 1:
            return None
        if id(mask) not in self._views:
            block = mask[..., -q:]
            if block.dtype != torch.bool:
                block = block > torch.finfo(block.dtype).min / 2
            causal = torch.ones(q, q, dtype=torch.bool, device=mask.device).tril()
            valid = causal.new_ones(1, q) if self.valid is None else self.valid.to(mask.device)
            valid_pairs = valid[:, None, None, :] & valid[:, None, :, None]
            is_causal = bool((((block ^ causal) & valid_pairs) == 0).all())
            self._views[id(mask)] = mask, None if is_causal else block & valid_pairs
        return self._views[id(mask)][1]


@dataclass(eq=False)
class Reading:
    """The next pass reads a prompt or the next turn of a conversation, whole or a chunk of it.

    Attributes:
        until: tokens seen when the prompt is complete; None: the next pass completes it.
        evicts: whether this pass evicts: the last pass of a prompt does, and with
            `CacheConfig.evict_chunks` every pass, in all rows that do not end in padding.
        keeps_all: whether no token is evicted, as for a question about a context.
        needs_scores: whether this pass scores the tokens of each layer.
        mean_sizes: [B], mean number of tokens a head keeps; None without a budget.
        sizes: tokens that each compressed layer keeps of each row, [L][B]; None until known.
        similarity: for each layer, the mean similarity [B] of the residual stream before and after
            its attention, and the number of tokens [B], over all chunks (SqueezeAttention).
        masks_earlier: whether the mask hides tokens kept from earlier turns.
        chunks: embeddings [B, q, hidden] and positions [A, B, q] of each chunk, for a score that
            reads the prompt again.
    """

    until: int | None = None
    evicts: bool = False
    keeps_all: bool = False
    needs_scores: bool = False
    mean_sizes: list[float] | None = None
    sizes: list[list[int]] | None = None
    similarity: Similarity = field(default_factory=dict[int, "tuple[Tensor, Tensor]"])
    masks_earlier: bool = False
    chunks: list[tuple[Tensor, Tensor]] = field(default_factory=list["tuple[Tensor, Tensor]"])

    def compare(self, layer_idx: int, similarity: Tensor, tokens: Tensor) -> None:
        """Add a chunk's similarity [B], a mean over `tokens` [B] tokens, to the running mean."""
        if layer_idx in self.similarity:
            mean, n_tokens = self.similarity[layer_idx]
            total = n_tokens + tokens
            weighted_sum = mean * n_tokens + similarity * tokens
            similarity, tokens = weighted_sum / total.clamp(min=1), total
        self.similarity[layer_idx] = similarity, tokens

    def select_rows(self, batch: Tensor) -> None:
        """Keep the rows `batch`."""
        for i, (x, n) in self.similarity.items():
            self.similarity[i] = x[batch.to(x.device)], n[batch.to(n.device)]
        self.chunks = [(x[batch.to(x.device)], p[:, batch.to(p.device)]) for x, p in self.chunks]


@dataclass(eq=False)
class Decoding:
    """The prompt is complete: each pass reads generated tokens.

    Attributes:
        waiting: generated tokens that have not competed yet (decode="rounds").
        reading: the round of this pass; None if there is none.
    """

    waiting: int = 0
    reading: Reading | None = None


class NotCapturableError(RuntimeError):
    """A step that cannot be captured or replayed, see `mmkv.attach.graph`."""


class GraphInputs(NamedTuple):
    """Inputs that a replayed step reads on the device, so that it does not wait for the host."""

    row: Tensor  # int64 [1], the row of the schedules' tables
    position: Tensor  # int32 [], the new token's position
    place: Tensor  # int64 [1], its place in the window of exact pairs (8 or 4 bits)


current: ContextVar[ForwardPass | None] = ContextVar("mmkv_forward_pass", default=None)


@contextmanager
def collecting(collector: Any) -> Generator[None]:
    """Give each layer's inputs to `collector` in calls of wrapped models, without a cache."""
    token = current.set(ForwardPass(collector=collector))
    try:
        yield
    finally:
        current.reset(token)


def outside_inference_mode() -> AbstractContextManager[None]:
    """Allow tensors made in this context to be written to after a pass in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _refuse(gradient: Tensor) -> None:
    raise ValueError(
        "gradients cannot flow through a compressed cache: its keys and values are copies. "
        "Give the model the whole sequence in one pass, or mmkv.unwrap(model) to train it"
    )


def refuse_gradient(x: Tensor) -> Tensor:
    """Return x [B, q, Hq, D] unchanged; a backward pass through it raises ValueError."""
    if x.requires_grad:
        x.register_hook(_refuse)
    return x
