"""`mmkv check` and `mmkv.check`: what is measured, what is recommended, and what is refused."""

import json
import re
from typing import Any

import pytest
import torch
from test_eval_report import call

import mmkv
from helpers.evaluation import WORDS, divergence_of, make_tokenizer, predicted, save_model
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.oracle import short
from mmkv import calibration, chat
from mmkv.eval import measure
from mmkv.eval.check import CheckReport, CheckRow
from mmkv.eval.cli import CHECKED
from mmkv.eval.prompts import encode_samples
from mmkv.eval.store import read_rows
from mmkv.eval.suites.registry import load_suite
from mmkv.memory import Memory

NEW = 10


@pytest.fixture(scope="module")
def prompt():
    return make_inputs("llama", (90,))


def checked(model, inputs, policy="snapkv", budgets=(0.3,), **more) -> CheckReport:
    name = policy.split(":")[0]
    return mmkv.check(
        model, inputs, policy, budgets, **{"max_new_tokens": NEW} | short(name) | more
    )


@cases(
    "policy",
    ["snapkv", "condense", "h2o", "snapkv:kv_dtype=int8"],
    *("h2o", "snapkv:kv_dtype=int8"),
)
def test_figures_equal_a_loop_over_tokens(model, prompt, policy):
    """With caches that only grow, and with one that drops a token a step."""
    name, _, dtype = policy.partition(":kv_dtype=")
    options = short(name) | ({"kv_dtype": dtype} if dtype else {})
    report = checked(model, [prompt], policy)
    N = prompt["input_ids"].shape[1]
    reply = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)[0, N:].tolist()
    wanted, full = predicted(model, prompt, reply)
    with mmkv.wrapped(model, name, 0.3, **options), torch.no_grad():
        given, _ = predicted(model, prompt, reply)
        held = model(**prompt, use_cache=True).past_key_values.nbytes
    given, wanted = given[1:], wanted[1:]  # the first is predicted before anything is evicted
    row = report.rows[0]
    assert row.divergence == pytest.approx(divergence_of(given, wanted) / (NEW - 1), rel=1e-4)
    assert row.divergence > 1e-6
    assert row.same == (given.argmax(-1) == wanted.argmax(-1)).float().mean()
    keys = sum(4 * x.keys[:, :, :N].numel() for x in full.layers)
    assert (row.nbytes, report.full_nbytes, report.tokens) == (held, 2 * keys, NEW - 1)
    assert row.kept == pytest.approx(0.3, abs=0.01)
    assert not mmkv.is_wrapped(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_a_model_in_a_container_is_measured(prompt):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    expected = checked(make_model("llama"), [prompt], max_new_tokens=2)
    around = peft.get_peft_model(make_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    assert checked(around.eval(), [prompt], max_new_tokens=2).rows == expected.rows


@pytest.mark.slow
def test_means_are_over_tokens_and_the_worst_prompt_is_named(model, monkeypatch):
    """A reply that ends early has fewer tokens; one of a single token says nothing."""
    rows = [make_inputs("llama", (n,), seed=n) for n in (90, 60, 75)]
    said = model.generate(**rows[1], max_new_tokens=NEW, do_sample=False)[0, 60:].tolist()
    at = next(t for t in range(2, NEW) if said[t] not in said[:t])
    with monkeypatch.context() as patch:
        patch.setattr(model.generation_config, "eos_token_id", said[at])
        report, alone = checked(model, rows), [checked(model, [row]) for row in rows]
    assert alone[1].tokens == at
    each, total = [x.rows[0] for x in alone], sum(x.tokens for x in alone)
    nats = sum(x.rows[0].divergence * x.tokens for x in alone) / total
    found = report.rows[0]
    assert (report.prompts, report.prompt_tokens, report.tokens) == (3, (60, 90), total)
    assert found.divergence == pytest.approx(nats, rel=1e-4)
    assert found.worst == pytest.approx(max(x.divergence for x in each), rel=1e-4)
    assert each[found.worst_prompt - 1].divergence == pytest.approx(found.worst, rel=1e-4)
    assert found.nbytes == pytest.approx(sum(x.nbytes for x in each) / 3, abs=1)


@pytest.mark.slow
def test_replies_of_one_token_say_nothing(model, prompt, monkeypatch):
    """That token is predicted before anything is evicted."""
    first = int(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1])
    other = make_inputs("llama", (80,), seed=3)
    monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    with pytest.raises(ValueError, match="all replies end with their first token"):
        checked(model, [prompt])
    report = checked(model, [prompt, other])
    assert report.rows[0].divergence == checked(model, [other]).rows[0].divergence
    assert any(x.startswith("1 replies end with their first token") for x in report.notes)


def test_infinite_probabilities_raise(prompt):
    model = make_model("llama")
    bias = torch.zeros(120).index_fill(0, torch.tensor([8]), torch.nan)
    model.lm_head.bias = torch.nn.Parameter(bias)
    with pytest.raises(ValueError, match=r"prompt 1: the divergence from the full cache is nan"):
        checked(model, [prompt])


def report_of(*rows: tuple[str, float, float, int], within=0.05) -> CheckReport:
    """Rows of policy, size, divergence and bytes of 1,000; a "?" behind a policy: not tested."""
    found = [
        CheckRow(
            *(name.removesuffix("?"), size, nats, nats, 1, 0.9, held / 1000, held, f"wrap {name}"),
            tested=not name.endswith("?"),
        )
        for name, size, nats, held in rows
    ]
    bits = CheckRow("full:kv_dtype=int4", 1.0, 0.01, 0.01, 1, 1.0, 1.0, 280, "wrap full", True)
    return CheckReport(within, 1, (90, 90), 9, 1000, (*found, bits))


def test_best_is_the_row_of_fewest_bytes_within_the_tolerance():
    """Of policies, sizes and types."""
    rows = ("a", 0.1, 0.2, 100), ("b", 0.1, 0.04, 110), ("a", 0.5, 0.01, 500)
    assert report_of(*rows).best.call == "wrap b"
    assert report_of(*rows, within=0.3).best.call == "wrap a"
    # The full cache in 4 bits holds less than half of the tokens do.
    assert report_of(("a", 0.1, 0.2, 100), ("a", 0.5, 0.01, 500)).best.call == "wrap full"
    none = report_of(("a", 0.1, 0.2, 100), within=0.001)
    assert none.best is None
    assert none.verdict.startswith("nothing is within 0.001 nats a token: full:kv_dtype=int4 is")


def test_sizes_below_the_floor_are_not_recommended():
    found = report_of(("a?", 0.05, 0.01, 200), ("a", 0.3, 0.02, 250))
    assert (found.best.budget, "wrap a holds 25%" in found.verdict) == (0.3, True)
    short = report_of(("a?", 0.05, 0.01, 200))
    assert (short.best, short.verdict[:17]) == (None, "too short to tell")


def test_a_short_prompt_is_too_short_to_tell(model, prompt):
    """`wrap` keeps 64 tokens of 90, whatever the share of bytes."""
    how = {"memory": ["50%", "5%"], "max_new_tokens": NEW, "within": 50.0}
    report = mmkv.check(model, [prompt], "condense", **how)
    assert [x.tested for x in report.rows[:2]] == [True, False]
    (note,) = report.notes
    assert note.startswith("condense 5% of bytes: too short to tell")
    assert [x.kv_dtype for x in report.rows] == ["int8", "int4", "int8", "int4"]
    assert f"of the full cache's, in {report.best.kv_dtype} (" in report.verdict
    assert mmkv.check(model, [prompt], "condense", least=0, **how).rows[1].tested


def test_shares_of_bytes_set_tokens_and_type(model):
    # Two sizes are alike: of this prompt the smaller one is the nearer, and so the best.
    prompt = make_inputs("llama", (90,), seed=2)
    how = {"memory": ["3x", "10%"], "within": 50.0, "max_new_tokens": NEW}
    report = mmkv.check(model, [prompt], ["snapkv", "h2o"], window=6, **how)
    rows = {x.name: x for x in report.rows}
    first, second = rows["snapkv 33.3% of bytes"], rows["snapkv 10% of bytes"]
    assert first.nbytes <= report.full_nbytes / 3
    assert second.kept < first.kept
    assert len(rows) == 2 * 2 + 2
    best = report.best
    assert best.nbytes == min(x.nbytes for x in report.rows)
    # What is recommended is what was measured.
    scope = {"mmkv": mmkv, "model": make_model("llama")}
    with torch.no_grad():
        held = eval(best.call, scope)(**prompt, use_cache=True).past_key_values.nbytes
    assert held == best.nbytes
    for one in ({"memory": 1 / 3}, {"memory": "3x"}, {"budgets": 0.4}, {"budgets": "40%"}):
        alone = mmkv.check(model, [prompt], "snapkv", window=6, **how | {"memory": None} | one)
        size = "0.4" if "budgets" in one else "33.3% of bytes"
        assert [x.name for x in alone.rows[:-2]] == [f"snapkv {size}"]
    with pytest.raises(ValueError, match="stands in place of budgets"):
        mmkv.check(model, [prompt], "snapkv", (0.2,), memory=["3x"])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"inputs": []}, "no prompts"),
        ({"inputs": [{"ids": 1}]}, "check: sample 0 is a mapping of"),
        ({"inputs": [{"input_ids": torch.tensor([[5]])}]}, "prompt 1 has 1 token"),
        ({"inputs": [make_inputs("llama", (9, 8))]}, "prompt 1 has 2 rows or padding"),
        ({"inputs": [make_inputs("llama", (2044,))]}, r"2,044 tokens, and with 10 .* 2,048"),
        ({"within": 0}, "within=0"),
        ({"budgets": ()}, "budgets: there are none"),
        ({"budgets": 0}, "budget=0"),
        ({"budgets": (0.2, 1.5)}, r"budget=1\.5"),
        ({"budgets": (3,)}, "budget=3 is below the 6 tokens"),
        ({"max_new_tokens": 1}, "max_new_tokens=1"),
        ({"policies": "full"}, "keep everything"),
    ],
)
def test_invalid_arguments_raise(model, prompt, how, message):
    how = {"inputs": [prompt], "max_new_tokens": NEW, "policies": "snapkv"} | how
    if how["policies"] == "snapkv":
        how |= short("snapkv")
    with pytest.raises(ValueError, match=message) as error:
        mmkv.check(model, **how)
    assert "\n" not in str(error.value)
    assert not mmkv.is_wrapped(model)


