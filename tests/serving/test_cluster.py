"""Replicas through Ray Serve."""

import asyncio
import pickle
import sys
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest
from PIL import Image

from helpers.commands import complaint
from helpers.serving import data_url, listening, until
from mmkv import serving
from mmkv.serving import Busy, Closed, Event, Refused, Sampling, Usage

openai = pytest.importorskip("openai", reason="the server is tested with the openai client")
server = pytest.importorskip("mmkv.serving.server", reason="pip install 'mmkv[serve]'")
cluster = pytest.importorskip("mmkv.serving.cluster", reason="pip install 'mmkv[ray]'")
ray_errors = pytest.importorskip("ray.exceptions")
RayActorError, TaskCancelledError = ray_errors.RayActorError, ray_errors.TaskCancelledError
HOT, LOST = Sampling(temperature=1.0), RayActorError()
Id = namedtuple("Id", "unique_id")


class TestPrefixKey:
    def messages(self, system="Be short.", question="What?", colour="red"):
        picture = {"type": "image", "image": Image.new("RGB", (4, 4), colour)}
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": [picture, {"type": "text", "text": question}]},
        ]

    def test_is_of_what_requests_share(self):
        assert cluster.prefix_key([{"role": "user", "content": "What?"}]) == ""
        key = cluster.prefix_key(self.messages())
        assert key == cluster.prefix_key(self.messages(question="Where?"))
        assert key != cluster.prefix_key(self.messages(system="Be long."))
        assert key != cluster.prefix_key(self.messages(colour="blue"))


class TestRanked:
    """By what `ranked` says of itself: keys spread, and follow each other."""

    def test_keys_go_to_all_replicas_alike(self):
        first = [cluster.ranked(f"key {i}", dict.fromkeys("abcd", 0), 4)[0] for i in range(400)]
        assert all(60 < first.count(name) < 140 for name in "abcd")

    def test_a_lost_replica_moves_its_own_keys_alone(self):
        for i in range(20):
            order = cluster.ranked(f"key {i}", dict.fromkeys("abcd", 0), 4)
            rest = {name: 0 for name in "abcd" if name != order[1]}
            assert cluster.ranked(f"key {i}", rest, 4) == [order[0], *order[2:]]

    def test_all_are_busy_alike(self):
        first, *rest = cluster.ranked("key", dict.fromkeys("abcd", 0), 4)
        held = dict.fromkeys("abcd", 40)
        assert cluster.ranked("key", {**held, first: 54}, 4) == [first, *rest]
        assert cluster.ranked("key", {**held, first: 56}, 4) == [*rest, first]


class TestPrefixRouter:
    """Which of Ray's replicas it chooses, by what these hold."""

    def choose(self, key, held, busy=4):
        class Router(cluster.PrefixRouter):
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


def test_ray_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mmkv.serving.cluster")
    monkeypatch.delattr(serving, "cluster")
    assert "pip install 'mmkv[ray]'" in complaint(capsys, "serve", "--port", 0, "--replicas", 2)


def test_fewer_at_the_most_than_at_the_least():
    with pytest.raises(ValueError, match="max_replicas=1"):
        cluster.Replicas({}, replicas=2, max_replicas=1)


class UnpicklableError(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, one, two):
        super().__init__("why")


class WrittenReplicas:
    """Each asking gives the next of these: answers, an error to raise, or None to wait for ever."""

    def __init__(self, *answers):
        self.left = iter(answers)
        self.live = self.tokens = self.asked = self.cancelled = 0
        self.closed, self.noted = False, []

    def ask(self, key, given):
        self.asked += 1
        return self.Answers(self, next(self.left))

    def note(self, name, held, usage):
        self.noted.append(name)

    class Answers:
        def __init__(self, replicas, answers):
            self.replicas, self.answers = replicas, iter(answers)

        def __aiter__(self):
            return self

        async def __anext__(self):
            answer = next(self.answers, StopAsyncIteration())
            if answer is None:
                await asyncio.sleep(60)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def cancel(self):
            self.replicas.cancelled += 1


def event(token):
    return "event", (Event(token, f"{token} "), Usage(completion_tokens=token))


END = "end", ("stop", Usage(completion_tokens=3), "a", {})


