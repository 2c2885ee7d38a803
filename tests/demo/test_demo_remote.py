"""The image chat answered by a server: what it is sent, what it says, and what goes wrong."""

from __future__ import annotations

import dataclasses
import socket

import pytest

import mmkv
from helpers.serving import WrittenEngine, listening, until
from mmkv import chat
from mmkv.builtin import example_pictures
from mmkv.cli import commands
from mmkv.demo import session, views
from mmkv.demo.values import Settings
from mmkv.serving import Busy, Engine, Refused

remote = pytest.importorskip("mmkv.demo.remote", reason="pip install 'mmkv[demo]'")
server = pytest.importorskip("mmkv.serving.server", reason="pip install 'mmkv[serve]'")
ServedModel, Server = remote.ServedModel, remote.Server
QUESTION, NEXT = "Describe the picture.", "How many objects are in the picture?"
SHORT = Settings(policy="snapkv", budget=0.3, max_new_tokens=12)


@pytest.fixture(scope="module")
def served():
    """A server of the built-in model, and its engine."""
    model, processor = mmkv.load_builtin()
    mmkv.wrap(model, budget=0.2)
    with (
        Engine(model, processor) as engine,
        listening(server.app(engine, name="shapes")) as address,
    ):
        yield address, engine


@pytest.fixture
def written():
    """A talk with a server whose answers are written beforehand, and what writes them."""
    engine = WrittenEngine()
    with listening(server.app(engine, name="shapes")) as address:
        yield ServedModel(Server(address), "shapes").conversation(), engine


@pytest.fixture(scope="module")
def picture():
    return chat.read_picture(example_pictures()[0])


def parts(question, *pictures):
    shown = [{"type": "image", "image": x} for x in pictures]
    return [*shown, {"type": "text", "text": question}]


def test_two_turns_are_the_engines(served, picture):
    """The pictures, the earlier answers, the policy and its budget arrive; the counts come back."""
    address, engine = served
    there = Server(f"{address}/v1/")
    offered = session.Engines(there.models(), lambda name: ServedModel(there, name))
    assert offered.names == ["shapes"]
    tab = session.Session(offered)
    tab.use(picture)
    turns = list(tab.ask(QUESTION, SHORT, "shapes"))
    assert not any(x.done for x in turns[:-1])
    *_, first = turns
    *_, second = tab.ask(NEXT, dataclasses.replace(SHORT, policy="h2o", budget=0.5), "shapes")
    asked = [{"role": "user", "content": parts(QUESTION, picture)}]
    for turn, policy, budget in ((first, "snapkv", 0.3), (second, "h2o", 0.5)):
        given = {"policy": policy, "budget": budget, "max_new_tokens": 12}
        reply = engine.submit(asked, **given)
        side = turn.compressed
        assert side.text == reply.result(60)[1].strip()
        assert side.tokens == reply.usage.completion_tokens
        assert side.nbytes == reply.usage.cache_bytes > 0
        assert side.kept == reply.usage.kept_tokens / reply.usage.prompt_tokens < 1
        assert side.first > 0
        assert side.rate > 0
        counts = f"{reply.usage.kept_tokens} of the prompt's {reply.usage.prompt_tokens} tokens"
        assert counts in turn.notes[0]
        assert turn.done
        asked += [{"role": "assistant", "content": side.text}]
        asked += [{"role": "user", "content": parts(NEXT)}]
    assert (first.picture, second.picture) == (first.picture, None)
    shown = views.conversation(tab.turns)
    assert "Full cache" not in shown
    assert "meter" not in shown
    assert f"<dd>{100 * first.compressed.kept:.0f}%</dd>" in shown
    tab.clear()
    assert tab.turns == []


def test_draws_and_a_policy_without_a_budget_are_sent(written):
    talk, engine = written
    settings = Settings(policy="full", temperature=0.5, seed=3, max_new_tokens=7)
    *_, turn = talk.ask(NEXT, None, settings)
    assert (turn.compressed.text, turn.label) == ("A red circle.", "full")
    (asked,) = engine.asked
    assert (asked["policy"], asked["budget"], asked["max_new_tokens"]) == ("full", None, 7)
    assert (asked["sampling"].temperature, asked["sampling"].seed) == (0.5, 3)


