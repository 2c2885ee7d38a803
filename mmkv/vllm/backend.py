"""Worker side: attention of the small heads in plain torch, on any device.

When the tokens before a request's boundary b have been read, their M compressed pairs overwrite the
slots of the last M of them, M = b - dropped * block; all later tokens read from there on. In 8 bits
the same blocks hold more pairs: the whole ones hold codes, and a part of a block that is before b
the last pairs as they are. H are the KV heads of a module or of one class in it, u those of one
unit of pages, G the query heads of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout

from mmkv.vllm import batch
from mmkv.vllm.causal import attend, causal
from mmkv.vllm.compress import Prompt, compress
from mmkv.vllm.pages import Codes, coded


@dataclass
class PromptRow:
    """A request of which a step reads a part of the prompt, or several tokens after it."""

    index: int
    request: str
    boundary: int
    computed: int  # tokens before this step
    until: int  # tokens after this step
    start: int  # index of its first query in the batch
    dropped: int  # blocks that it frees at the boundary
    first: int  # the first block of pairs after it; those between are codes
    kept: int  # pairs that it then holds of the tokens before


@dataclass
class StepPlan:
    """What all layers of one class do in a step.

    R rows have one token after their boundary, and read V blocks of codes and W of pairs, of which
    some may not be theirs.
    """

    tokens: int
    rows: list[PromptRow]
    row: Tensor  # [R], indices of rows
    at: Tensor | slice  # [R], indices of their tokens; a slice if these are all tokens
    codes: Tensor  # [R, V], indices into a row of the block table
    codes_own: Tensor  # bool [R, V]
    blocks: Tensor  # [R, W]
    own: Tensor  # bool [R, W]
    compressed: Tensor  # bool [R, 1, n]: a slot's weight counts
    other: Tensor  # float32 [R, 1, n], for other slots: 0, and -inf for none
    begun: Tensor | None  # indices of tokens that begin a block; None: without codes


@dataclass
class Metadata:
    """A plan with the blocks of one KV cache group."""

    plan: StepPlan
    all_blocks: Tensor  # [requests, ...]
    codes: Tensor  # [R * V]
    table: Tensor  # [R * W]
    block: Tensor  # [tokens], where new pairs go
    slot: Tensor
    begun: Tensor | None  # [tokens that begin a block], these blocks


@dataclass(eq=False)
class HeadPart:
    """The heads of a `SmallHeads` module that keep the same share of a prompt."""

    layer: Any
    heads: tuple[int, ...]
    own: slice  # their places in the module
    units: list[Any]  # of pages, in the order of the heads

    @property
    def name(self) -> str:
        """The name of the first unit."""
        return self.units[0].layer_name


class Builder(AttentionMetadataBuilder[Metadata]):
    """Plans a step once for all layers of a class."""

    # Plans depend on the batch's lengths, so no attention of ours is inside a full CUDA graph.
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in the base class
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        """Return the metadata of one group's layers."""
        step, spec, cm = batch.state().step, self.kv_cache_spec, common_attn_metadata
        kind = spec.sizes, spec.block_size
        plan = step.built.get(kind)
        if plan is None:
            plan = step.built[kind] = self._plan(step, cm)
        key = kind, id(cm.block_table_tensor)  # vLLM has a builder for each number of heads
        if key not in step.built:
            step.built[key] = cm.block_table_tensor, self._blocks(plan, cm)
        return step.built[key][1]

    def _plan(self, step: batch.StepBatch, cm: Any) -> StepPlan:
        size, number = self.kv_cache_spec.block_size, min(len(step.requests), cm.num_reqs)
        starts = cm.query_start_loc_cpu[: number + 1].numpy().astype(np.int64)
        until = cm.seq_lens_cpu_upper_bound[:number].numpy().astype(np.int64)
        count = np.diff(starts)
        boundary, computed = step.boundaries[:number], until - count
        sizes = self.kv_cache_spec.sizes
        dropped = first = sizes.dropped(boundary, size)
        if sizes.codes is not None:
            first = np.where(dropped > 0, boundary // size, 0)
        single = (computed >= boundary) & (count == 1)
        kept = sizes.kept(boundary, dropped, size)
        fields = boundary, computed, until, starts, dropped, first, kept
        rows = [
            PromptRow(i, step.requests[i], *(int(x[i]) for x in fields))
            for i in np.flatnonzero(~single).tolist()
        ]
        drop, start, length = dropped[single], first[single], (until - first * size)[single]
        held = np.where(drop > 0, boundary[single] - start * size, 0)
        n_codes, n_blocks = (start - drop).max(initial=0), -(-length.max(initial=0) // size)
        packed = [np.flatnonzero(single), starts[:-1][single], drop, start, length, held]
        row, at, drop, start, length, held = self._put(np.stack(packed))
        codes, blocks, slots = (
            torch.arange(int(n), device=self.device) for n in (n_codes, n_blocks, n_blocks * size)
        )
        other = torch.zeros(len(row), len(slots), device=self.device)
        begun = None
        if sizes.codes is not None:
            position = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], count)
            begun = self._put(np.flatnonzero(position % size == 0))
        return StepPlan(
            tokens=int(starts[-1]),
            rows=rows,
            row=row,
            at=at if rows else slice(int(starts[-1])),
            codes=codes + drop[:, None],
            codes_own=codes < (start - drop)[:, None],
            blocks=blocks + start[:, None],
            own=blocks * size < length[:, None],
            compressed=(slots < held[:, None])[:, None],
            other=other.masked_fill_(slots >= length[:, None], -torch.inf)[:, None],
            begun=begun,
        )

    def _put(self, x: np.ndarray) -> Tensor:
        on_host = torch.from_numpy(x)
        if self.device.type == "cuda":
            on_host = on_host.pin_memory()
        return on_host.to(self.device, non_blocking=True)

    def _blocks(self, plan: StepPlan, cm: Any) -> Metadata:
        size, table = self.kv_cache_spec.block_size, cm.block_table_tensor
        of_rows = table[plan.row]

        def of(at: Tensor, own: Tensor) -> Tensor:
            # A table is stale beyond a row's own blocks. Block 0 belongs to no request.
            at = at.clamp(max=table.shape[1] - 1)
            return torch.where(own, of_rows.gather(1, at), 0).flatten()

        codes, own = of(plan.codes, plan.codes_own), of(plan.blocks, plan.own)
        slots = cm.slot_mapping[: plan.tokens].clamp(min=0)
        block = slots // size
        begun = None if plan.begun is None else block[plan.begun]
        return Metadata(plan, table, codes, own, block, slots % size, begun)


