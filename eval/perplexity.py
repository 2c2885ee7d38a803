"""Perplexity of a reference answer behind a compressed prompt, as PrefixKV measures it.

Prefill on the prompt, evict, then feed the reference answer token by token, with decode-time
pruning; `exp` of the mean negative log-likelihood over all answer tokens (arXiv 2412.03409,
section 4). The first answer token is predicted by the prefill's last position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv import Context


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

    from mmkv.forcing import forced

    ids = inputs["input_ids"]
    if len(answers) != ids.shape[0]:
        raise ValueError(f"{len(answers)} answers for {ids.shape[0]} prompts")
    lengths = torch.tensor([len(a) for a in answers])
    longest = max(1, max(map(len, answers), default=0))
    # Padding is a real token to the model: nothing behind a row's answer reaches its figures.
    padded = [[*answer, *[0] * (longest - len(answer))] for answer in answers]
    wide = torch.tensor(padded, device=ids.device)
    loss: list[Tensor] = []
    best: list[Tensor] = []
    cache, held, start = None, 0, 0
    for cache, logits in forced(model, inputs, wide[:, :-1], one_pass):
        if not start:
            held = getattr(cache, "nbytes", 0)
        target = wide[:, start : start + logits.shape[1]].to(logits.device)
        flat = logits.float().flatten(0, 1)
        nll = torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="none")
        loss.append(nll.view_as(target).double().cpu())
        best.append((logits.argmax(-1) == target).cpu())
        start += logits.shape[1]
    counts = torch.arange(longest) < lengths[:, None]
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
