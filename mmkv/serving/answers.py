"""OpenAI's answers to chats and completions, whole and in pieces, from the events of replies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from mmkv.serving.api import ChatRequest, CompletionRequest
from mmkv.serving.reply import Event, Logprob, TokenLogprobs
from mmkv.serving.tools import ToolText

Piece = dict[str, Any]


class ChatAnswer:
    """The answer to a chat, one choice for each reply, built from the events of the replies."""

    kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, request: ChatRequest | CompletionRequest, n_choices: int) -> None:
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        self._header = {"id": name, "created": int(time.time()), "model": request.model}
        # None (or False in a chat) asks for no logprobs, 0 for those of the chosen tokens alone.
        self._with_logprobs = request.logprobs is not None and request.logprobs is not False
        tools, self._most_calls = list[Piece](), None
        if isinstance(request, ChatRequest):
            tools = request.callable
            self._most_calls = 1 if request.parallel_tool_calls is False else None
        self._texts = [ToolText([x["function"]["name"] for x in tools]) for _ in range(n_choices)]
        self._n, self._started = request.n or 1, set[int]()

    def add(self, i: int, event: Event) -> list[Piece]:
        """Return what one more event of the i-th reply adds to its choice, a piece or none."""
        delta: dict[str, Any] = {}
        if i not in self._started:
            self._started.add(i)
            delta = {"role": "assistant", "content": ""}
        if text := self._texts[i].add(event.text):
            delta["content"] = text
        logprobs = self._logprobs(i, event.logprobs)
        if not delta and logprobs is None:
            return []
        return [{"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": None}]

    def end(self, i: int, reason: str) -> list[Piece]:
        """Return the last pieces of the i-th choice: the remaining text and calls, the reason."""
        text, calls = self._texts[i].end()
        calls = calls[: self._most_calls]
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
        common = {"index": i, "logprobs": None}
        last = {**common, "delta": {}, "finish_reason": "tool_calls" if calls else reason}
        return [{**common, "delta": delta, "finish_reason": None}, last] if delta else [last]

    def whole(self, pieces: Sequence[Piece], replies: Sequence[Any]) -> Piece:
        """Return the whole answer, joined from all pieces."""
        choices = list[Piece]()
        for i in range(len(replies)):
            own_pieces = [x for x in pieces if x["index"] == i]
            reason = {"finish_reason": own_pieces[-1]["finish_reason"]}
            choices.append({"index": i, **self._choice(own_pieces), **reason})
        return {**self._header, "object": self.kind, "choices": choices, **self.usage(replies)}

    def usage(self, replies: Sequence[Any]) -> Piece:
        """Count tokens as OpenAI does (each prompt once); as `mmkv`, what the caches held."""
        usages = [x.usage for x in replies]
        counts = {"prompt_tokens": sum(x.prompt_tokens for x in usages[:: self._n])}
        counts["completion_tokens"] = sum(x.completion_tokens for x in usages)
        counts["total_tokens"] = sum(counts.values())
        cache = {"kept_tokens": sum(x.kept_tokens for x in usages[:: self._n])}
        cache["cache_bytes"] = sum(x.cache_bytes for x in usages)
        return {"usage": counts, "mmkv": {**cache, "shared": usages[0].shared}}

    def sent(self, piece: Piece | None) -> Piece:
        """Return the object to stream for a piece; None: the last one, of `include_usage`."""
        return {**self._header, "object": self.piece_kind, "choices": [piece] if piece else []}

    def _choice(self, pieces: Sequence[Piece]) -> Piece:
        content = "".join(x["delta"].get("content") or "" for x in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls := [call for x in pieces for call in x["delta"].get("tool_calls", ())]:
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in x.items() if k != "index"} for x in calls]
        tokens = [x for piece in pieces for x in (piece["logprobs"] or {}).get("content", [])]
        logprobs = {"content": tokens, "refusal": None} if self._with_logprobs else None
        return {"message": message, "logprobs": logprobs}

    def _logprobs(self, i: int, chosen: Sequence[TokenLogprobs]) -> Piece | None:
        if not self._with_logprobs or not chosen:
            return None
        tokens = [{**_token(x.taken), "top_logprobs": [*map(_token, x.top)]} for x in chosen]
        return {"content": tokens, "refusal": None}


# What a completion's log probabilities list for each token.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionAnswer(ChatAnswer):
    """The answer to a completion request: texts that continue prompts."""

    kind, piece_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, request: CompletionRequest, n_choices: int) -> None:
        super().__init__(request, n_choices)
        self._lengths = [0] * n_choices  # characters of each choice so far

    def add(self, i: int, event: Event) -> list[Piece]:
        """Return what one more event adds to its choice, as `ChatAnswer.add` does."""
        logprobs = self._logprobs(i, event.logprobs)
        if not event.text and logprobs is None:
            return []
        return [{"index": i, "text": event.text, "logprobs": logprobs, "finish_reason": None}]

    def end(self, i: int, reason: str) -> list[Piece]:
        """Return the last piece of a choice, as `ChatAnswer.end` does."""
        return [{"index": i, "text": "", "logprobs": None, "finish_reason": reason}]

    def _choice(self, pieces: Sequence[Piece]) -> Piece:
        parts = [x["logprobs"] for x in pieces if x["logprobs"]]
        lists = {k: [v for x in parts for v in x[k]] for k in _LISTS}
        text = "".join(x["text"] for x in pieces)
        return {"text": text, "logprobs": lists if self._with_logprobs else None}

    def _logprobs(self, i: int, chosen: Sequence[TokenLogprobs]) -> Piece | None:
        if not self._with_logprobs or not chosen:
            return None
        offsets = list[int]()
        for x in chosen:
            offsets.append(self._lengths[i])
            self._lengths[i] += len(x.taken.text)
        return {
            "tokens": [x.taken.text for x in chosen],
            "token_logprobs": [x.taken.logprob for x in chosen],
            # Of tokens with the same text, such as parts of characters, the likeliest one stays.
            "top_logprobs": [
                {y.text: y.logprob for y in reversed(x.top)} if x.top else None for x in chosen
            ],
            "text_offset": offsets,
        }


def _token(x: Logprob) -> Piece:
    part = "\ufffd" in x.text  # part of a character, whose bytes its text does not give
    return {"token": x.text, "logprob": x.logprob, "bytes": None if part else [*x.text.encode()]}
