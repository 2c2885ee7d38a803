"""The inputs of a score: queries, keys and values of one layer, and its attention's settings.

Shape letters as in `mmkv.scores`. Derived values are computed only if a score reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmkv.tensors import send


class Rotation(NamedTuple):
    """The cos and sin of a rotary embedding, arguments of `rotate`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def of(self, rows: slice, tokens: slice) -> Rotation:
        """Return those of some rows and tokens."""
        return Rotation(self.cos[rows, tokens], self.sin[rows, tokens], self.interleaved)

    def of_tokens(self, at: Tensor) -> Rotation:
        """Return those of some of the tokens, int64 [B, n]."""
        index = at[..., None].expand(-1, -1, self.cos.shape[-1])
        cos, sin = (x.expand(len(at), -1, -1).gather(1, index) for x in (self.cos, self.sin))
        return Rotation(cos, sin, self.interleaved)


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of the last Q tokens, as the layer applied it."""

    # [B, Q, R]; the first R dimensions of a head are rotated, i together with i + R / 2.
    cos: Tensor
    sin: Tensor
    inv_freq: Tensor  # [R / 2], radians per position of each pair
    interleaved: bool = False  # dimensions 2 i and 2 i + 1 are rotated together instead

    def undo(self, x: Tensor) -> Tensor:
        """Return queries or keys [B, h, Q, D] of these tokens before rotation: float32."""
        # Some models scale cos and sin, so the inverse divides by the square of the scale.
        size = (self.cos.float() ** 2 + self.sin.float() ** 2)[:, None]
        rotated = rotate(x, self.cos, -self.sin, self.interleaved)
        R = self.cos.shape[-1]
        return torch.cat([rotated[..., :R] / size, rotated[..., R:]], dim=-1)

    def rotation(self, to: Rotation) -> Rotation:
        """Return what moves queries or keys x of these tokens: `rotate(undo(x), *to)`."""
        old_cos, old_sin = self.cos.float(), self.sin.float()
        size = old_cos**2 + old_sin**2
        cos = (to.cos * old_cos + to.sin * old_sin) / size
        sin = (to.sin * old_cos - to.cos * old_sin) / size
        return Rotation(cos, sin, self.interleaved)

    @cached_property
    def to_next(self) -> Rotation:
        """What moves queries of these tokens to the position after the last, for all layers."""
        return self.rotation(self.ahead(1))

    def last(self, n: int) -> Rotary:
        """Return the embedding of the last n tokens, copied."""
        return replace(self, cos=self.cos[:, -n:].clone(), sin=self.sin[:, -n:].clone())

    def of_tokens(self, at: Tensor) -> Rotary:
        """Return the embedding of some of the tokens, int64 [B, n]."""
        cos, sin, _ = Rotation(self.cos, self.sin).of_tokens(at)
        return replace(self, cos=cos, sin=sin)

    def followed_by(self, other: Rotary) -> Rotary:
        """Return the embedding of these tokens and the next ones."""
        cos, sin = (torch.cat(x, dim=1) for x in ((self.cos, other.cos), (self.sin, other.sin)))
        return replace(self, cos=cos, sin=sin)

    def ahead(self, n: int) -> Rotation:
        """Return cos and sin [B, 1, R] of the text position `n` after the last token."""
        angle = n * self._frequencies()
        return self._rotated_by(angle.cos(), angle.sin())

    def mean_ahead(self, n: int) -> Rotation:
        """Return the mean cos and sin [B, 1, R] of the `n` text positions after the last token."""
        steps = torch.arange(1, n + 1, device=self.inv_freq.device)[:, None]
        angle = steps * self._frequencies()
        return self._rotated_by(angle.cos().mean(0), angle.sin().mean(0))

    def _frequencies(self) -> Tensor:
        """Return radians per position of each dimension, float32 [R]."""
        frequencies = self.inv_freq.float()
        return frequencies.repeat_interleave(2) if self.interleaved else frequencies.repeat(2)

    def _rotated_by(self, cos: Tensor, sin: Tensor) -> Rotation:
        """Return the last token's embedding, rotated by an angle's cos and sin."""
        old_cos, old_sin = self.cos[:, -1:].float(), self.sin[:, -1:].float()
        cos, sin = old_cos * cos - old_sin * sin, old_sin * cos + old_cos * sin
        return Rotation(cos, sin, self.interleaved)


def rows_of(x: Any, at: Tensor) -> Any:
    """Return the rows `at` of a tensor, or of each one that a dataclass holds, in new storage."""
    if isinstance(x, Tensor):
        return x[at.to(x.device)]
    if isinstance(x, Rotary):  # its frequencies are those of all rows
        return replace(x, cos=rows_of(x.cos, at), sin=rows_of(x.sin, at))
    if not is_dataclass(x) or isinstance(x, type):
        return x
    return replace(x, **{f.name: rows_of(getattr(x, f.name), at) for f in fields(x)})


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Apply a rotary embedding cos, sin [B, Q or 1, R] to x [B, h, Q, D]; float32.

    Dimension i is rotated together with i + R / 2 or, if `interleaved`, 2 i together with 2 i + 1.
    """
    R = cos.shape[-1]
    cos, sin, part = cos[:, None].float(), sin[:, None].float(), x[..., :R].float()
    rotated = part * cos
    if interleaved:
        half = torch.stack([-part[..., 1::2], part[..., ::2]], dim=-1).flatten(-2)
        rotated += half * sin
    else:
        h = R // 2
        rotated[..., :h].addcmul_(part[..., h:], sin[..., :h], value=-1)
        rotated[..., h:].addcmul_(part[..., :h], sin[..., h:])
    return rotated if x.shape[-1] == R else torch.cat([rotated, x[..., R:].float()], dim=-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerInputs:
    """The tensors and settings of one layer's attention, from which its tokens are scored.

    In a later turn heads hold different tokens, so each key-value head is a row of its own
    ([B * H, 1, N, D], with the G query heads of its group), and Q < N.

    Attributes:
        query: [B, Hq, Q, D], after rotary embedding, of the last Q of the N tokens.
        key: [B, H, N, D], after rotary embedding.
        value: [B, H, N, Dv].
        valid: bool [B, N], False for padding.
        padded: whether there may be padding; False: the host knows that there is none.
        scale: the layer's factor of query-key products; None: D ** -0.5.
        softcap: bound of the layer's logits (Gemma 2), or None.
        mask: bool [B, 1, Q, N], True where a query sees a key; None: causal.
        log_weights: float32 [B, H, N], the logarithm of each key's weight, which attention adds to
            its logits: above 0 for a group of tokens of earlier turns; None: no groups.
        image: bool [B, N], True for image tokens; None if unknown.
        size: float32 [B], tokens kept of each row, mean over layers and heads; None if no budget
            sets it.
        hidden: [B, Q, hidden], input of the attention block at the queries, if a prompt is fed
            again (`mmkv.attach.repetition`); otherwise None.
        layer_idx: the layer's number in the model.
        rotary: embedding of the last Q tokens; None if the policy does not need it
            (`Policy.uses_rotary`), or the layer has none.
        weight: function that returns the output projection [Hq, hidden, Dv], see `output_weight`.
        of_weight: calls a function with that projection and returns the result [Hq, ...], which is
            cached for the next prompts; None: nothing is cached.
        head: int64 [B], each row's key-value head, if each head is a row; otherwise None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor
    padded: bool = True
    scale: float | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    log_weights: Tensor | None = None
    image: Tensor | None = None
    size: Tensor | None = None
    hidden: Tensor | None = None
    layer_idx: int = 0
    rotary: Rotary | None = None
    weight: Callable[[], Tensor] | None = None
    of_weight: Callable[[Callable[[Tensor], Tensor]], Tensor] | None = None
    head: Tensor | None = None

    def sized(self, sizes: Sequence[float] | None) -> LayerInputs:
        """Return these inputs with each row's `size`; None: no budget sets it."""
        if sizes is None:
            return self
        return replace(self, size=send(np.array(sizes, np.float32), self.key.device))

    @property
    def attention(self) -> dict[str, Any]:
        """Keyword arguments of the functions of `mmkv.scores`, besides query and key."""
        names = ("scale", "softcap", "valid", "mask", "log_weights")
        return {name: getattr(self, name) for name in names}

    @property
    def output_weight(self) -> Tensor:
        """The part of the output projection that reads each query head, [1 or B, Hq, hidden, Dv].

        A head's attention output o adds `output_weight @ o` to the residual stream.

        Raises:
            ValueError: the inputs do not belong to a model's layer.
        """
        if self.weight is None:
            raise ValueError(
                "output_weight is not known: these inputs do not come from a model's layer"
            )
        return self._of_rows(self.weight())

    def of_output_weight(self, function: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return a function of `output_weight`, [1 or B, Hq, ...]; None if that is not known.

        The function is the same in each call, as a model keeps its result for the next prompt.
        """
        if self.weight is None:
            return None
        keep = self.of_weight
        return self._of_rows(function(self.weight()) if keep is None else keep(function))

    def _of_rows(self, x: Tensor) -> Tensor:
        """Return the query heads [Hq, ...] of each row, [1 or B, Hq, ...]."""
        return (
            x[None] if self.head is None else x.unflatten(0, (-1, self.query.shape[1]))[self.head]
        )

    @property
    def plain_query(self) -> Tensor:
        """The queries before rotary embedding, float32 [B, Hq, Q, D]."""
        return self.query.float() if self.rotary is None else self.rotary.undo(self.query)

    def without_gaps(self, present: Tensor, n: int) -> tuple[LayerInputs, Tensor]:
        """Move padding before each row's tokens, and leave all but its n last queries out.

        `present`, bool [B, Q], says which queries are of tokens, n or more in each row.

        Returns:
            The inputs as if the padding between a row's tokens lay before them, and the former
            place of each of the N tokens, int64 [B, N].
        """
        order, last = (
            x.to(torch.uint8).argsort(dim=-1, stable=True) for x in (self.valid, present)
        )
        last = last[:, last.shape[1] - n :]

        def tokens(x: Tensor, dim: int, at: Tensor = order) -> Tensor:
            shape = [len(at), *[1] * (x.ndim - 1)]
            shape[dim] = at.shape[1]
            return torch.take_along_dim(x, at.view(shape), dim=dim)

        mask = None if self.mask is None else tokens(tokens(self.mask, 2, last), 3)
        changed = replace(
            self,
            query=tokens(self.query, 2, last),
            key=tokens(self.key, 2),
            value=tokens(self.value, 2),
            valid=tokens(self.valid, 1),
            mask=mask,
            log_weights=None if self.log_weights is None else tokens(self.log_weights, 2),
            image=None if self.image is None else tokens(self.image, 1),
            rotary=None if self.rotary is None else self.rotary.of_tokens(last),
        )
        return changed, order

    def heads_as_rows(self, valid: Tensor, image: Tensor) -> LayerInputs:
        """Return each key-value head as a row, with its own `valid` and `image` [B, H, N]."""
        B, H = self.key.shape[:2]
        device = self.key.device
        mask, rows = self.mask, torch.arange(B, device=device).repeat_interleave(H)
        if mask is not None:
            mask = mask.expand(B, H, -1, -1).flatten(0, 1)[:, None]
        return replace(
            self,
            query=self.query.unflatten(1, (H, -1)).flatten(0, 1),
            key=self.key.flatten(0, 1)[:, None],
            value=self.value.flatten(0, 1)[:, None],
            valid=valid.flatten(0, 1),
            image=image.flatten(0, 1),
            size=rows_of(self.size, rows),
            mask=mask,
            log_weights=None
            if self.log_weights is None
            else self.log_weights.flatten(0, 1)[:, None],
            rotary=rows_of(self.rotary, rows),
            head=torch.arange(H, device=device).repeat(B),
        )
