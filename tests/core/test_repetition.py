"""KVzip: what repeating the prompt asks of its tokens, against the plain model that repeats it."""

import copy
from contextlib import contextmanager

import pytest
import torch

import mmkv
from helpers import zoo
from helpers.marks import cases
from helpers.models import make_inputs, make_model, next_turn
from helpers.oracle import prefilled, top
from mmkv.layer_inputs import LayerInputs
from mmkv.policies.kvzip import Repetition

L, H, G = 2, 2, 2


@pytest.mark.parametrize("outputs", [False, True])
def test_the_most_attention_of_any_query(outputs, monkeypatch) -> None:
    """Of which two queries are looked at at a time."""
    torch.manual_seed(0)
    B, Q, N, D = 2, 6, 17, 8
    monkeypatch.setattr("mmkv.policies.kvzip.tile", lambda device: H * G * N * 2)
    query, key = 2 * torch.randn(B, H * G, Q, D), 2 * torch.randn(B, H, N, D)
    valid = torch.rand(B, N) > 0.2
    valid[:, -2] = True
    hidden = torch.randn(B, Q, 12).masked_fill(~valid[:, -Q:, None], 0.0)
    weight, value = torch.randn(H * G, 12, D), torch.randn(B, H, N, D)
    given = {"query": query, "key": key, "value": value, "valid": valid, "hidden": hidden}
    layer = LayerInputs(**given, scale=0.5, softcap=3.0, weight=lambda: weight)
    found = Repetition(outputs=outputs)(layer)
    for b in range(B):
        for h in range(H):
            most = torch.zeros(N)
            for i in range(Q):
                seen = valid[b] & (torch.arange(N) <= N - Q + i)
                if not valid[b, N - Q + i]:
                    continue
                for g in range(G):
                    logits = 3 * torch.tanh(key[b, h] @ query[b, h * G + g, i] * 0.5 / 3)
                    a = logits.masked_fill(~seen, -torch.inf).softmax(-1)
                    if outputs:
                        a *= (value[b, h] @ weight[h * G + g].T).norm(dim=-1) / hidden[b, i].norm()
                    most = most.maximum(a)
            torch.testing.assert_close(found[b, h], most)


def repeated_scores(model, embeds, size, asked, plus=False, sinks=4):
    """[L][H] of a score for each token: the plain model is fed its prompt again, piece by piece."""
    given, attentions = {}, [x.self_attn for x in model.get_decoder().layers]
    for i, x in enumerate(attentions):
        x.register_forward_pre_hook(
            lambda m, args, kwargs, i=i: given.update({i: kwargs["hidden_states"][0]}),
            with_kwargs=True,
        )
    N = embeds.shape[1]
    before = model.get_decoder()(inputs_embeds=embeds, use_cache=True).past_key_values
    ahead = model.get_input_embeddings()(torch.tensor([asked], dtype=torch.long))
    scores = [[[0.0] * N for _ in range(H)] for _ in range(L)]
    for start in range(0, N, size):
        piece = embeds[:, start : start + size]
        again = torch.cat([ahead, piece], dim=1)
        R, stop = again.shape[1], start + piece.shape[1]
        out = model.get_decoder()(
            inputs_embeds=again,
            past_key_values=copy.deepcopy(before),
            position_ids=torch.arange(N, N + R)[None],
            output_attentions=True,
        )
        shared = [j for j in range(N + R) if start <= j < stop or j >= N or j < min(sinks, start)]
        for i, a in enumerate(out.attentions):  # [1, Hq, R, N + R]
            a = a[0] / a[0][..., shared].sum(-1, keepdim=True)
            if plus:
                values = before.layers[i].values[0].repeat_interleave(G, dim=0)  # [Hq, N, D]
                of_heads = attentions[i].o_proj.weight.split(values.shape[-1], dim=1)
                for g, w in enumerate(of_heads):
                    a[g, :, :N] *= (values[g] @ w.T).norm(dim=-1) / given[i].norm(dim=-1)[:, None]
            for h in range(H):
                most = a[h * G : (h + 1) * G].amax((0, 1)).tolist()
                scores[i][h][start:stop] = most[start:stop]
    return scores


