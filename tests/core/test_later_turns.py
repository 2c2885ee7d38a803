"""Which tokens a later turn keeps, against loops over the plain model's attention.

`test_turns` shows that what was evicted is what is masked; here, that it is the right set. The
attention is that of a full cache in which each pass sees only what the pass before it kept, so a
token's score is what the paper's formula gives on the tokens that were really there.
"""

import pytest
import torch

import mmkv
from helpers.marks import cases, older_than
from helpers.masking import held_sets, masked_logits
from helpers.models import IMAGE, make_inputs, next_turn, scaled_model
from helpers.oracle import Variant, depth, generate, options_of, window_scores
from helpers.sizes import of_row

ROWS = (66, 41)
NEW = 7  # tokens generated in each turn, of which the last is read with the next turn
TURNS = (30, 3)  # tokens asked in each later turn; the second is shorter than the window
L, H, G = 2, 2, 2

VARIANTS = [
    Variant("h2o"),
    Variant("h2o", (("sinks", 3), ("recent", 0.2))),
    Variant("h2o", (("heads", "adaptive"),)),
    Variant("h2o", (), 44),
    Variant("prefixkv"),
    Variant("prefixkv", (("distance", 2),)),
    Variant("prefixkv", (("average_heads", False), ("sinks", 2))),
    Variant("elastic", (("distance", 2),)),
    Variant("snapkv"),
    Variant("snapkv", (("sinks", 4), ("average_heads", True))),
    Variant("pyramidinfer", (("layers", "uniform"),)),
    Variant("pyramidkv", (("pooling", "avg"), ("layers", "uniform"))),
    Variant("adakv"),
    Variant("snapkv", (("heads", "global"),)),
    Variant("h2o", (("heads", "global"), ("recent", 0.2), ("sinks", 2))),
    Variant("xkv"),
    Variant("xkv", (("retention", 0.6),), None),
    Variant("local"),
    Variant("streaming"),
]
PROTECTED = [
    Variant("prefixkv", (("protect", "instruction"),), 0.8),
    Variant("h2o", (("protect", "instruction"),), 0.8),
    Variant("snapkv", (("protect", "instruction"), ("window", 4)), 0.8),
]


@pytest.fixture(scope="module")
def models():
    return {name: scaled_model(name) for name in ("llama", "llava-llama")}


class Talk:
    """A conversation with a wrapped model, and the plain model's attention in each of its passes.

    Attributes:
        ids, valid: all tokens seen, [B, S], and which of them are not padding.
        asked: bool [S], False for generated tokens; the last one of a turn is read with the next
            turn, and is part of it.
        passes: (first token, number of tokens, is a turn) of each pass behind the first prompt.
        held: what each layer held after the prompt and after each pass.
        weights: attention [L][B, Hq, q, S] of the prompt and of each pass.
    """

    def __init__(self, model, inputs, variant, image=False, chunk=None):
        options = {"suppress_tokens": [IMAGE]}
        if chunk is not None:
            options["prefill_chunk_size"] = chunk
        given, ids = inputs, inputs["input_ids"]
        N = ids.shape[1]
        self.asked = torch.ones(N, dtype=torch.bool)
        self.passes, feeds, self.held, cache = [], [], [], None
        with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
            for turn, asked in enumerate((N, *TURNS)):
                if turn:
                    more = next_turn(inputs, ids, image and asked > 20, new=asked)
                    given, seen = more, ids.shape[1] - 1
                    pixels = {k: v for k, v in more.items() if k == "pixel_values"}
                    feeds.append({"input_ids": more["input_ids"][:, seen:], **pixels})
                    self.passes.append((seen, asked + 1, True))
                    self.asked = torch.cat([self.asked, torch.ones(asked, dtype=torch.bool)])
                _, words, cache, held = generate(
                    model, given, new=NEW, past_key_values=cache, **options
                )
                first = given["input_ids"].shape[1]
                for t in range(NEW - 1):
                    feeds.append({"input_ids": words[:, t : t + 1]})
                    self.passes.append((first + t, 1, False))
                spoken = torch.arange(NEW) == NEW - 1
                self.asked = torch.cat([self.asked, spoken])
                self.held += held
                ids = torch.cat([given["input_ids"], words], dim=1)
        self.ids = ids
        self.valid = torch.ones_like(ids, dtype=torch.bool)
        self.valid[:, :N] = inputs["attention_mask"].bool()
        policy = mmkv.get_policy(variant.policy, **options_of(variant))
        with torch.no_grad():
            first = model(**inputs, output_attentions=True, use_cache=False).attentions
        record: list[list[torch.Tensor]] = []
        masked_logits(model, inputs, feeds, self.held, merge=policy.merge, record=record)
        self.weights = [list(first), *record]


