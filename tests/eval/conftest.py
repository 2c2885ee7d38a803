"""Fixtures of the tests of the evaluation."""

import pytest

from helpers.evaluation import make_tokenizer
from helpers.models import make_model


@pytest.fixture(scope="module")
def model():
    """A tiny Llama; tests must leave it unwrapped."""
    return make_model("llama")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()
