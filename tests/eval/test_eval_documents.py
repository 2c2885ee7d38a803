"""The suites `documents` and `continuation`, and the texts that are made from packages."""

import random
import shutil
import struct
import subprocess
import zlib

import pytest

from helpers.evaluation import letters
from mmkv.eval import corpus
from mmkv.eval.samples import DataError, words
from mmkv.eval.suites import continuation, documents
from mmkv.eval.suites.registry import load_suite


def paragraph(name: str, number: int) -> str:
    """Three sentences of ten words, each with a word of its own."""
    letters = "abcdefghij"
    own = "".join(letters[int(digit)] for digit in f"{number:06}")
    return " ".join(
        f"Sentence {name} {number} tells us{i} that {own}{letters[i]} came home late."
        for i in range(3)
    )


@pytest.fixture
def folder(tmp_path):
    """Three long documents in two folders, and a short one."""
    for name, number in (("a/one", 90), ("a/two", 90), ("b/three", 90), ("b/short", 3)):
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(paragraph(name, i) for i in range(number)))
    return tmp_path


def test_tasks_take_turns_and_are_the_same_again(folder):
    samples = load_suite("documents", folder, limit=10)
    assert [s.task for s in samples] == [*documents.TASKS, *documents.TASKS, "text", "summary"]
    assert samples == load_suite("documents", folder, limit=10)
    assert samples[:8] == load_suite("documents", folder, limit=8)
    assert len({s.id for s in samples}) == 10
    needles = load_suite("documents", folder, tasks=["needle"], limit=2)
    assert needles == [samples[3], samples[7]]


def test_folders_take_turns(folder):
    texts = load_suite("documents", folder, tasks=["text"], limit=3)
    assert [s.tags for s in texts] == [("folder=a",), ("folder=b",), ("folder=a",)]
    assert len({s.id.partition("/")[2] for s in texts}) == 3
    assert not any("short" in s.id for s in texts)
    (alone,) = load_suite("documents", folder / "a" / "one.txt", tasks=["text"], limit=1)
    assert alone.tags == ()


def test_text_goes_on_where_the_prompt_ends(folder):
    for sample in load_suite("documents", folder, tasks=["text"], limit=3, length=400):
        text = (folder / sample.id.partition("/")[2]).read_text()
        (answer,) = sample.answers
        assert f"\n{sample.prompt} {answer}" in f"\n{text}"  # it begins with a paragraph
        assert (words(sample.prompt), words(answer)) == (400, documents.FOLLOWS)
        assert words(sample.asked) == pytest.approx(50, abs=2)
        assert not sample.chat
        assert sample.metric is None


@pytest.mark.parametrize("task", ["summary", "question"])
def test_a_document_and_then_its_question(folder, task):
    samples = load_suite("documents", folder, tasks=[task], limit=5, length=400)
    for sample in samples:
        context = sample.prompt.removesuffix(sample.asked)
        assert context.endswith("late.\n\n")
        assert 380 < words(context) <= 400
        assert "Sentence" not in sample.question
        assert sample.answers == ()  # the model's own reply is
        assert sample.chat
    asked = [s.question for s in samples]
    assert len(set(asked)) == (1 if task == "summary" else 5)


def test_a_quoted_word_is_none_that_is_repeated():
    text = "people window bright people window bright lonely street street people"
    for seed in range(5):
        made = documents._question(text, "", 2, random.Random(seed))
        assert made.question.endswith('the word "lonely".')


def test_needles_lie_at_every_depth(folder):
    samples = load_suite("documents", folder, tasks=["needle"], limit=5, length=400)
    for depth, sample in zip(documents.DEPTHS, samples, strict=True):
        (code,) = sample.answers
        before, needle, _ = sample.prompt.partition("The access code for the ")
        assert needle
        assert sample.prompt.count(code) == 1
        assert code not in sample.question
        context = len(sample.prompt.removesuffix(sample.question))
        assert len(before) / context == pytest.approx(depth, abs=0.06)
        assert before == "" or before.endswith("late. ")
        assert f"depth={depth}" in sample.tags
        assert sample.metric == "contains"
    assert len({s.answers for s in samples}) == 5