class TestPrompts:
    """The suite `prompts`."""

    def read(self, tmp_path, name: str, text: str) -> list[Any]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return load_suite("prompts", tmp_path / name)

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("p.txt", "What is it?\n\n  And this? \r\nNo\n", ["What is it?", "And this?", "No"]),
            ("p.txt", "a\n\nb --- c\n---\nd\n ---\n\n---\n", ["a\n\nb --- c", "d"]),
            ("p.txt", "one\u2028line\nwith a\x0cpage", ["one\u2028line", "with a\x0cpage"]),
            ("p.jsonl", '{"prompt": "What?"}\n\n{"prompt": "No"}', ["What?", "No"]),
        ],
    )
    def test_prompts_are_lines_or_blocks_between_dashes(self, tmp_path, name, text, said):
        assert [x.prompt for x in self.read(tmp_path, name, text)] == said

    def test_missing_file_raises(self, tmp_path):
        with pytest.raises(ValueError, match="none: no such file"):
            load_suite("prompts", tmp_path / "none")

    def test_conversations_pass_the_template_whole(self, tmp_path):
        turns = [("system", "Be brief."), ("user", "w5"), ("assistant", "w6"), ("user", "w7")]
        messages = [{"role": role, "content": text} for role, text in turns]
        line = json.dumps({"messages": messages, "prompt": "not this"})
        (sample,) = self.read(tmp_path, "turns.jsonl", line)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{% for x in messages %}{{ x.role }} {{ x.content }} {% endfor %}"
        expected = tokenizer.apply_chat_template(messages, tokenize=False)
        loaded = chat.Loaded("tiny", make_model("llama"), tokenizer)
        (inputs,) = encode_samples(loaded, [sample])
        assert inputs["input_ids"].tolist() == [tokenizer(expected)["input_ids"]]
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="no chat template"):
            encode_samples(loaded, [sample])

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("p.txt", " \n\n", "p.txt: has no prompts: write one a line"),
            ("p.jsonl", '{"text": "x"}', "line 1: field 'prompt': is missing"),
            ("p.jsonl", '{"messages": []}', "field 'messages': expected a list"),
            ("p.jsonl", '{"messages": ["x"]}', "leave pictures out"),
            (
                "p.jsonl",
                '{"messages": [{"role": "system", "content": "x"}]}',
                "expected the user's",
            ),
            (
                "p.jsonl",
                '{"messages": [{"role": "user", "content": "\\ud800"}]}',
                "line 1: field 'messages': has invalid characters",
            ),
            (
                "p.jsonl",
                '{"messages": [{"role": "user", "content": " "}]}',
                "field 'messages': the last one is empty",
            ),
            ("p.csv", "a,b", "p.csv: expected a .txt file, a prompt a line, or .jsonl"),
        ],
    )
    def test_other_files_raise(self, tmp_path, name, text, message):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            self.read(tmp_path, name, text)
        assert "\n" not in str(error.value)

    def test_shipped_prompts_are_documents_and_a_request(self):
        found = [x.prompt for x in load_suite("prompts", "documentation")]
        assert len(set(found)) == len(found) >= 4
        for text in found:
            document, _, asked = text.rpartition("\n\n")
            assert 300 < len(document.split()) < 900
            assert asked[-1] in ".?"


