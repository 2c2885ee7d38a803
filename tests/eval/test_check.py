"""`mmkv check` and `mmkv.check`: what is measured, what is kept on disk, and what is refused."""

import dataclasses
import json
import math
import re
from typing import Any

import pytest
import torch
from test_eval_report import call

import mmkv
from helpers.evaluation import WORDS, divergence_of, make_tokenizer, predicted, save_model
from helpers.models import make_inputs, make_model, row_of
from helpers.oracle import short
from mmkv import calibration, chat, divergence, forcing
from mmkv.divergence import CheckReport, CheckRow
from mmkv.eval import prompts
from mmkv.eval.store import read_rows

NEW = 10


@pytest.fixture(scope="module")
def prompt():
    return make_inputs("llama", (90,))


def checked(model, inputs, policy="snapkv", budgets=(0.3,), **more) -> CheckReport:
    how = {"max_new_tokens": NEW, **short(policy), **more}
    return mmkv.check(model, inputs, policy, budgets, **how)


@pytest.mark.parametrize(
    ("policy", "options"),
    [("snapkv", {}), ("condense", {}), ("h2o", {}), ("snapkv", {"kv_dtype": "int8"})],
    ids=str,
)
def test_it_equals_the_loop_and_the_cache_s_own_bytes(model, prompt, policy, options):
    """With caches that only grow, and with one that drops a token a step."""
    report = checked(model, [prompt], policy, **options)
    N = prompt["input_ids"].shape[1]
    reply = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)[0, N:].tolist()
    wanted, full = predicted(model, prompt, reply)
    with mmkv.wrapped(model, policy, 0.3, **short(policy), **options), torch.no_grad():
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
def test_rows_of_a_batch_are_prompts_and_means_are_over_tokens(model, monkeypatch):
    """Padded or alone; a reply that ends early has fewer tokens, and what follows counts not."""
    batch = make_inputs("llama", (90, 60, 75))
    rows = [row_of(batch, b) for b in range(3)]
    said = model.generate(**rows[1], max_new_tokens=NEW, do_sample=False)[0, 60:].tolist()
    at = next(t for t in range(2, NEW) if said[t] not in said[:t])
    with monkeypatch.context() as patch:
        patch.setattr(model.generation_config, "eos_token_id", said[at])
        together, apart = checked(model, [batch]), checked(model, rows)
        alone = [checked(model, [row]) for row in rows]
    assert alone[1].tokens == at
    assert apart.prompts == together.prompts == 3
    assert apart.prompt_tokens == together.prompt_tokens == (60, 90)
    each = [x.rows[0] for x in alone]
    total = sum(x.tokens for x in alone)
    nats, same = (
        sum(getattr(x.rows[0], name) * x.tokens for x in alone) / total
        for name in ("divergence", "same")
    )
    for report in (together, apart):
        row = report.rows[0]
        assert report.tokens == total
        assert row.divergence == pytest.approx(nats, rel=1e-4)
        assert row.same == pytest.approx(same)
        assert row.worst == pytest.approx(max(x.divergence for x in each), rel=1e-4)
        assert row.divergence < row.worst
        assert each[row.worst_prompt].divergence == pytest.approx(row.worst, rel=1e-4)
    last = checked(model, [batch, make_inputs("llama", (40,), seed=3)]).rows[0]
    assert last.worst > apart.rows[0].worst
    assert last.worst_prompt == 3
    with mmkv.wrapped(model, "snapkv", 0.3, **short("snapkv")), torch.no_grad():
        held = model(**batch, use_cache=True).past_key_values.nbytes
    assert together.rows[0].nbytes == pytest.approx(held / 3, abs=1)
    assert apart.rows[0].nbytes == pytest.approx(sum(x.nbytes for x in each) / 3, abs=1)


def test_a_reply_of_one_token_says_nothing(model, prompt, monkeypatch):
    """That token is predicted before anything is evicted."""
    first = int(model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1])
    other = make_inputs("llama", (80,), seed=3)
    monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    with pytest.raises(ValueError, match="all replies end with their first token"):
        checked(model, [prompt])
    report = checked(model, [prompt, other])
    assert report.rows[0].divergence == checked(model, [other]).rows[0].divergence
    assert report.prompts == 2
    assert any(x.startswith("1 replies end with their first token") for x in report.notes)


