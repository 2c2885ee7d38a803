"""The kept pairs of a layer as a file holds them, without empty slots: packed, checked, unpacked.

A row is one key-value head of one sequence. The n slots of all rows follow each other, a row's own
in the order of its slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.evict import first_slots, plan_blocks, score_dtype
from mmkv.cache.group_index import GroupIndex
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock, block_of
from mmkv.cache.plain import PlainKV
from mmkv.cache.quantize import QuantizedKV
from mmkv.memory import BITS, group
from mmkv.tensors import no_autocast


@dataclass(frozen=True)
class Spec:
    """The shape of a tensor of a file (None for any length), its dtypes and its range."""

    shape: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    low: float = -math.inf
    high: float = math.inf

    def check(self, name: str, x: Tensor) -> None:
        """Raise a ValueError if a tensor is not as it must be."""
        shapes = zip(self.shape, x.shape, strict=False)
        fits = x.ndim == len(self.shape) and all(n in (None, m) for n, m in shapes)
        if not fits or x.dtype not in self.dtypes:
            dtypes = " or ".join(str(d).removeprefix("torch.") for d in self.dtypes)
            shape = ", ".join("n" if n is None else str(n) for n in self.shape)
            raise ValueError(
                f"{name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, "
                f"expected {dtypes} [{shape}]"
            )
        if not bool((x.isfinite() & (x >= self.low) & (x <= self.high)).all()):
            raise ValueError(
                f"{name} has numbers that are not finite or not in [{self.low}, {self.high}]"
            )


def layout(
    plan: CacheConfig,
    masks: TokenMasks,
    pair_shape: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    tensors: Mapping[str, Tensor],
) -> dict[str, Spec]:
    """Return what the tensors of a packed layer must be, by name.

    Args:
        plan, masks: of the cache.
        pair_shape: H and D.
        dtypes: those in which the model may have written keys and values.
        tensors: those of a file, whose lengths are n, the number of slots, and x, the number of
            pairs held exactly.
    """
    (B, T), (H, D), policy = masks.valid.shape, pair_shape, plan.policy
    n, x = (len(tensors[k]) if k in tensors and tensors[k].ndim else 0 for k in _COUNTED)
    specs = {
        "counts": Spec((B, H), (torch.int32,), 0, T),  # slots of each row
        "sizes": Spec((B,), (torch.int32,), 0, T),  # see `KeptKV.sizes`
        "positions": Spec((n,), (torch.int16, torch.int32), 0, T - 1),
    }
    if plan.kv_dtype is None:
        specs |= {"keys": Spec((n, D), dtypes), "values": Spec((n, D), dtypes)}
    else:  # see `QuantizedKV`
        bits = BITS[plan.kv_dtype]
        means = tuple(torch.promote_types(x, torch.float32) for x in dtypes)
        specs |= {
            "codes": Spec((n, bits // 4, D), (torch.int8,)),
            "steps": Spec((n, 2 * D // group(D)), (torch.float16,)),
            "exact": Spec((x, 2, D), dtypes),
            "mean": Spec((B * H, D), means),
            "error": Spec((B, 2), low=0.0),
        }
    evicted = any(plan.evicting(masks)) or policy.score.repeats
    has_scores = {"": False, "sum": True, "max": evicted}[policy.score.turn_reduction]
    if (has_scores or policy.decode.needs_decode_attention) and not plan.keeps_all:
        specs["scores"] = Spec((n,), (score_dtype(policy),), low=0.0)
    merges = policy.merge is not None and policy.merge.weighted
    if merges and n != H * sum(masks.lengths):
        # The logarithm of a group's weight; weights far from this would overflow.
        specs["bias"] = Spec((n,), dtypes, low=-32.0, high=32.0)
        specs["group_index"] = Spec((B, H, None, -(-T // 8)), (torch.uint8,))
    if policy.score.ranks and "retained" in tensors:
        specs["retained"] = Spec((B,), low=0.0, high=1.0)
    return specs


# Their lengths are the number of a layer's slots, and of its pairs held exactly.
_COUNTED = ("positions", "exact")


def check_rows(plan: CacheConfig, masks: TokenMasks, tensors: Mapping[str, Tensor]) -> None:
    """Check that a layer of this `layout` holds what a cache holds of the prompt.

    Raises:
        ValueError: counts are not those of the slots; a row's positions are not in stored order,
            or lack one that is pinned; or groups are not led by kept tokens.
    """
    (B, T), H = masks.valid.shape, tensors["counts"].shape[1]
    counts, position = tensors["counts"].flatten().long(), tensors["positions"].long()
    n_exact = counts.clamp(max=plan.policy.n_exact).sum() if plan.kv_dtype else 0
    lengths = [len(tensors.get(name, ())) for name in _COUNTED]
    if [int(counts.sum()), int(n_exact)] != lengths:
        raise ValueError(f"counts sum to {int(counts.sum())} slots, but it has {lengths[0]}")
    row = torch.arange(B * H, device="cpu").repeat_interleave(counts)
    batch = row // H
    order = row * 2 * T + ~masks.protected[batch, position] * T + position
    n_pinned = torch.bincount(row[masks.pinned[batch, position]], minlength=B * H)
    valid = masks.valid[batch, position].all() & (order[1:] > order[:-1]).all()
    valid &= (n_pinned == torch.tensor(masks.n_pinned, device="cpu").repeat_interleave(H)).all()
    if not bool(valid):
        raise ValueError("positions are not kept tokens in stored order")
    if "group_index" in tensors:
        _check_groups(tensors["group_index"], tensors["bias"], row, position, masks)


def _check_groups(
    planes: Tensor, bias: Tensor, row: Tensor, position: Tensor, masks: TokenMasks
) -> None:
    """Check that kept tokens lead the groups, and that only groups have weights."""
    T, w = masks.valid.shape[1], planes.shape[2]
    if not 1 < w < T.bit_length() + 3:
        raise ValueError(f"group_index has codes of {w} bits")
    leaders = GroupIndex(planes, T).leaders()
    group = leaders.flatten(0, 1)
    R, lead = len(group), group.clamp(min=0)
    is_lead = torch.zeros(R, T, dtype=torch.bool, device="cpu")
    is_lead[row, position] = True
    valid = is_lead.gather(-1, lead) & masks.valid.repeat_interleave(R // len(masks.valid), dim=0)
    same = GroupIndex.of(leaders).planes
    if not (same.equal(planes) and bool((valid | (group < 0)).all())):
        raise ValueError("group_index names groups without a stored pair")
    sizes = torch.zeros_like(lead).scatter_add_(-1, lead, (group >= 0).long())
    if bool((bias[sizes[row, position] < 2] != 0).any()):
        raise ValueError("bias is not 0 for tokens in no group")


def packed(kept: KeptKV) -> dict[str, Tensor]:
    """Return the tensors of a layer that has read its prompt and not decoded since: `layout`."""
    pieces: dict[str, list[Tensor]] = {}
    stored = kept.stored.read() if isinstance(kept.stored, PlainKV) else kept.stored.split()
    for block, part in zip(kept.blocks, stored, strict=True):
        filled = block.held >= 0
        slots = {"positions": block.held, "scores": block.scores, "bias": block.log_weights}
        if isinstance(part, QuantizedKV):
            codes, steps = (
                x.unflatten(1, filled.shape).permute(1, 2, 0, 3) for x in (part.codes, part.steps)
            )
            slots |= {"codes": codes, "steps": steps.flatten(2)}
            _add(pieces, "exact", part.exact, filled.gather(1, part.exact_slots))
            pieces.setdefault("mean", []).extend(part.mean)
        else:
            slots["keys"], slots["values"] = part
        for name, x in slots.items():
            _add(pieces, name, x, filled)
        pieces.setdefault("counts", []).extend(filled.sum(-1, keepdim=True).int())
    order = np.concatenate([b.row_numbers for b in kept.blocks]).argsort()
    with no_autocast(kept.blocks[0].held.device):  # see `QuantizedKV.joined`
        found = {name: torch.cat([rows[i] for i in order]) for name, rows in pieces.items()}
    if bool((found["positions"] < 2**15).all()):
        found["positions"] = found["positions"].to(torch.int16)
    found["counts"] = found["counts"].view(kept.batch, kept.heads)
    found["sizes"] = torch.tensor(kept.sizes, dtype=torch.int32, device="cpu")
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
        """Return these rows of x [n, ...] as [R', width, ...], `fill` after a row's own slots."""
        out = x.new_full((len(rows), width, *x.shape[1:]), fill)
        filled = np.arange(width) < self.counts[rows, None]
        at = self.starts[rows, None] + np.arange(width)
        out[torch.from_numpy(filled).to(x.device)] = x[torch.from_numpy(at[filled]).to(x.device)]
        return out


def unpacked(plan: CacheConfig, masks: TokenMasks, tensors: dict[str, Tensor]) -> KeptKV:
    """Return the layer of which `packed` made the tensors, on their device.

    Slots after those in use hold zeros, as many as a new cache of unknown length has.
    """
    (B, H), device = tensors["counts"].shape, tensors["positions"].device
    n_first = plan.policy.n_exact
    counts = tensors["counts"].flatten().cpu().numpy().astype(np.int64)
    slots, exact = _Rows(counts), _Rows(np.minimum(counts, n_first))
    row_of = torch.from_numpy(np.arange(B * H).repeat(counts)).to(device)
    protected = masks.protected.to(device)[row_of // H, tensors["positions"].long()]
    n_protected = torch.bincount(row_of[protected], minlength=B * H).cpu().numpy()
    names = tensors.keys() & {"positions", "keys", "values", "codes", "steps", "scores", "bias"}
    blocks, parts = list[PaddedBlock](), list[Any]()
    dtype = tensors["keys" if plan.kv_dtype is None else "exact"].dtype
    for rows, schedule, width, capacity in plan_blocks(plan, masks, counts, n_protected, 0, device):
        x = {k: slots.put(tensors[k], rows, capacity, -(k == "positions")) for k in names}
        positions, index = x["positions"].int(), torch.from_numpy(rows).to(device)
        if plan.kv_dtype is None:
            parts.append(PlainKV.of(x["keys"], x["values"]))
        else:
            part = QuantizedKV(
                [(len(rows), capacity)],
                x["codes"].flatten(0, 1).transpose(0, 1).contiguous(),
                x["steps"].flatten(0, 1).unflatten(1, (2, -1)).transpose(0, 1).contiguous(),
                exact.put(tensors["exact"], rows, n_first),
                first_slots(positions, n_first),
                tensors["mean"][index][:, None],
                bits=BITS[plan.kv_dtype],
                start=masks.valid.shape[1],
                opened=False,
                reuses=schedule.drops or width == 0,
            )
            part.short = width < n_first
            parts.append(part)
        scores, log_weights = x.get("scores"), x.get("bias")
        blocks.append(block_of(rows, positions, schedule, dtype, scores, log_weights, width))
    planes = tensors.get("group_index")
    groups = None if planes is None else GroupIndex(planes, masks.valid.shape[1])
    retained, error = tensors.get("retained"), tensors.get("error")
    stored, sizes = parts[0].joined(parts), tensors["sizes"].tolist()
    return KeptKV(blocks, stored, B, H, sizes, retained, error, groups)
