"""The memory that a score and an eviction need beside the layer's own tensors, without a device.

Meta tensors take the way of an accelerator, and no memory.
"""

import torch

from helpers.memory import Live
from mmkv.cache import group_index
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.evict import evict
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.sizing import sizes_of_rows
from mmkv.layer_inputs import LayerInputs, Rotary
from mmkv.registry import get_policy
from mmkv.sizes.profiled import HeadTable

N, H, D = 32_768, 32, 128  # a layer of a 7B model


def read(n_tokens):
    """The bytes that condense needs at once to read and evict a layer."""

    def heads():
        return torch.empty(1, n_tokens, H, D, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    policy = get_policy("condense")
    weights = tuple(0.05 + (h * 7 % H) / H for h in range(H))
    plan = CacheConfig(policy, 0.2, table=HeadTable((weights,), (0,), sizes_layers=True))
    valid = torch.ones(1, n_tokens, dtype=torch.bool)
    prompt = TokenMasks.of(plan, valid, n_layers=1)
    sizes = [row[0] for row in sizes_of_rows(plan, prompt, 1)]
    cos = torch.empty(1, n_tokens, D, device="meta")
    layer = LayerInputs(
        query=heads(),
        key=heads(),
        value=heads(),
        valid=valid.to("meta"),
        scale=D**-0.5,
        rotary=Rotary(cos, cos, torch.empty(D // 2, device="meta")),
        weight=lambda: torch.empty(H, H * D, D, dtype=torch.bfloat16, device="meta"),
    )
    positions = torch.arange(n_tokens, device="meta")[None, None]
    with Live() as live:
        kv = PromptKV(layer.key, layer.value, positions)
        kv.score(policy, layer, prompt, None)
        evict(kv, plan, prompt, sizes, 0, 0)
    return live.most


def test_condense_needs_little_beside_a_long_layer(monkeypatch):
    monkeypatch.setattr(group_index, "_bits", lambda ahead: 9)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    assert read(N) < 2e9
