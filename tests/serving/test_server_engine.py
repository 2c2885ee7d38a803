"""The server with a real engine and the built-in model, and `mmkv serve` as a command."""

import http.client
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest
import torch
from PIL import Image

import mmkv
from helpers.commands import complaint
from helpers.marks import cases, since
from helpers.serving import HELLO, WrittenEngine, data_url, listening, text_chat, until
from mmkv import terminal
from mmkv.builtin import example_pictures
from mmkv.cli import commands, serve
from mmkv.serving import Engine
from mmkv.serving import engine as engines

openai = pytest.importorskip("openai", reason="the server is tested with the openai client")
server = pytest.importorskip("mmkv.serving.server", reason="pip install 'mmkv[serve]'")

QUESTION = "What is at the top center?"
ANSWER = "A green square is at the top center."  # of the second example picture
MiB = 2**20


def asking(question=QUESTION, picture=1):
    with Image.open(example_pictures()[picture]) as found:
        url = data_url(found)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"model": "builtin", "messages": [{"role": "user", "content": parts}]}


@pytest.fixture(scope="module")
def served():
    model, processor = mmkv.load_builtin()
    mmkv.wrap(model, "condense", 0.2, least=0)
    with (
        Engine(model, processor, cache_memory=32 * MiB) as engine,
        listening(app := server.app(engine, name="builtin")) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield engine, client
        service = app.state.service
        assert until(lambda: service.room == service.limits.held_bytes), "bytes were not given back"


@pytest.fixture
def client(served):
    engine, client = served
    yield client
    assert until(lambda: idle(engine)), engine.stats()


def idle(engine):
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.prefilling) == (0, 0, 0)


class TestBuiltIn:
    def test_a_picture(self, client):
        answer = client.chat.completions.create(**asking(), max_tokens=20)
        assert answer.choices[0].message.content.strip() == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert 0 < answer.mmkv["kept_tokens"] < 0.3 * answer.usage.prompt_tokens
        pieces = list(client.chat.completions.create(**asking(), stream=True, max_tokens=20))
        assert "".join(x.choices[0].delta.content or "" for x in pieces).strip() == ANSWER
        assert client.chat.completions.create(**asking()).mmkv["shared"]

    @since("5.23")
    def test_marks_of_pictures_that_nobody_gave(self, client):
        """A text cannot stand for a picture."""
        answer = client.chat.completions.create(**asking("What is <image>?"), max_tokens=2)
        assert answer.usage.prompt_tokens < 2 * 144
        with pytest.raises(openai.BadRequestError, match="stand for pictures"):
            client.completions.create(model="builtin", prompt="What is <image>?")

    @pytest.mark.slow
    def test_two_thousand_broken_requests(self, served, client):
        """Flipped and cut anywhere, each is answered, and by an error of the client's."""
        engine, _ = served
        where = urllib.parse.urlsplit(str(client.base_url))
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
        rng, kinds = random.Random(1), set()
        raw = json.dumps({**asking(), "max_tokens": 2, "temperature": 0.5, "seed": 1}).encode()
        begin = raw.index(b'"role"') - 20
        for i in range(2000):
            body = bytearray(raw)
            for _ in range(rng.randrange(1, 8 if i % 2 else 4)):
                at = rng.choice([rng.randrange(len(body)), rng.randrange(begin)])
                body[at] = rng.randrange(256)
            if i % 2:
                body = body[: rng.choice([len(body), rng.randrange(len(body))])]
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", bytes(body), headers)
            answer = connection.getresponse()
            text = json.loads(answer.read())
            kinds.add(answer.status)
            assert answer.status in (200, 400, 404), text
            if answer.status != 200:
                assert set(text["error"]) == {"message", "type", "param", "code"}
                assert len(text["error"]["message"]) < 600
        connection.close()
        assert {200, 400} <= kinds
        assert until(lambda: idle(engine))
        assert engine.stats().cache_bytes <= 32 * MiB


