"""LOOK-M ranks image tokens behind all text, in later turns too."""

import pytest
import torch

import mmkv
from helpers.masking import held_sets
from helpers.models import IMAGE, make_inputs, make_model
from helpers.oracle import generate

L = 3


@pytest.mark.parametrize("options", [{}, {"merge": "groups"}], ids=str)
def test_lookm_image_tokens_leave_before_text(options):
    """No image token stays where one of text had to leave, but for the recent ones."""
    model, inputs = make_model("llava-llama"), make_inputs("llava-llama", (80, 52))
    with mmkv.wrapped(model, "lookm", 0.6, recent=0.1, **options):
        *_, held = generate(model, inputs, new=8)
    valid = inputs["attention_mask"].bool()
    image = inputs["input_ids"] == IMAGE
    lost = 0
    for kept in held[0]:
        for b in range(2):
            text = set((valid & ~image)[b].nonzero()[:, 0].tolist())
            for head in kept[b]:
                stays = set(head[head >= 0].tolist())
                pictures = {j for j in stays if image[b, j]}
                assert not pictures or text <= stays or kept.groups is not None
                lost += len(set(image[b].nonzero()[:, 0].tolist()) - stays)
    assert lost, "no image token had to leave"


def test_lookm_pictures_of_earlier_turns_leave_first():
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