def test_stop_ends_an_answer_that_hangs(written):
    talk, engine = written
    engine.texts = None
    for turn in talk.ask(QUESTION, None, SHORT):
        if turn.compressed.text:
            talk.stop()
    assert (turn.compressed.text, turn.notes) == ("A", ("Stopped before the end.",))
    assert until(lambda: engine.open == 0)
    engine.texts = ["B."]
    *_, turn = talk.ask(NEXT, None, SHORT)
    assert turn.compressed.text == "B."
    assert [x["role"] for x in engine.asked[-1]["messages"]] == ["user", "assistant", "user"]


def test_a_page_that_is_left_ends_its_answer(written):
    talk, engine = written
    engine.texts = None
    turns = talk.ask(QUESTION, None, SHORT)
    while not next(turns).compressed.text:
        pass
    turns.close()
    assert until(lambda: engine.open == 0)
    assert talk.turns == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Refused("a prompt of 9 tokens is too long"), "the server refused: a prompt of 9 tokens"),
        (Busy("5 requests wait already"), "the server refused: 5 requests wait"),
        (KeyError("x"), "the server refused: the server failed"),
    ],
)
def test_what_a_server_refuses_is_said_and_changes_nothing(written, error, said):
    talk, engine = written
    engine.refusal = error
    with pytest.raises(ValueError, match=said):
        list(talk.ask(QUESTION, None, SHORT))
    engine.refusal = None
    *_, turn = talk.ask(QUESTION, None, SHORT)
    assert talk.turns == [turn]
    assert len(engine.asked[-1]["messages"]) == 1


def test_an_answer_that_fails_halfway_is_said(written):
    talk, engine = written
    engine.texts, engine.finish, engine.error = ["A ", "red "], "error", RuntimeError("lost")
    with pytest.raises(ValueError, match="the server refused: the engine failed"):
        list(talk.ask(QUESTION, None, SHORT))
    assert talk.turns == []


def test_a_key_is_asked_for_and_given():
    with listening(server.app(WrittenEngine(), name="shapes", api_key="k")) as address:
        for key in (None, "other"):
            with pytest.raises(ValueError, match=r"Incorrect API key .* MMKV_API_KEY"):
                Server(address, key).models()
        there = Server(address, "k")
        assert there.models() == ["shapes"]
        *_, turn = ServedModel(there, "shapes").conversation().ask(QUESTION, None, SHORT)
        assert turn.compressed.text


def test_what_only_a_model_here_can_do_is_refused(written):
    for more in ({"options": {"window": 4}}, {"kv_dtype": "int8"}):
        with pytest.raises(ValueError, match="without other options"):
            list(written[0].ask(QUESTION, None, dataclasses.replace(SHORT, **more)))


def closed_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--server", "PORT"], "no server answers at http://127.0.0.1:"),
        (["--server", "127.0.0.1:8000"], "expected an address as http://"),
        (["--server", "http://[::1"], "expected an address as http://"),
        (["--server", "PORT", "--model", "builtin"], "leave out --model"),
    ],
)
def test_a_server_that_is_away_is_one_line(words, said, capsys):
    there = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(SystemExit) as end:
        commands.main(["demo", "--port", "0", *(x.replace("PORT", there) for x in words)])
    told = capsys.readouterr().err
    assert (end.value.code, len(told.splitlines()), said in told) == (2, 1, True), told
    with pytest.raises(ValueError, match="no server answers"):
        list(ServedModel(Server(there), "x").conversation().ask(QUESTION, None, SHORT))


def test_another_kind_of_server_is_said():
    async def page(scope, receive, send):
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"data: <html></html>\n"})

    with listening(page) as address:
        with pytest.raises(ValueError, match="names no model"):
            Server(address).models()
        with pytest.raises(ValueError, match="no chat completion"):
            list(ServedModel(Server(address), "x").conversation().ask(QUESTION, None, SHORT))
