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

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import mmkv
from helpers.models import make_inputs
from mmkv.cli import commands
from mmkv.eval.speed import measure, models, presets, processor, report, rival, rows, runner

LABELS = ("unwrapped sdpa", "unwrapped eager", "full", "snapkv 0.2", "snapkv 0.5", "adakv 0.2")


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
    return report.RowResult(label, kind, "p", 0.2, {}, values.pop("batch", 2), 11, **values)


def result(*rows, **values):
    known = {"rounds": 2, "device": "cpu", "about": {}, "weight_bytes": 1, "step_weight_bytes": 1}
    return report.Result("x", "m", 100, 11, layers=4, rows=list(rows), **(known | values))


class TestNumbers:
    def test_quartiles(self):
        assert report.Spread.of([4, 1, 3, 2, 5]) == report.Spread(3, 2, 4, 5)
        assert report.Spread.of([1, 2]) == report.Spread(1.5, 1.25, 1.75, 2)
        assert report.Spread.of([7]) == report.Spread(7, 7, 7, 1)

    def test_ratios_are_taken_round_by_round(self):
        # The machine slowed down by ten in the last round: the ratio does not see it.
        assert report.ratio([2, 4, 60], [1, 2, 30]) == 2
        assert report.ratio([2, 4], [1, 2, 3]) == 1.5

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
        assert found["prefill_ms"] == {"median": 11500, "low": 11250, "high": 11750, "n": 2}
        assert found["tokens_per_s"]["median"] == 20
        assert found["run_tokens_per_s"]["median"] == pytest.approx((22 / 12 + 22 / 13) / 2)
        ratios = found["to_unwrapped"]
        assert ratios["prefill"] == pytest.approx(1.15)
        assert ratios["tokens_per_s"] == pytest.approx(5)
        assert (ratios["cache_bytes"], ratios["peak_bytes"]) == (0.25, 0.5)
        assert found["pays_from_steps"] == 4
        assert "to_unwrapped" not in result(base, mine).summary(base)

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
        real = runner.Bench._once

        def once(self, row, batch, new, *, trace=False):
            if batch > 12:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(self, row, batch, new, trace=trace)

        monkeypatch.setattr(runner.Bench, "_once", once)
        monkeypatch.setattr(runner, "largest_batch", lambda *args: 14)
        found = bench(model, batch=0, prompt=80, policies=("full",), eager=False, rounds=1).run()
        assert [(r.batch, r.note, len(r.step_s)) for r in found.rows] == [(12, "", 1)] * 2
        found = bench(model, batch=14, prompt=80, policies=("full",), eager=False, rounds=1).run()
        assert [r.note for r in found.rows] == ["out of memory"] * 2
        assert found.base is None
        assert "out of memory" in presets.lines_below(found)[0]

    def test_the_made_up_profile_spends_its_budget(self):
        for budget, layers in itertools.product((0.2, 0.8, 1.0), (2, 3, 12)):
            profile = rows.falling_profile(layers, budget)
            assert sum(profile.fractions) / layers == pytest.approx(budget)
            assert max(profile.fractions) <= 1


