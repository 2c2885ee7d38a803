"""Suites read from published files, and the errors for bad ones."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest
from mmkv.eval import files, longbench, samples
from mmkv.eval.suites import DataError, Sample, load_suite, open_images, suite_notes
from PIL import Image

LONGBENCH = Path(__file__).parents[2] / "shared" / "data" / "longbench"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (8, 6), (200, 30, 30)).save(tmp_path / "images" / name)
    return tmp_path


def write(path: Path, content) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_lines(path: Path, *entries) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def description(**changes) -> dict:
    turns = [
        {"from": "human", "value": "<image>\nDescribe it."},
        {"from": "gpt", "value": "A red plane."},
    ]
    return {"id": "7", "image": "a.png", "conversations": turns} | changes


def longbench_entry(**changes) -> dict:
    return {
        "input": "Who?",
        "context": "Some {context} with {input} and {0} braces.",
        "answers": ["Ann", "Ann B."],
        "length": 9,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "id0",
    } | changes


# Published pictures ------------------------------------------------------------------------------


def test_description_reads_the_published_list(folder):
    second = description(id="8", image="b.jpg")
    second["conversations"][0]["value"] = "What is here?\n<image>"
    path = write(folder / "data.json", [description(), second])
    first, other = load_suite("description", path)
    assert (first.id, first.prompt, first.answers) == ("7", "Describe it.", ("A red plane.",))
    assert other.prompt == "What is here?"
    assert first.comparable
    assert suite_notes([first, other]) == ()
    assert [image.size for image in open_images(other)] == [(8, 6)]
    assert load_suite("description", folder, limit=1) == [first]


def test_pictures_may_lie_beside_the_file_or_in_a_given_folder(folder):
    path = write(folder / "images" / "data.json", [description()])
    assert load_suite("description", path)[0].images == (folder / "images" / "a.png",)
    moved = write(folder / "data.json", [description(image="images/a.png")])
    assert load_suite("description", moved, image_folder=folder)[0].images == (
        folder / "images" / "a.png",
    )
    with pytest.raises(DataError, match="nowhere"):
        load_suite("description", moved, image_folder=folder / "nowhere")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("text", r"entry 1: expected an object, got text"),
        (description(image=None), r"entry 1: field 'image': expected text, got null"),
        ({"id": "1", "conversations": description()["conversations"]}, r"'image': is missing"),
        (description(conversations=[]), r"entry 1: field 'conversations'"),
        (
            description(conversations=[{"from": "gpt", "value": "x"}] * 2),
            r"entry 1: conversations\[0\]: field 'from': expected 'human', got 'gpt'",
        ),
        (
            description(conversations=[{"from": "human", "value": "<image>\n"}] * 2),
            r"conversations\[0\]: field 'value': is empty",
        ),
        (
            description(conversations=[{"from": "human", "value": "a <image> b"}] * 2),
            r"conversations\[0\]: field 'value': expected one <image>",
        ),
        (
            description(conversations=[{"from": "human", "value": "a \ud800"}] * 2),
            r"field 'value': has characters that are none",
        ),
    ],
)
def test_description_names_file_entry_and_field(folder, entry, message):
    path = write(folder / "data.json", [description(), entry])
    with pytest.raises(DataError, match=message) as caught:
        load_suite("description", path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [{}, [], "text", 3])
@pytest.mark.parametrize("suite", ["description", "mmvet"])
def test_a_file_of_another_shape_is_refused(folder, suite, content):
    with pytest.raises(DataError, match=r"data\.json: expected"):
        load_suite(suite, write(folder / "data.json", content))


@pytest.mark.parametrize("raw", [b"", b"[{]", b'["\xff"]', b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(folder, raw):
    (folder / "data.json").write_bytes(raw)
    with pytest.raises(DataError, match=r"data\.json: (not a JSON file|is nested)"):
        load_suite("description", folder / "data.json")


def test_missing_and_doubtful_files_are_refused(folder, monkeypatch):
    with pytest.raises(DataError, match="no such file"):
        load_suite("description", folder / "nothing.json")
    with pytest.raises(DataError, match="found 0"):
        load_suite("description", folder)
    write(folder / "one.json", [description()])
    write(folder / "two.json", [description()])
    with pytest.raises(DataError, match="found 2"):
        load_suite("description", folder)
    with pytest.raises(DataError, match="more than 10"):
        files.read_json(folder / "one.json", limit=10)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "/etc/passwd",
        "x/../../secret.png",
        "C:\\a.png",
        "..\\secret.png",
        "a\0.png",
    ],
)
def test_pictures_outside_the_folder_are_refused(folder, name):
    Image.new("RGB", (4, 4)).save(folder / "secret.png")
    path = write(folder / "data.json", [description(image=name)])
    with pytest.raises(DataError, match=r"data\.json: entry 0: field 'image': (expected|must)"):
        load_suite("description", path)


def test_a_link_out_of_the_folder_is_refused(folder):
    Image.new("RGB", (4, 4)).save(folder / "secret.png")
    (folder / "images" / "link.png").symlink_to(folder / "secret.png")
    (folder / "images" / "loop.png").symlink_to(folder / "images" / "loop.png")
    path = write(folder / "data.json", [description(image="link.png")])
    with pytest.raises(DataError, match="leads out of the image folder"):
        load_suite("description", path)
    write(path, [description(image="loop.png")])
    with pytest.raises(DataError, match="field 'image'"):
        load_suite("description", path)


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; its data are missing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header
    return start + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\0IDAT\x35\xaf\x06\x1e"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"no picture", "not a JPEG, PNG"),
        (b"", "not a JPEG, PNG"),
        (png_of(8000, 8000), "8000 x 8000 pixels"),
        (png_of(12_000, 8000), "decompression bomb"),
        (png_of(60_000, 60_000), "decompression bomb"),
    ],
)
def test_bad_pictures_are_refused_before_they_are_decoded(folder, raw, message):
    (folder / "images" / "bad.png").write_bytes(raw)
    path = write(folder / "data.json", [description(), description(image="bad.png")])
    with pytest.raises(DataError, match=rf"entry 1: field 'image': .*bad\.png.*{message}"):
        load_suite("description", path)


def test_a_picture_that_breaks_in_decoding_names_its_file(folder):
    (folder / "images" / "cut.png").write_bytes(png_of(64, 64))
    path = write(folder / "data.json", [description(image="cut.png")])
    (sample,) = load_suite("description", path)
    with pytest.raises(DataError, match=r"cut\.png"):
        open_images(sample)


def test_a_picture_of_too_many_bytes_is_refused(folder, monkeypatch):
    monkeypatch.setattr(samples, "MAX_IMAGE_BYTES", 20)
    with pytest.raises(DataError, match="more than 20"):
        load_suite("description", write(folder / "data.json", [description()]))


def test_mmvet_reads_both_published_shapes(folder):
    entry = {"question": "What?", "answer": "two<OR>2 <AND> three", "imagesource": "x"}
    tagged = entry | {"imagename": "a.png", "capability": ["ocr", "math"]}
    (sample,) = load_suite("mmvet", write(folder / "mm-vet.json", {"v1_0": tagged}))
    assert (sample.id, sample.tags, sample.prompt) == ("v1_0", ("ocr", "math"), "What?")
    assert sample.answers == ("two", "2 and three")
    assert "GPT-4" in sample.note
    listed = [entry | {"image": "a.png"}, entry | {"image": "b.jpg"}]
    found = load_suite("mmvet", write(folder / "list.json", listed))
    assert [s.id for s in found] == ["0", "1"]
    assert found[1].images == (folder / "images" / "b.jpg",)
    assert found[0].tags == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"imagename": "none.png"}, r"entry 'v1_0': field 'imagename': no picture"),
        ({"question": ""}, r"entry 'v1_0': field 'question': is empty"),
        ({"answer": 3}, r"field 'answer': expected text, got a number"),
        ({"answer": "<OR>"}, r"field 'answer': is empty"),
        ({"capability": "ocr"}, r"field 'capability': expected a list of texts, got text"),
        ({"capability": ["ocr", 1]}, r"field 'capability': item 1: expected text"),
    ],
)
def test_mmvet_names_file_entry_and_field(folder, change, message):
    entry = {"imagename": "a.png", "question": "What?", "answer": "two", "capability": ["ocr"]}
    path = write(folder / "mm-vet.json", {"v1_0": entry | change})
    with pytest.raises(DataError, match=r"mm-vet\.json: " + ".*" + message):
        load_suite("mmvet", path)


# Published texts ---------------------------------------------------------------------------------


def test_longbench_fills_the_benchmarks_prompts_and_leaves_braces_alone(folder):
    write_lines(folder / "qasper.jsonl", longbench_entry(), longbench_entry(input="{context}"))
    write(folder / longbench.PROMPTS_FILE, {"qasper": "{{x}} {context}|{input}"})
    write(folder / longbench.LENGTHS_FILE, {"qasper": 99})
    first, second = load_suite("longbench", folder)
    assert first.prompt == "{x} Some {context} with {input} and {0} braces.|Who?"
    assert second.prompt.endswith("braces.|{context}")
    assert (first.id, second.id) == ("qasper/id0", "qasper/id0#2")
    assert first.answers == ("Ann", "Ann B.")
    assert (first.max_new_tokens, first.metric, first.chat) == (99, "token_f1", True)
    assert first.truncate
    assert first.comparable


def test_longbench_without_its_prompts_says_that_it_does_not_compare(folder):
    write_lines(folder / "qasper.jsonl", longbench_entry())
    (sample,) = load_suite("longbench", folder / "qasper.jsonl")
    assert not sample.comparable
    assert suite_notes([sample]) == (longbench.OWN_WORDING,)
    assert "Who?" in sample.prompt
    write(folder / longbench.PROMPTS_FILE, {"qasper": "{context} {input}"})
    assert not load_suite("longbench", folder)[0].comparable  # its lengths are still missing


def test_longbench_tasks_take_turns_and_can_be_selected(folder):
    (folder / "data").mkdir()
    for name in ("lcc", "trec", "qasper"):
        classes = ["Date", "City"] if name == "trec" else None
        entries = [
            longbench_entry(dataset=name, all_classes=classes, _id=f"{i}", input="")
            for i in range(3)
        ]
        write_lines(folder / "data" / f"{name}.jsonl", *entries)
    found = load_suite("longbench", folder, limit=5)
    assert [s.id for s in found] == ["qasper/0", "trec/0", "lcc/0", "qasper/1", "trec/1"]
    trec = found[1]
    assert (trec.metric, trec.classes) == ("classification", ("Date", "City"))
    assert (trec.chat, trec.first_line) == (False, True)
    assert {s.task for s in load_suite("longbench", folder, tasks=["lcc"])} == {"lcc"}
    with pytest.raises(DataError, match=r"has no musique\.jsonl"):
        load_suite("longbench", folder, tasks=["lcc", "musique"])
    with pytest.raises(ValueError, match=r"got \['nothing'\]"):
        load_suite("longbench", folder, tasks=["nothing"])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], r"line 2: expected an object, got a list"),
        (longbench_entry(answers=[]), r"line 2: field 'answers': is an empty list"),
        (longbench_entry(answers=["x", None]), r"line 2: field 'answers': item 1: .* null"),
        (longbench_entry(context=""), r"line 2: field 'context': is empty"),
        (longbench_entry(input=True), r"line 2: field 'input': .* a truth value"),
        (longbench_entry(dataset="lcc"), r"line 2: field 'dataset': expected 'qasper'"),
    ],
)
def test_longbench_names_file_line_and_field(folder, entry, message):
    path = write_lines(folder / "qasper.jsonl", longbench_entry(), entry)
    with pytest.raises(DataError, match=rf"qasper\.jsonl: {message}"):
        load_suite("longbench", path)
    assert len(load_suite("longbench", path, limit=1)) == 1


def test_longbench_needs_the_classes_of_trec(folder):
    path = write_lines(folder / "trec.jsonl", longbench_entry(dataset="trec"))
    with pytest.raises(DataError, match=r"line 1: field 'all_classes': .* null"):
        load_suite("longbench", path)


@pytest.mark.parametrize("raw", [b"{]\n", b'{"a": "\xff"}\n', b'{"a":' + b"[" * 100_000 + b"\n"])
def test_a_line_that_is_no_json_is_named(folder, raw):
    good = json.dumps(longbench_entry()).encode() + b"\n\n"
    (folder / "qasper.jsonl").write_bytes(good + raw)
    with pytest.raises(DataError, match=r"qasper\.jsonl: line 3: (not a JSON|is nested)"):
        load_suite("longbench", folder)


def test_lines_of_too_many_bytes_and_empty_files_are_refused(folder, monkeypatch):
    path = write_lines(folder / "qasper.jsonl", longbench_entry())
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
def test_bad_prompt_files_are_named(folder, name, content, message):
    write_lines(folder / "qasper.jsonl", longbench_entry())
    write(folder / name, content)
    with pytest.raises(DataError, match=rf"{name}: .*{message}|{name}: {message}"):
        load_suite("longbench", folder)


def test_the_benchmarks_own_prompt_files_serve_every_task(folder):
    if not LONGBENCH.is_dir():
        pytest.skip(f"the benchmark's prompt files are not at {LONGBENCH}")
    for name in (longbench.PROMPTS_FILE, longbench.LENGTHS_FILE):
        (folder / name).write_bytes((LONGBENCH / name).read_bytes())
    for task in longbench.TASKS:
        entry = longbench_entry(dataset=task, context="CONTEXT", input="INPUT", all_classes=["x"])
        write_lines(folder / f"{task}.jsonl", entry)
    found = {s.task: s for s in load_suite("longbench", folder)}
    assert list(found) == list(longbench.TASKS)
    lengths = json.loads((folder / longbench.LENGTHS_FILE).read_text())
    unasked = ("gov_report", "multi_news", "passage_count", "lcc")
    for task, sample in found.items():
        assert sample.comparable
        assert sample.prompt.count("CONTEXT") == 1
        assert sample.prompt.count("INPUT") == (task not in unasked), task
        assert sample.max_new_tokens == lengths[task]
    assert {task for task, s in found.items() if s.first_line} == {"trec", "triviaqa", "samsum"}
    assert {task for task, s in found.items() if not s.chat} == {
        *("trec", "triviaqa", "samsum", "lcc", "repobench-p")
    }


def test_long_prompts_lose_their_middle():
    assert longbench.truncate_middle([1, 2, 3, 4, 5], 4) == [1, 2, 4, 5]
    assert longbench.truncate_middle([1, 2, 3, 4, 5], 3) == [1, 5]
    assert longbench.truncate_middle([1, 2, 3], 3) == [1, 2, 3]
    with pytest.raises(ValueError, match="got 1"):
        longbench.truncate_middle([1, 2, 3], 1)


@pytest.mark.parametrize(
    ("suite", "source", "target"),
    [("cnn_dailymail", "article", "highlights"), ("xsum", "document", "summary")],
)
def test_summaries_are_read_and_errors_named(folder, suite, source, target):
    good = {source: "Long text.", target: " Short. ", "id": "x1"}
    path = write_lines(folder / f"{suite}.jsonl", good, {source: "More."} | {target: "m"})
    first, second = load_suite(suite, path)
    assert (first.id, second.id) == ("x1", "2")
    assert first.prompt.startswith("Long text.")
    assert (first.answers, first.metric) == (("Short.",), "rouge_2")
    write_lines(path, good, {source: "Long text."})
    with pytest.raises(DataError, match=rf"{suite}\.jsonl: line 2: field '{target}': is missing"):
        load_suite(suite, folder)


def test_a_haystack_of_words_holds_the_needle_at_its_depth(folder):
    (folder / "hay.txt").write_text("hay " * 1200, encoding="utf-8")
    found = load_suite("needle", folder / "hay.txt")
    assert {s.tags[1] for s in found} == {"length=500", "length=1000"}
    for sample in found:
        text = sample.prompt.split("\n\n")[0]
        before, after = text.split(sample.answers[0])
        depth = before.count("hay") / (before.count("hay") + after.count("hay"))
        assert f"depth={depth}" in sample.tags
    (folder / "hay.txt").write_text("hay " * 10)
    with pytest.raises(DataError, match="got 10"):
        load_suite("needle", folder)


# Requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "nothing"}, "description.*got 'nothing'"),
        ({"name": "xsum", "limit": 0}, "limit must be at least 1, got 0"),
        ({"name": "xsum", "tasks": ["qasper"]}, "'xsum' has no tasks"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_suite(**arguments)


def test_samples_cannot_be_changed():
    sample = Sample(id="1", suite="xsum", task="xsum", prompt="x")
    with pytest.raises(AttributeError):
        sample.prompt = "y"
