"""Runs: rows, resuming, refusing, several processes."""

import copy
import json
import os
import runpy
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from helpers.evaluation import make_samples, save_model
from helpers.marks import cases
from helpers.models import make_model
from helpers.processes import exit_code
from mmkv.cache.compressed import CompressedCache
from mmkv.eval import measure, runner
from mmkv.eval.harness.arguments import harness_arguments
from mmkv.eval.measure import perplexity
from mmkv.eval.prompts import Encoder
from mmkv.eval.store import RunError, digest, key_of, read_rows, read_settings
from mmkv.eval.tabulate import Report
from mmkv.eval.variants import parse_variants
from mmkv.memory import Memory
from mmkv.policy_options import option_texts
from mmkv.registry import load_plugin

ASKED = {"policies": ["full", "snapkv", "prefixkv", "h2o"], "budgets": [0.5, 1.0], "batch_size": 2}


def run(model, tokenizer, out, samples=None, **asked):
    samples = make_samples() if samples is None else samples
    return runner.run(model, tokenizer, samples, out=out, **{**ASKED, **asked})


def without_times(rows):
    """What two runs of the same thing agree on: neither times, nor storage shared by a batch."""
    others = ("seconds", "first_token_s", "tokens_per_s", "held_bytes")
    return [{k: v for k, v in row.items() if k not in others} for row in rows]


def test_rows_have_figures_and_origin(model, tokenizer, tmp_path):
    rows = run(model, tokenizer, tmp_path, options={"window": 8})
    assert rows == read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 5 * (1 + 3 * 2)
    assert [r["index"] for r in rows[:5]] == [0, 1, 2, 3, 4]
    assert list(dict.fromkeys(r["policy"] for r in rows)) == ASKED["policies"]
    settings, made_by = (read_settings(tmp_path)[k] for k in ("settings", "made_by"))
    assert settings["n"] == 5
    assert made_by[0]["transformers"]
    for row in rows:
        assert row["run"] == made_by[0]["id"]
        assert row["n"] == 5
        assert row["model"] == settings["model"]
        assert row["options"] == ({"window": 8} if row["policy"] == "snapkv" else {})
        assert row["ppl"] == pytest.approx(perplexity(row["nll"], row["answer_tokens"]))
        assert row["tokens_per_s"] > 0
        assert row["new_tokens"] == 6
        # 2 layers, 2 key-value heads of width 16, keys and values in float32.
        assert row["full_bytes"] == row["prompt_tokens"] * 2 * 2 * 2 * 16 * 4
        assert row["cache_bytes"] == pytest.approx(row["kept_fraction"] * row["full_bytes"])
        if row["policy"] == "full" or row["budget"] == 1.0:
            assert row["kept_fraction"] == row["rouge"] == row["retained"] == 1.0
        else:
            # Rounded to whole tokens per layer.
            assert row["kept_fraction"] == pytest.approx(0.5, abs=0.02)
            assert 0.3 < row["retained"] < 1


def test_kept_pairs_in_few_bits(model, tokenizer, tmp_path):
    """The full cache in 8 bits runs once; a pair of 32 numbers is 32 bytes and two steps."""
    policies = ["full:kv_dtype=int8", "snapkv:kv_dtype=int4"]
    rows = run(model, tokenizer, tmp_path, policies=policies, budgets=[0.5, 0.7], metrics=["ppl"])
    assert len(rows) == 5 * (1 + 2)
    for row in rows:
        share = (32 + 4) / (32 * 4) if "int8" in row["policy"] else (16 + 4) / (32 * 4)
        kept = row["kept_fraction"] * row["full_bytes"]
        assert row["cache_bytes"] == pytest.approx(share * kept)
    report = Report(tmp_path)
    found = [report.figures(policies[0], budget) for budget in (0.5, 0.7)]
    assert found[0].equals(found[1])
    assert not any("Not finished" in note for note in report.notes())


def test_shares_of_bytes_in_place_of_budgets(model, tokenizer, tmp_path):
    """They set the type too; a run of them is told from one of tokens."""
    asked = {"policies": ["full", "snapkv:window=2"], "metrics": ["ppl"]}
    rows = run(model, tokenizer, tmp_path, budgets=[Memory(0.5), Memory(0.25)], **asked)
    kept = {row["budget"]: row for row in rows if row["policy"] != "full"}
    assert {*kept} == {0.5, 0.25}
    # In float32 a pair of 32 numbers has 128 bytes; in 8 bits 44, so that all fit into half of it.
    assert kept[0.5]["kept_fraction"] == 1
    assert 0.6 < kept[0.25]["kept_fraction"] < 0.95
    report = Report(tmp_path)
    assert [*report.main_table().columns] == ["50% of bytes", "25% of bytes"]
    assert report.figures("snapkv:window=2", report.budgets[1]).n == 5
    with pytest.raises(RunError, match="memory=True, this one has memory=None"):
        run(model, tokenizer, tmp_path, budgets=[0.5, 0.25], **asked)


