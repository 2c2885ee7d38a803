"""The command line: what it prints and writes, and one line with exit code 2 for bad input."""

import copy
import dataclasses
import errno
import inspect
import io
import json
import logging
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import typer
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

import mmkv
from helpers.commands import complaint, run
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.picture_chat import LAYERS, make_picture_chat, picture_chat
from helpers.profiles import profile_of
from mmkv import chat, names, parts, policy_options, registry, terminal
from mmkv.builtin import example_pictures
from mmkv.cli import commands
from mmkv.cli.chat import verdict
from mmkv.demo.answer import Side
from mmkv.demo.conversation import Conversation
from mmkv.eval.speed import cli as speed
from mmkv.eval.speed import models
from mmkv.loading.names import file_of
from mmkv.vllm import probes

QUESTION = "Describe the image."
LONG = "What is it? " * 40
SHORT = ("--max-new-tokens", "4")


@pytest.fixture
def picture():
    return example_pictures()[0]


@pytest.fixture
def load(monkeypatch):
    """Commands get a tiny model."""
    monkeypatch.setattr(chat, "load", lambda *args: picture_chat())


@pytest.fixture
def ask(capsys, load):
    """The JSON of a question without a picture."""

    def run_chat(*words) -> dict:
        out, err, code = run(capsys, "chat", LONG, *SHORT, *words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run_chat


@pytest.mark.usefixtures("load")
class TestChat:
    @pytest.mark.slow
    def test_shows_answers_and_bytes_per_layer_and_writes_a_png(self, capsys, picture, tmp_path):
        words = ("chat", picture, QUESTION, "--budget", 0.2, "--out", tmp_path, *SHORT)
        out, err, code = run(capsys, *words)
        assert (code, "kept per head" in out) == (0, False)
        out, err, code = run(capsys, *words, "--layers")
        assert (code, err) == (0, "")
        (png,) = tmp_path.iterdir()
        for text in (
            QUESTION,
            "144 of them image tokens",
            "full cache: ",
            "condense, budget 0.2: ",
            "least=64 keeps 64 of",
            "KiB",
            f"kept patches: {png}",
        ):
            assert text in out
        rows = [x for x in out.splitlines() if x.strip("│ ").split("│")[0].strip().isdigit()]
        assert len(rows) == LAYERS
        with Image.open(png) as image:
            assert image.format == "PNG"
            assert min(image.size) > 300

    @pytest.mark.slow
    def test_a_picture_is_read_once_and_asked_again_from_a_file(self, capsys, picture, tmp_path):
        """With all tokens kept, the context file gives the same answer as the whole prompt."""
        whole = ("--budget", "1.0", "--json", "--max-new-tokens", "12")
        asked, answers = (*whole, "--context", tmp_path / "scene"), {}
        for i, question in enumerate((QUESTION, "Is there a ring?", QUESTION)):
            if i < 2:
                plain, _, _ = run(capsys, "chat", picture, question, "--out", tmp_path, *whole)
                answers[question] = json.loads(plain)["full"]["answer"]
            words = [picture, question] if i == 0 else [question]
            out, err, code = run(capsys, "chat", *words, *asked)
            assert (code, err) == (0, "")
            found = json.loads(out)
            assert found["answer"] == answers[question]
            assert found["context"]["made"] == (i == 0)
            assert 144 < found["context"]["tokens"] < 165

    @pytest.mark.slow
    def test_a_context_is_of_a_picture_and_of_one_wrap(self, capsys, picture, tmp_path):
        path = tmp_path / "scene"
        fifth = ("--budget", 0.2, *SHORT)
        out, _, code = run(capsys, "chat", picture, QUESTION, "--context", path, *fifth)
        assert (code, path.exists()) == (0, True)
        assert f"read into {path}, held in" in out
        asked = ("chat", "What?", "--context", path, *fifth)
        again, by_layer = run(capsys, *asked)[0], run(capsys, *asked, "--layers")[0]
        assert f"from {path}, held in" in again
        assert by_layer.startswith(again)
        assert ("layer" in again, "layer" in by_layer.removeprefix(again)) == (False, True)
        assert f"leave {picture} out" in complaint(capsys, "chat", picture, "x", "--context", path)
        none = complaint(capsys, "chat", "x", "--context", tmp_path / "none")
        inside = complaint(capsys, "chat", picture, "x", "--context", picture / "x")
        assert f"--context {picture}: {picture} is a file" in inside
        assert "no such file; add a picture or text to create it" in none
        other = complaint(capsys, "chat", "x", "--context", path, "--budget", "0.3")
        assert "read with budget=0.2, and the model is wrapped with budget=0.3 now" in other
        assert len(other) < 300

    @pytest.mark.slow
    def test_several_pictures(self, capsys, tmp_path):
        """Two files of the same name make two figures, too."""
        first, second = example_pictures()[:2]
        protect = ("--option", "protect=instruction")
        words = ("Describe the second picture.", *protect, "--budget", "0.3")
        for i, other in enumerate((second, first)):
            folder = tmp_path / str(i)
            out, _, code = run(
                capsys, "chat", "--image", first, other, *words, "--out", folder, *SHORT
            )
            assert code == 0
            assert "288 of them image tokens" in out
            assert len(list(folder.iterdir())) == 2

    def test_text_only_from_standard_input(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(sys, "stdin", io.StringIO(LONG))
        monkeypatch.chdir(tmp_path)
        out, _, code = run(capsys, "chat", "-", *SHORT)
        assert code == 0
        assert "image tokens" not in out
        assert not list(tmp_path.iterdir())

    def test_texts_come_before_the_question_and_long_ones_are_not_repeated(
        self, capsys, monkeypatch, tmp_path
    ):
        numbers = [f"{i} apples" for i in range(100)]
        (tmp_path / "report.txt").write_text(", ".join(numbers) + "\n", encoding="utf-8")
        words = ("chat", tmp_path / "report.txt", QUESTION, *SHORT)
        data = json.loads(run(capsys, *words, "--json")[0])
        assert data["question"] == f"{', '.join(numbers)}\n\n{QUESTION}"
        out, _, code = run(capsys, *words)
        assert code == 0
        assert out.startswith("0 apples, 1 apples")
        assert f"99 apples\n\n{QUESTION}\n" in out
        assert re.search(r"\n\[\d+ characters\]\n", out)
        assert "50 apples" not in out
        monkeypatch.setattr(sys, "stdin", io.StringIO((tmp_path / "report.txt").read_text("utf-8")))
        found = json.loads(run(capsys, "chat", "-", QUESTION, *SHORT, "--json")[0])
        assert found["question"] == data["question"]

    @pytest.mark.slow
    def test_a_text_is_read_once_and_asked_again_from_a_file(self, capsys, tmp_path):
        (tmp_path / "report.log").write_text(LONG, encoding="utf-8")
        words = ("--context", tmp_path / "report", "--json", *SHORT)
        found = []
        for files in ([tmp_path / "report.log"], []):
            out, err, code = run(capsys, "chat", *files, QUESTION, *words)
            assert (code, err) == (0, "")
            found.append(json.loads(out))
        assert [x["context"]["made"] for x in found] == [True, False]
        assert found[0]["context"]["tokens"] == found[1]["context"]["tokens"] > 100
        assert [x["question"] for x in found] == [QUESTION] * 2
        assert found[0]["answer"] == found[1]["answer"]
        said = complaint(capsys, "chat", tmp_path / "report.log", "x", *words)
        assert "report.log out, or name a new file" in said

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "begin"),
        [("deep/kept.jpg", b"\xff\xd8"), ("Kept.PDF", b"%PDF"), ("run.v1", b"\x89PNG")],
    )
    def test_out_names_the_file_and_its_format_or_a_folder(
        self, capsys, picture, tmp_path, name, begin
    ):
        path = tmp_path / name
        if name == "run.v1":
            path.mkdir()
        out, err, code = run(capsys, "chat", picture, QUESTION, "--out", path, *SHORT)
        assert (code, err) == (0, "")
        (path,) = path.iterdir() if path.is_dir() else [path]
        assert path.read_bytes().startswith(begin)
        assert f"kept patches: {path}" in out

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("--policy full --budget 0.2", "policy full keeps everything: --budget 0.2 is ignored"),
            ("--policy full", ""),
            ("--budget 1", "a budget of 1 is one token"),
            ("--budget 1.0", ""),
            ("--policy snapkv --budget 0.05 --option window=40", "too few for window 40"),
        ],
    )
    def test_doubtful_input_prints_a_message(self, capsys, words, said):
        out, err, code = run(capsys, "chat", LONG, *SHORT, *words.split())
        assert code == 0
        assert said in err
        assert all(line.startswith("mmkv: ") for line in err.splitlines())
        assert bool(err) == bool(said)
        assert ("full, budget 1.0" in out) == ("full" in words)

    def test_ctrl_c_ends_it_without_a_traceback(self, capsys, picture, monkeypatch):
        def stop(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(Conversation, "ask", stop)
        assert run(capsys, "chat", picture, QUESTION) == ("", "", 130)

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (RuntimeError("a kernel\nfailed"), "failed: RuntimeError: a kernel failed (MMKV_"),
            (OSError(28, "No space left", "out/x.png"), "failed: out/x.png: No space left\n"),
            (torch.OutOfMemoryError("CUDA"), "failed: out of memory: use a smaller model"),
        ],
    )
    def test_a_failure_is_one_line_and_exit_code_1(self, capsys, picture, monkeypatch, error, said):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(Conversation, "ask", fail)
        out, err, code = run(capsys, "chat", picture, QUESTION)
        assert (code, out) == (1, "")
        assert err.startswith(f"mmkv: {said}")
        assert err.count("\n") == 1
        monkeypatch.setenv("MMKV_TRACEBACK", "1")
        assert "in fail" in run(capsys, "chat", picture, QUESTION)[1]

    @pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
    def test_seed_beyond_torchs_range_raises(self, capsys, picture, seed):
        out, err, code = run(capsys, "chat", picture, QUESTION, "--seed", seed)
        assert (out, code) == ("", 2)
        assert "Invalid value for '--seed'" in err

    @pytest.mark.slow
    def test_sampling_repeats_with_its_seed(self, ask):
        """And not with another: at this temperature words are any of the model's."""
        found = [ask("--temperature", 5, "--seed", seed)["full"]["answer"] for seed in (3, 3, 4)]
        assert found[0] == found[1] != found[2]

    @pytest.mark.slow
    def test_a_profile_of_layers_gives_the_budget_and_one_of_heads_does_not(self, ask, tmp_path):
        """... so that without one an eighth of the bytes is kept, as without a profile."""
        path = tmp_path / "profile.json"
        mmkv.Profile((0.3,) * LAYERS, budget=0.3).save(path)
        assert ask("--profile", path)["report"]["budget"] == 0.3
        profile_of(picture_chat().model).save(path)
        assert ask("--profile", path)["report"]["size"] == "memory 12.5%"

    @pytest.mark.slow
    def test_kept_pairs_in_few_bits(self, capsys, ask):
        # No groups, whose weights and members stay as they are.
        words = ("--policy", "prefixkv", "--budget", "0.5")
        whole, data = ask(*words), ask("--kv-dtype", "int8", *words)
        assert data["report"]["kv_dtype"] == "int8"
        assert 0 < data["report"]["key_error"] < 0.02
        # The newest tokens stay in the model's type: much of so short a prompt's cache.
        assert data["compressed"]["nbytes"] < 0.8 * whole["compressed"]["nbytes"]
        for question in ((QUESTION,), ()):
            said = complaint(capsys, "chat", *question, "--kv-dtype", "8")
            assert "int8, int4" in said

    @cases("budget", ["0", "-5", "0.0", "1.5", "-0.2", "3"], "0", "1.5", "3")
    def test_budget_out_of_range_or_below_pinned_tokens_raises(self, capsys, picture, budget):
        words = ("--policy", "streaming", "--budget", budget)
        said = complaint(capsys, "chat", picture, QUESTION, *words)
        assert f"budget={budget}" in said
        assert ("4 tokens" in said) == (budget == "3")


