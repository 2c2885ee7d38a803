"""From scores to kept tokens, on tensors alone: against loops over rows, heads and tokens."""

from __future__ import annotations

import pytest
import torch

from helpers.sizes import row_sizes
from mmkv import sizes as allocation
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.selection import ranked, retained
from mmkv.cache.token_masks import TokenMasks
from mmkv.policy import Policy
from mmkv.registry import get_policy

L = 3
H2O = {"score": "accumulated"}
EVERYTHING = Policy.of(**H2O)


class KeepsAll(Policy):
    keeps_all = True


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def left_padded(B: int, T: int, g: torch.Generator) -> torch.Tensor:
    pads = torch.randint(0, T // 2, (B, 1), generator=g)
    return torch.arange(T) >= pads


def some(shape: tuple[int, ...], share: float, g: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=g) < share


def select(policy, scores, positions, *given):
    """What one layer keeps: indices, counts and how many are anchored."""
    ranking = ranked(policy, scores, positions, *given)
    pairs = torch.zeros(*ranking.rank.shape, 1)
    kept = ranking.kept(PromptKV(pairs, pairs, positions))
    return kept.indices, kept.counts, kept.anchored


# Scores


# Sizes


def sizes(budget, *, floor=2, policy=None, more=None, **options):
    policy = policy or Policy.of(**{**H2O, **options})
    return row_sizes(policy, budget, n_layers=L, length=20, floor=floor, **(more or {}))


def test_the_floor_and_the_row_bound_every_layer() -> None:
    fractions = {"fractions": [0.9, 0.05, 0.3]}
    assert sizes(0.5, more=fractions) == allocation.fit([18, 1, 6], 30, floor=2, max_size=20)
    assert min(sizes(0.5, floor=5, more=fractions)) == 5
    # Short of the floor, every layer keeps what must stay; and never more than there is.
    assert sizes(0.2, floor=6) == [6, 6, 6]
    assert sizes(1, floor=6) == [6, 6, 6]
    assert sizes(0.2, floor=20) == [20, 20, 20]
    assert sizes(0.2, floor=21) == [20, 20, 20]
    assert sizes(0.2, floor=19) == [19, 19, 19]
    assert sizes(30) == sizes(20) == sizes(1.0) == [20, 20, 20]
    assert sizes(0.2, policy=KeepsAll()) == [20, 20, 20]
    assert sizes(19) == [19, 19, 19]
    # Nothing to size: a budget of all of it needs no scores.
    assert sizes(20, layers="prefix") == [20, 20, 20]


# Choosing


def tokens(B: int, P: int, U: int, T: int, g: torch.Generator) -> torch.Tensor:
    """Positions [B, P, U] of up to U of T tokens, by age, behind fillers of -1."""
    found = torch.full((B, P, U), -1)
    for b in range(B):
        for h in range(P):
            n = int(torch.randint(U // 2, U + 1, (1,), generator=g))
            held = torch.randperm(T, generator=g)[:n].sort().values
            found[b, h, U - n :] = held
    return found


def prompt_of(policy: Policy, T: int, g: torch.Generator, B: int = 2) -> TokenMasks:
    return TokenMasks.of(
        policy, left_padded(B, T, g), some((B, T), 0.7, g), budget=1.0, n_layers=L
    )  # fmt: skip


def competing(prompt: TokenMasks, positions: torch.Tensor) -> torch.Tensor:
    return (positions >= 0) & ~prompt.at(positions, "must")[0]


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (3, 3)])
def test_retained_is_the_share_of_what_competed(heads) -> None:
    P, H = heads
    policy = Policy.of(window=3, sinks=1)
    g = generator(7)
    prompt = prompt_of(policy, 20, g)
    positions = tokens(2, P, 14, 20, g)
    positions = positions.masked_fill(~prompt.at(positions, "valid")[0], -1)
    scores = torch.randn(2, H, 14, generator=g) + 1  # what is below 0 counts as nothing
    few = prompt.at(positions, "must")[0].sum(-1).amax(-1) + 3
    indices, *_ = select(policy, torch.rand(2, H, 14, generator=g), positions, prompt, few.tolist())
    got = retained(scores, indices, competing(prompt, positions))
    for b in range(2):
        kept = total = 0.0
        for h in range(H):
            held = positions[b, min(h, P - 1)].tolist()
            for u, p in enumerate(held):
                if p >= 0 and not prompt.must[b, p]:
                    worth = max(0.0, float(scores[b, h, u]))
                    total += worth
                    kept += worth * (u in indices[b, h].tolist())
        assert 0 < kept < total
        assert float(got[b]) == pytest.approx(kept / total, abs=1e-6)


def test_of_nothing_that_competes_all_is_retained() -> None:
    policy = Policy.of(**H2O, sinks=9)
    prompt = prompt_of(policy, 6, generator(8))
    positions = torch.arange(6).expand(2, 1, 6).masked_fill(~prompt.valid[:, None], -1)
    indices, *_ = select(policy, torch.rand(2, 1, 6), positions, prompt, prompt.lengths)
    assert retained(torch.rand(2, 1, 6), indices, competing(prompt, positions)).tolist() == [
        1.0,
        1.0,
    ]
    tiny = torch.full((2, 1, 6), 1e-30)
    free = prompt_of(EVERYTHING, 6, generator(8))
    indices, *_ = select(EVERYTHING, tiny, positions, free, free.lengths)
    assert retained(tiny, indices, competing(free, positions)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("size", "newest"), [(15, 1), (16, 2), (25, 3), (60, 4)])
def test_groups_keep_the_newest_in_an_eighth_of_few_slots(size: int, newest: int) -> None:
    policy = get_policy("condense", newest=4)
    N = 100
    positions = torch.arange(N).view(1, 1, N)
    prompt = TokenMasks.of(policy, torch.ones(1, N, dtype=torch.bool), budget=size, n_layers=1)
    must = int(prompt.must.sum())
    scores = torch.linspace(1, 0, N).view(1, 1, N)
    rank = ranked(policy, scores, positions, prompt, [size]).rank
    room = min(newest, size - must)
    expected = prompt.must[0].clone()
    free = (~expected).nonzero()[:, 0].tolist()
    expected[free[len(free) - room :]] = True
    assert torch.equal(rank[0, 0].isinf(), expected)
