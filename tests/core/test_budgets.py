"""What a budget means: prompts of any length, generated tokens, and what is always kept."""

import itertools

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.models import IMAGE, VOCAB, make_inputs, make_model, row_of
from helpers.oracle import generate, prefilled, top, window_scores
from helpers.sizes import row_sizes
from mmkv.registry import exact_share

L, H, G = 2, 2, 2


@pytest.mark.parametrize(
    ("policy", "pooling"), [("snapkv", "max"), ("xkv", "avg"), ("pyramidinfer", None)]
)
def test_a_short_row_keeps_what_its_shrunk_window_attends_to(models, policy, pooling):
    """Each row of a batch by its own window: half of its budget, at least one token."""
    model, lengths = models("llama"), (33, 60, 9, 2, 20)
    inputs = make_inputs("llama", lengths)
    eager = make_model("llama", "eager")
    cache = prefilled(model, inputs, policy, 0.2, layers="uniform", window=32)
    for b, n in enumerate(lengths):
        total = round(0.2 * L * n)
        window = max(1, int(total / L / 2))
        with torch.no_grad():
            attentions = eager(**row_of(inputs, b), output_attentions=True).attentions
        kept = 0
        for layer, h in itertools.product(range(L), range(H)):
            found = {j - max(lengths) + n for j in cache.kept(layer)[b, h].tolist() if j >= 0}
            paid = attentions[layer][0, h * G : (h + 1) * G]
            scores = window_scores(paid, window, 7, pooling, recent=policy == "pyramidinfer")
            assert found == top(scores, len(found) - window) | set(range(n - window, n))
            kept += len(found)
        assert kept == H * max(total, L * window)


def test_budget_below_pinned_tokens_is_noted(text_model, caplog):
    """In the report, and in one line of the log of a wrap; nothing where more fits in."""
    with mmkv.wrapped(text_model, "snapkv", 0.2, sinks=4), torch.no_grad():
        notes = generate(text_model, make_inputs("llama", (200, 40, 12)), new=3)[2].report().notes
        assert notes == [
            "row 1: budget 0.2 gives 8 of 40 tokens a layer, too few for window 32, sinks 4; "
            "its window is 4 instead",
            "row 2: budget 0.2 gives 2.5 of 12 tokens a layer, too few for window 32, sinks 4; "
            "its window is 1 instead; each layer keeps 5",
        ]
        assert [record.getMessage() for record in caplog.records] == ["; ".join(notes)]
        (note,) = generate(text_model, make_inputs("llama", (50,)), new=2)[2].report().notes
        assert "too few for window 32, sinks 4; its window is 5 instead" in note
        assert len(caplog.records) == 1, "a wrap logs it once"
        caplog.clear()
    with mmkv.wrapped(text_model, "snapkv", 0.2, sinks=4), torch.no_grad():
        text_model.generate(**make_inputs("llama", (40,) * 9), max_new_tokens=2)
        assert [r.getMessage().count("too few") for r in caplog.records] == [3]
        assert caplog.records[0].getMessage().endswith("; and 6 rows more")
        caplog.clear()
    with mmkv.wrapped(text_model, "snapkv", 0.2, sinks=4), torch.no_grad():
        cache = text_model(**make_inputs("llama", (200, 190)), use_cache=True).past_key_values
        assert not caplog.records
        assert cache.report().notes == []
        cache = text_model(**make_inputs("llama", (180, 10)), use_cache=True).past_key_values
        # Nothing is left for what the window finds.
        text = "row 0: budget 0.2 gives 36 of 180 tokens a layer, all for window 32, sinks 4"
        assert cache.report().notes[0] == text


def test_generated_tokens_taking_the_whole_budget_are_noted(text_model):
    """A round of old generated tokens begins before a fifth of all holds the latest ones."""
    with mmkv.wrapped(text_model, "condense", 0.2, decode="rounds", latest=8, every=8, least=0):
        *_, cache, _ = generate(text_model, make_inputs("llama", (20,)), new=18)
    # 14 of 72 tokens over two layers, rounded.
    text = (
        "row 0: budget 0.2 gives 7 of 36 tokens a layer, too few for sinks 1, latest 8; each "
        "layer keeps 9"
    )
    assert cache.report().notes[-1] == text