@cases(
    "words, expected",
    [
        (("--policy", "prefixvk"), "Did you mean 'prefixkv'?"),
        (("--option", "windo=3", "--policy", "snapkv"), "Did you mean 'window'?"),
        (("--option", "window=wide", "--policy", "snapkv"), "expected a whole number"),
        (("--option", "window", "--policy", "snapkv"), "expected name=value"),
        (("--option", "average_heads=maybe"), "expected true or false"),
        (("--option", "score=best"), "expected one of"),
        (("--option", "protect=all"), "expected one of ['instruction', 'none']"),
        (("--budget", "much"), "budget 'much'"),
        (("--model", "/no/such/model"), "cannot load model '/no/such/model': no such folder"),
        (("--model", __file__), "this is a file, but no .gguf file: name the model's folder"),
        (("--model", "."), "this folder holds no config.json"),
        (("--model", "somebody/nothing"), "it is no folder here, and "),
        (("--model", "bare"), "this folder holds no tokenizer: tokenizer.save_pretrained(folder)"),
        (("--device", "abacus"), "device 'abacus': expected cpu, cuda, cuda:1, mps or another"),
        (("--device", "meta"), "device 'meta'"),
        (("--dtype", "int8"), "dtype 'int8'"),
    ],
    *(("--policy", "prefixvk"), ("--option", "average_heads=maybe"), ("--model", "bare")),
)
def test_invalid_options_raise(capsys, picture, monkeypatch, tmp_path, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert expected in complaint(capsys, "chat", picture, QUESTION, *words)


@cases(
    "words, expected",
    [
        (("none.png", "x"), "'none.png': no such file\n"),
        (("text.png", "x"), "not a picture in a known format"),
        (("cut.png", "x"), "cut.png"),
        ((".", "x"), "'.'"),
        (("whole.png", "x", "--out", "kept.xyz"), "kept.xyz: expected a name that ends in .png"),
        (("whole.png", "x", "--out", "text.png/below"), "is a file"),
        (("whole.png", "whole.png", "x", "--out", "one.png"), "name a folder"),
        (("whole.png",), "no question: the last argument is the file 'whole.png'"),
        (("whole.png",), "mmkv chat --image whole.png"),
        (("whole.png", "missing.jpg"), "no question"),
        (("text.md",), "the file 'text.md': add the question after it\n"),
        (("missing.txt",), "the file 'missing.txt': add the question after it\n"),
        (("whole.png", "caf\udce9?"), r"'caf\udce9?' is not in UTF-8"),
        (("none.txt", "x"), "none.txt: no such file\n"),
        (("binary.log", "x"), "not a picture in a known format"),
        (("binary.txt", "x"), "binary.txt: not a text file in UTF-8"),
        (("whole.png", "-"), "standard input is empty"),
        (("whole.png", " "), "the question is empty"),
        (("blank.txt", "x"), "blank.txt is empty"),
        (("--json",), "--json needs a question"),
        (("--layers",), "--layers needs a question"),
        (("--out", "one.png"), "--out needs a question"),
        (("--context", "c", "whole.png", "x", "--out", "one.png"), "no figures are drawn"),
        (("x", "--out", "one.png"), "--out one.png: without a picture no figures are drawn"),
        (("--profile", "p.json"), "profile p.json: No such file"),
    ],
    *(("none.png", "x"), ("whole.png", "x", "--out", "kept.xyz"), ("--json",)),
)
def test_wrong_use_raises_before_model_loads(
    capsys, picture, monkeypatch, tmp_path, words, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat, "load", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "text.md").write_text("It rains.")
    (tmp_path / "blank.txt").write_text("\n")
    for name in ("binary.txt", "binary.log"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    (tmp_path / "whole.png").write_bytes(picture.read_bytes())
    (tmp_path / "cut.png").write_bytes(picture.read_bytes()[:1000])
    assert expected in complaint(capsys, "chat", *words)


def test_a_port_in_use_names_the_option(capsys, monkeypatch):
    monkeypatch.setattr(chat, "load", lambda *_: pytest.fail("loaded"))
    with terminal.bind("127.0.0.1", 0) as other:
        other.listen()
        port = other.getsockname()[1]
        said = complaint(capsys, "demo", "--port", port)
    assert f"port {port} is in use" in said
    assert "--port 0" in said
    assert "--host 192.0.2.1" in complaint(capsys, "demo", "--port", 0, "--host", "192.0.2.1")


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (("--budget", "25%"), {"budget": 0.25}),
        (("--memory", "8x"), {"memory": "8x"}),
        ((), {"memory": 0.125}),
    ],
)
def test_serve_runs_vllm_with_the_plugins_options(capsys, monkeypatch, size, named):
    """All options but its own are vLLM's, whatever their order."""
    given: list[str] = []
    monkeypatch.setattr("mmkv.cli.serve.find_spec", lambda name: object())
    monkeypatch.setattr("os.execv", lambda path, words: given.extend((path, *words)))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    words = ("--port", 0, "--policy", "snapkv", "--option", "window=8", "--max-num-seqs", 4)
    assert run(capsys, "serve", "some/model", *size, *words) == ("", "", 0)
    python, again, *rest = given
    assert (python, again) == (sys.executable, sys.executable)
    assert rest[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", "some/model"]
    assert rest[4] == "--additional-config"
    options = {"policy": "snapkv", "window": 8}
    assert json.loads(rest[5]) == {"mmkv": options | named}
    assert rest[6:] == ["--port", "0", "--max-num-seqs", "4"]
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_serve_measures_unmeasured_heads(monkeypatch):
    """They are saved where the plugin reads them; a second start measures nothing."""
    asked: list[str] = []
    loaded = SimpleNamespace(model=make_model("llama"))
    monkeypatch.setattr(chat, "load", lambda name, *_: asked.append(name) or loaded)
    monkeypatch.setattr("mmkv.cli.serve.find_spec", lambda name: object())
    monkeypatch.setattr("os.execv", lambda *_: None)
    for _ in range(2):
        commands.app(["serve", "some/model"], standalone_mode=False)
    assert asked == ["some/model"]
    shown = mmkv.Profile.load(probes.path_of("some/model")).retrieval
    assert shown == mmkv.probe(loaded.model).retrieval


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "an environment that has vllm==0.32.*"),
        (("--budget", 200), "a share of the prompt"),
        (("--budget", 0.2, "--memory", "8x"), "give one of 'budget'"),
        (("--policy", "kvzip"), "reads a prompt twice"),
        (("--additional-config", "{}"), "leave yours out"),
        (("--additional_config.other=1",), "leave yours out"),
        (("--policy", "snapkv", "--option", "windw=3"), "Did you mean 'window'?"),
    ],
)
def test_serve_refuses_before_vllm_starts(capsys, monkeypatch, words, why):
    monkeypatch.setattr("mmkv.cli.serve.find_spec", lambda name: object() if words else None)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    assert why in complaint(capsys, "serve", "some/model", *words)


