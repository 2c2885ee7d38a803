"""A compressed prefix serves later requests: cached tokens, and tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

from vllm.exceptions import VLLMValidationError
from vllm_engines import BLOCK, Engine, prompts, sampling
from vllm_reference import Reference, snapkv

from mmkv.vllm import batch

SNAPKV = {"budget": 0.3, "policy": "snapkv", "heads": "retrieval"}
MEMORY = {"memory": 0.08, "policy": "snapkv", "heads": "retrieval"}


class Asking:
    """An engine with prefix caching, and what its answers should be."""

    def __init__(self, engine: Engine, twin: Any) -> None:
        self.engine = engine
        options: Any = {"always": 33, "block": BLOCK, "codes": engine.codes}
        self.reference = Reference(twin, engine.shares, snapkv, **options)

    def __call__(
        self, ids: list[int], boundary: int, n: int = 8, **extra: Any
    ) -> tuple[list[int], int]:
        """Return the answer, and how many tokens of the prompt were cached."""
        options: Any = {"extra_args": extra} if extra else {}
        request = [{"prompt_token_ids": ids}]
        (done,) = self.engine.llm.generate(request, sampling(n, **options), use_tqdm=False)
        found = list(done.outputs[0].token_ids)
        assert found == self.reference.generate(ids, n, boundary)
        return found, done.num_cached_tokens


@pytest.fixture(scope="module", params=["budget", "memory"])
def engine(start: Any, request: Any) -> Any:
    """In the model's type, and about as many tokens in 8 bits."""
    options = SNAPKV if request.param == "budget" else MEMORY
    with start(options, enable_prefix_caching=True) as engine:
        yield engine


@pytest.fixture
def ask(engine: Engine, twin: Any) -> Any:
    with asking(engine, twin) as found:
        yield found


@contextmanager
def asking(engine: Engine, twin: Any) -> Iterator[Asking]:
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    yield Asking(engine, twin)
    assert engine.all_free
    index = engine.pool.mmkv
    assert not any((index.boundaries, index.hits, index.reading))
    assert not any(batch.state().seen.values())


def last(ids: list[int]) -> int:
    """Return the start of a prompt's last block."""
    return (len(ids) - 1) // BLOCK * BLOCK


def test_later_questions_on_a_document_read_what_is_new(ask: Any) -> None:
    document, *questions = prompts(470, 20, 43, 57, seed=5)
    first, second, third = (document + x for x in questions)
    assert ask(first, last(first))[1] == 0
    assert ask(second, 448)[1] == 0  # it is compressed where it leaves the first
    assert ask(third, 448)[1] == 448
    assert ask(first, last(first))[1] == 480


def test_a_named_prefix_serves_the_second_question(ask: Any) -> None:
    document, *questions = prompts(490, 20, 33, seed=6)
    assert ask(document + questions[0], 480, mmkv_prefix=490)[1] == 0
    assert ask(document + questions[1], 480)[1] == 480


@pytest.mark.parametrize("given", [-3, 5, 160, 10**6])
def test_a_prefix_that_cannot_be_used_changes_nothing(ask: Any, given: int) -> None:
    (ids,) = prompts(300, seed=7)
    assert ask(ids, last(ids), mmkv_prefix=given)[1] == 0


@pytest.mark.parametrize("given", ["480", 480.0, True])
def test_a_prefix_that_is_no_number_raises(ask: Any, given: Any) -> None:
    with pytest.raises(
        VLLMValidationError, match=r"mmkv_prefix=.*: expected how many first tokens"
    ):
        ask([7] * 40, 32, mmkv_prefix=given)


def test_turns_of_a_chat_read_what_is_new(ask: Any) -> None:
    chat, *turns = prompts(400, 30, 40, seed=8)
    boundary, cached = last(chat), []
    for turn in (*turns, []):
        reply, hit = ask(chat, boundary)
        cached.append(hit)
        chat = chat + reply + turn
    assert cached == [0, 384, 416]


