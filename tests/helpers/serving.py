"""A server in a thread, and an engine whose replies a test writes."""

import base64
import http.client
import io
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from mmkv import terminal
from mmkv.serving import Event, Reply, Usage
from mmkv.serving.reply import Logprob, TokenLogprobs


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"model": "tiny", "messages": [{"role": role, "content": content, **more}]}


HELLO = turn("user", "Hello")


def data_url(picture: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    picture.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def sent(
    address: str,
    body: Any,
    headers: Any = None,
    path: str = "/v1/chat/completions",
    method: str = "POST",
) -> tuple[int, Any, Any]:
    """Status, JSON or text, and headers of an answer; a body of bytes is sent as it stands."""
    where = urllib.parse.urlsplit(address)
    with closing(http.client.HTTPConnection(where.hostname, where.port, timeout=20)) as found:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if method == "POST" else {}
        found.request(method, path, raw, {**kind, **(headers or {})})
        answer = found.getresponse()
        text = answer.read().decode()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text, answer.headers


def post(address: str, body: Any, headers: Any = None, path: str = "/v1/chat/completions") -> Any:
    """Status and JSON of an answer."""
    return sent(address, body, headers, path)[:2]


def raw_connection(address: str) -> socket.socket:
    where = urllib.parse.urlsplit(address)
    return socket.create_connection((where.hostname, where.port), timeout=10)


def request_of(body: Any) -> bytes:
    """A request for a chat, as it is sent."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + raw


def until(true: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class WrittenEngine:
    """Gives replies of these texts; None leaves a reply open until it is cancelled."""

    def __init__(self) -> None:
        self.texts: list[str] | None = ["A ", "red ", "circle."]
        self.finish, self.error = "stop", None
        self.refusal: Exception | None = None
        self.asked: list[dict[str, Any]] = []
        self.replies: list[Reply] = []

    def submit(self, **given: Any) -> Reply:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(given)

        def wake() -> None:
            if reply.cancelled:
                reply.put(None, "cancelled", reply.usage)

        reply = Reply(wake)
        self.replies.append(reply)
        used = Usage(prompt_tokens=10, kept_tokens=4, cache_bytes=640)
        for i, text in enumerate(["A "] if self.texts is None else self.texts, start=1):
            used = Usage(prompt_tokens=10, completion_tokens=i, kept_tokens=4, cache_bytes=640)
            one = Logprob(i, text, -0.5)
            likely = (TokenLogprobs(one, (one, Logprob(0, "\ufffd", -1.5))),)
            asked = given["sampling"].logprobs is not None
            reply.put(Event(i, text, likely if asked else ()), None, used)
        if self.texts is not None:
            reply.error = self.error
            reply.put(None, self.finish, used)
        return reply

    positions = 2048

    def tokenize(self, **given: Any) -> list[int]:
        self.asked.append(given)
        return [3, 1, 2]

    @property
    def open(self) -> int:
        return sum(reply.finish_reason is None for reply in self.replies)

    def stats(self) -> Any:
        return SimpleNamespace(
            running=self.open,
            waiting=0,
            prefilling=0,
            cache_bytes=640 * self.open,
            cache_memory=None,
            tokens_generated=sum(len(reply.tokens) for reply in self.replies),
            requests_done=len(self.replies) - self.open,
            prefixes=0,
            prefix_hits=0,
        )

    def close(self) -> None:
        for reply in self.replies:
            reply.cancel()


@contextmanager
def listening(served: Any) -> Generator[str]:
    """Serve an app from a thread; gives its address."""
    import uvicorn

    from mmkv.serving.server import config

    bound = terminal.bind("127.0.0.1", 0)
    running = uvicorn.Server(config(served))
    thread = threading.Thread(target=running.run, args=([bound],), daemon=True)
    thread.start()
    try:
        assert until(lambda: running.started)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"


def alone(model: Any, inputs: Any, new: int, sampling: Any = None, **options: Any) -> list[int]:
    """The tokens that `generate` gives for inputs alone."""
    options["do_sample"] = sampling is not None
    if sampling is not None:
        torch.manual_seed(sampling.seed)
        options |= {"temperature": sampling.temperature}
        options |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
    out = model.generate(**inputs, **options, max_new_tokens=new)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@contextmanager
def watched(engine: Any) -> Generator[tuple[list[int], list[Any]]]:
    """What the caches take after each layer, and where any took more than what was reserved."""
    seen, over = [], []

    def look(*args: Any) -> None:
        stats, pool = engine.stats(), engine._worker.batch.pool
        seen.append(stats.cache_bytes)
        held = [(x.cache.nbytes, x.reserved) for x in engine._worker.live() if x.cache is not None]
        held += [(pool.nbytes, pool.most + pool.spare)]
        if engine.cache_memory is not None:
            held += [(stats.reserved_bytes, engine.cache_memory)]
        over.extend(x for x in held if x[0] > x[1])

    with ExitStack() as hooks:
        for layer in engine._attachment.parts.layers:
            hooks.enter_context(layer.register_forward_hook(look))
        yield seen, over


def begun(engine: Any) -> list[Reply]:
    """The replies whose prompts are read from now on, in that order."""
    worker, found = engine._worker, []
    start = worker._start
    worker._start = lambda x: (found.append(x.reply), start(x))
    return found


CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call them as <tool_call>{...}</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}({{ mood }}){% endif %}"
    "{% endif %}"
)


def text_chat() -> tuple[Any, Any]:
    """A tiny random language model, and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    marks = ["<|im_start|>", "<|im_end|>", "<pad>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({x: i for i, x in enumerate([*marks, *letters])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=marks[1],
        pad_token=marks[2],
        additional_special_tokens=marks[:1],
        chat_template=CHATML,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, eos_token_id=1, bos_token_id=None, pad_token_id=2, **sizes, **heads
    )
    return LlamaForCausalLM(config).eval(), tokenizer
