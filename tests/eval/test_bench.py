"""The benchmark: its arithmetic, its order, what it counts, and the command, all on toy models."""

from __future__ import annotations

import io
import itertools
import json
import math
import stat
import sys
import textwrap
from importlib.metadata import version

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from transformers.utils.import_utils import is_flash_attn_2_available

import mmkv
from helpers.marks import slow_except
from helpers.models import make_inputs
from mmkv.cli import commands
from mmkv.eval.speed import measure, models, presets, processor, report, rival, rows, runner

LABELS = (
    "unwrapped sdpa",
    "unwrapped sdpa again",
    "unwrapped eager",
    "full",
    "snapkv 0.2",
    "snapkv 0.5",
    "adakv 0.2",
)


def toy(name="llama-120m-random"):
    return models.make(models.SHAPES[name].toy(), "cpu")


@pytest.fixture(scope="module")
def model():
    return toy()


def setting(**changes):
    base = {"model": "llama-120m-random", "prompt": 256, "new": 4, "batch": 2, "rounds": 2}
    base |= {"policies": ("full", "snapkv"), "budgets": (0.2, 0.5)}
    return presets.Setting(**(base | changes))


def bench(model, **changes):
    about = {"device": "a CPU", "dtype": "float32"}
    about |= {k: changes.pop(k) for k in ("worker", "roofline", "until") if k in changes}
    return runner.Bench(setting(**changes), model, **about)


def row(label="a", kind="policy", **values):
    return report.RowResult(label, kind, "p", 0.2, {}, values.pop("batch", 2), **values)


def result(*rows, **values):
    known = {"device": "cpu", "about": {}, "weight_bytes": 1, "step_weight_bytes": 1}
    return report.Result("x", "m", 100, 11, layers=4, rows=list(rows), **(known | values))