def test_a_chat_that_has_grown_is_compressed_again(ask: Any) -> None:
    chat, more = prompts(200, 400, seed=9)
    reply, _ = ask(chat, last(chat))
    chat = chat + reply + more
    # What is behind a boundary stays whole: here that would be most of the prompt.
    assert ask(chat, last(chat))[1] == 0


def parts(ask: Any) -> list[Any]:
    """Return the blocks that hold compressed prefixes, those of one group next to each other."""
    found = [b for b in ask.engine.pool.blocks if b.block_hash and b"state" in b.block_hash]
    return sorted(found, key=lambda b: (b.block_hash[-4:], b.block_hash))


def test_a_prefix_whose_blocks_were_taken_is_read_again(ask: Any) -> None:
    (ids,) = prompts(300, seed=10)
    assert ask(ids, last(ids))[1] == 0
    assert ask(ids, last(ids))[1] == 288
    ask.engine.pool.evict_blocks({parts(ask)[-1].block_id})
    assert ask(ids, last(ids))[1] == 0
    assert ask(ids, last(ids))[1] == 288


def test_parts_of_two_states_are_never_found_together(ask: Any) -> None:
    (ids,) = prompts(300, seed=16)
    assert ask(ids, last(ids))[1] == 0
    before = parts(ask)
    # A request that may not use the cache compresses the same prefix once more.
    options = sampling(2, skip_reading_prefix_cache=True)
    ask.engine.llm.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
    assert parts(ask) == before
    group = [b for b in before if b.block_hash[-4:] == before[0].block_hash[-4:]]
    assert len(group) > 1
    ask.engine.pool.evict_blocks({group[0].block_id})
    assert ask(ids, last(ids))[1] == 0


def test_prompts_of_other_cache_salts_do_not_hit(ask: Any) -> None:
    (ids,) = prompts(300, seed=11)
    requests = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "b", "a")]
    cached = [
        ask.engine.llm.generate([x], sampling(2), use_tqdm=False)[0].num_cached_tokens
        for x in requests
    ]
    assert cached == [0, 0, 288]


def test_samples_of_one_prompt_read_it_once(ask: Any, monkeypatch: Any) -> None:
    (ids,) = prompts(300, seed=12)
    schedule, read = ask.engine.scheduler.schedule, list[int]()

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        read.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(ask.engine.scheduler, "schedule", counting)
    options = sampling(4, n=4, temperature=1.0)
    request = [{"prompt_token_ids": ids}]
    (done,) = ask.engine.llm.generate(request, options, use_tqdm=False)
    assert len(done.outputs) == 4
    assert sum(read) == 300 + 3 * (300 - 288) + 4 * 3


def test_questions_at_once_read_the_document_once(ask: Any) -> None:
    document, *questions = prompts(480, 20, 33, 47, 12, seed=13)
    ids = [document + x for x in questions]
    options = sampling(6, extra_args={"mmkv_prefix": 480})
    requests = [{"prompt_token_ids": x} for x in ids]
    done = ask.engine.llm.generate(requests, options, use_tqdm=False)
    assert [x.num_cached_tokens for x in done] == [0, 480, 480, 480]
    found = [list(x.outputs[0].token_ids) for x in done]
    assert found == [ask.reference.generate(x, 6, 480) for x in ids]


def test_a_request_is_not_kept_waiting_by_one_that_was_aborted(ask: Any) -> None:
    document, *questions = prompts(480, 20, 33, seed=14)
    requests = ask.engine.llm.llm_engine
    for i, x in enumerate(questions):
        options = sampling(4, extra_args={"mmkv_prefix": 480})
        requests.add_request(f"r{i}", {"prompt_token_ids": document + x}, options)
    requests.step()
    assert len(ask.engine.scheduler.running) == 1  # the second one waits for the first
    requests.abort_request(["r0"])
    ended = [x.request_id for _ in range(12) for x in requests.step() if x.finished]
    assert ended == ["r1"]