@pytest.mark.slow
def test_a_word_that_can_never_come_and_one_that_is_none(prompt):
    model = make_model("llama")
    bias = torch.zeros(120).index_fill(0, torch.tensor([7]), -torch.inf)
    model.lm_head.bias = torch.nn.Parameter(bias)
    assert 0 < checked(model, [prompt]).rows[0].divergence < 10
    with torch.no_grad():
        model.lm_head.bias[8] = torch.nan
    with pytest.raises(ValueError, match=r"snapkv 0\.3: .* not finite: use another dtype"):
        checked(model, [prompt])


def test_it_is_left_unwrapped_and_a_policy_may_be_a_value(model, prompt, monkeypatch):
    made = mmkv.get_policy("snapkv", window=6, kernel_size=3)
    assert mmkv.check(model, [prompt], made, (0.3,), max_new_tokens=NEW) == checked(model, [prompt])

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(forcing, "divergence", stop)
    with pytest.raises(KeyboardInterrupt):
        checked(model, [prompt])
    assert not mmkv.is_wrapped(model)


def report_of(*rows: tuple[float, float, int], within=0.05) -> CheckReport:
    """Rows of budget, divergence and bytes."""
    found = [
        CheckRow("condense", budget, nats, nats, 0, 0.9, size / 1000, size)
        for budget, nats, size in rows
    ]
    bits = CheckRow("full:kv_dtype=int4", 1.0, 0.0, 0.0, 0, 1.0, 1.0, 10)
    return CheckReport("condense", within, 1, (90, 90), 9, 1000, (*found, bits))


def test_the_smallest_budget_is_of_the_policy_and_within():
    assert report_of((0.1, 0.2, 100), (0.2, 0.05, 200), (0.5, 0.01, 500)).smallest == 0.2
    assert report_of((0.5, 0.01, 500), (64, 0.04, 300)).smallest == 64
    none = report_of((0.1, 0.2, 100), (0.2, 0.06, 200))
    assert none.smallest is None
    assert none.verdict.startswith("no budget is within 0.05 nats a token: condense 0.2 is nearest")


def test_of_budgets_that_hold_as_much_the_largest_was_put_to_the_test():
    """A floor sizes all three: what a twentieth of a long prompt costs is not known."""
    floored = report_of((0.05, 0.01, 400), (0.1, 0.01, 400), (0.3, 0.01, 402), (0.5, 0.0, 500))
    assert floored.smallest == 0.3


def test_a_floor_is_noted(model, prompt):
    report = checked(model, [prompt], "condense", (0.05, 0.9), least=64)
    assert report.rows[0].kept == pytest.approx(64 / 90, abs=0.02)
    (note,) = report.notes
    assert note.startswith("condense 0.05 kept more than the budget says")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"inputs": []}, "no prompts"),
        ({"inputs": [{"ids": 1}]}, "check: sample 0 is a mapping of"),
        ({"inputs": [{"input_ids": torch.tensor([[5]])}]}, "prompt 1 has 1 token"),
        ({"inputs": [make_inputs("llama", (9, 1))]}, "prompt 2 has 1 token"),
        ({"inputs": [make_inputs("llama", (2044,))]}, r"2,044 tokens, and with 10 .* 2,048"),
        ({"within": 0}, "within=0"),
        ({"within": math.nan}, "within=nan"),
        ({"budgets": ()}, "no budgets"),
        ({"budgets": (0.2, 1.5)}, r"budget=1\.5"),
        ({"budgets": (3,)}, "budget=3 is below the 6 tokens"),
        ({"max_new_tokens": 1}, "max_new_tokens=1"),
        ({"policy": "full"}, "'full' keeps everything"),
        ({"policy": "xkv", "allocation": "sampled", "samples": 2}, "use allocation='mini-prefill'"),
        ({"policy": mmkv.get_policy("h2o"), "sinks": 3}, "beside a Policy"),
        ({"profile": "missing.json"}, "missing.json"),
    ],
)
def test_what_is_wrong_is_named(model, prompt, how, message):
    how = {"inputs": [prompt], "max_new_tokens": NEW, "policy": "snapkv"} | how
    if how["policy"] == "snapkv":
        how |= short("snapkv")
    with pytest.raises(ValueError, match=message) as error:
        mmkv.check(model, **how)
    assert "\n" not in str(error.value)
    assert not mmkv.is_wrapped(model)


