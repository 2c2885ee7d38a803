"""The benchmark: its arithmetic, its order, what it counts, and the command, all on toy models."""

import json
import math
import stat
import sys
import textwrap
from contextlib import closing
from importlib.metadata import version
from statistics import median

import numpy as np
import pytest
import torch

import mmkv
from helpers.commands import complaint, run
from helpers.marks import cases
from helpers.memory import Outputs
from mmkv import calls
from mmkv.eval.speed import bench, kvpress_worker, models, plan
from mmkv.memory import Memory

TOY = ("llama", (64, 96, 3, 4, 4, 256, 8192))


@pytest.fixture(autouse=True)
def without_collections(monkeypatch):
    """A bench collects garbage before each prefill: much, in a process full of tests."""
    monkeypatch.setattr(bench.gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def model():
    return models.make(TOY, "cpu")


def toy_bench(model, worker=None, until=math.inf, **changes):
    base = {"prompt": 256, "new": 4, "batch": 2, "rounds": 2, "policies": ("snapkv",)}
    return bench.Bench(bench.Setting("toy", **(base | changes)), model, worker, until)


def row(label="a", policy="p", **values):
    return bench.Row(label, policy, 0.2, **values)


def result(*found, batch=2):
    return bench.Result(bench.Setting("m", 100, 11, batch, ()), list(found), {}, [])


class TestNumbers:
    @pytest.mark.parametrize("n", [6, 7, 20, 101])
    def test_intervals_cover_median_as_often_as_stated(self, n):
        draw = np.random.default_rng(5)
        inside = 0
        for _ in range(400):
            found = bench.Ratio.of(1.1 * np.exp(draw.normal(0, 0.1, n)), [1.0] * n)
            inside += found.low <= 1.1 <= found.high
            assert found.low <= found.median <= found.high
        assert 0.93 < inside / 400 < 0.995

    def test_ratios_are_taken_pair_by_pair(self):
        # The machine slowed down by ten in one pair, and one pair is wild.
        found = bench.Ratio.of(
            [2.0, 4.0, 60.0, 900.0, 2.0, 2.0, 2.0, 2.0, 2.0], [1, 2, 30, *[1] * 6]
        )
        assert found == (2, 2, 2)
        assert str(found) == "2 (2-2)"
        with pytest.raises(ValueError, match="zip"):
            bench.Ratio.of([2, 4], [1, 2, 3])
        found = bench.Ratio.of([1, 2, 3, 4, 5], [1] * 5)
        assert found == (3, None, None)
        assert str(found) == "3"

    def test_a_row_compares_with_the_unwrapped_one(self):
        times = {"prefill_s": [10.0, 10.0], "step_s": [0.5, 0.5]}
        base = row(bench.UNWRAPPED, "", cache_bytes=1000, **times)
        mine = row(prefill_s=[11.0, 12.0], step_s=[0.1, 0.1], cache_bytes=250)
        found = result(base, mine).cells(mine)
        assert (found["prefill ms"], found["tokens/s"]) == ("11,500", "20.0")
        assert (found["x prefill"], found["x tokens/s"]) == ("1.15", "5")
        assert found["x cache"] == "0.25"
        assert "x cache" not in result(base, mine).cells(base)


def fake_reply(log, label, now):
    """A reply on a clock of its own."""

    def spend(what, times=1):
        log.append((what, label))
        now[0] += 0.025 * times
        return 0.025 * times, 10

    try:
        yield spend("prefill", 50)
        while True:
            yield spend("step")
    finally:
        log.append(("close", label))


@pytest.fixture
def clocked(model, monkeypatch):
    """A bench on a clock that only its rows move, and what they did."""
    log, now = [], [0.0]

    def make(self, row):
        return fake_reply(log, row.label, now)

    monkeypatch.setattr(bench.Bench, "_make", make)
    monkeypatch.setattr(bench, "_WARM_CPU", 0)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    return lambda **changes: (toy_bench(model, **changes), log)


class TestPairs:
    def test_every_row_takes_every_step_in_random_order(self, clocked):
        made, log = clocked(new=33, rounds=3, budgets=(0.2, 0.5))
        found = made.run()
        labels = sorted(r.label for r in made.rows)
        own = ["full", bench.BOUND, "snapkv 0.2", "snapkv 0.5", bench.UNWRAPPED, bench.AGAIN]
        assert labels == sorted(own)
        steps = [x for what, x in log if what == "step"]
        turns = [steps[i : i + 6] for i in range(0, len(steps), 6)]
        assert len(turns) == 3 * 32
        assert all(sorted(x) == labels for x in turns)
        assert len({tuple(x) for x in turns}) > 30
        assert all(len(r.step_s) == 96 and len(r.prefill_s) == 3 for r in found.rows)
        # The first prefills warm up; in a round all are read before any step.
        assert [what for what, _ in log[:18]] == ["prefill", "close"] * 6 + ["prefill"] * 6

    def test_failed_row_leaves_others_paired(self, clocked, monkeypatch):
        made, log = clocked(new=17, rounds=2)
        real = bench.Bench._make

        def make(self, row):
            for step in real(self, row):
                if log.count(("step", "full")) > 20 and row.label == "full":
                    raise ValueError("no room")
                yield step

        monkeypatch.setattr(bench.Bench, "_make", make)
        found = made.run()
        assert [(r.note, len(r.step_s), len(r.prefill_s)) for r in found.rows] == [
            ("no room", 0, 0) if r.label == "full" else ("", 32, 2) for r in found.rows
        ]
        assert [bool(found.cells(r)) for r in found.rows] == [not r.note for r in found.rows]

    @pytest.mark.parametrize(
        ("until", "rounds", "steps"), [(60.0, range(2, 40), None), (0, [1], 1)]
    )
    def test_no_time_left_runs_one_round(self, clocked, until, rounds, steps):
        found = clocked(new=21, rounds=50, until=until)[0].run()
        assert {len(r.prefill_s) for r in found.rows} <= set(rounds)
        assert len({len(r.step_s) for r in found.rows}) == 1
        assert steps in (None, len(found.rows[0].step_s))
        assert "no time" in found.notes[-1]
        assert bench.time.monotonic() < until + 18

    def test_an_interrupted_round_is_left_out(self, model, monkeypatch):
        started = toy_bench(model, rounds=3)
        turns, take = list[int](), started._take_turns

        def interrupted(rows, steps):
            take(rows, steps)
            turns.append(steps)
            if turns.count(3) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(started, "_take_turns", interrupted)
        found = started.run()
        assert (found.notes[-1], started.stopped) == ("1 rounds instead of 3: stopped", True)
        assert {(len(x.prefill_s), len(x.step_s)) for x in found.rows} == {(1, 3)}

    @pytest.mark.parametrize(("until", "steps"), [(math.inf, 16), (9.0, 4)])
    def test_caches_too_large_together_are_made_one_by_one(
        self, clocked, monkeypatch, until, steps
    ):
        """The time ends between rounds."""
        monkeypatch.setattr(bench.Bench, "_free", lambda self: 40)
        made, log = clocked(new=5, rounds=4, until=until)
        found = made.run()
        assert "side by side" in found.notes[0]
        assert [len(r.step_s) for r in found.rows] == [steps] * 5
        assert all(found.cells(r) for r in found.rows)
        turns = [what for what, _ in log if what != "close"][-25:]
        assert turns == ["prefill", *["step"] * 4] * 5


class TestRows:
    def test_cache_bytes_are_the_caches_own(self, model):
        found = {r.label: r for r in toy_bench(model, rounds=1).run().rows}
        ids = models.make_prompt(model, 2, 256)
        with mmkv.wrapped(model, "snapkv", 0.2):
            # The prompt's token, three to warm up and three that are timed.
            out = model.generate(
                ids, max_new_tokens=7, do_sample=False, return_dict_in_generate=True
            )
        assert found["snapkv 0.2"].cache_bytes == out.past_key_values.nbytes
        head = 2 * 2 * 64 * 4  # keys and values, of two rows, float32
        assert found[bench.UNWRAPPED].cache_bytes == 3 * head * (256 + 6)
        assert found["full"].cache_bytes >= 3 * head * (256 + 6)
        assert not mmkv.is_wrapped(model)

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("x" * 99),
            pytest.param(RuntimeError("not enough memory: 9 bytes"), marks=pytest.mark.slow),
        ],
    )
    def test_a_row_without_memory_leaves_the_others(self, model, monkeypatch, error):
        real = bench.Bench._make

        def make(self, row):
            if row.policy == "full":
                raise error
            return real(self, row)

        monkeypatch.setattr(bench.Bench, "_make", make)
        rows = {r.label: r for r in toy_bench(model, rounds=1).run().rows}
        assert (rows["full"].note, rows["full"].step_s) == ("out of memory", [])
        assert len(rows["snapkv 0.2"].step_s) == 3
        error.args = ("another failure",)
        if type(error) is RuntimeError:
            with pytest.raises(RuntimeError, match="another failure"):
                toy_bench(model, rounds=1).run()

    @pytest.mark.slow
    def test_shares_of_bytes_in_place_of_budgets(self, model):
        rows = {x.label: x for x in toy_bench(model, budgets=(Memory(0.25),), rounds=1).run().rows}
        held, full = (rows[x].cache_bytes for x in ("snapkv 25% of bytes", "full"))
        assert 0 < held < 0.5 * full

    @pytest.mark.parametrize(
        ("texts", "why"),
        [
            (("nope",), "unknown policy 'nope'"),
            (("snapkv:graph",), "name=value"),
            (("snapkv:kv_dtype=int7",), "int7"),
            (("snapkv", "snapkv"), "twice"),
            (("snapkv:evict_chunks=64",), "chunks"),
        ],
    )
    def test_invalid_policies_raise(self, model, texts, why):
        with pytest.raises(ValueError, match=why):
            toy_bench(model, policies=texts)


