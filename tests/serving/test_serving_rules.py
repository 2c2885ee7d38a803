"""Single rules of the server by hand."""

import asyncio
import base64
import io
import json
import re
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

pytest.importorskip("mmkv.serving.server", reason="pip install 'mmkv[serve]'")

import mmkv
from helpers.marks import since
from helpers.models import make_inputs, make_model
from helpers.serving import WrittenEngine, data_url
from mmkv import calls
from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.calls import CACHE
from mmkv.serving import Busy, Engine, errors, metrics, server
from mmkv.serving import service as services
from mmkv.serving.api import ChatRequest, CompletionRequest
from mmkv.serving.batch import _let_go
from mmkv.serving.errors import RequestError
from mmkv.serving.memory import Bounds
from mmkv.serving.pictures import read_picture
from mmkv.serving.prompts import chunk_size
from mmkv.serving.reply import MOST_LOGPROBS, Sampling
from mmkv.serving.worker import Worker

CHUNK = 64


def promised(policy, budget, tokens, new, behind=0, **options):
    """Bytes promised to a request, and of one pair of keys and values in all layers and heads."""
    model = make_model("llama")
    config = model.config
    with mmkv.wrapped(model, policy, budget, **options):
        at = attachment_of(model)
        bounds = Bounds(at.parts, 4, CHUNK)
        most = bounds.prompt(at.plan.started(), tokens, new, behind)
    rows = config.num_hidden_layers * config.num_key_value_heads
    return most, rows, rows * 2 * config.head_dim * 4


@pytest.mark.parametrize(("tokens", "new", "behind"), [(40, 8, 0), (40, 8, 10), (400, 30, 25)])
def test_a_prompt_that_waits_whole_is_promised_its_slots(tokens, new, behind):
    """All of it and the reply, and an eighth of that or 16 slots."""
    most, _, pair = promised("snapkv", 0.2, tokens, new, behind)
    slots = tokens + new
    assert most == (slots + max(16, slots // 8)) * pair


def test_groups_are_promised_their_weights():
    most, rows, pair = promised("condense", 0.2, 40, 8, heads="uniform")
    assert most == (48 + 16) * (pair + 12 * rows)


@pytest.mark.parametrize(("budget", "kept"), [(0.2, 80), (0.201, 81), (0.01, 3 + 4)])
def test_a_prompt_evicted_in_chunks_is_promised_what_is_kept_and_a_chunk(budget, kept):
    """A fifth of the prompt, or what must be kept where that is more."""
    options = {"window": 4, "sinks": 3, "evict_chunks": True}
    most, _, pair = promised("snapkv", budget, 390, 10, **options)
    slots = kept + CHUNK + 10
    assert most == (slots + max(16, slots // 8)) * pair


@pytest.mark.parametrize("name", ["max_batch", "prefill_chunk", "max_new_tokens"])
def test_an_engine_that_could_do_nothing_is_refused(text_model, name):
    mmkv.wrap(text_model, "full")
    with pytest.raises(ValueError, match=f"{name}=0: expected 1 or more"):
        Engine(text_model, **{name: 0})


def test_an_error_that_a_client_holds_holds_no_frames():
    """They would hold caches; what they say stays as text."""
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        found = error
    _let_go(found)
    for error in (found, found.__cause__):
        assert error.__traceback__ is None
        assert "test_an_error_that_a_client_holds" in error.__notes__[0]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
    ],
)
def test_kinds_of_errors(status, kind):
    assert RequestError("no", status=status).body()["error"]["type"] == kind


def test_more_likely_tokens_than_are_told_are_refused():
    Sampling(logprobs=MOST_LOGPROBS)
    for n in (-1, MOST_LOGPROBS + 1):
        with pytest.raises(ValueError, match=f"logprobs={n}: expected 0 to {MOST_LOGPROBS}"):
            Sampling(logprobs=n)


def test_one_best_answer_of_several_is_what_is_given():
    CompletionRequest(model="m", prompt="a", n=2, best_of=1).replies()
    with pytest.raises(RequestError, match="best_of"):
        CompletionRequest(model="m", prompt="a", n=2, best_of=3).replies()


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        (None, [None, None, None]),
        (0, [0, 1, 2]),
        (2**63 - 2, [2**63 - 2, 2**63 - 1, 0]),
        (-1, [-1, 0, 1]),
        (-(2**63), [-(2**63), 1, 2]),
    ],
)
def test_each_of_several_answers_has_a_seed_that_a_request_may_have(seed, wanted):
    replies = CompletionRequest(model="m", prompt="a", n=3, seed=seed).replies()
    assert [x["sampling"].seed for x in replies] == wanted