def test_a_preempted_request_keeps_the_boundary_of_its_hit(engine: Engine, ask: Any) -> None:
    document, *questions = prompts(450, 20, 43, seed=5)
    first, second = (document + x for x in questions)
    for ids, boundary in ((first, last(first)), (second, 448)):
        ask(ids, boundary)
    expected, hit = ask(second, 448, 24)
    assert hit > 0
    requests = engine.llm.llm_engine
    requests.add_request("again", {"prompt_token_ids": second}, sampling(24))
    for _ in range(12):
        requests.step()
    assert engine.llm.reset_prefix_cache(reset_running_requests=True)  # preempts it
    while requests.has_unfinished_requests():
        found = requests.step()
    assert list(found[0].outputs[0].token_ids) == expected


def test_preempted_requests_keep_their_boundary(start: Any, twin: Any) -> None:
    ids = prompts(150, 170, 190, 210, seed=15)
    options: Any = {"kv_cache_memory_bytes": 1_500_000, "max_model_len": 300}
    with start(SNAPKV, enable_prefix_caching=True, **options) as engine:
        preempt, lives = engine.scheduler._preempt_request, dict[str, list[int]]()

        def noting(request: Any, *args: Any, **kwargs: Any) -> Any:
            name = request.request_id.split("-")[0]
            lives.setdefault(name, []).append(request.num_tokens - request.num_prompt_tokens)
            return preempt(request, *args, **kwargs)

        engine.scheduler._preempt_request = noting
        found = engine.generate(ids, 60)
        assert max(map(max, lives.values())) > 0
        reference = Reference(twin, engine.shares, snapkv, always=33, block=BLOCK)
        assert found == [reference.generate(x, 60, last(x)) for x in ids]
        assert engine.all_free


def test_a_request_that_reads_no_cache_does_not_wait_for_others(start: Any) -> None:
    """Not even if the one before it waited for a prefix, and was aborted."""
    document, question, other = prompts(1100, 20, 40)
    options: Any = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 64}
    with start(SNAPKV, enable_prefix_caching=True, **options) as engine:
        requests, ended = engine.llm.llm_engine, list[str]()
        for name, ids in (("reader", document), ("waiter", document + question)):
            requests.add_request(name, {"prompt_token_ids": ids}, sampling(2))
        requests.step()
        requests.step()
        requests.abort_request(["waiter"])
        requests.add_request("free", {"prompt_token_ids": other}, sampling(2, prompt_logprobs=1))
        while requests.has_unfinished_requests():
            ended += [x.request_id for x in requests.step() if x.finished]
    assert ended == ["free", "reader"]


def test_nan_of_one_request_does_not_reach_others(start: Any) -> None:
    """A block that it leaves holds its pairs in the slots that are not written yet."""
    ids = prompts(300, 200, 90, seed=3)
    with start(SNAPKV, enable_prompt_embeds=True, enable_prefix_caching=False) as engine:
        expected = [engine.generate([x], 12) for x in ids]
        embeds = torch.randn(400, 256, generator=torch.Generator().manual_seed(1)) * 0.02
        embeds[200] = torch.nan
        engine.llm.generate([{"prompt_embeds": embeds}], sampling(4), use_tqdm=False)
        assert [engine.generate([x], 12) for x in ids] == expected


def test_later_questions_hit_where_no_head_keeps_the_whole_prompt(start: Any, twin: Any) -> None:
    document, *questions = prompts(470, 20, 43, 57, seed=5)
    uniform, boundaries = SNAPKV | {"heads": "uniform"}, (480, 448, 448)
    with start(uniform, enable_prefix_caching=True) as engine, asking(engine, twin) as ask:
        assert max(engine.shares.values()) < 1
        hits = [ask(document + x, b)[1] for x, b in zip(questions, boundaries, strict=True)]
    assert hits == [0, 0, 448]
