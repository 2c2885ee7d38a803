"""Runs a prompt through the model, with all that `generate` prepares for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmkv.attach.attachment import Attachment
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.serving.request import Request


class Reader:
    """Reads prompts with one wrapped model.

    Args:
        attachment: of the model.
        chunk: tokens that are read at a time.
    """

    def __init__(self, attachment: Attachment, chunk: int) -> None:
        self.model: Any = attachment.model
        self.attachment, self.size = attachment, chunk

    def cache(self, plan: CacheConfig) -> CompressedCache:
        """An empty cache of one request."""
        cache = CompressedCache(self.attachment.parts.config, plan)
        cache.own_plan = plan is not self.attachment.plan
        return cache

    def chunk(self, inputs: Mapping[str, Any]) -> int | None:
        """Tokens to read at a time; None where the prompt must be read at once."""
        encodes = getattr(self.model, "_supports_mm_encoder_outputs", None)
        if encodes is None:
            # Older releases cut neither what stands behind a cache nor positions of several axes.
            cache = inputs.get("past_key_values")
            begun = cache is not None and cache.get_seq_length() > 0
            if begun or hasattr(self.model.config, "vision_config"):
                return None
        elif not encodes() and any(
            isinstance(x, Tensor) and x.is_floating_point() for x in inputs.values()
        ):
            return None
        # Where tokens of a picture or of the whole prompt see later ones, no cut may part them.
        both_ways = self.attachment.parts.both_ways or "token_type_ids" in inputs
        return None if both_ways else self.size

    def read(self, request: Request, given: dict[str, Any]) -> Tensor:
        """Run a prompt through the model: logits [1, V] of the first token.

        `generate` prepares all that differs from model to model: masks, positions, pictures, and
        what tokens are chosen by.
        """
        found: list[Tensor] = []

        def read(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Tensor:
            out = model._prefill(input_ids, generation_config, model_kwargs)
            kwargs = model._update_model_kwargs_for_generation(out, model_kwargs)
            more = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
            step = model.prepare_inputs_for_generation(more, next_sequence_length=1, **kwargs)
            at = input_ids.new_tensor([[input_ids.shape[1]]])
            request.position = step.get("position_ids", at)
            room = input_ids.new_zeros(1, request.new)
            request.ids = torch.cat([input_ids, room], dim=1)
            request.processors = logits_processor
            eos = getattr(generation_config, "_eos_token_tensor", None)
            request.eos = frozenset() if eos is None else frozenset(eos.flatten().tolist())
            found.append(out.logits[:, -1].to(copy=True, dtype=torch.float32))
            return input_ids

        sampling = request.sampling
        drawn: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature > 0:
            drawn = {k: getattr(sampling, k) for k in drawn}
            request.generator = torch.Generator(self.model.device)
            if sampling.seed is None:
                request.generator.seed()
            else:
                request.generator.manual_seed(sampling.seed)
        self.model.generate(
            **given,
            **drawn,
            do_sample=sampling.temperature > 0,
            max_new_tokens=request.new,
            use_cache=True,
            num_beams=1,
            num_return_sequences=1,
            prefill_chunk_size=self.chunk(given),
            disable_compile=True,
            custom_generate=read,
        )
        return found[0]


def kept(cache: CompressedCache) -> int:
    """Tokens kept of a prompt, mean over layers and heads."""
    blocks = [block for layer in cache.compressed for block in layer.keeping().blocks]
    rows = [len(block.positions) for block in blocks]
    kept = [float(block.schedule.counts.mean()) for block in blocks]
    return round(sum(n * k for n, k in zip(rows, kept, strict=True)) / sum(rows))