@cases("policy", ["none", "full", "snapkv", "prefixkv", "h2o", "adakv", "streaming"], "h2o", "none")
def test_step_allocates_and_copies_constant_memory(model, policy):
    """While a plain cache copies itself."""
    taken, held = [], []
    for prompt in (96, 192):
        one = calls.twin(model)
        if policy != "none":
            mmkv.wrap(one, policy, 0.6)
        reply = models.reply(one, models.make_prompt(one, 1, prompt))
        for _ in range(3):
            next(reply)
        with Outputs() as counter:
            _, nbytes = next(reply)
        taken.append(counter.nbytes)
        held.append(nbytes)
    slots = (held[1] - held[0]) / (3 * 2 * 16 * 4)  # of each of three layers
    grown = (taken[1] - taken[0]) / slots
    # The model's own mask may have a byte a token; a layer's has one for each of its slots.
    assert (grown >= 3 * 2 * 16 * 4) if policy == "none" else grown < 0.5


class TestModels:
    @cases(
        "name",
        ["llama-8b-random", "llava-1.5-7b-random"],
        "llava-1.5-7b-random",
    )
    def test_shapes_keep_their_kind(self, name):
        made, (kind, sizes) = models.make(models.SHAPES[name], "meta"), models.SHAPES[name]
        config = made.get_decoder().config
        assert kind in type(made).__name__.lower()
        assert [getattr(config, x) for x in models._SIZES] == list(sizes)
        assert made.dtype is torch.bfloat16
        assert plan.Sizes.of(made).read(1) < made.get_memory_footprint()

    def test_prompts_hold_no_pictures(self, models):
        from mmkv.eval.speed.models import make_prompt

        seeing = models("llava-llama")
        assert (make_prompt(seeing, 4, 5000) != seeing.config.image_token_id).all()