@pytest.mark.parametrize("plugins", ["", "lora_resolver"])
def test_serve_refuses_a_list_of_plugins_without_mmkv(capsys, monkeypatch, plugins):
    monkeypatch.setattr("mmkv.cli.serve.find_spec", lambda name: object())
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    said = complaint(capsys, "serve", "some/model")
    assert f"VLLM_PLUGINS='{plugins}' keeps vLLM from loading mmkv" in said


def test_serve_refuses_an_option_before_the_model(capsys, monkeypatch):
    monkeypatch.setattr("mmkv.cli.serve.find_spec", lambda name: object())
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    said = complaint(capsys, "serve", "--port", 8000, "some/model")
    assert "--port is an option of vLLM's: name the model before" in said


@cases("width", ["80", "200"], "80")
@pytest.mark.parametrize("which", ["policies", "--parts"])
def test_policies_and_parts_are_listed_with_their_options(capsys, monkeypatch, width, which):
    monkeypatch.setenv("COLUMNS", width)
    out, _, code = run(capsys, "policies", *([which] if which == "--parts" else []))
    assert code == 0
    names = [f"{kind}={name}" for kind in parts.KINDS for name in registry.list_parts(kind)]
    said = ["distance=25: how"]
    if which == "policies":
        names = mmkv.list_policies()
        said = ["distance=25", "2412.03409", "accumulated", "pyramid", "adaptive", "ratio"]
    assert all(text in out for text in said)
    assert all(f"│ {name} " in out for name in names)
    assert max(map(cell_len, out.splitlines())) <= int(width)