def test_a_reply_that_is_alone_keeps_its_own_cache(text_model):
    """The pool is for those that share a step; what it costs, one alone does not pay."""
    inputs = [make_inputs("llama", (30,), seed=i) for i in range(2)]
    members = []
    with mmkv.wrapped(text_model, "full"), Engine(text_model) as engine:
        batch = engine._worker.batch
        text_model.register_forward_hook(lambda *args: members.append(len(batch.pool.members)))
        engine.submit(inputs=inputs[0], max_new_tokens=6).result(60)
        assert members == [0] * 6
        with engine._worker.wake:  # both are there before either is begun
            replies = [engine.submit(inputs=x, max_new_tokens=6) for x in inputs]
        for reply in replies:
            reply.result(60)
    assert max(members) == 2


def test_bounds_of_requests_are_those_of_the_documents():
    limits = errors.Limits()
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    reads, writes = (f"{x:g} seconds" for x in (limits.read_seconds, limits.write_seconds))
    files = f"{limits.picture_bytes // 2**20} MiB"
    for told in (
        f"| body | {limits.body_bytes // 2**20} MiB, within {reads} |",
        f"| pictures | {limits.pictures}, of {files} each and {limits.pixels // 10**6} million",
        f"the limits are {files} and {reads}.",
        f"| {limits.held_bytes // 2**30} GiB of bodies and decoded pictures",
        f"| {limits.connections:,} at a time; headers within {reads}; a client that takes nothing "
        f"of its answer for {writes} is cut off",
    ):
        assert told in text


