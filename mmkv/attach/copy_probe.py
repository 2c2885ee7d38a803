"""The copy probe: finds the heads of a model that look up earlier occurrences of the same text.

Random tokens are read twice, `[bos] r r`, in one pass. In a retrieval head, a query of the second
copy attends to the same token in the first copy ("echo" heads) or to the one or two tokens after it
("induction" heads): the three weights are added. The method is known from RazorAttention
(arXiv 2407.15891) and DuoAttention (arXiv 2410.10819). It needs no text, labels or gradients.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor

from mmkv import adapters, digest
from mmkv.attach import attention
from mmkv.cache.allotment import for_heads
from mmkv.cache.config import CacheConfig
from mmkv.cache.forward_pass import collecting
from mmkv.layer_inputs import LayerInputs
from mmkv.loading import cache_folder
from mmkv.profiles import Profile
from mmkv.scores.attention import window_rows
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.profiled import by_copying

if TYPE_CHECKING:
    from mmkv.attach.attachment import Attachment

logger = logging.getLogger(__name__)

# The number of random tokens in each copy, and the fewest that give a result.
LENGTH, _LEAST = 256, 16
# Offsets of the attended tokens from the same token in the first copy.
_OFFSETS = (0, 1, 2)
_VERSION = 1  # of the cached results
SPREAD = (
    "with tensor parallelism each of {ranks} processes has its own heads alone, and the copy probe "
    "compares all: heads keep the same number of tokens"
)


class NoProbeError(ValueError):
    """The model cannot be probed; the message says why."""


@dataclass
class _Copies:
    """Collects the copy scores of the compressed layers in one pass."""

    length: int
    scores: dict[int, Tensor]

    def add(self, layer: LayerInputs) -> None:
        """Score one layer."""
        if layer.layer_idx in self.scores:
            self.scores[layer.layer_idx] = copy_scores(
                layer.query, layer.key, self.length, scale=layer.scale, softcap=layer.softcap
            )


def copy_scores(
    query: Tensor, key: Tensor, length: int, *, scale: float | None, softcap: float | None
) -> Tensor:
    """Return how much each key-value head copies: float32 [H], in [0, 1].

    This is the maximum, over the query heads of its group, of the mean attention of the last
    `length` tokens to the token `length` before and to the two after that. Queries [1, Hq, N, D]
    and keys [1, H, N, D] are after rotary embedding, with N at least twice `length`.
    """
    weights, N = window_rows(query, key, length, scale=scale, softcap=softcap)[0], key.shape[2]
    first_copy = torch.arange(N - 2 * length, N - length, device=key.device)
    targets = first_copy[:, None] + torch.tensor(_OFFSETS, device=key.device)
    copied = weights.gather(-1, targets.expand(*weights.shape[:-1], -1))
    return copied.sum(-1).mean(-1).amax(-1)


def measure(attachment: Attachment) -> Profile:
    """Return the copy scores of a wrapped model's compressed layers, as a profile.

    Raises:
        NoProbeError: the model has too few tokens or positions for the probe, it overflows, or its
            heads are spread over processes.
    """
    parts, config = attachment.parts, attachment.parts.config
    if parts.ranks > 1:
        raise NoProbeError(SPREAD.format(ranks=parts.ranks))
    positions = getattr(config, "max_position_embeddings", None) or 2 * LENGTH + 1
    length = min(LENGTH, (positions - 1) // 2)
    ids = _tokens(attachment, length)
    if length < _LEAST or ids is None:
        raise NoProbeError(
            f"the copy probe reads {_LEAST} random tokens twice, and this model has "
            f"{positions} positions and {config.vocab_size} tokens: give a profile, or "
            "heads='uniform'"
        )
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    copies = _Copies(length, dict.fromkeys(attachment.compressed_layers, nothing))
    decoder: Any = parts.decoder
    with collecting(copies), torch.no_grad():
        decoder.forward(input_ids=ids, use_cache=False)
    if not all(bool(layer.isfinite().all()) for layer in copies.scores.values()):
        raise NoProbeError(
            "the copy probe found attention that is not finite: this model overflows in "
            f"{parts.dtype}. Load it in another type, give a profile, or heads='uniform'"
        )
    scores = tuple(tuple(round(float(r), 4) for r in layer) for layer in copies.scores.values())
    shape = adapters.shape(config)
    return Profile(policy="condense", samples=1, model=shape, retrieval=scores)


def cached(attachment: Attachment) -> Profile:
    """Return the result of `measure`, or the saved one of a model with the same weights.

    Raises:
        NoProbeError: see `measure`.
    """
    if attachment.parts.ranks > 1:
        return measure(attachment)
    try:
        model_hash = digest.of_model(attachment.model, attachment.parts.config)
    except NotImplementedError:  # accelerate has moved the weights, so they cannot be hashed
        return measure(attachment)
    path = cache_folder() / "probes" / f"{model_hash[:32]}-{_VERSION}.json"
    if path.is_file():
        with suppress(ValueError):  # the file is damaged: measure again
            saved, shape = Profile.load(path), adapters.shape(attachment.parts.config)
            n_layers = len(attachment.compressed_layers)
            if saved.model == shape and len(saved.retrieval or ()) == n_layers:
                return saved
    profile = measure(attachment)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    except OSError as error:
        logger.debug("the copy probe's result is not kept: %s", error)
    return profile


def completed(attachment: Attachment, plan: CacheConfig) -> CacheConfig:
    """Run the copy probe, and return the plan with head sizes by its result.

    While the model cannot run, return the plan unchanged. If it cannot be probed, heads get equal
    sizes.
    """
    if not _ready(attachment):
        return plan
    try:
        scores = cached(attachment).retrieval
    except NoProbeError as error:
        logger.warning("%s", error)
        table = None
    else:
        assert scores is not None
        table = by_copying(plan.policy, scores, attachment.compressed_layers)
    policy = replace(plan.policy, heads=UniformHeads())
    return for_heads(replace(plan, policy=policy, table=table))


def _ready(attachment: Attachment) -> bool:
    """Return whether the model can run: in eval mode, with weights and our attention function."""
    decoder, config = attachment.parts.decoder, attachment.parts.config
    if decoder.training or config._attn_implementation not in attention.NAMES:
        return False
    # accelerate loads offloaded weights when a module runs.
    loads = getattr(attachment.model, "hf_device_map", None) or any(
        has_offloaded_params(x) for x in decoder.modules()
    )
    return bool(loads or not any(x.is_meta for x in decoder.parameters()))


def _tokens(attachment: Attachment, length: int) -> Tensor | None:
    """Return ids [1, 1 + 2 * length], a first token and random ones twice; None: too few exist.

    Both ends of the vocabulary are left out, as they have special and added tokens, and so are all
    special tokens in the configs.
    """
    model: Any = attachment.model
    config = attachment.parts.config
    size, special = config.vocab_size, set(attachment.parts.image_token_ids)
    for x in (config, model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(x, name, None)
            special |= set(value if isinstance(value, list) else [value])
    low, high = size // 64, size - size // 16
    ordinary = torch.tensor([i for i in range(low, high) if i not in special], device="cpu")
    if len(ordinary) < _LEAST:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    places = torch.randint(len(ordinary), (length,), generator=generator, device="cpu")
    random_ids = ordinary[places]
    first = getattr(config, "bos_token_id", None)
    first = ordinary[:1] if first is None else torch.tensor([first], device="cpu")
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    if device.type == "meta":  # the weights are offloaded
        hook = getattr(embeddings, "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))
        devices = (getattr(x, "execution_device", None) for x in hooks)
        device = next((x for x in devices if x is not None), model.device)
    return torch.cat([first, random_ids, random_ids])[None].to(device)