def test_a_policys_options_are_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in mmkv.list_policies():
        out, _, code = run(capsys, "policies", name)
        assert (code, out.startswith(name)) == (0, True)
        rows = [x.strip("│").split("│") for x in out.splitlines() if x.startswith("│")]
        said = {x[0].partition("=")[0].strip(): x[1].strip() for x in rows}
        said.pop("", None)  # lines that continue a text
        assert said.keys() == registry.policy_class(name).options().keys()
        assert all(said.values())
    assert "Did you mean 'snapkv'?" in complaint(capsys, "policies", "snapk")
    assert "leave the name out" in complaint(capsys, "policies", "snapkv", "--parts")


def test_a_pipe_gets_lines_of_progress_with_the_time_left(capsys, monkeypatch):
    now = iter(range(0, 1000, 60))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    with terminal.bar(4) as advance:
        advance(1, "prompt 1")
        assert re.fullmatch(r"1 of 4, about \d+ min left: prompt 1\n", capsys.readouterr().err)


def test_the_time_left_of_a_resumed_run_counts_new_items_alone(capsys, monkeypatch):
    now = iter((0, 0, 600))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    with terminal.bar(100) as advance:
        advance(90, "earlier", 90)
        advance(5, "now")
    assert capsys.readouterr().err == "95 of 100, about 10 min left: now\n"


