"""Prompts that are compressed before their question is known (`--question hidden`)."""

import time
from dataclasses import replace

import pytest
import torch

import mmkv
from helpers.evaluation import asking, make_samples, make_tokenizer
from helpers.marks import cases
from helpers.picture_chat import make_processor
from mmkv.eval import runner
from mmkv.eval.prompts import Encoder
from mmkv.eval.samples import Sample
from mmkv.eval.suites.registry import SUITES, load_suite
from mmkv.eval.variants import with_question

ASKING = sorted(name for name, suite in SUITES.items() if suite.words)


@pytest.fixture(scope="module")
def samples():
    return asking(make_samples())


def run(model, samples, out, policies, budget):
    how = {"policies": policies, "budgets": [budget], "batch_size": 2}
    return runner.run(model, make_tokenizer(), samples, out=out, **how)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["", ":evict_chunks=5"])
def test_hidden_question_at_full_budget_equals_the_full_cache(model, samples, tmp_path, chunk):
    """Perplexity and reply after a separate context are those of the whole prompt."""
    rows = run(model, samples, tmp_path, ["full", f"snapkv:question=hidden{chunk}"], 1.0)
    full = {r["index"]: r for r in rows if r["policy"] == "full"}
    hidden = {r["index"]: r for r in rows if r["policy"] != "full"}
    assert full.keys() == hidden.keys()
    for i, row in hidden.items():
        assert row["options"]["question"] == "hidden"
        assert row["ppl"] == pytest.approx(full[i]["ppl"], rel=1e-4)
        assert row["answer_tokens"] == full[i]["answer_tokens"]
        assert row["text"] == full[i]["text"]
        assert 0 < row["prompt_tokens"] < full[i]["prompt_tokens"]


def test_the_context_is_compressed_without_the_question(model, samples, tmp_path):
    """What the rows say of the cache, and the reply, are those of `read` and `ask` by hand."""
    rows = run(model, samples, tmp_path, ["snapkv:question=hidden:window=2"], 0.5)
    tokenizer = make_tokenizer()
    for row in [r for r in rows if r["policy"] != "full"]:
        sample = samples[row["index"]]
        ids = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
        asked = tokenizer(sample.question, add_special_tokens=False)["input_ids"]
        context, question = ids[:, : -len(asked)], ids[:, -len(asked) :]
        assert question[0].tolist() == asked
        with mmkv.wrapped(model, "snapkv", 0.5, window=2):
            read = mmkv.read(model, {"input_ids": context})
            said = read.ask(
                {"input_ids": question}, max_new_tokens=sample.max_new_tokens, do_sample=False
            )
        assert row["prompt_tokens"] == context.shape[1]
        assert row["kept_fraction"] == pytest.approx(read.report().kept_fraction)
        assert row["text"] == tokenizer.decode(said[0], skip_special_tokens=True).strip()


@pytest.mark.slow
def test_pictures_belong_to_the_context():
    processor = make_processor()
    encoder = Encoder(processor)
    samples = load_suite("description", limit=3)
    samples[1] = replace(samples[1], prompt="Is there a ring?")
    whole = encoder.batch(samples)
    context, question = encoder.apart(samples)
    assert torch.equal(context["pixel_values"], whole["pixel_values"])
    assert "pixel_values" not in question
    image = processor.image_token_id
    for b, sample in enumerate(samples):
        parts = [x["input_ids"][b][x["attention_mask"][b].bool()] for x in (context, question)]
        assert torch.equal(torch.cat(parts), whole["input_ids"][b][whole["attention_mask"][b] > 0])
        assert (parts[0] == image).sum() == (whole["input_ids"][b] == image).sum() > 0
        assert sample.prompt in processor.tokenizer.decode(parts[1])
        assert not set(sample.prompt.split()) & set(processor.tokenizer.decode(parts[0]).split())


@cases("suite", ASKING, *(x for x in ASKING if x != "ruler"))
def test_every_suite_has_questions_apart(suite):
    for sample in load_suite(suite, limit=14):
        assert sample.prompt.endswith(sample.asked)
        assert sample.images or len(sample.asked) < len(sample.prompt) / 2


def test_hiding_without_question_raises(model, samples, tmp_path):
    bare = [replace(s, question="") for s in samples]
    rows = run(model, bare, tmp_path, ["snapkv:question=hidden"], 0.5)
    errors = [r["error"] for r in rows if r["policy"] != "full"]
    assert all("is not a context and then a question" in e for e in errors)
    with pytest.raises(ValueError, match="is not a context and then a question"):
        Encoder(make_tokenizer()).apart([Sample(id="a", prompt="text", question="else")])
    words = samples[0].prompt * 9
    long = replace(samples[0], truncate=True, prompt=words, question=words[2:])
    encoder = Encoder(make_tokenizer(), max_length=96 + long.max_new_tokens)
    with pytest.raises(ValueError, match="longer than half of the prompt"):
        encoder.apart([long])


def test_policies_are_doubled_but_for_the_full_cache():
    names = ["full", "snapkv:window=4"]
    hidden = "snapkv:window=4:question=hidden"
    assert with_question(names, "visible") == names
    assert with_question(names, "hidden") == ["full", hidden]
    assert with_question(names, "both") == [*names, hidden]
    with pytest.raises(ValueError, match="question='no': expected one of visible, hidden, both"):
        with_question(names, "no")


@pytest.mark.slow
def test_a_context_is_read_once_for_all_of_its_questions(model, samples, tmp_path, monkeypatch):
    """Two contexts with two questions each, one with one: the rows are as from separate runs."""
    last = samples[2]
    other = "w7 w8 w9"
    more = [
        replace(s, id=f"{s.id}-1", prompt=s.prompt.removesuffix(s.question) + other, question=other)
        for s in samples[:2]
    ]
    asked = [*samples[:2], last, *more]
    read, calls = mmkv.read, []

    def slow_read(*args, **options):
        calls.append(args)
        time.sleep(0.3)
        return read(*args, **options)

    monkeypatch.setattr(mmkv, "read", slow_read)
    policies = ["snapkv:question=hidden:window=2", "h2o:question=hidden"]
    rows = run(model, asked, tmp_path / "once", policies, 0.5)
    assert len(calls) == len(policies) * 2
    longest = max(row["new_tokens"] for row in rows)
    for row in [r for r in rows if r["policy"] != "full"]:
        assert row["first_token_s"] > 0.3, "the time leaves out reading the context"
        assert row["tokens_per_s"] < 2 * longest / 0.3  # two replies in a batch
        sample = asked[row["index"]]
        alone = run(model, [sample], tmp_path / row["policy"][:3] / sample.id, [row["policy"]], 0.5)
        (same,) = [r for r in alone if r["policy"] != "full"]
        assert row["text"] == same["text"]
        assert row["ppl"] == pytest.approx(same["ppl"], rel=1e-4)
        assert row["kept_fraction"] == pytest.approx(same["kept_fraction"])


def test_batches_of_one_question_each_are_in_order(samples):
    n = len(samples)
    expected = [[tuple(range(i, min(i + 2, n)))] for i in range(0, n, 2)]
    assert runner.batches_of(samples, 2) == expected