class TestNumbers:
    @pytest.mark.slow
    def test_intervals_hold_the_true_median_as_often_as_they_say(self):
        """Of normal logarithms with median 1.1, by resampling and by Student's t."""
        draw = np.random.default_rng(5)
        for n in (3, 5, 6, 40):
            found = [report.Estimate.of(1.1 * np.exp(draw.normal(0, 0.1, n))) for _ in range(400)]
            inside = sum(x.low <= 1.1 <= x.high for x in found) / 400
            assert 0.91 < inside < 0.99, n
            assert all(x.low <= x.median <= x.high for x in found)
        widths = [report.Estimate.of(np.exp(draw.normal(0, 0.1, n))) for n in (20, 2000)]
        assert widths[1].high - widths[1].low < 0.2 * (widths[0].high - widths[0].low)

    def test_equal_values_leave_no_doubt(self):
        for n in (3, 7):
            found = report.ratio([3.0] * n, [1.5] * n)
            assert (found.median, found.n) == (2, n)
            assert found.low == pytest.approx(2)
            assert found.high == pytest.approx(2)

    def test_two_values_have_no_interval(self):
        assert report.Estimate.of([1.0, 3.0]) == report.Estimate(2, None, None, 2)

    def test_one_wild_pair_does_not_move_a_median(self):
        found = report.ratio([2.0] * 20 + [900.0], [1.0] * 21)
        assert (found.median, found.low, found.high) == (2, 2, 2)

    def test_ratios_are_taken_pair_by_pair(self):
        # The machine slowed down by ten in the last pair: the ratio does not see it.
        assert report.ratio([2, 4, 60], [1, 2, 30]).median == 2
        with pytest.raises(ValueError, match="zip"):
            report.ratio([2, 4], [1, 2, 3])

    def test_break_even(self):
        assert report.break_even(12, 1, 10, 1.5) == 4
        assert report.break_even(10.1, 1, 10, 1.5) == 1
        assert report.break_even(9, 1, 10, 2) == 0
        assert report.break_even(12, 2, 10, 2) is None
        assert report.break_even(12, 3, 10, 2) is None

    def test_break_even_is_where_the_whole_run_becomes_faster(self):
        for prefill, step in itertools.product((10.5, 12.0, 17.3), (0.2, 1.0, 1.7)):
            n = report.break_even(prefill, step, 10.0, 2.0)
            assert prefill + n * step <= 10.0 + n * 2.0 + 1e-9
            assert prefill + (n - 1) * step > 10.0 + (n - 1) * 2.0

    def test_a_row_compares_with_the_unwrapped_one(self):
        base = row(
            "unwrapped sdpa", "unwrapped", prefill_s=[10.0, 10.0], step_s=[0.5, 0.5], peak_bytes=200
        )
        base.cache_bytes = 1000
        mine = row(prefill_s=[11.0, 12.0], step_s=[0.1, 0.1], cache_bytes=250, peak_bytes=100)
        found = result(base, mine).summary(mine)
        assert (found["prefill_ms"], found["tokens_per_s"]) == (11500, 20)
        ratios = found["to_unwrapped"]
        assert ratios["prefill"]["median"] == pytest.approx(1.15)
        assert ratios["tokens_per_s"]["median"] == pytest.approx(5)
        assert (ratios["cache_bytes"], ratios["peak_bytes"]) == (0.25, 0.5)
        assert found["pays_from_steps"] == 4
        assert "to_unwrapped" not in result(base, mine).summary(base)

    def test_the_bound_of_a_step_is_what_it_must_move(self):
        base = row("unwrapped sdpa", "unwrapped", prefill_s=[1.0], step_s=[0.5], cache_bytes=300)
        found = result(base, bandwidth=2000.0, step_weight_bytes=100).summary(base)
        assert (found["bound_ms"], found["reached"]) == (200, 0.4)
        assert "bound_ms" not in result(base).summary(base)

    def test_peaks_follow_allocations_and_frees(self):
        events = [("[memory]", 5), ("aten::mm", 99), ("[memory]", -3), ("[memory]", 4)]
        late = [(measure._FIRST, 0), ("[memory]", 10), ("[memory]", -10)]
        assert measure.peaks([*events, *late]) == (6, 16)
        assert measure.peaks(events) == (6, 6)

    def test_the_largest_batch_from_two_sizes(self):
        assert runner.largest_batch(150, 200, 1000, 64) == 17
        assert runner.largest_batch(150, 200, 1000, 8) == 8
        assert runner.largest_batch(2000, 3000, 1000, 8) == 1
        assert runner.largest_batch(150, None, 1000, 64) == 1

    @pytest.mark.slow
    def test_a_batch_that_did_not_fit_shrinks(self, model, monkeypatch):
        real = runner.Bench._open

        def open_(self, row, batch, warm, *, trace=False):
            if batch > 12:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(self, row, batch, warm, trace=trace)

        monkeypatch.setattr(runner.Bench, "_open", open_)
        monkeypatch.setattr(runner, "largest_batch", lambda *args: 14)
        found = bench(model, batch=0, prompt=80, policies=("full",), unwrapped=(), rounds=1).run()
        assert [(r.batch, r.note, len(r.step_s)) for r in found.rows] == [(12, "", 1)] * 3
        found = bench(model, batch=14, prompt=80, policies=("full",), unwrapped=(), rounds=1).run()
        assert [r.note for r in found.rows] == ["out of memory"] * 3
        assert found.base is None
        assert "out of memory" in found.missing

    def test_the_made_up_profile_spends_its_budget(self):
        for budget, layers in itertools.product((0.2, 0.8, 1.0), (2, 3, 12)):
            profile = rows.falling_profile(layers, budget)
            assert sum(profile.fractions) / layers == pytest.approx(budget)
            assert max(profile.fractions) <= 1


class FakeReply:
    """A reply on a clock of its own: a step takes what its row and the machine's drift say."""

    def __init__(self, log, row, now, cost):
        self.log, self.row, self.now, self.cost, self.nbytes = log, row, now, cost, 10
        self.start = measure.Start(self.spend("prefill", 50), 0.1, 10, 20, 30)

    def spend(self, what, times=1):
        self.log.append((what, self.row.label))
        # The machine drifts by a factor of four, and back.
        seconds = times * self.cost * (2.5 + 1.5 * math.sin(self.now[0] / 7))
        self.now[0] += seconds
        return seconds

    def steps(self, number):
        return sum(self.spend("step") for _ in range(number))

    def close(self):
        self.log.append(("close", self.row.label))


