"""The engine under load."""

import re

import pytest
import torch
from test_bench import TOY

import mmkv
from helpers.commands import run
from mmkv import chat
from mmkv.eval.speed import serve
from mmkv.eval.speed.models import SHAPES
from mmkv.eval.speed.serve import Timing, summary
from mmkv.serving import prompts


def test_what_clients_waited_is_summed_up():
    timings = [Timing(0.0, [1.0, 1.5, 2.0]), Timing(1.0, [5.0, 5.1, 5.2], together=2)]
    first, between, tokens, together = summary(timings)
    assert first.startswith("2.50 /")
    assert between.startswith("300 /")
    assert float(tokens) == pytest.approx(6 / 5.2, abs=0.05)
    assert together == "2"


SMALL = ["--requests", "3", "--tokens", "64", "--pictures", "1", "--new", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--rate", "4"], ["--clients", "2", "--documents", "1"]], ids=str)
def test_the_table(how, capsys):
    out, _, code = run(capsys, "bench", "serve", *SMALL, *how)
    assert code == 0
    assert re.search(r"generate, one by one │ +\d.* 1 │ +1.00 │", out)


@pytest.mark.parametrize("random", [True, False])
def test_questions_about_one_text_share_it(random):
    """All but the question is the shared part, and the parts are the whole prompt."""
    model, processor = mmkv.load_builtin()
    loaded = chat.Loaded("builtin", model, None if random else processor)
    first, second, third = serve.make_requests(loaded, 3, 64, int(not random), documents=2)
    for asked in (first, second, third):
        assert asked.prefix is not None
        assert asked.rest is not None
        whole = torch.cat([asked.prefix["input_ids"], asked.rest["input_ids"]], dim=1)
        assert torch.equal(whole, asked.inputs["input_ids"])
        assert ("pixel_values" in asked.prefix) != random
    assert prompts.digest(first.prefix, "") == prompts.digest(third.prefix, "")
    assert prompts.digest(first.prefix, "") != prompts.digest(second.prefix, "")
    assert not torch.equal(first.inputs["input_ids"], third.inputs["input_ids"])


def test_questions_about_real_documents(tmp_path):
    words = [f"Word {chr(97 + i)} follows here." * 60 for i in range(3)]
    for i, text in enumerate(words):
        (tmp_path / f"{i}.txt").write_text(text)
    loaded = chat.Loaded("builtin", *mmkv.load_builtin())
    asked = serve.make_requests(loaded, 4, 100, 0, documents=2, data=tmp_path)
    tokenizer = loaded.processor.tokenizer
    told = [tokenizer.decode(x.inputs["input_ids"][0], skip_special_tokens=True) for x in asked]
    first, second, third, _ = told
    (about,) = [text for text in words if text[:40] in first]
    assert about[:40] in third
    assert about[:40] not in second
    assert first.rstrip().endswith("Summarize the text above in a few sentences. ASSISTANT:")
    assert "Answer in one sentence." in third
    with pytest.raises(ValueError, match="3 texts have 100 tokens or more, and 4 are asked about"):
        serve.make_requests(loaded, 4, 100, 0, documents=4, data=tmp_path)


def test_replies_agree_by_the_words_before_they_end():
    loaded = chat.Loaded("builtin", *mmkv.load_builtin())
    tokenizer = loaded.processor.tokenizer

    def timing(text, behind=""):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        behind = tokenizer(behind, add_special_tokens=False).input_ids
        return Timing(0.0, [], [*ids, tokenizer.eos_token_id, *behind])

    full = [timing("red circle"), timing("blue star", "green ring")]
    other = [timing("red circle", "blue"), timing("blue ring")]
    assert serve.agreement(loaded, full, full) == "1.00"
    assert serve.agreement(loaded, other, full) == "0.75"
    assert serve.agreement(chat.Loaded("random", None, None), full, full) == "-"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "64", "serve"], "--prompt stands before 'serve'"),
        (["serve", "--prompt", "64"], "--prompt"),
        (["server"], "server"),
        (["serve", "--model", "llama-120m-random", "--data", "."], "has no tokenizer"),
    ],
)
def test_options_of_the_other_command_are_refused(words, said, capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "llama-120m-random", TOY)
    _, err, code = run(capsys, "bench", *words)
    assert code == 2
    assert said in err


def test_each_command_has_its_own_help(capsys):
    for words, option in ((["bench"], "--preset"), (["bench", "serve"], "--documents")):
        assert option in run(capsys, *words, "--help")[0]