def words(count: int, seed: int = 0) -> str:
    return " ".join(WORDS[(seed + 7 * i * i) % len(WORDS)] for i in range(count))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model, and prompts of its words; the current folder."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "tiny")
    (tmp_path / "p.txt").write_text("\n".join(words(60 + 9 * i, i) for i in range(3)))
    return tmp_path


ASKED = ("--model", "tiny", "--prompts", "p.txt", "--policies", "snapkv", "--option", "window=6")
ASKED += ("--max-new-tokens", "6", "--device", "cpu", "--out", "a")


class TestCommand:
    @pytest.mark.slow
    def test_json_equals_python_report(self, folder):
        done = call("check", *ASKED, "--memory", "50%,10%", "--json", "--within", "0.4")
        assert done.exit_code == 0, done.output
        data = json.loads(done.stdout)
        loaded = chat.load("tiny", "cpu")
        inputs = encode_samples(loaded, load_suite("prompts", "p.txt"))
        how = {"memory": ("50%", "10%"), "within": 0.4, "max_new_tokens": 6}
        report = mmkv.check(loaded.model, inputs, "snapkv", window=6, **how)
        expected = json.loads(json.dumps(report.to_dict()))
        for row, other in zip(data.pop("rows"), expected.pop("rows"), strict=True):
            texts = [x for x in row if isinstance(row[x], str)]
            assert [row.pop(x) for x in texts] == [other.pop(x) for x in texts]
            assert row == pytest.approx(other, rel=1e-5)
        data.pop("best"), expected.pop("best")
        assert data == expected
        assert len(read_rows(folder / "a" / "rows.jsonl")) == 3 * 5

    @pytest.mark.slow
    def test_same_command_resumes_and_other_tolerance_measures_nothing(self, folder, monkeypatch):
        """Rows in bytes are read back as such."""
        real, seen = measure.kept_by_row, []

        def interrupt(cache):
            seen.append(cache)
            if len(seen) == 7:
                raise KeyboardInterrupt
            return real(cache)

        monkeypatch.setattr(measure, "kept_by_row", interrupt)
        asked = ("check", *ASKED, "--memory", "1/2,1/32")
        done = call(*asked)
        assert done.exit_code == 130
        assert "the same command resumes the run" in done.stderr
        assert len(read_rows(folder / "a" / "rows.jsonl")) == 6
        done = call(*asked, "--within", "1e-9")
        assert done.exit_code == 0, done.output
        assert len(seen) == 7 + 9
        assert "nothing is within 1e-09 nats a token" in done.stdout
        done = call(*asked, "--within", "99")
        assert len(seen) == 7 + 9
        assert "snapkv 3.12% of bytes" in done.stdout
        call_shown = re.search(r"mmkv\.wrap\(.*?\)", " ".join(done.stdout.split()))[0]
        assert call_shown == "mmkv.wrap(model, 'snapkv', memory=0.03125, window=6)"  # exactly
        done = call(*asked, "--limit", "2")
        assert (done.exit_code, "choose another --out" in done.stderr) == (2, True)
        assert call("report", "a").exit_code == 0

    def test_refusing_template_raises_one_line(self, folder):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        tokenizer.save_pretrained(folder / "tiny")
        done = call("check", *ASKED)
        assert done.exit_code == 2
        assert "prompt 1: roles must alternate" in done.stderr
        assert done.stderr.count("\n") == 1