@cases("policy", mmkv.list_policies(), "prefixkv", "h2o", "condense")
def test_protected_text_above_the_budget_stays_in_every_turn(models, policy):
    """The demo's second turn: the text of both is more than a fifth of the tokens seen."""
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (40,))
    options = {} if policy == "full" else {"protect": "instruction"}
    with mmkv.wrapped(model, policy, 0.2, **options, **exact_share(policy)):
        _, words, cache, _ = generate(model, inputs, new=6)
        ids = torch.cat([inputs["input_ids"], words, torch.arange(10, 40)[None]], dim=1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        *_, held = generate(model, second, new=3, past_key_values=cache)
    text = {j for j in range(76) if ids[0, j] != IMAGE} - set(range(40, 45))
    heads = [set(head.tolist()) for layer in held[0] for head in layer[0]]
    if policy == "full":
        assert all(head == set(range(76)) for head in heads)
        return
    sinks = set(range(mmkv.get_policy(policy).sinks))
    assert all(head == text | sinks for head in heads)
    assert "protected text" in cache.report().notes[-1]


@cases("policy", ["snapkv", "pyramidinfer", "xkv"], "snapkv")
def test_rows_of_a_later_turn_observe_with_the_queries_they_have(models, policy):
    """A turn whose rows are of different lengths, some shorter than the window: as if alone."""
    model, inputs = models("llama"), make_inputs("llama", (60, 60))
    g = torch.Generator().manual_seed(7)
    lengths = (12, 3)  # of the second turn
    more = torch.randint(4, VOCAB, (2, 12), generator=g)

    def talk(rows):
        first = {k: v[rows] for k, v in inputs.items()}
        longest = max(lengths[b] for b in rows)
        cache = generate(model, first, new=1)[2]
        new = torch.ones(len(rows), longest, dtype=torch.long)
        for i, b in enumerate(rows):
            new[i, : longest - lengths[b]] = 0
        second = {
            "input_ids": torch.cat([first["input_ids"], more[rows][:, 12 - longest :]], dim=1),
            "attention_mask": torch.cat([first["attention_mask"], new], dim=1),
        }
        return generate(model, second, new=1, past_key_values=cache)[-1][0]

    with mmkv.wrapped(model, policy, 0.5, window=8):
        together, *singles = (talk(rows) for rows in ([0, 1], [0], [1]))
    for b, single in enumerate(singles):
        shift = 12 - lengths[b]
        for x, y in zip(together, single, strict=True):
            own = torch.where(y[0] >= 60, y[0] + shift, y[0])
            assert torch.equal(x[b][:, : own.shape[-1]], own)
            assert (x[b][:, own.shape[-1] :] == -1).all()


@cases(
    "split",
    [{"layers": "prefix"}, {"layers": "pooled"}, {"layers": "uniform", "heads": "global"}],
    {"layers": "prefix"},
)
@pytest.mark.parametrize(("protect", "budget"), [("none", 0.5), ("instruction", 0.2)])
def test_a_later_turn_may_have_fewer_tokens_left_than_its_budget(models, split, protect, budget):
    """Long answers count into the budget, but decoding has dropped them: all that is left stays."""
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (40,))
    options = {**split, "decode": "fixed", "protect": protect, "average_heads": False}
    with mmkv.wrapped(model, "prefixkv", budget, **options):
        _, words, cache, held = generate(model, inputs, new=30)
        ids = torch.cat([inputs["input_ids"], words, torch.tensor([[7, 8]])], dim=1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        *_, kept = generate(model, second, new=2, past_key_values=cache)
    for before, after in zip(held[-1], kept[0], strict=True):
        for one, other in zip(before[0], after[0], strict=True):
            left = set(one[one >= 0].tolist()) | set(range(69, 72))
            assert set(other[other >= 0].tolist()) == left


def simulated(decode, first, n, size, steps, distance, sinks):
    """What a head holds after each step: `first` and then tokens n, n + 1, ..., one at a time.

    `size(t)` is how many it may hold once t tokens are generated.
    """
    tokens, held = sorted(first), [set(first)]
    for t in range(1, steps + 1):
        newest = n + t - 1
        tokens.append(newest)
        over = len(tokens) > size(t)
        if decode == "ratio" and over and newest - distance >= n and newest - distance in tokens:
            tokens.remove(newest - distance)
        if decode == "fixed" and over:
            tokens.remove(next(j for j in tokens if j >= sinks))
        held.append(set(tokens))
    return held


@cases("budget", [0.3, 20], 20)
@cases(
    "policy, options",
    [
        ("snapkv", {"window": 3}),
        ("prefixkv", {"distance": 4}),
        ("prefixkv", {"distance": 25}),
        ("elastic", {"distance": 7, "merge": None}),
        ("pyramidkv", {"window": 2, "heads": "adaptive", "decode": "ratio", "distance": 3}),
        ("local", {}),
        ("streaming", {"sinks": 3}),
        ("local", {"layers": "pyramid"}),
        ("h2o", {}),
        ("h2o", {"layers": "prefix", "heads": "adaptive"}),
    ],
    ("h2o", {}),
)
def test_budget_counts_generated_tokens_by_decoding_part(models, policy, options, budget):
    """grow: on top of it. ratio: its share of, or number among, all. fixed: in others' place."""
    lengths, new = (60, 12, 31), 28
    model, inputs = models("llama"), make_inputs("llama", lengths)
    chosen = mmkv.get_policy(policy, **options)
    with mmkv.wrapped(model, chosen, budget):
        *_, held = generate(model, inputs, new=new)
    for b, n in enumerate(lengths):
        shift = max(lengths) - n
        for layer in range(L):
            for h in range(H):
                got = [step[layer][b, h] for step in held]
                got = [{j - shift for j in x[x >= 0].tolist()} for x in got]
                kept = len(got[0])
                if isinstance(budget, int):
                    size = (lambda t: budget) if n <= budget else (lambda t, k=kept: k)
                elif chosen.decode.name == "ratio":
                    size = lambda t, k=kept, n=n: round(k / n * (n + t))  # noqa: E731
                else:
                    size = lambda t, k=kept: k  # noqa: E731
                wanted = simulated(
                    chosen.decode.name,
                    got[0],
                    n,
                    size,
                    new - 1,
                    chosen.flat().get("distance", 25),
                    chosen.sinks,
                )
                if policy == "h2o":  # which token it drops depends on the attention
                    assert [len(x) for x in got] == [len(x) for x in wanted]
                else:
                    assert got == wanted


@pytest.mark.slow
def test_generated_tokens_get_budget_share_despite_more_pinned(models):
    """A prompt of text alone, all of it protected: the answer to it is held by a fifth."""
    model, inputs = models("llava-llama"), make_inputs("llama", (30,))
    with mmkv.wrapped(model, "prefixkv", 0.2, protect="instruction", distance=5):
        *_, held = generate(model, inputs, new=200)
    assert [len(held[t][0][0, 0]) for t in (0, 5, 6, 110, 150)] == [30, 35, 35, 35, 36]
    assert len(held[-1][0][0, 0]) == round(0.2 * 229)


def official_pyramid(n_layers, mean, window, n, beta):
    """PyramidKV's sizes as its paper and code give them, before rounding: the window on top."""
    least = (mean - window) / beta
    most = 2 * (mean - window) - least
    if most >= n - window:
        most = n - window
        least = 2 * (mean - window) - most
    step = (most - least) / (n_layers - 1)
    return [window + most - step * layer for layer in range(n_layers)]


@pytest.mark.parametrize("policy", ["pyramidkv", "ada-pyramidkv"])
@pytest.mark.parametrize(
    ("n_layers", "mean", "window", "n", "beta"),
    [(32, 64, 8, 1000, 20), (32, 64, 8, 90, 20), (3, 40, 8, 100, 20), (7, 90, 32, 110, 5)],
)
def test_pyramidkv_is_the_official_series(policy, n_layers, mean, window, n, beta):
    """The window in every layer, and the rest of the budget falling with depth."""
    chosen = mmkv.get_policy(policy, window=window, beta=beta)
    sizes = row_sizes(chosen, mean, n_layers=n_layers, length=n, floor=window)
    wanted = official_pyramid(n_layers, mean, window, n, beta)
    assert all(abs(x - y) < 1 for x, y in zip(sizes, wanted, strict=True))
    assert sum(sizes) == n_layers * mean