@pytest.fixture
def clocked(model, monkeypatch):
    """A bench whose rows have costs of their own, on a clock that only they move."""
    log, now, costs = [], [0.0], {}

    def open_(self, row, batch, warm, *, trace=False):
        costs.setdefault(row.label, 0.01)
        return FakeReply(log, row, now, costs[row.label] * batch)

    monkeypatch.setattr(runner.Bench, "_open", open_)
    monkeypatch.setattr(runner.Bench, "_count_bytes", lambda self: None)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    return lambda **changes: (bench(model, unwrapped=(), **changes), log, costs)


class TestPairs:
    def test_every_row_takes_every_step_in_random_order(self, clocked):
        made, log, _ = clocked(new=65, rounds=3)
        found = made.run()
        labels = [r.label for r in made.rows]
        assert len(labels) == 5
        steps = [x for what, x in log if what == "step"]
        rounds = [steps[i : i + 5] for i in range(0, len(steps), 5)]
        assert len(rounds) == found.steps == 64
        assert all(sorted(x) == sorted(labels) for x in rounds)
        assert len({tuple(x) for x in rounds}) > 30
        assert all(len(r.step_s) == 64 and len(r.prefill_s) == 3 for r in found.rows)
        # Prefilled once for the steps, and closed after them.
        assert log[:5] == [("prefill", x) for x in labels]
        assert sorted(log[5 + 5 * 64 :][:5]) == sorted(("close", x) for x in labels)

    def test_a_slow_row_is_seen_and_a_drifting_machine_is_not(self, clocked):
        made, _, costs = clocked(new=129, budgets=(0.2,))
        costs["snapkv 0.2"] = 0.0105
        found = made.run()
        slow = found.summary(found.row("snapkv 0.2"))["to_unwrapped"]["tokens_per_s"]
        assert slow["high"] < 1
        assert slow["low"] <= 1 / 1.05 <= slow["high"]
        assert self.same(found) == ["pass", "cannot tell"]  # two prefills
        costs["unwrapped sdpa again"] = 0.0115
        assert self.same(clocked(new=129, budgets=(0.2,))[0].run())[0] == "short"

    def test_prefills_are_compared_within_their_rounds(self, clocked):
        made, _, costs = clocked(new=5, rounds=400, batch=1, budgets=(0.2,))
        costs["snapkv 0.2"] = 0.0125
        found = made.run()
        slow = found.summary(found.row("snapkv 0.2"))["to_unwrapped"]["prefill"]
        assert 1.05 < slow["low"] <= 1.25 <= slow["high"]
        assert slow["n"] == 400
        assert self.same(found)[1] == "pass"

    def same(self, found):
        return [check.judge(found).outcome for check in presets.SAME]

    def test_a_step_that_sleeps_is_seen(self, model, monkeypatch):
        real = measure.Reply.steps

        def steps(self, number):
            wrapped = isinstance(self.cache, mmkv.CompressedCache)
            return real(self, number) + 5.0 * number * wrapped

        monkeypatch.setattr(measure.Reply, "steps", steps)
        found = bench(model, new=4, policies=("full",), unwrapped=(), rounds=3).run()
        ratio = found.summary(found.row("full"))["to_unwrapped"]["tokens_per_s"]
        assert ratio["high"] < 1

    def test_a_row_that_fails_leaves_the_others_paired(self, clocked, monkeypatch):
        real = FakeReply.spend

        def spend(self, what, times=1):
            if what == "step" and self.row.label == "full" and self.log.count(("step", "full")) > 4:
                raise ValueError("no room")
            return real(self, what, times)

        monkeypatch.setattr(FakeReply, "spend", spend)
        found = clocked(new=17, rounds=2)[0].run()
        assert [(r.note, len(r.step_s), len(r.prefill_s)) for r in found.rows] == [
            ("no room", 0, 0) if r.label == "full" else ("", 16, 2) for r in found.rows
        ]

    def test_no_time_means_fewer_steps_and_prefills_and_a_smaller_batch(self, clocked):
        made, _, _ = clocked(new=4000, rounds=50, batch=8, until=120.0)
        found = made.run()
        assert 0 < found.rows[0].batch < 8
        assert {r.batch for r in found.rows} == {found.rows[0].batch}
        assert 0 < found.steps < 3999
        assert 0 < len(found.rows[0].prefill_s) < 50
        assert len(found.notes) == 2
        assert runner.time.monotonic() < 130

    def test_without_any_time_there_is_one_of_each(self, clocked):
        found = clocked(new=40, rounds=3, until=0.0)[0].run()
        assert found.steps == 1
        assert [len(r.prefill_s) for r in found.rows] == [1] * 5
        assert self.same(found) == ["cannot tell"] * 2

    def test_caches_that_do_not_fit_side_by_side_follow_each_prefill(self, clocked, monkeypatch):
        monkeypatch.setattr(runner.Bench, "_free", lambda self: 40)
        made, log, _ = clocked(new=5, rounds=4)
        found = made.run()
        assert "side by side" in found.notes[0]
        assert [len(r.step_s) for r in found.rows] == [4] * 5
        turns = [what for what, _ in log if what != "close"][-25:]
        assert turns == ["prefill", *["step"] * 4] * 5
        opened = 0
        for what, _ in log:
            opened += {"prefill": 1, "close": -1}.get(what, 0)
            assert opened <= 1