def test_a_sentence_ends_neither_at_a_title_nor_at_a_page():
    text = 'She met Mrs. Dashwood there. He asked "Never?" [Op. Cit., p. 9] as did Mrs. Smith'
    assert documents._whole(text) == 'She met Mrs. Dashwood there. He asked "Never?"'
    assert documents._whole("It rained. " + "and " * 9) == "It rained. " + "and " * 9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tasks": ["poem"]}, ValueError, "unknown task 'poem'.*text"),
        ({"length": 5000}, DataError, "no .txt file of 5128 tokens or more; python -m"),
        ({"data": "builtin"}, ValueError, "--data names a folder, such as python -m mmkv.eval.c"),
        ({"data": "nowhere"}, DataError, "nowhere: no such file"),
    ],
)
def test_what_cannot_be_is_said(folder, change, error, message):
    with pytest.raises(error, match=message):
        load_suite("documents", **{"data": folder} | change)


@pytest.fixture
def texts(tmp_path):
    """Two long texts and a short one, of lines of ten words; a file that is no text."""
    for name, lines in (("b.txt", 900), ("deep/a.md", 400), ("short.py", 3)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "\n".join(" ".join(f"w{10 * i + j}" for j in range(10)) for i in range(lines))
        )
    (tmp_path / "c.bin").write_bytes(b"\xff" * 9000)
    return tmp_path


@pytest.mark.parametrize("count", [words, letters])
def test_a_text_is_cut_by_tokens_between_words(texts, count):
    samples = load_suite("continuation", texts, length=1000, count=count)
    assert [s.id for s in samples] == ["b.txt", "deep/a.md"]
    for sample in samples:
        text = (texts / sample.id).read_text()
        (answer,) = sample.answers
        assert text.startswith(f"{sample.prompt} {answer}")
        assert count(sample.prompt) == pytest.approx(750, abs=2)
        assert count(f"{sample.prompt} {answer}") == pytest.approx(1000, abs=2)
        assert count(sample.asked) == pytest.approx(94, abs=3)
        assert "\n" not in text[len(sample.prompt) - 2 : len(sample.prompt) + 3]


def test_a_limit_and_one_file(texts):
    assert len(load_suite("continuation", texts, length=1000, limit=1)) == 1
    assert [s.id for s in load_suite("continuation", texts / "b.txt", length=256)] == ["b.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short.py", "no text of 1024 tokens or more"),
        ("none.txt", "none.txt: no such file"),
        ("c.bin", "not a text file in UTF-8"),
    ],
)
def test_what_is_no_text_is_said(texts, name, message):
    with pytest.raises(DataError, match=message):
        load_suite("continuation", texts / name)


@pytest.mark.slow
def test_the_standard_library_without_its_tests():
    found = continuation.library()
    assert 20 < len(found) < 200
    assert "test" not in {part for name in found for part in name.split("/")}
    assert all("site-packages" not in path.parts for path in found.values())
    names = {s.id for s in load_suite("continuation", "stdlib", length=400)}
    assert names
    assert names <= set(found)


def r_database(*texts: list[str | None]) -> bytes:
    """R's character vectors, each compressed, in its serialization format of version 3."""
    found = b""
    for lines in texts:
        data = b"X\n" + struct.pack(">IIII", 3, 0x040201, 0x030500, 5) + b"UTF-8"
        data += struct.pack(">II", 16, len(lines))
        for line in lines:
            raw = b"" if line is None else line.encode()
            data += struct.pack(">Ii", 0x40009, -1 if line is None else len(raw)) + raw
        found += struct.pack(">I", len(data)) + zlib.compress(data)
    return found