class Row:
    """One row of the conversation, followed head by head: what is held, and what it weighs."""

    def __init__(self, talk, policy, b):
        self.talk, self.policy, self.b = talk, policy, b
        self.mass = [[{} for _ in range(H)] for _ in range(L)]
        self.held = [[set() for _ in range(H)] for _ in range(L)]

    def attention(self, t, layer, head):
        """[G, q, S] in pass t (0: the prompt), of the queries that are not padding."""
        a = self.talk.weights[t][layer][self.b, head * G : (head + 1) * G].double()
        return a[:, self.talk.valid[self.b, : a.shape[1]]] if t == 0 else a

    def received(self, t, layer, head):
        """Attention that each token receives from all queries of a pass, mean over the group."""
        return self.attention(t, layer, head).sum(1).mean(0).tolist()

    def observed(self, t, layer, head, tokens):
        """SnapKV's score of each of `tokens` but the window's."""
        score, attention = self.policy.score, self.attention(t, layer, head)[:, :, tokens]
        window = min(score.window, attention.shape[1])
        options = {"recent": score.recency_weighted}
        found = window_scores(attention, window, score.kernel_size, score.pooling, **options)
        return dict(zip(tokens, found + [0.0] * window, strict=True))

    def scores(self, t, layer, tokens):
        """What each head finds its `tokens` [H] worth, after pass t."""
        if self.policy.score.name == "recency":
            return [{j: float(j) for j in mine} for mine in tokens]
        if self.policy.score.name == "window":
            found = [self.observed(t, layer, h, mine) for h, mine in enumerate(tokens)]
        else:
            new = [self.received(t, layer, h) for h in range(H)]
            found = [{j: new[h][j] for j in mine} for h, mine in enumerate(tokens)]
        if self.policy.score.average_heads:
            found = [{j: sum(one[j] for one in found) / H for j in found[0]}] * H
        if self.policy.score.name == "accumulated":
            found = [
                {j: s + self.mass[layer][h].get(j, 0.0) for j, s in one.items()}
                for h, one in enumerate(found)
            ]
        return found

    def must_stay(self, seen):
        """Tokens that are kept whatever their score, of the first `seen`."""
        talk, policy = self.talk, self.policy
        real = talk.valid[self.b, :seen].nonzero()[:, 0].tolist()
        must = set(real[: policy.sinks])
        if policy.score.name == "window":
            must |= set(real[-policy.score.window :])
        if policy.protect is not None:
            must |= {j for j in real if talk.asked[j] and talk.ids[self.b, j] != IMAGE}
        return must, len(real)

    def step(self, t, position):
        """A generated token: it is held, and H2O goes on counting."""
        for layer in range(L):
            for h in range(H):
                mass = self.mass[layer][h]
                mass[position] = 0.0
                if self.policy.decode.name == "fixed" and self.policy.score.name == "accumulated":
                    for j, w in enumerate(self.received(t, layer, h)):
                        if j in mass:
                            mass[j] += w

    def turn(self, t, seen, new, budget):
        """What each head of each layer may keep of what it holds and of the `new` tokens.

        Returns [L][H] of: the scores, the tokens that stay whatever theirs, and how many stay.
        """
        must, length = self.must_stay(seen)
        tokens = [[sorted(self.held[i][h] | set(new)) for h in range(H)] for i in range(L)]
        scores = [self.scores(t, i, tokens[i]) for i in range(L)]
        if self.policy.score.name == "accumulated":
            self.mass = scores
        sizes = self.layer_sizes(scores, must, length, budget)
        found = []
        for i in range(L):
            n = [min(sizes[i], len(mine)) for mine in tokens[i]]
            forced = [
                self.with_recent(must & set(mine), mine, size)
                for mine, size in zip(tokens[i], n, strict=True)
            ]
            if self.policy.heads.name == "adaptive":
                n = self.head_sizes(scores[i], forced, sizes[i])
            found.append(list(zip(scores[i], forced, n, strict=True)))
        if self.policy.heads.name == "global":
            return self.over_the_model(found, H * sum(sizes))
        return found

    def with_recent(self, must, tokens, n):
        """With the newest of the others, H2O's share of the size `n`, where there is room."""
        free = [j for j in tokens if j not in must]
        share = min(int(self.policy.recent * n), n - len(must))
        return must | set(free[len(free) - share :])

    def layer_sizes(self, scores, must, length, budget):
        ranked = []
        for layer in scores:
            free = [sorted((s for j, s in h.items() if j not in must), reverse=True) for h in layer]
            most = max(map(len, free))
            filled = [f + [0.0] * (most - len(f)) for f in free]
            ranked.append([sum(entries) / H for entries in zip(*filled, strict=True)])
        most = max(map(len, ranked))
        importance = torch.tensor([r + [0.0] * (most - len(r)) for r in ranked]).double()
        if self.policy.layers.retention is not None:
            chosen = of_row(mmkv.sizes.pooled, importance, retention=self.policy.layers.retention)
            return [len(must) + n for n in chosen]
        total = L * min(budget, length) if isinstance(budget, int) else round(budget * L * length)
        if self.policy.layers.name == "uniform":
            return mmkv.sizes.uniform(L, total, max_size=length)
        allocate = {"prefix": mmkv.sizes.prefix, "pooled": mmkv.sizes.pooled}
        chosen = of_row(allocate[self.policy.layers.name], importance, total - L * len(must))
        return [len(must) + n for n in chosen]

    def over_the_model(self, found, total):
        """`found` with the sizes by which the best tokens of all heads stay, `total` in all."""
        everywhere = [(i, h) for i in range(L) for h in range(H)]
        forced = {(i, h): found[i][h][1] for i, h in everywhere}
        competing = [
            (s, at) for at in everywhere for j, s in found[at[0]][at[1]][0].items()
            if j not in forced[at]
        ]  # fmt: skip
        spare = total - sum(map(len, forced.values()))
        owners = [at for _, at in sorted(competing, reverse=True)[:spare]]
        return [
            [
                (scores, mine, len(mine) + owners.count((i, h)))
                for h, (scores, mine, _) in enumerate(layer)
            ]
            for i, layer in enumerate(found)
        ]

    def head_sizes(self, scores, forced, n):
        """Ada-KV, algorithm 2: half of the size by the layer's best tokens of all heads."""
        spare = n - max(map(len, forced))
        best = sorted(
            ((s, h) for h in range(H) for j, s in scores[h].items() if j not in forced[h]),
            reverse=True,
        )
        owners = [h for _, h in best[: H * spare]]
        alpha = self.policy.heads.alpha
        wanted = [(1 - alpha) * owners.count(h) + alpha * spare for h in range(H)]
        whole = [int(w) for w in wanted]
        missing = H * spare - sum(whole)
        by_fraction = sorted(range(H), key=lambda h: (whole[h] - wanted[h], h))
        sizes = [len(f) + n for f, n in zip(forced, whole, strict=True)]
        return [
            min(size + (h in by_fraction[:missing]), len(scores[h])) for h, size in enumerate(sizes)
        ]


