"""The README says what is so: its table, its code, its figures, its commands."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import make_inputs
from PIL import Image

import mmkv
from mmkv import budgets, chat, cli, registry, tables
from mmkv.builtin import example_pictures, scenes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def between(start: str, end: str) -> str:
    return README.split(start, 1)[1].split(end, 1)[0]


def test_policy_table_is_the_registrys():
    shown = between("<!-- policies -->\n", "<!-- /policies -->")
    assert shown == tables.policy_markdown(), "put in the output of: mmkv policies --markdown"


def test_model_table_is_the_adapters():
    shown = between("<!-- models -->\n", "<!-- /models -->")
    assert shown == tables.model_markdown(), "put in what mmkv.tables.model_markdown() gives"


def test_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    exec(blocks[0].replace("max_new_tokens=80", "max_new_tokens=4"), names)
    assert "prefixkv" in capsys.readouterr().out
    names["samples"] = [names["inputs"]]
    exec(blocks[1], names)
    assert (tmp_path / "profile.json").is_file()


def commands() -> list[list[str]]:
    """Every command of the README's blocks that begins with the environment's programs."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(".venv/bin/")]


def shown(words: list[str]) -> str:
    return " ".join(words)[:60]


@pytest.mark.parametrize("words", [x for x in commands() if x[1] == "chat"], ids=shown)
def test_chat_commands_run_as_they_stand(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    more = ("--out", str(tmp_path), "--max-new-tokens", "12")
    with pytest.raises(SystemExit) as end:
        cli.main([*words[1:], *more])
    printed = capsys.readouterr()
    assert (end.value.code or 0, printed.err) == (0, "")
    assert list(tmp_path.glob("*.png"))


def test_the_answer_to_ones_own_question_is_right(capsys, monkeypatch, tmp_path):
    """What the README asks about the shipped picture is what the model knows."""
    monkeypatch.chdir(ROOT)
    (words,) = [x for x in commands() if x[1] == "chat" and "--json" not in x]
    with pytest.raises(SystemExit):
        cli.main([*words[1:], "--out", str(tmp_path), "--json"])
    data = json.loads(capsys.readouterr().out)
    scene = scenes.make_scene(1, count=4)
    (item,) = [x for x in scene.objects if x.place in data["question"]]
    for side in ("full", "compressed"):
        assert data[side]["answer"] == f"A {item.color} {item.shape} is at the {item.place}."


@pytest.mark.parametrize(
    "words", [x for x in commands() if x[1] in ("eval", "report", "bench")], ids=shown
)
def test_other_commands_are_right_up_to_the_model(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    class Reached(BaseException):
        """Everything that is checked without a model was found right."""

    def reached(*args, **kwargs):
        raise Reached

    monkeypatch.setattr("mmkv.eval.loading.load_model", reached)
    monkeypatch.setattr("mmkv.eval.report.Report", reached)
    monkeypatch.setattr("mmkv.bench.cli._run", reached)
    monkeypatch.setattr("mmkv.bench.processor.use_vectors", lambda: None)
    with pytest.raises(Reached):
        cli.main(words[1:])


def test_measured_bytes():
    loaded = chat.load()
    with Image.open(example_pictures()[0]) as picture:
        inputs = chat.encode(loaded, "Describe the image.", [picture])
    rows = re.findall(r"^\| ([\w ]+) \| ([\d.-]+) \| ([\d.]+) KiB \|$", README, re.MULTILINE)
    assert len(rows) > 3
    for name, size, shown in rows:
        policy, budget = None, None
        if name != "not wrapped":
            policy, budget = mmkv.get_policy(name), budgets.parse(size)
        answer = chat.ask(loaded, inputs, policy, budget, max_new_tokens=1)
        assert f"{answer.nbytes / 1024:.1f}" == shown, (name, size)


def test_measured_bytes_and_errors_in_few_bits():
    loaded = chat.load()
    with Image.open(example_pictures()[0]) as picture:
        inputs = chat.encode(loaded, "Describe the image.", [picture])
    cells = r"^\| (\w+) \| ([\d.]+) \| (float32|int8|int4) \| ([\d.]+) KiB \| (.+?) \|"
    rows = re.findall(cells, README, re.MULTILINE)
    assert len(rows) == 9
    for name, size, held, shown, errors in rows:
        policy, budget = mmkv.get_policy(name), budgets.parse(size)
        kv_dtype = None if held == "float32" else held
        answer = chat.ask(loaded, inputs, policy, budget, kv_dtype=kv_dtype, max_new_tokens=1)
        assert f"{answer.nbytes / 1024:.1f}" == shown, (name, size, held)
        for error, text in zip(
            (answer.report.key_error, answer.report.value_error), errors.split(", "), strict=False
        ):
            assert text == ("-" if error is None else f"{100 * error:.2f} %")


def test_the_policy_of_contributing_works(models, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))
    monkeypatch.setattr(registry, "_aliases", dict(registry._aliases))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "bookends.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("bookends")
    model, inputs = models("llama"), make_inputs("llama", (90,))
    with mmkv.wrapped(model, "ends", 0.5), torch.no_grad():
        kept = model(**inputs).past_key_values.kept(0)[0]
    assert kept[:, :8].tolist() == [list(range(8))] * len(kept)
    assert kept[:, -16:].tolist() == [list(range(74, 90))] * len(kept)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_files_and_targets_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:mmkv|tests|policies|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for words in re.findall(r"\bmake ((?:[a-z]+ ?)+)`", text):
        for target in words.split():
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