class TestReply:
    def read(self, replicas, **given):
        reply = cluster._Reply(replicas, "", given)
        tokens = []

        async def read():
            tokens.extend([x.token async for x in reply])

        try:
            asyncio.run(asyncio.wait_for(read(), 20))
        finally:
            assert replicas.live == 0
        return tokens, reply

    def test_of_one_replica(self):
        """Text without a token, the end of one that a stop was looked for in, is not counted."""
        replicas = WrittenReplicas([event(1), ("event", (Event(-1, "end"), Usage())), END])
        tokens, reply = self.read(replicas)
        assert (tokens, reply.finish_reason, replicas.noted) == ([1, -1], "stop", ["a"])
        assert replicas.tokens == 1

    def test_of_one_that_dies_and_another(self):
        whole = [event(1), event(2), event(3), END]
        replicas = WrittenReplicas([LOST], [*whole[:2], LOST], whole)
        tokens, reply = self.read(replicas)
        assert (tokens, reply.finish_reason, replicas.tokens) == ([1, 2, 3], "stop", 3)

    def test_of_another_that_says_something_else(self):
        replicas = WrittenReplicas([event(1), event(2), LOST], [event(1), event(7), END])
        with pytest.raises(cluster.RequestError, match="lost") as caught:
            self.read(replicas)
        assert caught.value.status == 503

    def test_of_none_that_lives(self, monkeypatch):
        """It is asked again soon, and later each time."""
        replicas, waited = WrittenReplicas(*[[LOST]] * 9), []

        async def sleep(seconds):
            waited.append(seconds)

        monkeypatch.setattr(cluster.asyncio, "sleep", sleep)
        with pytest.raises(cluster.RequestError, match="lost") as caught:
            self.read(replicas)
        assert (caught.value.status, replicas.asked) == (503, 4)
        assert waited == pytest.approx([0.2, 0.4, 0.6])

    def test_of_none_that_answers(self):
        _, reply = self.read(WrittenReplicas([event(1), None]), timeout=0.2)
        assert reply.finish_reason == "timeout"

    def test_of_a_cluster_that_is_closed(self):
        replicas = WrittenReplicas([LOST])
        replicas.closed = True
        assert self.read(replicas)[1].finish_reason == "cancelled"

    @pytest.mark.parametrize(
        "error",
        [
            *(Refused("why", "a code"), Busy("why"), Closed("why")),
            *(ValueError("why"), OSError("why"), TimeoutError("why"), UnpicklableError(1, 2)),
        ],
    )
    def test_of_one_that_does_not_reply(self, error):
        sent = pickle.loads(pickle.dumps(cluster._portable(error)))
        known = isinstance(error, Refused | Busy | Closed)
        kind = type(error) if known else Refused if type(error) is ValueError else RuntimeError
        with pytest.raises(kind, match="why") as caught:
            self.read(WrittenReplicas([("error", sent)]))
        assert getattr(caught.value, "code", None) == getattr(error, "code", None)

    def test_that_is_left(self):
        replicas = WrittenReplicas([event(1), None])

        async def leave():
            reply = cluster._Reply(replicas, "", {})
            events = aiter(reply)
            await anext(events)
            await events.aclose()
            return reply.finish_reason

        assert asyncio.run(leave()) == "cancelled"
        assert (replicas.live, replicas.cancelled) == (0, 1)

    def test_that_is_cancelled(self):
        """It ends as one of an engine does; what ends the task that reads it goes through."""

        async def read(replicas, cancels):
            reply = cluster._Reply(replicas, "", {})
            events = aiter(reply)
            assert (await anext(events))[:2] == (1, "1 ")
            if cancels:
                reply.cancel()
                assert replicas.cancelled == 1
            return [x async for x in events], reply

        for error in (TaskCancelledError(), asyncio.CancelledError()):
            replicas = WrittenReplicas([event(1), error])
            rest, reply = asyncio.run(read(replicas, cancels=True))
            assert (rest, reply.finish_reason, replicas.live) == ([], "cancelled", 0)
            ended = replicas.cancelled
            reply.cancel()
            assert replicas.cancelled == ended
            replicas = WrittenReplicas([event(1), error])
            with pytest.raises(type(error)):
                asyncio.run(read(replicas, cancels=False))
            assert (replicas.live, replicas.asked) == (0, 1)


