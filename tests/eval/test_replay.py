"""One pass of a prompt gives the cache of every policy: the same as a pass of its own."""

import pytest
import torch

import mmkv
from helpers import zoo
from helpers.evaluation import asking, make_samples, make_tokenizer
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.oracle import EITHER, ROWS, Variant, depth, options_of
from mmkv.eval.replay import Capture, applies
from mmkv.eval.runner import run
from mmkv.forcing import Steps

# A first pass whose score reads how many tokens the budget keeps.
FIRST_PASS = Variant("xkv", (("score", "defensive"),))


def compared(model, inputs, policy, budget, options):
    """The cache and the next step's logits, by a pass of its own and by the captured one."""
    captured = Capture.of(model, inputs)
    with mmkv.wrapped(model, policy, budget, **options), torch.no_grad():
        if not applies(model._mmkv.plan):
            pytest.skip("its prompts need passes of their own")
        own, logits = Steps(model, inputs).read()
        token = logits[:, -1].argmax(-1, keepdim=True)
        torch.testing.assert_close(captured.logits, logits, atol=1e-5, rtol=0)
        found = []
        for cache in (own, captured.replayed(model)):
            kept = [cache.shares(i) for i in range(len(cache.layers)) if layer_of(cache, i)]
            steps = Steps(model, inputs)
            found.append((kept, steps.feed(cache, token), cache.nbytes))
    return found


def layer_of(cache, i) -> bool:
    return cache.layers[i] in cache.compressed


@cases("variant", [*EITHER, FIRST_PASS], *EITHER[::12], FIRST_PASS, ids=str)
def test_replayed_cache_equals_own_pass(variant):
    model = make_model("llava-llama", layers=depth(variant.policy))
    inputs = make_inputs("llava-llama", ROWS["padded"])
    own, replayed = compared(model, inputs, variant.policy, variant.budget, options_of(variant))
    for mine, theirs in zip(own[0], replayed[0], strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(own[1], replayed[1], atol=1e-5, rtol=0)
    assert own[2] == replayed[2]


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "LlavaForConditionalGeneration"])
def test_replay_with_sliding_layers_and_pictures(name):
    model = zoo.make(name)
    inputs = zoo.prompt(model, (90,))
    own, replayed = compared(model, inputs, "condense", 0.3, {"least": 0})
    assert all(map(torch.equal, own[0], replayed[0]))
    torch.testing.assert_close(own[1], replayed[1], atol=1e-5, rtol=0)


def test_linear_attention_is_refused():
    model = zoo.make("Qwen3_5ForCausalLM")
    with pytest.raises(ValueError, match="linear attention"):
        Capture.of(model, zoo.prompt(model, (40,)))
    assert not mmkv.is_wrapped(model)


class _Reads(list):
    """How often the model read a prompt: passes of more than 40 tokens."""

    def __call__(self, module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 40:
            self.append(kwargs["input_ids"].shape)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_evaluation_by_replays_gives_the_rows_of_one_without(tmp_path, batch_size):
    """Visible and hidden questions, perplexity, divergence, replies and scores of two policies."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    model.generation_config.suppress_tokens = None  # else replies are not replayed
    samples = asking(make_samples((60, 71, 52)))
    how = {
        "policies": ["snapkv", "condense", "snapkv:question=hidden", "h2o", "kvzip"],
        "options": {"window": 6},
        "budgets": [0.3],
        "metrics": ["ppl", "divergence", "next", "rouge", "score"],
        "batch_size": batch_size,
    }
    plain = run(model, tokenizer, samples, out=tmp_path / "plain", **how)
    reads = _Reads()
    with model.register_forward_pre_hook(reads, with_kwargs=True):
        replayed = run(model, tokenizer, samples, out=tmp_path / "replayed", replay=True, **how)
    timed = {"seconds", "first_token_s", "tokens_per_s", "run"}
    for mine, theirs in zip(plain, replayed, strict=True):
        assert mine.keys() - timed == theirs.keys() - timed
        for name in mine.keys() - timed:
            near = isinstance(mine[name], float)
            assert theirs[name] == (pytest.approx(mine[name], abs=1e-4) if near else mine[name])
    # A sample: the full cache twice or thrice, two captures, and kvzip's own passes.
    assert len(reads) <= 10 * len(samples) / batch_size + 10


@pytest.mark.slow
def test_bytes_after_a_replayed_prompt_are_those_of_its_own_pass(tmp_path):
    """Where nothing is compared but replies, which ask for no other pass."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    how = {"policies": ["snapkv", "condense"], "options": {"window": 6, "least": 0}}
    how |= {"budgets": [0.3], "metrics": ["score"], "samples": make_samples((60, 52), new=5)}
    plain = run(model, tokenizer, out=tmp_path / "plain", **how)
    replayed = run(model, tokenizer, out=tmp_path / "replayed", replay=True, **how)
    assert len(plain) == 4
    for mine, theirs in zip(plain, replayed, strict=True):
        assert theirs["held_bytes"] == mine["held_bytes"] > 0


@pytest.mark.slow
def test_replies_follow_the_generation_config(tmp_path):
    """Suppressed words change greedy replies, so equal largest logits do not mean equal ones."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    samples = asking(make_samples((60, 52), new=9))
    how = {"policies": ["snapkv", "snapkv:question=hidden"], "options": {"window": 6}}
    how |= {"budgets": [0.3], "batch_size": 2}

    def texts(name, **more):
        rows = run(model, tokenizer, samples, out=tmp_path / name, **how, **more)
        is_timed = [row["policy"] == "full" or not more.get("replay") for row in rows]
        assert ["first_token_s" in row for row in rows] == is_timed
        return [row["text"] for row in rows]

    raw = texts("raw", metrics=["score"])
    model.generation_config.suppress_tokens = list(range(4, 60))
    plain = texts("plain", metrics=["score", "next"])
    assert plain != raw
    assert texts("replayed", metrics=["score", "next"], replay=True) == plain
    rows = run(model, tokenizer, samples, out=tmp_path / "next", metrics=["next"], **how)
    assert not any("same" in row for row in rows)
