"""The scores and the kept tokens of every class, from the attention that the model itself returns.

The plain model is asked for its attention weights (`output_attentions`), which hold whatever it
does: masks that are not causal, softcap, scale, padding. The papers' formulas are applied to them.
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

import mmkv
from helpers import zoo
from helpers.marks import cases
from helpers.oracle import window_scores
from mmkv.cache.layer import CompressedLayer

BUDGET, WINDOW, KERNEL = 0.3, 5, 3
# By a window of queries, and by all.
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": {"window": WINDOW, "kernel_size": KERNEL},
    "h2o": {},
}
CASES = [
    *itertools.product(zoo.CONFIGS, ("padded",), ("eager",)),
    *itertools.product(zoo.FEW, ("one",), ("eager",)),
    # Masks are bool there, or none. It leaves a softcap out, so such models are not loaded so.
    *((name, "padded", "sdpa") for name in zoo.CONFIGS if zoo.usual_attention(name) == "sdpa"),
    # The window's queries see each other, and what stands before them.
    ("Gemma3ForConditionalGeneration", "ends in a picture", "eager"),
    ("Gemma3ForConditionalGeneration", "ends in a picture", "sdpa"),
]
model_of = functools.cache(zoo.make)


def policies_for(name: str, rows: str, loaded: str) -> list[str]:
    """Both on a few classes; on each of the others one with `eager`, and one with `sdpa`."""
    at = [*zoo.CONFIGS].index(name) + (loaded == "sdpa")
    return [*POLICIES] if name in zoo.FEW else [[*POLICIES][at % 2]]


@functools.cache
def attended(name: str, rows: str) -> tuple[dict[str, Tensor], list[Any]]:
    """A prompt, and each layer's attention weights [B, Hq, N, N] for it in the plain model.

    None for layers with linear attention, which have none.
    """
    model = model_of(name, "eager")
    inputs = zoo.inputs_of(model, "padded" if rows == "padded" else "one")
    if rows == "ends in a picture":
        end = int((inputs["input_ids"] == zoo.IMAGE).nonzero()[-1, 1]) + 3
        inputs = {k: x if k == "pixel_values" else x[:, :end] for k, x in inputs.items()}
    with torch.no_grad():
        found = iter(model(**inputs, output_attentions=True, use_cache=False).attentions)
    config = model.get_decoder().config
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return inputs, [None if kind == "linear_attention" else next(found) for kind in kinds]


def score_of(policy: str, attention: Tensor, H: int) -> Tensor:
    """The score [H, N] of one row without padding, of its attention [Hq, N, N]."""
    groups = attention.unflatten(0, (H, -1))
    if policy == "h2o":
        return groups.sum(2).mean(1)  # over the queries, and the group
    found = [window_scores(x, WINDOW, KERNEL, "max") for x in groups]
    return torch.nn.functional.pad(torch.tensor(found), (0, WINDOW))


@cases(
    "name, rows, loaded, policy",
    [(*case, policy) for case in CASES for policy in policies_for(*case)],
    *[(*x, policy) for x in CASES if x[0] in zoo.FEW and x[2] == "sdpa" for policy in POLICIES],
)
def test_scores_and_kept_tokens_are_those_of_the_models_attention(
    name, rows, loaded, policy, monkeypatch
):
    model, (inputs, attentions) = model_of(name, loaded), attended(name, rows)
    computed: list[Tensor] = []
    score = type(mmkv.get_policy(policy).score)
    importance = score.__call__

    @functools.wraps(importance)
    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        computed.append(importance(*args, **kwargs))
        return computed[-1]

    monkeypatch.setattr(score, "__call__", recorded)
    with mmkv.wrapped(model, policy, BUDGET, **POLICIES[policy]), torch.no_grad():
        cache: Any = model(**inputs, use_cache=True).past_key_values
    layers = [i for i, x in enumerate(cache.layers) if isinstance(x, CompressedLayer)]
    for b, real in enumerate(inputs["attention_mask"].bool()):
        N, total = int(real.sum()), 0
        first = len(real) - N
        assert real[first:].all()
        for got, i in zip(computed, layers, strict=True):
            kept = [[p - first for p in row.tolist() if p >= 0] for row in cache.kept(i)[b]]
            want = score_of(policy, attentions[i][b, :, first:, first:], len(kept))
            torch.testing.assert_close(got[b, :, first:], want, atol=1e-5, rtol=1e-4)
            assert not got[b, :, :first].any()
            for head, tokens in enumerate(kept):
                check_best(policy, tokens, want[head])
                total += len(tokens) / len(kept)
        assert total == round(BUDGET * len(layers) * N)


def check_best(policy: str, kept: list[int], score: Tensor) -> None:
    """The kept tokens are the last ones, as many as the policy says, and the best of the others."""
    N = len(score)
    last = len(kept) // 2 if policy == "h2o" else WINDOW
    assert kept[len(kept) - last :] == list(range(N - last, N))
    chosen = kept[: len(kept) - last]
    dropped = [j for j in range(N) if j not in kept]
    # Where two are as good (pooling makes such), either may be kept.
    assert not chosen or score[chosen].min() >= score[dropped].max() - 1e-6