class Impl(AttentionImpl[Metadata]):
    """Attention of all heads of a `SmallHeads` module."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new pairs, attend, and compress the prompts whose boundary is reached."""
        if attn_metadata is None:  # a profiling run
            return output.zero_()
        n, metas = attn_metadata.plan.tokens, get_forward_context().attn_metadata
        query = query[:n].unflatten(1, (self.num_kv_heads, -1))  # [tokens, H, G, D]
        # A masked slot may hold another request's pair, and a NaN would pass through the mask.
        pairs = _finite(torch.cat([key, value], -1)[:n])  # [tokens, H, 2 * D]
        out = output.view(len(output), *query.shape[1:])
        for part in layer.parts:
            units = [(unit.pages, metas[unit.layer_name]) for unit in part.units]
            self._part(part, units, *(x[:, part.own] for x in (query, pairs, out)))
        return output

    def _part(self, part: HeadPart, units: Any, query: Tensor, pairs: Tensor, out: Tensor) -> None:
        """Write the new pairs of one class of heads, attend, and compress as `forward` does."""
        plan = units[0][1].plan
        for (pages, meta), of_unit in zip(units, pairs.chunk(len(units), 1), strict=True):
            if meta.begun is not None:  # codes that a block held before may be NaN as numbers
                pages.pairs[meta.begun] = 0.0
            pages.pairs[meta.block, :, meta.slot] = of_unit
        if R := len(plan.row):
            tables = [meta.table for _, meta in units]
            weights = _by_row(_copied(units, tables, "weights"), R)
            bias = torch.where(plan.compressed, weights, plan.other)
            held = _by_row(_copied(units, tables, "pairs"), R)
            if plan.codes.shape[1]:
                codes = self._codes(units, [meta.codes for _, meta in units], plan.codes_own)
                held = _joined(codes, held)
                bias = torch.cat([codes.weights.flatten(2), bias], 2)
            keys, values = held.chunk(2, -1)
            bias = bias.to(query.dtype)[:, :, None]
            out[plan.at] = scaled_dot_product_attention(
                query[plan.at], keys, values, bias, scale=self.scale
            )
        for row in plan.rows:
            self._row(part, units, row, query, pairs, out)

    def _codes(self, units: Any, tables: list[Tensor], own: Tensor) -> Codes:
        """Copy blocks of codes [R * V]: [R, H, V, c, ...]. Those that are not `own` are empty."""
        content = _copied(units, tables, "content").unflatten(1, own.shape)
        heads, own = units[0][0].pairs.shape[1], own[:, None, :, None]
        codes, steps, weights = (  # of [units, R, V, u, c, ...]
            x.movedim(0, 1).movedim(3, 2).flatten(1, 2)
            for x in Codes.of(content, heads, self.head_size)
        )
        steps = steps.masked_fill(~own[..., None], 0.0)
        return Codes(codes, steps, weights.masked_fill(~own, -torch.inf))

    def _row(
        self, part: HeadPart, units: Any, row: PromptRow, query: Tensor, pairs: Tensor, out: Tensor
    ) -> None:
        """Attend from a row's tokens, and compress what is before its boundary once it is read."""
        b, size = row.boundary, units[0][0].pairs.shape[2]
        end = min(row.until, b) if row.dropped else row.until  # of what is read as a prompt
        n = max(0, end - row.computed)
        if n:
            tokens = slice(row.start, row.start + n)
            if row.computed:
                keys, values = self._blocks(units, row, 0, end, "pairs")[:, :end].chunk(2, -1)
            else:
                keys, values = pairs[tokens].transpose(0, 1).chunk(2, -1)
            out[tokens] = causal(query[tokens], keys, values, self.scale)
            if row.dropped:
                if row.kept < b:
                    self._remember(part, row, query[tokens])
                if end == b:
                    self._compress(part, units, row)
        if row.until > end:  # tokens after a compressed prefix
            tokens = slice(row.start + n, row.start + row.until - row.computed)
            where = units, row, row.first, row.until
            held, weights = self._blocks(*where, "pairs"), self._blocks(*where, "weights")
            position = torch.arange(held.shape[1], device=held.device) + row.first * size
            last = torch.arange(row.computed + n, row.until, device=held.device)[:, None]
            bias = torch.where(position < b, weights, 0.0)[:, None]
            bias = bias.masked_fill(position > last, -torch.inf)
            if row.first > row.dropped:
                tables = [m.all_blocks[row.index, row.dropped : row.first] for _, m in units]
                own = torch.ones(1, len(tables[0]), dtype=torch.bool, device=held.device)
                codes = self._codes(units, tables, own)
                held = _joined(codes, held[None])[0]
                weights = codes.weights[0].flatten(1)[:, None].expand(-1, len(last), -1)
                bias = torch.cat([weights, bias], 2)
            keys, values = held.chunk(2, -1)
            bias = bias[:, None].to(query.dtype)
            out[tokens] = attend(query[tokens], keys, values, self.scale, attn_mask=bias)

    def _blocks(self, units: Any, row: PromptRow, first: int, until: int, name: str) -> Tensor:
        """Copy a row's blocks from `first` up to a token: their pairs or weights [H, n, ...]."""
        stop = -(-until // units[0][0].pairs.shape[2])
        tables = [m.all_blocks[row.index, first:stop] for _, m in units]
        return _by_row(_copied(units, tables, name), 1)[0]

    def _remember(self, part: HeadPart, row: PromptRow, query: Tensor) -> None:
        """Keep the queries of a chunk that the policy needs at the boundary."""
        last = part.layer.settings.queries
        kept = batch.state().seen[row.request][part.name]
        query = query.flatten(1, 2)
        kept.append((query if last is None else query[max(0, len(query) - last) :]).clone())
        if last is not None:
            while len(kept) > 1 and sum(map(len, kept[1:])) >= last:
                kept.pop(0)

    def _compress(self, part: HeadPart, units: Any, row: PromptRow) -> None:
        """Write what is kept of the tokens before a row's boundary: codes, then pairs."""
        b, size = row.boundary, units[0][0].pairs.shape[2]
        first = row.first * size
        keys, values = (
            x.float().contiguous()  # rows are read by index, many times
            for x in self._blocks(units, row, 0, b, "pairs")[:, :b].chunk(2, -1)
        )
        weights = keys.new_zeros(keys.shape[:2])
        if row.kept < b:
            prompt = self._prompt(part, row, keys, values)
            keys, values, weights = compress(prompt, row.kept, part.layer.settings.policy)
        n_codes, position = row.kept - (b - first), torch.arange(first, b, device=keys.device)
        new = (x.chunk(len(units)) for x in (keys, values, weights))
        for (pages, meta), *of_unit in zip(units, *new, strict=True):
            table = meta.all_blocks[row.index]
            if row.first > row.dropped:
                key, value, weight = (x[:, :n_codes] for x in of_unit)
                codes = coded(key, value, weight, pages.content)
                pages.content[table[row.dropped : row.first]] = codes
            key, value, weight = (x[:, n_codes:].transpose(0, 1) for x in of_unit)
            at = table[position // size], slice(None), position % size
            pages.pairs[at] = _finite(torch.cat([key, value], -1).to(pages.pairs.dtype))
            pages.weights[at] = weight

    def _prompt(self, part: HeadPart, row: PromptRow, keys: Tensor, values: Tensor) -> Prompt:
        """Return what a policy is given of the tokens before a row's boundary."""
        # Exactly the last ones, so that the result does not depend on how the prompt was cut.
        last = part.layer.settings.queries
        query = torch.cat(batch.state().seen[row.request].pop(part.name))
        query = query if last is None else query[-last:]
        return Prompt(
            query.transpose(0, 1).float(),
            keys,
            values,
            self.scale,
            batch.rotary(part),
            partial(batch.output_weights, part),
            partial(batch.of_output_weights, part),
            batch.image_tokens(row.request, row.boundary),
            extract_layer_index(part.name),
        )


def _copied(units: Any, tables: list[Tensor], name: str) -> Tensor:
    """Copy blocks of a part of each unit's pages: [units, blocks, ...]."""
    parts = [getattr(pages, name) for pages, _ in units]
    out = parts[0].new_empty(len(units), len(tables[0]), *parts[0].shape[1:])
    for place, part, table in zip(out, parts, tables, strict=True):
        # It copies whole blocks, in a third of the time of `part[table]`.
        torch.index_select(part, 0, table, out=place)
    return out


def _by_row(x: Tensor, rows: int) -> Tensor:
    """Return the slots of each row's heads, [R, H, n, ...], of [units, blocks, u, block, ...]."""
    x = x.transpose(1, 2).flatten(0, 1).flatten(1, 2)
    return x.unflatten(1, (rows, -1)).transpose(0, 1)


def _joined(codes: Codes, held: Tensor) -> Tensor:
    """Return the pairs of codes, and then the others [R, H, n, 2 * D], in one tensor."""
    R, H, n, size = held.shape
    m = codes.weights[0, 0].numel()
    out = held.new_empty(R, H, m + n, size)
    out[:, :, m:] = held
    codes.read(out[:, :, :m].unflatten(2, codes.weights.shape[2:]))
    return out


def _finite(pairs: Tensor) -> Tensor:
    """Write zeros in place of NaN and infinity."""
    return pairs.nan_to_num_(0.0, 0.0, 0.0)


class Backend(AttentionBackend):
    """Attention of small heads."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012

    # `forward_includes_kv_cache_update` stays True: vLLM's separate update knows one unit only.

    @staticmethod
    def get_name() -> str:
        """Return vLLM's name for backends of plugins."""
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """Return the attention."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """Return the builder of metadata."""
        return Builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return those in which a page is one run of bytes."""
        return tuple(KVCacheLayout[name] for name in ("LBNHC", "LBHNC", "BLNHC", "BLHNC"))
