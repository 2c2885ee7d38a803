"""What a request may ask of the engine beside its prompt, with a text model and a tokenizer."""

from __future__ import annotations

import pytest
from PIL import Image

import mmkv
from helpers.serving import text_chat
from mmkv.serving import Engine, Refused


@pytest.fixture(scope="module")
def chat():
    model, tokenizer = text_chat()
    mmkv.wrap(model, "snapkv", 0.5, window=4)
    return model, tokenizer


@pytest.fixture(scope="module")
def engine(chat):
    with Engine(*chat) as found:
        yield found


def asked(text, role="user"):
    return [{"role": role, "content": text}]


def test_a_picture_for_a_model_that_reads_text(engine):
    parts = [{"type": "image", "image": Image.new("RGB", (4, 4))}, {"type": "text", "text": "?"}]
    with pytest.raises(Refused, match="reads text only: leave the pictures out"):
        engine.submit(asked(parts))