class TestAskedOfRay:
    """What Ray is asked to do, by one that notes it and does nothing."""

    @pytest.fixture
    def ray(self, monkeypatch):
        asked, given, up = [], [], []

        def init(*args, **options):
            up.append(True)
            asked.append((*args, *[x for x in options if "dashboard" in x or "ip" in x]))

        serve = SimpleNamespace(
            start=lambda **options: asked.append(options["proxy_location"]),
            run=lambda *args, **options: handle,
            delete=lambda name: asked.append(f"delete {name}"),
        )
        handle = SimpleNamespace(
            options=lambda stream: handle if stream else None,
            reply=SimpleNamespace(remote=lambda *args: given.append(args)),
        )
        found = SimpleNamespace(
            init=init,
            serve=serve,
            is_initialized=lambda: bool(up),
            shutdown=lambda: (up.clear(), asked.append("shutdown")),
            asked=asked,
            given=given,
            handle=handle,
        )
        monkeypatch.setattr(cluster, "ray", found)
        monkeypatch.setattr(cluster, "serve", serve)
        made = SimpleNamespace(bind=lambda settings: settings)
        monkeypatch.setattr(cluster, "_deployment", lambda *args: made)
        return found

    @pytest.mark.parametrize(
        ("address", "wanted", "left"),
        [
            (None, ("local", "include_dashboard", "_node_ip_address"), ["shutdown"]),
            ("10.0.0.1:6379", ("10.0.0.1:6379",), ["delete mmkv", "shutdown"]),
        ],
    )
    def test_a_cluster_is_started_here_or_joined(self, ray, address, wanted, left):
        """One that is joined has others to serve when the replicas have ended."""
        found = cluster.Replicas({}, address=address)
        assert ray.asked == [wanted, "Disabled"]
        assert not found.closed
        for _ in range(2):
            found.close()
            assert found.closed
            assert ray.asked[2:] == left

    def test_nothing_is_left_where_no_replica_starts(self, ray):
        def fail(*args, **options):
            raise RuntimeError("no replica")

        ray.serve.run = fail
        with pytest.raises(RuntimeError, match="no replica"):
            cluster.Replicas({})
        assert ray.asked[-1] == "shutdown"

    def test_a_second_replica_draws_what_the_first_has_drawn(self, ray):
        found = cluster.Replicas({})
        for sampling in (None, Sampling(), Sampling(temperature=0.5, seed=0), *[HOT] * 3):
            reply = found.submit(prompt="a", sampling=sampling)
            found.ask(reply._key, reply._given)
            assert ray.given[-1] == ray.given[-2]
        seeds = [given["sampling"].seed for _, given in ray.given[::2]]
        assert seeds[:3] == [None, None, 0]
        assert len(set(seeds[3:])) == 3
        assert all(0 <= seed < 2**63 for seed in seeds[3:])

    def test_requests_that_begin_alike_or_are_repeated_have_a_key(self, ray):
        found = cluster.Replicas({})
        system = [{"role": "system", "content": "Be short."}]
        asked = [{"role": "user", "content": "What?"}]
        keys = {}
        for repeated in (False, True):
            for given in ({"prompt": "a"}, {"prompt": "b"}, {"messages": asked}):
                keys[repeated, str(given)] = found.submit(repeated=repeated, **given)._key
        assert list(keys.values())[:3] == ["", "", ""]
        assert len({*keys.values()}) == 4
        assert found.submit(repeated=True, prompt="a")._key == keys[True, "{'prompt': 'a'}"]
        for repeated in (False, True):
            reply = found.submit(repeated=repeated, messages=system + asked)
            assert reply._key == cluster.prefix_key(system)

    def test_tokens_or_why_there_are_none(self, ray):
        found = cluster.Replicas({})
        said = [[3, 1], Refused("why")]
        ray.handle.tokenize = SimpleNamespace(
            remote=lambda key, given: SimpleNamespace(result=lambda: said.pop(0))
        )
        assert found.tokenize(prompt="a") == [3, 1]
        with pytest.raises(Refused, match="why"):
            found.tokenize(prompt="a")

    def test_sums_are_of_what_each_replica_said_last(self, ray):
        found = cluster.Replicas({})
        for name, held, shared in (("a", 3, True), ("b", 4, False), ("a", 1, True)):
            found.note(name, dict.fromkeys(cluster._SUMMED, held), Usage(shared=shared))
        found.live, found.tokens = 2, 9
        stats = found.stats()
        assert (stats.waiting, stats.prefilling, stats.cache_bytes, stats.prefixes) == (5, 5, 5, 5)
        assert (stats.running, stats.tokens_generated) == (2, 9)
        assert (stats.requests_done, stats.prefix_hits) == (3, 2)