class TestRows:
    @pytest.mark.slow
    def test_rows_and_columns(self, model):
        found = bench(model, policies=("full", "snapkv", "adakv"), roofline=True).run()
        assert [r.label for r in found.rows] == [*LABELS, "adakv 0.5"]
        for one in found.rows:
            assert (len(one.prefill_s), len(one.step_s)) == (2, 3)
            sizes = (one.cache_bytes, one.peak_bytes, one.prefill_peak_bytes, one.start_s)
            assert all(x > 0 for x in sizes)
            assert one.peak_bytes > one.cache_bytes
        out = io.StringIO()
        Console(file=out, width=250).print(found.table())
        for text in (*LABELS, "prefill ms", "ms/token", "tokens/s", "cache MB", "peak MB"):
            assert text in out.getvalue()
        assert "bound ms" in out.getvalue()
        assert "capture ms" not in out.getvalue()
        assert "at lengths of 260 to 262 tokens" in found.conditions
        assert "pays from" in out.getvalue()
        assert not mmkv.wrapping.is_wrapped(model)
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.slow
    def test_cache_bytes_fall_with_the_budget_and_are_the_caches_own(self, model):
        rows = {r.label: r for r in bench(model).run().rows}
        sizes = [rows[x].cache_bytes for x in ("snapkv 0.2", "snapkv 0.5", "full")]
        assert sizes == sorted(sizes)
        assert sizes[0] < 0.3 * sizes[2]
        ids = models.make_prompt(model, 2, 256)
        with mmkv.wrapped(model, "snapkv", 0.5):
            # The prompt's token, three to warm up and three that are timed.
            out = model.generate(
                ids, max_new_tokens=7, do_sample=False, return_dict_in_generate=True
            )
        assert out.past_key_values.nbytes == sizes[1]
        head = 2 * 2 * 64 * 4  # keys and values, of two rows, float32
        assert rows["unwrapped sdpa"].cache_bytes == 3 * head * (256 + 6)
        assert rows["unwrapped sdpa"].prefill_cache_bytes == 3 * head * 256

    @pytest.mark.slow
    def test_what_cannot_be_done_is_a_note(self, model):
        found = bench(model, policies=("snapkv:window=200",), budgets=(100,)).run()
        assert "200 tokens" in found.rows[-1].note
        assert found.row("snapkv:window=200 100") is None
        assert found.row("unwrapped sdpa") is not None

    def test_an_unknown_policy_is_refused(self):
        with pytest.raises(ValueError, match="unknown policy 'nope'"):
            rows.make_rows(setting(policies=("nope",)), kvpress=False)
        for text, why in (
            ("snapkv:graph", "name=value"),
            ("snapkv:graph=maybe", "true or false"),
            ("snapkv:kv_dtype=int7", "int7"),
        ):
            with pytest.raises(ValueError, match=why):
                rows.make_rows(setting(policies=(text,)), kvpress=False)
        with pytest.raises(ValueError, match="twice"):
            rows.make_rows(setting(policies=("snapkv", "snapkv")), kvpress=False)


