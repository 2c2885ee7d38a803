"""Every policy inside `torch.autocast`: scores are float32 there, and evicting is masking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmkv
from helpers.marks import slow_except
from helpers.models import make_inputs, next_turn
from helpers.oracle import short
from helpers.reference import fed, generate, recorded, seeing

ROWS = (90, 66, 41)
# Of logits as large as 5, which bfloat16 holds in steps of 1/32; a wrong set is off by 1 and more.
CLOSE: dict[str, Any] = {"atol": 0.2, "rtol": 0}


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def totals(cache: Any) -> list[int]:
    """Tokens that each row keeps, over all layers and heads."""
    kept = torch.tensor([x.kept for x in cache.report().layers])
    return kept.sum((0, 2)).tolist()


@pytest.mark.parametrize(
    "policy", slow_except(mmkv.list_policies(), "prefixkv", "adakv", "h2o", "squeeze")
)
def test_every_policy_under_autocast(policy: str, models: Any) -> None:
    model, inputs = models("llava-llama"), make_inputs("llava-llama", ROWS)
    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        plain = totals(generate(model, inputs)[2])
        with autocast(), recorded(model) as held:
            logits, tokens, cache = generate(model, inputs)
    assert totals(cache) == plain
    assert logits.isfinite().all()
    if mmkv.get_policy(policy).merge is None:  # merged pairs are not what a mask leaves
        with autocast(), seeing(model, held):
            torch.testing.assert_close(logits, fed(model, inputs, tokens)[0], **CLOSE)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "elastic"])
def test_chunks_and_turns_under_autocast(policy: str, models: Any) -> None:
    model, inputs = models("llama"), make_inputs("llama", (90,))

    def conversation() -> tuple[list[int], Tensor]:
        with mmkv.wrapped(model, policy, 0.4, **short(policy)):
            _, words, cache = generate(model, inputs, prefill_chunk_size=33)
            turn = next_turn(inputs, torch.cat([inputs["input_ids"], words], 1), image=False)
            logits, _, cache = generate(model, turn, past_key_values=cache)
        return totals(cache), logits

    plain, _ = conversation()
    with autocast():
        found, logits = conversation()
    assert found == plain
    assert logits.isfinite().all()
