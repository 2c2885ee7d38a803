"""Logits processors besides those of `generate`: penalties, biases, grammars; log probabilities."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmkv.serving.reply import Logprob, Refused, Sampling, TokenLogprobs


class Penalties(LogitsProcessor):
    """OpenAI's biases and its penalties, on tokens of the reply after `n_prompt` prompt tokens."""

    def __init__(self, sampling: Sampling, n_prompt: int) -> None:
        self.sampling, self.n_prompt = sampling, n_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores, [1, V], with penalties and biases."""
        sampling, out = self.sampling, scores.clone()
        counts = torch.bincount(input_ids[0, self.n_prompt :], minlength=out.shape[1]).to(out.dtype)
        out -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        for token, bias in sampling.logit_bias.items():
            out[:, token] += bias
        return out


def json_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON texts of a schema, which is checked when it is used."""
    # Few blanks: where any number is allowed, models sometimes generate nothing else.
    options = {"whitespace_pattern": r"[ \n]{0,8}"}
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})


class Grammars:
    """Logits processors that hold a model's replies to grammars, by llguidance."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def processor(self, grammar: str, n_prompt: int) -> LogitsProcessor:
        """Return the processor of one reply after `n_prompt` tokens; refuse an invalid grammar."""
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise Refused(
                f"formats of replies need {error.name}: pip install 'mmkv[structured]'"
            ) from None
        with self._lock:  # made once: it takes a second
            if self._vocabulary is None:
                eos = self._model.generation_config.eos_token_id
                size = max(self._model.config.get_text_config().vocab_size, len(self._tokenizer))
                self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=eos)
        if problem := LLMatcher.validate_grammar(grammar, self._vocabulary):
            raise Refused(f"no grammar follows from this format: {problem.splitlines()[0]}")
        return _Grammar(LLMatcher(self._vocabulary, grammar, log_level=0), n_prompt)


class _Grammar(LogitsProcessor):
    def __init__(self, matcher: Any, n_prompt: int) -> None:
        self._matcher, self._n_read = matcher, n_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new_tokens = input_ids[0, self._n_read :].tolist()
        self._n_read += len(new_tokens)
        self._matcher.consume_tokens(new_tokens)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if error := self._matcher.get_error():
            raise Refused(f"no grammar follows from this format: {error.splitlines()[0]}")
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()
        V = scores.shape[1]
        return scores.masked_fill(~allowed[:V].to(scores.device), float("-inf"))


def logprobs(
    logits: Tensor, tokens: Sequence[int], top: int, tokenizer: Any
) -> list[TokenLogprobs]:
    """Return the log probabilities of `tokens` [N], each with the `top` likeliest in its place.

    They follow from the model's logits [N, V], before penalties and temperature.
    """
    log_p = logits.float().log_softmax(-1)
    likeliest = log_p.topk(min(top, log_p.shape[1]), -1)
    chosen = log_p.gather(1, torch.tensor(tokens, device=log_p.device)[:, None])[:, 0].tolist()

    def as_logprob(token: int, logprob: float) -> Logprob:
        return Logprob(token, "" if tokenizer is None else tokenizer.decode([token]), logprob)

    rows = zip(tokens, chosen, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [
        TokenLogprobs(as_logprob(token, value), tuple(map(as_logprob, ids, values)))
        for token, value, ids, values in rows
    ]