class TestSteps:
    """What a decode step allocates and copies does not grow with the cache."""

    def growth(self, model, policy):
        steps = []
        for prompt in (96, 192):
            with mmkv.wrapped(model, policy, 0.6):
                steps.append(measure.trace_step(model, models.make_prompt(model, 1, prompt)))
        return runner.step_growth(*steps, model.config, 4)

    @pytest.mark.parametrize("policy", slow_except(["snapkv", "adakv", "prefixkv", "h2o"], "h2o"))
    def test_counts(self, model, policy):
        found = self.growth(model, policy)
        # Heads of a longer prompt may fall into another number of blocks.
        assert found["ops"] == 0 or policy == "adakv"
        # The model's own mask may have a byte a token; a layer's has one for each of its slots.
        assert found["nbytes"] < 0.5 * found["slots"]
        assert found["slots"] == pytest.approx(4 * 0.6 * 96, rel=0.05)  # of four heads

    @pytest.mark.slow
    def test_a_plain_cache_copies_itself(self, model):
        steps = [measure.trace_step(model, models.make_prompt(model, 1, n)) for n in (96, 192)]
        found = runner.step_growth(*steps, model.config, 4)
        # Keys and values of 16 float32 numbers, in each of three layers.
        assert found["nbytes"] >= 3 * 2 * 16 * 4 * found["slots"]


class TestModels:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", models.SHAPES)
    def test_toys_keep_their_kind_and_generate(self, name):
        made = toy(name)
        shape = models.SHAPES[name]
        assert ("Llava" in type(made).__name__) == (shape.vision is not None)
        config = made.get_decoder().config
        wanted = shape.text["num_attention_heads"] // shape.text["num_key_value_heads"]
        assert config.num_attention_heads // config.num_key_value_heads == wanted
        reply = measure.Reply(made, models.make_prompt(made, 1, 40))
        assert reply.start.prefill_s > 0
        assert reply.steps(2) > 0
        assert reply.cache.get_seq_length() == 42
        assert models.step_bytes(made) < models.weight_bytes(made)

    def test_twins_share_weights_and_are_wrapped_by_themselves(self, model):
        one, two = models.twin(model), models.twin(model)
        mmkv.wrap(one, "snapkv", 0.5)
        assert not mmkv.is_wrapped(two)
        assert not mmkv.is_wrapped(model)
        mine, theirs = dict(model.named_parameters()), dict(one.named_parameters())
        assert mine.keys() == theirs.keys()
        assert all(x is theirs[name] for name, x in mine.items())

    @pytest.mark.slow
    def test_replies_that_alternate_are_those_of_generate(self, model):
        """Wrapped in several ways at once, a step here and a step there."""
        ids = models.make_prompt(model, 2, 96)
        made = {x: models.twin(model) for x in ("snapkv", "adakv", "h2o", "condense")}
        for name, one in made.items():
            mmkv.wrap(one, name, 0.4)
        made["none"] = model
        replies = {name: measure.Reply(one, ids, 1) for name, one in made.items()}
        said = {name: [reply._token] for name, reply in replies.items()}
        for _ in range(4):
            for name, reply in replies.items():
                reply.steps(1)
                said[name].append(reply._token)
        for name, one in made.items():
            out = one.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
            assert torch.equal(torch.cat(said[name], 1), out[:, -5:]), name

    @pytest.mark.slow
    def test_other_ways_of_the_unwrapped_model(self, model):
        """A static cache holds all it may need, and says the same; flash attention may be away."""
        made = bench(model, unwrapped=("static", "flash"), policies=("full",), prompt=40, rounds=1)
        said = {}
        for one in made.rows[:3]:
            reply = made._open(one, 2, 3)
            said[one.name] = reply._token
        assert torch.equal(said["static"], said["sdpa"])
        found = {x.label: x for x in made.run().rows}
        per_token = found["unwrapped sdpa"].prefill_cache_bytes / 40
        most = 40 + made.warm + made.setting.new
        assert found["unwrapped static"].cache_bytes == most * per_token
        if not is_flash_attn_2_available():
            assert found["unwrapped flash"].note == "flash-attn is not installed"
        with pytest.raises(ValueError, match="'dynamic': expected eager, static, flash"):
            bench(model, unwrapped=("dynamic",))

    def test_prompts_hold_no_pictures(self):
        made = toy("llava-1.5-7b-random")
        ids = models.make_prompt(made, 4, 5000)
        assert (ids != made.config.image_token_id).all()

    def test_a_plain_caches_bytes_are_its_storages(self, text_model):
        out = text_model(**make_inputs("llama", (20,)), use_cache=True)
        assert measure.cache_nbytes(out.past_key_values) == 3 * 2 * 2 * 16 * 20 * 4

    def test_unknown_dtype(self):
        with pytest.raises(ValueError, match="int7"):
            models.make(models.SHAPES["llama-120m-random"].toy(), "cpu", "int7")


