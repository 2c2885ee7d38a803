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

    from mmkv.forcing import Read


@dataclass(frozen=True)
class Scored:
    """Answers scored by a model, one entry a row, and `past_key_values` after the last step.

    Attributes:
        nll: summed negative log-likelihood of the answer's tokens, in nats.
        tokens: how many there are.
        greedy: whether each of them was the model's first choice.
        held_bytes: of a compressed cache once the prompt was read; 0 where that is not known.
        divergence: summed Kullback-Leibler divergence of the next-token distributions from the
            full cache's, in nats, over those tokens that the compressed prompt has a say in; 0
            where there was nothing to compare with.
        same: at how many of them both have the same first choice.
        compared: how many of them there are.
    """

    nll: list[float]
    tokens: list[int]
    greedy: list[bool]
    cache: Any
    held_bytes: int
    divergence: list[float]
    same: list[int]
    compared: list[int]


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
    full: Sequence[Tensor] | None = None,
    read: Read | None = None,
    hidden: bool = False,
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
        full: what `log_probabilities` gives for the same answers. The first token is not compared:
            it is predicted while the prompt is read, before anything is evicted.
        read: in place of the pass of the prompts, see `mmkv.forcing.forced`.
        hidden: the prompt was evicted without its question, so the first token is compared too.

    Raises:
        ValueError: as many answers as rows are needed; or what the core refuses, such as a budget
            below what must be kept.
    """
    import torch

    from mmkv.divergence import divergence
    from mmkv.forcing import forced

    ids = inputs["input_ids"]
    if len(answers) != ids.shape[0]:
        raise ValueError(f"{len(answers)} answers for {ids.shape[0]} prompts")
    wide, lengths = _padded(answers, ids.device), torch.tensor([len(x) for x in answers])
    nll, nats = torch.zeros(2, len(answers), dtype=torch.float64)
    wrong, same, compared = torch.zeros(3, len(answers), dtype=torch.int64)
    cache, held, end = None, 0, 0
    for cache, logits in forced(model, inputs, wide[:, :-1], one_pass, read):
        start, end = end, end + logits.shape[1]
        held = held if start else getattr(cache, "nbytes", 0)
        counts = torch.arange(start, end) < lengths[:, None]
        target, best = wide[:, start:end].to(logits.device), logits.argmax(-1)
        flat = logits.float().flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="none")
        nll += losses.view_as(target).double().cpu().where(counts, 0.0).sum(-1)
        wrong += ((best != target).cpu() & counts).sum(-1)
        if full is None or not (hidden or start) or not counts.any():
            continue
        pieces = [x[start:end] for x in full]
        wanted = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(logits.device)
        nats += divergence(wanted, logits).cpu().where(counts, 0.0).sum(-1)
        same += ((best == wanted.argmax(-1)).cpu() & counts).sum(-1)
        compared += counts.sum(-1)
    return Scored(
        nll=nll.tolist(),
        tokens=lengths.tolist(),
        greedy=(wrong == 0).tolist(),
        cache=cache,
        held_bytes=held,
        divergence=nats.tolist(),
        same=same.tolist(),
        compared=compared.tolist(),
    )


def log_probabilities(
    model: Any, inputs: Mapping[str, Tensor], answers: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Next-token distributions along teacher-forced answers, of a model that is not wrapped.

    Returns:
        for each row float32 [T, V] on the CPU, T the answer's tokens: logarithms of probabilities.
    """
    import torch

    from mmkv.forcing import forced

    wide = _padded(answers, inputs["input_ids"].device)
    pieces = [
        logits.float().log_softmax(-1).cpu() for _, logits in forced(model, inputs, wide[:, :-1])
    ]
    return [
        torch.cat([piece[row] for piece in pieces])[: len(answer)].clone()
        for row, answer in enumerate(answers)
    ]


def _padded(answers: Sequence[Sequence[int]], device: Any) -> Tensor:
    """Answers, [B, T]; padding is a real token to the model, and what it predicts never counts."""
    import torch

    longest = max(1, max(map(len, answers), default=0))
    return torch.tensor([[*x, *[0] * (longest - len(x))] for x in answers], device=device)
