"""Any policy with any options on any prompt: the oracle, exact budgets, or a clear refusal."""

import copy
import dataclasses
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import mmkv
from helpers.configs import IMAGE, VOCAB
from helpers.marks import cases, since
from helpers.masking import masked_logits, pairs_of
from helpers.memory import storages
from helpers.models import IMAGE_TOKENS, continued, ending, make_inputs, make_model, row_of
from helpers.oracle import depth, generate, short
from mmkv.merge.neighbours import MergeByFeature

L = 3  # as few as SqueezeAttention sizes
MODELS = {
    name: make_model(name, layers=L) for name in ("llama", "llama-mha", "llama-mqa", "llava-llama")
}
PICTURE_FROM = 16  # tokens of the shortest row that holds a picture: it is all of that row
OPTIONS = {
    "window": st.integers(1, 64),
    "kernel_size": st.sampled_from([1, 3, 7]),
    "pooling": st.sampled_from(["avg", "max", None]),
    "average_heads": st.booleans(),
    "recency_weighted": st.booleans(),
    "sinks": st.integers(0, 12),
    "least": st.integers(0, 90),
    "recent": st.floats(0, 1),
    "layers": st.sampled_from(["uniform", "pyramid", "geometric", "squeeze", "prefix", "pooled"]),
    "beta": st.floats(1, 40),
    "decay": st.floats(0.3, 1),
    "p": st.floats(0.1, 1),
    "allocation": st.sampled_from(["one-pass", "mini-prefill"]),
    "heads": st.sampled_from(["uniform", "adaptive", "global"]),
    "alpha": st.floats(0, 1),
    "decode": st.sampled_from(["grow", "ratio", "fixed"]),
    "distance": st.integers(0, 9),
    "merge": st.sampled_from([None, "position", "feature", "groups"]),
    "protect": st.sampled_from(["none", "instruction"]),
}


def rows_of(name, lengths, seed):
    """A left-padded batch; of a model with pictures, each row that has room holds one."""
    inputs = make_inputs("llama", lengths, seed)
    if name != "llava-llama":
        return inputs
    ids, pictures = inputs["input_ids"], 0
    for b, n in enumerate(lengths):
        if n >= PICTURE_FROM:
            start = ids.shape[1] - n + (4 if n > PICTURE_FROM + 8 else 0)
            ids[b, start : start + IMAGE_TOKENS] = IMAGE
            pictures += 1
    if pictures:
        g = torch.Generator().manual_seed(seed)
        inputs["pixel_values"] = torch.randn(pictures, 3, 16, 16, generator=g)
    return inputs


def asked(budget, n, least=0):
    """Tokens over all layers, per head."""
    if isinstance(budget, int):
        return min(budget, n) * L
    return max(round(budget * L * n), L * min(least, n))


def always_kept(policy, budget, ids):
    """Places in one row, without padding, that every layer keeps: as the rule reads."""
    n = len(ids)

    def must(window):
        text = range(n) if policy.protect is not None else ()
        ends = set(range(min(policy.sinks, n))) | set(range(max(0, n - window), n))
        return {j for j in text if ids[j] != IMAGE} | ends

    total, window = asked(budget, n, policy.least), policy.window_size
    if total < L * len(must(window)):
        window = min(window, max(1, int(total / L / 2)))
    return must(window)


@st.composite
def any_case(draw):
    name = draw(st.sampled_from(sorted(MODELS)))
    # Most prompts are short ones: those are where a budget and what must be kept meet.
    length = st.integers(0, 40) | st.integers(0, 90) | st.integers(1, 300)
    lengths = draw(st.lists(length, min_size=1, max_size=3).filter(any))
    chosen = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=5, unique=True))
    options = {key: draw(OPTIONS[key]) for key in chosen}
    budget = draw(st.floats(0.01, 1) | st.sampled_from([0.1, 0.2, 0.5]) | st.integers(1, 120))
    fractions = draw(st.none() | st.none() | st.lists(st.floats(0.01, 1), min_size=L, max_size=L))
    policy = draw(st.sampled_from(mmkv.list_policies()))
    chunk = draw(st.none() | st.integers(2, 50))
    return name, tuple(lengths), policy, budget, fractions, options, chunk, draw(st.integers(0, 99))