@pytest.mark.slow
def test_prompts_evicted_chunk_by_chunk(model, tokenizer, tmp_path, monkeypatch):
    """Whole prompts of more than a chunk lose tokens before their end is read."""
    seen = []
    begin = CompressedCache.begin

    def recorded(cache, *args, **kwargs):
        begin(cache, *args, **kwargs)
        seen.append((cache.phase.until is None, cache.phase.evicts))

    monkeypatch.setattr(CompressedCache, "begin", recorded)
    policies = ["snapkv", "snapkv:evict_chunks=9"]
    rows = run(model, tokenizer, tmp_path, policies=policies, budgets=[0.5], metrics=["rouge"])
    assert (False, True) in seen
    assert {r["options"].get("evict_chunks") for r in rows} == {None, 9}
    for row in rows:
        assert row["same"] == float(row["rouge"] == 1.0)
    reached = Report(tmp_path).figures(policies[1], 0.5)
    mine = [r["same"] for r in rows if r["policy"] == policies[1]]
    assert reached.same == pytest.approx(sum(mine) / len(mine))
    for what in ("ppl", "divergence"):
        found = run(model, tokenizer, tmp_path / what, policies=policies[1:], metrics=[what])
        errors = [r["error"] for r in found if r["policy"] == policies[1]]
        assert errors
        assert all("reads prompts at once" in error for error in errors)


@pytest.mark.slow
def test_the_full_cache_is_added_for_rouge_only(model, tokenizer, tmp_path):
    asked = {"policies": ["snapkv"], "budgets": [0.5]}
    rows = run(model, tokenizer, tmp_path / "a", **asked)
    assert {r["policy"] for r in rows} == {"full", "snapkv"}
    rows = run(model, tokenizer, tmp_path / "b", **asked, metrics=["ppl"])
    assert {r["policy"] for r in rows} == {"snapkv"}
    assert "text" not in rows[0]


def test_replies_are_scored_as_the_sample_asks(model, tokenizer, tmp_path):
    rows = run(model, tokenizer, tmp_path / "a", policies=["full"], metrics=["score"])
    samples = [
        replace(s, answers=(row["text"],), max_new_tokens=3 if i == 0 else 6)
        for i, (s, row) in enumerate(zip(make_samples(), rows, strict=True))
    ]
    rows = run(model, tokenizer, tmp_path / "b", samples, policies=["full"], metrics=["score"])
    assert [r["new_tokens"] for r in rows] == [3, 6, 6, 6, 6]
    assert [r["score"] for r in rows[1:]] == [1.0] * 4
    assert rows[0]["score"] < 1


def test_prompt_longer_than_the_model_is_an_error(tokenizer, tmp_path):
    """With what is read of its reply or its answer; the others of its batch are measured."""
    model, samples = make_model("llama"), make_samples((60, 52, 40), new=8)
    for metrics, positions, fit in (
        (["score"], 67, {1, 2}),
        (["score"], 60, {1, 2}),
        (["score"], 59, {2}),
        (["ppl"], 59, {1, 2}),
        (["next"], 68, {0, 1, 2}),
    ):
        model.config.max_position_embeddings = positions
        folder = tmp_path / f"{metrics[0]}-{positions}"
        rows = run(model, tokenizer, folder, samples, metrics=metrics, policies=["snapkv"])
        assert {row["index"] for row in rows if "error" not in row} == fit
        for row in rows:
            if row["index"] not in fit:
                assert "of a reply more than the model's" in row["error"]


def test_an_error_without_words_is_recorded_by_its_type(tokenizer, tmp_path, monkeypatch):
    def fail(*args):
        raise ValueError

    monkeypatch.setattr("mmkv.policies.knorm.KeyNorm.__call__", fail)
    samples = make_samples((40,), new=4)
    rows = run(make_model("llama"), tokenizer, tmp_path, samples, policies=["knorm"])
    assert {row["error"] for row in rows if "error" in row} == {"ValueError"}


