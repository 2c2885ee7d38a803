"""What the project promises, for every registered policy: see the oracles in docs/extending.md.

A policy is covered by being registered. Variants add the options that switch its parts.
"""

import copy

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.masking import masked_logits
from helpers.models import make_inputs, make_model, row_of
from helpers.oracle import (
    EITHER,
    IN_ROWS,
    READING,
    ROWS,
    USUAL,
    VARIANTS,
    Variant,
    depth,
    generate,
    options_of,
    prefilled,
    short,
)

# For `make test`: by slots, groups, head sizes, a step's drops, layer sizes, two passes.
QUICK = ((Variant("streaming"), "one"), "condense", "adakv", "h2o", "prefixkv", "xkv")


@cases("variant, rows", IN_ROWS, *QUICK, ids=str)
def test_eviction_equals_masking(models, variant, rows):
    """The definition of correct: evicting is masking, in the prefill's set and in every step's."""
    name = {"one": "llama-mha", "padded": "llava-llama"}[rows]
    model, inputs = models(name, depth(variant.policy)), make_inputs(name, ROWS[rows])
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        logits, tokens, cache, held = generate(model, inputs)
    policy = mmkv.get_policy(variant.policy, **options_of(variant))
    expected = masked_logits(model, inputs, tokens, held, merge=policy.merge)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    if variant.policy != "full":
        assert cache.report().kept_fraction < 0.95, "nothing was evicted: the oracle saw nothing"


@cases("policy", mmkv.list_policies(), "prefixkv", "h2o")
def test_full_budget_is_identity(models, policy):
    model, inputs = models("llava-llama"), make_inputs("llava-llama", ROWS["padded"])
    expected, tokens, _, _ = generate(model, inputs)
    with mmkv.wrapped(model, policy, 1.0, **short(policy)):
        logits, got, cache, _ = generate(model, inputs)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert torch.equal(got, tokens)
    assert cache.report().kept_fraction == 1.0


@cases("variant", [v for v in EITHER if v not in READING], "h2o", ids=str)
def test_batch_equals_singles(models, variant):
    """A row of a left-padded batch keeps, and says, exactly what it does alone.

    `test_ragged_turns` covers the variants in `READING`.
    """
    model = models("llava-llama", depth(variant.policy))
    inputs = make_inputs("llava-llama", ROWS["padded"])
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        logits, tokens, _, held = generate(model, inputs, new=9)
        for b, n in enumerate(ROWS["padded"][:2]):
            alone, words, _, kept = generate(model, row_of(inputs, b), new=9)
            assert torch.equal(tokens[b : b + 1], words)
            torch.testing.assert_close(logits[:, b : b + 1], alone, atol=1e-4, rtol=0)
            shift = max(ROWS["padded"]) - n
            for together, single in zip(held, kept, strict=True):
                for x, y in zip(together, single, strict=True):
                    mine = x[b][:, : y.shape[-1]]
                    assert torch.equal(mine, torch.where(y[0] < 0, -1, y[0] + shift))
                    assert (x[b][:, y.shape[-1] :] == -1).all()


@cases("variant", [v for v in VARIANTS if v.budget is not None], *USUAL, ids=str)
def test_budget_is_spent_exactly(models, variant):
    """The prefill keeps round(budget * L * N) tokens per head, whatever the layers and heads."""
    if variant.policy == "full":
        pytest.skip("keeps everything at any budget")
    model, lengths = models("llama", depth(variant.policy)), (133, 57)
    n_layers = model.config.num_hidden_layers
    inputs = make_inputs("llama", lengths)
    options = options_of(variant)
    cache = prefilled(model, inputs, variant.policy, variant.budget, **options)
    for b, n in enumerate(lengths):
        sizes = [sum(x.kept[b]) / len(x.kept[b]) for x in cache.report().layers]
        wanted = round(variant.budget * n_layers * n)
        if isinstance(variant.budget, int):
            wanted = n_layers * min(variant.budget, n)
        assert len(sizes) == n_layers
        assert sum(sizes) == max(wanted, n_layers * min(options.get("least", 0), n))
        assert all(0 <= s <= n for s in sizes)


def test_masking_oracle_fails_on_wrong_set(models):
    """The oracle itself can fail: masking one kept token more changes the logits."""
    model, inputs = models("llama"), make_inputs("llama", ROWS["one"])
    with mmkv.wrapped(model, "snapkv", 0.3, **short("snapkv")):
        logits, tokens, _, held = generate(model, inputs)
    spoiled = [[k.clone() for k in step] for step in held]
    for step in spoiled:
        step[1][:, 0, 4] = -1
    wrong = masked_logits(model, inputs, tokens, spoiled)
    assert (logits[1:] - wrong[1:]).abs().max() > 1e-3


CHOSEN = [
    *(Variant(name) for name in ("h2o", "adakv", "streaming", "condense")),
    # Near the newest token, so that few of them are enough to drop some.
    Variant("prefixkv", (("distance", 1),)),
    Variant("prefixkv", (("distance", 2), ("merge", "feature"))),
    Variant("elastic", (("distance", 1),)),
    Variant("h2o", (("decode", "ratio"), ("distance", 2))),
    Variant("condense", (("decode", "rounds"), ("every", 3), ("latest", 2))),
    Variant("prefixkv", (("decode", "rounds"), ("every", 3), ("latest", 0))),
    # Heads of one row keep different numbers of tokens.
    Variant("prefixkv", (("distance", 1), ("average_heads", False), ("heads", "adaptive"))),
]