@pytest.mark.parametrize("n", [3000, 3001, 3002])
def test_the_largest_picture_may_come_as_a_data_url(n):
    """Bytes of the file count, not letters of the URL, which are a third more."""
    file = io.BytesIO()
    Image.new("RGB", (8, 6)).save(file, "PNG")
    raw = base64.b64encode(file.getvalue().ljust(n, b"\0")).decode()
    for most, fits in ((n, True), (n - 1, False), (n // 2, False)):
        limits = errors.Limits(picture_bytes=most)
        if fits:
            assert read_picture(f"data:image/png;base64,{raw}", limits, (), 100).size == (8, 6)
            continue
        with pytest.raises(RequestError, match="cannot read a picture: larger than 0"):
            read_picture(f"data:image/png;base64,{raw}", limits, (), 100)
    limits = errors.Limits(picture_bytes=3 * 2**19)
    with pytest.raises(RequestError, match=r"larger than 1\.5 MiB"):
        read_picture(f"data:image/png;base64,{'A' * 2**22}", limits, (), 100)


def test_letters_that_are_no_base64_are_refused():
    url = data_url(Image.new("RGB", (8, 6)))
    assert read_picture(url, errors.Limits(), (), 100).size == (8, 6)
    with pytest.raises(RequestError, match="cannot read a picture"):
        read_picture(url.replace(",", ",!"), errors.Limits(), (), 100)


def test_a_reply_whose_tokens_compete_has_no_bound_of_its_own():
    """More may come to be held than when it began: the prompt's bound stays."""
    model, inputs = make_model("llama"), make_inputs("llama", (60,))
    for options, bounded in (
        ({}, True),
        ({"decode": "rounds", "every": 4, "latest": 3}, False),
        ({"postpone": 4}, False),
    ):
        with mmkv.wrapped(model, "condense", 0.4, least=0, **options), torch.no_grad():
            cache = model(**inputs, use_cache=True).past_key_values
            bound = Bounds(attachment_of(model).parts, 4, CHUNK).reply(cache, 8)
        assert (bound is not None) == bounded
        if bounded:
            assert bound > cache.nbytes


def test_times_are_counted_in_steps_of_a_decade():
    """Three of them, as dashboards that show the metrics know them."""
    page = metrics.Metrics(WrittenEngine()).page().decode()

    def buckets(name):
        found = re.findall(rf'^mmkv_{name}_bucket{{le="(.+)"}} 0\.0$', page, re.MULTILINE)
        assert found.pop() == "+Inf"
        return [float(x) for x in found]

    def decades(*steps):
        return sorted(x * 10.0**k for k in range(-3, 3) for x in steps)

    first = [x for x in decades(1, 2.5, 5) if 0.009 < x < 101]
    assert buckets("time_to_first_token_seconds") == pytest.approx(first)
    later = [x for x in decades(1, 2, 5) if 0.0019 < x < 2.1]
    assert buckets("time_between_tokens_seconds") == pytest.approx(later)
    shares = buckets("kept_share")
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.05, 1.0)


@since("5.23")
def test_a_prompt_with_pictures_is_read_at_once_where_they_cannot_be_encoded_before(monkeypatch):
    model = make_model("llava-llama")
    inputs = make_inputs("llava-llama", (60,))
    text = {k: x for k, x in inputs.items() if not x.is_floating_point()}
    with mmkv.wrapped(model, "full"):
        at = attachment_of(model)
        assert chunk_size(at, inputs, CHUNK) == chunk_size(at, text, CHUNK) == CHUNK
        monkeypatch.setattr(model, "_supports_mm_encoder_outputs", lambda: False)
        assert (chunk_size(at, inputs, CHUNK), chunk_size(at, text, CHUNK)) == (None, CHUNK)
        assert chunk_size(at, {**text, "token_type_ids": text["input_ids"]}, CHUNK) is None


def test_older_releases_read_pictures_and_what_follows_a_cache_at_once(monkeypatch):
    """They do not look at pictures in chunks: the engine reads those at once, `wrap` refuses."""
    monkeypatch.setattr(calls, "_RELEASE", (5, 20))
    chunked = {"max_new_tokens": 1, "prefill_chunk_size": CHUNK}
    for name, pictures in (("llama", False), ("llava-llama", True)):
        model, inputs = make_model(name), make_inputs("llama", (60,))
        with mmkv.wrapped(model, "full"), torch.no_grad():
            at = attachment_of(model)
            new = CompressedCache(at.parts.config, at.plan)
            for given in (inputs, {**inputs, CACHE: new}):
                assert chunk_size(at, given, CHUNK) == (None if pictures else CHUNK)
            begun = model(**inputs, use_cache=True).past_key_values
            assert chunk_size(at, {**inputs, CACHE: begun}, CHUNK) is None
            more = {k: torch.cat([x, x], 1) for k, x in inputs.items()} | {CACHE: begun}
            for given in (make_inputs(name, (60,)), more)[not pictures :]:
                with pytest.raises(ValueError, match=f"prefill_chunk_size={CHUNK}.* update"):
                    model.generate(**given, **chunked)


INF = float("inf")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", (0, 100.0), (-0.1, INF, float("nan"))),
        ("top_p", (1e-9, 1), (0, -0.1, 1.1)),
        ("top_k", (0, 1), (-1,)),
        ("min_p", (0, 1), (-0.1, 1.1)),
        ("repetition_penalty", (None, 1e-9, 100), (0, -1, INF)),
        ("presence_penalty", (-9, 0, 9), (INF, -INF, float("nan"))),
        ("frequency_penalty", (-9, 0, 9), (INF, -INF, float("nan"))),
        ("stop", ((), ("a", "b")), ("a", ("",), (3,), ("a", None))),
    ],
)
def test_what_tokens_are_chosen_by_has_its_range(name, good, bad):
    for value in good:
        Sampling(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"{name}=.*: expected "):
            Sampling(**{name: value})


@pytest.mark.parametrize(("temperature", "draws"), [(0, False), (9e-7, False), (1e-6, True)])
def test_a_temperature_that_float32_divides_by_draws(temperature, draws):
    assert Sampling(temperature=temperature).draws == draws


