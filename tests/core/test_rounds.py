"""decode="rounds": generated tokens compete with all that is held, some at a time."""

import itertools

import pytest
import torch

import mmkv
from helpers.masking import pairs_of
from helpers.models import make_inputs
from helpers.oracle import generate
from mmkv.cache import selection
from mmkv.registry import exact_share

ROUNDS = {"decode": "rounds", "every": 10, "latest": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "budget"), [("condense", 0.25), ("snapkv", 30), ("prefixkv", 0.25)]
)
def test_the_budget_holds_for_all_tokens_seen(models, policy, budget):
    """However long the reply: but for those that did not compete yet, no more is held."""
    model, inputs = models("llama"), make_inputs("llama", (70, 40))
    options = {**ROUNDS, **({"window": 4} if policy == "snapkv" else exact_share(policy))}
    with mmkv.wrapped(model, policy, budget, **options):
        _, _, cache, held = generate(model, inputs, new=100)
    L, sizes = model.config.num_hidden_layers, []
    for t, layers in enumerate(held):
        for b, prompt in enumerate((70, 40)):
            seen = prompt + t
            total = L * min(budget, seen) if isinstance(budget, int) else budget * L * seen
            pairs = [pairs_of(x)[b].float().mean().item() for x in layers]
            # At a round's end 6 tokens have not competed, and 10 come until the next.
            assert sum(pairs) <= total + L * (6 + 10) + 1, (t, b)
            if b == 0:
                sizes.append(sum(pairs))
    assert any(later < earlier for earlier, later in itertools.pairwise(sizes))
    report = cache.report()
    assert report.seen == [169, 139]
    assert report.kept_fraction == pytest.approx(
        sum(n for x in report.layers for row in x.kept for n in row) / (L * 2 * (169 + 139))
    )


@pytest.mark.slow
def test_the_queries_of_generated_tokens_observe(models, monkeypatch):
    """Each round is given the model's own queries, before and after rotation, of what is new."""
    model, inputs = models("llama"), make_inputs("llama", (70,))
    given, asked = [], []
    importance = selection.importance

    def recorded(policy, layer, *rows):
        if layer.layer_idx == 1:
            given.append(layer)
        return importance(policy, layer, *rows)

    monkeypatch.setattr(selection, "importance", recorded)
    attention = model.model.layers[1].self_attn
    listening = attention.q_proj.register_forward_hook(lambda *args: asked.append(args[2]))
    with listening, mmkv.wrapped(model, "condense", 0.25, least=0, **ROUNDS):
        generate(model, inputs, new=40)
    first, second, third = given[1:]
    steps = torch.cat(asked[1:], dim=1).view(1, -1, 4, 16).transpose(1, 2)  # [B, Hq, n, D]
    for layer, start, stop in ((first, 0, 16), (second, 16, 26), (third, 26, 36)):
        # Heads hold different tokens, so that each is a row of its own.
        want = steps[:, :, start:stop].reshape(2, 2, stop - start, 16)
        torch.testing.assert_close(layer.plain_query, want, atol=1e-5, rtol=1e-4)
        turned = layer.query.norm(dim=-1)
        torch.testing.assert_close(turned, want.norm(dim=-1), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(layer.query, want, atol=1e-2)


def test_remembered_queries_are_counted_and_freed(models):
    model, inputs = models("llama"), make_inputs("llama", (70, 40))
    with mmkv.wrapped(model, "condense", 0.25, least=0, **ROUNDS):
        *_, cache, _ = generate(model, inputs, new=16)
        layer = cache.compressed[0]
        # 15 steps: one more makes a round. Two rows, four heads, 16 numbers of four bytes.
        assert layer.nbytes - layer.state.nbytes == 15 * 2 * 4 * 16 * 4
        cache.batch_select_indices(torch.tensor([1]))
        assert layer.nbytes - layer.state.nbytes == 15 * 4 * 16 * 4
        model(input_ids=torch.tensor([[9]]), past_key_values=cache)
        assert layer.reply_queries == []
    assert cache.report().seen == [40 + 16]


def test_nothing_is_remembered_where_nothing_is_evicted(models):
    model, inputs = models("llama"), make_inputs("llama", (40,))
    for budget, decode in ((1.0, ROUNDS), (0.3, {})):
        with mmkv.wrapped(model, "condense", budget, least=0, **decode):
            *_, cache, _ = generate(model, inputs, new=4)
        assert cache.compressed[0].reply_queries == []
