"""Along a given reply: its perplexity, and next tokens beside the full cache's."""

import math
from dataclasses import replace

import pytest
import torch

import mmkv
from helpers.evaluation import asking, divergence_of, make_samples, make_tokenizer, predicted
from helpers.marks import cases
from helpers.models import make_inputs, row_of
from helpers.oracle import short
from mmkv import forcing
from mmkv.eval import measure, runner
from mmkv.eval.measure import perplexity
from mmkv.eval.replay import asked
from mmkv.eval.store import Store
from mmkv.eval.tabulate import Report
from mmkv.forcing import drops_nothing, log_probabilities, score_answers

LENGTHS = (40, 31, 52)
REPLIES = [[5, 9, 40, 17, 88], [33], [7, 7, 90, 101, 12, 64, 30, 8]]
METRICS = ["divergence", "next"]
# Every kind of decoding: tokens that grow, a share of all, a constant size.
POLICIES = ["snapkv", "adakv", "xkv", "prefixkv", "h2o", "streaming"]


@pytest.fixture(scope="module")
def inputs():
    return make_inputs("llama", LENGTHS)


def test_perplexity_is_over_tokens_and_a_float_or_none():
    assert perplexity(6.0, 4) == pytest.approx(math.exp(1.5))
    assert perplexity(0.0, 0) is perplexity(5000.0, 2) is None


@cases("policy", POLICIES, "snapkv", "h2o")
def test_one_pass_equals_token_by_token(model, inputs, policy, monkeypatch):
    with mmkv.wrapped(model, policy, 0.5, **short(policy), **grow(policy)):
        with monkeypatch.context() as patch:
            patch.setattr(forcing, "drops_nothing", lambda cache: False)
            by_token = score_answers(model, inputs, REPLIES)
        assert drops_nothing(by_token.cache)
        at_once = score_answers(model, inputs, REPLIES)
    assert at_once.nll == pytest.approx(by_token.nll, rel=1e-5)
    assert at_once.greedy == by_token.greedy


def grow(policy: str) -> dict:
    return {} if mmkv.get_policy(policy).decode.name == "grow" else {"decode": "grow"}


def test_greedy_answers_are_recognised(model, inputs):
    with mmkv.wrapped(model, "snapkv", 0.5, window=6):
        new = model.generate(**inputs, max_new_tokens=5, do_sample=False)[:, -5:].tolist()
        new[1][3] = (new[1][3] + 1) % 100
        scored = score_answers(model, inputs, new)
    assert scored.greedy == [True, False, True]


def test_an_empty_answer_scores_nothing(model, inputs):
    scored = score_answers(model, inputs, [[], [4], []])
    assert scored.tokens == [0, 1, 0]
    assert scored.nll[0] == scored.nll[2] == 0.0


def test_wrong_number_of_answers_raises(model, inputs):
    with pytest.raises(ValueError, match="2 answers for 3 prompts"):
        score_answers(model, inputs, [[4], [5]])


@cases("policy", ["full", "snapkv", "h2o", "prefixkv", "streaming"], "full", "h2o")
def test_figures_equal_definitions(model, inputs, policy):
    """Rows of several lengths at once, against each row alone by torch's own divergence."""
    full = log_probabilities(model, inputs, REPLIES)
    assert [x.shape[0] for x in full] == [5, 1, 8]
    options = {"window": 8} if policy == "snapkv" else {}
    with mmkv.wrapped(model, policy, 0.5, **options):
        scored = score_answers(model, inputs, REPLIES, full=full)
        plain = score_answers(model, inputs, REPLIES)
    assert (scored.nll, scored.greedy) == (plain.nll, plain.greedy)
    assert plain.compared == plain.same == [0, 0, 0]
    assert scored.compared == [4, 0, 7]
    for b, reply in enumerate(REPLIES):
        row = row_of(inputs, b)
        wanted, _ = predicted(model, row, reply)
        with mmkv.wrapped(model, policy, 0.5, **options):
            given, _ = predicted(model, row, reply)
        nll = torch.nn.functional.cross_entropy(given, torch.tensor(reply), reduction="sum")
        assert scored.nll[b] == pytest.approx(nll.item(), rel=1e-4)
        given, wanted = given[1:], wanted[1:]  # the first is predicted before anything is evicted
        nats = divergence_of(given, wanted)
        assert scored.divergence[b] == pytest.approx(nats, rel=1e-3, abs=1e-6)
        assert (nats > 1e-3) == (policy != "full" and b != 1)
        assert scored.same[b] == int((given.argmax(-1) == wanted.argmax(-1)).sum())


def test_after_a_context_all_tokens_are_compared(model, inputs):
    """Whole, a context's predictions are the prompt's; cut, they are others, the first one too."""
    full = log_probabilities(model, inputs, REPLIES)
    before, question = (
        {k: x[:, part] for k, x in inputs.items()} for part in (slice(-4), slice(-4, None))
    )
    nats = {}
    for budget in (1.0, 0.3):
        with mmkv.wrapped(model, "snapkv", budget, window=4):
            whole, read = asked(mmkv.read(model, before), question)
            scored = score_answers(model, whole, REPLIES, full=full, read=read, hidden=True)
        assert scored.compared == [5, 1, 8]
        nats[budget] = scored.divergence
        if budget == 1.0:
            assert scored.same == scored.compared
    assert nats[1.0] == pytest.approx([0, 0, 0], abs=1e-6)
    assert min(nats[0.3]) > 1e-3