def test_command_shares_equal_python():
    from mmkv.eval.check import MEMORY

    assert [*map(Memory.of, CHECKED.split(","))] == [*map(Memory.of, MEMORY)]


@pytest.mark.usefixtures("folder")
class TestCalibrate:
    """The command takes the same prompts."""

    ASKED = ("calibrate", "--model", "tiny", "--device", "cpu", "--out", "p.json")

    def profile(self, *more: str) -> Any:
        done = call(*self.ASKED, "--policy", "prefixkv", "--budget", "0.4", *more)
        assert done.exit_code == 0, done.output
        return mmkv.Profile.load("p.json")

    def test_calibrate_reads_own_prompts(self):
        asked = ("--suite", "prompts", "--data", "p.txt")
        found = self.profile(*asked)
        loaded = chat.load("tiny", "cpu")
        inputs = encode_samples(loaded, load_suite("prompts", "p.txt"))
        assert found == mmkv.calibrate(loaded.model, inputs, "prefixkv", 0.4)
        assert self.profile(*asked, "--limit", "2").samples == 2

    def test_shipped_prompts_where_no_picture_is_read(self, monkeypatch):
        monkeypatch.setattr("mmkv.eval.suites.prompts._MOST_CHARACTERS", 700)
        assert self.profile("--limit", "1").samples == 1

    def test_length_reaches_the_suite(self, folder, monkeypatch):
        (folder / "text.txt").write_text(words(900))
        seen = []
        real = calibration.calibrate

        def record(model, samples, *args, **options):
            seen.extend(x["input_ids"].shape[1] for x in samples)
            return real(model, samples, *args, **options)

        monkeypatch.setattr(calibration, "calibrate", record)
        asked = ("--suite", "continuation", "--data", "text.txt")
        for length in (256, 512):
            self.profile(*asked, "--length", str(length))
        assert seen[0] == pytest.approx(0.75 * 256, rel=0.05)
        assert seen[1] == pytest.approx(0.75 * 512, rel=0.05)
