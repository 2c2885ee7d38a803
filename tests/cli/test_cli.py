"""The command line: what it prints and writes, and one line with exit code 2 for bad input."""

from __future__ import annotations

import copy
import errno
import io
import json
import logging
import socket
import subprocess
import sys

import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

import mmkv
from helpers.models import make_model
from mmkv import chat, parts, registry, terminal
from mmkv.builtin import WEIGHTS, example_pictures
from mmkv.cli import commands

QUESTION = "Describe the image."
SHORT = ("--max-new-tokens", "4")


def run(capsys, *words):
    """stdout, stderr and exit code of a command."""
    try:
        commands.main([str(word) for word in words])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return printed.out, printed.err, code


def complaint(capsys, *words) -> str:
    """The one line that bad input gets."""
    out, err, code = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("mmkv: error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def picture():
    return example_pictures()[0]


@pytest.fixture(scope="module")
def builtin():
    return chat.load()


@pytest.fixture
def load(monkeypatch, builtin):
    """Commands get the built-in model without loading it again."""
    monkeypatch.setattr(chat, "load", lambda *args: builtin)


@pytest.mark.usefixtures("load")
class TestChat:
    def test_shows_answers_and_bytes_per_layer_and_writes_a_png(
        self, capsys, picture, tmp_path, builtin
    ):
        out, err, code = run(capsys, "chat", picture, QUESTION, "--out", tmp_path, *SHORT)
        assert (code, err) == (0, "")
        assert QUESTION in out
        assert "144 of them image tokens" in out
        assert "the built-in model knows drawn, coloured shapes" in out
        assert "full cache: " in out
        assert "condense, budget 0.2: " in out
        assert "least=64 keeps 64 of" in out
        layers = builtin.model.config.text_config.num_hidden_layers
        rows = [
            line for line in out.splitlines() if line.strip("│ ").split("│")[0].strip().isdigit()
        ]
        assert len(rows) == layers
        assert "KiB" in out
        (png,) = tmp_path.iterdir()
        assert f"kept patches: {png}" in out
        with Image.open(png) as image:
            assert image.format == "PNG"
            assert min(image.size) > 300

    @pytest.mark.slow
    def test_json(self, capsys, picture, tmp_path):
        words = ("--budget", "60", "--policy", "h2o", "--option", "recent=0.25", "--json", *SHORT)
        out, err, code = run(capsys, "chat", picture, QUESTION, "--out", tmp_path, *words)
        assert (code, err) == (0, "")
        data = json.loads(out)
        assert data["report"]["policy"] == "h2o"
        assert data["report"]["budget"] == 60
        assert data["compressed"]["nbytes"] == data["report"]["nbytes"] < data["full"]["nbytes"]
        assert data["prompt"]["image_tokens"] == 144
        assert [str(path) for path in tmp_path.iterdir()] == data["png"]

    @pytest.mark.slow
    def test_full_budget_changes_nothing(self, capsys, picture, tmp_path):
        words = ("--budget", "1.0", "--json", "--max-new-tokens", "12")
        data = json.loads(run(capsys, "chat", picture, QUESTION, "--out", tmp_path, *words)[0])
        assert data["compressed"]["answer"] == data["full"]["answer"]

    @pytest.mark.slow
    def test_a_picture_is_read_once_and_asked_again_from_a_file(self, capsys, picture, tmp_path):
        """With all tokens kept, what a file is asked is what the whole prompt answers."""
        whole = ("--budget", "1.0", "--json", "--max-new-tokens", "12")
        asked = (*whole, "--context", tmp_path / "scene")
        for i, question in enumerate((QUESTION, "Is there a ring?", QUESTION)):
            plain, _, _ = run(capsys, "chat", picture, question, "--out", tmp_path, *whole)
            words = [picture, question] if i == 0 else [question]
            out, err, code = run(capsys, "chat", *words, *asked)
            assert (code, err) == (0, "")
            found = json.loads(out)
            assert found["answer"] == json.loads(plain)["full"]["answer"]
            assert found["context"]["made"] == (i == 0)
            assert 144 < found["context"]["tokens"] < 155

    def test_a_context_is_of_a_picture_and_of_one_wrap(self, capsys, picture, tmp_path):
        path = tmp_path / "scene"
        out, _, code = run(capsys, "chat", picture, QUESTION, "--context", path, *SHORT)
        assert (code, path.exists()) == (0, True)
        assert f"read into {path}, held in" in out
        assert f"from {path}, held in" in run(capsys, "chat", "What?", "--context", path, *SHORT)[0]
        assert f"leave {picture} out" in complaint(capsys, "chat", picture, "x", "--context", path)
        none = complaint(capsys, "chat", "x", "--context", tmp_path / "none")
        assert "no such file; with a picture it is made" in none
        other = complaint(capsys, "chat", "x", "--context", path, "--budget", "0.3")
        assert "read with budget=0.2, and the model is wrapped with budget=0.3 now" in other
        assert len(other) < 300

    @pytest.mark.slow
    def test_several_pictures(self, capsys, tmp_path):
        first, second = example_pictures()[:2]
        words = (
            "--image",
            first,
            second,
            "Describe the second picture.",
            "--protect",
            "instruction",
        )
        out, _, code = run(capsys, "chat", *words, "--budget", "0.3", "--out", tmp_path, *SHORT)
        assert code == 0
        assert "288 of them image tokens" in out
        assert len(list(tmp_path.iterdir())) == 2

    @pytest.mark.slow
    def test_the_same_name_twice_makes_two_files(self, capsys, picture, tmp_path):
        run(capsys, "chat", picture, picture, QUESTION, "--out", tmp_path, *SHORT)
        assert len(list(tmp_path.iterdir())) == 2

    def test_text_only_from_standard_input(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is it? " * 20))
        out, _, code = run(capsys, "chat", "-", "--out", tmp_path / "none", *SHORT)
        assert code == 0
        assert "image tokens" not in out
        assert not (tmp_path / "none").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "begin"),
        [("kept.png", b"\x89PNG"), ("kept.jpg", b"\xff\xd8"), ("Kept.PDF", b"%PDF")],
    )
    def test_out_names_the_file_and_its_format(self, capsys, picture, tmp_path, name, begin):
        path = tmp_path / "deep" / name
        out, err, code = run(capsys, "chat", picture, QUESTION, "--out", path, *SHORT)
        assert (code, err) == (0, "")
        assert path.read_bytes().startswith(begin)
        assert f"kept patches: {path}" in out

    @pytest.mark.slow
    def test_a_folder_with_a_dot_in_its_name(self, capsys, picture, tmp_path):
        out = tmp_path / "run.v1"
        out.mkdir()
        assert run(capsys, "chat", picture, QUESTION, "--out", out, *SHORT)[2] == 0
        assert len(list(out.iterdir())) == 1

    @pytest.mark.slow
    def test_a_policy_that_keeps_everything_says_that_the_budget_is_ignored(
        self, capsys, picture, tmp_path
    ):
        words = ("chat", picture, QUESTION, "--policy", "full", "--out", tmp_path, *SHORT)
        out, err, code = run(capsys, *words, "--budget", "0.2")
        assert code == 0
        assert err == "mmkv: policy full keeps everything: --budget 0.2 is ignored\n"
        assert "full, budget 1.0" in out
        assert run(capsys, *words)[1] == ""

    @pytest.mark.slow
    def test_a_budget_of_one_token_says_so(self, capsys, picture, tmp_path):
        words = ("chat", picture, QUESTION, "--out", tmp_path, *SHORT, "--budget")
        assert run(capsys, *words, "1")[1].startswith("mmkv: a budget of 1 is one token")
        assert run(capsys, *words, "1.0")[1] == ""

    @pytest.mark.slow
    def test_a_warning_of_the_library_is_a_message(self, capsys, picture, tmp_path):
        words = ("--policy", "snapkv", "--option", "window=40", "--out", tmp_path, *SHORT)
        err = run(capsys, "chat", picture, QUESTION, *words)[1]
        assert err.startswith("mmkv: ")
        assert "too few for window 40" in err
        assert err.count("\n") == 1

    def test_ctrl_c_ends_it_without_a_traceback(self, capsys, picture, monkeypatch):
        def stop(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(chat, "ask", stop)
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

        monkeypatch.setattr(chat, "ask", fail)
        out, err, code = run(capsys, "chat", picture, QUESTION)
        assert (code, out) == (1, "")
        assert err.startswith(f"mmkv: {said}")
        assert err.count("\n") == 1
        monkeypatch.setenv("MMKV_TRACEBACK", "1")
        assert "in fail" in run(capsys, "chat", picture, QUESTION)[1]

    @pytest.mark.slow
    def test_sampling_repeats_with_its_seed(self, capsys, picture, tmp_path):
        words = ("--temperature", "1.5", "--seed", "3", "--json", "--out", tmp_path)
        first, second = (
            json.loads(run(capsys, "chat", picture, QUESTION, *words, *SHORT)[0]) for _ in range(2)
        )
        assert first["full"]["answer"] == second["full"]["answer"]

    @pytest.mark.slow
    def test_a_profile_gives_the_budget(self, capsys, picture, tmp_path, builtin):
        layers = builtin.model.config.text_config.num_hidden_layers
        path = tmp_path / "profile.json"
        mmkv.Profile((0.3,) * layers, budget=0.3).save(path)
        words = ("--profile", path, "--json", "--out", tmp_path)
        data = json.loads(run(capsys, "chat", picture, QUESTION, *words, *SHORT)[0])
        assert data["report"]["budget"] == 0.3

    def test_curves_serve_every_budget(self, capsys, picture, tmp_path):
        """... so that without one a fifth is kept, as without a profile."""
        path = WEIGHTS / "mmkv-profile.json"
        words = ("--profile", path, "--json", "--out", tmp_path)
        data = json.loads(run(capsys, "chat", picture, QUESTION, *words, *SHORT)[0])
        assert data["report"]["budget"] == 0.2

    @pytest.mark.slow
    def test_kept_pairs_in_few_bits(self, capsys, picture, tmp_path):
        # No groups, whose weights and members stay as they are.
        how = ("--policy", "prefixkv", "--budget", "0.5")
        words = (*how, "--json", "--out", tmp_path, *SHORT)
        whole = json.loads(run(capsys, "chat", picture, QUESTION, *words)[0])["compressed"]
        words = ("--kv-dtype", "int8", *words)
        data = json.loads(run(capsys, "chat", picture, QUESTION, *words)[0])
        assert data["report"]["kv_dtype"] == "int8"
        assert 0 < data["report"]["key_error"] < 0.02
        assert data["compressed"]["nbytes"] < 0.3 * whole["nbytes"]
        assert "'int8' or 'int4'" in complaint(capsys, "chat", QUESTION, "--kv-dtype", "8")
        assert "'int8' or 'int4'" in complaint(capsys, "chat", "--kv-dtype", "8")

    @pytest.mark.slow
    def test_the_model_is_left_unwrapped(self, capsys, picture, tmp_path, builtin):
        run(capsys, "chat", picture, QUESTION, "--out", tmp_path, *SHORT)
        assert "_mmkv" not in vars(builtin.model)

    def test_a_budget_below_what_must_be_kept(self, capsys, picture):
        words = ("--policy", "streaming", "--budget", "3")
        said = complaint(capsys, "chat", picture, QUESTION, *words)
        assert "budget=3" in said
        assert "4 tokens" in said

    def test_an_unwritable_folder(self, capsys, picture, tmp_path):
        (tmp_path / "file").touch()
        out = tmp_path / "file" / "below"
        assert "file" in complaint(capsys, "chat", picture, QUESTION, "--out", out, *SHORT)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--policy", "prefixvk"), "Did you mean 'prefixkv'?"),
        (("--option", "windo=3", "--policy", "snapkv"), "Did you mean 'window'?"),
        (("--option", "window=wide", "--policy", "snapkv"), "expected a whole number"),
        (("--option", "window", "--policy", "snapkv"), "expected name=value"),
        (("--option", "average_heads=maybe"), "expected true or false"),
        (("--option", "score=best"), "expected one of"),
        (("--protect", "all"), "expected one of ['instruction', 'none']"),
        (("--budget", "much"), "budget 'much'"),
        (("--model", "/no/such/model"), "cannot load model '/no/such/model': no such folder"),
        (("--model", "./model"), "cannot load model './model': no such folder"),
        (("--model", __file__), "this is a file, and no .gguf file; name the model's folder"),
        (("--model", "somebody/nothing"), "it is no folder here, and "),
        (("--device", "abacus"), "device 'abacus'"),
        (("--device", "meta"), "device 'meta'"),
        (("--dtype", "int8"), "dtype 'int8'"),
    ],
)
def test_bad_options(capsys, picture, words, expected):
    assert expected in complaint(capsys, "chat", picture, QUESTION, *words)


