"""Untrusted files run no code, read nothing outside their folder, and use bounded memory."""

import json
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.memory import bounded
from helpers.models import make_model
from mmkv import chat
from mmkv.eval import store
from mmkv.eval.speed.models import Replies
from mmkv.eval.suites.registry import load_suite

SOURCES = Path(__file__).parents[2]


class Evil:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_sources_execute_no_input():
    """What could run a stranger's code is not called anywhere in the package."""
    unsafe = re.compile(
        r"trust_remote_code=True|weights_only=False|import pickle|marshal|shell=True|os\.system"
        r"|(?<![.\w])(eval|exec)\(|use_safetensors=False|from yaml|yaml\.(?!safe_load|YAMLError)"
    )
    folders = [SOURCES / name for name in ("mmkv", "policies", "eval", "demo")]
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if unsafe.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("load", [chat.load, lambda x: chat.load(x, device_map="cpu")])
def test_pickled_weights_are_not_loaded(tmp_path, load):
    model = make_model("llama")
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "m" / "tokenizer.json").touch()  # a folder without one is refused for that
    state = {**model.state_dict(), "evil": Evil(tmp_path / "ran")}
    for name in ("pytorch_model.bin", "model.bin"):
        (tmp_path / "m" / name).write_bytes(pickle.dumps(state))
    with pytest.raises(ValueError, match=r"cannot load model.* model\.safetensors"):
        load(str(tmp_path / "m"))
    assert not (tmp_path / "ran").exists()


def test_kvpress_process_loads_no_pickled_weights(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    asked = {"path": str(tmp_path), "device": "cpu", "dtype": "float32"}
    replies = Replies()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        replies.load(**asked, threads=torch.get_num_threads())


@pytest.mark.parametrize("load", [chat.load, lambda x: chat.load(x, device_map="cpu")])
def test_code_beside_weights_is_not_run(tmp_path, load):
    folder = tmp_path / "m"
    make_model("llama").save_pretrained(folder)
    (folder / "code.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'ran').touch()"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"cannot load model.*(remote|custom) code|model type"):
        load(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**12},
        {"vocab_size": "many"},
        {"hidden_size": 10**9},
        {"intermediate_size": 10**12},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 10**9, "head_dim": 10**9},
        {"num_attention_heads": 0},
        {"hidden_size": -1},
        {"hidden_size": [64]},
        {"hidden_act": "__import__('os')"},
        {"mm_vision_select_layer": "x"},
        {"rope_scaling": {"rope_type": "yarn", "factor": "x"}},
        {"mm_vision_tower": "../../../etc"},
        {"mm_vision_tower": None},
    ],
    ids=str,
)
def test_checkpoint_with_wrong_sizes_raises(write, changes):
    folder = write(**changes)
    with bounded(), pytest.raises(ValueError, match=r"fit|expected|vision tower|mm_vision"):
        mmkv.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@cases("text", ["{", "[]", "[" * 100_000, '"text"', "\xff", "{}", "[1e999]"], "{", "[" * 100_000)
def test_checkpoint_with_broken_json_raises(write, name, text):
    folder = write()
    (folder / name).write_text(text, encoding="latin-1")
    if name == "generation_config.json" and text == "{}":
        return
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        mmkv.load(folder)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        pytest.param(b"\xff" * 100, marks=pytest.mark.slow),
        struct.pack("<Q", 2**60) + b"{",
        struct.pack("<Q", 2) + b"{}",
    ],
)
def test_checkpoint_with_broken_weights_raises(write, raw):
    folder = write()
    (folder / "model.safetensors").write_bytes(raw)
    with bounded(), pytest.raises(ValueError, match=re.escape(str(folder))):
        mmkv.load(folder)


def article(text: str) -> str:
    return json.dumps({"article": text, "highlights": "x"})


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 10**6,
        b'{"article": ' + b"9" * 10_000 + b"}",
        b'{"article": NaN, "highlights": "x"}',
        b'{"article": "\\ud800", "highlights": "x"}',
        article("x").encode("utf-16"),
        b"\xff\xfe",
        b"!!python/object/apply:os.system ['touch ran']",
        b'"' + b"x" * (33 * 2**20),
    ],
    ids=lambda raw: str(raw[:30]),
)
def test_invalid_sample_line_raises(tmp_path, raw):
    path = tmp_path / "cnn_dailymail.jsonl"
    path.write_bytes(article("good").encode() + b"\n" + raw)
    with bounded(), pytest.raises(ValueError, match=r"cnn_dailymail\.jsonl: line 2"):
        load_suite("cnn_dailymail", path)


@pytest.mark.parametrize("suite", ["description", "mmvet", "cnn_dailymail", "longbench", "needle"])
def test_device_as_data_raises(suite):
    with bounded(), pytest.raises(ValueError, match="/dev/zero: no such file"):
        load_suite(suite, "/dev/zero")


@pytest.mark.parametrize("line", ["[" * 100_000, "[]", "3", "{}", "null", '{"policy": 3}', "\xff"])
def test_invalid_run_folder_raises(tmp_path, line):
    row = '{"policy": "full", "budget": 1.0, "index": 0}'
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{line}\n{row[:9]}", encoding="latin-1")
    with pytest.raises(store.RunError, match="line 2 is not a row"):
        store.read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "run.json").write_text(line, encoding="latin-1")
    with pytest.raises(store.RunError, match=r"run\.json"):
        store.read_settings(tmp_path)


@pytest.mark.slow
def test_import_opens_no_program_or_connection():
    """No program and no connection; `mmkv.check` needs none of the evaluation's packages."""
    code = (
        "import socket, subprocess, sys\n"
        "held = socket.socket, subprocess.Popen; socket.socket = subprocess.Popen = None\n"
        "import mmkv; socket.socket, subprocess.Popen = held\n"
        "sys.modules['pandas'] = sys.modules['rouge_score'] = None\n"
        "from mmkv.cli import commands; print(mmkv.check.__module__)\n"
        "commands.main(['check', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("mmkv.eval.check"), done.stderr
    assert "--within" in done.stdout
