"""What the plugin keeps of a layer, by every policy that it accepts, next to `mmkv.wrap`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import mmkv
from helpers import zoo
from helpers.configs import CONFIGS
from helpers.marks import cases
from helpers.models import make_inputs
from mmkv.vllm import options
from mmkv.vllm.compress import Prompt, compress, with_equal_sizes
from mmkv.vllm.settings import Settings, parse_resolved

N, M, HEADS = 300, 90, 4
GROW, EQUAL, PROBED = {"decode": "grow"}, {"heads": "uniform"}, {"heads": "retrieval"}
# By the probe, the heads of a layer are in several modules.
BY_PROBE = {
    "adakv": PROBED,
    "condense": {},
    "expected": PROBED,
    "h2o": GROW | PROBED,
    "keydiff": PROBED,
    "knorm": PROBED,
    "lagkv": PROBED,
    "lookm": PROBED,
    "mixkv": PROBED,
    "snapkv": PROBED,
    "sparsemm": PROBED,
}
ALIKE = {
    "adakv": EQUAL,
    "condense": EQUAL,
    "defensive": EQUAL,
    "elastic": GROW,
    "expected": EQUAL,
    "h2o": GROW,
    "keydiff": {},
    "knorm": {},
    "lagkv": {},
    "layer-defensive": EQUAL,
    "local": GROW,
    "lookm": {},
    "mixkv": {},
    "random": {},
    "snapkv": {},
    "sparsemm": EQUAL,
    "streaming": GROW,
    "tova": GROW,
}


@pytest.fixture(scope="module")
def model() -> Any:
    config = CONFIGS["LlavaForConditionalGeneration"]()
    config.text_config.num_attention_heads, config.text_config.num_key_value_heads = (
        2 * HEADS,
        HEADS,
    )
    return zoo.build("LlavaForConditionalGeneration", config, "sdpa")


@pytest.fixture(scope="module")
def inputs() -> Any:
    return make_inputs("llava-llama", (N,))


@pytest.fixture(scope="module")
def layers(model: Any, inputs: Any) -> list[tuple[Any, Tensor, Tensor, Tensor]]:
    """Each layer's attention module, queries, keys and values, of the model as it is."""
    seen = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Any:
        seen.append((module, q[0], k[0], v[0]))
        return sdpa_attention_forward(module, q, k, v, *args, **more)

    AttentionInterface.register("seen_by_test", attention)
    decoder = model.get_decoder()
    decoder.set_attn_implementation("seen_by_test")
    with torch.no_grad():
        model(**inputs)
    decoder.set_attn_implementation("sdpa")
    return seen


def resolved(name: str, given: dict[str, Any]) -> Settings:
    policy, budget = options.parsed({"policy": name, "budget": 0.3, **given})
    heads = [[0.3, [[i, h] for i in range(3) for h in range(HEADS)]]]
    more = {"plugins": [], "options": given, "budget": budget, "unit": 1, "classes": heads}
    return parse_resolved(json.dumps({"policy": policy.name, "codes": None, **more}))


def in_order(pairs: Tensor) -> Tensor:
    """Sort the pairs of each head [H, M, C] by their first number."""
    return pairs.gather(1, pairs[..., :1].argsort(1).expand_as(pairs))


@cases(
    "name, given, modules",
    [(name, given, [[0, 3], [1, 2]]) for name, given in BY_PROBE.items()]
    + [(name, given, [list(range(HEADS))]) for name, given in ALIKE.items()]
    + [("snapkv", {"merge": "groups"}, [list(range(HEADS))])],
    *("condense", "h2o", "snapkv"),
)
def test_pairs_kept_are_those_of_wrap(
    model: Any, inputs: Any, layers: Any, name: str, given: Any, modules: list[list[int]]
) -> None:
    found = resolved(name, given)
    rope = model.get_decoder().rotary_emb
    cos, sin = (x[0] for x in rope(torch.zeros(1), torch.arange(3 * N)[None]))
    policy = with_equal_sizes(options.parsed({"policy": name, "budget": 0.3, **given})[0])
    with mmkv.wrapped(model, policy, M), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    for i, (module, query, keys, values) in enumerate(layers):
        held = cache.layers[i].dense()
        bias = torch.zeros(1, HEADS, M) if held.log_weights is None else held.log_weights
        expected = in_order(torch.cat([held.keys, held.values, bias[..., None]], -1)[0])
        group, D = len(query) // HEADS, query.shape[-1]
        weight = module.o_proj.weight.unflatten(1, (HEADS, group, D)).movedim(0, 2)
        for heads in modules:
            n = found.queries
            prompt = Prompt(
                query.unflatten(0, (HEADS, group))[heads].flatten(0, 1)[:, -(n or N) :],
                keys[heads],
                values[heads],
                module.scaling,
                (cos, sin, False),
                lambda weight=weight, heads=heads: weight[heads].flatten(0, 1),
                lambda function, weight=weight, heads=heads: function(weight[heads].flatten(0, 1)),
                inputs["input_ids"][0] == model.config.image_token_id,
                i,
            )
            keys_, values_, weights = compress(prompt, M, found.policy)
            # A cache holds logarithms of weights in 16 bits.
            weights = weights.half().float()
            pairs = in_order(torch.cat([keys_, values_, weights[..., None]], -1))
            torch.testing.assert_close(pairs, expected[heads], atol=1e-4, rtol=1e-3)


def test_every_policy_that_is_accepted_is_among_these() -> None:
    for tested, tries in (
        (ALIKE, ({}, EQUAL, GROW, EQUAL | GROW)),
        (BY_PROBE, (PROBED, PROBED | GROW)),
    ):
        accepted = set()
        for name in mmkv.list_policies():
            for given in tries:
                try:
                    policy, _ = options.parsed({"policy": name, "budget": 0.3, **given})
                except ValueError:
                    continue
                if policy.heads.name == "retrieval" or tested is ALIKE:
                    accepted.add(name)
        assert accepted == set(tested)
