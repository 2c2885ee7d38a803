"""The HTTP server by itself: what it hands to an engine, what it answers, and what it refuses."""

import base64
import http.client
import http.server
import json
import threading
import time
import urllib.parse
from contextlib import closing, suppress

import pytest
from PIL import Image

from helpers.memory import bounded
from helpers.serving import (
    HELLO,
    WrittenEngine,
    data_url,
    listening,
    post,
    raw_connection,
    request_of,
    sent,
    turn,
    until,
)
from mmkv.serving import Busy, Closed, Refused, Sampling

openai = pytest.importorskip("openai", reason="the server is tested with the openai client")
errors = pytest.importorskip("mmkv.serving.errors", reason="pip install 'mmkv[serve]'")
server = pytest.importorskip("mmkv.serving.server", reason="pip install 'mmkv[serve]'")

LIMITS = errors.Limits(body_bytes=2**20, picture_bytes=2**18, pixels=10**6, read_seconds=2)
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served():
    engine = WrittenEngine()
    app = server.app(engine, name="tiny", timeout=60, limits=LIMITS)
    with listening(app) as address:
        yield address, engine
        service = app.state.service
        assert until(lambda: service.room == LIMITS.held_bytes), "bytes were not given back"


def connected(address):
    where = urllib.parse.urlsplit(address)
    return closing(http.client.HTTPConnection(where.hostname, where.port, timeout=20))


def get(address, path):
    return sent(address, b"", path=path, method="GET")[:2]


def refused(answer, status=400):
    """The message of an error in OpenAI's shape."""
    assert answer[0] == status, answer
    (name,) = answer[1]
    error = answer[1][name]
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 600
    return error["message"]


def asking(*parts):
    return turn("user", list(parts))


def pictured(url):
    return asking({"type": "image_url", "image_url": {"url": url}})


