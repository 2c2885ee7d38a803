"""The README and the pages of docs/ say what is so: tables, code, figures, commands, links."""

import functools
import importlib
import itertools
import json
import re
import shlex
import shutil
import sys
import tomllib
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import mmkv
from helpers.commands import run
from helpers.models import make_inputs, make_model
from helpers.picture_chat import make_picture_chat
from mmkv import chat, registry, tables
from mmkv.builtin import example_pictures
from mmkv.cli import commands

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
README, SPEED = TEXTS["README.md"], TEXTS["docs/speed.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def between(text: str, start: str, end: str) -> str:
    return text.split(start, 1)[1].split(end, 1)[0]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXTS[name], re.MULTILINE | re.DOTALL)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of all tables' rows by their first cell, without emphasis; the first row wins."""
    found: dict[str, list[str]] = {}
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        first, *rest = (cell.strip(" *`") for cell in line.replace("**", "").split(" | "))
        found.setdefault(first, rest)
    return found


class TestTables:
    def test_policy_table_equals_registry(self):
        shown = between(TEXTS["docs/policies.md"], "<!-- policies -->\n", "<!-- /policies -->")
        assert shown == tables.policy_markdown(), "put in the output of: mmkv policies --markdown"

    def test_part_table_equals_registry(self):
        shown = between(TEXTS["docs/policies.md"], "<!-- parts -->\n", "<!-- /parts -->")
        assert shown == tables.part_markdown(), (
            "put in the output of: mmkv policies --parts --markdown"
        )
        assert not re.search(r"`: *(<br>|\|)", shown), "an option without a description"

    def test_model_table_equals_adapters(self):
        shown = between(TEXTS["docs/models.md"], "<!-- models -->\n", "<!-- /models -->")
        assert shown == tables.model_markdown(), "put in what mmkv.tables.model_markdown() gives"

    def test_every_option_is_explained(self):
        text = TEXTS["docs/policies.md"].split("## Parts")[1]
        for name in mmkv.list_policies():
            for option in registry.policy_class(name).options():
                assert f"`{option}`" in text or f"`{option}=" in text, (name, option)

    def test_recommended_policies_exist(self):
        lines = between(README, "## Which policy", "[All policies").strip().splitlines()[2:]
        cells = [line.split(" | ")[1] for line in lines]
        named = [x for cell in cells for x in re.findall(r"`(\w+)`", cell)]
        assert {"snapkv", "prefixkv", "h2o"} < set(named)
        parts = {"uniform", "pyramid"}  # in "any with `uniform` layers"
        assert set(named) - parts <= set(mmkv.list_policies())

    def test_architecture_lists_every_module(self):
        text = between(TEXTS["docs/architecture.md"] + "\n## ", "## Files", "\n## ")
        named = re.findall(r"^\|.*?\| `([\w./]+)` \|", text, re.MULTILINE)
        assert len(set(named)) == len(named)
        folders = ("mmkv", "mmkv/attach", "mmkv/cache", "mmkv/cli", "mmkv/loading")
        known = [x for folder in folders for x in (ROOT / folder).glob("*.py")]
        files = {str(x.relative_to(ROOT)) for x in known if x.name != "__init__.py"}
        folders = {x for x in named if x.endswith("/")}
        assert set(named) - folders == files
        assert all((ROOT / x / "__init__.py").is_file() for x in folders)

    def test_architecture_lists_every_test_folder(self):
        text = between(TEXTS["docs/architecture.md"] + "\n## ", "## Tests", "\n## ")
        named = re.findall(r"^\| `(tests/\w+)/` \|", text, re.MULTILINE)
        found = {x.parent for x in (ROOT / "tests").glob("*/*.py")}
        assert sorted(named) == sorted(str(x.relative_to(ROOT)) for x in found)
        assert not list((ROOT / "tests").glob("test_*.py"))

    def test_readme_figures_equal_pages(self):
        shown = rows(between(README, "## Measured", "## Limits"))
        page = rows(between(TEXTS["docs/quality.md"], "<!-- fifth -->", "<!-- /fifth -->"))
        speeds = rows(between(SPEED, "## SmolLM2", "\n## "))
        assert len(shown) > 8
        for name, cells in shown.items():
            if name not in ("policy", "---"):
                assert cells[0] == (page[name][0] if name in page else "-"), name
                assert cells[1:] == [speeds[name][i] for i in (0, 1, 3)], name

    def test_readme_frontier_equals_quality_page(self):
        shown = rows(between(README, "## How close it stays", "## Try it"))
        page = rows(between(TEXTS["docs/quality.md"], "<!-- frontier -->", "<!-- /frontier -->"))
        assert len(shown) > 4
        assert all(page[name] == cells for name, cells in shown.items())


