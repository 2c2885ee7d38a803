"""Fitted weights of groups against loops that read like their definition."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mmkv
from helpers.models import make_inputs, random
from mmkv.layer_inputs import LayerInputs, rotate
from mmkv.merge import reference
from mmkv.merge.groups import log_weights
from mmkv.merge.reference import ReferenceQueries

B, H, G, U, D, M = 2, 2, 3, 14, 4, 5


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("together", [2**20, 1])
def test_weights_equal_the_loop(softcap, together, monkeypatch):
    """Slot 0 is empty, slot 1 has one token, and empty positions hold arbitrary values."""
    monkeypatch.setattr(reference, "tile", lambda device: together)
    keys, query = random(B, H, U, D), random(B, H * G, 6, D, seed=1)
    slot = torch.randint(2, M, (B, H, U), generator=torch.Generator().manual_seed(2))
    slot[..., 3] = 1
    counts = torch.ones(B, H, U)
    counts[..., 5] = 7.0  # a group of an earlier turn
    slot[0, :, :2] = M
    counts[0, :, :2] = 0.0
    of_tokens = random(B, H, U, seed=3)
    present = torch.ones(B, 6, dtype=torch.bool)
    present[1, 4:] = False
    means = random(B, H, M, D, seed=4) / 2
    dirty = keys.masked_fill((counts == 0)[..., None], math.nan)
    references = ReferenceQueries(query, present, softcap)
    found = log_weights(slot, M, counts > 0, dirty, of_tokens, means, references)

    def logit(q: Tensor, k: Tensor) -> float:
        x = float(q.double() @ k.double())
        return x if softcap is None else softcap * math.tanh(x / softcap)

    for b in range(B):
        asked = [i for i in range(6) if present[b, i]]
        for h in range(H):
            tokens = [j for j in range(U) if counts[b, h, j] > 0]
            for m in range(M):
                mine = [j for j in tokens if slot[b, h, j] == m]
                if not mine:
                    assert found[b, h, m] == 0
                    continue
                plain = want = math.log(sum(math.exp(of_tokens[b, h, j]) for j in mine))
                if len(mine) > 1:
                    mass = alone = 0.0
                    for q in (query[b, h * G + g, i] for g in range(G) for i in asked):
                        paid = {
                            j: math.exp(logit(q, keys[b, h, j]) + of_tokens[b, h, j])
                            for j in tokens
                        }
                        mass += sum(paid[j] for j in mine) / sum(paid.values())
                        alone += math.exp(logit(q, means[b, h, m])) / sum(paid.values())
                    want = math.log(mass / alone)
                    want = min(max(want, plain - math.log(4)), plain + math.log(4))
                assert float(found[b, h, m]) == pytest.approx(want, abs=1e-4)


def test_group_without_attention_weighs_its_number_of_tokens():
    """Attention below the smallest number says nothing of a weight; nor does no query at all."""
    keys = torch.zeros(1, 1, 6, D)
    keys[..., 2:, 0] = -1000.0
    slot, there = torch.tensor([[[0, 0, 1, 1, 1, 1]]]), torch.ones(1, 1, 6) > 0
    query = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, D)
    references = ReferenceQueries(query, torch.ones(1, 1, dtype=torch.bool), None)
    means = torch.full((1, 1, M, D), -500.0)
    means[..., 0, :] = 0.0
    for given in (references, None):
        found = log_weights(slot, M, there, keys, None, means, given)
        torch.testing.assert_close(found[0, 0].exp(), torch.tensor([2.0, 4.0, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("number", "remembered", "want"),
    [
        (3, None, [[2, 5, 8], [6, 7, 8]]),
        (4, None, [[2, 5, 8], [6, 7, 8]]),
        (5, None, [[0, 2, 4, 6, 8], [6, 7, 8]]),
        (3, 2, [[7, 8], [7, 8]]),
        (2, 5, [[5, 8], [6, 8]]),
        (99, None, [list(range(9)), [6, 7, 8]]),
    ],
)
def test_reference_queries_are_spread_over_a_row(number, remembered, want):
    """Of rows of 9 and 3 tokens, behind one key that is older: each row's own, up to its last."""
    query = torch.arange(9.0).view(1, 1, 9, 1).expand(2, H * G, 9, D)
    valid = torch.arange(10) >= torch.tensor([[0], [7]])
    keys: Any = torch.zeros(2, H, 10, D)
    layer = LayerInputs(query=query, key=keys, value=keys, valid=valid, scale=0.5)
    references = ReferenceQueries.of(layer, valid[:, 1:], number, remembered)
    assert references is not None
    assert references.query.shape == (2, H * G, min(number, remembered or 9, 9), D)
    for b in range(2):
        chosen = references.query[b][:, references.present[b], 0]
        assert sorted((2 * chosen[0]).tolist()) == want[b]
        assert not references.query[b][:, ~references.present[b]].any()
    assert ReferenceQueries.of(layer, valid[:, 1:], 0, None) is None
    assert ReferenceQueries.of(layer, valid[:, 1:], 3, 0) is None


@pytest.mark.parametrize(
    ("policy", "options"), [("condense", {"least": 0}), ("snapkv", {"window": 6})]
)
def test_reference_queries_are_rotated_past_the_prompt(models, policy, options, monkeypatch):
    """Turned as the next token's query is; the same where the prompt is read in chunks."""
    given: list[tuple[LayerInputs, Any]] = []
    of = ReferenceQueries.of

    def recorded(layer, *options) -> ReferenceQueries | None:
        given.append((layer, of(layer, *options)))
        return given[-1][1]

    monkeypatch.setattr(ReferenceQueries, "of", recorded)
    model, inputs = models("llama"), make_inputs("llama", (90,))
    with mmkv.wrapped(model, policy, 0.3, merge="groups", **options), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        whole = list(given)
        cache.reset()
        cache.expect(until=90)
        for part in inputs["input_ids"].split(50, dim=1):
            model(input_ids=part, past_key_values=cache)
    steps = list(range(5, 90, 6) if policy == "condense" else range(84, 90))
    for (layer, references), (_, same) in zip(whole, given[-len(whole) :], strict=True):
        query = rotate(layer.query, *layer.rotary.rotation(layer.rotary.ahead(1)))
        want = query[:, :, steps].float() * query.shape[-1] ** -0.5
        for found in (references, same):
            assert found.present is None
            torch.testing.assert_close(found.query, want, atol=1e-5, rtol=1e-5)
