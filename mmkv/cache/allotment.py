"""The budget and the type of pairs that a share of the full cache's bytes allows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mmkv.cache.config import CacheConfig
from mmkv.cache.evict import SLACK, group_rows, score_dtype
from mmkv.memory import POSITION, USUAL, Memory, allot
from mmkv.merge.groups import MergeIntoGroups
from mmkv.parts import SizeInputs
from mmkv.policy import Policy
from mmkv.sizes.layers import fit


def allotted(plan: CacheConfig, memory: Memory, itemsize: int, head_dim: int) -> CacheConfig:
    """Return the plan with the budget and the type of pairs for which the memory is enough.

    `itemsize` is the bytes of a number in the model's type. Raises ValueError, see `allot`.
    """
    policy, merge = plan.policy, plan.policy.merge
    allotment = allot(
        memory,
        itemsize=itemsize,
        head_dim=head_dim,
        first=policy.n_exact,
        run=merge.group_run if isinstance(merge, MergeIntoGroups) else 0,
        beside=bytes_beside_pair(policy, itemsize),
        keeps_all=policy.keeps_all,
    )
    plan = replace(plan, kv_dtype=allotment.kv_dtype, allotment=allotment)
    return for_heads(replace(plan, budget=allotment.budget()))


def bytes_beside_pair(policy: Policy, itemsize: int) -> int:
    """Return the most bytes that a slot holds beside its pair.

    These are a position, a score if later turns or steps compare it, and a bias in the model's
    type. Without weights of groups there is no bias where all rows of a block have one length.
    """
    scored = policy.score.turn_reduction or policy.decode.needs_decode_attention
    return POSITION + itemsize + (score_dtype(policy).itemsize if scored else 0)


def for_type(plan: CacheConfig, itemsize: int, head_dim: int) -> CacheConfig:
    """Return a plan in bytes for a model that was cast to another type since, see `allotted`."""
    if plan.allotment is None or plan.allotment.full_pair_bytes == 2 * head_dim * itemsize:
        return plan
    return allotted(plan, plan.allotment.memory, itemsize, head_dim)


def for_heads(plan: CacheConfig) -> CacheConfig:
    """Return the plan with a budget that leaves room for its heads' empty slots, if it is in bytes.

    The number of empty slots depends on the budget, so the room for them is raised until it is
    enough.
    """
    if plan.allotment is None or plan.allotment.keeps_all:
        return plan
    allotment = replace(plan.allotment, empty_share=0.0)
    while True:
        plan = replace(plan, allotment=allotment, budget=allotment.budget())
        empty = empty_slots(plan, USUAL)
        share = SLACK if empty is None else empty / (allotment.budget() * USUAL)
        if share <= allotment.empty_share:
            return plan
        margin = 0.0 if empty is None else 0.002
        allotment = replace(allotment, empty_share=share + margin)


def empty_slots(plan: CacheConfig, length: int) -> float | None:
    """Return the empty slots of a layer for each head of a prompt, a mean over layers.

    Heads of different sizes share a block that is as long as its largest head (`group_rows`). None
    where their sizes depend on scores, or on the copy probe.
    """
    policy, table = plan.policy, plan.table
    if plan.keeps_all or plan.kept_whole >= length:
        return 0.0
    if table is None or policy.layers.needs:
        return None if plan.waits_for_probe or not plan.equal_heads else 0.0
    n_layers, pinned = len(table.layers), min(length, policy.window_size + policy.sinks)
    total = plan.total_kept(n_layers, length, pinned)
    rows = SizeInputs(totals=[total], lengths=[length], pinned=[pinned], n_layers=n_layers)
    share = plan.share_kept(n_layers, length, pinned)
    slots, n_kept, n_heads = 0, 0, 1
    sizes = fit(plan.layer_sizes(rows)[0], total, floor=pinned, max_size=length)
    for i, size in enumerate(sizes):
        mean, most = size - pinned, length - pinned
        targets = table.head_sizes(i, mean, most, share)
        n_heads = len(targets)
        counts = pinned + np.array(fit(targets, n_heads * mean, max_size=most))
        slots += sum(len(x) * int(counts[x].max()) for x in group_rows(counts))
        n_kept += int(counts.sum())
    return (slots - n_kept) / (n_layers * n_heads)