def check(talk, variant, b):
    """Follow one row through the conversation; returns how many tokens later turns dropped."""
    policy = mmkv.get_policy(variant.policy, **options_of(variant))
    row, dropped = Row(talk, policy, b), 0
    prompt = talk.weights[0][0].shape[-1]
    for t in range(len(talk.held)):
        first, q, is_turn = (0, prompt, True) if t == 0 else talk.passes[t - 1]
        after = [held_sets(talk.held[t][i], b) for i in range(L)]
        if not is_turn:
            row.step(t, first)
            row.held = after
            continue
        new = [j for j in range(first, first + q) if talk.valid[b, j]]
        for i, layer in enumerate(row.turn(t, first + q, new, variant.budget)):
            for h, (scores, forced, n) in enumerate(layer):
                assert len(after[i][h]) == n, (t, i, h)
                assert after[i][h] <= set(scores)
                assert forced <= after[i][h], (t, i, h)
                chosen, gone = after[i][h] - forced, set(scores) - after[i][h]
                if chosen and gone:
                    # Near ties may fall either way.
                    worst, best = min(scores[j] for j in chosen), max(scores[j] for j in gone)
                    assert worst >= best - 1e-5 * max(scores.values()), (t, i, h)
                dropped += len(gone) if t else 0
        row.held = after
    return dropped


