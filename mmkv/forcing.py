"""Teacher forcing: what a model predicts of a given reply, behind a full or a compressed prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mmkv.cache.token_masks import keeps_everything

# Tokens fed at once where nothing is dropped while decoding; bounds the memory of the logits.
_CHUNK = 128


# The cache of prompts, and logits [B, 1, V] of their last tokens.
Read = Callable[[], tuple[Any, Tensor]]


class Steps:
    """Passes of a model, with what positions and masks need of all tokens so far."""

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]) -> None:
        ids = inputs["input_ids"]
        self.model, self.inputs = model, inputs
        self.mask = inputs["attention_mask"] if "attention_mask" in inputs else torch.ones_like(ids)
        accepted = inspect.signature(model.forward).parameters
        self.numbered = "position_ids" in accepted and not _counts_positions_itself(model)
        self.last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def read(self) -> tuple[Any, Tensor]:
        """The pass of the prompts."""
        out = self.run(self.inputs, **self.last)
        return out.past_key_values, out.logits[:, -1:]

    def behind(self, cache: Any, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """Logits [B, t, V] of new tokens [B, t]; those of padding, False in `valid`, are none."""
        new = self.mask.new_ones(ids.shape) if valid is None else valid.to(self.mask.dtype)
        self.mask = torch.cat([self.mask, new], dim=-1)
        return self.run({"input_ids": ids}, past_key_values=cache).logits

    def run(self, tokens: Mapping[str, Tensor], **more: Any) -> Any:
        """A pass of tokens, the last that the mask knows; `more` is the model's."""
        if self.numbered:
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
            more["position_ids"] = positions[:, -tokens["input_ids"].shape[1] :]
        return self.model(**{**tokens, "attention_mask": self.mask}, use_cache=True, **more)


@torch.no_grad()
def forced(
    model: Any,
    inputs: Mapping[str, Tensor],
    reply: Tensor,
    one_pass: bool | None = None,
    read: Read | None = None,
) -> Generator[tuple[Any, Tensor]]:
    """Feed prompts, then the same reply whatever the model predicts.

    Args:
        model: wrapped or not.
        inputs: what a processor returns for left-padded prompts, on the model's device.
        reply: token ids [B, T], on the model's device.
        one_pass: feed many tokens at once instead of one. By default where it gives the same
            numbers: where decoding drops nothing.
        read: in place of the pass of the prompts.

    Yields:
        the cache and logits [B, 1, V], which the prompts' last tokens give; then, piece by piece,
        the cache and logits [B, t, V], which the reply's T tokens give.
    """
    steps = Steps(model, inputs)
    cache, logits = (read or steps.read)()
    yield cache, logits
    del logits
    step = _CHUNK if one_pass or (one_pass is None and drops_nothing(cache)) else 1
    for piece in reply.split(step, dim=1) if reply.shape[1] else ():
        yield cache, steps.behind(cache, piece)


def greedy(model: Any, inputs: Mapping[str, Any], most: int) -> tuple[Tensor, Tensor]:
    """The model's own reply of up to `most` tokens, but for the last: what they are followed by.

    Returns:
        ids: [B, T], those tokens.
        valid: bool [B, T], False from a row's end on.
    """
    ends = model.generation_config.eos_token_id
    with torch.no_grad():
        ids = model.generate(
            **inputs,
            max_new_tokens=most,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=False,
        )
    reply = ids[:, inputs["input_ids"].shape[1] : -1]
    over = torch.isin(reply, torch.tensor([] if ends is None else ends, device=reply.device))
    return reply, over.cumsum(-1) == 0


def checked_inputs(sample: Any, i: int, what: str) -> Mapping[str, Any]:
    """Sample number i of what `model(**sample)` takes.

    Raises:
        ValueError: it is something else; says what, and who asked.
    """
    if isinstance(sample, Mapping) and "input_ids" in sample:
        return cast("Mapping[str, Any]", sample)
    kind = f"a {type(sample).__name__}"
    if isinstance(sample, Mapping):
        kind = f"a mapping of {sorted(map(str, sample))} without 'input_ids'"
    raise ValueError(
        f"{what}: sample {i} is {kind}, expected a list of what model(**sample) takes, such as "
        "[{'input_ids': ids}]"
    )


def drops_nothing(cache: Any) -> bool:
    """Whether decoding only adds to this cache, so that several tokens may be fed at once."""
    plan = getattr(cache, "plan", None)
    if plan is None:
        return True  # transformers' own cache of a model that is not wrapped
    if keeps_everything(plan.policy, plan.budget):
        return True
    policy = plan.policy
    return policy.decode.name == "grow" and not (policy.reposition or policy.postpone)


def _counts_positions_itself(model: Any) -> bool:
    """Whether positions have more than one axis (Qwen2-VL), so that they are left to the model."""
    inner = getattr(model, "model", None)
    return hasattr(model, "get_rope_index") or hasattr(inner, "get_rope_index")
