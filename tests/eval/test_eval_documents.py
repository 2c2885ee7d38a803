"""The suites `documents` and `continuation`."""

import random

import pytest

from helpers.evaluation import letters
from mmkv.eval.samples import DataError, words
from mmkv.eval.suites import documents, files
from mmkv.eval.suites.registry import default_data, load_suite


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


def test_reference_text_continues_the_prompt(folder):
    for sample in load_suite("documents", folder, tasks=["text"], limit=3, length=400):
        text = (folder / sample.id.partition("/")[2]).read_text()
        (answer,) = sample.answers
        assert f"\n{sample.prompt} {answer}" in f"\n{text}"  # it begins with a paragraph
        assert (words(sample.prompt), words(answer)) == (400, documents.FOLLOWS)
        assert words(sample.asked) == pytest.approx(50, abs=2)
        assert not sample.chat
        assert sample.metric is None


@pytest.mark.parametrize("task", ["summary", "question"])
def test_prompt_is_document_then_question(folder, task):
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


def test_quoted_word_occurs_once():
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


def test_sentence_does_not_end_at_title_or_page():
    text = 'She met Mrs. Dashwood there. He asked "Never?" [Op. Cit., p. 9] as did Mrs. Smith'
    assert documents._whole(text) == 'She met Mrs. Dashwood there. He asked "Never?"'
    assert documents._whole("It rained. " + "and " * 9) == "It rained. " + "and " * 9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tasks": ["poem"]}, ValueError, "unknown task 'poem'.*text"),
        ({"length": 5000}, DataError, "no .txt file of 5128 tokens or more"),
        ({"data": "nowhere"}, DataError, "nowhere: no such file"),
    ],
)
def test_invalid_requests_raise(folder, change, error, message):
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
def test_cuts_lie_between_words_after_given_tokens(texts, count):
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


@pytest.mark.parametrize(
    "letters", ["我們住在很遠的山上。", "むかしむかしある所に", "ไปไหนมาสามวาสองศอก"]
)
def test_texts_without_blanks_are_cut_between_characters(tmp_path, letters):
    text = "\n".join(letters * 10 for _ in range(40))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    for suite, end, start in (("continuation", 1000, 750), ("documents", 1128, 1000)):
        sample = load_suite(suite, tmp_path, limit=1, length=1000, count=len)[0]
        (answer,) = sample.answers
        assert sample.prompt + answer in text
        assert len(sample.prompt) == pytest.approx(start, abs=2)
        assert len(sample.prompt + answer) == pytest.approx(end, abs=2)
        assert len(sample.asked) == pytest.approx(start / 8, abs=32)
    needles = load_suite(suite, tmp_path, tasks=["needle"], limit=5, length=1000, count=len)
    for depth, sample in zip(documents.DEPTHS, needles, strict=True):
        before, needle, _ = sample.prompt.partition("The access code for the ")
        assert needle
        assert len(before) / 1000 == pytest.approx(depth, abs=0.02)


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
def test_invalid_text_raises(texts, name, message):
    with pytest.raises(DataError, match=message):
        load_suite("continuation", texts / name)


@pytest.mark.slow
def test_novels_in_the_package_are_the_default_data():
    assert default_data("documents", "smollm2") == "novels"
    assert load_suite("continuation", limit=1)[0].id in files.novels()
    texts = files.novels()
    assert {name.rpartition("-")[0] for name in texts} == {
        *("emma", "mansfield-park", "northanger-abbey", "persuasion", "pride-and-prejudice"),
        "sense-and-sensibility",
    }
    assert texts["emma-01"].startswith("Emma Woodhouse, handsome, clever, and rich")
    assert min(map(len, texts.values())) >= 12_000
    samples = load_suite("documents", "novels", limit=8)
    folders = [tag for s in samples for tag in s.tags if tag.startswith("folder=")]
    assert len(samples) == 8
    assert len(set(folders)) == 6
