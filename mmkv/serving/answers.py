"""The answers of OpenAI's completions, whole and in pieces, from what the replies give."""

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
    """The answer of a chat of so many choices, as their events come."""

    kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, asked: ChatRequest | CompletionRequest, choices: int) -> None:
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        self._about = {"id": name, "created": int(time.time()), "model": asked.model}
        # None, or False in a chat, asks for none; 0 for those of the tokens taken.
        self._likely = asked.logprobs is not None and asked.logprobs is not False
        tools = asked.callable if isinstance(asked, ChatRequest) else []
        self._texts = [ToolText([x["function"]["name"] for x in tools]) for _ in range(choices)]
        self._n, self._begun = asked.n or 1, set[int]()

    def add(self, i: int, event: Event) -> Piece | None:
        """What one more event of the i-th reply adds to its choice; None: nothing yet."""
        delta: dict[str, Any] = {}
        if i not in self._begun:
            self._begun.add(i)
            delta = {"role": "assistant", "content": ""}
        if text := self._texts[i].add(event.text):
            delta["content"] = text
        likely = self._told(i, event.logprobs)
        if not delta and likely is None:
            return None
        return {"index": i, "delta": delta, "logprobs": likely, "finish_reason": None}

    def end(self, i: int, reason: str) -> list[Piece]:
        """What ends the i-th choice: held text and calls, then why."""
        text, calls = self._texts[i].end()
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
        rest = {"index": i, "logprobs": None}
        last = {**rest, "delta": {}, "finish_reason": "tool_calls" if calls else reason}
        return [{**rest, "delta": delta, "finish_reason": None}, last] if delta else [last]

    def whole(self, pieces: Sequence[Piece], replies: Sequence[Any]) -> Piece:
        """All of it at once, from all pieces."""
        choices = list[Piece]()
        for i in range(len(replies)):
            own = [x for x in pieces if x["index"] == i]
            end = {"finish_reason": own[-1]["finish_reason"]}
            choices.append({"index": i, **self._choice(own), **end})
        return {**self._about, "object": self.kind, "choices": choices, **self.usage(replies)}

    def usage(self, replies: Sequence[Any]) -> Piece:
        """Tokens as OpenAI counts them, each prompt once, and what the caches held as `mmkv`."""
        used = [x.usage for x in replies]
        counts = {"prompt_tokens": sum(x.prompt_tokens for x in used[:: self._n])}
        counts["completion_tokens"] = sum(x.completion_tokens for x in used)
        counts["total_tokens"] = sum(counts.values())
        held = {"kept_tokens": sum(x.kept_tokens for x in used[:: self._n])}
        held["cache_bytes"] = sum(x.cache_bytes for x in used)
        return {"usage": counts, "mmkv": {**held, "shared": used[0].shared}}

    def sent(self, piece: Piece | None) -> Piece:
        """A piece as an object of its own; without one the last, for `include_usage`."""
        return {**self._about, "object": self.piece_kind, "choices": [piece] if piece else []}

    def _choice(self, own: Sequence[Piece]) -> Piece:
        content = "".join(x["delta"].get("content") or "" for x in own)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls := [call for x in own for call in x["delta"].get("tool_calls", ())]:
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in x.items() if k != "index"} for x in calls]
        told = [x for piece in own for x in (piece["logprobs"] or {}).get("content", [])]
        likely = {"content": told, "refusal": None} if self._likely else None
        return {"message": message, "logprobs": likely}

    def _told(self, i: int, likely: Sequence[TokenLogprobs]) -> Piece | None:
        if not self._likely or not likely:
            return None
        told = [{**_token(x.taken), "top_logprobs": [*map(_token, x.top)]} for x in likely]
        return {"content": told, "refusal": None}


class CompletionAnswer(ChatAnswer):
    """The answer of a completion: texts that go on from prompts."""

    kind, piece_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, asked: CompletionRequest, choices: int) -> None:
        super().__init__(asked, choices)
        self._lengths = [0] * choices  # characters of the tokens so far

    def add(self, i: int, event: Event) -> Piece | None:
        """As `ChatAnswer.add`."""
        likely = self._told(i, event.logprobs)
        if not event.text and likely is None:
            return None
        return {"index": i, "text": event.text, "logprobs": likely, "finish_reason": None}

    def end(self, i: int, reason: str) -> list[Piece]:
        """As `ChatAnswer.end`."""
        return [{"index": i, "text": "", "logprobs": None, "finish_reason": reason}]

    def _choice(self, own: Sequence[Piece]) -> Piece:
        told = [x["logprobs"] for x in own if x["logprobs"]]
        likely = {k: [v for x in told for v in x[k]] for k in told[0]} if told else None
        return {"text": "".join(x["text"] for x in own), "logprobs": likely}

    def _told(self, i: int, likely: Sequence[TokenLogprobs]) -> Piece | None:
        if not self._likely or not likely:
            return None
        offsets = list[int]()
        for x in likely:
            offsets.append(self._lengths[i])
            self._lengths[i] += len(x.taken.text)
        return {
            "tokens": [x.taken.text for x in likely],
            "token_logprobs": [x.taken.logprob for x in likely],
            # Of several tokens with the same text, such as parts of characters, the likeliest.
            "top_logprobs": [
                {y.text: y.logprob for y in reversed(x.top)} if x.top else None for x in likely
            ],
            "text_offset": offsets,
        }


def _token(x: Logprob) -> Piece:
    part = "\ufffd" in x.text  # of a character: its bytes are not told by its text
    return {"token": x.text, "logprob": x.logprob, "bytes": None if part else [*x.text.encode()]}
