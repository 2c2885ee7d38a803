"""What a reply's tokens are chosen by beyond what `generate` has: penalties, biases, grammars."""

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
    """OpenAI's penalties, on tokens of the reply behind `prompt` tokens, and its biases."""

    def __init__(self, sampling: Sampling, prompt: int) -> None:
        self.sampling, self.prompt = sampling, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] with what was said before made less likely."""
        asked, out = self.sampling, scores.clone()
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=out.shape[1]).to(out.dtype)
        out -= asked.frequency_penalty * counts + asked.presence_penalty * (counts > 0)
        for token, bias in asked.logit_bias.items():
            out[:, token] += bias
        return out


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON texts of a schema; what is wrong with it is told when it is used."""
    # Blanks are few: models that may give any number of them sometimes give nothing else.
    options = {"whitespace_pattern": r"[ \n]{0,8}"}
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})


class Grammars:
    """Texts of a model that match a grammar, by llguidance."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._lock = threading.Lock()
        self._words: Any = None

    def processor(self, grammar: str, prompt: int) -> LogitsProcessor:
        """What holds one reply, behind `prompt` tokens, to a grammar; what is none is refused."""
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise Refused(
                f"formats of replies need {error.name}: pip install 'mmkv[structured]'"
            ) from None
        with self._lock:  # made once: it takes a second
            if self._words is None:
                eos = self._model.generation_config.eos_token_id
                size = self._model.config.get_text_config().vocab_size
                size = max(size, len(self._tokenizer))
                self._words = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=eos)
        if wrong := LLMatcher.validate_grammar(grammar, self._words):
            raise Refused(f"a format that cannot be held: {wrong.splitlines()[0]}")
        return _Grammar(LLMatcher(self._words, grammar, log_level=0), prompt)


class _Grammar(LogitsProcessor):
    def __init__(self, matcher: Any, prompt: int) -> None:
        self._matcher, self._read = matcher, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self._read :].tolist()
        self._read += len(new)
        self._matcher.consume_tokens(new)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if error := self._matcher.get_error():
            raise Refused(f"a format that cannot be held: {error.splitlines()[0]}")
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()
        V = scores.shape[1]
        return scores.masked_fill(~allowed[:V].to(scores.device), float("-inf"))


def logprobs(
    logits: Tensor, tokens: Sequence[int], top: int, tokenizer: Any
) -> list[TokenLogprobs]:
    """What was likely where `tokens` [N] were taken, and the `top` likeliest there.

    It is by the logits [N, V] of the model, before penalties and temperature.
    """
    every = logits.float().log_softmax(-1)
    best = every.topk(min(top, every.shape[1]), -1)
    taken = every.gather(1, torch.tensor(tokens, device=every.device)[:, None])[:, 0].tolist()

    def one(token: int, logprob: float) -> Logprob:
        return Logprob(token, "" if tokenizer is None else tokenizer.decode([token]), logprob)

    rows = zip(tokens, taken, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(one(token, value), tuple(map(one, ids, values)))
        for token, value, ids, values in rows
    ]