def test_blanks_before_a_line_of_code_count(model, tokenizer, tmp_path, monkeypatch):
    """As in LongBench, whose rule removes line breaks alone."""
    decode = Encoder.decode
    monkeypatch.setattr(Encoder, "decode", lambda *x: "    " + decode(*x))
    asked = {"policies": ["full"], "metrics": ["score"]}
    rows = run(model, tokenizer, tmp_path / "a", **asked)
    samples = [
        replace(sample, answers=("    " + row["text"],), metric="edit_similarity")
        for sample, row in zip(make_samples(), rows, strict=True)
    ]
    rows = run(model, tokenizer, tmp_path / "b", samples, **asked)
    assert {row["score"] for row in rows} == {1.0}


@cases("whole_lines", [0, 8], 8)
def test_interrupted_run_resumes_to_same_rows(model, tokenizer, tmp_path, whole_lines):
    """Killed while it wrote its first row, or the second one of a batch."""
    asked = {"policies": ["full", "snapkv"], "metrics": ["ppl"], "budgets": [0.5]}
    whole = run(model, tokenizer, tmp_path / "whole", **asked)
    run(model, tokenizer, tmp_path / "torn", **asked)
    path = tmp_path / "torn" / "rows.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:whole_lines]) + lines[whole_lines][:40])
    assert len(read_rows(path)) == whole_lines
    assert without_times(run(model, tokenizer, tmp_path / "torn", **asked)) == without_times(whole)
    assert read_rows(path)[:whole_lines] == [json.loads(line) for line in lines[:whole_lines]]


def test_stop_keeps_finished_rows(model, tokenizer, tmp_path, monkeypatch):
    calls, real = [], runner.measure

    def stop_later(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runner, "measure", stop_later)
    with pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, tmp_path)
    assert len(read_rows(tmp_path / "rows.jsonl")) == 6  # three batches of two


# Another process: lmms-eval makes the locks of one process the same lock.
TAKE_LOCK = """import sys, filelock
with filelock.FileLock(sys.argv[1]).acquire(timeout=0):
    print("taken", flush=True)
    sys.stdin.read()
"""


