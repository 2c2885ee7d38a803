"""Exact tokens and weighted groups against loops that read like their definition."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mmkv
from helpers.models import random
from mmkv import tensors as tiling
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.selection import Ranking
from mmkv.merge.k_means import leaders


def layer(B: int, H: int, N: int, D: int = 4, Dv: int = 3, seed: int = 0) -> list[Tensor]:
    """Keys, values and scores; keys have an offset, as those of real models have."""
    return [
        random(B, H, N, D, seed=seed) + 2,
        random(B, H, N, Dv, seed=seed + 1),
        random(B, H, N, seed=seed + 2).abs(),
    ]


def spread(x: Tensor) -> float:
    """Root of the mean variance over dimensions, about each dimension's own mean."""
    return float((x - x.mean(0)).square().mean().sqrt()) or 1.0


def mean(x: Any, tokens: list[int], weights: Tensor) -> Tensor:
    total = sum(float(weights[j]) for j in tokens)
    return torch.stack([x[j] * float(weights[j]) / total for j in tokens]).sum(0)


def by_score(weights: Tensor, scores: Tensor) -> Tensor:
    """How much each token counts in its group's mean, [N]; pinned ones are in no group."""
    least = max(1e-6 * max([0.0, *(float(x) for x in scores if math.isfinite(x))]), 1e-30)
    scores = torch.where(scores.isfinite(), scores, 0.0)
    return torch.stack(
        [w * max(s, s.new_tensor(least)) for w, s in zip(weights, scores, strict=True)]
    )