class TestCode:
    def test_readme_code_runs(self, tmp_path, monkeypatch, capsys):
        """With tiny models in the place of those that would be downloaded."""
        import transformers

        def instead(name: str, **options: object):
            asked.append(name)
            return loaded.pop(0)

        asked: list[str] = []
        model, processor = make_picture_chat()
        loaded = [model, processor, make_text_model(processor.tokenizer), processor.tokenizer]
        for cls in ("ModelForImageTextToText", "Processor", "ModelForCausalLM", "Tokenizer"):
            monkeypatch.setattr(getattr(transformers, f"Auto{cls}"), "from_pretrained", instead)
        shutil.copy(example_pictures()[0], tmp_path / "photo.jpg")
        (tmp_path / "report.txt").write_text("It rains. " * 50)
        monkeypatch.chdir(tmp_path)
        names: dict = {}
        for block in blocks("README.md", "python"):
            exec(shortened(block, "max_new_tokens=80"), names)
            assert mmkv.is_wrapped(names["model"])
        said = capsys.readouterr().out
        assert "ASSISTANT:" in said
        assert names["context"].inputs["input_ids"].shape[1] > 150
        assert list(dict.fromkeys(asked)) == [
            "llava-hf/llava-1.5-7b-hf",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        ]

    @pytest.mark.slow
    def test_page_code_runs(self, tmp_path, monkeypatch, capsys):
        """One after the other: later blocks go on from the first, with a tiny model."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(mmkv, "load_builtin", make_picture_chat)
        names: dict = {}
        for block in blocks("docs/index.md", "python"):
            exec(shortened(block, "max_new_tokens=80"), names)
        assert "condense" in capsys.readouterr().out
        names["samples"] = [names["inputs"]]
        for page in ("docs/policies.md", "docs/behaviour.md"):
            for block in blocks(page, "python"):
                exec(block.replace("max_new_tokens=20", "max_new_tokens=4"), names)
        assert names["policy"].heads.name == "adaptive"
        assert names["out"].shape[1] > names["ids"].shape[1]
        assert (tmp_path / "profile.json").is_file()

    @pytest.mark.usefixtures("registering")
    def test_own_policy_code_runs(self, models, monkeypatch, tmp_path):
        whole = "\n".join(blocks("docs/extending.md", "python"))
        (tmp_path / "bookends.py").write_text(whole, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module("bookends")
        model, inputs = models("llama"), make_inputs("llama", (90,))
        with mmkv.wrapped(model, "ends", 0.5), torch.no_grad():
            kept = model(**inputs).past_key_values.kept(0)[0]
        assert kept[:, :8].tolist() == [list(range(8))] * len(kept)
        assert kept[:, -16:].tolist() == [list(range(74, 90))] * len(kept)
        options = {"score": "small-keys", "power": 2.0}
        with mmkv.wrapped(model, "snapkv", 0.5, **options), torch.no_grad():
            kept = model(**inputs).past_key_values.kept(0)
        assert kept.shape == (1, 2, 45)
        model, inputs = models("llama-mha"), make_inputs("llama-mha", (90, 61))
        with mmkv.wrapped(model, "knorm", 0.4, heads="first-head"), torch.no_grad():
            kept = model(**inputs).past_key_values.kept(0)
        assert (kept >= 0).sum(-1).tolist() == [[72, 24, 24, 24], [50, 17, 17, 16]]
        (table,) = blocks("docs/extending.md", "toml")
        groups = tomllib.loads(table)["project"]["entry-points"]
        assert set(groups) == {"mmkv.policies", "mmkv.parts"}
        for entries in groups.values():
            for name, entry in entries.items():
                assert getattr(module, entry.partition(":")[2]).name == name

    def test_every_code_block_is_run(self):
        pages = ("index", "policies", "behaviour", "extending")
        tested = {f"docs/{x}.md" for x in pages}
        assert {x for x in TEXTS if blocks(x, "python")} == {"README.md", *tested}
        known = {"python", "bash", "toml", "yaml", "mermaid"}
        for name, text in TEXTS.items():
            assert set(re.findall(r"^```(\w*)\n(?:.*\n)+?^```$", text, re.MULTILINE)) <= known, name


def make_text_model(tokenizer):
    """A tiny language model with the words of a tokenizer, which gets a chat template."""
    model = make_model("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = "{% for x in messages %}{{ x['content'] }}{% endfor %}"
    return model


def shortened(block: str, limit: str) -> str:
    assert limit in block
    return block.replace(limit, "max_new_tokens=4")


def lines() -> list[str]:
    """Every command of the pages' blocks, once."""
    found = "\n".join(block for name in TEXTS for block in blocks(name, "bash"))
    commands = [x.split("  #")[0].strip() for x in found.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(filter(None, commands)))


