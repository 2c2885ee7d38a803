"""All tokens of a layer before eviction, as one rectangle: a whole prompt, or the kept tokens of
earlier turns followed by a new turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import selection
from mmkv.cache.config import TokenMasks
from mmkv.cache.kernels import attend
from mmkv.cache.sizing import marked
from mmkv.layer_inputs import LayerInputs, Rotary, rows_of
from mmkv.merge.reference import ReferenceQueries
from mmkv.policy import Policy
from mmkv.tensors import tile

# Largest number of mask elements at a time on a device, which then reads all keys.
_MASK_TILE = 2**26


@dataclass(frozen=True)
class Tail:
    """The last queries of the chunks of a prompt read so far, if its score needs them."""

    query: Tensor | None = None  # [B, Hq, w, D]
    mask: Tensor | None = None  # bool [B, 1 or H, w, U], which keys they see; None: causal
    rotary: Rotary | None = None  # of these queries, if the score needs it
    present: Tensor | None = None  # bool [B, w], False for padding


@dataclass
class PromptKV:
    """The tokens of one layer, in order of position.

    Attributes:
        keys, values: [B, H, U, D].
        positions: int64 [B, 1 or H, U], ascending; -1 where there is no token.
        scores: float32 [B, 1 or H, U], importance; None if no score was computed.
        tail: the last queries of the prompt's chunks so far.
        weights: float32 [B, H, U], how many tokens each pair stands for; None: one each.
        log_weights: float32 [B, H, U], added to the logits of each pair; None if `weights` is None.
        group_index: int64 [B, H, T], the group of each token seen up to the last turn, by its
            leader, see `GroupIndex.of`; None if there are no groups.
        measured: float32 [B], the result of `Layers.measure` for the layer sizes; None: not used.
        reference: queries that the weights of groups are fitted to; None: a weight is a count.
        evicted: whether an earlier eviction may have dropped tokens.
        means: [B, H, 1, D], means of rotated keys, which were subtracted before the keys became
            codes; used again, so that storing them again gives the same codes; NaN for a row
            without earlier pairs; None: pairs were not codes.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None
    tail: Tail = Tail()
    weights: Tensor | None = None
    log_weights: Tensor | None = None
    group_index: Tensor | None = None
    measured: Tensor | None = None
    reference: ReferenceQueries | None = None
    evicted: bool = False
    means: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of keys and values."""
        storages = [x.untyped_storage() for x in (self.keys, self.values)]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def masked(self, valid: Tensor) -> PromptKV:
        """Remove the tokens for which `valid`, bool [B, T] by position, is False."""
        (is_kept,) = marked([valid], self.positions)
        positions = self.positions.masked_fill(~is_kept, -1)
        # Move the remaining tokens to the end, in order of position; cut off the empty columns.
        start = int((~is_kept).sum(-1).min())
        order = positions.argsort(dim=-1, stable=True)[..., start:]

        def by_age(x: Tensor) -> Tensor:
            return torch.take_along_dim(x, order if x.ndim == 3 else order[..., None], dim=2)

        names = ("keys", "values", "scores", "weights", "log_weights")
        present = {name: x for name in names if (x := getattr(self, name)) is not None}
        moved = {name: by_age(x) for name, x in present.items()}
        return replace(self, positions=by_age(positions), **moved)

    def select_rows(self, batch: Tensor) -> PromptKV:
        """Return the rows `batch`, which may repeat, in new storage."""
        return rows_of(self, batch)

    def extended(self, key: Tensor, value: Tensor, positions: Tensor) -> PromptKV:
        """Append the pairs [B, H, q, D] of new tokens at `positions` [B, 1, q]."""
        B, _, q, _ = key.shape
        heads = self.positions.shape[1]
        return replace(
            self,
            keys=torch.cat([self.keys, key], dim=2),
            values=torch.cat([self.values, value], dim=2),
            positions=torch.cat([self.positions, positions.expand(B, heads, q)], dim=2),
            scores=None if self.scores is None else pad(self.scores, (0, q)),
            weights=None if self.weights is None else pad(self.weights, (0, q), value=1.0),
            log_weights=None if self.log_weights is None else pad(self.log_weights, (0, q)),
        )

    def attend(
        self,
        query: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        among: Tensor | None = None,
    ) -> Tensor:
        """Attend from the last q tokens to all: query [B, Hq, q, D] -> [B, q, Hq, D].

        `among`, bool [B, 1, q, q], says which of the q see which (None: causal). Other arguments
        are those of `kernels.attend`.
        """
        B, Hq, q, _ = query.shape
        H, U = self.keys.shape[1:3]
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        positions = self.positions.expand(B, H, -1).flatten(0, 1)
        if among is not None:
            among = among.to(keys.device).expand(B, H, q, q).flatten(0, 1)
        old, present = U - q, positions[:, None] >= 0
        past_bias = torch.zeros(present[..., :old].shape, dtype=query.dtype, device=keys.device)
        if self.log_weights is not None:
            past_bias += self.log_weights.flatten(0, 1)[:, None, :old]
        past_bias.masked_fill_(~present[..., :old], -torch.inf)
        # The mask of n queries is [R, n, U]: bound its size by taking some queries at a time.
        out: list[Tensor] = []
        limit = tile(keys.device) if keys.device.type == "cpu" else _MASK_TILE
        chunk = max(1, limit // (B * H * U))
        for start in range(0, q, chunk):
            n = min(chunk, q - start)
            if among is None:
                causal = torch.ones(n, q, dtype=torch.bool, device=keys.device).tril(start)
                sees = causal & present[..., old:]
            else:
                sees = among[:, start : start + n].clone()
            # Every new token sees itself, even padding: a softmax over no key would be NaN.
            sees[..., start:].diagonal(dim1=1, dim2=2).fill_(True)
            visible = past_bias.new_zeros(B * H, n, U)
            visible[..., :old] = past_bias
            visible[..., old:].masked_fill_(~sees, -torch.inf)
            head_queries = query[:, :, start : start + n].reshape(B * H, Hq // H * n, -1)
            chunk_out = attend(head_queries, keys, values, visible, scale, softcap)
            out.append(chunk_out.view(B, Hq, n, -1).transpose(1, 2))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def score(
        self,
        policy: Policy,
        new: LayerInputs,
        masks: TokenMasks,
        mean_sizes: Sequence[float] | None,
    ) -> None:
        """Score all tokens by the new queries, and combine the result with earlier scores.

        After an eviction, a window score pools over tokens that are neighbours in the cache, not
        in the text. `new` are the inputs of the latest tokens; `mean_sizes` is [B].
        """
        windows: Sequence[int] = masks.windows
        layer, present = self._inputs(new), self._present(new)
        if not self.evicted and all(n == self.keys.shape[2] for n in masks.lengths):
            layer = replace(layer, padded=False)
        layer = layer.sized(mean_sizes)
        if policy.merge is not None and policy.merge.fit:
            self.reference = ReferenceQueries.of(layer, present, policy.merge.fit, policy.queries)
        if layer.query.shape[2] < self.keys.shape[2] and policy.window_size:
            # In a turn shorter than the window, all of its queries make up the window.
            n_queries = present.sum(-1).tolist()
            windows = [max(1, min(w, n)) for w, n in zip(windows, n_queries, strict=True)]
        per_head = self.positions.shape[1] > 1
        (image,) = marked([masks.image], self.positions)
        if per_head:  # heads keep different tokens: score each as a row of its own
            layer = layer.heads_as_rows(self.positions >= 0, image)
            windows = [w for w in windows for _ in range(self.keys.shape[1])]
            present = present.repeat_interleave(self.keys.shape[1], dim=0)
        else:
            layer = replace(layer, image=image[:, 0])
        apart = present if any(masks.inner_padding) else None
        if policy.layers.needs == "measure":
            same = [0] * len(layer.key)
            measured = selection.by_parts(layer, same, apart, lambda _, x: _measured(policy, x))
            self.measured = measured.unflatten(0, (len(self.keys), -1)).mean(1)
        scores = selection.importance(policy, layer, windows, apart)
        if any(masks.ends_in_padding):  # a row without new tokens asks for none
            scores = scores.masked_fill(~present.any(-1)[:, None, None], 0.0)
        if per_head:
            scores = scores.view(self.keys.shape[:3])
            if policy.score.average_heads:
                scores = scores.mean(dim=1, keepdim=True)
        if self.scores is not None and (reduction := policy.score.turn_reduction):
            old = self.scores[:, : scores.shape[1]]
            common = scores[..., : old.shape[-1]]
            common.add_(old) if reduction == "sum" else torch.maximum(common, old, out=common)
        self.scores = scores

    def record_tail(self, policy: Policy, new: LayerInputs, masks: TokenMasks) -> None:
        """Store a copy of a chunk's last queries, which the score may need later."""
        if policy.queries == 0:
            return
        layer, present = self._inputs(new), self._present(new)
        last = layer.query.shape[2] if policy.queries is None else policy.queries
        if any(masks.inner_padding):  # as many as hold the last ones of each row
            number = present.flip(-1).cumsum(-1)
            last = int((number < number[:, -1:].clamp(max=last)).sum(-1).max()) + 1
        self.tail = Tail(
            layer.query[:, :, -last:].clone(),
            None if layer.mask is None else layer.mask[:, :, -last:].clone(),
            None if layer.rotary is None else layer.rotary.last(last),
            present[:, -last:].clone(),
        )

    def _present(self, new: LayerInputs) -> Tensor:
        """Return which queries of `_inputs` are of tokens, bool [B, Q], False for padding."""
        present, tail = self.positions[:, 0, -new.query.shape[2] :] >= 0, self.tail.present
        return present if tail is None else torch.cat([tail.to(present.device), present], dim=1)

    def _inputs(self, new: LayerInputs) -> LayerInputs:
        """Return a layer's inputs: all its pairs, and queries and masks of earlier chunks too."""
        new = replace(
            new,
            key=self.keys,
            value=self.values,
            valid=self.positions[:, 0] >= 0,
            log_weights=self.log_weights,
        )
        tail, mask = self.tail, new.mask
        q, U = new.query.shape[2], self.keys.shape[2]
        present = (self.positions >= 0)[:, :, None]  # [B, 1 or H, 1, U]
        if mask is not None:
            among = mask.to(present.device).expand(-1, present.shape[1], -1, -1)
            mask = torch.cat([present[..., : U - q].expand(-1, -1, q, -1), among], dim=-1)
        if tail.query is None:
            return replace(new, mask=mask)
        if mask is not None or tail.mask is not None:
            places = torch.arange(U, device=present.device)

            def causal(last: int, n: int) -> Tensor:
                until = torch.arange(last - n, last, device=present.device)
                return present & (places <= until[:, None])

            tail_mask = causal(U - q, tail.query.shape[2]) if tail.mask is None else tail.mask
            tail_mask = pad(tail_mask, (0, U - tail_mask.shape[-1]))
            masks = tail_mask, causal(U, q) if mask is None else mask
            heads = max(x.shape[1] for x in masks)
            mask = torch.cat([x.expand(-1, heads, -1, -1) for x in masks], dim=2)
        rotary = new.rotary
        if rotary is not None and tail.rotary is not None:
            rotary = tail.rotary.followed_by(rotary)
        return replace(new, query=torch.cat([tail.query, new.query], 2), mask=mask, rotary=rotary)


def _measured(policy: Policy, layer: LayerInputs) -> Tensor:
    """Return what the policy's `Layers` part measures of a layer, [B]."""
    found = policy.layers.measure(layer)
    B, name = len(layer.key), type(policy.layers).__name__
    if not isinstance(found, Tensor) or found.shape != (B,):
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{name}.measure returned {got}: expected a tensor [B] = {(B,)}")
    return found


def token_numbers(positions: Tensor, leaders: Tensor) -> Tensor:
    """Return how many tokens each pair stands for, float32 [B, H, U]; 1 for an empty slot.

    `leaders` is int64 [B, H, T], the leader of each token's group, see `GroupIndex.of`.
    """
    T = leaders.shape[-1]
    counts = leaders.new_zeros(*leaders.shape[:2], T + 1, dtype=torch.float32)  # T: no token
    counts.scatter_add_(-1, leaders.clamp(min=0), (leaders >= 0).to(counts.dtype))
    return counts.gather(-1, positions.masked_fill(positions < 0, T).clamp(max=T)).clamp(min=1.0)