def test_pipe_is_as_wide_as_its_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(terminal.os, "isatty", lambda fd: False)
    assert terminal.console().width == 200
    monkeypatch.setattr(terminal.os, "isatty", lambda fd: fd == 2)
    assert terminal.console().width == Console().width != 200


def test_a_warning_is_printed_once_in_each_run(capsys):
    logger = logging.getLogger("mmkv.somewhere")
    for _ in range(2):
        terminal.show_warnings()
        for number in (1, 2, 1, 2):
            logger.warning("row %d is short", number)
        said = "mmkv: row 1 is short\nmmkv: row 2 is short\n"
        assert capsys.readouterr().err == said


def test_an_exception_is_printed_each_time_and_a_message_in_one_line(capsys):
    logger = logging.getLogger("mmkv.somewhere")
    terminal.show_warnings()
    for _ in range(2):
        logger.error("it failed", exc_info=KeyError("why"))
        assert "KeyError: 'why'" in capsys.readouterr().err
    logger.warning("a\nmmkv: b")
    assert capsys.readouterr().err == "mmkv: a mmkv: b\n"


def test_a_closed_pipe_is_no_error(capsys, monkeypatch):
    def closed():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("mmkv.tables.policy_markdown", closed)
    for name in ("stdout", "stderr"):  # typer replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    assert run(capsys, "policies", "--markdown")[1:] == ("", 1)


def test_values_of_options_follow_the_fields():
    parse = policy_options.parse_options
    assert parse("snapkv", ["window=8", "pooling=none", "kernel-size=3", "recent=1"]) == {
        "window": 8,
        "pooling": None,
        "kernel_size": 3,
        "recent": 1.0,
    }
    assert parse("xkv", ["retention=0.5", "average_heads=True", "protect=none"]) == {
        "retention": 0.5,
        "average_heads": True,
        "protect": "none",
    }
    assert parse("squeeze", ["base=local"]) == {"base": "local"}
    with pytest.raises(ValueError, match="option 'window=4': window is given twice"):
        parse("snapkv", ["window=8", "window=4"])


