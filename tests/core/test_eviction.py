"""From scores to kept tokens, on tensors alone: against loops over rows, heads and tokens."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.sizes import row_sizes
from mmkv import sizes as allocation
from mmkv.cache.layer_sizes import competing
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.selection import importance, ranked, retained
from mmkv.cache.token_masks import TokenMasks, keeps_everything
from mmkv.layer_inputs import LayerInputs
from mmkv.policy import Policy, Score
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


# What is known of a prompt

MARKED = [
    {**H2O},
    {**H2O, "sinks": 3},
    {"score": "window", "window": 4},
    {"score": "window", "window": 4, "sinks": 2},
    {**H2O, "protect": "instruction"},
    {"score": "window", "window": 3, "sinks": 1, "protect": "instruction"},
    {"score": "recency", "sinks": 40},
]


def check_marks(found: TokenMasks, policy: Policy, windows: list[int]) -> None:
    """What must stay, of each row: its first and last tokens, and the text that was asked."""
    for b, window in enumerate(windows):
        real = found.valid[b].nonzero()[:, 0].tolist()
        protected = set(real[: policy.sinks])
        if policy.protect is not None:
            protected |= {j for j in real if found.asked[b, j] and not found.image[b, j]}
        must = protected | set(real[max(0, len(real) - window) :])
        assert set(found.protected[b].nonzero()[:, 0].tolist()) == protected
        assert set(found.must[b].nonzero()[:, 0].tolist()) == must
        assert found.lengths[b] == len(real)
        assert found.windows[b] == window
        assert found.floors[b] == len(must)
    for mark in (found.valid, found.image, found.asked, found.must, found.protected):
        assert mark.dtype == torch.bool
        assert mark.shape == found.valid.shape


@pytest.mark.parametrize("options", MARKED, ids=str)
def test_what_must_stay_of_a_prompt_and_of_the_turn_after_it(options) -> None:
    policy, g = Policy.of(**options), generator(0)
    valid, image = left_padded(3, 14, g), some((3, 14), 0.5, g)
    given = {"budget": 1.0, "n_layers": L}
    first = TokenMasks.of(policy, valid, image, **given)
    assert torch.equal(first.valid, valid)
    assert torch.equal(first.image, image)
    assert first.asked.all()
    check_marks(first, policy, [policy.window_size] * 3)

    # Five tokens were generated, and some of all earlier ones are masked now.
    earlier = torch.cat([valid, torch.ones(3, 5, dtype=torch.bool)], 1) & some((3, 19), 0.8, g)
    new, pictures = torch.ones(3, 6, dtype=torch.bool), some((3, 6), 0.5, g)
    turn = TokenMasks.of(policy, new, pictures, before=first, earlier=earlier, **given)
    assert torch.equal(turn.valid, torch.cat([earlier, new], 1))
    assert torch.equal(turn.image[:, :14], image)
    assert not turn.image[:, 14:19].any()
    assert torch.equal(turn.image[:, 19:], pictures)
    asked = torch.ones(25, dtype=torch.bool)
    asked[14:19] = False
    assert torch.equal(turn.asked, asked.expand(3, -1))
    check_marks(turn, policy, [policy.window_size] * 3)


@pytest.mark.parametrize("budget", [0.2, 0.5, 0.9, 1.0, 1, 2, 5, 6, 30, None])
def test_the_window_shrinks_where_the_budget_is_below_what_must_stay(budget) -> None:
    """To half of the budget, at least one token; `granted` is how much of the floor it pays for."""
    policy, lengths = Policy.of(window=5, sinks=1), [1, 3, 6, 9, 20, 40]
    valid = torch.stack([torch.arange(40) >= 40 - n for n in lengths])
    found = TokenMasks.of(policy, valid, budget=budget, n_layers=L)
    windows, granted = [], []
    for n in lengths:
        floor = min(n, 5 + 1)
        asked = math.inf
        if isinstance(budget, float):
            asked = round(budget * L * n)
        elif budget is not None:
            asked = L * min(budget, n)
        shrinks = not keeps_everything(policy, budget) and asked < L * floor
        windows.append(min(5, max(1, int(asked / L / 2))) if shrinks else 5)
        must = min(n, 1 + windows[-1])
        granted.append(min(1.0, asked / (L * must)))
    check_marks(found, policy, windows)
    assert found.granted == pytest.approx(granted)


# Scores


class Own(Score):
    """Scores given by position, whatever the queries say."""

    def __init__(self, gives):
        object.__setattr__(self, "gives", gives)

    def __call__(self, layer):
        return self.gives


def attention_inputs(B: int, N: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(seed)
    return torch.randn(B, 4, N, 8, generator=g), torch.randn(B, 2, N, 8, generator=g)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("windows", [[4, 4, 4], [4, 2, 4], [1, 3, 2], [12, 30, 11]])
def test_rows_are_scored_by_their_own_window(windows, mask) -> None:
    """Each row as it is alone, whatever the others' windows; all but one token at most observe."""
    B, N = 3, 12
    policy, (query, key) = Policy.of(window=4, kernel_size=3), attention_inputs(B, N)
    valid = torch.arange(N) >= torch.tensor([[0], [3], [5]])
    options = {"scale": 0.7, "softcap": 2.0}
    more = {}
    if mask:
        sees = torch.ones(B, 1, N, N, dtype=torch.bool).tril() | some(
            (B, 1, N, N), 0.3, generator(2)
        )
        more = {"mask": sees}
    layer = LayerInputs(query=query, key=key, value=key, valid=valid, **options, **more)
    got = importance(policy, layer, windows)
    assert got.shape == (B, 2, N)
    assert not got.requires_grad
    for b, window in enumerate(windows):
        alone = Policy.of(window=min(window, N - 1), kernel_size=3).score(
            LayerInputs(
                query=query[b : b + 1], key=key[b : b + 1], value=key[b : b + 1],
                valid=valid[b : b + 1], **options, **{k: x[b : b + 1] for k, x in more.items()},
            )
        )  # fmt: skip
        torch.testing.assert_close(got[b : b + 1], alone)