class TestAnswers:
    def test_a_whole_one(self, client, engine):
        answer = client.chat.completions.create(**HELLO)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "A red circle.")
        assert (choice.finish_reason, answer.model, answer.object) == (
            "stop",
            "tiny",
            "chat.completion",
        )
        used = answer.usage
        assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (10, 3, 13)
        assert answer.mmkv == {"kept_tokens": 4, "cache_bytes": 640, "shared": False}

    def test_a_stream(self, client, engine):
        engine.finish = "length"
        pieces = list(client.chat.completions.create(**HELLO, stream=True))
        assert [x.choices[0].delta.content for x in pieces] == ["A ", "red ", "circle.", None]
        assert pieces[0].choices[0].delta.role == "assistant"
        assert [x.choices[0].finish_reason for x in pieces] == [None, None, None, "length"]
        assert len({x.id for x in pieces}) == 1
        assert all(x.usage is None for x in pieces)

    def test_a_stream_with_usage(self, client, engine):
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = client.chat.completions.create(**HELLO, **asked)
        assert (last.choices, last.usage.total_tokens, last.mmkv["kept_tokens"]) == ([], 13, 4)
        assert pieces[-1].choices[0].finish_reason == "stop"

    def test_streams_end_as_they_should(self, address, engine):
        _, text, headers = sent(address, {**HELLO, "stream": True})
        assert headers["content-type"].startswith("text/event-stream")
        assert text.split("\n\n")[-2:] == ["data: [DONE]", ""]

    def test_what_is_handed_on(self, client, engine):
        client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
                {"role": "assistant", "content": "Hi", "refusal": None},
                {"role": "user", "content": "And?", "type": "text"},
            ],
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.9,
            seed=3,
            stop=["END", "STOP"],
            n=1,
            user="somebody",
            frequency_penalty=0,
            logprobs=False,
            extra_body={
                "mmkv": {"policy": "snapkv", "budget": 0.1, "options": {"window": 8}},
                "top_k": 5,
            },
        )
        (asked,) = engine.asked
        assert asked == {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi"},
                {"role": "user", "content": "And?"},
            ],
            "sampling": Sampling(temperature=0.5, top_p=0.9, top_k=5, seed=3, stop=("END", "STOP")),
            "max_new_tokens": 7,
            "template": {},
            "repeated": False,
            "timeout": 60,
            "owner": None,
            "policy": "snapkv",
            "budget": 0.1,
            "options": {"window": 8},
        }

    def test_what_is_handed_on_by_default(self, client, engine):
        client.chat.completions.create(**HELLO, stop=[])
        (asked,) = engine.asked
        assert asked["sampling"] == Sampling()
        assert (asked["max_new_tokens"], asked["policy"], asked["budget"]) == (None, None, None)
        client.chat.completions.create(**HELLO, max_tokens=9, stop="END")
        assert engine.asked[1]["max_new_tokens"] == 9
        assert engine.asked[1]["sampling"].stop == ("END",)

    def test_pictures(self, client, engine):
        red, blue = Image.new("RGB", (8, 6), "red"), Image.new("RGBA", (5, 9), "blue")
        urls = [data_url(red, "BMP"), data_url(blue)]
        parts = [{"type": "image_url", "image_url": {"url": x, "detail": "low"}} for x in urls]
        question = {"type": "text", "text": "Which?"}
        client.chat.completions.create(**asking(parts[0], question, parts[1]))
        ((first, text, second),) = [x["content"] for x in engine.asked[0]["messages"]]
        assert [x["type"] for x in (first, second)] == ["image", "image"]
        assert text == question
        assert (first["image"].size, first["image"].getpixel((0, 0))) == ((8, 6), (255, 0, 0))
        assert (second["image"].mode, second["image"].getpixel((0, 0))) == ("RGB", (0, 0, 255))

    def test_models(self, client):
        assert [x.id for x in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "mmkv"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("huge/one")

    def test_metrics(self, engine):
        """Of a server of its own, so that the counts are known."""
        from prometheus_client.parser import text_string_to_metric_families

        with listening(server.app(engine, name="tiny")) as address:
            for stream in (False, True):
                status, _ = post(address, {**HELLO, "n": 0})
                assert status == 400
                assert post(address, {**HELLO, "stream": stream})[0] == 200
            families = list(text_string_to_metric_families(get(address, "/metrics")[1]))
        found = {(x.name, *sorted(x.labels.values())): x.value for y in families for x in y.samples}
        assert found["mmkv_requests_running",] == 0
        assert found["mmkv_requests_waiting",] == 0
        assert found["mmkv_cache_bytes",] == 0
        assert found["mmkv_prefix_hits_total",] == 0
        assert found["mmkv_tokens_generated_total",] == 6
        assert found["mmkv_answers_total", "stop"] == 2
        assert found["mmkv_answers_total", "400"] == 2
        assert found["mmkv_time_to_first_token_seconds_count",] == 2
        assert found["mmkv_time_between_tokens_seconds_count",] == 4
        assert found["mmkv_kept_share_sum",] == pytest.approx(2 * 0.4)


WRONG = {
    "nothing": b"",
    "not UTF-8": b'{"model": "\xff"}',
    "half a surrogate": b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "empty messages": {**HELLO, "messages": []},
    "bad role": turn("cook", "x"),
    "unknown": {**HELLO, "beam_width": 3},
    "long name": {**HELLO, "x" * 100_000: 3},
    "n": {**HELLO, "n": 129},
    "negative": {**HELLO, "temperature": -1},
    "nan": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "hot": {**HELLO, "temperature": 3},
    "top_p": {**HELLO, "top_p": 0},
    "max_tokens": {**HELLO, "max_tokens": 0},
    "many tokens": {**HELLO, "max_tokens": 10**30},
    "seed": {**HELLO, "seed": 2**70},
    "empty stop": {**HELLO, "stop": ""},
    "number as stop": {**HELLO, "stop": 3},
    "logprobs": {**HELLO, "logprobs": True, "top_logprobs": 21},
    "penalty": {**HELLO, "presence_penalty": 2.5},
    "bias": {**HELLO, "logit_bias": {"a": 1}},
    "chosen tool": {**HELLO, "tool_choice": "required"},
    "functions": {**HELLO, "functions": [{"name": "f"}]},
    "format": {**HELLO, "response_format": {"type": "yaml"}},
    "calls": turn("user", "x", tool_calls=[{"function": {"name": "f", "arguments": ""}}]),
    "tools": {**HELLO, "tools": [{"type": "function"}]},
    "options": {**HELLO, "stream_options": {"include_usage": True}},
    "budget": {**HELLO, "mmkv": {"budget": "all"}},
    "options of a policy": {**HELLO, "mmkv": {"policy": "snapkv", "options": {"window": [8]}}},
    "endless budget": {**HELLO, "mmkv": {"budget": float("inf")}},
    "extension": {**HELLO, "mmkv": {"model": "/etc/passwd"}},
    "assistant's picture": turn(
        "assistant", [{"type": "image_url", "image_url": {"url": "data:,"}}]
    ),
}
PICTURES = {
    "file": "file:///etc/passwd",
    "http": "http://127.0.0.1/x.png",
    "metadata": "http://169.254.169.254/latest",
    "https": "https://example.com/x.png",
    "port": "http://[::1:9",
    "empty": "",
    "no base64": "data:image/png,abc",
    "nothing": "data:image/png;base64,",
}


class TestRefusals:
    @pytest.mark.parametrize("name", WRONG)
    def test_what_is_wrong(self, address, engine, name):
        assert refused(post(address, WRONG[name]))
        assert engine.asked == []

    @pytest.mark.parametrize("name", PICTURES)
    def test_pictures(self, address, engine, name):
        with bounded():
            assert "picture" in refused(post(address, pictured(PICTURES[name])))
        assert engine.asked == []

    def test_pixels_of_all_pictures_count(self, address, engine):
        part = {"type": "image_url", "image_url": {"url": data_url(Image.new("1", (800, 800)))}}
        assert post(address, asking(part))[0] == 200
        assert "pixels" in refused(post(address, asking(part, part)))

    def test_many_pictures(self, address, engine):
        part = {"type": "image_url", "image_url": {"url": data_url(Image.new("1", (2, 2)))}}
        assert post(address, asking(*[part] * 16))[0] == 200
        assert "at most 16" in refused(post(address, asking(*[part] * 17)))

    def test_what_a_message_says(self, address, engine):
        _, body = post(address, WRONG["empty messages"])
        wanted = "messages: list should have at least 1 item after validation, not []"
        assert body["error"]["message"] == wanted
        _, body = post(address, {**HELLO, "stop": [*"abcdefghi"] * 4})
        assert "items after validation, not ['a', 'b'" in body["error"]["message"]
        _, body = post(address, WRONG["bad role"])
        assert body["error"]["param"] == "messages[0].role"
        assert "'system', 'developer', 'user', 'assistant' or 'tool'" in body["error"]["message"]
        assert post(address, WRONG["unknown"])[1]["error"] == {
            "message": "Unrecognized request argument supplied: beam_width",
            "type": "invalid_request_error",
            "param": "beam_width",
            "code": None,
        }

    def test_another_model(self, address, engine):
        answer = post(address, {**HELLO, "model": "gpt-4"})
        assert "gpt-4" in refused(answer, 404)
        assert answer[1]["error"]["code"] == "model_not_found"

    def test_a_large_body(self, address, engine):
        body = json.dumps({**HELLO, "user": "x" * 2**20}).encode()
        assert "1 MiB" in refused(post(address, body), 413)

    def test_other_paths_and_methods(self, address, engine):
        assert refused(post(address, HELLO, path="/v1/embeddings"), 404)
        assert refused(post(address, HELLO, path="/v1/models"), 405)
        for path in ("/docs", "/openapi.json", "/redoc"):
            assert get(address, path)[0] == 404

    def test_a_request_that_the_engine_refuses(self, address, engine):
        engine.refusal = Refused("99 tokens do not fit", code="context_length_exceeded")
        answer = post(address, HELLO)
        assert refused(answer) == "99 tokens do not fit"
        assert answer[1]["error"]["code"] == "context_length_exceeded"
        engine.refusal = Busy("1024 requests wait already")
        assert "1024" in refused(post(address, HELLO), 429)
        engine.refusal = RuntimeError("secret")
        assert "secret" not in refused(post(address, HELLO), 500)

    def test_while_it_ends(self, engine):
        app = server.app(engine, name="tiny")
        with listening(app) as address:
            engine.refusal = Closed("the engine is closed")
            assert "shutting down" in refused(post(address, HELLO), 503)
            engine.refusal, engine.texts, engine.finish = None, [], "cancelled"
            assert "shutting down" in refused(post(address, HELLO), 503)
            assert get(address, "/health") == (200, {"status": "ok"})
            app.state.service.closing = True
            assert get(address, "/health")[0] == 503

    @pytest.mark.parametrize(
        ("finish", "error", "status"),
        [
            ("error", RuntimeError("secret"), 500),
            ("error", Refused("does not fit"), 400),
            ("error", errors.RequestError("the replica was lost", status=503), 503),
            ("timeout", None, 504),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_reply_that_fails_before_its_first_token(
        self, address, engine, finish, error, status, stream
    ):
        engine.texts, engine.finish, engine.error = [], finish, error
        answer = post(address, {**HELLO, "stream": stream})
        assert "secret" not in refused(answer, status)

    def test_a_stream_that_fails_later(self, client, engine):
        engine.finish, engine.error = "error", RuntimeError("secret")
        texts = []
        stream = client.chat.completions.create(**HELLO, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            texts.extend(x.choices[0].delta.content for x in stream)
        assert texts == ["A ", "red ", "circle."]

    def test_room_for_all_requests_together(self, engine):
        limits = errors.Limits(held_bytes=100_000)
        picture = pictured(data_url(Image.new("RGB", (160, 160))))  # 76,800 bytes decoded
        engine.texts = None
        with listening(server.app(engine, name="tiny", limits=limits)) as address:
            first = threading.Thread(target=post, args=(address, picture))
            first.start()
            assert until(lambda: engine.open == 1)
            assert "too many" in refused(post(address, picture), 429)
            assert "too many" in refused(post(address, {**HELLO, "user": "x" * 50_000}), 429)
            engine.texts = ["x"]
            assert post(address, HELLO)[0] == 200
            engine.replies[0].put(None, "stop", engine.replies[0].usage)
            first.join(10)
            assert post(address, picture)[0] == 200


@pytest.fixture(scope="module")
def locked():
    with listening(
        server.app(WrittenEngine(), name="tiny", api_keys=["se-crét", "other"])
    ) as address:
        yield address


PNG = base64.b64decode(data_url(Image.new("RGB", (4, 3), "red")).partition(",")[2])


@pytest.fixture(scope="module")
def pictures():
    """A host of pictures, and of what is none."""
    ended = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/moved?a=1":
                self.send_response(302)
                self.send_header("Location", "/red.png")
                self.end_headers()
                return
            if self.path == "/silent":
                ended.wait(20)
            found = self.path.startswith("/") and self.path != "/missing"
            self.send_response(200 if found else 404)
            self.end_headers()
            if self.path == "/slow":
                while not ended.wait(0.1):
                    self.wfile.write(b"x")
            self.wfile.write(PNG + b"x" * (self.path == "/large"))

        def log_message(self, *args):
            pass

        def handle(self):
            with suppress(OSError):  # who asked has left
                super().handle()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{found.server_port}"
        ended.set()
        found.shutdown()


@pytest.fixture(scope="module")
def fetching(pictures):
    engine = WrittenEngine()
    limits = errors.Limits(picture_bytes=len(PNG), read_seconds=1)
    app = server.app(engine, name="tiny", allow_hosts=[pictures], limits=limits)
    with listening(app) as address:
        yield address, engine


class TestKeys:
    @pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic se-crét", "é"])
    def test_without_the_key(self, locked, given):
        headers = dict(HEADERS) if given is None else {**HEADERS, "Authorization": given}
        answer = post(locked, HELLO, {k: v.encode() for k, v in headers.items()})
        assert "Incorrect API key" in refused(answer, 401)
        assert answer[1]["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
            assert get(locked, path)[0] == 401
        assert get(locked, "/health")[0] == 200

    def test_with_the_key(self, locked):
        headers = {**HEADERS, "Authorization": "Bearer se-crét".encode()}
        assert post(locked, HELLO, headers)[0] == 200


class TestHosts:
    @pytest.mark.parametrize("path", ["/red.png", "", "?moved"])
    def test_an_allowed_one(self, fetching, pictures, path):
        """A picture of the largest size."""
        address, engine = fetching
        assert post(address, pictured(f"http://{pictures}{path}"))[0] == 200
        (part,) = engine.asked[-1]["messages"][0]["content"]
        assert (part["image"].size, part["image"].getpixel((0, 0))) == ((4, 3), (255, 0, 0))

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("/moved?a=1", "answered 302"),
            ("/missing", "answered 404"),
            ("/slow", "did not give it"),
            ("/silent", "did not give it"),
            ("/large", "larger than"),
            ("/a b\r\nX: y", "did not give it"),
        ],
    )
    def test_what_it_must_not_give(self, fetching, pictures, path, why):
        start = time.monotonic()
        assert why in refused(post(fetching[0], pictured(f"http://{pictures}{path}")))
        assert time.monotonic() - start < 4

    def test_others(self, fetching, pictures):
        port = pictures.partition(":")[2]
        for place in (f"user@{pictures}", f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert "--allow-host" in refused(post(fetching[0], pictured(f"http://{place}/red.png")))
        assert "--allow-host" in refused(post(fetching[0], pictured(f"ftp://{pictures}/red.png")))


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_costing(self, address, engine, stream):
        engine.texts = None
        body = json.dumps({**HELLO, "stream": stream})
        with connected(address) as connection:
            connection.request("POST", "/v1/chat/completions", body, HEADERS)
            assert until(lambda: engine.open == 1)
            if stream:
                assert connection.getresponse().read(5) == b"data:"
            else:
                time.sleep(0.1)
                assert engine.open == 1
        assert until(lambda: engine.open == 0)
        assert engine.replies[0].cancelled
        gone = 'mmkv_answers_total{ended="gone"}'
        assert until(lambda: gone in get(address, "/metrics")[1])

    def test_before_their_body_is_there(self, address, engine):
        with raw_connection(address) as raw:
            raw.sendall(request_of(HELLO)[:-1])
        assert post(address, HELLO)[0] == 200
        assert len(engine.asked) == 1