def other_process(folder):
    """Start a process that takes a run's lock, says so, and keeps it until its input ends."""
    command = [sys.executable, "-c", TAKE_LOCK, str(folder / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def test_second_run_in_a_folder_is_refused_while_the_first_one_writes(
    model, tokenizer, tmp_path, monkeypatch
):
    with other_process(tmp_path) as other:
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(RunError, match="another process is writing this run"):
            run(model, tokenizer, tmp_path, policies=["full"], metrics=["ppl"])
    assert [x.name for x in tmp_path.iterdir()] == [".lock"]
    said, real = [], runner.measure

    def start_second(*args):
        if not said:
            said.extend(other_process(tmp_path).communicate())
        return real(*args)

    monkeypatch.setattr(runner, "measure", start_second)
    rows = run(model, tokenizer, tmp_path, policies=["full"], metrics=["ppl"])
    assert said[0] == ""
    assert "Timeout" in said[1]
    assert len(rows) == len(make_samples())
    assert run(model, tokenizer, tmp_path, policies=["full"], metrics=["ppl"]) == rows


def test_a_changed_option_is_refused(model, tokenizer, tmp_path):
    asked = {"metrics": ["score"], "policies": ["full"]}
    run(model, tokenizer, tmp_path, **asked)
    before = (tmp_path / "rows.jsonl").read_bytes()
    for option, changed in (
        ("budgets", {"budgets": [0.5]}),
        ("policies", {"policies": ["snapkv"]}),
        ("policies", {"policies": ["full", "snapkv"], "options": {"window": 5}}),
        ("metrics", {"metrics": ["ppl"]}),
        ("batch_size", {"batch_size": 3}),
        ("limit", {"samples": make_samples()[:4], "limit": 4}),
        ("data_digest", {"samples": make_samples()[::-1]}),
    ):
        with pytest.raises(RunError, match=rf"{option}=.*choose another --out"):
            run(model, tokenizer, tmp_path, **asked | changed)
        assert (tmp_path / "rows.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_changed_profile_or_plugin_is_refused(model, tokenizer, tmp_path, registering):
    """The paths stay the same."""
    profile, plugin, asked = tmp_path / "p.json", tmp_path / "mine.py", {"metrics": ["ppl"]}
    asked |= {"policies": [f"prefixkv:profile={profile}"], "budgets": [0.5]}
    code = "import mmkv\nmmkv.register_policy('mine')(type('M', (mmkv.Policy,), {}))"
    profile.write_text("[0.4, 0.6]")
    run(model, tokenizer, tmp_path / "a", **asked)
    profile.write_text("[0.6, 0.4]")
    with pytest.raises(RunError, match=r"files=.*p\.json.*choose another --out"):
        run(model, tokenizer, tmp_path / "a", **asked)
    for text in (code, f"# changed\n{code}"):
        plugin.write_text(text)
        load_plugin(plugin)
        run(model, tokenizer, tmp_path / str(len(text)), **asked)
    with pytest.raises(RunError, match=r"files=.*mine\.py.*choose another --out"):
        run(model, tokenizer, tmp_path / str(len(code)), **asked)


def test_other_weights_in_the_same_folder_are_refused(model, tokenizer, tmp_path):
    asked, trained = {"policies": ["full"], "metrics": ["ppl"]}, copy.deepcopy(model)
    run(model, tokenizer, tmp_path, **asked)
    next(trained.parameters()).data.mul_(1.5)
    with pytest.raises(RunError, match=r"files=.*weights.*choose another --out"):
        run(trained, tokenizer, tmp_path, **asked)
    run(model, tokenizer, tmp_path, **asked)


def test_sample_digest_covers_every_field(tmp_path):
    path, more = tmp_path / "a.png", {"question": "w9", "metric": None, "chat": True}
    more |= {"max_new_tokens": 2, "first_line": True, "classes": ("w5",)}
    black, white = (Image.new("RGB", (8, 8), color) for color in ("black", "white"))
    black.save(path)
    sample = replace(make_samples()[0], images=(black, path))
    facts = [sample.facts, *(replace(sample, **{k: v}).facts for k, v in more.items())]
    facts += [replace(sample, images=(white, path)).facts]
    assert replace(sample, images=(black.copy(), str(path))).facts == facts[0]
    white.save(path)
    facts += [sample.facts]
    assert len({digest(x) for x in facts}) == len(facts) == 9


@pytest.mark.slow
def test_refused_sample_is_a_row_with_reason(model, tokenizer, tmp_path, monkeypatch):
    """The others of its batch are measured."""
    real = measure._measure

    def refuse(variant, budget, batch):
        if variant.policy.name == "snapkv" and {1, 3} & set(batch.indices):
            raise ValueError("8 must be kept\nand more")
        return real(variant, budget, batch)

    monkeypatch.setattr(measure, "_measure", refuse)
    asked = {"policies": ["snapkv"], "budgets": [0.2]}
    rows = run(model, tokenizer, tmp_path, **asked, batch_size=5)
    rows = [r for r in rows if r["policy"] == "snapkv"]
    assert [r["index"] for r in rows] == [0, 1, 2, 3, 4]
    assert ["error" in r for r in rows] == [False, True, False, True, False]
    assert rows[1]["error"] == "8 must be kept"
    assert "ppl" not in rows[1]
    alone = run(model, tokenizer, tmp_path / "alone", **asked, batch_size=1)
    for row, other in zip(rows, alone[5:], strict=True):
        assert row.get("text") == other.get("text")
        assert row.get("error") == other.get("error")
        if "nll" in row:
            assert row["nll"] == pytest.approx(other["nll"], rel=1e-4)


def test_wrong_arguments_raise(model, tokenizer, tmp_path):
    for message, asked in {
        "unknown policy 'snapkx'": {"policies": ["snapkx"]},
        "metric 'bleu'": {"metrics": ["bleu"]},
        "budget=1.5": {"budgets": [1.5]},
        "samples: there are none": {"samples": []},
        "batch_size=0": {"batch_size": 0},
        "'windw' is read by none": {"options": {"windw": 3}},
        "window='wide': expected a whole number": {"options": {"window": "wide"}},
        "metric 'score': suite 'tiny' has none": {
            "samples": [replace(s, metric=None) for s in make_samples()],
            "metrics": ["ppl", "score"],
        },
        "metric 'ppl': the samples of suite 'tiny' have no answers": {
            "samples": [replace(s, answers=()) for s in make_samples()],
        },
        "protect='instruction' .*no image tokens": {"policies": ["snapkv:protect=instruction"]},
    }.items():
        with pytest.raises(ValueError, match=message):
            run(model, tokenizer, tmp_path / "new", **asked)
    assert not (tmp_path / "new" / "rows.jsonl").exists()


def test_variant_text_sets_options_profile_and_type():
    shown = parse_variants(
        ["snapkv", "pyramid:window=4:beta=10", "prefixkv:layers=uniform", "full"],
        {"window": 6, "distance": 9},
    )
    assert [(v.label, v.options) for v in shown] == [
        ("snapkv", {"window": 6}),
        ("pyramidkv:window=4:beta=10", {"window": 4, "beta": 10}),
        ("prefixkv:layers=uniform", {"distance": 9, "layers": "uniform"}),
        ("full", {}),
    ]
    assert shown[3].budgets([0.1, 0.2]) == [1.0]
    (profiled,) = parse_variants(["prefixkv:profile=p/{budget}.json"])
    assert profiled.profile_at(0.1) == "p/0.1.json"
    (few_bits,) = parse_variants(["snapkv:kv_dtype=int4:window=4"])
    assert (few_bits.options, few_bits.kv_dtype) == ({"window": 4}, "int4")
    assert few_bits.recorded == {"window": 4, "kv_dtype": "int4"}
    mine = harness_arguments("snapkv", 0.2, {"kv_dtype": "int4", "window": 4, "x": 1})
    assert mine == (0.2, {"kv_dtype": "int4", "window": 4}, {"x": 1})
    (hidden,) = parse_variants(["snapkv:question=hidden:window=4"])
    assert hidden.label == "snapkv:window=4:question=hidden"  # `mmkv report` reads the end
    (chunks,) = parse_variants(["condense:evict_chunks=64"])
    assert chunks.options == {"least": 0}
    assert chunks.recorded == {"least": 0, "evict_chunks": 64}
    for wrong in ("0", "true", "half"):
        with pytest.raises(ValueError, match=r"evict_chunks=.*: expected the tokens"):
            parse_variants([f"condense:evict_chunks={wrong}"])
    with pytest.raises(ValueError, match="kv_dtype='int3': expected"):
        parse_variants(["snapkv:kv_dtype=int3"])
    assert option_texts(["a=1", "b-c=None"]) == {"a": "1", "b_c": "None"}
    texts = {"pooling": "none", "window": "8", "recency_weighted": "true"}
    (typed,) = parse_variants(["snapkv:kernel_size=3"], texts)
    of_types = {"pooling": None, "window": 8, "recency_weighted": True, "kernel_size": 3}
    assert typed.options == of_types
    (asked,) = parse_variants(["kvzip:instruction=9690"])
    assert asked.options["instruction"] == "9690"
    with pytest.raises(ValueError, match="instruction=9690: expected a text"):
        parse_variants(["kvzip"], {"instruction": 9690})
    refused = {
        "named twice": ["h2o", "h2o"],
        "no effect": ["local:window=3"],
        "order of requests": ["xkv:allocation=sampled:samples=2"],
    }
    for message, names in refused.items():
        with pytest.raises(ValueError, match=message):
            parse_variants(names)
    (own_size,) = parse_variants(["xkv:retention=0.9"])
    with pytest.raises(ValueError, match=r"'xkv:retention=0.9': .* leave retention out, or"):
        own_size.budgets([0.2])


@pytest.mark.slow
def test_two_processes_write_the_rows_of_one(tmp_path, monkeypatch):
    """Each has a part of the batches; the rows are those of one process."""
    folder, script = save_model(tmp_path / "model"), tmp_path / "work.py"
    script.write_text(
        "import os, sys\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import rouge_score.rouge_scorer  # seconds, and each process would need them\n"
        "from helpers.evaluation import make_samples\nfrom mmkv.eval import runner\n"
        "other = None\n"
        "if 'WORLD_SIZE' in os.environ:  # forked after the imports, so that these run once\n"
        "    other = os.fork()\n"
        "    os.environ['RANK'] = os.environ['LOCAL_RANK'] = '0' if other else '1'\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}).eval()\n"
        f"runner.run(model, AutoTokenizer.from_pretrained({str(folder)!r}), make_samples(),\n"
        "    out=sys.argv[1], policies=['snapkv', 'h2o'], budgets=[0.5], batch_size=1)\n"
        "if other is not None:\n    assert runner.find_processes().num_processes == 2\n"
        "if other:\n    sys.exit(os.waitpid(other, 0)[1] != 0)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `accelerate launch` tells each process.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert exit_code([sys.executable, script, tmp_path / "two"], 300, env=env) == 0
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "one")])
    runpy.run_path(str(script))
    one, both = (read_rows(tmp_path / name / "rows.jsonl") for name in ("one", "two"))
    assert len(one) == 15
    assert [(key_of(r), r["text"]) for r in both] == [(key_of(r), r["text"]) for r in one]
    assert [r["nll"] for r in both] == pytest.approx([r["nll"] for r in one])
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == [
        ".lock",
        "rows.jsonl",
        "run.json",
    ]
