"""Eviction itself: from a layer's whole tokens to blocks that hold only the kept ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmkv import eviction
from mmkv.decoding import make_schedule
from mmkv.eviction import Prompt
from mmkv.held import Held
from mmkv.merging import merge
from mmkv.plan import Plan
from mmkv.storage import Block, group_rows

# Slots set aside for tokens to come, at the most; beyond it storage grows in chunks.
_MOST_RESERVED = 256


def evict(
    held: Held, plan: Plan, prompt: Prompt, sizes: Sequence[int], expected: int
) -> tuple[list[Block], Tensor | None]:
    """Choose what one layer keeps, merge or drop the rest, and copy it into storage of its own.

    Args:
        held: the layer's tokens, whole.
        plan: the policy.
        prompt: what is known of the tokens, on the layer's device.
        sizes: tokens kept per head, for each row.
        expected: tokens that will be generated, as far as known.

    Returns:
        The blocks, and the share of importance kept [B] where the policy scores by attention.
    """
    policy, (B, H, U, _) = plan.policy, held.keys.shape
    indices, counts, anchored = eviction.select(policy, held.scores, held.positions, prompt, sizes)
    retained = None
    if held.scores is not None and policy.score != "recency":
        retained = eviction.retained(held.scores, indices, held.positions, prompt)
    indices = indices.expand(B, H, -1)
    at, filler = indices.clamp(min=0), indices < 0

    def kept(x: Tensor) -> Tensor:
        return x.gather(2, at[..., None].expand(-1, -1, -1, x.shape[-1]))

    keys, values = held.keys.detach(), held.values.detach()
    if policy.merge is not None and list(sizes) != prompt.lengths:
        keys, values = merge(keys, values, indices, held.positions, how=policy.merge)
    else:
        keys, values = kept(keys), kept(values)
    positions = held.positions.expand(B, H, U).gather(2, at).masked_fill(filler, -1)
    mass = None
    if held.scores is not None and policy.score == "accumulated":
        mass = held.scores.expand(B, H, U).gather(2, at).masked_fill(filler, 0)

    def per_row(x: Tensor) -> np.ndarray:
        return x.expand(B, H).reshape(-1).numpy()

    pairs = [keys, values, positions]
    return _blocks(
        plan, prompt, pairs, mass, per_row(counts), per_row(anchored), expected
    ), retained


def _blocks(
    plan: Plan,
    prompt: Prompt,
    pairs: list[Tensor],
    mass: Tensor | None,
    counts: np.ndarray,
    anchored: np.ndarray,
    expected: int,
) -> list[Block]:
    """Group rows by length; give each group storage and a schedule.

    Args:
        plan: policy and budget.
        prompt: gives the rows' lengths.
        pairs: keys and values [B, H, M, D] and positions [B, H, M].
        mass: [B, H, M], attention accumulated so far, where the policy scores by it.
        counts: [B * H], how many of the M each row keeps.
        anchored: [B * H], how many of those, the first ones, decoding must not drop.
        expected: tokens that will be generated, as far as known.
    """
    H, device = pairs[0].shape[1], pairs[0].device
    lengths = np.repeat(prompt.lengths, H)
    capacity: np.ndarray | None = counts
    if plan.keeps_everything:
        capacity = None
    elif isinstance(plan.budget, int):
        # A prompt shorter than the budget fills it up while decoding.
        capacity = np.where(lengths <= plan.budget, plan.budget, counts)
    groups = group_rows(counts)
    blocks = []
    for rows in groups:
        schedule = make_schedule(
            plan.policy,
            counts=counts[rows],
            lengths=lengths[rows],
            protected=anchored[rows],
            capacity=None if capacity is None else capacity[rows],
        )
        index = torch.from_numpy(rows).to(device) if len(groups) > 1 else None
        at = slice(None) if index is None else index
        width = int(counts[rows].max())
        keys, values, positions = (x.flatten(0, 1)[at, :width] for x in pairs)
        blocks.append(
            Block.of(
                keys,
                values,
                positions,
                None if mass is None else mass.flatten(0, 1)[at, :width],
                schedule,
                reserve=schedule.room(min(expected, _MOST_RESERVED)),
                rows=index,
                inv_freq=plan.inv_freq,
            )
        )
    return blocks