@pytest.fixture
def samples():
    """Texts that go on, and prompts with a reply of the model's own, in turns."""
    return [replace(s, metric=None) if i % 2 else s for i, s in enumerate(asking(make_samples()))]


def run(model, samples, out, **asked):
    usual = {"policies": ["snapkv", "snapkv:question=hidden"], "budgets": [0.5, 1.0]}
    usual |= {"metrics": METRICS, "batch_size": 2}
    return runner.run(model, make_tokenizer(), samples, out=out, **usual | asked)


def test_divergence_rows_follow_the_reply_or_text(model, samples, tmp_path):
    rows = run(model, samples, tmp_path)
    full = {r["index"]: r for r in rows if r["policy"] == "full"}
    assert full.keys() == set(range(len(samples)))
    for i, sample in enumerate(samples):
        along = len(sample.answers[0].split()) if sample.is_continuation else len(full[i]["reply"])
        assert sample.is_continuation == bool(i % 2)
        assert (full[i]["divergence_sum"], full[i]["next_sum"]) == (0, along - 1)
        for row in rows:
            if row["index"] != i:
                continue
            # The first token is predicted while a prompt is read, before anything is evicted.
            assert row["next_tokens"] == along - (row["options"].get("question") != "hidden")
            if row["budget"] == 1.0:
                assert row["divergence_sum"] == pytest.approx(0, abs=1e-5)
                assert row["next_sum"] == row["next_tokens"]
            else:
                assert row["divergence_sum"] > 1e-4
    assert "text" not in full[0]
    assert "score" not in full[0]


@pytest.mark.slow
@pytest.mark.parametrize("texts", [True, False])
def test_with_perplexity_the_figures_are_the_same(model, samples, tmp_path, monkeypatch, texts):
    """A text is fed once for both; where a batch has a reply of its own, that is fed as well."""
    if texts:
        samples = [replace(s, metric=None) for s in samples]
    calls = []
    real = measure.score_answers
    monkeypatch.setattr(
        measure, "score_answers", lambda *args, **more: calls.append(args) or real(*args, **more)
    )
    asked = {"policies": ["full", "snapkv", "snapkv:question=hidden"], "budgets": [0.5]}
    found = {
        metrics: run(model, samples, tmp_path / metrics, metrics=metrics.split(), **asked)
        for metrics in ("ppl", "divergence next", "ppl divergence next")
    }
    # The full cache's perplexity, and that of two policies, of three batches.
    assert len(calls) == 3 * (3 + 2 + (3 if texts else 5))
    for one, two, both in zip(*found.values(), strict=True):
        for name in ("nll", "answer_tokens"):
            assert both[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
        for name in ("divergence_sum", "next_sum"):
            assert both[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_same_reply_is_known_without_generating_it(model, samples, tmp_path, monkeypatch):
    """The same first choices along the full cache's reply are that reply."""
    monkeypatch.setattr(model.generation_config, "suppress_tokens", None)
    budgets = {"budgets": [0.2, 1.0]}
    compared = run(model, samples, tmp_path / "compared", **budgets)
    generated = run(model, samples, tmp_path / "generated", metrics=["rouge"], **budgets)
    found = set()
    for one, other in zip(compared, generated, strict=True):
        assert (one["policy"], one["budget"]) == (other["policy"], other["budget"])
        if one["policy"] != "full" and not samples[one["index"]].is_continuation:
            assert one["same"] == other["same"]
            found.add(one["same"])
    assert found == {0.0, 1.0}


@pytest.mark.slow
def test_distributions_are_computed_once_a_batch(model, samples, tmp_path, monkeypatch):
    """Also where a run goes on."""
    calls = []
    real = measure.log_probabilities
    monkeypatch.setattr(
        measure, "log_probabilities", lambda *args: calls.append(args) or real(*args)
    )
    rows = run(model, samples, tmp_path)
    batches = -(-len(samples) // 2)
    assert len(calls) == batches
    kept = [r for r in rows if r["policy"] == "full"]
    Store(tmp_path).rows_file.unlink()
    Store(tmp_path).append(kept)
    again = run(model, samples, tmp_path)
    assert len(calls) == 2 * batches
    for one, two in zip(rows, again, strict=True):
        assert two["divergence_sum"] == pytest.approx(one["divergence_sum"], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_means_are_over_tokens(model, samples, tmp_path):
    rows = run(model, samples, tmp_path)
    report = Report(tmp_path)
    mine = [r for r in rows if r["policy"] == "snapkv" and r["budget"] == 0.5]
    tokens = sum(r["next_tokens"] for r in mine)
    found = report.figures("snapkv", 0.5)
    assert found.divergence == pytest.approx(sum(r["divergence_sum"] for r in mine) / tokens)
    assert found["next"] == pytest.approx(sum(r["next_sum"] for r in mine) / tokens)
    assert report.shown == METRICS
    table = dict(report.main_table().rows)
    nats, same = table["snapkv"][0].split(" / ")
    assert nats == f"{found.divergence:.3f}"
    assert same == f"{100 * found['next']:.1f}"
    # Less divergence is better, more of the same tokens too.
    best = {p: report.figures(p, 0.5) for p in report.policies}
    (name,) = [p for p in best if table[p][0].startswith("**")]
    assert best[name].divergence == min(f.divergence for f in best.values())
    assert report.group_tables("task", report.tasks)[0].title.startswith("divergence")
