"""Teacher forcing: a model's predictions of a given reply, with a full or a compressed prompt."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmkv.cache.layer import nbytes
from mmkv.calls import cache_in, passing

# Tokens fed at once if decode steps drop nothing; this bounds the memory of the logits.
_CHUNK = 128


# Returns the cache of prompts, and logits [B, 1, V] of their last tokens.
Read = Callable[[], tuple[Any, Tensor]]


class Steps:
    """Passes of a model, with positions and masks that count all tokens so far."""

    def __init__(self, model: Any, inputs: Mapping[str, Tensor]) -> None:
        ids = inputs["input_ids"]
        self.model, self.inputs = model, inputs
        self.mask = inputs["attention_mask"] if "attention_mask" in inputs else torch.ones_like(ids)
        parameters = inspect.signature(model.forward).parameters
        # The model computes positions of several axes (Qwen2-VL) itself.
        models = (model, getattr(model, "model", None))
        numbers_itself = any(hasattr(x, "get_rope_index") for x in models)
        self.numbered = "position_ids" in parameters and not numbers_itself
        self.last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def read(self) -> tuple[Any, Tensor]:
        """Run the prompts; return the cache and logits [B, 1, V] of their last tokens."""
        out = self.run(self.inputs, **self.last)
        return cache_in(out), out.logits[:, -1:]

    def feed(self, cache: Any, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return logits [B, t, V] of new tokens [B, t]; `valid` is False for padding."""
        new = self.mask.new_ones(ids.shape) if valid is None else valid.to(self.mask.dtype)
        self.mask = torch.cat([self.mask, new], dim=-1)
        return self.run({"input_ids": ids}, **passing(self.model, cache)).logits

    def run(self, tokens: Mapping[str, Tensor], **arguments: Any) -> Any:
        """Run the model on tokens, which are the mask's last ones, with more arguments."""
        if self.numbered:
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
            arguments["position_ids"] = positions[:, -tokens["input_ids"].shape[1] :]
        return self.model(**{**tokens, "attention_mask": self.mask}, use_cache=True, **arguments)


@torch.no_grad()
def forced(
    model: Any, inputs: Mapping[str, Tensor], reply: Tensor, read: Read | None = None
) -> Generator[tuple[Any, Tensor]]:
    """Feed left-padded prompts, then a given reply [B, T], whatever the model predicts.

    Many tokens are fed at once if decode steps drop nothing, as this gives the same logits. `read`
    replaces the pass of the prompts.

    Yields:
        the cache and logits [B, 1, V] of the prompts' last tokens; then, piece by piece, the cache
        and logits [B, t, V] of the reply's T tokens.
    """
    steps = Steps(model, inputs)
    cache, logits = (read or steps.read)()
    yield cache, logits
    del logits
    step = _CHUNK if drops_nothing(cache) else 1
    for piece in reply.split(step, dim=1) if reply.shape[1] else ():
        yield cache, steps.feed(cache, piece)


@dataclass(frozen=True)
class Scored:
    """Answers scored by a model, one entry a row, and the cache after the last step.

    Divergences are from the full cache's next-token distributions, over the tokens predicted with
    the compressed prompt; none if nothing was compared.
    """

    nll: list[float]  # summed negative log-likelihood of the answer's tokens, in nats
    tokens: list[int]  # how many tokens the answer has
    greedy: list[bool]  # whether each of them was the model's first choice
    cache: Any
    held_bytes: int  # bytes of the cache after the prefill
    divergences: list[list[float]]  # Kullback-Leibler divergence of each compared token, in nats
    same: list[int]  # at how many tokens both caches have the same first choice
    compared: list[int]  # how many tokens are compared

    @property
    def divergence(self) -> list[float]:
        """The summed divergence of each row, in nats."""
        return [sum(row) for row in self.divergences]