def naive(
    keys, values, rank, size, weights, *, exact, run, rounds, value_weight
) -> list[list[int]]:
    """One head: the tokens of each slot, in the order of their best ones."""
    tokens = [j for j in range(len(rank)) if rank[j] > -math.inf]
    ranked = sorted(tokens, key=lambda j: (-float(rank[j]), j))
    if size >= len(tokens):
        return [[j] for j in ranked]
    must = int((rank == math.inf).sum())
    chosen = max(must, min(size - 1, must + int((size - must) * exact)))
    alone, rest = set(ranked[:chosen]), sorted(ranked[chosen:])
    groups: list[list[int]] = []
    slots = size - chosen
    k, v = (y[tokens].double() / spread(y[tokens].double()) for y in (keys, values))
    together = [k, v * value_weight]
    x = dict(zip(tokens, torch.cat(together, dim=1), strict=True))
    runs = min(math.ceil(len(rest) / run), slots)
    for r in range(runs):
        first, last_slot = (i * slots // runs for i in (r, r + 1))
        mine = rest[first * len(rest) // slots : last_slot * len(rest) // slots]
        centres = [x[j] for j in sorted(mine, key=ranked.index)[: last_slot - first]]
        here: list[list[int]] = []
        for _ in range(rounds):
            here = [[] for _ in centres]
            for j in mine:
                distances = [float((x[j] - c).norm()) for c in centres]
                here[distances.index(min(distances))].append(j)
            centres = [mean(x, g, weights) if g else c for g, c in zip(here, centres, strict=True)]
        # An empty group's slot goes to the next best token that is not the last of its own.
        missing = sum(not g for g in here)
        last_ones = {max(g, key=ranked.index) for g in here if g}
        next_best = [j for j in sorted(mine, key=ranked.index) if j not in last_ones][:missing]
        alone |= set(next_best)
        groups += [g for g in ([j for j in g if j not in next_best] for g in here) if g]
    found = [[j] for j in alone] + groups
    return sorted(found, key=lambda g: min(map(ranked.index, g)))


def slots_of(leader: Tensor, rank: Tensor) -> list[list[int]]:
    """The tokens of each slot, in the order of their leaders' ranks."""
    found: dict[int, list[int]] = {}
    for j, i in enumerate(leader.tolist()):
        if i >= 0:
            found.setdefault(i, []).append(j)
    return [found[i] for i in sorted(found, key=lambda i: (-float(rank[i]), i))]


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    N=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    gone=st.integers(0, 12),
    must=st.integers(0, 5),
    exact=st.sampled_from([0.0, 0.25, 0.6, 1.0]),
    run=st.integers(1, 40),
    rounds=st.integers(1, 4),
    value_weight=st.sampled_from([0.0, 0.35, 2.0]),
    tile=st.sampled_from([1, 2**30]),
    seed=st.integers(0, 2**16),
)
def test_leaders_equal_the_loop(N, sizes, gone, must, exact, run, rounds, value_weight, tile, seed):
    """Heads of any size, with weights, gaps that hold anything, and tokens that must stay."""
    keys, values, scores = layer(2, 2, N, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 5, (2, 2, N), generator=generator).float()
    scores[0, :, :gone] = -math.inf
    scores[1, 0, torch.randperm(N, generator=generator)[:gone]] = -math.inf
    absent = scores == -math.inf
    weights = weights.masked_fill(absent, 0.0)
    scores[..., -must:].masked_fill_(~absent[..., -must:] & (must > 0), math.inf)
    size = torch.tensor(sizes).view(2, 2).maximum((scores == math.inf).sum(-1))
    options = {"exact": exact, "run": run, "rounds": rounds, "value_weight": value_weight}
    dirty = (
        keys.masked_fill(absent[..., None], math.nan),
        values.masked_fill(absent[..., None], math.inf),
    )
    with pytest.MonkeyPatch.context() as patch:  # how many runs go together changes nothing
        patch.setattr(tiling, "_CPU_TILE_PER_THREAD", tile)
        counts = torch.stack([size, (scores == math.inf).sum(-1), (~absent).sum(-1)])
        found = leaders(*dirty, scores, counts, weights, **options)
    for b in range(2):
        for h in range(2):
            parts = keys[b, h], values[b, h], scores[b, h], int(size[b, h]), weights[b, h]
            want = naive(*parts, **options)
            got = slots_of(found[b, h], scores[b, h])
            best = [min(g, key=lambda j: (-float(scores[b, h, j]), j)) for g in got]
            assert [int(found[b, h, i]) for i in best] == best, "a leader is the best of its group"
            assert got == want
            present = int((~absent[b, h]).sum())
            assert len(got) == min(int(size[b, h]), present)
            if size[b, h] > (scores[b, h] == math.inf).sum():
                assert sum(map(len, got)) == present, "nothing is left out"


def test_pair_of_a_group_is_its_mean_by_scores():
    """Also where tokens stand for several, and with absent tokens, which may hold anything."""
    keys, values, scores = layer(2, 2, 60)
    weights = torch.randint(1, 5, scores.shape, generator=torch.Generator().manual_seed(3)).float()
    scores[0, :, :9], weights[0, :, :9] = -math.inf, 0.0
    scores[..., -2:] = math.inf
    absent, size = scores == -math.inf, torch.tensor([[12, 20], [7, 30]])
    dirty = (x.masked_fill(absent[..., None], math.nan) for x in (keys, values))
    positions = torch.arange(60).expand(scores.shape).masked_fill(absent, -1)
    ranking = Ranking(scores, size, scores == math.inf, ~absent)
    merge = mmkv.get_policy("condense", fit=0, newest=0).merge
    kept = merge(PromptKV(*dirty, positions, weights=weights), ranking)
    groups = 0
    for b, h, slot in np.ndindex(kept.indices.shape):
        tokens = (kept.slot[b, h] == slot).nonzero()[:, 0].tolist()
        if slot >= size[b, h]:
            assert not tokens
            continue
        counted = by_score(weights[b, h], scores[b, h])
        assert kept.weights[b, h, slot] == sum(weights[b, h, tokens])
        for found, x in ((kept.keys, keys), (kept.values, values)):
            torch.testing.assert_close(found[b, h, slot], mean(x[b, h], tokens, counted))
        groups += len(tokens) > 1
    assert groups > 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_single_token_is_copied_unchanged(dtype):
    keys, values, scores = layer(2, 2, 40)
    keys, values, size = keys.to(dtype), values.to(dtype), torch.full((2, 2), 12)
    positions = torch.arange(40).expand(scores.shape)
    none = torch.zeros_like(scores, dtype=torch.bool)
    ranking = Ranking(scores, size, none, ~none)
    merge = mmkv.get_policy("condense", fit=0).merge
    kept = merge(PromptKV(keys, values, positions), ranking)
    alone = kept.weights == 1
    assert 4 <= int(alone.sum()) < 48
    for found, x in ((kept.keys, keys), (kept.values, values)):
        own = x.gather(2, kept.indices[..., None].expand(-1, -1, -1, x.shape[3]))
        assert torch.equal(found[alone], own[alone])