def test_replicas_grow_with_what_is_asked():
    made = cluster._deployment(2, 6, 8, 0.5)
    scaling = made._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 6)
    assert scaling.target_ongoing_requests == 8
    assert made.ray_actor_options["num_gpus"] == 0.5
    assert cluster._deployment(3, None, 8, 0).num_replicas == 3


@pytest.fixture(scope="module")
def replicas():
    """Two of them, of the built-in model, for the slow tests alone."""
    found = cluster.Replicas({"budget": 0.2, "max_batch": 8}, replicas=2)
    with listening(server.app(found, name="builtin")) as address:
        yield found, f"{address}/v1"
    found.close()


def processes():
    """The replicas' own."""
    found = psutil.Process().children(recursive=True)
    return [x for x in found if "ServeReplica" in "".join(x.cmdline())]


def asking(colour, question="What is red?", **more):
    picture = {"url": data_url(Image.new("RGB", (60, 60), colour))}
    parts = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": question}]
    return {"model": "builtin", "messages": [{"role": "user", "content": parts}], **more}


@pytest.mark.slow
@pytest.mark.xdist_group("replicas")  # starting them takes long
class TestReplicas:
    def test_go_by_prefix(self, replicas):
        with openai.OpenAI(base_url=replicas[1], api_key="any", max_retries=0) as client:
            for n, colour in enumerate(("red", "green", "blue", "white"), start=1):
                shared = [
                    client.chat.completions.create(**asking(colour), max_tokens=2).mmkv["shared"]
                    for _ in range(5)
                ]
                assert shared == [False, True, True, True, True]
                assert replicas[0].stats().prefixes == n  # of both together

    def test_answer_as_one_engine_does(self, replicas):
        with openai.OpenAI(base_url=replicas[1], api_key="any", max_retries=0) as client:
            hits = replicas[0].stats().prefix_hits
            asked = {"model": "builtin", "prompt": "What is red?", "n": 4, "max_tokens": 3}
            answer = client.completions.create(**asked, logprobs=1, temperature=1.0, seed=1)
            assert [len(x.logprobs.tokens) for x in answer.choices] == [3] * 4
            assert replicas[0].stats().prefix_hits - hits == 3  # all of them by one replica
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="builtin", prompt=[5] * 3000)
            assert caught.value.code == "context_length_exceeded"
        tokens = replicas[0].tokenize(prompt="What is red?")
        assert len(tokens) == answer.usage.prompt_tokens

    def test_one_is_killed_under_load(self, replicas, caplog):
        questions = [
            f"What is at the {x} {y}?" for x in ("top", "bottom") for y in ("left", "right")
        ]
        asked = [
            asking(f"#{40 * i:02x}{50 * k:02x}80", question, max_tokens=12, **drawn)
            for i, question in enumerate(questions)
            for k in range(3)  # twelve pictures, so that each replica is asked of some
            for drawn in ({}, {"temperature": 1.0, "seed": 5})
        ]

        async def ask(client, stream, **given):
            found = await client.chat.completions.create(**given, stream=stream)
            if not stream:
                return found.choices[0].message.content
            return "".join([x.choices[0].delta.content or "" async for x in found])

        async def all_of_them(kill):
            async with openai.AsyncOpenAI(
                base_url=replicas[1], api_key="any", max_retries=0
            ) as client:
                tasks = [
                    asyncio.create_task(ask(client, i % 2 == 0, **given))
                    for i, given in enumerate(asked)
                ]
                if kill:
                    while replicas[0].tokens < tokens + len(tasks):  # of the twelve of each
                        await asyncio.sleep(0.001)
                    processes()[0].kill()
                return await asyncio.wait_for(asyncio.gather(*tasks), 60)

        assert len(processes()) == 2
        before = asyncio.run(all_of_them(kill=False))
        tokens = replicas[0].tokens
        assert asyncio.run(all_of_them(kill=True)) == before
        assert "a replica was lost" in caplog.text
        assert until(lambda: replicas[0].stats().running == 0)