def commands_of(*names: str) -> list[list[str]]:
    """The words of every `mmkv` command of these names."""
    words = [shlex.split(line) for line in lines()]
    return [x for x in words if x[0] in (".venv/bin/mmkv", "mmkv") and x[1] in names]


def shown(words: list[str]) -> str:
    return " ".join(words)[:60]


def one_of_each_kind() -> list[list[str]]:
    """The first command of each name, and of each suite of `mmkv eval`."""
    found = commands_of("eval", "report", "bench", "check", "calibrate", "plot")
    return [*{(x[1], x[2] if x[1] == "eval" else ""): x for x in reversed(found)}.values()]


def make_files(words: list[str]) -> None:
    """Make the plugin, and the models that a command's words name, in the current folder."""
    Path("small_keys.py").write_text(blocks("docs/extending.md", "python")[1])
    for before, word in itertools.pairwise(words):
        if before == "--model" and word.count("/") > 1:
            Path(word).mkdir(parents=True, exist_ok=True)
            Path(word, "config.json").touch()
        elif word.endswith(".gguf"):
            Path(word).touch()


@functools.cache
def smollm2_vision() -> chat.Loaded:
    return chat.Loaded("smollm2-vision", *mmkv.load_builtin())


def difference(one: Path, other: str) -> float:
    """The mean distance of two pictures' colours, of 255."""
    a, b = (np.asarray(Image.open(x).convert("RGB"), dtype=float) for x in (one, other))
    return float(np.abs(a - b).mean()) if a.shape == b.shape else np.inf


class Reached(BaseException):
    """Everything that is checked without a model was found right."""


def reached(*args: object, **kwargs: object) -> None:
    raise Reached