def test_the_files_hold_raw_times_and_summaries(model, tmp_path):
    found = toy_bench(model, policies=("snapkv:window=8",), rounds=1).run()
    path = tmp_path / "deep" / "bench.json"
    found.save(path)
    data = json.loads(path.read_text())
    row = {row["label"]: row for row in data["rows"]}
    mine, base = row["snapkv:window=8 0.2"], row[bench.UNWRAPPED]
    assert float(mine["cells"]["x cache"]) < 0.3
    pairs = zip(base["step_s"], mine["step_s"], strict=True)
    assert mine["cells"]["x tokens/s"] == f"{median(a / b for a, b in pairs):.3g}"
    assert mine["options"]["window"] == 8
    timed = {x.label: x for x in found.rows}[mine["label"]]
    assert mine["step_s"] == timed.step_s
    assert data["about"]["torch"] == torch.__version__
    lines = path.with_suffix(".md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| snapkv")]
    assert [x[0] for x in cells] == ["snapkv:window=8 0.2"]
    assert cells[0][4] == f"{timed.cache_bytes / 1e6:,.1f}"


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Words of a bench of the smallest kind."""
    monkeypatch.setitem(models.SHAPES, "llama-120m-random", TOY)
    shape = ("--model", "llama-120m-random", "--prompt", 64, "--new", 3, "--batch", 1)
    return (*shape, "--rounds", 1, "--out", tmp_path / "x.json", "--device", "cpu")


@pytest.mark.slow
def test_nothing_measured_is_exit_code_1(capsys, tiny, monkeypatch):
    """The unwrapped model and the full cache alone are not what was asked for."""
    real = bench.Bench._make

    def make(self, row):
        if row.policy == "snapkv":
            raise ValueError("no room")
        return real(self, row)

    monkeypatch.setattr(bench.Bench, "_make", make)
    out, err, code = run(capsys, "bench", *tiny, "--policies", "snapkv,snapkv:window=4")
    assert code == 1
    assert bench.UNWRAPPED in out
    assert err.splitlines()[-1] == "mmkv: nothing could be measured: snapkv 0.2: no room"
    assert run(capsys, "bench", *tiny, "--policies", "local,snapkv")[2] == 0


def test_the_table_has_these_columns(capsys, tiny, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out, err, _ = run(capsys, "bench", *tiny, "--policies", "full")
    for text in ("prefill ms", "cache MB", "x tokens/s", "x cache"):
        assert sum(f" {text} " in line for line in out.splitlines() if "┃" in line) == 1, text
    # Two steps have no interval.
    assert not any("(" in line for line in out.splitlines() if line.startswith("│"))
    # What it does is said in a pipe too, a line each.
    assert err.splitlines()[0] == "making llama-120m-random"
    assert "round 1" in err.splitlines()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--policies", "snap"), "Did you mean 'snapkv'"),
        (("--budgets", "1.5"), "budget=1.5"),
        (("--model", "huge-random"), "llama-120m-random"),
        (("--policies", ","), "--policies ',' names none"),
        (("--budgets", ""), "--budgets '' names none"),
        (("--kvpress-python", "/no/such/python"), "/no/such/python"),
        (("--out", f"{__file__}/x.json"), "is a file, not a folder"),
        (("--out", "x.md"), "name the JSON file, x.json"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, words, part):
    monkeypatch.setattr(bench, "Bench", lambda *_, **__: pytest.fail("measured"))
    assert part in complaint(capsys, "bench", "--device", "cpu", *words)


class TestKvpress:
    def test_nearest_press(self):
        def press(policy, budget=0.2, **options):
            return kvpress_worker.nearest_press(mmkv.get_policy(policy, **options), budget, 1000)

        assert press("snapkv", window=16, kernel_size=3) == {
            "name": "SnapKVPress",
            "options": {"compression_ratio": 0.8, "window_size": 16, "kernel_size": 3},
        }
        assert press("snapkv", 100)["options"]["compression_ratio"] == pytest.approx(0.9)
        assert kvpress_worker.press_label(press("adakv")) == "AdaKVPress(SnapKVPress)"
        assert press("adakv")["options"] == {"alpha_safeguard": 0.5}
        assert press("pyramidkv")["name"] == "PyramidKVPress"
        assert press("h2o")["eager"]
        assert press("streaming")["options"]["n_sink"] == 4
        assert press("expected", skip=2)["options"] == {
            "compression_ratio": 0.8,
            "n_future_positions": 512,
            "n_sink": 2,
            "epsilon": 0.02,
        }
        assert press("kvzip")["name"] == "KVzipPress"
        assert press("full") is press("xkv") is press("condense") is None

    @pytest.mark.slow
    def test_its_steps_alternate_with_ours(self, model, tmp_path, monkeypatch):
        """The real worker, with a stand-in for the library, which keeps 64 tokens of each head."""
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
                    caches = []
                    see = lambda module, args, out: caches.append(out.past_key_values)
                    with model.register_forward_hook(see):
                        yield
                    for layer in caches[0].layers:  # KVzip compresses after the prompt too
                        layer.keys = layer.keys[:, :, :64].clone()
                        layer.values = layer.values[:, :, :64].clone()
            """)
        )
        # mmkv is not installed where kvpress is.
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\nsys.modules['mmkv'] = None\n"
            "sys.meta_path[:] = [x for x in sys.meta_path if 'editable' not in str(x)]\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setitem(models.SHAPES, "toy", TOY)
        with closing(kvpress_worker.Worker(sys.executable)) as worker:
            worker.load("toy", model)
            assert worker.versions["torch"] == version("torch")
            found = toy_bench(model, worker, policies=("snapkv", "adakv")).run()
        by_label = {r.label: r for r in found.rows}
        measured = by_label["kvpress SnapKVPress 0.2"]
        assert (len(measured.prefill_s), len(measured.step_s)) == (2, 6)
        head = 2 * 2 * 64 * 4  # keys and values, of two rows, float32
        assert measured.cache_bytes == 3 * head * (64 + 6)
        assert "AdaKVPress" in by_label["kvpress AdaKVPress(SnapKVPress) 0.2"].note

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            ("sys.exit('no torch here')", "no torch here"),
            ("sys.stdin.readline(); print('hello', flush=True)", "hello"),
            ("""sys.stdin.readline(); print('{"error": "no such model"}')""", "no such model"),
        ],
    )
    def test_failures_of_kvpress_are_noted(self, model, tmp_path, body, why):
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport sys\n{body}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        with (
            closing(kvpress_worker.Worker(path)) as worker,
            pytest.raises(ValueError, match=f"--kvpress-python: .*{why}"),
        ):
            worker.load("tiny", model)