PAGE = """<html><head><title>Not shown at all, ever</title><link rel="up" href="{up}" />{more}
</head>
<body><p id="title"><a href="x">Left out by its id</a></p>
<ul class="docnav"><li>Go to the <ul><li>next page here</li></ul> or back again to others</li></ul>
<h2 class="title">9.1. About the {name} page</h2><div class="para">A <code>command</code>
  &amp; its output.<sup>[1]</sup></div><pre>$ ls -l here and there</pre>
<div class="para">{text}</div>
<table><tr><td>Cells of a table are no prose.</td></tr></table><p>Short.</p></body></html>"""


def package(folder, name: str, files: dict[str, bytes | str]):
    """A `.deb` of these files."""
    root = folder / f"root-{name}"
    files |= {
        "DEBIAN/control": f"Package: {name}\nVersion: 1.5-2\nArchitecture: all\n"
        "Maintainer: A <a@b.c>\nDescription: Texts\n"
    }
    files |= {f"usr/share/doc/{name}/copyright": "Files: *\nCopyright: A\nLicense: GPL-9+\n"}
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    command = ["dpkg-deb", "--root-owner-group", "-b", root, folder / f"{name}_1.5-2_all.deb"]
    subprocess.run(command, check=True, capture_output=True)


LONG = "This is a sentence of prose. " * 300  # 8,700 characters


@pytest.fixture
def debs(tmp_path):
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb on this machine")
    novel = ["EMMA", "", "By Jane Austen", "", "", "VOLUME I", "", "CHAPTER I", "", None, LONG]
    novel += [LONG, "", "_Very_ long indeed.", "", "CHAPTER II", "", "Too short.", "", "FINIS"]
    package(tmp_path, "r-cran-janeaustenr", {"usr/lib/R/data/Rdata.rdb": r_database(novel)})
    folder = "usr/share/doc/debian-handbook/html/en-US"
    pages = {"index": ("", "one"), "one": ("index", "sect.two"), "four": ("index", "")}
    pages |= {"sect.two": ("one", "sect.three"), "sect.three": ("one", "four")}
    made = {}
    for name, (up, after) in pages.items():
        more = f'<link rel="next" href="{after}.html" />' if after else ""
        made[f"{folder}/{name}.html"] = PAGE.format(
            up=f"{up}.html", more=more, name=name, text="Short text." if name == "index" else LONG
        )
    package(tmp_path, "debian-handbook", made)
    page = PAGE.format(up="", more="", name="only", text=LONG * 2)
    folder = "usr/share/doc/anarchism/html"
    package(tmp_path, "anarchism", {f"{folder}/secA1.html": page, f"{folder}/links.html": page})
    return tmp_path


def test_packages_become_plain_texts(debs, tmp_path):
    out = tmp_path / "texts"
    assert corpus.write(out, debs) == {"novels": 1, "handbook": 1, "faq": 1}
    assert (out / "novels" / "emma-01.txt").read_text() == (
        f"{LONG}{LONG}".strip() + "\nVery long indeed.\n"
    )
    # A chapter's short sections are joined until they are long; another chapter's are not.
    parts = [
        f"9.1. About the {name} page\nA command & its output.\n{LONG.strip()}\n"
        for name in ("one", "sect.two")
    ]
    assert (out / "handbook" / "one.txt").read_text() == "".join(parts)
    assert (out / "faq" / "A1.txt").read_text().startswith("9.1. About the only page\nA command &")
    sources = (out / corpus.SOURCES).read_text().splitlines()
    assert len(sources) == 3
    assert all("1.5-2" in line and "GPL-9+" in line for line in sources)
    assert len(load_suite("documents", out)) == 4 * documents.EACH


def test_a_package_that_is_not_there_is_named(debs, tmp_path):
    (debs / "anarchism_1.5-2_all.deb").unlink()
    with pytest.raises(ValueError, match=r"no anarchism_.*without --from"):
        corpus.write(tmp_path / "texts", debs)


def test_without_debians_tools_it_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"get r-cran-janeaustenr, .* and give --from FOLDER"):
        corpus.write(tmp_path / "texts")
