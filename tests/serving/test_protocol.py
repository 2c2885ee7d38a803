"""What clients of OpenAI's completions send beside a plain conversation, without a model."""

import json
import logging
import time
from contextlib import ExitStack, suppress

import pytest

from helpers.serving import (
    HELLO,
    WrittenEngine,
    listening,
    post,
    raw_connection,
    request_of,
    sent,
    turn,
    until,
)
from mmkv.serving import Sampling

openai = pytest.importorskip("openai", reason="the server is tested with the openai client")
errors = pytest.importorskip("mmkv.serving.errors", reason="pip install 'mmkv[serve]'")
server = pytest.importorskip("mmkv.serving.server", reason="pip install 'mmkv[serve]'")

COMPLETE = {"model": "tiny", "prompt": "Once"}
COMPLETIONS = "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
}


@pytest.fixture(scope="module")
def served():
    engine = WrittenEngine()
    app = server.app(engine, name="tiny")
    with listening(app) as address:
        yield address, engine
        service, held = app.state.service, errors.Limits().held_bytes
        assert until(lambda: service.room == held), "bytes were not given back"


class TestCompletions:
    def test_a_whole_one(self, client, engine):
        answer = client.completions.create(**COMPLETE, max_tokens=7, temperature=0.5)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == (
            "A red circle.",
            "stop",
            None,
        )
        assert (answer.object, answer.usage.total_tokens) == ("text_completion", 13)
        (asked,) = engine.asked
        assert (asked["prompt"], asked["max_new_tokens"]) == ("Once", 7)
        assert asked["sampling"] == Sampling(temperature=0.5)

    def test_a_stream(self, client, engine):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = client.completions.create(**COMPLETE, **options)
        assert [x.choices[0].text for x in pieces] == ["A ", "red ", "circle.", ""]
        assert pieces[-1].choices[0].finish_reason == "stop"
        assert (last.choices, last.usage.total_tokens) == ([], 13)

    @pytest.mark.parametrize(
        ("prompt", "wanted"),
        [(["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
    )
    def test_several_prompts(self, client, engine, prompt, wanted):
        idle = {"best_of": 2, "frequency_penalty": 0, "logprobs": None, "seed": None}
        answer = client.completions.create(model="tiny", prompt=prompt, n=2, **idle)
        assert [x.index for x in answer.choices] == list(range(2 * len(wanted)))
        assert [x["prompt"] for x in engine.asked] == [x for x in wanted for _ in range(2)]
        assert answer.usage.prompt_tokens == 10 * len(wanted)
        assert answer.usage.completion_tokens == 3 * 2 * len(wanted)

    def test_log_probabilities(self, client, engine):
        answer = client.completions.create(**COMPLETE, logprobs=2, echo=True)
        told = answer.choices[0].logprobs
        assert told.tokens == ["A ", "red ", "circle."]
        assert told.token_logprobs == [-0.5] * 3
        assert told.top_logprobs[1] == {"red ": -0.5, "\ufffd": -1.5}
        assert told.text_offset == [0, 2, 6]
        (asked,) = engine.asked
        assert (asked["sampling"].logprobs, asked["sampling"].echo) == (2, True)
        pieces = list(client.completions.create(**COMPLETE, logprobs=0, stream=True))
        assert [x.choices[0].logprobs.text_offset for x in pieces[:-1]] == [[0], [2], [6]]

    @pytest.mark.parametrize("prompt", [3, None, [None], [["a"]]])
    def test_no_prompt(self, address, engine, prompt):
        status, body = post(address, {**COMPLETE, "prompt": prompt}, path=COMPLETIONS)
        assert (status, "prompt" in body["error"]["message"]) == (400, True)


class TestChoices:
    def test_several(self, client, engine):
        answer = client.chat.completions.create(**HELLO, n=3, seed=5, temperature=1.0)
        assert [x.index for x in answer.choices] == [0, 1, 2]
        assert {x.message.content for x in answer.choices} == {"A red circle."}
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 9)
        assert [x["sampling"].seed for x in engine.asked] == [5, 6, 7]

    @pytest.mark.parametrize("n", [1, 2])
    def test_a_prompt_of_more_than_one_is_read_once(self, client, engine, n):
        client.chat.completions.create(**HELLO, n=n)
        assert [x["repeated"] for x in engine.asked] == [n > 1] * n

    def test_several_in_a_stream(self, client, engine):
        texts, ends = {0: "", 1: ""}, {}
        for piece in client.chat.completions.create(**HELLO, n=2, stream=True):
            (choice,) = piece.choices
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason
        assert texts == {0: "A red circle.", 1: "A red circle."}
        assert ends == {0: "stop", 1: "stop"}

    def test_log_probabilities(self, client, engine):
        answer = client.chat.completions.create(**HELLO, logprobs=True, top_logprobs=2)
        told = answer.choices[0].logprobs.content
        assert [(x.token, x.logprob) for x in told] == [
            (text, -0.5) for text in ("A ", "red ", "circle.")
        ]
        assert (told[0].bytes, told[0].top_logprobs[1].bytes) == ([65, 32], None)
        assert engine.asked[0]["sampling"].logprobs == 2
        pieces = list(client.chat.completions.create(**HELLO, logprobs=True, stream=True))
        assert [len(x.choices[0].logprobs.content) for x in pieces[:-1]] == [1, 1, 1]
        assert engine.asked[1]["sampling"].logprobs == 0

    def test_what_tokens_are_chosen_by(self, client, engine):
        more = {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2}
        client.chat.completions.create(
            **HELLO,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": -100},
            stop=None,
            extra_body=more,
        )
        assert engine.asked[0]["sampling"] == Sampling(
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: -100.0},
        )

    def test_formats(self, client, engine):
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        }
        client.chat.completions.create(**HELLO, response_format=form)
        client.chat.completions.create(**HELLO, response_format={"type": "json_object"})
        client.chat.completions.create(**HELLO, response_format={"type": "text"})
        grammars = [x["sampling"].grammar for x in engine.asked]
        assert grammars[2] is None
        found = [json.loads(x)["grammars"][0]["json_schema"] for x in grammars[:2]]
        assert (found[0]["properties"], found[1]["type"]) == (schema["properties"], "object")

    @pytest.mark.parametrize(
        "form",
        [
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_object", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        ],
    )
    def test_a_format_has_a_schema_or_another_type(self, client, form):
        """A schema that a reply need not match would be ignored silently."""
        with pytest.raises(openai.BadRequestError, match=r"json_schema\.schema"):
            client.chat.completions.create(**HELLO, response_format=form)

    def test_log_probabilities_of_an_answer_without_a_token(self, client, engine):
        """An empty list in place of null, which stands where none were asked for."""
        engine.texts = []
        for asked, wanted in ((True, []), (False, None)):
            (choice,) = client.chat.completions.create(**HELLO, logprobs=asked).choices
            assert (choice.message.content, choice.finish_reason) == ("", "stop")
            assert (choice.logprobs and choice.logprobs.content) == wanted
        for asked, wanted in ((0, []), (None, None)):
            answer = client.completions.create(**COMPLETE, logprobs=asked)
            (choice,) = answer.choices
            assert (choice.logprobs and choice.logprobs.tokens) == wanted

    def test_variables_of_the_template(self, client, engine):
        more = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.create(**HELLO, extra_body=more)
        assert engine.asked[0]["template"] == {"enable_thinking": False}


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


class TestTools:
    @pytest.mark.parametrize(
        ("texts", "content", "cities"),
        [
            ([f"<tool_call>\n{CALL}\n</tool_call>"], None, ["Oslo"]),
            (
                [f"I look. <tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}"],
                "I look.",
                ["Oslo"] * 2,
            ),
            (
                ["I", " look. <to", "ol_call>", CALL[:9], CALL[9:], "</tool_call>"],
                "I look.",
                ["Oslo"],
            ),
            (['{"name": "weather", "parameters"', ': {"city": "Oslo"}}'], None, ["Oslo"]),
            ([f"[TOOL_CALLS] [{CALL}, {CALL}]"], None, ["Oslo"] * 2),
            ([f"<|python_tag|>{CALL}"], None, ["Oslo"]),
            ([CALL.replace("weather", "other")], CALL.replace("weather", "other"), []),
            (["<tool_call>no JSON"], "<tool_call>no JSON", []),
            (["[1, 2]"], "[1, 2]", []),
            (["a < b", " and [c]"], "a < b and [c]", []),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_calls(self, client, engine, texts, content, cities, stream):
        engine.texts = texts
        asked = {"tools": [WEATHER], "tool_choice": "auto", "stream": stream}
        answer = client.chat.completions.create(**HELLO, **asked)
        assert engine.asked[0]["template"] == {"tools": [WEATHER]}
        assert engine.asked[0]["sampling"].grammar is None
        if stream:
            deltas = [x.choices[0] for x in answer]
            calls = [y for x in deltas for y in x.delta.tool_calls or []]
            assert [x.index for x in calls] == list(range(len(cities)))
            found, reason = "".join(x.delta.content or "" for x in deltas), deltas[-1].finish_reason
        else:
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            found, calls = message.content, message.tool_calls or []
            assert (found is None) == (content is None)
        assert (found or "").strip() == (content or "")
        assert [json.loads(x.function.arguments)["city"] for x in calls] == cities
        assert all(x.function.name == "weather" and x.id for x in calls)
        assert len({x.id for x in calls}) == len(cities)
        assert reason == ("tool_calls" if cities else "stop")

    @pytest.mark.parametrize(("parallel", "n"), [(False, 1), (True, 2), (None, 2)])
    def test_one_call_where_they_are_not_parallel(self, client, engine, parallel, n):
        engine.texts = [f"[{CALL}, {CALL}]"]
        asked = {**HELLO, "tools": [WEATHER], "parallel_tool_calls": parallel}
        answer = client.chat.completions.create(**asked)
        assert len(answer.choices[0].message.tool_calls) == n
        assert answer.choices[0].finish_reason == "tool_calls"
        deltas = [x.choices[0].delta for x in client.chat.completions.create(**asked, stream=True)]
        assert sum(len(x.tool_calls or []) for x in deltas) == n

    def test_without_tools_a_call_is_text(self, client, engine):
        engine.texts = [CALL]
        answer = client.chat.completions.create(**HELLO, tools=[WEATHER], tool_choice="none")
        assert answer.choices[0].message.content == CALL
        assert engine.asked[0]["template"] == {}

    @pytest.mark.parametrize(
        "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
    )
    def test_a_tool_that_has_to_be_called(self, client, engine, choice):
        engine.texts = [CALL]
        other = {"type": "function", "function": {"name": "other"}}
        answer = client.chat.completions.create(**HELLO, tools=[WEATHER, other], tool_choice=choice)
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
        shape = json.loads(engine.asked[0]["sampling"].grammar)["grammars"][0]["json_schema"]
        names = [x["properties"]["name"]["const"] for x in shape["anyOf"]]
        assert names == (["weather", "other"] if choice == "required" else ["weather"])

    @pytest.mark.parametrize("arguments", ["no JSON", "[" * 10**6])
    def test_calls_that_are_no_calls(self, address, engine, arguments):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        assert post(address, turn("assistant", None, tool_calls=[call]))[0] == 200
        (told,) = engine.asked[0]["messages"][0]["tool_calls"]
        assert told["function"]["arguments"] == arguments

    def test_calls_that_are_sent_back(self, client, engine):
        call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "user", "content": "Is it warm?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
            ],
            tools=[WEATHER],
        )
        _, called, told = engine.asked[0]["messages"]
        assert called["content"] == ""
        function = {"name": "weather", "arguments": {"city": "Oslo"}}
        assert called["tool_calls"] == [{"type": "function", "id": "c1", "function": function}]
        assert told == {"role": "tool", "content": "12 degrees", "tool_call_id": "c1"}


class TestSentences:
    """What is wrong is told in one plain sentence."""

    @pytest.mark.parametrize(
        ("body", "told"),
        [
            (turn("user", None), "messages[0].content is null: give a text"),
            ({**HELLO, "messages": [{"role": "user"}]}, "messages[0].content is null: give a text"),
            (turn("user", 3), "messages[0].content: expected a text or a list of parts, not 3"),
            (
                turn("user", [{"type": "input_audio", "input_audio": {}}]),
                "messages[0].content[0]: parts of type 'input_audio' are not read here, only text "
                "and image_url",
            ),
            (
                turn("user", [{"text": "x"}]),
                "messages[0].content[0]: a part needs a type: text and image_url",
            ),
            (
                turn("user", [{"type": "image_url", "image_url": {}}]),
                "messages[0].content[0].image_url.url is missing",
            ),
            (turn("user", "", mood="glad"), "messages[0].mood is not known here: leave it out"),
            (
                turn("user", [{"type": "text", "text": 3}]),
                "messages[0].content[0].text: input should be a valid string",
            ),
            ({"messages": HELLO["messages"]}, "model is missing"),
            ({**HELLO, "stop": ["x"] * 17}, "stop: list should have at most 16 items"),
            ({**HELLO, "temperature": "hot"}, "temperature: input should be a valid number"),
            ({**HELLO, "top_p": 2}, "top_p: input should be less than or equal to 1"),
            (b"{", "the body is no JSON that can be read"),
            (b"[" * 10_000, "the body is no JSON that can be read"),
            ([], "body: expected an object, not []"),
            ({**HELLO, "audio": {"voice": "x"}}, "audio is not supported: leave it out"),
        ],
    )
    def test_of_a_request(self, address, engine, body, told):
        status, answer = post(address, body)
        message = answer["error"]["message"]
        assert status == 400
        assert message.startswith(told), message
        assert "\n" not in message
        assert not any(x in message for x in ("tagged-union", "pydantic", "list[", "str."))
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert engine.asked == []

    def test_what_is_ignored(self, engine, caplog):
        caplog.set_level(logging.WARNING, "mmkv.serving")
        odd = {"type": "text", "text": "Hello", "mood": 1}
        turns = [{"role": "user", "content": [odd], "cache": i, "audio": None} for i in range(3)]
        tool = {**WEATHER, "function": {**WEATHER["function"], "mood": 1}}
        bodies = [
            {**HELLO, "beam_width": 3, "functions": [{"name": "f"}], "user": "x"},
            {**HELLO, "messages": turns, "mmkv": {"budget": 0.5, "speed": 2}, "tools": [tool]},
            {**HELLO, **{f"\n{i}": 0 for i in range(100)}},
            HELLO,
        ]
        with listening(server.app(engine, name="tiny", ignore_unknown=True)) as address:
            for body in bodies:
                assert post(address, body)[0] == 200
            told = [x.getMessage() for x in caplog.records if x.name.startswith("mmkv")]
            assert post(address, {**HELLO, "messages": turns}, path="/tokenize")[0] == 200
            assert post(address, {"prompt": "x", "beam_width": 3}, path="/tokenize")[0] == 200
        assert told[:2] == [
            "ignored in a request: 'beam_width, functions'",
            "ignored in a request: 'messages[].cache, messages[].content[].mood, mmkv.speed, "
            "tools[].function.mood'",
        ]
        assert len(told) == 3
        assert len(told[2]) < 300
        assert "\n" not in told[2]
        assert engine.asked[1]["template"] == {"tools": [WEATHER]}
        assert engine.asked[1]["messages"] == [{"role": "user", "content": "Hello"}] * 3
        assert (engine.asked[1]["budget"], "speed" in engine.asked[1]) == (0.5, False)

    @pytest.mark.parametrize(
        ("more", "told"),
        [
            ({"mmkv": {"speed": 2}}, "mmkv.speed is not known here: leave it out"),
            ({"mmkv": {"x" * 5000: 2}}, "mmkv.xxxx"),
            ({"tools": [{**WEATHER, "mood": 1}]}, "tools[0].mood is not known here: leave it out"),
            (turn("user", "x", audio={"id": "a"}), "messages[0].audio"),
        ],
    )
    def test_what_is_not_ignored(self, address, engine, more, told):
        for path in ("/v1/chat/completions", "/tokenize"):
            status, answer = post(address, {**HELLO, **more}, path=path)
            assert status == 400
            if path != "/tokenize" or "mmkv" not in more:  # which is not known there
                assert answer["error"]["message"].startswith(told)


class TestTokens:
    def test_of_a_text_and_of_a_conversation(self, address, engine):
        status, answer = post(address, {"model": "tiny", "prompt": "Once"}, path="/tokenize")
        assert (status, answer) == (200, {"count": 3, "max_model_len": 2048, "tokens": [3, 1, 2]})
        assert post(address, {**HELLO, "tools": [WEATHER]}, path="/tokenize")[0] == 200
        assert engine.asked[0]["prompt"] == "Once"
        assert engine.asked[1]["template"] == {"tools": [WEATHER]}
        assert engine.asked[1]["messages"] == HELLO["messages"]


class TestOrigins:
    PAGE = "https://page.example"

    def test_those_that_are_allowed(self, engine):
        with listening(server.app(engine, name="tiny", allow_origins=[self.PAGE])) as address:
            asks = {"Access-Control-Request-Method": "POST", "Origin": self.PAGE}
            asks["Access-Control-Request-Headers"] = "authorization,content-type"
            status, _, headers = sent(address, b"", headers=asks, method="OPTIONS")
            assert (status, headers["access-control-allow-origin"]) == (200, self.PAGE)
            assert "authorization" in headers["access-control-allow-headers"]
            status, _, headers = sent(address, HELLO, headers={"Origin": self.PAGE})
            assert (status, headers["access-control-allow-origin"]) == (200, self.PAGE)
            other = {**asks, "Origin": "https://evil.example"}
            assert sent(address, b"", headers=other, method="OPTIONS")[0] == 400
            assert sent(address, HELLO, headers={"Origin": other["Origin"]})[0] == 403

    def test_none(self, address, engine):
        status, body, headers = sent(address, HELLO, headers={"Origin": self.PAGE})
        assert (status, "access-control-allow-origin" in headers) == (403, False)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert engine.asked == []


class TestOwners:
    @pytest.mark.parametrize("shared", ["key", "all"])
    def test_a_key_is_the_owner_of_what_it_shares(self, engine, shared):
        keys = ["one", "two"]
        app = server.app(engine, name="tiny", api_keys=keys, share_prefixes=shared)
        with listening(app) as address:
            for key in (*keys, "one"):
                assert post(address, HELLO, headers={"Authorization": f"Bearer {key}"})[0] == 200
            assert post(address, HELLO, headers={"Authorization": "Bearer three"})[0] == 401
        owners = [x["owner"] for x in engine.asked]
        if shared == "all":
            assert owners == [None] * 3
        else:
            assert owners[0] == owners[2] != owners[1]
            assert not any(key in owner for key in keys for owner in owners)


def ended(raw, seconds):
    """Whether the other side closes in time; what it sends is read."""
    raw.settimeout(seconds)
    try:
        while raw.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


class TestConnections:
    LIMITS = errors.Limits(read_seconds=0.5, write_seconds=0.5)

    @pytest.mark.slow
    def test_headers_without_an_end(self, engine):
        with listening(server.app(engine, name="tiny", limits=self.LIMITS)) as address:
            with raw_connection(address) as silent, raw_connection(address) as slow:
                start = time.monotonic()
                slow.sendall(b"GET /health HTTP/1.1\r\nHo")
                try:
                    while time.monotonic() < start + 3:
                        slow.sendall(b"x")
                        time.sleep(0.05)
                except OSError:
                    pass
                assert time.monotonic() - start < 2
                assert ended(silent, 2)
            with raw_connection(address) as again:
                again.sendall(request_of(HELLO) + b"GET /he")
                start = time.monotonic()
                assert ended(again, 3)
                assert time.monotonic() - start < 2

    def test_more_than_may_be_open(self, engine):
        limits = errors.Limits(connections=3)
        with listening(server.app(engine, name="tiny", limits=limits)) as address:
            with ExitStack() as held:
                *_, last = [held.enter_context(raw_connection(address)) for _ in range(3)]
                with raw_connection(address) as more:
                    assert more.recv(100).startswith(b"HTTP/1.1 503 ")
                    assert ended(more, 5)
                last.sendall(request_of(HELLO))
                assert last.recv(12) == b"HTTP/1.1 200"

            def again():
                with suppress(OSError):  # closed while it was still sending
                    return post(address, HELLO)[0] == 200

            assert until(again)

    @pytest.mark.slow
    @pytest.mark.parametrize("seconds", [0.5, 60])
    def test_a_client_that_does_not_read(self, engine, seconds):
        """It is cut off in time; before that, the bytes of its request are given back."""
        limits = errors.Limits(write_seconds=seconds)
        engine.texts = ["x" * 2**20] * 32
        app = server.app(engine, name="tiny", limits=limits)
        with listening(app) as address, raw_connection(address) as raw:
            raw.sendall(request_of({**HELLO, "stream": True, "user": "x" * 10**6}))
            service = app.state.service
            assert until(lambda: engine.asked)
            assert until(lambda: service.room == limits.held_bytes)
            if seconds < 1:  # it is cut off, and what is left of the answer is sent nowhere
                page = app.state.service.metrics.page
                assert until(lambda: b'ended="stop"' in page())
            raw.settimeout(5)
            total = 0
            try:
                while piece := raw.recv(2**20):
                    total += len(piece)
                    if piece.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                        break
            except OSError:
                pass
            assert (total > 2**25) == (seconds == 60)