@contextmanager
def reading(model):
    """What the first layer is given in each pass."""
    given = []

    def note(module, args, kwargs):
        given.append(args[0] if args else kwargs["hidden_states"])

    layer = model.get_decoder().layers[0]
    with layer.register_forward_pre_hook(note, with_kwargs=True):
        yield given


def best_of_all(scores, total, sinks=4):
    """[L][H] of the tokens kept: the sinks, and the best of all heads."""
    heads = [(i, h) for i in range(L) for h in range(H)]
    ranked = sorted(
        ((s, at) for at in heads for s in scores[at[0]][at[1]][sinks:]), reverse=True
    )  # fmt: skip
    owners = [at for _, at in ranked[: total - len(heads) * sinks]]
    return [
        [
            set(range(sinks)) | {sinks + j for j in top(mine[sinks:], owners.count((i, h)))}
            for h, mine in enumerate(layer)
        ]
        for i, layer in enumerate(scores)
    ]


@cases("name", ["llama", "llava-llama"], "llava-llama")
@cases("size, asked", [(2048, []), (19, [7, 8, 9])], (19, [7, 8, 9]))
@pytest.mark.parametrize("policy", ["kvzip", "kvzip-plus"])
def test_kept_tokens_are_those_read_by_repetition(policy, name, size, asked) -> None:
    """Pictures are repeated by the embeddings that the decoder was given."""
    model, inputs = make_model(name, "eager"), make_inputs(name, (60,))
    with torch.no_grad():
        with reading(model) as seen:
            model(**inputs, use_cache=False)
        scores = repeated_scores(model, seen[0], size, asked, policy == "kvzip-plus")
    options = {"repeated": size, "instruction": " ".join(map(str, asked)) or None}
    cache = prefilled(model, inputs, policy, 0.3, **options)
    want = best_of_all(scores, H * round(0.3 * L * 60))
    for i in range(L):
        for h in range(H):
            assert set(cache.kept(i)[0, h].tolist()) - {-1} == want[i][h], (i, h)


def test_a_later_turn_is_repeated_and_earlier_tokens_keep_their_scores() -> None:
    model, inputs = make_model("llama"), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "kvzip", 0.5), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        first = [x.keeping().dense() for x in cache.compressed]
        more = next_turn(inputs, inputs["input_ids"], False, new=20)
        with reading(model) as fed:
            model.generate(**more, past_key_values=cache, max_new_tokens=1, do_sample=False)
        second = [x.keeping().dense() for x in cache.compressed]
    assert [x.shape[1] for x in fed] == [20, 20]  # the turn, and the turn again
    for old, new in zip(first, second, strict=True):
        for h in range(H):
            known = dict(zip(old.positions[0, h].tolist(), old.scores[0, h].tolist(), strict=True))
            now = dict(zip(new.positions[0, h].tolist(), new.scores[0, h].tolist(), strict=True))
            shared = [p for p in now if p in known and p >= 0]
            assert [now[p] for p in shared] == [known[p] for p in shared]
            assert all(now[p] > 0 for p in now if p >= 40)


@pytest.mark.parametrize("name", [x for x in zoo.NAMES if "Qwen2" in x and "VL" in x][:1])
def test_repetition_positions_continue_after_prompt(name) -> None:
    """Three axes: moved alike, the first behind the largest."""
    model = zoo.model_of(name)
    inputs = zoo.inputs_of(model, "one")
    found = []
    decoder = model.get_decoder()
    noting = decoder.rotary_emb.register_forward_pre_hook(
        lambda m, args, kwargs: found.append(args[1] if len(args) > 1 else kwargs["position_ids"]),
        with_kwargs=True,
    )
    with noting, mmkv.wrapped(model, "kvzip", 0.5, instruction="5 6"):
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
    first, again = found[0][-3:, 0], found[1][-3:, 0]
    last = int(first.max())
    assert again[:, :2].tolist() == [[last + 1, last + 2]] * 3
    assert (first.amax(0) != first.amin(0)).any(), "no picture: the test saw nothing"
    assert torch.equal(again[:, 2:], first - first[:, :1].min() + last + 3)


def test_a_float16_model_repeats_its_prompt_under_autocast() -> None:
    """To bfloat16, in which torch joins no tensors of float16."""
    model, inputs = make_model("llama").half(), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "kvzip", 20), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model(**inputs, use_cache=True).past_key_values
    assert sum(cache.kept(i).shape[-1] for i in range(L)) >= 20 * L
