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


class _Sums:
    """Adds up what logits say of answers, and how far they are from the full cache's."""

    def __init__(
        self, answers: Sequence[Sequence[int]], full: Sequence[Tensor] | None, device: Any
    ) -> None:
        import torch

        longest = max(1, max(map(len, answers), default=0))
        # Padding is a real token to the model: nothing behind a row's answer reaches its figures.
        padded = [[*answer, *[0] * (longest - len(answer))] for answer in answers]
        self.wide = torch.tensor(padded, device=device)  # [B, T]
        self.lengths = torch.tensor([len(answer) for answer in answers])
        self.full, self.read = full, 0
        self.nll, self.divergence = torch.zeros(2, len(answers), dtype=torch.float64)
        self.wrong, self.same, self.compared = torch.zeros(3, len(answers), dtype=torch.int64)

    def add(self, logits: Tensor, *, compare: bool = True) -> None:
        """Those of the next t tokens, [B, t, V]."""
        import torch

        from mmkv.divergence import divergence

        start, self.read = self.read, self.read + logits.shape[1]
        counts = torch.arange(start, self.read) < self.lengths[:, None]
        target = self.wide[:, start : self.read].to(logits.device)
        flat, best = logits.float().flatten(0, 1), logits.argmax(-1)
        nll = torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="none")
        self.nll += nll.view_as(target).double().cpu().where(counts, 0.0).sum(-1)
        self.wrong += ((best != target).cpu() & counts).sum(-1)
        if self.full is None or not compare or not counts.any():
            return
        pieces = [x[start : self.read] for x in self.full]
        wanted = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(logits.device)
        self.divergence += divergence(wanted, logits).cpu().where(counts, 0.0).sum(-1)
        self.same += ((best == wanted.argmax(-1)).cpu() & counts).sum(-1)
        self.compared += counts.sum(-1)

    def scored(self, cache: Any, held: int = 0) -> Scored:
        """What was added up."""
        return Scored(
            nll=self.nll.tolist(),
            tokens=self.lengths.tolist(),
            greedy=(self.wrong == 0).tolist(),
            cache=cache,
            held_bytes=held,
            divergence=self.divergence.tolist(),
            same=self.same.tolist(),
            compared=self.compared.tolist(),
        )


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
    from mmkv.forcing import forced

    ids = inputs["input_ids"]
    if len(answers) != ids.shape[0]:
        raise ValueError(f"{len(answers)} answers for {ids.shape[0]} prompts")
    sums = _Sums(answers, full, ids.device)
    cache, held = None, 0
    for cache, logits in forced(model, inputs, sums.wide[:, :-1], one_pass, read):
        first = sums.read == 0
        held = getattr(cache, "nbytes", 0) if first else held
        sums.add(logits, compare=hidden or not first)
    return sums.scored(cache, held)


def log_probabilities(
    model: Any, inputs: Mapping[str, Tensor], answers: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Next-token distributions along teacher-forced answers, of a model that is not wrapped.

    Returns:
        for each row float32 [T, V] on the CPU, T the answer's tokens: logarithms of probabilities.
    """
    import torch

    from mmkv.forcing import forced

    wide = _Sums(answers, None, inputs["input_ids"].device).wide
    pieces = [
        logits.float().log_softmax(-1).cpu() for _, logits in forced(model, inputs, wide[:, :-1])
    ]
    return [
        torch.cat([piece[row] for piece in pieces])[: len(answer)].clone()
        for row, answer in enumerate(answers)
    ]


def score_behind(
    context: Context,
    question: Mapping[str, Tensor],
    answers: Sequence[Sequence[int]],
    full: Sequence[Tensor] | None = None,
) -> Scored:
    """Teacher-force one answer per row behind a context and its question.

    Args:
        context: read without the question.
        question: left-padded, one row a row of the context.
        answers: token ids, one list a row; an empty one scores nothing.
        full: what `log_probabilities` gives for the whole prompts; all tokens are compared.
    """
    import torch
    from transformers import LogitsProcessor

    sums = _Sums(answers, full, question["input_ids"].device)
    longest = sums.wide.shape[1]
    step = iter(range(longest))

    class Forced(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            token = sums.wide[:, next(step), None]
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
    for logits in out.logits:
        sums.add(logits[:, None])
    return sums.scored(out.past_key_values)