class TestConnection:
    """What ends a connection, by a loop that notes what is to be done after how many seconds."""

    @pytest.fixture
    def made(self):
        made, timers = object.__new__(server._Connection), []

        def call_later(seconds, function):
            timers.append(seconds)
            return SimpleNamespace(cancel=lambda: timers.remove(seconds))

        made._limits = server.Limits(read_seconds=3, write_seconds=5)
        made._timers, made.cycle = {}, None
        made.loop = SimpleNamespace(call_later=call_later)
        made.transport = SimpleNamespace(abort=None, is_closing=lambda: False)
        return made, timers

    def test_the_time_for_a_request_begins_once_and_ends_with_it(self, made, monkeypatch):
        """However often a piece of it comes; else one timer would be left, and end the answer."""
        connection, timers = made
        cycles = [None, None, None, SimpleNamespace(response_complete=False)]

        def receive(connection, data):
            connection.cycle = cycles.pop(0)

        monkeypatch.setattr(server.H11Protocol, "data_received", receive)
        monkeypatch.setattr(server.H11Protocol, "on_response_complete", lambda connection: None)
        for _ in range(3):
            connection.data_received(b"")
            assert timers == [3]
        connection.data_received(b"")
        assert timers == []
        connection.cycle.response_complete = True
        for _ in range(2):
            connection.on_response_complete()
            assert timers == [3]

    def test_one_that_closes_is_not_waited_for(self, made):
        connection, timers = made
        connection.transport.is_closing = lambda: True
        connection._look()
        assert timers == []

    def test_the_time_to_read_an_answer_runs_while_it_is_not_read(self, made):
        connection, timers = made
        connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
        connection.pause_writing()
        assert timers == [5]
        connection.resume_writing()
        assert timers == []


class TestBodies:
    """What is read of a request; 40 bytes at the most, and 100 of all requests together."""

    def read(self, pieces, headers=None, room=100):
        """The body, or the status of what is answered in its place; and what room is left."""

        def taken(raw, kind, **_):
            return SimpleNamespace(raw=raw, model=None)

        async def stream():
            for piece in pieces:
                if piece is None:
                    await asyncio.sleep(60)
                yield piece

        service = object.__new__(services.Service)
        service.limits, service.room = errors.Limits(body_bytes=40, read_seconds=0.05), room
        service._ignore_unknown = False
        given = {"content-type": "application/json", **(headers or {})}
        request = SimpleNamespace(headers=given, stream=stream)
        with ExitStack() as ending, pytest.MonkeyPatch.context() as patch:
            patch.setattr(services, "read", taken)
            try:
                found = asyncio.run(service._read(request, None, ending)).raw
            except RequestError as error:
                found = error.status
            left = service.room
        assert service.room == room
        return found, left

    def test_one_that_is_whole(self):
        assert self.read([b"a" * 30, b"b" * 10]) == (b"a" * 30 + b"b" * 10, 60)
        assert self.read([b"a" * 40], {"content-length": "40"}, room=40) == (b"a" * 40, 0)

    def test_one_that_is_too_large(self):
        assert self.read([b"a" * 30, b"b" * 11])[0] == 413
        assert self.read([None], {"content-length": "41"}) == (413, 100)

    def test_one_that_does_not_come(self):
        assert self.read([b"a" * 30, None]) == (408, 70)

    def test_one_for_which_there_is_no_room(self):
        assert self.read([b"a" * 40], room=39) == (429, 39)

    @pytest.mark.parametrize("kind", ["", "text/plain", "application/jsonp"])
    def test_one_that_a_page_could_send_unasked(self, kind):
        assert self.read([b"{}"], {"content-type": kind}) == (415, 100)
        assert self.read([b"{}"], {"content-type": "Application/JSON; charset=utf-8"})[0] == b"{}"


