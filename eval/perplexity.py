"""Perplexity of a reference answer behind a compressed prompt, as PrefixKV measures it.

Prefill on the prompt, evict, then feed the reference answer token by token, with decode-time
pruning; `exp` of the mean negative log-likelihood over all answer tokens (arXiv 2412.03409,
section 4). The first answer token is predicted by the prefill's last position.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv import Context

# Tokens fed at once where nothing is dropped while decoding; bounds the memory of the logits.
_CHUNK = 128


@dataclass(frozen=True)
class Scored:
    """Answers scored by a model, one entry a row, and `past_key_values` after the last step.

    Attributes:
        nll: summed negative log-likelihood of the answer's tokens, in nats.
        tokens: how many there are.
        greedy: whether each of them was the model's first choice.
        held_bytes: of a compressed cache once the prompt was read; 0 where that is not known.
    """

    nll: list[float]
    tokens: list[int]
    greedy: list[bool]
    cache: Any
    held_bytes: int = 0


def perplexity(nll: Iterable[float], tokens: Iterable[int]) -> float | None:
    """`exp` of the mean over all tokens of all rows; None without tokens."""
    total = sum(tokens)
    if not total:
        return None
    mean = sum(nll) / total
    return math.exp(mean) if mean < 700 else math.inf


def score_answers(
    model: Any,
    inputs: Mapping[str, Tensor],
    answers: Sequence[Sequence[int]],
    *,
    one_pass: bool | None = None,
) -> Scored:
    """Teacher-force one answer per row behind the prompts.

    Rows whose answer has ended keep being fed, and no longer count: what a row keeps depends on
    that row alone.

    Args:
        model: wrapped or not.
        inputs: what a processor returns for left-padded prompts, on the model's device.
        answers: token ids, one list a row; an empty one scores nothing.
        one_pass: feed many tokens at once instead of one. By default where it gives the same
            number: where decoding drops nothing.

    Raises:
        ValueError: as many answers as rows are needed; or what the core refuses, such as a budget
            below what must be kept.
    """
    import torch

    ids = inputs["input_ids"]
    if len(answers) != ids.shape[0]:
        raise ValueError(f"{len(answers)} answers for {ids.shape[0]} prompts")
    with torch.no_grad():
        return _score(model, inputs, answers, one_pass)


def _score(
    model: Any,
    inputs: Mapping[str, Tensor],
    answers: Sequence[Sequence[int]],
    one_pass: bool | None,
) -> Scored:
    import torch

    ids = inputs["input_ids"]
    mask = inputs["attention_mask"] if "attention_mask" in inputs else torch.ones_like(ids)
    accepted = inspect.signature(model.forward).parameters
    numbered = "position_ids" in accepted and not _counts_positions_itself(model)

    def forward(tokens: Mapping[str, Tensor], **more: Any) -> Any:
        if numbered:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            more["position_ids"] = positions[:, -tokens["input_ids"].shape[1] :]
        return model(**{**tokens, "attention_mask": mask}, use_cache=True, **more)

    last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    out = forward(inputs, **last)
    cache = out.past_key_values
    held = getattr(cache, "nbytes", 0)
    lengths = torch.tensor([len(a) for a in answers])
    longest = int(lengths.max()) if len(answers) else 0
    # Padding is a real token to the model: nothing behind a row's answer reaches its figures.
    padded = [[*answer, *[0] * (max(1, longest) - len(answer))] for answer in answers]
    wide = torch.tensor(padded, device=ids.device)
    loss, best = [], []

    def read(logits: Tensor, start: int) -> None:
        target = wide[:, start : start + logits.shape[1]].to(logits.device)
        flat = logits.float().flatten(0, 1)
        nll = torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="none")
        loss.append(nll.view_as(target).double().cpu())
        best.append((logits.argmax(-1) == target).cpu())

    read(out.logits[:, -1:], 0)
    del out
    one_pass = drops_nothing(cache) if one_pass is None else one_pass
    step = _CHUNK if one_pass else 1
    for start in range(0, longest - 1, step):
        piece = wide[:, start : min(start + step, longest - 1)]
        mask = torch.cat([mask, mask.new_ones(piece.shape)], dim=-1)
        read(forward({"input_ids": piece}, past_key_values=cache).logits, start + 1)
    counts = torch.arange(wide.shape[1]) < lengths[:, None]
    nll = (torch.cat(loss, dim=1) * counts).sum(-1)
    greedy = (torch.cat(best, dim=1) | ~counts).all(-1)
    return Scored(nll.tolist(), lengths.tolist(), greedy.tolist(), cache, held)


def score_behind(
    context: Context, question: Mapping[str, Tensor], answers: Sequence[Sequence[int]]
) -> Scored:
    """Teacher-force one answer per row behind a context and its question.

    Args:
        context: read without the question.
        question: left-padded, one row a row of the context.
        answers: token ids, one list a row; an empty one scores nothing.
    """
    import torch
    from transformers import LogitsProcessor

    device = question["input_ids"].device
    lengths = torch.tensor([len(a) for a in answers])
    longest = max(1, int(lengths.max()))
    wide = torch.tensor([[*a, *[0] * (longest - len(a))] for a in answers], device=device)
    step = iter(range(longest))

    class Forced(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            token = wide[:, next(step), None]
            return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    out = context.ask(
        question,
        max_new_tokens=longest,
        pad_token_id=0,
        do_sample=False,
        num_beams=1,
        logits_processor=[Forced()],
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(out.logits, dim=1).float()
    nll = torch.nn.functional.cross_entropy(logits.mT, wide, reduction="none").double().cpu()
    counts = torch.arange(longest) < lengths[:, None]
    greedy = ((logits.argmax(-1) == wide).cpu() | ~counts).all(-1)
    sums = (nll * counts).sum(-1)
    return Scored(sums.tolist(), lengths.tolist(), greedy.tolist(), out.past_key_values)


def drops_nothing(cache: Any) -> bool:
    """Whether decoding only adds to this cache, so that several tokens may be fed at once."""
    from mmkv.cache.token_masks import keeps_everything

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
