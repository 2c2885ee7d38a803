"""The copy probe: which heads of a model look up what followed the same text before.

Random tokens are read twice, `[bos] r r`, in one pass. A query of the second copy attends, in a
head that looks things up, to what followed its twin in the first ("induction" heads), to the twin
itself or to the token behind ("echo" heads): the three are added. Known from RazorAttention
(arXiv 2407.15891) and DuoAttention (arXiv 2410.10819). No text, no labels, no gradients.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv import adapters, digest
from mmkv.cache.config import CacheConfig
from mmkv.cache.forward_pass import AttentionCall, ForwardPass, current
from mmkv.loading import cache_folder
from mmkv.profiles import Profile
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.profiled import sized_by_copying

if TYPE_CHECKING:
    from mmkv.attach.attachment import Attachment

logger = logging.getLogger(__name__)

# Random tokens in each copy, and the fewest that tell anything.
LENGTH, _LEAST = 256, 16
# Attention to the twin, and to one and two tokens behind it.
_BEHIND = (0, 1, 2)
_VERSION = 1  # of what is cached
SPREAD = (
    "this model's heads are spread over {ranks} processes (tensor parallelism), and the copy probe "
    "compares heads of one: all heads keep as much"
)


@dataclass
class _Copies:
    """Gathers the copy scores of the compressed layers, `found`, in one pass."""

    length: int
    found: dict[int, Tensor]

    def add(self, layer_idx: int, call: AttentionCall) -> None:
        """Score one layer."""
        if layer_idx in self.found:
            how: Any = {"scale": call.scale, "softcap": call.softcap}
            self.found[layer_idx] = copy_scores(call.query, call.key, self.length, **how)


def copy_scores(
    query: Tensor, key: Tensor, length: int, *, scale: float | None, softcap: float | None
) -> Tensor:
    """How much each key-value head's queries of the last `length` tokens copy.

    The largest, over the query heads of its group, of their mean attention to the twin, `length`
    tokens before, and to the one and two tokens behind it: float32 [H], in [0, 1]. Queries are
    [1, Hq, N, D], after rotary embedding, N at least twice `length`, and keys [1, H, N, D].
    """
    (N, D), H = query.shape[2:], key.shape[1]
    last = query[0, :, N - length :].unflatten(0, (H, -1)).float()
    logits = last @ key[0, :, None].float().mT * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    place = torch.arange(N - length, N, device=key.device)
    later = torch.arange(N, device=key.device) > place[:, None]
    share = logits.masked_fill_(later, -torch.inf).softmax(-1)
    twin = (place - length)[:, None] + torch.tensor(_BEHIND, device=key.device)
    copied = share.gather(-1, twin.expand(*share.shape[:-1], -1))
    return copied.sum(-1).mean(-1).amax(-1)


def measure(attachment: Attachment) -> Profile:
    """The copy scores of a wrapped model's compressed layers, as a profile.

    Raises:
        ValueError: the model has too few tokens or positions for the probe, or its heads are spread
            over processes.
    """
    parts, config = attachment.parts, attachment.parts.config
    if parts.ranks > 1:
        raise ValueError(SPREAD.format(ranks=parts.ranks))
    positions = getattr(config, "max_position_embeddings", None) or 2 * LENGTH + 1
    length = min(LENGTH, (positions - 1) // 2)
    ids = _tokens(attachment, length)
    if length < _LEAST or ids is None:
        raise ValueError(
            f"the copy probe reads {_LEAST} random tokens twice, and this model has "
            f"{positions} positions and {config.vocab_size} tokens: give a profile, or "
            "heads='uniform'"
        )
    copies = _Copies(length, dict.fromkeys(attachment.compressed, torch.empty(0)))
    decoder: Any = parts.decoder
    before = current.set(ForwardPass(collector=copies))
    try:
        with torch.no_grad():
            decoder.forward(input_ids=ids, use_cache=False)
    finally:
        current.reset(before)
    scores = tuple(tuple(round(float(r), 4) for r in found) for found in copies.found.values())
    shape = adapters.shape(config)
    return Profile(policy="condense", samples=1, model=shape, retrieval=scores)


def cached(attachment: Attachment) -> Profile:
    """`measure`, or what it found for the same weights before.

    Raises:
        ValueError: as `measure`.
    """
    if attachment.parts.ranks > 1:
        return measure(attachment)
    try:
        known = digest.of_model(attachment.model, attachment.parts.config)
    except NotImplementedError:  # weights that accelerate keeps elsewhere cannot be looked at
        return measure(attachment)
    path = cache_folder() / "probes" / f"{known[:32]}-{_VERSION}.json"
    if path.is_file():
        with suppress(ValueError):  # damaged: it is measured again
            found, shape = Profile.load(path), adapters.shape(attachment.parts.config)
            if found.model == shape and len(found.retrieval or ()) == len(attachment.compressed):
                return found
    found = measure(attachment)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except OSError as error:
        logger.debug("the copy probe's result is not kept: %s", error)
    return found


def settled(attachment: Attachment, plan: CacheConfig) -> CacheConfig:
    """A plan whose head sizes are known: where the probe is to find them, it does so now.

    It waits, and the plan stays as it is, while the model has no weights or is in training mode.
    """
    if not plan.waits_for_probe or not _ready(attachment):
        return plan
    try:
        scores = cached(attachment).retrieval
        assert scores is not None
        policy = sized_by_copying(plan.policy, scores, attachment.compressed)
    except ValueError as error:
        logger.warning("%s", error)
        policy = replace(plan.policy, heads=UniformHeads())
    return replace(plan, policy=policy)


def _ready(attachment: Attachment) -> bool:
    """Whether the model can run: it is in eval mode, and its weights are there."""
    decoder = attachment.parts.decoder
    spread = getattr(attachment.model, "hf_device_map", None)  # accelerate brings weights in time
    return not decoder.training and (spread or not any(x.is_meta for x in decoder.parameters()))


def _tokens(attachment: Attachment, length: int) -> Tensor | None:
    """int64 [1, 1 + 2 * length]: a first token, and ordinary random ones twice; None: too few.

    Special and added tokens stand at both ends of vocabularies; what the configs name is left out
    wherever it stands.
    """
    model: Any = attachment.model
    config = attachment.parts.config
    size, named = config.vocab_size, set(attachment.parts.image_token_ids)
    for x in (config, model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(x, name, None)
            named |= set(value if isinstance(value, list) else [value])
    low, high = size // 64, size - size // 16
    ordinary = torch.tensor([i for i in range(low, high) if i not in named])
    if len(ordinary) < _LEAST:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = ordinary[torch.randint(len(ordinary), (length,), generator=generator)]
    first = getattr(config, "bos_token_id", None)
    first = ordinary[:1] if first is None else torch.tensor([first])
    weight = model.get_input_embeddings().weight
    device = model.device if weight.is_meta else weight.device
    return torch.cat([first, drawn, drawn])[None].to(device)