@pytest.mark.parametrize(
    ("how", "reason"), [("cancel", "cancelled"), ("late", "timeout"), ("close", "cancelled")]
)
def test_a_prompt_that_is_over_is_read_no_further(text_model, how, reason):
    """And its reply ends, whatever the reason."""
    chunks = []
    with mmkv.wrapped(text_model, "full"), Engine(text_model, prefill_chunk=16) as engine:
        worker = engine._worker

        def look(*args):
            chunks.append(1)
            if len(chunks) == 2:
                (request,) = worker.reading
                if how == "cancel":
                    request.reply.cancel()
                elif how == "late":
                    request.deadline = 0.0
                else:
                    engine.close()

        text_model.register_forward_hook(look)
        reply = engine.submit(inputs=make_inputs("llama", (90,)), max_new_tokens=4)
        assert reply.result(60) == ([], "")
        assert reply.finish_reason == reason
        assert len(chunks) == 2
        assert engine.stats().prefilling == engine.stats().cache_bytes == 0


def test_replies_take_a_step_within_a_chunk_that_takes_longer_than_the_last():
    worker, steps = object.__new__(Worker), []
    worker.batch = SimpleNamespace(running=[1])
    worker._interrupts = lambda: True
    worker._take_turns = lambda: steps.append(1)
    worker._spent, worker._rested, worker._gap = 0.0, time.perf_counter(), 1e9
    worker._between()
    assert (steps, worker._spent) == ([], 0.0)
    worker._gap = 0.0
    worker._between()
    assert steps == [1]
    assert worker._spent > 0
    worker.batch.running = []
    worker._between()
    assert steps == [1]


@pytest.mark.parametrize(("prompts", "n", "fits"), [(128, 1, True), (129, 1, False), (64, 2, True)])
def test_replies_of_one_request_are_at_most_128(prompts, n, fits):
    asked = CompletionRequest(model="m", prompt=["a"] * prompts, n=n)
    if fits:
        assert len(asked.replies()) == 128
    else:
        with pytest.raises(RequestError, match="at most 128 replies"):
            asked.replies()


@pytest.mark.parametrize(("n", "told"), [(500, "x" * 500), (501, "x" * 500 + " ...")])
def test_what_is_told_is_at_most_500_letters(n, told):
    assert RequestError("x" * n).body()["error"]["message"] == told


@pytest.mark.parametrize("n", [40, 41])
def test_a_kind_of_part_is_told_up_to_its_fortieth_letter(n):
    part = {"role": "user", "content": [{"type": "x" * n}]}
    body = json.dumps({"model": "m", "messages": [part]}).encode()
    with pytest.raises(RequestError, match=f"parts of type '{'x' * 40}' are not read here"):
        errors.read(body, ChatRequest)


def test_tokens_and_bytes_of_replies_are_counted(text_model):
    """Tokens as they come; of those in the pool too, what each held at the end if that is more."""
    counted = []

    def note_tokens(reply):
        put = reply.put

        def note(*told):
            put(*told)
            counted.append((len(reply.tokens), reply.usage.completion_tokens))

        reply.put = note

    inputs, new = [make_inputs("llama", (30,), seed=i) for i in range(3)], 60
    config = text_model.config
    pair = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4
    with mmkv.wrapped(text_model, "full"), Engine(text_model) as engine:
        with engine._worker.wake:
            replies = [engine.submit(inputs=x, max_new_tokens=new) for x in inputs]
            for reply in replies:
                note_tokens(reply)
        assert [len(x.result(60)[0]) for x in replies] == [new] * 3
        stats = engine.stats()
    assert (stats.tokens_generated, stats.requests_done) == (3 * new, 3)
    assert stats.prompt_tokens == 3 * 30
    assert len(counted) >= 3 * new
    assert all(told == tokens for tokens, told in counted)
    for reply in replies:
        assert reply.usage.cache_bytes >= (30 + new - 1) * pair
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (30, new)


def test_as_many_requests_wait_and_grow_as_may(text_model):
    inputs, most = make_inputs("llama", (30,)), []
    with mmkv.wrapped(text_model, "full"), Engine(text_model, max_batch=2, max_waiting=3) as engine:
        worker = engine._worker
        text_model.register_forward_hook(lambda *args: most.append(len(worker.live())))
        with worker.wake:  # none is begun meanwhile
            replies = [engine.submit(inputs=inputs, max_new_tokens=8) for _ in range(3)]
            with pytest.raises(Busy, match="3 requests wait already"):
                engine.submit(inputs=inputs, max_new_tokens=8)
        assert len({tuple(x.result(60)[0]) for x in replies}) == 1
    assert max(most) == 2
