"""Visual heads: how often a head's largest attention is on the image region that a word names.

Wang et al., "SparseMM", arXiv 2506.05344, section 3.1. For each word of a reply, the query that
predicts the word is compared with the prompt's keys. If a head attends most to a token of the
word's image region, it scores 1 over the number of the region's tokens, as in the authors' code,
https://github.com/CR400AF-A/SparseMM; scores are summed over words and over the query heads of one
key-value head. The authors' regions are OCR boxes; here samples give them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv import adapters
from mmkv.attach.attachment import attachment_of
from mmkv.cache.forward_pass import collecting
from mmkv.calls import unwrap_container
from mmkv.forcing import replies
from mmkv.layer_inputs import LayerInputs
from mmkv.policy import Policy
from mmkv.scores.attention import window_rows
from mmkv.sizes.heads import UniformHeads
from mmkv.wrapping import wrapped

# Keys that a sample may have besides the model's inputs.
REPLY, REGIONS = "reply", "regions"
# Most tokens of a reply that the model generates.
_MOST = 128


def measure(
    model: Any, samples: Iterable[Mapping[str, Any]], policy: Policy
) -> tuple[tuple[tuple[float, ...], ...], int]:
    """Measure visual scores [L][H] of the compressed layers' key-value heads, of sum 1.

    Args:
        model: not wrapped; it is wrapped for a part of the call.
        samples: each the inputs of `model(**sample)`, of one row, and optionally
            "reply": token ids [T] of text read from the picture; by default the model's own reply.
            "regions": for each of the T tokens the positions in `input_ids` of the image tokens
            that it is read from, empty for a token that does not count; by default all image
            tokens, which separates heads that read the picture from those that do not.
        policy: the policy of the profile; its options do not matter.

    Returns:
        the scores, and the number of samples.
    """
    parts, unwrapped = adapters.find(model), unwrap_container(model)
    uniform, hits = replace(policy, heads=UniformHeads()), list[Tensor]()
    for i, sample in enumerate(samples):
        inputs = {k: v for k, v in sample.items() if k not in (REPLY, REGIONS)}
        ids: Tensor = inputs["input_ids"]
        if len(ids) != 1:
            raise ValueError(
                f"calibrate: input_ids of {len(ids)} rows: for visual heads give samples one by one"
            )
        if sample.get(REPLY) is None:
            (tokens,) = replies(unwrapped, inputs, _MOST + 1)
            reply = torch.tensor(tokens[:-1], dtype=torch.long, device=ids.device)
        else:
            reply = torch.as_tensor(sample[REPLY], device=ids.device).long().flatten()
        regions = _regions(parts, i, ids, reply, sample)
        with_reply = dict(inputs)
        for name, x in inputs.items():  # masks and token types are extended by the reply
            if isinstance(x, Tensor) and x.shape == ids.shape:
                with_reply[name] = pad(x, (0, len(reply)), value=int("attention_mask" in name))
        with_reply["input_ids"] = torch.cat([ids, reply[None]], dim=1)
        with wrapped(model, uniform, 1.0), torch.no_grad():
            counted = _Hits(attachment_of(model).compressed_layers, regions)
            with collecting(counted):
                unwrapped(**with_reply, use_cache=False)
        hits.append(torch.stack(counted.hits))
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


class _Hits:
    """Counts where the heads of some layers attend most, in a pass that stores nothing."""

    def __init__(self, layers: Sequence[int], regions: Tensor) -> None:
        self.layers = layers
        self.regions = regions  # bool [T, N + T]
        self.hits: list[Tensor] = []  # by layer, float64 [H]

    def add(self, layer: LayerInputs) -> None:
        """Count in one layer."""
        if layer.layer_idx in self.layers:
            self.hits.append(head_hits(layer, self.regions.to(layer.key.device)).cpu())


def head_hits(layer: LayerInputs, regions: Tensor) -> Tensor:
    """Return each key-value head's score, summed over its query heads: float64 [H].

    `regions` is bool [T, N + T], the tokens from which each of the last T tokens is read. The query
    that counts is that of the token before, which predicts it.
    """
    (T, N), device = regions.shape, layer.key.device
    query, key, valid = layer.query[:, :, :-1], layer.key[:, :, :-1], layer.valid[:, :-1].to(device)
    mask = None if layer.mask is None else layer.mask[:, :, :-1, :-1].to(device)
    # The layer's scale and softcap do not change which token gets most.
    top = window_rows(query, key, T, valid=valid, mask=mask)[0].argmax(-1)  # [H, G, T]
    region_scores = regions.double() / regions.sum(-1, keepdim=True).clamp(min=1)
    return region_scores.expand(*top.shape[:2], T, N).gather(-1, top[..., None]).sum((1, 2, 3))


def _regions(
    parts: adapters.Adapter, i: int, ids: Tensor, reply: Tensor, sample: Mapping[str, Any]
) -> Tensor:
    """Return the sample's regions, or all image tokens for every token: bool [T, N + T]."""
    T, N = len(reply), ids.shape[1]
    in_region = torch.zeros(T, N + T, dtype=torch.bool, device="cpu")
    regions = sample.get(REGIONS)
    if regions is None:
        in_region[:, :N] = parts.is_image(ids[0]).cpu()
        if not bool(in_region[:, :N].any()):
            raise ValueError(
                f"calibrate: sample {i} has no image tokens: visual heads are measured on prompts "
                'with pictures, or name what is read in its "regions"'
            )
        return in_region
    if len(regions) != T:
        raise ValueError(
            f'calibrate: sample {i} has "regions" of {len(regions)} tokens for a reply of {T}: '
            'give one for each token of "reply"'
        )
    for t, region in enumerate(regions):
        positions = torch.as_tensor(list(region), dtype=torch.long)
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < N:
            raise ValueError(
                f"calibrate: sample {i}, token {t} is read from {positions.tolist()[:9]}, expected "
                f"positions among the {N} tokens of input_ids"
            )
        in_region[t, positions] = True
    return in_region