@pytest.mark.parametrize("budget", ["0", "-5", "0.0", "1.5", "-0.2"])
@pytest.mark.usefixtures("load")
def test_budget_out_of_range(capsys, picture, budget):
    assert f"budget={budget}" in complaint(capsys, "chat", picture, QUESTION, "--budget", budget)


def test_missing_picture(capsys, tmp_path):
    missing = tmp_path / "none.png"
    assert complaint(capsys, "chat", missing, QUESTION).endswith(
        f"{str(missing)!r}: no such file\n"
    )


def test_broken_pictures(capsys, picture, tmp_path):
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    assert "not a picture in a known format" in complaint(capsys, "chat", text, QUESTION)
    cut = tmp_path / "cut.png"
    cut.write_bytes(picture.read_bytes()[:2000])
    assert "cut.png" in complaint(capsys, "chat", cut, QUESTION)
    assert str(tmp_path) in complaint(capsys, "chat", tmp_path, QUESTION)


def test_a_folder_without_a_model(capsys, picture, tmp_path):
    said = complaint(capsys, "chat", picture, QUESTION, "--model", tmp_path)
    assert "this folder holds no config.json" in said


@pytest.mark.parametrize(
    ("out", "expected"),
    [("kept.xyz", "kept.xyz: expected a name that ends in .png"), ("file/below", "is a file")],
)
def test_an_impossible_out_is_refused_before_a_model_is_loaded(
    capsys, picture, monkeypatch, tmp_path, out, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(chat, "load", lambda *_: pytest.fail("loaded"))
    assert expected in complaint(capsys, "chat", picture, QUESTION, "--out", out)


def test_a_port_in_use_names_the_option(capsys, monkeypatch):
    monkeypatch.setattr(chat, "load", lambda *_: pytest.fail("loaded"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = complaint(capsys, "demo", "--port", port)
    assert f"port {port} is in use" in said
    assert "--port 0" in said
    assert "--host 192.0.2.1" in complaint(capsys, "demo", "--port", 0, "--host", "192.0.2.1")


def test_what_only_a_question_uses_is_refused_without_one(capsys, picture):
    for words in (("--json",), ("--profile", "p.json")):
        assert f"{words[0]} needs a question" in complaint(capsys, "chat", *words)
    assert "2 times --image" in complaint(capsys, "chat", "--image", picture, "--image", picture)


def test_no_question(capsys, picture, monkeypatch):
    said = complaint(capsys, "chat", picture)
    assert "no question" in said
    assert f"mmkv chat --image {picture}" in said
    assert "no question" in complaint(capsys, "chat", picture, "missing.jpg")
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert "the question is empty" in complaint(capsys, "chat", picture, "-")


def test_two_pictures_do_not_fit_one_file(capsys, picture):
    words = (picture, picture, QUESTION, "--out", "one.png")
    assert "name a folder" in complaint(capsys, "chat", *words)


@pytest.mark.parametrize("width", ["80", "200"])
def test_policies_lists_every_policy(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    out, _, code = run(capsys, "policies")
    assert code == 0
    for name in mmkv.list_policies():
        assert f"│ {name} " in out
    for text in ("distance=25", "2412.03409", "accumulated", "pyramid", "adaptive", "ratio"):
        assert text in out
    assert max(map(cell_len, out.splitlines())) <= int(width)


@pytest.mark.parametrize("width", ["80", "200"])
def test_policies_lists_every_part_with_what_its_options_are(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    out, _, code = run(capsys, "policies", "--parts")
    assert code == 0
    for kind in parts.KINDS:
        for name in registry.list_parts(kind):
            assert f"│ {kind}={name} " in out
    assert "distance=25: how" in out
    assert max(map(cell_len, out.splitlines())) <= int(width)


def test_a_wide_table_is_printed_in_parts():
    names = [f"column {i}" for i in range(9)]
    rows = [("snapkv:window=8 0.2", [f"{i}.{i}{i} (0.0-9.9)" for i in range(9)]), ("none", ["-"])]
    table = terminal.Table("kept", names, rows, "a title")
    for width in (50, 80, 500):
        screen = Console(file=io.StringIO(), width=width)
        screen.print(table)
        lines = screen.file.getvalue().splitlines()
        assert max(map(cell_len, lines)) <= width
        assert lines[0] == "a title"
        for text in (*names, *rows[0][1]):
            assert sum(text in line for line in lines) == 1, (width, text)
        parts = sum("┏" in line for line in lines)
        assert parts == sum(rows[0][0] in line for line in lines)
        assert (parts == 1) == (width == 500)


def test_a_pipe_is_as_wide_as_the_terminal_that_shows_it(monkeypatch):
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


def test_a_closed_pipe_is_no_error(capsys, monkeypatch):
    def closed():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("mmkv.tables.policy_markdown", closed)
    for name in ("stdout", "stderr"):  # typer replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    assert run(capsys, "policies", "--markdown")[1:] == ("", 1)


def test_values_of_options_follow_the_fields():
    parse = chat.parse_options
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


def test_the_evaluation_gets_its_words_unread(monkeypatch):
    """`mmkv eval --help` and all the rest is for mmkv.eval.cli, imported only then."""
    import types

    import typer

    mounted, seen = typer.Typer(), []

    @mounted.command(context_settings={"ignore_unknown_options": True})
    def plot(words: list[str]) -> None:
        seen.extend(words)

    @mounted.command()
    def report() -> None: ...

    fake = types.ModuleType("mmkv.eval.cli")
    fake.commands = mounted
    monkeypatch.setitem(sys.modules, "mmkv.eval.cli", fake)
    fresh = typer.Typer()
    fresh.command("chat")(commands.chat)
    monkeypatch.setattr(commands, "app", fresh)
    monkeypatch.setattr(commands, "find_spec", lambda name: True)
    commands._mount("mmkv.eval", {"plot": "", "report": ""})
    with pytest.raises(SystemExit):
        commands.main(["plot", "--dark", "a", "b"])
    assert seen == ["--dark", "a", "b"]


def test_help_and_policies_are_quick():
    code = (
        "import sys\n"
        "from mmkv.cli import commands\n"
        "for words in (['--help'], ['chat', '--help'], ['policies'], ['--version']):\n"
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


def test_a_model_from_a_folder(capsys, picture, tmp_path):
    words = ("--model", WEIGHTS, "--dtype", "bfloat16", "--json", "--out", tmp_path)
    out, _, code = run(capsys, "chat", picture, QUESTION, *words, *SHORT)
    assert code == 0
    assert len(json.loads(out)["png"]) == 1


@pytest.mark.slow
def test_a_text_model_from_a_folder(capsys, picture, builtin, tmp_path):
    model = make_model("llama")
    model.resize_token_embeddings(len(builtin.processor.tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path)
    tokenizer = copy.deepcopy(builtin.processor.tokenizer)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()  # progress of saving
    words = ("--model", tmp_path, "--json", "--budget", "0.5", *SHORT)
    out, err, code = run(capsys, "chat", "What is it? " * 40, *words)
    assert (code, err) == (0, "")
    assert json.loads(out)["report"]["kept_fraction"] < 0.6
    words = [word for word in words if word != "--json"]
    assert "built-in" not in run(capsys, "chat", "What is it? " * 40, *words)[0]
    assert "reads text only" in complaint(capsys, "chat", picture, QUESTION, *words)