class TestRows:
    def test_turns_are_interleaved(self):
        assert "".join(f"{r}{x}" for r, x in rows.interleave("AB", 3)) == "0A0B1A1B2A2B"

    @pytest.mark.slow
    def test_rows_take_turns(self, model, monkeypatch):
        turns, real = [], runner.Bench._once

        def once(self, row, batch, new, *, trace=False):
            turns.append(("warm " if trace else "") + row.label)
            return real(self, row, batch, new, trace=trace)

        monkeypatch.setattr(runner.Bench, "_once", once)
        bench(model, eager=False, budgets=(0.2,)).run()
        rows = ["unwrapped sdpa", "full", "snapkv 0.2"]
        assert turns == [*(f"warm {x}" for x in rows), *rows, *rows]

    @pytest.mark.slow
    def test_rows_and_columns(self, model):
        found = bench(model, policies=("full", "snapkv", "adakv"), roofline=True).run()
        assert [r.label for r in found.rows] == [*LABELS, "adakv 0.5"]
        for one in found.rows:
            assert len(one.prefill_s) == len(one.step_s) == 2
            sizes = (one.cache_bytes, one.peak_bytes, one.prefill_peak_bytes, one.ideal_step_s)
            assert all(x > 0 for x in sizes)
            assert one.peak_bytes > one.cache_bytes
        out = io.StringIO()
        Console(file=out, width=250).print(found.table())
        for text in (*LABELS, "prefill ms", "ms/token", "tokens/s", "cache MB", "peak MB"):
            assert text in out.getvalue()
        assert "ideal ms" in out.getvalue()
        lines = presets.lines_below(found)
        assert len(lines) == 5
        assert all("pay" in x for x in lines)
        assert not mmkv.wrapping.is_wrapped(model)
        assert model.config._attn_implementation == "sdpa"

    def test_cache_bytes_fall_with_the_budget_and_are_the_caches_own(self, model):
        rows = {r.label: r for r in bench(model).run().rows}
        sizes = [rows[x].cache_bytes for x in ("snapkv 0.2", "snapkv 0.5", "full")]
        assert sizes == sorted(sizes)
        assert sizes[0] < 0.3 * sizes[2]
        ids = models.make_prompt(model, 2, 256)
        with mmkv.wrapped(model, "snapkv", 0.5):
            out = model.generate(
                ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
            )
        assert out.past_key_values.nbytes == sizes[1]
        head = 2 * 2 * 64 * 4  # keys and values, of two rows, float32
        assert rows["unwrapped sdpa"].cache_bytes == 3 * head * (256 + 3)
        assert rows["unwrapped sdpa"].prefill_cache_bytes == 3 * head * 256

    def test_what_cannot_be_done_is_a_note(self, model):
        found = bench(model, policies=("snapkv:window=200",), budgets=(100,)).run()
        assert "200 tokens" in found.rows[-1].note
        assert found.row("snapkv:window=200 100") is None
        assert found.row("unwrapped sdpa") is not None

    @pytest.mark.slow
    def test_no_time_means_fewer_rounds_and_tokens(self, model):
        found = bench(model, new=40, rounds=3, eager=False, until=0.0).run()
        assert found.rounds == 1
        assert found.new == 32
        assert sum("instead of" in note for note in found.notes) == 2

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

    @pytest.mark.parametrize("policy", ["snapkv", "adakv", "prefixkv", "h2o"])
    def test_counts(self, model, policy):
        found = self.growth(model, policy)
        # Heads of a longer prompt may fall into another number of blocks.
        assert found["ops"] == 0 or policy == "adakv"
        # The model's own mask may have a byte a token; a layer's has one for each of its slots.
        assert found["nbytes"] < 0.5 * found["slots"]
        assert found["slots"] == pytest.approx(4 * 0.6 * 96, rel=0.05)  # of four heads

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
        run = measure.run_once(made, models.make_prompt(made, 1, 40), 3)
        assert run.steps == 2
        assert run.decode_s > 0
        assert models.step_bytes(made) < models.weight_bytes(made)

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


def test_json_round_trip(model, tmp_path):
    found = bench(model, eager=False, policies=("snapkv:window=8",), growth=("snapkv",)).run()
    verdict = presets.Check(text="t", limit=1, figure=lambda r: 2.0).judge(found)
    path = tmp_path / "deep" / "bench.json"
    report.save(path, [found], [{"text": verdict.text}])
    assert report.load(path) == [found]
    data = json.loads(path.read_text())["settings"][0]
    assert data["rows"][1]["summary"]["to_unwrapped"]["cache_bytes"] < 0.3
    assert data["rows"][1]["options"] == {"window": 8}
    assert data["about"]["versions"]["torch"] == torch.__version__
    path.write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="mmkv-bench"):
        report.load(path)


def test_checks_say_pass_short_or_not_measured():
    def line(limit, figure, **more):
        check = presets.Check(text="t", limit=limit, figure=lambda r: figure, **more)
        return str(check.judge(result())).split()[0]

    assert line(2, 2.0) == "pass"
    assert line(2, 1.9) == "short"
    assert line(2, 1.9, at_least=False) == "pass"
    assert line(2, None) == "not"
    assert line(2, math.inf, at_least=False) == "short"