@pytest.fixture(scope="module")
def text():
    """A client of a text model with a chat template, and its engine."""
    model, tokenizer = text_chat()
    mmkv.wrap(model, "snapkv", 0.5, window=4)
    with (
        Engine(model, tokenizer) as engine,
        listening(server.app(engine, name="text")) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield engine, client


class TestText:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_alone(self, text, stream):
        given = {"model": "text", "prompt": "Hello", "max_tokens": 0, "logprobs": 1}
        answer = text[1].completions.create(**given, echo=True, stream=stream)
        choices = [x.choices[0] for x in ([*answer] if stream else [answer])]
        assert "".join(x.text for x in choices) == "Hello"
        assert "".join(choices[0].logprobs.tokens) == "Hello"
        assert choices[0].logprobs.token_logprobs[0] is None
        assert choices[-1].finish_reason == "length"
        assert stream or answer.usage.completion_tokens == 0
        with pytest.raises(openai.BadRequestError, match=r"max_tokens: 0 .* echo"):
            text[1].completions.create(**given)

    @pytest.mark.slow
    def test_lm_evaluation_harness(self, text, tmp_path):
        """Its own clients; what it is told of likelihood is what the model says of the prompt."""
        clients = pytest.importorskip("lm_eval.models.openai_completions")
        api_models = pytest.importorskip("lm_eval.models.api_models")
        from lm_eval.api.instance import Instance

        engine, client = text
        engine.processor.save_pretrained(tmp_path)
        options = {"model": "text", "tokenizer": str(tmp_path), "tokenizer_backend": "huggingface"}
        harness = clients.LocalCompletionsAPI(f"{client.base_url}completions", **options)

        def ask(kind, *arguments):
            return [Instance(kind, doc={}, arguments=x, idx=0) for x in arguments]

        pairs = [("one two", " three"), ("one", "xyz")]
        found = harness.loglikelihood(ask("loglikelihood", *pairs))
        plain, tokenizer = text_chat()
        for (begun, more), (value, _) in zip(pairs, found, strict=True):
            ids, n = tokenizer(begun + more)["input_ids"], len(tokenizer(begun)["input_ids"])
            rows = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
            wanted = sum(rows[i - 1, ids[i]].item() for i in range(n, len(ids)))
            assert value == pytest.approx(wanted, abs=1e-3)
        until = {"until": ["\n"], "max_gen_toks": 6}
        assert len(harness.generate_until(ask("generate_until", ("one", until)))) == 1
        chat = clients.LocalChatCompletion(f"{client.base_url}chat/completions", model="text")
        turn = api_models.JsonChatStr(json.dumps([{"role": "user", "content": "Hello"}]))
        assert len(chat.generate_until(ask("generate_until", (turn, until)))) == 1


class Ending:
    """Runs a server in the main thread, and `during` in another, which has it ended."""

    def __init__(self, engine, during, grace=5.0):
        self.engine, self.during, self.errors, self.ended = engine, during, [], False
        self.socket = terminal.bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.app = server.app(engine, name="tiny")
        with self.socket:
            server.run(self.app, self.socket, grace=grace, ready=self.start)
        self.ended = True
        self.thread.join(10)
        if self.errors:
            raise self.errors[0]

    def start(self):
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            self.during(self)
        except BaseException as error:
            self.errors.append(error)
            if not self.ended:  # a later signal would end the tests
                os.kill(os.getpid(), signal.SIGINT)

    def ask(self, **more):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        body = {**HELLO, **more}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection


class TestEnding:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_answers_are_finished(self, number, capfd):
        """And what the process has set stays: its handlers of signals and of logs."""
        engine = WrittenEngine()
        engine.texts = None
        closed = []

        class Handler(logging.Handler):
            def close(self):
                closed.append(self)

        log = Handler()

        def during(ending):
            open_one = ending.ask()
            assert until(lambda: engine.open == 1)
            os.kill(os.getpid(), number)
            assert until(lambda: ending.app.state.service.closing)
            (reply,) = engine.replies
            reply.put(None, "stop", reply.usage)
            answer = open_one.getresponse()
            assert (answer.status, b"A " in answer.read()) == (200, True)

        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        Ending(engine, during)
        assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
        assert log not in closed
        assert capfd.readouterr().err == ""

    def test_answers_that_take_too_long_are_cut_off(self, capfd):
        engine = WrittenEngine()
        engine.texts = None

        def during(ending):
            whole, stream = ending.ask(), ending.ask(stream=True)
            assert until(lambda: engine.open == 2)
            os.kill(os.getpid(), signal.SIGTERM)
            answer = whole.getresponse()
            assert (answer.status, b"shutting down" in answer.read()) == (503, True)
            assert b"shutting down" in stream.getresponse().read()

        start = time.monotonic()
        Ending(engine, during, grace=0.5)
        assert time.monotonic() - start < 5
        assert (engine.open, capfd.readouterr().err) == (0, "")


class Told(BaseException):
    """The server would start now."""


# A command that ends where torch is first imported.
AT_TORCH = """
import os, sys
class Look:
    def find_spec(self, name, *more):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Look())
from mmkv.cli.commands import main
main(sys.argv[1:])
"""


class TestCommand:
    def run(self, monkeypatch, *words):
        """What an engine and a server are made of."""
        given = {}

        def make_engine(**made):
            given["settings"] = made
            return WrittenEngine()

        def app(engine, **options):
            given.update(options)
            raise Told

        monkeypatch.setattr(engines, "make_engine", make_engine)
        monkeypatch.setattr(server, "app", app)
        with pytest.raises(Told):
            commands.main(["serve", "--port", "0", *words])
        return given

    def test_options(self, monkeypatch):
        monkeypatch.delenv("MMKV_API_KEY", raising=False)
        given = self.run(monkeypatch)
        assert (given["name"], given["api_keys"], given["allow_hosts"]) == ("builtin", [], [])
        assert (given["share_prefixes"], given["ignore_unknown"]) == ("key", False)
        made = given["settings"]
        assert (made["policy"], made["budget"], made["cache_memory"]) == ("condense", 0.2, None)
        given = self.run(
            monkeypatch,
            *("--model", "some/llava", "--policy", "snapkv", "--option", "window=8"),
            *("--budget", "10%", "--cache-memory", "8GiB", "--allow-host", "a.example"),
            *("--allow-host", "b.example:81", "--max-batch", "3", "--max-new-tokens", "9"),
            *("--api-key", "a", "--api-key", "b", "--share-prefixes", "all", "--ignore-unknown"),
            *("--allow-origin", "https://a.example"),
        )
        assert (given["api_keys"], given["share_prefixes"]) == (["a", "b"], "all")
        assert (given["allow_origins"], given["ignore_unknown"]) == (["https://a.example"], True)
        made = given["settings"]
        assert (given["name"], given["allow_hosts"]) == ("llava", ["a.example", "b.example:81"])
        assert (made["policy"], made["options"], made["budget"]) == ("snapkv", {"window": 8}, 0.1)
        assert (made["cache_memory"], made["max_batch"]) == (8 * 2**30, 3)
        assert made["max_new_tokens"] == 9

    def test_a_file_of_options(self, monkeypatch, tmp_path):
        path = tmp_path / "serve.yaml"
        path.write_text(
            "policy: snapkv\nbudget: 0.5\noption: [window=8]\nmax_batch: 3\napi_key: one\n"
        )
        given = self.run(monkeypatch, "--config", str(path), "--max-batch", "4")
        made = given["settings"]
        assert (made["policy"], made["budget"], made["options"]) == ("snapkv", 0.5, {"window": 8})
        assert (made["max_batch"], given["api_keys"]) == (4, ["one"])
        monkeypatch.setenv("MMKV_API_KEY", "two three")
        assert self.run(monkeypatch)["api_keys"] == ["two", "three"]

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("modell: x", "modell: no option"),
            ("config: x", "config: no option"),
            ("max_batch: many", "max_batch: "),
            ("max_batch: [3, 4]", "max_batch: "),
            ("port: 99999", "port: "),
            ("- x", "by name"),
            ("a: [", "no YAML"),
            ("!!python/object/apply:os.system ['true']", "no YAML"),
            ("#" * (2**20 + 1), "more than 1048576 bytes"),
        ],
        ids=range(9),
    )
    def test_a_wrong_file(self, capsys, tmp_path, text, why):
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        assert why in complaint(capsys, "serve", "--config", path)

    @pytest.mark.parametrize(
        "words",
        [
            ("--policy", "best"),
            ("--budget", "2.5"),
            ("--cache-memory", "much"),
            ("--config", "missing.yaml"),
            ("--host", "192.0.2.1"),
        ],
    )
    def test_wrong_options(self, capsys, words):
        assert words[1] in complaint(capsys, "serve", "--port", 0, *words)

    @pytest.mark.parametrize(
        ("text", "size"), [("8GiB", 2**33), ("1.5 MB", 1_500_000), ("7", 7), ("2kb", 2000)]
    )
    def test_sizes(self, text, size):
        assert serve.parse_size(text) == size

    @cases(
        "words, before",
        [
            (["serve"], "ACTIVE"),
            (["serve", "--config", "serve.yaml"], None),
            (["bench", "serve"], None),
        ],
        (["serve"], "ACTIVE"),
        ids=str,
    )
    def test_threads_sleep_while_they_wait(self, words, before, tmp_path):
        """Said before torch is imported, which reads it then; what was said already stays."""
        (tmp_path / "serve.yaml").write_text("port: 0")
        env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        env |= {} if before is None else {"OMP_WAIT_POLICY": before}
        command = [sys.executable, "-c", AT_TORCH, *words]
        pipes = {"capture_output": True, "text": True, "timeout": 120}
        found = subprocess.run(command, cwd=tmp_path, env=env, **pipes)
        assert (found.stdout, found.stderr) == (f"{before or 'PASSIVE'}\n", "")

    @pytest.mark.slow
    def test_from_start_to_end(self):
        start = "from mmkv.cli.commands import main; main()"
        command = [sys.executable, "-c", start, "serve", "--port", "0", "--device", "cpu"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            try:
                line = process.stdout.readline()
                found = re.fullmatch(r"builtin is served at (\S+) \(Ctrl-C ends it\)\n", line)
                with openai.OpenAI(base_url=found[1], api_key="any") as client:
                    answer = client.chat.completions.create(**asking())
                assert answer.choices[0].message.content.strip() == ANSWER
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=20) == ("", "")
            finally:
                process.kill()
        assert process.returncode == 0
