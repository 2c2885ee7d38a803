"""LOOK-M ranks image tokens behind all text, in later turns too."""

import torch

import mmkv
from helpers.masking import held_sets
from helpers.models import IMAGE, make_inputs, make_model
from helpers.oracle import generate

L = 2


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