class TestPrompts:
    def read(self, tmp_path, name: str, text: str) -> list[Any]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return prompts.read_prompts(tmp_path / name)

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("p.txt", "What is it?\n\n  And this? \r\nNo\n", ["What is it?", "And this?", "No"]),
            ("p.txt", "a\n\nb --- c\n---\nd\n ---\n\n---\n", ["a\n\nb --- c", "d"]),
            ("p.jsonl", '{"prompt": "What?"}\n\n{"prompt": "No"}', ["What?", "No"]),
        ],
    )
    def test_one_a_line_or_between_dashes(self, tmp_path, name, text, said):
        expected = [[{"role": "user", "content": content}] for content in said]
        assert self.read(tmp_path, name, text) == expected
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        line = json.dumps({"messages": turns, "prompt": "not this"})
        assert self.read(tmp_path, "turns.jsonl", line) == [turns]

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("p.txt", " \n\n", "p.txt: has no prompts: write one a line"),
            ("p.txt", "---\n---\n", "has no prompts"),
            ("p.jsonl", "\n", "p.jsonl: has no entries"),
            ("p.jsonl", "{", "line 1: not a JSON object"),
            ("p.jsonl", '{"text": "x"}', "line 1: field 'prompt': is missing"),
            ("p.jsonl", '{"prompt": " "}', "field 'prompt': is empty"),
            ("p.jsonl", '{"messages": []}', "field 'messages': expected a list"),
            ("p.jsonl", '{"messages": ["x"]}', "leave pictures out"),
            ("p.jsonl", '{"messages": [{"role": "user", "content": [{}]}]}', "leave pictures out"),
            ("p.csv", "a,b", "p.csv: expected a .txt file, a prompt a line, or .jsonl"),
        ],
    )
    def test_files_that_are_none(self, tmp_path, name, text, message):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            self.read(tmp_path, name, text)
        assert "\n" not in str(error.value)

    def test_shipped_ones_are_documents_and_a_request(self):
        found = prompts.shipped_prompts()
        assert len(found) >= 4
        for ((message,),) in zip(found, strict=True):
            document, _, asked = message["content"].rpartition("\n\n")
            assert 300 < len(document.split()) < 900
            assert asked[-1] in ".?"
            assert len(asked.split()) > 4
        assert len({x[0]["content"] for x in found}) == len(found)


def words(count: int, seed: int = 0) -> str:
    return " ".join(WORDS[(seed + 7 * i * i) % len(WORDS)] for i in range(count))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model, and prompts of its words; the current folder."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "tiny")
    (tmp_path / "p.txt").write_text("\n".join(words(60 + 9 * i, i) for i in range(3)))
    return tmp_path


ASKED = ("--model", "tiny", "--prompts", "p.txt", "--policy", "snapkv", "--option", "window=6")
ASKED += ("--budgets", "0.2,0.6", "--max-new-tokens", "6", "--device", "cpu")


@pytest.mark.usefixtures("folder")
def test_shares_of_bytes_in_place_of_budgets(model, prompt):
    """`kv_dtype` follows from each, and the smallest is a share too."""
    how = {"within": 50.0, "max_new_tokens": NEW, "least": 0}
    report = mmkv.check(model, [prompt], "snapkv", memory=["3x", "10%"], window=6, **how)
    first, second = report.rows[:2]
    assert [x.name for x in (first, second)] == ["snapkv 33.3% of bytes", "snapkv 10% of bytes"]
    assert first.nbytes <= report.full_nbytes / 3
    assert second.kept < first.kept
    assert (report.smallest, "10% of bytes" in report.verdict) == (0.1, True)
    with pytest.raises(ValueError, match="stands in place of budgets"):
        mmkv.check(model, [prompt], "snapkv", (0.2,), memory=["3x"])


