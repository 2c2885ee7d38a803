"""How far a prompt travels through the code, and how much of it there is."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import mmkv
from mmkv import chat
from mmkv.builtin import example_pictures

HOME = Path(mmkv.__file__).resolve().parent
OWN = (f"{HOME}/", f"{HOME.parent}/policies/")
# Files run through, and changes of the running file per layer of a prompt and of a step.
MOST = {"snapkv": (27, 20, 8), "condense": (30, 39, 9)}


def traced(call) -> list[str]:
    """The files of the package that a call runs through, in order, without repeats in a row."""
    way: list[str] = []

    def seen(frame, event, _):
        name = os.path.realpath(frame.f_code.co_filename) if event == "call" else ""
        if name.startswith(OWN) and name.endswith(".py") and way[-1:] != [name]:
            way.append(name)

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return way


@pytest.mark.parametrize("policy", MOST)
def test_a_prompts_way_is_no_longer_than_it_was(policy, caplog):
    caplog.set_level("ERROR", "mmkv")  # a command that ran before may have set up the log
    loaded = chat.load()
    model, picture = loaded.model, Image.open(sorted(example_pictures())[0])
    inputs = chat.encode(loaded, "Describe the picture.", [picture])

    def generate(new: int) -> torch.Tensor:
        return model.generate(**inputs, max_new_tokens=new, do_sample=False)

    with mmkv.wrapped(model, policy, 0.2):
        generate(4)  # what is made once is made
    wrap = traced(lambda: mmkv.wrap(model, policy, 0.2))
    prompt, both = (traced(lambda new=new: generate(new)) for new in (1, 2))
    mmkv.unwrap(model)
    layers = model.config.get_text_config().num_hidden_layers
    step = (len(both) - len(prompt)) / layers
    files = {os.path.relpath(x, HOME) for x in (*wrap, *prompt, *both)}
    found = len(files), round(len(prompt) / layers), round(step)
    assert all(n <= most for n, most in zip(found, MOST[policy], strict=True)), (found, files)


def test_the_source_is_no_longer_than_the_page_says():
    root = Path(__file__).parents[2]
    (said,) = re.findall(r"fewer than ([\d,]+) lines", (root / "docs/architecture.md").read_text())
    folders = ("mmkv", "policies", "eval", "demo")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    assert 20_000 < lines < int(said.replace(",", ""))
