"""The text prior of LOOK-M: image tokens leave first, in later turns too."""

import pytest
import torch

import mmkv
from helpers.masking import held_sets
from helpers.models import IMAGE, make_inputs, make_model
from helpers.oracle import generate

L = 3


@pytest.mark.parametrize(
    "policy", ["snapkv", "adakv", "random", "streaming-ratio", "rounds", "groups"]
)
def test_any_score_lets_image_tokens_leave_first(policy):
    """Whatever scores and splits: no image token stays where one of text had to leave."""
    model, inputs = make_model("llava-llama"), make_inputs("llava-llama", (80, 52))
    name, options = {
        "streaming-ratio": ("streaming", {"decode": "ratio", "sinks": 0}),
        "rounds": ("adakv", {"decode": "rounds", "every": 4, "latest": 2}),
        "groups": ("snapkv", {"merge": "groups"}),
    }.get(policy, (policy, {}))
    window = {"window": 4} if mmkv.get_policy(name).window_size else {}
    with mmkv.wrapped(model, name, 0.6, text_prior=True, **window, **options):
        *_, held = generate(model, inputs, new=8)
    valid = inputs["attention_mask"].bool()
    image = inputs["input_ids"] == IMAGE
    lost = 0
    for kept in held[0]:
        for b in range(2):
            text, last = set((valid & ~image)[b].nonzero()[:, 0].tolist()), 80 - 4
            for head in kept[b]:
                stays = set(head[head >= 0].tolist())
                pictures = {j for j in stays if image[b, j] and j < last}
                assert not pictures or text <= stays or kept.groups is not None
                lost += len(set(image[b].nonzero()[:, 0].tolist()) - stays)
    assert lost, "no image token had to leave"


def test_the_prior_holds_for_pictures_of_earlier_turns():
    """A new turn of text alone lets the image tokens of the first turn leave before its own."""
    model, inputs = make_model("llava-llama"), make_inputs("llava-llama", (80,))
    more = torch.randint(10, 100, (1, 30), generator=torch.Generator().manual_seed(1))
    with mmkv.wrapped(model, "lookm", 50):
        _, tokens, cache, _ = generate(model, inputs, new=3)
        ids = torch.cat([inputs["input_ids"], tokens, more], dim=1)
        first = {j for head in held_sets(cache.kept(0)) for j in head if ids[0, j] == IMAGE}
        generate(model, {"input_ids": ids}, new=2, past_key_values=cache)
    assert first, "no image token was left after the first turn"
    for layer in range(L):
        for head in held_sets(cache.kept(layer)):
            assert not {j for j in head if j < 80 and ids[0, j] == IMAGE}