class TestCommand:
    def test_shares_of_bytes_are_read_back_as_such(self, folder):
        words = [x for x in ASKED if x not in ("--budgets", ASKED[ASKED.index("--budgets") + 1])]
        for _ in range(2):  # the second time all rows are there
            done = call("check", *words, "--memory", "3x,50%", "--within", "50", "--out", "m")
            assert done.exit_code == 0, done.output
            assert "snapkv 33.3% of bytes" in done.stdout
        report = json.loads((folder / "m" / "report.json").read_text())
        assert report["memory"] is True
        assert report["rows"][0]["nbytes"] <= report["full_nbytes"] / 3 * 1.05

    def test_json_has_what_python_reports_and_what_made_it(self, folder):
        done = call("check", *ASKED, "--json", "--within", "0.4", "--out", "a")
        assert done.exit_code == 0, done.output
        data = json.loads(done.stdout)
        assert data == json.loads((folder / "a" / "report.json").read_text())
        loaded = chat.load("tiny", "cpu")
        inputs = [loaded.processor(words(60 + 9 * i, i), return_tensors="pt") for i in range(3)]
        report = mmkv.check(
            loaded.model,
            [{k: x[k] for k in ("input_ids", "attention_mask")} for x in inputs],
            "snapkv",
            (0.2, 0.6),
            within=0.4,
            window=6,
            max_new_tokens=6,
        )
        expected = json.loads(json.dumps(report.to_dict()))
        for row, other in zip(data["rows"], expected["rows"], strict=True):
            assert row.pop("policy") == other.pop("policy")
            assert row == pytest.approx(other, rel=1e-5)
        for name in {f.name for f in dataclasses.fields(CheckReport)} - {"rows"}:
            assert data[name] == expected[name], name
        assert data["smallest"] == report.smallest
        assert (data["model"], data["max_new_tokens"], data["n"]) == ("tiny", 6, 3)
        assert data["options"]["window"] == 6
        assert data["mmkv"] == mmkv.__version__
        assert len(data["each"]) == 3 * 4
        assert read_rows(folder / "a" / "rows.jsonl") == data["each"]

    @pytest.mark.slow
    def test_the_same_command_goes_on_and_measures_nothing_twice(self, folder, monkeypatch):
        first = call("check", *ASKED, "--out", "a")
        assert first.exit_code == 0, first.output
        assert "12 of 12" not in first.stderr
        rows = (folder / "a" / "rows.jsonl").read_text().splitlines(keepends=True)
        report = (folder / "a" / "report.json").read_text()
        real, measured = divergence._rows, []

        def rows_of(setting, *given):
            measured.append((setting.label, setting.budget, given[-1]))
            return real(setting, *given)

        monkeypatch.setattr(divergence, "_rows", rows_of)
        lost = json.loads(rows[4])
        (folder / "a" / "rows.jsonl").write_text("".join([*rows[:4], *rows[5:], rows[4][:20]]))
        again = call("check", *ASKED, "--out", "a")
        assert "11 of 12 rows are in a already" in again.stderr
        assert measured == [(lost["policy"], lost["budget"], lost["index"])]
        assert again.stdout == first.stdout
        assert (folder / "a" / "report.json").read_text() == report
        # Another tolerance asks the same rows; anything else is another run.
        assert "within 99 nats a token: 0.2" in call(
            "check", *ASKED, "--out", "a", "--within", "99"
        ).stdout.replace("\n", " ")
        assert len(measured) == 1
        for more in (["--max-new-tokens", "7"], ["--limit", "2"], ["--option", "sinks=2"]):
            done = call("check", *ASKED, *more, "--out", "a")
            assert done.exit_code == 2
            assert "choose another --out" in done.stderr
        (folder / "p.txt").write_text("\n".join(words(61 + 9 * i, i) for i in range(3)))
        assert "holds a run with prompts_digest=" in call("check", *ASKED, "--out", "a").stderr

    @pytest.mark.slow
    def test_a_changed_profile_has_a_folder_of_its_own(self, folder):
        """And is refused in the folder of the first."""
        asked = ("check", *ASKED, "--profile", "q.json", "--budgets", "0.5")
        for text in ("[0.4, 0.5, 0.6]", "[0.6, 0.5, 0.4]", "[0.4, 0.5, 0.6]"):
            (folder / "q.json").write_text(text)
            done = call(*asked)
            assert done.exit_code == 0, done.output
        assert len(list((folder / "runs" / "check").iterdir())) == 2
        assert call(*asked, "--out", "b").exit_code == 0
        (folder / "q.json").write_text("[0.5, 0.5, 0.5]")
        assert "holds a run with files={'q.json'" in call(*asked, "--out", "b").stderr

    def test_ctrl_c_keeps_what_is_done(self, folder, monkeypatch):
        real = divergence.kept_shares
        seen = []

        def interrupt(cache):
            seen.append(cache)
            if len(seen) == 7:
                raise KeyboardInterrupt
            return real(cache)

        monkeypatch.setattr(divergence, "kept_shares", interrupt)
        done = call("check", *ASKED, "--out", "a")
        assert done.exit_code == 130
        assert "the same command goes on" in done.stderr
        assert len(read_rows(folder / "a" / "rows.jsonl")) == 6
        done = call("check", *ASKED, "--out", "a")
        assert done.exit_code == 0
        assert "6 of 12 rows" in done.stderr
        assert len(seen) == 7 + 6

    def test_a_table_and_the_verdict(self, folder):
        done = call("check", *ASKED, "--out", "a", "--within", "0.000001")
        assert "full cache in int4" in done.stdout
        assert "no budget is within 1e-06 nats a token: snapkv 0.6 is nearest" in done.stdout
        assert "wrote a/report.json" in done.stdout

    def test_a_template_that_refuses_a_conversation(self, folder):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        tokenizer.save_pretrained(folder / "tiny")
        done = call("check", *ASKED)
        assert done.exit_code == 2
        assert "prompt 1: roles must alternate" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("folder")
