"""The suite `continuation` and its texts."""

import pytest

from mmkv.builtin import source
from mmkv.eval.samples import DataError, words
from mmkv.eval.suites.registry import load_suite


def letters(text: str) -> int:
    """Tokens of four letters."""
    return len(text) // 4


@pytest.fixture
def folder(tmp_path):
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
def test_a_text_is_cut_by_tokens_between_words(folder, count):
    samples = load_suite("continuation", folder, length=1000, count=count)
    assert [s.id for s in samples] == ["b.txt", "deep/a.md"]
    number = count
    for sample in samples:
        text = (folder / sample.id).read_text()
        (answer,) = sample.answers
        assert text.startswith(f"{sample.prompt} {answer}")
        assert number(sample.prompt) == pytest.approx(750, abs=2)
        assert number(f"{sample.prompt} {answer}") == pytest.approx(1000, abs=2)
        assert number(sample.asked) == pytest.approx(94, abs=3)
        assert "\n" not in text[len(sample.prompt) - 2 : len(sample.prompt) + 3]


def test_a_limit_and_one_file(folder):
    assert len(load_suite("continuation", folder, length=1000, limit=1)) == 1
    assert [s.id for s in load_suite("continuation", folder / "b.txt", length=256)] == ["b.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short.py", "no text of 1024 tokens or more"),
        ("none.txt", "none.txt: no such file"),
        ("c.bin", "not a text file in UTF-8"),
    ],
)
def test_what_is_no_text_is_said(folder, name, message):
    with pytest.raises(DataError, match=message):
        load_suite("continuation", folder / name)


@pytest.mark.slow
def test_the_standard_library_without_its_tests():
    found = source.files()
    assert 20 < len(found) < 200
    assert "test" not in {part for name in found for part in name.split("/")}
    assert all("site-packages" not in path.parts for path in found.values())
    names = {s.id for s in load_suite("continuation", "stdlib", length=400)}
    assert names
    assert names <= set(found)