def two_turns(model, inputs, more, chunk):
    """Feeds, logits and what each layer held of a turn, and of one more of a few tokens."""
    chunks = {} if chunk is None else {"prefill_chunk_size": chunk}
    first, words, cache, held = generate(model, inputs, new=8, **chunks)
    second = continued(inputs, words, more.expand(len(words), -1))
    later, answer, _, kept = generate(model, second, new=3, past_key_values=cache)
    turn = {"input_ids": second["input_ids"][:, inputs["input_ids"].shape[1] + 7 :]}
    feeds = [{"input_ids": x} for x in words.split(1, dim=1)[:-1]] + [turn]
    feeds += [{"input_ids": x} for x in answer.split(1, dim=1)[:-1]]
    return feeds, torch.cat([first, later]), held + kept


@since("5.23")
@pytest.mark.slow
@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@example(("llama", (1, 2), "elastic", 0.02, None, {}, None, 0))  # one token a head
@example(("llama", (1, 2), "elastic", 0.02, None, {"merge": "feature"}, None, 0))
@example(("llama", (33, 300), "snapkv", 0.2, None, {}, None, 0))
@example(("llama", (20, 39, 5), "pyramidkv", 0.2, None, {"heads": "adaptive"}, None, 0))
@example(("llama", (1, 19), "streaming", 0.2, None, {}, None, 0))
@example(("llama", (1,), "condense", 0.2, None, {"least": 0}, None, 0))
@example(("llama", (5, 20), "snapkv", 0.97, None, {}, None, 0))  # one row keeps all, the other not
@example(("llava-llama", (30, 9), "prefixkv", 0.2, None, {"protect": "instruction"}, None, 0))
@example(("llava-llama", (16,), "h2o", 0.5, None, {"protect": "instruction"}, None, 0))
@given(any_case())
def test_any_policy_on_any_prompt(case):
    """Refused by name, or: evicting is masking, the budget is spent, rows are as if alone."""
    name, lengths, policy, budget, fractions, options, chunk, seed = case
    model, inputs = MODELS[name], rows_of(name, lengths, seed)
    more = torch.randint(4, VOCAB, (1, 7), generator=torch.Generator().manual_seed(seed))
    given, named = {"budget": budget}, [budget, *options, *options.values()]
    if fractions is not None:
        budget = sum(fractions) / L
        given = {"profile": mmkv.Profile(tuple(fractions), budget=budget)}
        named = [*named, "profile"]
    refusal = ""
    try:
        chosen = mmkv.get_policy(policy, **options)
        mmkv.wrap(model, chosen, **given)
    except ValueError as error:  # any other type of error fails the test
        refusal = str(error)
    if refusal:
        assert any(str(x) in refusal for x in named), refusal
        return
    try:
        if 0 in lengths:
            with pytest.raises(ValueError, match="padding"):
                two_turns(model, inputs, more, chunk)
            return
        feeds, logits, held = two_turns(model, inputs, more, chunk)
        rows = [row_of(inputs, b) for b in range(len(lengths))] if len(lengths) > 1 else []
        rows = [{k: x for k, x in row.items() if len(x)} for row in rows]  # some without pixels
        singles = [two_turns(model, row, more, None)[-1] for row in rows] or [held]
    finally:
        mmkv.unwrap(model)
    expected = masked_logits(model, inputs, feeds, held, merge=chosen.merge)
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)
    for b, (n, single) in enumerate(zip(lengths, singles, strict=True)):
        shift = max(lengths) - n
        must = always_kept(chosen, budget, inputs["input_ids"][b, shift:].tolist())
        for layer in held[0] if not chosen.keeps_all else ():
            groups = getattr(layer, "groups", None)
            assert groups is not None or all(
                {j + shift for j in must} <= set(head.tolist()) for head in layer[b]
            )
        spent = sum(float(pairs_of(layer)[b].float().mean()) for layer in held[0])
        wanted = max(asked(budget, n, chosen.least), L * max(min(1, n), len(must)))
        assert spent == (L * n if chosen.keeps_all else wanted)
        for together, alone in zip(held, single, strict=True):
            for x, y in zip(together, alone, strict=True):
                own = torch.where(y[0] < 0, -1, y[0] + (shift if len(lengths) > 1 else 0))
                assert torch.equal(x[b][:, : own.shape[-1]], own)
                assert (x[b][:, own.shape[-1] :] == -1).all()