def test_the_json_holds_raw_times_and_summaries(model, tmp_path):
    found = bench(model, unwrapped=(), policies=("snapkv:window=8",), growth=("snapkv",)).run()
    verdict = presets.Check(text="t", limit=1, figure=lambda r: 2.0).judge(found)
    path = tmp_path / "deep" / "bench.json"
    report.save(path, [found], [{"text": verdict.text}])
    data = json.loads(path.read_text())["settings"][0]
    assert data["rows"][2]["summary"]["to_unwrapped"]["cache_bytes"] < 0.3
    assert data["rows"][2]["options"] == {"window": 8}
    assert data["rows"][2]["step_s"] == found.rows[2].step_s
    assert data["about"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("bound", "limit", "found", "outcome"),
    [
        ("at least", 2, (2.5, 2.1, 3), "pass"),
        ("at least", 2, (2.5, 1.9, 3), "cannot tell"),
        ("at least", 2, (1.5, 1.2, 1.9), "short"),
        ("at most", 2, (1.5, 1.2, 1.9), "pass"),
        ("at most", 2, (1.9, 1.5, 2.1), "cannot tell"),
        ("at most", 2, (2.5, 2.1, 3), "short"),
        ("within", 0.05, (1.01, 0.96, 1.04), "pass"),
        ("within", 0.05, (1.01, 0.94, 1.04), "cannot tell"),
        ("within", 0.05, (1.01, 0.96, 1.06), "cannot tell"),
        ("within", 0.05, (1.07, 1.06, 1.08), "short"),
        ("within", 0.05, (0.92, 0.90, 0.94), "short"),
        ("at least", 2, (9, None, None), "cannot tell"),
        ("within", 0.05, (1, None, None), "cannot tell"),
    ],
)
def test_checks_are_judged_by_intervals(bound, limit, found, outcome):
    figure = report.Estimate(*found, n=20)
    verdict = presets.Check(text="t", limit=limit, bound=bound, figure=lambda r: figure)
    judged = verdict.judge(result())
    assert judged.outcome == outcome
    assert str(judged).startswith(outcome)
    assert f"{bound} {limit}" in str(judged)


def test_what_is_counted_has_no_interval():
    def line(limit, figure, **more):
        check = presets.Check(text="t", limit=limit, figure=lambda r: figure, **more)
        return str(check.judge(result())).split()[0]

    assert line(2, 2.0) == "pass"
    assert line(2, 1.9) == "short"
    assert line(2, 1.9, bound="at most") == "pass"
    assert line(2, None) == "not"
    assert line(2, math.inf, bound="at most") == "short"


@pytest.mark.parametrize(
    ("vendor", "given", "found"),
    [
        ("AuthenticAMD", None, "AVX2"),
        ("AuthenticAMD", "AUTO", "AUTO"),
        ("GenuineIntel", None, None),
        (None, None, None),
    ],
)
def test_products_use_vectors_on_every_processor(monkeypatch, tmp_path, vendor, given, found):
    told = tmp_path / "cpuinfo"
    if vendor:
        told.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: Chip 9\n")
    monkeypatch.setattr(processor, "_CPUINFO", told)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv(processor.PATHS, given or "")
    if given is None:
        monkeypatch.delenv(processor.PATHS)
    processor.use_vectors()
    assert processor.os.environ.get(processor.PATHS) == found
    assert ("Chip 9 CPU" in processor.in_words()) == (vendor is not None)
    assert (f"MKL_CBWR={found}" in processor.in_words()) == (found is not None)


def run_command(capsys, *words):
    try:
        commands.main(["bench", *map(str, words)])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return printed.out, printed.err, code


@pytest.mark.slow
def test_the_ci_preset_end_to_end(capsys, tmp_path):
    path = tmp_path / "ci.json"
    words = ("--preset", "ci", "--toy", "--rounds", 1, "--out", path)
    out, _, code = run_command(capsys, *words)
    assert code == 0
    checks = presets.PRESETS["ci"][0].checks
    judged = [
        x for x in out.splitlines() if x.startswith(("pass ", "short ", "cannot tell ", "not "))
    ]
    assert len(judged) == 2 + len(checks) > 20
    assert all("no difference" in x for x in judged[:2])
    without = [x for x in judged if x.startswith("not measured")]
    assert len(without) == 3
    assert all("kvpress" in x for x in without)
    assert any(x.startswith("pass") and "snapkv: bytes a step" in x for x in judged)
    assert len(json.loads(path.read_text())["checks"]) == 2 + len(checks)


