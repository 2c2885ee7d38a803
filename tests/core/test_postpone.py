"""postpone=n: the whole cache for n steps, then eviction with the generated tokens' queries too."""

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.masking import held_sets, masked_logits
from helpers.models import make_inputs, make_model, next_turn
from helpers.oracle import generate, top
from mmkv.attach import graph
from mmkv.registry import exact_share

L, H, G = 3, 2, 2
AFTER = 6


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_queries_of_generated_tokens_observe_the_whole_prompt(policy):
    """As loops over the plain model's attention read it, on the prompt and the reply's first n."""
    model, inputs = make_model("llama", "eager"), make_inputs("llama", (60,))
    window, budget = 5, 24
    options = {"window": window, "pooling": None} if policy == "snapkv" else {}
    with mmkv.wrapped(model, policy, budget, postpone=AFTER, **options):
        _, tokens, _, held = generate(model, inputs, new=AFTER + 2)
    ids = torch.cat([inputs["input_ids"], tokens[:, :AFTER]], dim=1)
    N = ids.shape[1]
    with torch.no_grad():
        attentions = model(ids, output_attentions=True, use_cache=False).attentions
    for t in range(AFTER):
        for layer in range(L):
            assert held_sets(held[t][layer]) == [set(range(60 + t))] * H
    for layer in range(L):
        for h in range(H):
            a = attentions[layer][0, h * G : (h + 1) * G].double()
            observing = range(N - window - AFTER, N) if policy == "snapkv" else range(N)
            late = set(range(N - window - AFTER, N))
            if policy == "h2o":  # half of the budget is recent, beside what stays anyway
                late = set(range(N - AFTER - budget // 2, N))
            scores = [sum(a[g, i, j].item() for g in range(G) for i in observing) for j in range(N)]
            scores = [-1.0 if j in late else s for j, s in enumerate(scores)]
            wanted = top(scores, budget - len(late)) | late
            assert held_sets(held[AFTER][layer])[h] == wanted


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_padding_before_all_rows_changes_nothing(models, policy):
    """Queries of padding do not observe, though they came with the prompt's."""
    model, inputs = models("llama"), make_inputs("llama", (30, 21))
    options = {"window": 40} if policy == "snapkv" else {}
    wide = {k: torch.nn.functional.pad(x, (12, 0)) for k, x in inputs.items()}
    found = []
    for given in (inputs, wide):
        with mmkv.wrapped(model, policy, 0.5, postpone=3, **options):
            logits, _, cache, _ = generate(model, given, new=6)
        found.append((logits, [cache.kept(i) for i in range(L)]))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=0)
    for plain, padded in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(torch.where(padded < 0, -1, padded - 12), plain)


def test_bytes_and_report_are_of_the_whole_cache_meanwhile(models):
    model, inputs = models("llama"), make_inputs("llama", (70, 40))
    found = {}
    for new in (AFTER, AFTER + 1, AFTER + 2):
        with mmkv.wrapped(model, "snapkv", 0.3, window=4, postpone=AFTER):
            *_, cache, _ = generate(model, inputs, new=new)
        found[new] = cache.report(), cache.nbytes, cache.compressed[0]
    waiting, nbytes, layer = found[AFTER]
    assert waiting.notes == [
        "held whole: 1 of postpone=6 generated tokens are to come before it is evicted"
    ]
    assert waiting.kept_fraction == 1.0
    # 4 queries of the prompt and 5 of generated tokens wait too: 2 rows, 4 heads, 16 floats.
    assert layer.nbytes - layer.state.nbytes == (4 + 5) * 2 * 4 * 16 * 4
    pairs = L * H * (75 + 45) * 2 * 16 * 4
    assert pairs <= nbytes - 3 * (layer.nbytes - layer.state.nbytes) < 1.1 * pairs
    for new in (AFTER + 1, AFTER + 2):
        report, nbytes, layer = found[new]
        assert nbytes < 0.5 * report.full_nbytes
        assert not any("held whole" in note for note in report.notes)
        assert layer.nbytes == layer.state.nbytes
    counts = [n for x in found[AFTER + 1][0].layers for row in x.kept for n in row]
    totals = [round(0.3 * L * (n + AFTER)) for n in (70, 40)]
    assert sum(counts) == H * sum(totals)


@pytest.mark.parametrize("new", [3, AFTER + 3])
@cases("policy", ["snapkv", "h2o", "condense"], "snapkv")
def test_a_new_turn_waits_again(models, policy, new):
    """After a reply that was long enough for the first eviction, and after one that was not."""
    model, inputs = models("llama"), make_inputs("llama", (60, 41))
    options = {"window": 4} if policy == "snapkv" else exact_share(policy)
    with mmkv.wrapped(model, policy, 0.4, postpone=AFTER, **options):
        _, tokens, cache, held = generate(model, inputs, new=new)
        sequences = torch.cat([inputs["input_ids"], tokens], dim=1)
        second = next_turn(inputs, sequences, False)
        logits, more, cache, later = generate(model, second, new=AFTER + 4, past_key_values=cache)
    turn = {"input_ids": second["input_ids"][:, sequences.shape[1] - 1 :]}
    steps = [{"input_ids": x[:, None]} for x in torch.cat([tokens[:, :-1]], 1).T]
    feeds = [*steps, turn, *({"input_ids": x[:, None]} for x in more[:, :-1].T)]
    expected = masked_logits(model, inputs, feeds, held + later)
    torch.testing.assert_close(logits, expected[new:], atol=1e-4, rtol=0)
    before = set(range(60 + new)) if new < AFTER else held_sets(held[-1][0])[0]
    for t in range(AFTER):
        assert held_sets(later[t][0])[0] >= before
    assert len(held_sets(later[AFTER][0])[0]) < len(held_sets(later[AFTER - 1][0])[0])


def test_beams_carry_the_waiting_queries(models):
    """Rows that are chosen have their own queries: beams of one row are that row's."""
    model, inputs = models("llama"), make_inputs("llama", (60, 41))
    found = []
    for rows in ([1, 0, 1], [1]):
        with mmkv.wrapped(model, "condense", 0.3, least=0, postpone=AFTER), torch.no_grad():
            *_, cache, _ = generate(model, inputs, new=4)
            cache.batch_select_indices(torch.tensor(rows))
            for t in range(4):
                out = model(input_ids=torch.full((len(rows), 1), 9 + t), past_key_values=cache)
            found.append((out.logits, cache.kept(0)))
    for b in (0, 2):
        torch.testing.assert_close(found[0][0][b], found[1][0][0], atol=1e-5, rtol=0)
        assert held_sets(found[0][1], b) == held_sets(found[1][1], 0)


def test_steps_are_replayed_once_the_prompt_is_evicted(models, monkeypatch):
    monkeypatch.setattr(graph, "_capturable", lambda device: True)
    model, inputs = models("llama"), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "snapkv", 0.3, window=4, postpone=AFTER):
        *_, cache, _ = generate(model, inputs, new=4)
        assert graph.refusal(model, cache, model.generation_config) is None
        one = {"input_ids": torch.tensor([[9]]), "past_key_values": cache}
        assert not graph._decodes(cache, one)
        for _ in range(3):
            model(**one)
        assert graph._decodes(cache, one)


def test_where_nothing_can_wait(models):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    with pytest.raises(ValueError, match="postpone=8 waits for generated"):
        mmkv.calibrate(model, [inputs], "prefixkv", postpone=8)
    with mmkv.wrapped(model, "snapkv", 0.3, window=4, postpone=8):
        with pytest.raises(ValueError, match="postpone=8 waits for generated tokens"):
            mmkv.read(model, inputs)
        cache = model(**inputs, use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"9 tokens at once .* after 8 more"):
            model(input_ids=torch.full((1, 9), 7), past_key_values=cache)