class TestCalibrate:
    """The command takes the same prompts."""

    ASKED = ("calibrate", "--model", "tiny", "--device", "cpu", "--out", "p.json")

    def profile(self, *more: str) -> Any:
        done = call(*self.ASKED, *more)
        assert done.exit_code == 0, done.output
        return mmkv.Profile.load("p.json")

    def test_own_prompts(self, folder):
        found = self.profile("--prompts", "p.txt", "--policy", "prefixkv", "--budget", "0.4")
        loaded = chat.load("tiny", "cpu")
        inputs = prompts.encode_prompts(loaded, prompts.read_prompts(folder / "p.txt"), None)
        assert found == mmkv.calibrate(loaded.model, inputs, "prefixkv", 0.4)
        assert (
            self.profile("--prompts", "p.txt", "--policy", "prefixkv", "--limit", "2").samples == 2
        )

    @pytest.mark.slow
    def test_condense_on_shipped_prompts_where_no_picture_is_read(self, monkeypatch):
        monkeypatch.setattr(calibration, "_REPLY", 6)
        monkeypatch.setattr(prompts, "_MOST_LETTERS", 700)
        found = self.profile("--limit", "2")
        assert (found.policy, found.samples) == ("condense", 2)
        assert found.curves is not None

    def test_length_reaches_the_suite(self, folder, monkeypatch):
        (folder / "text.txt").write_text(words(900))
        seen = []
        real = calibration.calibrate

        def record(model, samples, *args, **options):
            seen.extend(x["input_ids"].shape[1] for x in samples)
            return real(model, samples, *args, **options)

        monkeypatch.setattr(calibration, "calibrate", record)
        asked = ("--suite", "continuation", "--data", "text.txt", "--policy", "prefixkv")
        for length in (256, 512):
            self.profile(*asked, "--length", str(length))
        assert seen[0] == pytest.approx(0.75 * 256, rel=0.05)
        assert seen[1] == pytest.approx(0.75 * 512, rel=0.05)