def spends(layers, share=0.4, lengths=(60, 33)):
    """Whether each row keeps its share."""
    return [round(share * len(layers) * n) for n in lengths] == [
        sum(float(pairs_of(x)[b].float().mean()) for x in layers) for b in range(len(lengths))
    ]


@cases(
    "policy, extreme",
    [(x, (0.0, 1e4)[i % 2]) for i, x in enumerate(mmkv.list_policies())],
    *("adakv", "h2o"),
)
def test_extreme_scores(policy, extreme):
    """All-equal scores, and attention so peaked that all but one score vanish."""
    model = make_model("llama", layers=depth(policy)).double()
    inputs = make_inputs("llama", (60, 33))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(extreme)
    chosen = mmkv.get_policy(policy, **short(policy))
    with mmkv.wrapped(model, chosen, 0.4):
        logits, tokens, _, held = generate(model, inputs, new=8)
    expected = masked_logits(model, inputs, tokens, held, merge=chosen.merge)
    torch.testing.assert_close(logits.to(expected.dtype), expected, atol=1e-3, rtol=0)
    assert policy == "full" or spends(held[0])


SCORED = [x for x in mmkv.list_policies() if mmkv.get_policy(x).score.ranks]


INFINITE = [(math.inf, 0.3), (-math.inf, 1.0)]
ODD = [(x, *INFINITE[i % 2]) for i, x in enumerate(x for x in SCORED if x != "full")]


@cases(
    "policy, odd, share",
    ODD,
    *("prefixkv", "adakv", "h2o", "squeeze"),
)
def test_infinite_scores(policy, odd, share):
    """The oracle and the budget hold."""
    chosen, seen = mmkv.get_policy(policy, **short(policy)), []

    class Odd(type(chosen.score)):
        def __call__(self, layer):
            found = super().__call__(layer)
            g = torch.Generator().manual_seed(found.shape[-1])
            where = torch.rand(found.shape[-1], generator=g) < share
            seen.append(where)
            return found.masked_fill(where, odd)

    odd_one = dataclasses.replace(chosen, score=Odd(**chosen.score.options()))
    model, inputs = MODELS["llama"], make_inputs("llama", (60, 33))
    with mmkv.wrapped(model, odd_one, 0.4):
        logits, tokens, cache, held = generate(model, inputs, new=8)
    expected = masked_logits(model, inputs, tokens, held, merge=chosen.merge)
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)
    assert spends(held[0])
    assert seen
    report = cache.report()
    assert report.retained is None or 0 <= report.retained <= 1


@cases("policy", mmkv.list_policies(), "prefixkv", "h2o", "condense")
def test_overflowed_model(policy):
    """Attention that is NaN throughout: the same NaN as without us, and the budget.

    The first layer is finite, the queries of the second are NaN, and all that the third is given.
    """
    model, inputs = make_model("llama", layers=3), make_inputs("llama", (60, 33))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(math.inf)
    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        logits, *_, held = generate(model, inputs, new=4)
    assert logits.isnan().all()
    assert policy == "full" or spends(held[0])