def test_scores_are_made_finite_and_need_no_gradient() -> None:
    query, key = attention_inputs(1, 4)
    gives = torch.tensor([[[math.inf, -math.inf, 2.0, 3.0]]], requires_grad=True)
    own = Policy(score=Own(gives))
    known = {"value": key, "valid": torch.ones(1, 4, dtype=torch.bool)}
    got = importance(own, LayerInputs(query=query, key=key, **known), [0])
    assert got.tolist() == [[[pytest.approx(1e30), 0.0, 2.0, 3.0]]]
    # NaN is refused, but where queries or keys are no numbers it cannot be helped.
    gives.data[0, 0, 2] = math.nan
    with pytest.raises(ValueError, match=r"Own returned NaN for 1 of 4 tokens"):
        importance(own, LayerInputs(query=query, key=key, **known), [0])
    for spoiled in (query, key):
        spoiled[0, 0, 0, 0] = math.nan
        assert importance(own, LayerInputs(query=query, key=key, **known), [0])[0, 0, 2] == 0.0
        spoiled[0, 0, 0, 0] = 0.0


# Sizes


def sizes(budget, *, floor=2, policy=None, more=None, **options):
    policy = policy or Policy.of(**{**H2O, **options})
    return row_sizes(policy, budget, n_layers=L, length=20, floor=floor, **(more or {}))


def test_layers_share_a_rows_total() -> None:
    assert sizes(0.5) == allocation.uniform(L, 30, max_size=20)
    assert sizes(0.52) == allocation.uniform(L, 31, max_size=20)
    assert sizes(7) == [7, 7, 7]
    assert sizes(0.5, layers="geometric", decay=0.6) == allocation.geometric(
        L, 30, decay=0.6, max_size=20
    )
    # PyramidKV's series is of what the floor leaves.
    series = allocation.pyramid(L, 30 - L * 2, beta=7.0, max_size=18)
    assert sizes(0.5, layers="pyramid", beta=7.0) == [2 + n for n in series]
    assert len(set(series)) == 3
    assert max(sizes(0.9, layers="pyramid")) == 20


@pytest.mark.parametrize("layers", ["prefix", "pooled"])
def test_layers_are_sized_by_what_competes(layers) -> None:
    g = generator(3)
    scores = (2 * torch.randn(L, 18, generator=g)).exp()
    allocate = {"prefix": allocation.prefix, "pooled": allocation.pooled}[layers]
    got = sizes(0.5, layers=layers, more={"scores": scores})
    (shared,) = allocate(scores[None], torch.tensor([30 - L * 2]))
    assert got == [2 + n for n in shared]
    assert len(set(got)) == 3
    # A later turn, where fewer tokens are left than the budget has room for.
    assert sizes(0.5, layers=layers, more={"scores": scores[:, :4]}) == [10, 10, 10]


def test_a_retention_adds_to_what_must_stay() -> None:
    scores = torch.tensor([[8.0, 1, 1, 0, 0], [3, 3, 2, 1, 1], [2, 2, 2, 2, 2]])
    (chosen,) = allocation.pooled(scores[None], torch.tensor([0]), retention=0.6)
    given = {"score": "window", "layers": "pooled", "retention": 0.6}
    got = sizes(None, policy=Policy.of(**given), more={"scores": scores})
    assert got == [2 + n for n in chosen]
    assert got != [max(2, n) for n in chosen]
    # Fractions of a profile come before it.
    got = sizes(0.5, policy=Policy.of(**given), more={"fractions": [0.8, 0.5, 0.2]})
    assert got == [16, 10, 4]


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


