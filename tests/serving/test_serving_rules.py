"""Single rules of the server by hand."""

import asyncio
from collections import namedtuple
from types import SimpleNamespace

import pytest

import mmkv
from helpers.models import make_inputs, make_model
from mmkv.attach.attachment import attachment_of
from mmkv.serving import Engine
from mmkv.serving.batch import _let_go
from mmkv.serving.errors import RequestError
from mmkv.serving.memory import Bounds
from mmkv.serving.reply import MOST_LOGPROBS, Sampling, TextStream, overlap

CHUNK = 64
Id = namedtuple("Id", "unique_id")


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


@pytest.mark.parametrize(("budget", "kept"), [(0.2, 80), (0.01, 3 + 4)])
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


@pytest.mark.parametrize(
    ("text", "stop", "n"),
    [
        ("abc", "xyz", 0),
        ("abc<", "<end>", 1),
        ("<end", "<end>", 4),
        ("<end>", "<end>", 0),
        ("", "x", 0),
    ],
)
def test_what_may_begin_a_stop_text(text, stop, n):
    assert overlap(text, stop) == n


class Bytes:
    """A tokenizer of single bytes, of which 0 is a special token."""

    def decode(self, tokens, skip_special_tokens=False):
        shown = [x for x in tokens if x or not skip_special_tokens]
        return bytes(shown).decode(errors="replace")


def test_a_reply_shows_whole_characters_and_no_special_tokens():
    stream = TextStream(Bytes())
    assert [stream.add(x) for x in b"a\x00\xe2\x82\xacb"] == ["a", "", "", "", "€", "b"]


def test_more_likely_tokens_than_are_told_are_refused():
    Sampling(logprobs=MOST_LOGPROBS)
    for n in (-1, MOST_LOGPROBS + 1):
        with pytest.raises(ValueError, match=f"logprobs={n}: expected 0 to {MOST_LOGPROBS}"):
            Sampling(logprobs=n)


class TestPrefixRouter:
    """Which of Ray's replicas it chooses, by what these hold."""

    def choose(self, key, held, busy=4):
        pytest.importorskip("ray.serve", reason="pip install 'mmkv[ray]'")
        from mmkv.serving.cluster import PrefixRouter

        class Router(PrefixRouter):
            replica_queue_len_cache = held

        router = object.__new__(Router)
        router.initialize_state(busy=busy)
        replicas = [SimpleNamespace(replica_id=Id(x)) for x in "abc"]
        pending = None if key is None else SimpleNamespace(args=[key])
        found = asyncio.run(router.choose_replicas(replicas, pending))
        return [[x.replica_id.unique_id for x in group] for group in found]

    def test_without_a_key_all_are_offered(self):
        assert self.choose("", {}) == self.choose(None, {}) == [["a", "b", "c"]]

    def test_a_key_has_an_order_and_the_busy_come_last(self):
        order = [x for (x,) in self.choose("key", {})]
        assert sorted(order) == ["a", "b", "c"]
        held = {Id(order[0]): 4, Id(order[1]): 3}
        assert [x for (x,) in self.choose("key", held)] == [order[1], order[2], order[0]]

    def test_a_replica_of_which_nothing_is_known_is_not_busy(self):
        for key in map(str, range(20)):  # "a" has one request, "b" none
            order = self.choose(key, {Id("a"): 1, Id("b"): 0}, busy=1)
            assert order[-1] == ["a"]


def test_a_prompt_without_a_prefix_shares_nothing(text_model):
    with mmkv.wrapped(text_model, "full"), Engine(text_model) as engine:
        reply = engine.submit(inputs=make_inputs("llama", (20,)), max_new_tokens=2)
        reply.result(60)
    assert not reply.usage.shared


def test_one_best_answer_of_several_is_what_is_given():
    pytest.importorskip("pydantic", reason="pip install 'mmkv[serve]'")
    from mmkv.serving.api import CompletionRequest

    CompletionRequest(model="m", prompt="a", n=2, best_of=1).replies()
    with pytest.raises(RequestError, match="best_of"):
        CompletionRequest(model="m", prompt="a", n=2, best_of=3).replies()