@pytest.mark.parametrize("name", ["prefixkv", "xkv", "squeeze"])
def test_presets_name_what_exists(name):
    for one in presets.PRESETS[name]:
        assert one.model in models.SHAPES
        labels = [r.label for r in rows.make_rows(one, kvpress=True)]
        assert len(labels) > 2
        measured = [row(x, "unwrapped", prefill_s=[1.0], step_s=[1.0]) for x in labels]
        for check in one.checks:
            assert check.judge(result(*measured)).figure.median == 1


@pytest.mark.slow
def test_the_batch_that_fits(capsys, tmp_path):
    words = ("--preset", "xkv", "--toy", "--rounds", 1, "--out", tmp_path / "x.json")
    out, err, code = run_command(capsys, *words)
    assert code == 0
    assert "batch 4" in out
    assert "pass " in out
    # What it does is said in a pipe too, a line each.
    said = err.splitlines()
    assert said[0] == "making llama-8b-random"
    assert "xkv: prefill 1, xkv 0.2" in said
    rows = 6 if is_flash_attn_2_available() else 5
    assert len(said) == len(set(said)) == 1 + rows + rows
    assert "\r" not in err


def tiny(tmp_path, *words):
    """A bench of the smallest kind."""
    shape = ("--model", "llama-120m-random", "--toy", "--prompt", 64, "--new", 3, "--batch", 1)
    rest = ("--rounds", 1, "--unwrapped", "", "--out", tmp_path / "x.json", "--device", "cpu")
    return (*shape, *rest, *words)


def test_nothing_measured_is_exit_code_1(capsys, tmp_path, monkeypatch):
    """The unwrapped model alone is not what was asked for."""
    real = runner.Bench._open

    def open_(self, row, *args, **how):
        if row.name == "snapkv":
            raise ValueError("no room")
        return real(self, row, *args, **how)

    monkeypatch.setattr(runner.Bench, "_open", open_)
    out, err, code = run_command(capsys, *tiny(tmp_path, "--policies", "snapkv,snapkv:window=4"))
    assert code == 1
    assert "unwrapped sdpa" in out
    assert err.splitlines()[-1] == "mmkv: nothing could be measured: snapkv 0.2: no room"
    assert run_command(capsys, *tiny(tmp_path, "--policies", "local,snapkv"))[2] == 0