CHOOSING = [
    {**H2O},
    {**H2O, "sinks": 3},
    {**H2O, "recent": 0.5},
    {**H2O, "recent": 0.8, "sinks": 4},
    {**H2O, "recent": 1.0, "protect": "instruction"},
    {**H2O, "protect": "instruction"},
    {"window": 4, "sinks": 1},
    {**H2O, "heads": "adaptive"},
    {**H2O, "heads": "adaptive", "recent": 0.3, "alpha": 0.2},
    {"window": 3, "sinks": 1, "heads": "adaptive", "alpha": 0.0},
    {**H2O, "heads": "adaptive", "alpha": 1.0, "protect": "instruction"},
]


def naive_select(policy, scores, positions, prompt, sizes):
    """One head after the other: [B][H] of kept indices, those that stay for good first."""
    B, H = positions.shape[0], max(positions.shape[1], scores.shape[1])
    found = []
    for b in range(B):
        heads, forced, kept = [], [], []
        for h in range(H):
            held = positions[b, min(h, positions.shape[1] - 1)].tolist()
            here = [u for u, p in enumerate(held) if p >= 0]
            score = scores[b, min(h, scores.shape[1] - 1)].tolist()
            must = [u for u in here if prompt.must[b, held[u]]]
            size = min(sizes[b], len(here))
            free = [u for u in here if u not in must]
            share = max(0, min(int(policy.recent * size), size - len(must)))
            must = must + free[len(free) - share :]
            stays = [u for u in here if prompt.protected[b, held[u]]]
            heads.append((here, score, must, size, stays))
            forced.append(len(must))
        split = [size for _, _, _, size, _ in heads]
        if not policy.heads.equal:
            spare = sizes[b] - max(forced)
            free = [
                {u: score[u] for u in here if u not in must} for here, score, must, _, _ in heads
            ]
            if sum(map(len, free)) <= H * spare:
                split = [len(here) for here, *_ in heads]
            elif spare > 0:
                best = sorted(((-s, u, h) for h, one in enumerate(free) for u, s in one.items()))[
                    : H * spare
                ]
                owners = [h for _, _, h in best]
                a = policy.heads.alpha
                wanted = [(1 - a) * owners.count(h) + a * spare for h in range(H)]
                whole = [math.floor(w + 1e-6) for w in wanted]
                by_rest = sorted(range(H), key=lambda h: (round((whole[h] - wanted[h]) * 1e6), h))
                for h in by_rest[: H * spare - sum(whole)]:
                    whole[h] += 1
                split = [f + w for f, w in zip(forced, whole, strict=True)]
            split = [min(n, len(here)) for n, (here, *_) in zip(split, heads, strict=True)]
        for n, (here, score, must, _, stays) in zip(split, heads, strict=True):
            ranked = sorted(here, key=lambda u: (u not in must, -score[u], u))
            chosen = ranked[:n]
            kept.append(sorted(chosen, key=lambda u: (u not in stays, u)))
        found.append(kept)
    return found


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        (options, heads)
        for options in CHOOSING
        for heads in ((1, 1), (1, 3), (3, 3), (3, 1))
        # One ranking for all heads has nothing to split a size by.
        if heads[1] > 1 or "heads" not in options
    ],
    ids=str,
)
def test_a_layer_keeps_what_must_stay_and_then_the_best(options, heads) -> None:
    """... those that stay for good in the first slots, the others behind them by age."""
    policy, (P, S) = Policy.of(**options), heads
    for seed in range(12):
        g = generator(seed)
        T, U = 30, 18
        prompt = prompt_of(policy, T, g)
        positions = tokens(2, P, U, T, g)
        positions = positions.masked_fill(~prompt.at("valid", positions), -1)
        must = prompt.at("must", positions).sum(-1).amax(-1)
        sizes = [int(m) + int(torch.randint(0, 9, (1,), generator=g)) for m in must]
        scores = torch.randn(2, S, U, generator=g)
        if seed % 2:
            scores = scores.mul(2).floor()  # ties go to the older
        if seed == 5:
            sizes = [U, U]  # all there is
        want = naive_select(policy, scores, positions, prompt, sizes)
        kept = (scores.clone(), positions.clone())
        indices, counts, anchored = select(policy, scores, positions, prompt, sizes)
        H = max(P, S)
        assert counts.shape == anchored.shape == indices.shape[:2] == (2, H)
        assert indices.shape[2] == int(counts.max())
        for b in range(2):
            for h in range(H):
                mine = want[b][h]
                got = indices[b, h].tolist()
                assert got == mine + [-1] * (len(got) - len(mine)), (seed, b, h)
                assert counts[b, h] == len(mine)
                here = positions[b, min(h, P - 1)]
                stays = prompt.at("protected", here[None, None].expand(2, 1, -1))[b, 0]
                assert anchored[b, h] == int(stays.sum())
        assert torch.equal(scores, kept[0])
        assert torch.equal(positions, kept[1])


