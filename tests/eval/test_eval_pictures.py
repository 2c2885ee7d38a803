"""Suites of pictures read from published files, and the errors for bad files and pictures."""

import pytest
from PIL import Image

from helpers.evaluation import write
from mmkv.eval.samples import DataError, read_image
from mmkv.eval.suites import files
from mmkv.eval.suites.registry import load_suite


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (8, 6), (200, 30, 30)).save(tmp_path / "images" / name)
    return tmp_path


def description(**changes) -> dict:
    turns = [
        {"from": "human", "value": "<image>\nDescribe it."},
        {"from": "gpt", "value": "A red plane."},
    ]
    return {"id": "7", "image": "a.png", "conversations": turns} | changes


def said(text: str, by: str = "human") -> dict:
    return description(conversations=[{"from": by, "value": text}] * 2)


def test_description_reads_the_published_list(folder):
    second = description(id="8", image="b.jpg")
    second["conversations"][0]["value"] = "What is here?\n<image>"
    path = write(folder / "data.json", [description(), second])
    first, other = load_suite("description", path)
    assert (first.id, first.prompt, first.answers) == ("7", "Describe it.", ("A red plane.",))
    assert other.prompt == "What is here?"
    assert not first.note
    assert first.note == other.note == ""
    assert [read_image(x).size for x in other.images] == [(8, 6)]
    assert load_suite("description", folder, limit=1) == [first]


def test_pictures_may_lie_beside_the_file_or_in_a_given_folder(folder):
    path = write(folder / "images" / "data.json", [description()])
    assert load_suite("description", path)[0].images == (folder / "images" / "a.png",)
    moved = write(folder / "data.json", [description(image="images/a.png")])
    (sample,) = load_suite("description", moved, image_folder=folder)
    assert sample.images == (folder / "images" / "a.png",)
    with pytest.raises(DataError, match="nowhere"):
        load_suite("description", moved, image_folder=folder / "nowhere")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("text", r"entry 1: expected an object, got .text."),
        (description(image=None), r"entry 1: field 'image': expected text, got null"),
        ({"id": "1", "conversations": description()["conversations"]}, r"'image': is missing"),
        (description(conversations=[]), r"entry 1: field 'conversations'"),
        (
            said("x", "gpt"),
            r"entry 1: conversations\[0\]: field 'from': expected 'human', got 'gpt'",
        ),
        (said("<image>\n"), r"conversations\[0\]: field 'value': has no text"),
        (said("a <image> b"), r"conversations\[0\]: field 'value': expected one <image>"),
        (said("a \ud800"), r"field 'value': has invalid characters"),
    ],
)
def test_description_error_names_file_entry_and_field(folder, entry, message):
    path = write(folder / "data.json", [description(), entry])
    with pytest.raises(DataError, match=message) as caught:
        load_suite("description", path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [{}, [], "text", 3])
@pytest.mark.parametrize("suite", ["description", "mmvet"])
def test_file_of_wrong_shape_raises(folder, suite, content):
    with pytest.raises(DataError, match=r"data\.json: expected"):
        load_suite(suite, write(folder / "data.json", content))


def test_missing_or_ambiguous_file_raises(folder, monkeypatch):
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
    "name", ["../secret.png", "/etc/passwd", "x/../../s.png", "C:\\a.png", "..\\s.png", "a\0.png"]
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


def test_a_bad_picture_is_refused_with_its_entry(folder):
    (folder / "images" / "bad.png").write_bytes(b"no picture")
    path = write(folder / "data.json", [description(), description(image="bad.png")])
    with pytest.raises(DataError, match=r"entry 1: field 'image': .*bad\.png.*not a picture"):
        load_suite("description", path)


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
        ({"answer": 3}, r"field 'answer': expected text, got 3"),
        ({"answer": "<OR>"}, r"field 'answer': has no text"),
        ({"capability": "ocr"}, r"field 'capability': expected a list of texts, got .ocr."),
        ({"capability": ["ocr", 1]}, r"field 'capability': item 1: expected text"),
    ],
)
def test_mmvet_error_names_file_entry_and_field(folder, change, message):
    entry = {"imagename": "a.png", "question": "What?", "answer": "two", "capability": ["ocr"]}
    path = write(folder / "mm-vet.json", {"v1_0": entry | change})
    with pytest.raises(DataError, match=r"mm-vet\.json: " + ".*" + message):
        load_suite("mmvet", path)