MINE = """
from dataclasses import dataclass

import mmkv
from mmkv.policy import Score
from mmkv.scores.window import WindowAttention

@mmkv.register_policy("mine")
@dataclass(frozen=True, kw_only=True)
class Mine(mmkv.Policy):
    \"\"\"One of a user's own.\"\"\"

    score: Score = WindowAttention(window=4)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("load")
def test_a_share_of_bytes_sets_tokens_and_type(ask, capsys):
    report = ask("--memory", "8x")["report"]
    assert report["size"] == "memory 12.5%"
    assert report["kv_dtype"] in ("int4", "int8")
    out, _, code = run(capsys, "chat", LONG, *SHORT, "--memory", "8x")
    assert code == 0
    assert "condense, memory 12.5%: 4 tokens" in out
    assert re.search(r"\ncache: [\d.]+ of [\d.]+ KiB \([\d.]+%\)\n", out)


def test_a_plan_in_bytes(capsys):
    for words, size, bits in ((("--memory", "16x"), "6.25%", 4), ((), "12.5%", 8)):
        out, _, code = run(capsys, "plan", "llama-8b-random", *words)
        assert code == 0
        assert re.search(rf"condense, memory {size}: at least [\d.]+% of tokens in int{bits}", out)


def test_verdict_gives_first_difference_and_gain():
    full = Side("a red ring on the left", 32, rate=25.0, nbytes=4096, full_nbytes=4096)
    same = dataclasses.replace(full, nbytes=1024, rate=40.0, compressed=True)
    assert verdict(full, same) == [
        "same answer", "cache: 1.0 of 4.0 KiB (25%)", "25 ms a token, full 40",
    ]  # fmt: skip
    assert len(verdict(full, dataclasses.replace(same, tokens=31))) == 2
    other = dataclasses.replace(same, text="a red box", rate=None, nbytes=5000)
    assert verdict(full, other) == [
        "the answers differ after 2 of 6 words: ring on the left / box",
        "cache: 4.9 of 4.0 KiB (122%), prompt too short to save memory",
    ]


@pytest.mark.usefixtures("load")
@cases("words", [("Hi",), ("Hi", "--budget", "0.5"), ("Hi", "--policy", "full")], ("Hi",))
def test_full_size_cache_gives_the_reason(capsys, words):
    out, _, code = run(capsys, "chat", *words, *SHORT)
    assert code == 0
    assert ("prompt too short to save memory" in out) == ("full" not in words)


@pytest.mark.parametrize(
    ("held", "full", "text"),
    [
        (1300, 10_000, "1.3 of 9.8 KiB (13%)"),
        (1_363_149, 10 * 2**20, "1.3 of 10.0 MiB (13%)"),
        (2**20, 2**24, "1.0 of 16.0 MiB (6.2%)"),
        (2**31, 2**32, "2.0 of 4.0 GiB (50%)"),
        (200, 100, "0.2 of 0.1 KiB (200%)"),
    ],
)
def test_held_and_full_bytes_as_text(held, full, text):
    assert terminal.of_bytes(held, full) == text


@pytest.mark.usefixtures("registering")
class TestPlugins:
    def test_policy_commands_accept_plugin_files(self):
        taking = set()
        for name, command in typer.main.get_command(commands.app).commands.items():
            options = {option for param in command.params for option in param.opts}
            if options & {"--policy", "--policies"}:
                taking.add(name)
                assert "--plugin" in options, name
        assert taking >= {"bench", "calibrate", "chat", "check", "eval", "plan", "plot", "serve"}

    def test_serve_hands_plugin_files_on_to_vllm(self, capsys, monkeypatch, tmp_path):
        (tmp_path / "file.py").write_text(MINE)
        given: list[str] = []
        monkeypatch.setattr("mmkv.cli.serve.find_spec", lambda name: object())
        monkeypatch.setattr("os.execv", lambda path, words: given.extend(words))
        words = ("--policy", "mine", "--plugin", tmp_path / "file.py")
        assert run(capsys, "serve", "some/model", *words) == ("", "", 0)
        config = json.loads(given[given.index("--additional-config") + 1])["mmkv"]
        assert config == {"policy": "mine", "memory": 0.125, "plugins": [str(tmp_path / "file.py")]}

    @pytest.mark.slow
    @pytest.mark.usefixtures("load")
    def test_plugin_policy_is_used(self, capsys, tmp_path):
        file = tmp_path / "random.py"  # it takes no other module's place
        file.write_text(MINE)
        out, _, code = run(capsys, "policies", "--plugin", file)
        assert (code, "mine" in out) == (0, True)
        assert sys.modules["random"] is random
        words = ("--plugin", file, "--policy", "mine", "--json")
        out = run(capsys, "chat", "Value of the key 1?", *words, *SHORT)[0]
        assert json.loads(out)["report"]["policy"] == "mine"

    @pytest.mark.parametrize(
        ("code", "why"),
        [
            ("1 / 0", "ZeroDivisionError: division by zero (in line 1 of "),
            ("raise SystemExit(0)", "SystemExit: 0"),
            ("x = 1", "registers nothing"),
            (MINE.replace('"mine"', '"snapkv"'), "'snapkv' is taken by mmkv.policies.snapkv"),
            (f"{MINE}\n1 / 0", "division by zero"),
            (None, "no such file"),
        ],
    )
    def test_broken_plugin_leaves_nothing(self, capsys, tmp_path, code, why):
        file = tmp_path / "file.py"
        if code is not None:
            file.write_text(code)
        before = mmkv.list_policies()
        said = complaint(capsys, "policies", "--plugin", file)
        assert said.startswith(f"mmkv: error: plugin {str(file)!r}")
        assert why in said
        assert mmkv.list_policies() == before

    def test_an_error_in_a_plugin_names_its_line(self, capsys, tmp_path):
        file = tmp_path / "file.py"
        broken = "    @property\n    def window_size(self):\n        return [1][3]"
        file.write_text(f"{MINE}\n{broken}\n")
        words = ("plan", "smollm2", "--policy", "mine", "--plugin", file)
        said, code = run(capsys, *words)[1:]
        line = 1 + file.read_text().splitlines().index("        return [1][3]")
        assert f"IndexError: list index out of range (in line {line} of {file})" in said
        assert code == 1


class TestExtras:
    """A package that is not there is named with the extra that has it."""

    NEEDED = (
        ("plot", "matplotlib", "plot"),
        ("report .", "pandas", "eval"),
        ("eval description", "pandas", "eval"),
        ("eval description", "rouge_score", "eval"),
        ("demo --port 0", "gradio", "demo"),
    )

    @pytest.mark.slow
    def test_missing_extra_is_named(self, tmp_path):
        """Before a model is loaded, in a process that has imported none of them."""
        code = (
            "import sys\n"
            "import mmkv.chat\n"
            "from mmkv.cli.commands import main\n"
            "mmkv.chat.load = None\n"
            f"for words, module, _ in {self.NEEDED!r}:\n"
            "    sys.modules[module] = None\n"
            "    try:\n"
            "        main(words.split())\n"
            "    except SystemExit as end:\n"
            "        assert end.code == 2\n"
            "    del sys.modules[module]\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        said = [
            f"mmkv: error: mmkv {words.split()[0]} needs {module}: pip install 'mmkv[{extra}]'"
            for words, module, extra in self.NEEDED
        ]
        assert (done.returncode, done.stdout, done.stderr.splitlines()) == (0, "", said)

    @pytest.mark.slow
    @pytest.mark.usefixtures("load")
    def test_chat_needs_no_extra(self, capsys, picture, tmp_path, monkeypatch):
        for module in (
            "matplotlib",
            "matplotlib.figure",
            "rouge_score",
            "rouge_score.rouge_scorer",
        ):
            monkeypatch.setitem(sys.modules, module, None)
        out, err, code = run(capsys, "chat", picture, QUESTION, "--out", tmp_path, *SHORT)
        assert (code, "\nfull cache: " in out) == (0, True)
        said = "mmkv: no picture written: that needs matplotlib: pip install 'mmkv[plot]'\n"
        assert (err, list(tmp_path.iterdir())) == (said, [])
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {picture}\n{QUESTION}\n"))
        words = ("--budget", "0.02", "--option", "least=0", *SHORT)
        out, err, code = run(capsys, "chat", *words)
        assert (code, "tokens/s" in out, "ROUGE" in out) == (0, True, False), err


def test_help_is_quick():
    code = (
        "import sys\n"
        "from mmkv.cli import commands\n"
        "for words in (['--help'], ['chat', '--help'], ['policies', '--help'], ['--version']):\n"
        "    try:\n"
        "        commands.main(words)\n"
        "    except SystemExit as stop:\n"
        "        assert not stop.code, words\n"
        "slow = {'torch', 'transformers', 'matplotlib', 'numpy', 'PIL'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "chat" in done.stdout
    assert mmkv.__version__ in done.stdout


# What may be misspelt, and what the one line says.
TYPOS = {
    "chat --policy snapk hi": "Did you mean 'snapkv'?",
    "chat --policy snapkv --option windw=3 hi": "Did you mean 'window'?",
    "chat --budget 150% hi": "budget=150%",
    "chat --model smolm2 hi": "Did you mean 'smollm2'?",
    "chat --model ./nowhere hi": "no such folder",
    "chat --dtype int8 hi": "dtype 'int8'",
    "chat --kv-dtype int3 hi": "int8, int4",
    "chat --profile nowhere.json hi": "nowhere.json",
    "chat --plugin nowhere.py hi": "no such file",
    "chat --plugin . hi": "plugin '.': expected a Python file",
    "chat nowhere.png hi": "no such file",
    "chat --json": "--json needs a question",
    "serve smollm2 --policy snapk": "Did you mean 'snapkv'?",
    "demo --model smollm2-vison": "Did you mean 'smollm2-vision'?",
    "check --policies snapk": "Did you mean 'snapkv'?",
    "check --budgets 0.1,much": "budget 'much'",
    "eval documnts": "Did you mean 'documents'?",
    "eval ruler --tasks niah": "Did you mean 'niah_single_1'?",
    "eval needle --length 512": "lengths of its own: leave it out",
    "eval xsum": "a JSONL file",
    "eval description --policies full,snapkv:windw=3": "Did you mean 'window'?",
    "eval description --metrics pl": "metric 'pl'",
    "eval description --question seen": "visible, hidden, both",
    "calibrate --budget 7": "keeps a fraction",
    "bench --policies snapk": "Did you mean 'snapkv'?",
    "bench --model llama-8b-rando": "Did you mean 'llama-8b-random'?",
    "chat --memory 0x hi": "such as 1/16, '6%' or '16x'",
    "chat --memory 16x --budget 0.2 hi": "leave --budget 0.2 out, or --memory",
    "chat --memory 6% --kv-dtype int8 hi": "leave --kv-dtype int8 out, or --memory",
    "eval description --memory 6%,200%": "memory='200%'",
    "check --memory 6% --budgets 0.2": "leave --budgets 0.2 out, or --memory",
    "plan smollm2 --gpu h1000": "gpu 'h1000'",
    "plan smollm2 --budget 0": "budget=0",
}


@pytest.mark.slow
def test_typo_raises_before_torch_is_imported(tmp_path):
    """In a process of its own: here torch and the registry are imported already."""
    code = (
        "import sys\n"
        "from mmkv.cli import commands\n"
        f"for words in {list(TYPOS)!r}:\n"
        "    try:\n"
        "        commands.main(words.split())\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 2, words\n"
        "    slow = {'torch', 'transformers', 'mmkv.registry'} & set(sys.modules)\n"
        "    assert not slow, (words, slow)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    said = done.stderr.splitlines()
    assert (done.returncode, len(said)) == (0, len(TYPOS)), done.stderr
    for (words, expected), line in zip(TYPOS.items(), said, strict=True):
        assert line.startswith("mmkv: error: "), words
        assert expected in line, words


def test_names_equal_registry():
    """Those by which a typo is found before anything is imported."""
    assert {*names.policies()} == {
        x for name in mmkv.list_policies() for x in (name, *registry.policy_class(name).aliases)
    }
    types = [registry.option_types(registry.policy_class(name)) for name in mmkv.list_policies()]
    assert names.options() == {option for x in types for option in x}
    arguments = {*inspect.signature(mmkv.wrap).parameters}
    assert {*names.OF_WRAP} == arguments - {"model", "policy", "policy_options"}
    assert [*speed.RANDOM] == [*models.SHAPES]


def test_misspelt_model_raises_without_hub():
    with pytest.raises(ValueError, match=r"'SmolLM'.*Did you mean 'smollm2'"):
        chat.load("SmolLM")


def test_printed_report_equals_terminal_table(text_model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    with mmkv.wrapped(text_model, "snapkv", 0.5), torch.no_grad():
        out = text_model(**make_inputs("llama", (60,)), use_cache=True)
    report = out.past_key_values.report()
    screen = Console(file=io.StringIO(), width=90)
    screen.print(report)
    assert f"{report}\n" == screen.file.getvalue()
    assert "┃ kept per head ┃" in str(report)
    assert "LayerReport" in repr(report)


def test_a_name_with_an_owner_is_left_to_the_hub():
    for name in ("somebody/smolm2", "gpt2", "Qwen2-VL-2B"):
        assert file_of(name) is None


@pytest.mark.slow
@pytest.mark.usefixtures("registering")
def test_a_policy_of_a_plugin_may_be_named_before_its_file(tmp_path):
    """In a process whose registry is not imported yet: a typo would be found without it."""
    (tmp_path / "file.py").write_text(MINE)
    words = ["plan", "smollm2", "--policy", "mine", "--plugin", "file.py", "--gpu", "h1000"]
    code = f"from mmkv.cli.commands import main\nmain({words!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "gpu 'h1000'" in done.stderr


@pytest.mark.slow
def test_a_model_from_a_folder(capsys, picture, tmp_path):
    model, processor = make_picture_chat()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    capsys.readouterr()  # progress of saving
    words = ("--model", tmp_path / "model", "--dtype", "bfloat16", "--json", "--out", tmp_path)
    out, _, code = run(capsys, "chat", picture, QUESTION, *words, *SHORT)
    assert code == 0
    assert len(json.loads(out)["png"]) == 1


@pytest.mark.slow
def test_a_text_model_from_a_folder(capsys, picture, tmp_path):
    model = make_model("llama")
    model.resize_token_embeddings(len(picture_chat().tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path)
    tokenizer = copy.deepcopy(picture_chat().tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()  # progress of saving
    words = ("--model", tmp_path, "--json", "--budget", "0.5", *SHORT)
    out, err, code = run(capsys, "chat", LONG, *words)
    assert (code, err) == (0, "")
    assert json.loads(out)["report"]["kept_fraction"] < 0.6
    words = [word for word in words if word != "--json"]
    assert "this model knows only" not in run(capsys, "chat", LONG, *words)[0]
    assert "reads text only" in complaint(capsys, "chat", picture, QUESTION, *words)