class TestCommands:
    @pytest.mark.slow
    def test_make_run_shows_the_same_answer_in_fewer_bytes(self, capsys, monkeypatch, tmp_path):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr("mmkv.chat.load", lambda *_: smollm2_vision())
        (line,) = re.findall(r"^\t\$\(BIN\)/mmkv (chat .*)$", MAKEFILE, re.MULTILINE)
        (picture,) = re.findall(r"^PICTURE := (.*)$", MAKEFILE, re.MULTILINE)
        words = shlex.split(line.replace("$(PICTURE)", picture))
        data = json.loads(run(capsys, *words, "--out", tmp_path, "--json")[0])
        assert data["full"]["answer"] == data["compressed"]["answer"]
        assert difference(ROOT / "docs" / "kept.png", *data["png"]) < 3
        assert data["compressed"]["nbytes"] < 0.4 * data["full"]["nbytes"]

    @pytest.mark.usefixtures("registering")
    def test_every_command_parses(self, monkeypatch, tmp_path):
        """Options, their values, and names of policies."""
        monkeypatch.chdir(tmp_path)
        known = typer.main.get_command(commands.app).commands
        given = commands_of(*(name for name in known if name != "serve"))  # vLLM's options too
        assert len(given) > 20
        for _, name, *words in given:
            make_files(words)
            known[name].make_context(name, words)

    @pytest.mark.slow
    @pytest.mark.usefixtures("registering")
    @pytest.mark.parametrize("words", one_of_each_kind(), ids=shown)
    def test_other_commands_run_up_to_the_model(self, words, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        for folder in ("texts", "texts/novels"):
            Path(folder).mkdir()
            Path(folder, "text.txt").write_text("Some words of this text are these. " * 900)
        make_files(words)
        monkeypatch.setattr("mmkv.chat.load", reached)
        monkeypatch.setattr("mmkv.eval.cli.token_counter", lambda name: len)
        monkeypatch.setattr("mmkv.eval.sizing.token_counter", lambda name: len)
        monkeypatch.setattr("mmkv.eval.compare.Comparison", reached)
        monkeypatch.setattr("mmkv.eval.speed.cli._load", reached)
        monkeypatch.setattr("mmkv.eval.speed.kvpress_worker.Worker", lambda python: ExitStack())
        with pytest.raises(Reached):
            commands.main(words[1:])

    def test_multi_process_command_runs_up_to_the_model(self, monkeypatch, tmp_path):
        (line,) = [x for x in lines() if x.startswith(".venv/bin/accelerate launch ")]
        before, after = line.split(" -m mmkv.eval ")
        assert find_spec("mmkv.eval.__main__")
        from accelerate.commands.launch import launch_command_parser

        launch_command_parser().parse_args([*shlex.split(before)[2:], "script.py"])
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("mmkv.chat.load", reached)
        with pytest.raises(Reached):
            commands.main(["eval", *shlex.split(after)])

    def test_built_in_model_commands_run_up_to_the_model(self, monkeypatch, tmp_path):
        from mmkv.builtin.training import evaluate, train

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(evaluate, "load_builtin", reached)
        monkeypatch.setattr("mmkv.loading.models.pretrained", reached)
        for module in (evaluate, train):
            found = [x for x in lines() if f" -m {module.__name__} " in x]
            assert len(found) == 2
            for line in found:
                with pytest.raises(Reached):
                    module.app(shlex.split(line)[3:], standalone_mode=False)

    @pytest.mark.slow
    def test_plan_prints_documented_table(self, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "120")
        (line,) = [x for x in lines() if x.startswith(".venv/bin/mmkv plan ")]
        printed = [
            [cell.strip() for cell in text.strip("│").split("│")]
            for text in run(capsys, *shlex.split(line)[1:])[0].splitlines()
            if text.startswith("│")
        ]
        section = between(SPEED, "## What fits on a card", "## On a GPU")
        for name, *cells in printed:
            shown = [*cells[:2], cells[3] or cells[2], cells[5]]
            assert rows(section)[name] == shown

    def test_lm_eval_command_parses(self, monkeypatch):
        pytest.importorskip("lm_eval", reason="lm_eval is not installed")
        from lm_eval._cli import HarnessCLI

        import mmkv.eval.harness.lm_eval as plugin
        from mmkv.eval.harness.arguments import harness_arguments

        (line,) = [x for x in lines() if " -m mmkv.eval.harness.lm_eval " in x]
        given: list = []
        monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: given.append(args))
        monkeypatch.setattr(sys, "argv", ["lm_eval", *shlex.split(line)[3:]])
        plugin.main()
        assert given[0].model == "mmkv"
        arguments = dict(given[0].model_args)
        size, mine, rest = harness_arguments(
            arguments.pop("policy"), arguments.pop("budget"), arguments
        )
        assert (size, mine, rest) == (0.2, {"window": 8}, {"pretrained": "PATH_OR_ID"})

    @pytest.mark.parametrize("words", commands_of("serve"), ids=shown)
    def test_serve_commands_run_up_to_vllm(self, words, monkeypatch):
        monkeypatch.setattr("mmkv.cli.serve.find_spec", lambda name: object())
        monkeypatch.setattr("mmkv.cli.serve._probe", lambda *_: None)
        monkeypatch.setattr("os.execv", reached)
        with pytest.raises(Reached):
            commands.main(words[1:])

    def test_every_command_kind_is_checked(self):
        checked = ("chat", "eval", "report", "bench", "plan", "check", "calibrate", "plot", "serve")
        patterns = (
            rf"\.venv/bin/mmkv ({'|'.join(checked)})\b",
            r"\.venv/bin/accelerate launch ",
            r"\.venv/bin/python docs/(head_classes|quantized_cache)\.py ",
            r"\.venv/bin/python -m mmkv\.builtin\.training\.(evaluate|train) ",
            r"\.venv/bin/python -m mmkv\.eval\.(harness\.lm_eval) ",
            r"make [a-z -]+$",
            r"(\.venv/bin/)?pip install (\.|mmkv|hqq)$",
            # In vLLM's environment, which is not .venv.
            r"mmkv (serve|probe) ",
            r"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ",
            r"python docs/(ask_numbers|decode_turns|serving_divergence|serving_figures)\.py ",
            r"\.ci/run$",
            r"git (tag|push|checkout|switch|commit) ",
            r"\.venv/bin/(pytest|pre-commit|twine) ",
        )
        for line in lines():
            assert any(re.match(p, line) for p in patterns), line

    def test_make_targets_exist(self):
        given = [x.removeprefix("make ") for x in lines() if x.startswith("make ")]
        for text in TEXTS.values():
            given += re.findall(r"`make ([a-z-]+(?: [a-z-]+)*)[ `]", text)
        assert len(given) > 5
        for target in " ".join(given).split():
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target

    def test_inline_commands_have_their_options(self):
        known: dict[str, set[str]] = {}
        for name, command in typer.main.get_command(commands.app).commands.items():
            options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
            known[name] = options | {"--help"}
        given = [x for text in TEXTS.values() for x in re.findall(r"`mmkv ([a-z][^`]*)`", text)]
        assert len(given) > 10
        for text in given:
            name, *words = text.split()
            options = {x for x in words if x.startswith("--")}
            assert name == "serve" or options <= known[name], text  # the others are vLLM's

    def test_extras_exist(self):
        extras = PROJECT["project"]["optional-dependencies"]
        for name, text in TEXTS.items():
            for found in re.findall(r"mmkv\[(\w+)\]", text):
                assert found in extras, (name, found)


class TestLinks:
    @pytest.mark.parametrize("name", TEXTS)
    def test_links_and_files_exist(self, name):
        folder = (ROOT / name).parent
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXTS[name]):
            path, _, anchor = link.partition("#")
            target = (folder / path).resolve() if path else ROOT / name
            assert target.exists(), link
            if anchor and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings}
                assert anchor in slugs | {"policies"}, link
        for path in re.findall(
            r"`((?:mmkv|tests|policies|docs|eval|demo|\.ci|\.github)/[\w./-]+)`", TEXTS[name]
        ):
            assert (ROOT / path).exists(), path