IN_CHUNKS = ["h2o", "prefixkv", "snapkv", "adakv", "xkv", "streaming"]


@cases(
    "variant, chunk",
    [(x, None) for x in VARIANTS]
    + ([] if older_than("5.21") else [(Variant(x), 13) for x in IN_CHUNKS]),
    (Variant("h2o"), None),
    ids=str,
)
def test_later_turns_keep_highest_scores(models, variant, chunk):
    """In chunks, too: nothing is evicted before the prompt, or the turn, is complete."""
    talk = Talk(models["llama"], make_inputs("llama", ROWS), variant, chunk=chunk)
    for b in range(len(ROWS)):
        assert check(talk, variant, b) > 20


@cases("variant", PROTECTED, PROTECTED[0], ids=str)
def test_generated_tokens_compete_with_images(models, variant):
    """protect="instruction" is about what was asked: generated tokens and images compete."""
    talk = Talk(models["llava-llama"], make_inputs("llava-llama", (70, 62)), variant, image=True)
    generated = {j for j in range(talk.passes[-1][0]) if not talk.asked[j]}
    for b in range(2):
        assert check(talk, variant, b) > 0
        assert any(generated - set(head.tolist()) for layer in talk.held[-1] for head in layer[b])


def test_squeeze_sizes_layers_by_the_turn():
    """A turn is a prompt again: its own tokens decide which layers change the stream little.

    The first layer reads nothing of the prompt's words, so it does not change them; it changes the
    turn's.
    """
    L = depth("squeeze")
    model, inputs, first = scaled_model("llama", L), make_inputs("llama", (200,)), 60
    model.get_input_embeddings().weight.data[:first, :32] = 0
    model.model.layers[0].self_attn.v_proj.weight.data[:, 32:] = 0
    inputs["input_ids"] = 4 + inputs["input_ids"] % (first - 4)  # no padding among them
    turn = torch.arange(first, first + 12)[None]
    entered, added, cut, hooks = [{}], [{}], [], []
    for i, layer in enumerate(model.model.layers):
        hooks += [
            layer.register_forward_pre_hook(lambda m, a, i=i: entered[-1].update({i: a[0][0]})),
            layer.self_attn.register_forward_hook(
                lambda m, a, o, i=i: added[-1].update({i: o[0][0]})
            ),
        ]
    with mmkv.wrapped(model, "squeeze", 0.5, base="local"), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        sizes = [[int((cache.kept(i) >= 0).sum(-1)[0, 0]) for i in range(L)]]
        entered.append({})
        added.append({})
        ids = torch.cat([inputs["input_ids"], turn], dim=1)
        model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
        sizes.append([int((cache.kept(i) >= 0).sum(-1)[0, 0]) for i in range(L)])
    for hook in hooks:
        hook.remove()
    offered, seen = [0] * L, 0
    for stream, change, got in zip(entered, added, sizes, strict=True):
        similarity = []
        for i in range(L):
            one = [
                torch.cosine_similarity(a, a + b, dim=0).item()
                for a, b in zip(stream[i], change[i], strict=True)
            ]
            similarity.append(sum(one) / len(one))
        offered, seen = [n + len(one) for n in offered], seen + len(one)
        wanted = mmkv.sizes.squeeze(similarity, round(0.5 * L * seen), max_size=seen)
        assert got == [min(pair) for pair in zip(wanted, offered, strict=True)]
        cut.append(max(range(L), key=similarity.__getitem__))
        offered = got
    assert cut[0] != cut[1], "the turn cuts the layer that the prompt did: the test saw nothing"