@cases(
    "policy, dtype",
    [(x, torch.float16) for x in (*mmkv.list_policies()[1::2], "condense")]
    + [(x, torch.bfloat16) for x in ("adakv", "h2o", "condense", "prefixkv")],
    *(("adakv", torch.float16), ("h2o", torch.bfloat16)),
)
def test_half_precision(policy, dtype):
    """As near to float32 over the same tokens as the plain model in half precision is."""
    model = make_model("llama", layers=depth(policy)).to(dtype)
    inputs = make_inputs("llama", (60, 33))
    exact = copy.deepcopy(model).float()
    options = short(policy)
    if isinstance(mmkv.get_policy(policy).merge, MergeByFeature):
        options["merge"] = "position"  # which key is most alike may be a matter of rounding
    plain, words, *_ = generate(model, inputs, new=8)
    everything = inputs["attention_mask"].bool()
    whole = []
    for t in range(8):
        seen = torch.cat([everything, torch.ones(2, t, dtype=torch.bool)], dim=1)
        places = torch.arange(60 + t).masked_fill(~seen, -1)[:, None].expand(-1, 2, -1)
        whole.append([places] * model.config.num_hidden_layers)
    usual = (plain - masked_logits(exact, inputs, words, whole)).abs().max()
    with mmkv.wrapped(model, policy, 0.4, **options):
        logits, tokens, cache, held = generate(model, inputs, new=8)
    merge = mmkv.get_policy(policy, **options).merge
    expected = masked_logits(exact, inputs, tokens, held, merge=merge)
    assert (logits - expected).abs().max() < 2 * usual
    assert 0 < usual < 0.1 * expected.abs().max()
    with mmkv.wrapped(model, policy, 0.4, **options), torch.no_grad():
        step = model(**inputs, use_cache=True)
        step = model(input_ids=tokens[:, :1], past_key_values=step.past_key_values)
    assert step.logits.dtype == dtype
    assert all(x.keeping().stored.read()[0][0].dtype == dtype for x in cache.compressed)
    if policy != "full":
        assert cache.report().kept_fraction < 0.6


@pytest.mark.slow
def test_100_generations_leak_nothing():
    """100 generations with changing policy, budget and prompt leave nothing behind.

    One in five is ended in its prompt, in a decode step or between two layers by an interrupt or an
    exception; the wrapped model then goes on, and answers as a fresh one does.
    """
    model, fresh = make_model("llama"), make_model("llama")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {name: sorted(vars(x)) for name, x in model.named_modules()}
    rng, held, answered = random.Random(0), [], 0
    for i in range(100):
        policy = rng.choice(mmkv.list_policies())
        lengths = (rng.randrange(14, 40), rng.randrange(30, 60))
        inputs = make_inputs("llama", lengths, seed=i)
        options = short(policy)
        budget = rng.choice([0.3, 0.6, 1.0, 20])
        asked = {"max_new_tokens": 2, "do_sample": False}
        with mmkv.wrapped(model, policy, budget, **options):
            if i % 5 == 3:
                error, passes = rng.choice([KeyboardInterrupt, RuntimeError]), rng.randrange(2)
                layer = rng.choice(model.model.layers)
                broken = layer.register_forward_hook(ending(error, after=passes))
                with broken, pytest.raises(error):
                    model.generate(**inputs, **asked)
            out = model.generate(**inputs, **asked)
        if i % 12 == 3:
            with mmkv.wrapped(fresh, policy, budget, **options):
                assert torch.equal(fresh.generate(**inputs, **asked), out)
            answered += 1
        if i % 50 == 49:
            del inputs, out
            held.append(sum(storages().values()))
    print(f"bytes of tensors alive after every 50 generations: {held}")  # pytest -rP shows it
    assert len(set(held)) == 1, held
    assert answered == 9
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {name: sorted(vars(x)) for name, x in model.named_modules()} == attributes