def test_the_table_is_whole_at_80_columns(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run_command(capsys, *tiny(tmp_path, "--policies", "full"))[0]
    assert "…" not in out
    for text in ("prefill ms", "bound ms", "cache MB", "x tokens/s", "pays from"):
        assert sum(f" {text} " in line for line in out.splitlines() if "┃" in line) == 1, text
    table = [line for line in out.splitlines() if line.startswith(("┏", "│"))]
    assert max(map(cell_len, table)) <= 80
    assert not any("(" in line for line in table)  # two steps have no interval


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--policies", "snap"), "Did you mean 'snapkv'"),
        (("--budgets", "1.5"), "budget=1.5"),
        (("--preset", "gpu"), "expected ci, prefixkv"),
        (("--preset", "ci", "--prompt", "5"), "--prompt"),
        (("--preset", "prefixkv"), "is for a GPU"),
        (("--model", "huge-random"), "llama-120m-random"),
        (("--kvpress-python", "/no/such/python"), "/no/such/python"),
        (("--policies", ","), "--policies ',' names none"),
        (("--budgets", ""), "--budgets '' names none"),
        (("--out", f"{__file__}/x.json"), "is a file, not a folder"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, words, part):
    monkeypatch.setattr(runner, "Bench", lambda *_, **__: pytest.fail("measured"))
    out, err, code = run_command(capsys, "--device", "cpu", *words)
    assert (code, out) == (2, "")
    assert err.startswith("mmkv: error: ")
    assert err.count("\n") == 1
    assert part in err


class TestKvpress:
    def test_nearest_press(self):
        def press(policy, budget=0.2, **options):
            return rival.nearest_press(mmkv.get_policy(policy, **options), budget, 1000)

        snap = press("snapkv", window=16)
        assert snap["name"] == "SnapKVPress"
        assert snap["options"]["compression_ratio"] == pytest.approx(0.8)
        assert snap["options"]["window_size"] == 16
        assert press("snapkv", 100)["options"]["compression_ratio"] == pytest.approx(0.9)
        assert rival.press_label(press("adakv")) == "AdaKVPress(SnapKVPress)"
        assert press("adakv")["options"] == {"alpha_safeguard": 0.5}
        assert press("pyramidkv")["name"] == "PyramidKVPress"
        assert press("h2o")["eager"]
        assert press("streaming")["options"]["n_sink"] == 4
        assert press("full") is None
        assert press("xkv") is None

    @pytest.mark.slow
    def test_its_steps_alternate_with_ours(self, model, tmp_path, monkeypatch):
        """The real worker, with a stand-in for the library."""
        (tmp_path / "kvpress.py").write_text(
            textwrap.dedent("""
            from contextlib import contextmanager
            from dataclasses import dataclass

            @dataclass
            class SnapKVPress:
                compression_ratio: float
                window_size: int
                kernel_size: int

                @contextmanager
                def __call__(self, model):
                    print("libraries may print")
                    yield
            """)
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        worker = rival.Worker(sys.executable)
        try:
            shape = models.SHAPES["llama-120m-random"].toy()
            worker.load({"shape": vars(shape)}, "cpu", "float32", 1)
            assert worker.versions["torch"] == version("torch")
            found = bench(model, worker=worker, budgets=(0.2,), policies=("snapkv", "adakv")).run()
        finally:
            worker.close()
        measured = found.row("kvpress SnapKVPress 0.2")
        assert (len(measured.prefill_s), len(measured.step_s)) == (2, 3)
        assert "in a process of its own" in found.conditions
        # The stand-in evicts nothing.
        assert measured.cache_bytes == found.base.cache_bytes
        assert measured.peak_bytes > 0
        missing = next(r for r in found.rows if "AdaKV" in r.label)
        assert "AdaKVPress" in missing.note

    def stub(self, tmp_path, body):
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport sys, json\n{textwrap.dedent(body)}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return rival.Worker(path)

    def test_the_protocol(self, tmp_path):
        worker = self.stub(
            tmp_path,
            """
            for line in sys.stdin:
                asked = json.loads(line)
                if asked["do"] == "load":
                    answer = {"versions": {"kvpress": asked["dtype"]}}
                elif asked["do"] == "steps":
                    answer = {"seconds": 0.5 * asked["number"], "nbytes": asked["reply"]}
                elif asked["do"] == "close" or asked["batch"] > 9:
                    answer = {"error": "OutOfMemoryError: x", "memory": True}
                else:
                    answer = {"reply": 7, "start": {
                        "prefill_s": 2.0, "warm_s": 1.0, "prefill_cache_bytes": asked["batch"]}}
                print(json.dumps(answer), flush=True)
            """,
        )
        worker.load({"path": "p"}, "cpu", "float32", 1)
        assert worker.versions == {"kvpress": "float32"}
        reply = worker.open({"name": "A"}, 3, 100, 5)
        assert (reply.start.prefill_s, reply.start.peak_bytes, reply.nbytes) == (2, None, 3)
        assert (reply.steps(4), reply.nbytes) == (2, 7)
        reply.close()
        with pytest.raises(rival.WorkerError, match="OutOfMemory") as caught:
            worker.open({"name": "A"}, 10, 100, 5)
        assert caught.value.memory
        worker.close()

    def test_a_process_that_ends_says_why(self, tmp_path):
        worker = self.stub(tmp_path, "sys.exit('no torch here')")
        with pytest.raises(rival.WorkerError, match="no torch here"):
            worker.load({"path": "p"}, "cpu", "float32", 1)
        worker.close()
        worker.close()

    def test_a_process_that_talks_nonsense(self, tmp_path):
        worker = self.stub(tmp_path, "sys.stdin.readline(); print('hello', flush=True)")
        with pytest.raises(rival.WorkerError, match="hello"):
            worker.load({"path": "p"}, "cpu", "float32", 1)
        worker.close()