def test_a_target_out_of_reach_says_so():
    rows = (row("a", step_s=[0.05, 0.05]), row("b", step_s=[0.4, 0.2]))

    def said(bare, limit):
        figure, reach = presets.tokens_over("a", "b"), presets.reach_over("b")
        check = presets.Check(text="t", limit=limit, figure=figure, reach=reach)
        return str(check.judge(result(*rows, bare_step_s=bare)))

    assert "at most 7.5 can be reached" in said(0.04, 15)
    assert "reached" not in said(0.01, 15)
    assert "reached" not in said(None, 15)
    assert said(0.04, 6).startswith("pass")


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
    judged = [x for x in out.splitlines() if x.startswith(("pass ", "short ", "not measured"))]
    assert len(judged) == len(checks) > 20
    without = [x for x in judged if x.startswith("not measured")]
    assert len(without) == 3
    assert all("kvpress" in x for x in without)
    assert any(x.startswith("pass") and "snapkv: bytes a step" in x for x in judged)
    assert len(json.loads(path.read_text())["checks"]) == len(checks)


@pytest.mark.parametrize("name", ["prefixkv", "xkv", "squeeze"])
def test_presets_name_what_exists(name):
    for one in presets.PRESETS[name]:
        assert one.model in models.SHAPES
        labels = [r.label for r in rows.make_rows(one, kvpress=True)]
        assert len(labels) > 2
        measured = [row(x, "unwrapped", prefill_s=[1.0], step_s=[1.0]) for x in labels]
        for check in one.checks:
            assert check.judge(result(*measured)).figure == 1


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
    assert "xkv: round 1, xkv 0.2" in said
    assert len(said) == len(set(said)) == 1 + 3 + 3
    assert "\r" not in err


def tiny(tmp_path, *words):
    """A bench of the smallest kind."""
    shape = ("--model", "llama-120m-random", "--toy", "--prompt", 64, "--new", 3, "--batch", 1)
    rest = ("--rounds", 1, "--no-eager", "--out", tmp_path / "x.json", "--device", "cpu")
    return (*shape, *rest, *words)


def test_nothing_measured_is_exit_code_1(capsys, tmp_path, monkeypatch):
    """The unwrapped model alone is not what was asked for."""
    real = runner.Bench._once

    def once(self, row, *args, **how):
        if row.name == "snapkv":
            raise ValueError("no room")
        return real(self, row, *args, **how)

    monkeypatch.setattr(runner.Bench, "_once", once)
    out, err, code = run_command(capsys, *tiny(tmp_path, "--policies", "snapkv,snapkv:window=4"))
    assert code == 1
    assert "unwrapped sdpa" in out
    assert err.splitlines()[-1] == "mmkv: nothing could be measured: snapkv 0.2: no room"
    assert run_command(capsys, *tiny(tmp_path, "--policies", "local,snapkv"))[2] == 0


def test_the_table_is_whole_at_80_columns(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = run_command(capsys, *tiny(tmp_path, "--policies", "full"))[0]
    assert "…" not in out
    for text in ("prefill ms", "run tokens/s", "cache MB", "x tokens/s", "pays from"):
        assert sum(f" {text} " in line for line in out.splitlines() if "┃" in line) == 1, text
    table = [line for line in out.splitlines() if line.startswith(("┏", "│"))]
    assert max(map(cell_len, table)) <= 80
    assert not any("(" in line for line in table)  # one round has no quartiles


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
    def test_its_turns_alternate_with_ours(self, model, tmp_path, monkeypatch):
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
        assert len(measured.step_s) == 2
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
                elif asked["new"] > 9:
                    answer = {"error": "OutOfMemoryError: x", "memory": True}
                else:
                    answer = {"prefill_s": 2.0, "decode_s": 1.0, "steps": asked["new"] - 1,
                              "prefill_cache_bytes": 1, "cache_bytes": asked["batch"],
                              "prefill_peak_bytes": None, "peak_bytes": None}
                print(json.dumps(answer), flush=True)
            """,
        )
        worker.load({"path": "p"}, "cpu", "float32", 1)
        assert worker.versions == {"kvpress": "float32"}
        run = worker.run({"name": "A"}, 3, 100, 5)
        assert (run.steps, run.cache_bytes, run.peak_bytes) == (4, 3, None)
        with pytest.raises(rival.WorkerError, match="OutOfMemory") as caught:
            worker.run({"name": "A"}, 3, 100, 10)
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
