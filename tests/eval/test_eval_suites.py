"""Suites of texts read from published files, and the errors for bad ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.commands import complaint
from helpers.evaluation import make_tokenizer, write
from mmkv.chat import Loaded
from mmkv.eval.prompts import Encoder
from mmkv.eval.samples import DataError, Sample
from mmkv.eval.suites import files, longbench, registry
from mmkv.eval.suites.registry import load_suite

LONGBENCH = Path(__file__).parents[3] / "shared" / "data" / "longbench"


def write_lines(path: Path, *entries) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def longbench_entry(**changes) -> dict:
    made = {"input": "Who?", "context": "Some {context} with {input} and {0} braces."}
    made |= {"answers": ["Ann", "Ann B."], "length": 9, "dataset": "qasper", "language": "en"}
    return made | {"all_classes": None, "_id": "id0"} | changes


def test_longbench_fills_the_benchmarks_prompts_and_leaves_braces_alone(tmp_path):
    write_lines(tmp_path / "qasper.jsonl", longbench_entry(), longbench_entry(input="{context}"))
    write(tmp_path / longbench.PROMPTS_FILE, {"qasper": "{{x}} {context}|{input}"})
    write(tmp_path / longbench.LENGTHS_FILE, {"qasper": 99})
    first, second = load_suite("longbench", tmp_path)
    assert first.prompt == "{x} Some {context} with {input} and {0} braces.|Who?"
    assert second.prompt.endswith("braces.|{context}")
    assert (first.id, second.id) == ("qasper/id0", "qasper/id0")
    assert first.answers == ("Ann", "Ann B.")
    assert (first.max_new_tokens, first.metric, first.chat) == (99, "token_f1", True)
    assert first.truncate
    assert not first.note


def test_longbench_without_its_prompts_says_that_it_does_not_compare(tmp_path):
    write_lines(tmp_path / "qasper.jsonl", longbench_entry())
    (sample,) = load_suite("longbench", tmp_path / "qasper.jsonl")
    assert sample.note
    assert sample.note == longbench.OWN_WORDING
    assert "Who?" in sample.prompt
    write(tmp_path / longbench.PROMPTS_FILE, {"qasper": "{context} {input}"})
    assert load_suite("longbench", tmp_path)[0].note  # its lengths are still missing


def test_longbench_tasks_take_turns_and_can_be_selected(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("lcc", "trec", "qasper"):
        classes = ["Date", "City"] if name == "trec" else None
        how = {"dataset": name, "all_classes": classes, "input": ""}
        entries = [longbench_entry(_id=f"{i}", **how) for i in range(3)]
        write_lines(tmp_path / "data" / f"{name}.jsonl", *entries)
    found = load_suite("longbench", tmp_path, limit=5)
    assert [s.id for s in found] == ["qasper/0", "trec/0", "lcc/0", "qasper/1", "trec/1"]
    trec = found[1]
    assert (trec.metric, trec.classes) == ("classification", ("Date", "City"))
    assert (trec.chat, trec.first_line) == (False, True)
    assert {s.task for s in load_suite("longbench", tmp_path, tasks=["lcc"])} == {"lcc"}
    with pytest.raises(DataError, match=r"has no musique\.jsonl"):
        load_suite("longbench", tmp_path, tasks=["lcc", "musique"])
    with pytest.raises(ValueError, match="unknown task 'nothing'"):
        load_suite("longbench", tmp_path, tasks=["nothing"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], r"line 2: expected an object, got \[\]"),
        (
            longbench_entry(answers=[]),
            r"line 2: field 'answers': expected a list of texts, got \[\]",
        ),
        (longbench_entry(answers=["x", None]), r"line 2: field 'answers': item 1: .* null"),
        (longbench_entry(context=""), r"line 2: field 'context': is empty"),
        (longbench_entry(input=True), r"line 2: field 'input': .* got true"),
        (longbench_entry(dataset="lcc"), r"line 2: field 'dataset': expected 'qasper'"),
    ],
)
def test_longbench_error_names_file_line_and_field(tmp_path, entry, message):
    path = write_lines(tmp_path / "qasper.jsonl", longbench_entry(), entry)
    with pytest.raises(DataError, match=rf"qasper\.jsonl: {message}"):
        load_suite("longbench", path)
    assert len(load_suite("longbench", path, limit=1)) == 1


def test_lines_of_too_many_bytes_and_empty_files_are_refused(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "qasper.jsonl", longbench_entry())
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 20)
    with pytest.raises(DataError, match="line 1: has more than 20 bytes"):
        load_suite("longbench", path)
    path.write_text("\n")
    with pytest.raises(DataError, match="has no entries"):
        load_suite("longbench", path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (longbench.PROMPTS_FILE, {"qasper": "{context} {other}"}, r"'qasper': expected only"),
        (longbench.PROMPTS_FILE, {"qasper": "{context.__class__}"}, r"'qasper': expected only"),
        (longbench.PROMPTS_FILE, {"qasper": "{context!r}"}, r"'qasper': expected only"),
        (longbench.PROMPTS_FILE, {"qasper": "{context"}, r"entry 'qasper'"),
        (longbench.PROMPTS_FILE, {"lcc": "{context}"}, r"entry 'qasper': is missing"),
        (longbench.PROMPTS_FILE, {"qasper": 3}, r"entry 'qasper': expected str, got 3"),
        (longbench.PROMPTS_FILE, [], r"expected an object"),
        (longbench.LENGTHS_FILE, {"qasper": "64"}, r"entry 'qasper': expected int, got '64'"),
        (longbench.LENGTHS_FILE, {"qasper": 0}, r"entry 'qasper': must be at least 1, got 0"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path, name, content, message):
    write_lines(tmp_path / "qasper.jsonl", longbench_entry())
    write(tmp_path / name, content)
    with pytest.raises(DataError, match=rf"{name}: .*{message}|{name}: {message}"):
        load_suite("longbench", tmp_path)


def test_the_benchmarks_own_prompt_files_serve_every_task(tmp_path):
    if not LONGBENCH.is_dir():
        pytest.skip(f"the benchmark's prompt files are not at {LONGBENCH}")
    for name in (longbench.PROMPTS_FILE, longbench.LENGTHS_FILE):
        (tmp_path / name).write_bytes((LONGBENCH / name).read_bytes())
    for task in longbench.TASKS:
        entry = longbench_entry(dataset=task, context="CONTEXT", input="INPUT", all_classes=["x"])
        write_lines(tmp_path / f"{task}.jsonl", entry)
    found = {s.task: s for s in load_suite("longbench", tmp_path)}
    assert list(found) == list(longbench.TASKS)
    lengths = json.loads((tmp_path / longbench.LENGTHS_FILE).read_text())
    unasked = ("gov_report", "multi_news", "passage_count", "lcc")
    for task, sample in found.items():
        assert not sample.note
        assert sample.prompt.count("CONTEXT") == 1
        assert sample.prompt.count("INPUT") == (task not in unasked), task
        assert sample.max_new_tokens == lengths[task]
    assert {task for task, s in found.items() if s.first_line} == {"trec", "triviaqa", "samsum"}
    plain = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {task for task, s in found.items() if not s.chat} == plain


def test_long_prompts_lose_their_middle():
    text = " ".join(f"w{5 + i % 80}" for i in range(100))
    sample = Sample(id="a", suite="b", task="c", prompt=text, truncate=True, max_new_tokens=8)
    for room, kept in ((100, (50, 50)), (80, (40, 40)), (65, (32, 32)), (64, (32, 32))):
        found = Encoder(make_tokenizer(), max_length=room + 8 + 32).fit(sample)
        words = text.split()
        assert found.replace(" ", "") == "".join(words[: kept[0]] + words[-kept[1] :]), room
    with pytest.raises(
        ValueError, match=r"sample a: 103 tokens leave fewer than 64 for its prompt"
    ):
        Encoder(make_tokenizer(), max_length=63 + 8 + 32).fit(sample)
    whole = replace(sample, truncate=False)
    assert Encoder(make_tokenizer(), max_length=48).fit(whole) == text


@pytest.mark.parametrize(
    ("suite", "source", "target"),
    [("cnn_dailymail", "article", "highlights"), ("xsum", "document", "summary")],
)
def test_summaries_are_read_and_errors_named(tmp_path, suite, source, target):
    good = {source: "Long text.", target: " Short. ", "id": "x1"}
    path = write_lines(tmp_path / f"{suite}.jsonl", good, {source: "More."} | {target: "m"})
    first, second = load_suite(suite, path)
    assert (first.id, second.id) == ("x1", "2")
    assert first.prompt.startswith("Long text.")
    assert (first.answers, first.metric) == (("Short.",), "rouge_2")
    write_lines(path, good, {source: "Long text."})
    with pytest.raises(DataError, match=rf"{suite}\.jsonl: line 2: field '{target}': is missing"):
        load_suite(suite, tmp_path)


def test_a_haystack_of_words_holds_the_needle_at_its_depth(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "hay.txt").write_text("hay " * 1200, encoding="utf-8")
    found = load_suite("needle", tmp_path)
    assert {s.tags[1] for s in found} == {"length=500", "length=1000"}
    for sample in found:
        text = sample.prompt.split("\n\n")[0]
        before, after = text.split(sample.answers[0])
        depth = before.count("hay") / (before.count("hay") + after.count("hay"))
        assert f"depth={depth}" in sample.tags
    (tmp_path / "hay.txt").write_text("hay " * 10)
    with pytest.raises(DataError, match="got 10"):
        load_suite("needle", tmp_path / "hay.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "nothing"}, "unknown suite 'nothing'.*description"),
        ({"name": "needle", "limit": 0}, "limit must be at least 1, got 0"),
        ({"name": "needle", "tasks": ["qasper"]}, "'needle' has no tasks"),
        ({"name": "mmvet", "image_folder": Path("a")}, "a: .*'mmvet' with drawings reads no pict"),
        ({"name": "ruler", "image_folder": Path("a")}, "a: .*'ruler' with novels reads no picture"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_suite(**arguments)


class TestWhatTheModelReads:
    """Data that a model can read is chosen where nobody names any."""

    @pytest.mark.parametrize(
        ("suite", "model", "data"),
        [
            ("ruler", "smollm2-vision", "novels"),
            ("needle", "smollm2-vision", "drawings"),
            ("needle", "a/folder", "novels"),
            ("description", "smollm2", "drawings"),
            ("xsum", "smollm2-vision", None),
            ("nonsense", "smollm2", None),
        ],
    )
    def test_default_data(self, suite, model, data):
        assert registry.default_data(suite, model) == data

    def test_novels_are_a_haystack(self):
        (sample,) = load_suite("ruler", "novels", limit=1, length=600, tasks=["niah_single_2"])
        assert len(sample.prompt.split()) > 400
        assert all(answer in sample.prompt for answer in sample.answers)

    @pytest.mark.parametrize(
        "words",
        ["eval description --limit 1", "calibrate --suite mmvet", "plot --data drawings"],
    )
    def test_pictures_for_a_text_model(self, words, monkeypatch, capsys, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("mmkv.chat.load", lambda *_: Loaded("mine", None, None))
        said = complaint(capsys, *words.split())
        assert "shows pictures, and model 'mine' reads text only: use prompts, continuation" in said
