"""The kept pairs of a layer as they are stored, without empty slots, and the blocks made of them.

A row is one key-value head of one sequence. The n slots of all rows follow each other, a row's own
in the order of its slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.codes import BITS
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.evict import first_slots, planned
from mmkv.cache.group_index import GroupIndex
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock, block_of
from mmkv.cache.plain import PlainKV
from mmkv.cache.quantize import QuantizedKV


def packed(kept: KeptKV) -> dict[str, Tensor]:
    """Return the tensors of a layer that has read its prompt and not decoded since.

    Returns:
        counts, sizes: int32 [B, H], slots of each row, and [B], see `KeptKV.sizes`.
        positions: int16 [n], or int32 if one needs it.
        keys, values: [n, D]. In 8 or 4 bits instead codes [n, P, N] and ranges [n, 2, 2 G], exact
            [x, 2, N] of the x pairs that are held exactly, and mean [B * H, D].
        scores, bias: float32 and float16 [n], accumulated attention and logarithms of weights, if
            there are.
        group_index: uint8 [B, H, w, T / 8], the planes of the `GroupIndex`, if there is one.
        retained, error: as in `KeptKV`, if they are there.
    """
    pieces: dict[str, list[Tensor]] = {}
    for block in kept.blocks:
        filled, stored = block.held >= 0, block.stored
        slots = {"positions": block.held, "scores": block.scores, "bias": block.log_weights}
        if isinstance(stored, PlainKV):
            slots |= {"keys": stored.keys, "values": stored.values}
        else:
            slots["codes"] = stored.codes.transpose(1, 2)
            slots["ranges"] = stored.ranges.permute(0, 3, 1, 2)
            is_exact = filled.gather(1, stored.exact_slots)
            _add(pieces, "exact", stored.exact, is_exact)
            pieces.setdefault("mean", []).extend(stored.mean)
        for name, x in slots.items():
            _add(pieces, name, x, filled)
        pieces.setdefault("counts", []).extend(filled.sum(-1, keepdim=True).int())
    order = np.concatenate([b.row_numbers for b in kept.blocks]).argsort()
    found = {name: torch.cat([rows[i] for i in order]) for name, rows in pieces.items()}
    if bool((found["positions"] < 2**15).all()):
        found["positions"] = found["positions"].to(torch.int16)
    found["counts"] = found["counts"].view(kept.batch, kept.heads)
    found["sizes"] = torch.tensor(kept.sizes, dtype=torch.int32)
    others = {"retained": kept.retained, "error": kept.error}
    if kept.group_index is not None:
        found["group_index"] = kept.group_index.planes
    return found | {name: x for name, x in others.items() if x is not None}


def _add(pieces: dict[str, list[Tensor]], name: str, x: Tensor | None, filled: Tensor) -> None:
    """Add what `filled` [R, S] takes of x [R, S, ...], a piece for each row."""
    if x is not None:
        pieces.setdefault(name, []).extend(x[filled].split(filled.sum(-1).tolist()))


@dataclass(frozen=True)
class _Rows:
    """Where packed rows lie: row r has `counts[r]` slots, the first of them at `starts[r]`."""

    counts: np.ndarray

    @cached_property
    def starts(self) -> np.ndarray:
        return self.counts.cumsum() - self.counts

    def put(self, x: Tensor, rows: np.ndarray, width: int, fill: float = 0) -> Tensor:
        """Return these rows of x [n, ...] as [R', width, ...], `fill` behind a row's own slots."""
        out = x.new_full((len(rows), width, *x.shape[1:]), fill)
        filled = np.arange(width) < self.counts[rows, None]
        at = self.starts[rows, None] + np.arange(width)
        out[torch.from_numpy(filled).to(x.device)] = x[torch.from_numpy(at[filled]).to(x.device)]
        return out


def unpacked(plan: CacheConfig, prompt: TokenMasks, tensors: dict[str, Tensor]) -> KeptKV:
    """Return the layer of which `packed` made the tensors, on their device.

    Slots behind those in use hold zeros, as many as a new cache of unknown length has.
    """
    (B, H), device, n_first = (
        tensors["counts"].shape,
        tensors["positions"].device,
        max(1, plan.policy.sinks),
    )
    counts = tensors["counts"].flatten().cpu().numpy().astype(np.int64)
    slots, exact = _Rows(counts), _Rows(np.minimum(counts, n_first))
    row_of = torch.from_numpy(np.arange(B * H).repeat(counts)).to(device)
    protected = prompt.protected.to(device)[row_of // H, tensors["positions"].long()]
    n_protected = torch.bincount(row_of[protected], minlength=B * H).cpu().numpy()
    names = tensors.keys() & {"positions", "keys", "values", "codes", "ranges", "scores", "bias"}
    blocks: list[PaddedBlock] = []
    for rows, schedule, width, capacity in planned(plan, prompt, counts, n_protected, 0, device):
        x = {k: slots.put(tensors[k], rows, capacity, -(k == "positions")) for k in names}
        positions, index = x["positions"].int(), torch.from_numpy(rows).to(device)
        if plan.kv_dtype is None:
            stored: PlainKV | QuantizedKV = PlainKV(x["keys"], x["values"])
        else:
            ranges = x["ranges"].permute(0, 2, 3, 1).contiguous()
            ranges[:, 0].masked_fill_(positions[:, None] < 0, 1.0)
            exact_slots = first_slots(positions, width, n_first)
            exact_pairs = exact.put(tensors["exact"], rows, exact_slots.shape[1])
            stored = QuantizedKV(
                x["codes"].transpose(1, 2).contiguous(),
                *(ranges, exact_pairs, exact_slots, tensors["mean"][index][:, None]),
                bits=BITS[plan.kv_dtype],
                start=prompt.valid.shape[1],
                opened=False,
                reuses=schedule.drops or width == 0,
            )
        more = x.get("scores"), x.get("bias"), width
        blocks.append(block_of(rows, stored, positions, schedule, *more))
    planes = tensors.get("group_index")
    groups = None if planes is None else GroupIndex(planes, prompt.valid.shape[1])
    shares = tensors.get("retained"), tensors.get("error")
    return KeptKV(blocks, B, H, tensors["sizes"].tolist(), *shares, groups)
