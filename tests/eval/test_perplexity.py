"""Perplexity behind a compressed prompt."""

import math

import pytest
import torch

import mmkv
from helpers.models import make_inputs, row_of
from helpers.oracle import short
from mmkv.eval.measure import perplexity
from mmkv.forcing import drops_nothing, score_answers

LENGTHS = (40, 31, 52)
ANSWERS = [[5, 9, 40, 17, 88], [33], [7, 7, 90, 101, 12, 64, 30, 8]]
# Every kind of decoding: tokens that grow, a share of all, a constant size.
POLICIES = ["snapkv", "adakv", "xkv", "prefixkv", "h2o", "streaming"]


@pytest.fixture(scope="module")
def inputs():
    return make_inputs("llama", LENGTHS)


def plain_nll(model, inputs, answers) -> list[float]:
    """By definition: one forward pass over prompt and answer, row by row, no cache."""
    found = []
    for b, answer in enumerate(answers):
        row = row_of(inputs, b)
        ids = torch.cat([row["input_ids"], torch.tensor([answer])], dim=1)
        more = {k: v for k, v in row.items() if k == "pixel_values"}
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **more).logits[0].double()
        n = row["input_ids"].shape[1]
        logp = logits.log_softmax(-1)[n - 1 : -1]
        found.append(-sum(logp[t, token].item() for t, token in enumerate(answer)))
    return found


def test_perplexity_is_over_tokens_and_a_float_or_none():
    assert perplexity(6.0, 4) == pytest.approx(math.exp(1.5))
    assert perplexity(0.0, 0) is perplexity(5000.0, 2) is None


@pytest.mark.parametrize("one_pass", [True, False])
def test_plain_model_equals_its_definition(model, inputs, one_pass):
    scored = score_answers(model, inputs, ANSWERS, one_pass=one_pass)
    assert scored.tokens == [5, 1, 8]
    assert scored.nll == pytest.approx(plain_nll(model, inputs, ANSWERS), rel=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_pass_equals_token_by_token(model, inputs, policy):
    with mmkv.wrapped(model, policy, 0.5, **short(policy), **grow(policy)):
        by_token = score_answers(model, inputs, ANSWERS, one_pass=False)
        assert drops_nothing(by_token.cache)
        at_once = score_answers(model, inputs, ANSWERS)
    assert at_once.nll == pytest.approx(by_token.nll, rel=1e-5)
    assert at_once.greedy == by_token.greedy


def grow(policy: str) -> dict:
    return {} if mmkv.get_policy(policy).decode.name == "grow" else {"decode": "grow"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_scores_as_it_does_alone(model, inputs, policy):
    """Neither the other rows nor what is fed behind the end of an answer changes its figures."""
    with mmkv.wrapped(model, policy, 0.5, **short(policy)):
        together = score_answers(model, inputs, ANSWERS)
        for b, answer in enumerate(ANSWERS):
            alone = score_answers(model, row_of(inputs, b), [answer])
            assert together.nll[b] == pytest.approx(alone.nll[0], rel=1e-4)
            assert together.greedy[b] == alone.greedy[0]


@pytest.mark.parametrize("policy", ["prefixkv", "h2o", "streaming"])
def test_pruning_while_decoding_is_by_token(model, inputs, policy):
    with mmkv.wrapped(model, policy, 0.5):
        scored = score_answers(model, inputs, ANSWERS)
        assert not drops_nothing(scored.cache)
        with pytest.raises(ValueError, match="one by one"):
            score_answers(model, inputs, ANSWERS, one_pass=True)


def test_greedy_answers_are_recognised(model, inputs):
    with mmkv.wrapped(model, "snapkv", 0.5, window=6):
        new = model.generate(**inputs, max_new_tokens=5, do_sample=False)[:, -5:].tolist()
        new[1][3] = (new[1][3] + 1) % 100
        scored = score_answers(model, inputs, new)
    assert scored.greedy == [True, False, True]


def test_an_empty_answer_scores_nothing(model, inputs):
    scored = score_answers(model, inputs, [[], [4], []])
    assert scored.tokens == [0, 1, 0]
    assert scored.nll[0] == scored.nll[2] == 0.0


def test_one_answer_a_row(model, inputs):
    with pytest.raises(ValueError, match="2 answers for 3 prompts"):
        score_answers(model, inputs, [[4], [5]])