def test_without_scores_everything_is_kept_by_age() -> None:
    g = generator(4)
    prompt = prompt_of(EVERYTHING, 10, g)
    positions = torch.arange(10).expand(2, 1, 10).masked_fill(~prompt.valid[:, None], -1)
    indices, counts, anchored = select(EVERYTHING, None, positions, prompt, prompt.lengths)
    for b in range(2):
        real = prompt.valid[b].nonzero()[:, 0].tolist()
        assert [u for u in indices[b, 0].tolist() if u >= 0] == real
        assert counts[b, 0] == len(real)
    assert not anchored.any()


@pytest.mark.parametrize("options", [{**H2O}, {**H2O, "sinks": 3}, {"window": 4}], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (3, 3), (3, 1)])
def test_what_competes_is_ranked_head_by_head(options, heads) -> None:
    policy, (P, S) = Policy.of(**options), heads
    g = generator(6)
    prompt = prompt_of(policy, 30, g)
    layers = []
    for i in range(L):
        positions = tokens(2, P, (18, 12, 15)[i], 30, g)
        positions = positions.masked_fill(~prompt.at("valid", positions), -1)
        layers.append((torch.rand(2, S, positions.shape[2], generator=g), positions))
    got, offered = competing([s for s, _ in layers], [p for _, p in layers], prompt)
    for b in range(2):
        rows, most = [], 0
        for scores, positions in layers:
            free = [
                [u for u, p in enumerate(head) if p >= 0 and not prompt.must[b, p]]
                for head in positions[b].tolist()
            ]
            most = max([most, *map(len, free)])
            ranked = [
                sorted((float(scores[b, h, u]) for u in free[min(h, P - 1)]), reverse=True)
                for h in range(S)
            ]
            longest = max(map(len, ranked))
            filled = [r + [0.0] * (longest - len(r)) for r in ranked]
            rows.append([sum(x) / S for x in zip(*filled, strict=True)])
        want = [row + [0.0] * (most - len(row)) for row in rows]
        assert offered[b] == most
        assert not got[b, :, most:].any()
        torch.testing.assert_close(got[b, :, :most], torch.tensor(want))


def test_a_row_of_which_nothing_competes_offers_zeros() -> None:
    policy = Policy.of(**H2O, sinks=4)
    valid = torch.tensor([[False, False, True, True], [True] * 4])
    prompt = TokenMasks.of(policy, valid, budget=1.0, n_layers=2)
    positions = torch.arange(4).expand(2, 1, 4).masked_fill(~valid[:, None], -1)
    got, offered = competing([torch.rand(2, 1, 4)] * 2, [positions] * 2, prompt)
    assert not got.any()
    assert offered.tolist() == [1, 1]


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (3, 3)])
def test_retained_is_the_share_of_what_competed(heads) -> None:
    P, H = heads
    policy = Policy.of(window=3, sinks=1)
    g = generator(7)
    prompt = prompt_of(policy, 20, g)
    positions = tokens(2, P, 14, 20, g)
    positions = positions.masked_fill(~prompt.at("valid", positions), -1)
    scores = torch.randn(2, H, 14, generator=g) + 1  # what is below 0 counts as nothing
    few = prompt.at("must", positions).sum(-1).amax(-1) + 3
    indices, *_ = select(policy, torch.rand(2, H, 14, generator=g), positions, prompt, few.tolist())
    got = retained(scores, indices, positions, prompt)
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
    assert retained(torch.rand(2, 1, 6), indices, positions, prompt).tolist() == [1.0, 1.0]
    tiny = torch.full((2, 1, 6), 1e-30)
    free = prompt_of(EVERYTHING, 6, generator(8))
    indices, *_ = select(EVERYTHING, tiny, positions, free, free.lengths)
    assert retained(tiny, indices, positions, free).tolist() == [1.0, 1.0]


def test_squeeze_cuts_the_layers_that_change_little() -> None:
    similarity = torch.tensor([0.9, 0.2, 0.5])
    cut = sizes(0.5, layers="squeeze", p=0.4, more={"measured": similarity})
    assert cut == [4, 13, 13] == allocation.squeeze(similarity, 30, p=0.4, max_size=20)
    # A layer that overflowed changes the stream.
    spoiled = torch.tensor([0.9, math.nan, 0.5])
    assert sizes(0.5, layers="squeeze", p=0.4, more={"measured": spoiled}) == cut


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
