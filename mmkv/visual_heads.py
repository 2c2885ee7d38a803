"""Measures visual heads: how often a head's largest attention falls on what a word is read from.

Wang et al., "SparseMM", arXiv 2506.05344, section 3.1. For each word of a reply the model attends
to the prompt when it predicts that word. A head that attends most to a token of the word's image
region scores 1 over the number of the region's tokens, as in the authors' code,
https://github.com/CR400AF-A/SparseMM; scores add up over words and over the query heads that read
one key-value head. The authors' regions are OCR boxes; here samples say them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv import adapters
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.phases import Reading
from mmkv.cache.prompt_kv import PromptKV
from mmkv.calls import passing, unwrap_container
from mmkv.forcing import greedy
from mmkv.layer_inputs import LayerInputs
from mmkv.policy import Policy
from mmkv.sizes.heads import UniformHeads
from mmkv.wrapping import wrapped

# What a sample may have beside the model's inputs.
REPLY, REGIONS = "reply", "regions"
# Most tokens of a reply that the model gives itself.
_MOST = 128


def measure(
    model: Any, samples: Iterable[Mapping[str, Any]], policy: Policy
) -> tuple[tuple[tuple[float, ...], ...], int]:
    """Visual scores [L][H] of the compressed layers' key-value heads, which add up to 1.

    Args:
        model: not wrapped; it is wrapped for a part of the call.
        samples: each what `model(**sample)` takes, of one row, and besides
            "reply": token ids [T] of what is read from the picture; left out: what the model says.
            "regions": for each of the T tokens the positions in `input_ids` of the image tokens
            that it is read from, none for a token that does not count; left out: all image tokens
            for every token, which tells heads that read the picture from those that do not.
        policy: whose profile it is; its options do not matter.

    Returns:
        the scores, and how many samples.
    """
    parts, inner = adapters.find(model), unwrap_container(model)
    plain, hits = replace(policy, heads=UniformHeads()), list[Tensor]()
    for i, sample in enumerate(samples):
        inputs = {k: v for k, v in sample.items() if k not in (REPLY, REGIONS)}
        reply = _reply(inner, inputs, sample.get(REPLY))
        regions = _regions(parts.image_token_ids, i, inputs["input_ids"], reply, sample)
        cache = _Probe(parts.config, CacheConfig(plain, 1.0), regions)
        followed, shape = dict(inputs), inputs["input_ids"].shape
        for name, x in inputs.items():  # masks, and types of tokens, go on behind the prompt
            if isinstance(x, Tensor) and x.shape == shape:
                followed[name] = pad(x, (0, len(reply)), value=int("attention_mask" in name))
        followed["input_ids"] = torch.cat([inputs["input_ids"], reply[None]], dim=1)
        with wrapped(model, plain, 1.0), torch.no_grad():
            inner(**followed, **passing(inner, cache), use_cache=True)
        hits.append(torch.stack(cache.hits))
    if not hits:
        raise ValueError("calibrate: no samples")
    total = torch.stack(hits).sum(0)
    if not bool(total.any()):
        raise ValueError(
            "calibrate: no head attends most to an image region while the replies are given: give "
            "samples whose reply is read from the picture"
        )
    shares = (total / total.sum()).tolist()
    return tuple(tuple(float(f"{x:.4g}") for x in layer) for layer in shares), len(hits)


class _Probe(CompressedCache):
    """Looks at where heads attend most, and stores nothing."""

    def __init__(self, config: Any, plan: CacheConfig, regions: Tensor) -> None:
        super().__init__(config, plan)
        self.regions = regions  # bool [T, N + T]
        self.hits: list[Tensor] = []  # by layer, float64 [H]

    def _read(self, layer_idx: int, phase: Reading, held: PromptKV, new: LayerInputs) -> None:
        self.hits.append(head_hits(new, self.regions.to(new.key.device)).cpu())


def head_hits(layer: LayerInputs, regions: Tensor) -> Tensor:
    """What each key-value head scores, summed over its query heads: float64 [H].

    Regions [T, N + T] say from which tokens each of the last T is read. The token before it
    predicts it, and does so by the query that counts.
    """
    T, N = regions.shape
    H = layer.key.shape[1]
    query = layer.query[0, :, N - T - 1 : N - 1].float().unflatten(0, (H, -1))
    # Softmax, a scale above 0 and a softcap change no order.
    logits = query @ layer.key[0].float()[:, None].mT  # [H, G, T, N]
    sees = torch.ones(T, N, dtype=torch.bool, device=logits.device).tril(N - T - 1)
    if layer.mask is not None:
        sees = layer.mask[0, 0, N - T - 1 : N - 1].to(logits.device)
    sees = sees & layer.valid[0].to(logits.device)
    most = logits.masked_fill(~sees, -torch.inf).argmax(-1)
    worth = regions.double() / regions.sum(-1, keepdim=True).clamp(min=1)
    return worth.expand(*most.shape[:2], T, N).gather(-1, most[..., None]).sum((1, 2, 3))


def _reply(model: Any, inputs: Mapping[str, Any], given: Any) -> Tensor:
    """int64 [T]."""
    ids = inputs["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"calibrate: input_ids of {len(ids)} rows: for visual heads give samples one by one"
        )
    if given is not None:
        return torch.as_tensor(given, device=ids.device).long().flatten()
    reply, valid = greedy(model, inputs, _MOST + 1)
    return reply[valid]


def _regions(
    image_ids: Sequence[int], i: int, ids: Tensor, reply: Tensor, sample: Mapping[str, Any]
) -> Tensor:
    """Bool [T, N + T]; the sample's, or all image tokens for every token."""
    T, N = len(reply), ids.shape[1]
    found = torch.zeros(T, N + T, dtype=torch.bool)
    given = sample.get(REGIONS)
    if given is None:
        found[:, :N] = torch.isin(ids[0].cpu(), torch.tensor(list(image_ids)))
        if not bool(found[:, :N].any()):
            raise ValueError(
                f"calibrate: sample {i} has no image tokens: visual heads are measured on prompts "
                'with pictures, or name what is read in its "regions"'
            )
        return found
    if len(given) != T:
        raise ValueError(
            f'calibrate: sample {i} has "regions" of {len(given)} tokens for a reply of {T}: give '
            'one for each token of "reply"'
        )
    for t, region in enumerate(given):
        places = torch.as_tensor(list(region), dtype=torch.long)
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < N:
            raise ValueError(
                f"calibrate: sample {i}, token {t} is read from {places.tolist()[:9]}, expected "
                f"positions among the {N} tokens of input_ids"
            )
        found[t, places] = True
    return found