@pytest.mark.parametrize(
    ("choose", "rows"),
    [
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ],
)
@cases(
    "variant, steps",
    [(x, i % 2) for i, x in enumerate([*CHOSEN, *CHOSEN[:1]])],
    (CHOSEN[0], 1),
    ids=str,
)
def test_selected_rows_take_all_state_along(models, variant, choose, rows, steps):
    """Before the first step or after it."""
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    policy, options = variant.policy, options_of(variant)
    words = torch.arange(10, 16)[:, None, None]

    def goes_on(cache):
        logits, kept = [], []
        for word in words:
            ids = word.expand(len(cache.lengths), 1)
            logits.append(model(input_ids=ids, past_key_values=cache).logits[:, 0])
            kept.append([cache.kept(i) for i in range(len(cache.layers))])
        return torch.stack(logits), kept

    with mmkv.wrapped(model, policy, 0.3, **options), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        for _ in range(steps):
            model(input_ids=torch.full((3, 1), 5), past_key_values=cache)
        chosen = copy.deepcopy(cache)
        choose(chosen)
        assert chosen.lengths == [ROWS["padded"][b] for b in rows]
        expected, kept = goes_on(cache)
        logits, mine = goes_on(chosen)
    torch.testing.assert_close(logits, expected[:, rows], atol=1e-4, rtol=0)
    for step, whole in zip(mine, kept, strict=True):
        for some, every in zip(step, whole, strict=True):
            for at, b in enumerate(rows):
                for h in range(2):
                    assert set(some[at, h].tolist()) - {-1} == set(every[b, h].tolist()) - {-1}


# What reads twice, looks at the residual stream, at all attention, or merges.
TRACED = ["prefixkv", "condense", "h2o", "kvzip", "lookm", "squeeze", "xkv"]


@cases("policy", TRACED, "prefixkv")
def test_wrap_leaves_no_trace(policy):
    """unwrap restores config, hooks, cache creation and output, also after an exception."""
    model, inputs = make_model("llava-llama"), make_inputs("llava-llama", (60,))
    plain, _, cache, _ = generate(model, inputs)
    before = _traces(model)
    mmkv.wrap(model, policy, 0.5, **short(policy))
    assert _traces(model) != before

    def explode(*args, **kwargs):
        raise RuntimeError("boom")

    broken = model.get_decoder().layers[1].mlp.register_forward_hook(explode)
    with broken, pytest.raises(RuntimeError, match="boom"):
        generate(model, inputs)
    generate(model, inputs)  # still usable
    mmkv.unwrap(model)
    assert _traces(model) == before
    again, _, cache_again, _ = generate(model, inputs)
    assert type(cache_again) is type(cache)
    assert torch.equal(plain, again)


def _traces(model) -> tuple:
    hooks = [
        (name, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
        for name, m in model.named_modules()
    ]
    return model.config._attn_implementation, model.get_decoder().config._attn_implementation, hooks


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "observers", "merge": "groups"},
        {"score": "defensive"},  # reads how many tokens the budget keeps
    ],
)
@cases("name", ["llama", "llava-llama"], "llava-llama")
def test_mini_prefill_stores_nothing_and_stops_early(name, options):
    """XKV's first pass makes no cache, ends inside the last layer, and changes no size."""
    model, inputs, calls, found = make_model(name), make_inputs(name, (120,)), [], []
    for i, layer in enumerate(model.get_decoder().layers):
        layer.mlp.register_forward_hook(lambda *a, i=i: calls.append(i))
    for way in ("mini-prefill", "one-pass"):
        found += [prefilled(model, inputs, "xkv", 0.3, allocation=way, **options)]
    assert calls == [0, 0, 1, 0, 1]  # the first pass never reaches the last layer's MLP
    for i in range(len(found[0].layers)):
        assert torch.equal(found[0].kept(i), found[1].kept(i))
        assert torch.equal(found[0].groups(i)[1], found[1].groups(i)[1])


@cases("protect_policy", ["prefixkv", "h2o", "local"], "prefixkv")
def test_protected_text_is_never_dropped(models, protect_policy):
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (70, 48))
    with mmkv.wrapped(model, protect_policy, 0.85, protect="instruction", **short(protect_policy)):
        logits, tokens, _, held = generate(model, inputs, new=40)
    expected = masked_logits(model, inputs, tokens, held)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    for step in held:
        for layer in step:
            for b in range(2):
                text = inputs["attention_mask"][b].bool() & (inputs["input_ids"][b] != 3)
                wanted = set(text.nonzero()[:, 0].tolist())
                assert all(wanted <= set(head.tolist()) for head in layer[b])
    images = (inputs["input_ids"][0] == 3).sum().item()
    assert (held[0][0][0, 0] >= 0).sum().item() < 70, f"all {images} image tokens were kept"