def score_answers(
    model: Any,
    inputs: Mapping[str, Tensor],
    answers: Sequence[Sequence[int]],
    *,
    full: Sequence[Tensor] | None = None,
    read: Read | None = None,
    hidden: bool = False,
) -> Scored:
    """Return the scores of one teacher-forced answer per row.

    As PrefixKV measures perplexity (arXiv 2412.03409, section 4): prefill, evict, then feed the
    answer token by token, with eviction in decode steps. The first token is predicted by the
    prompt's last one. Rows whose answer has ended are fed padding, which does not count.

    Args:
        model, inputs, read: as for `forced`.
        answers: token ids, one list a row; an empty one is not scored.
        full: the result of `log_probabilities` for the same answers. The first token is not
            compared, as it is predicted while the prompt is read, before anything is evicted.
        hidden: the prompt was evicted without its question, so the first token is compared too.
    """
    ids = inputs["input_ids"]
    if len(answers) != ids.shape[0]:
        raise ValueError(f"{len(answers)} answers for {ids.shape[0]} prompts")
    padded = _padded(answers, ids.device)
    lengths = torch.tensor([len(x) for x in answers], device="cpu")
    nll = torch.zeros(len(answers), dtype=torch.float64, device="cpu")
    wrong, same, compared = lengths.new_zeros(3, len(answers))
    nats: list[list[float]] = [[] for _ in answers]
    cache, held_bytes, end = None, 0, 0
    for cache, logits in forced(model, inputs, padded[:, :-1], read):
        start, end = end, end + logits.shape[1]
        held_bytes = held_bytes if start else sum(map(nbytes, cache.layers))
        is_counted = torch.arange(start, end, device="cpu") < lengths[:, None]
        target, best = padded[:, start:end].to(logits.device), logits.argmax(-1)
        flat = logits.float().flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(flat, target.flatten(), reduction="none")
        nll += losses.view_as(target).double().cpu().where(is_counted, 0.0).sum(-1)
        wrong += ((best != target).cpu() & is_counted).sum(-1)
        if full is None or not (hidden or start) or not is_counted.any():
            continue
        full_log_p = pad_sequence([x[start:end] for x in full], batch_first=True).to(logits.device)
        by_row = zip(nats, divergence(full_log_p, logits).cpu(), is_counted, strict=True)
        for row, piece, counts in by_row:
            row += piece[counts].tolist()
        same += ((best == full_log_p.argmax(-1)).cpu() & is_counted).sum(-1)
        compared += is_counted.sum(-1)
    divergences = nats, same.tolist(), compared.tolist()
    greedy = (wrong == 0).tolist()
    return Scored(nll.tolist(), lengths.tolist(), greedy, cache, held_bytes, *divergences)


def log_probabilities(
    model: Any, inputs: Mapping[str, Tensor], answers: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return the log-probabilities of next tokens along answers, of a model that is not wrapped.

    They are float32 [T, V] for each row, on the CPU, with T the answer's tokens.
    """
    padded, pieces = _padded(answers, inputs["input_ids"].device), list[Tensor]()
    for _, logits in forced(model, inputs, padded[:, :-1]):
        pieces.append(logits.float().log_softmax(-1).cpu())
    log_p = [torch.cat([piece[row] for piece in pieces]) for row in range(len(answers))]
    return [x[: len(answer)].clone() for x, answer in zip(log_p, answers, strict=True)]


def divergence(log_p: Tensor, logits: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of logits [B, T, V] from `log_p`: float64 [B, T]."""
    terms = log_p.exp() * (log_p - logits.float().log_softmax(-1))
    # A token of probability 0 adds nothing, whatever its logit.
    terms = terms.masked_fill(log_p == -math.inf, 0.0)
    return terms.sum(-1, dtype=torch.float64).clamp(min=0)


def _padded(answers: Sequence[Sequence[int]], device: Any) -> Tensor:
    """Return answers padded to [B, T] with token 0, whose predictions are not counted."""
    longest = max(1, max(map(len, answers), default=0))
    return torch.tensor([[*x, *[0] * (longest - len(x))] for x in answers], device=device)


def replies(model: Any, inputs: Mapping[str, Any], max_new_tokens: int) -> list[list[int]]:
    """Return the model's greedy reply to each prompt, up to its end or `max_new_tokens`."""
    with torch.no_grad():
        ids = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=False,
        )
    ends = ends_of(model)
    return [up_to_end(row, ends) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]


def ends_of(model: Any) -> set[int]:
    """Return the tokens that end a reply."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def changes_logits(model: Any) -> bool:
    """Return whether the generation config makes `generate` change logits, such as by a penalty: a
    greedy reply then does not follow the model's largest logits."""
    found: Any = []

    def stop(model: Any, input_ids: Tensor, logits_processor: Any, **kwargs: Any) -> Tensor:
        found.extend(logits_processor)
        return input_ids

    ids = torch.ones(1, 2, dtype=torch.long, device=model.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=stop,
        do_sample=False,
        num_beams=1,
        max_new_tokens=1,
        pad_token_id=0,
    )
    return bool(found)


def up_to_end(ids: Sequence[int], ends: set[int]) -> list[int]:
    """Return the tokens up to the first that ends a reply, with that one."""
    return list(ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids)) + 1])


def checked_inputs(sample: Any, i: int, caller: str) -> Mapping[str, Any]:
    """Return sample i, checked to be inputs of `model(**sample)`; `caller` is named in errors."""
    kind = f"a {type(sample).__name__}"
    if isinstance(sample, Mapping):
        if "input_ids" in sample:
            return cast("Mapping[str, Any]", sample)
        kind = f"a mapping of {sorted(map(str, sample))} without 'input_ids'"
    raise ValueError(
        f"{caller}: sample {i} is {kind}, expected a list of what model(**sample) takes, such as "
        "[{'input_ids': ids}]"
    )


def drops_nothing(cache: Any) -> bool:
    """Whether decoding only adds to this cache, so that several tokens may be fed at once."""
    return not getattr(cache, "drops_tokens", False)  # transformers' own cache has no such property
