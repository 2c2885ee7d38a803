"""Greedy tokens of vLLM with compressed heads, next to transformers with the same kept pairs."""

from __future__ import annotations

import copy
import shutil
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

import vllm_reference
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker import gpu_worker
from vllm_engines import BLOCK, HEADS, LAYERS, Engine, collect, prompts, sampling
from vllm_reference import Reference

from mmkv.vllm import backend, batch
from mmkv.vllm.blocks import SmallManager
from mmkv.vllm.classes import CLASSES

LENGTHS = 37, 300, 129, 555, 900, 64
CONDENSE = {"budget": 0.3}
MEMORY = {"memory": 0.08}  # of float32: about as many tokens, in 8 bits
SNAPKV = {"budget": 0.3, "policy": "snapkv"}


def reference(engine: Engine, twin: Any, policy: str) -> Reference:
    if policy == "condense":
        options: Any = {"least": 64, "always": 2}
    else:
        options = {"always": 33}
    keep = getattr(vllm_reference, policy)
    return Reference(twin, engine.shares, keep, block=BLOCK, codes=engine.codes, **options)


@pytest.fixture(scope="module")
def replies_to_all(twin: Any) -> list[list[int]]:
    """What transformers replies to the batch with all pairs kept: the same for every policy."""
    shares = {(layer, head): 1.0 for layer in range(LAYERS) for head in range(HEADS)}
    whole = Reference(twin, shares, vllm_reference.snapkv)
    return [whole.generate(x, 16) for x in prompts(*LENGTHS)]


def check_batch(
    engine: Engine, twin: Any, replies_to_all: list[list[int]], policy: str, classes: int
) -> None:
    """Compare a batch that is read in chunks with transformers."""
    ids = prompts(*LENGTHS)
    assert len(set(engine.shares.values())) == classes
    found = engine.generate(ids)
    expected = reference(engine, twin, policy)
    assert found == [expected.generate(x, 16) for x in ids]
    # And what is left out matters.
    assert sum(x != y for x, y in zip(replies_to_all, found, strict=True)) >= 4
    assert engine.all_free
    assert not any(batch.state().seen.values())


@pytest.mark.parametrize(
    ("options", "classes"),
    [
        (SNAPKV | {"heads": "retrieval"}, CLASSES),
        (SNAPKV, 1),
        (MEMORY | {"policy": "snapkv"}, 1),
    ],
    ids=["by the probe", "equal", "8 bits"],
)
def test_snapkv_equals_transformers(
    start: Any,
    twin: Any,
    replies_to_all: list[list[int]],
    options: dict[str, Any],
    classes: int,
) -> None:
    with start(options) as engine:
        check_batch(engine, twin, replies_to_all, "snapkv", classes)


def test_pairs_in_8_bits_equal_transformers(
    start: Any, twin: Any, replies_to_all: list[list[int]]
) -> None:
    with start(MEMORY) as engine:
        check_batch(engine, twin, replies_to_all, "condense", CLASSES)


def test_memory_for_all_tokens_keeps_all_in_8_bits(start: Any, twin: Any) -> None:
    ids = prompts(300, 129)
    with start({"memory": 0.5}) as engine:
        assert set(engine.shares.values()) == {1.0}
        expected = reference(engine, twin, "condense")
        assert engine.generate(ids, 8) == [expected.generate(x, 8) for x in ids]
        assert all(kept[0].shape[0] in (300, 129) for kept in expected.kept.values())


class TestCondense:
    """One engine."""

    @pytest.fixture(scope="class")
    def engine(self, start: Any) -> Any:
        with start(CONDENSE) as engine:
            yield engine

    def test_batch_equals_transformers(
        self, engine: Engine, twin: Any, replies_to_all: list[list[int]]
    ) -> None:
        check_batch(engine, twin, replies_to_all, "condense", CLASSES)

    def test_chunks_of_a_long_prompt_do_not_change_its_queries(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of prompts longer than the bound, the last queries are kept, the same number of each."""
        monkeypatch.setattr("mmkv.vllm.settings._QUERIES", 300)
        compress, given = backend.compress, []

        def spy(prompt: Any, *rest: Any) -> Any:
            given.append(prompt.query.shape[1])
            return compress(prompt, *rest)

        monkeypatch.setattr(backend, "compress", spy)
        for lengths in ((555,), (700, 400)):  # read in chunks of 256 tokens, two prompts at once
            engine.generate(prompts(*lengths), 2)
        assert set(given) == {300}

    def test_prompts_in_pieces_are_refused(self, engine: Engine) -> None:
        process = engine.llm.llm_engine.input_processor.process_inputs
        given: Any = {"prompt_token_ids": [5, 6]}, sampling(2), ("generate",)
        with pytest.raises(VLLMValidationError, match="send the whole prompt at once"):
            process("a", *given, resumable=True)
        assert not process("a", *given).resumable

    def test_small_heads_blocks_are_free_at_the_next_schedule(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        schedule, steps = engine.scheduler.schedule, []

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            (request,) = engine.scheduler.running
            held = [
                sum(not b.is_null for b in m.req_to_blocks[request.request_id])
                for m in engine.managers
            ]
            steps.append((request.num_computed_tokens, held))
            return output

        monkeypatch.setattr(engine.scheduler, "schedule", noting)
        engine.generate(prompts(900), 4)
        (before,) = (held for computed, held in steps if computed == 900)
        (after,) = (held for computed, held in steps if computed == 901)
        assert set(before) == {29}
        shares = [getattr(m.kv_cache_spec, "sizes", None) for m in engine.managers]
        for manager, sizes, held in zip(engine.managers, shares, after, strict=True):
            if not isinstance(manager, SmallManager):
                assert held == 29
            else:
                assert (
                    abs(held * BLOCK - max(sizes.share * 900, 64 * sizes.share / 0.3)) < 2 * BLOCK
                )
        assert sum(after) < 0.45 * sum(before)

    def test_aborted_requests_leave_nothing(self, engine: Engine) -> None:
        requests = engine.llm.llm_engine
        for i, x in enumerate(prompts(700, 600, 500, 90)):
            requests.add_request(f"r{i}", {"prompt_token_ids": x}, sampling(30))
        for _ in range(4):  # in the middle of a prompt
            requests.step()
        assert any(batch.state().seen.values())
        requests.abort_request([f"r{i}" for i in range(4)])
        for _ in range(2):
            requests.step()
        engine.generate(prompts(40), 2)
        assert engine.all_free
        assert not any(batch.state().seen.values())


@pytest.mark.parametrize(
    ("options", "pool", "lengths", "n"),
    [
        (CONDENSE, 2_100_000, (150, 170, 190, 210, 230, 250, 270, 290), 50),
        (MEMORY, 1_500_000, (80, 90, 100, 110, 120, 130, 140, 150), 150),  # most is later tokens
    ],
    ids=["budget", "memory"],
)
def test_preempted_requests_are_read_again_and_right(
    start: Any, twin: Any, options: dict[str, Any], pool: int, lengths: tuple[int, ...], n: int
) -> None:
    ids = prompts(*lengths, seed=1)
    with start(options, kv_cache_memory_bytes=pool, max_model_len=350) as engine:
        preempt, preempted = engine.scheduler._preempt_request, list[int]()

        def noting(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.num_computed_tokens - request.num_prompt_tokens)
            return preempt(request, *args, **kwargs)

        engine.scheduler._preempt_request = noting
        found = engine.generate(ids, n)
        assert max(preempted) > 0  # a request that had begun its reply
        expected = reference(engine, twin, "condense")
        assert found == [expected.generate(x, n) for x in ids]
        assert engine.all_free


@pytest.mark.parametrize("options", [CONDENSE, {"memory": 0.16}], ids=["budget", "memory"])
def test_half_precision_follows_float32(start: Any, twin: Any, options: dict[str, Any]) -> None:
    ids = prompts(300, 129, 555)
    with start(options, dtype="float16") as engine:
        found = engine.generate(ids, 4)
        expected = reference(engine, twin, "condense")
        assert [x[:1] for x in found] == [expected.generate(x, 1) for x in ids]


def test_traced_model_equals_transformers(start: Any, twin: Any) -> None:
    """By default vLLM traces a model and compiles its graph; here the graph runs as it is.

    The compiler takes 40 seconds, and what it is given is the same.
    """
    ids, graph = prompts(300, 129), {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}
    with start(CONDENSE, enforce_eager=False, compilation_config=graph) as engine:
        expected = reference(engine, twin, "condense")
        assert engine.generate(ids, 8) == [expected.generate(x, 8) for x in ids]
        config = engine.llm.llm_engine.vllm_config.compilation_config
        assert (config.mode.name, config.backend) == (graph["mode"], graph["backend"])


def ask_two_engines(start: Any) -> tuple[list[list[int]], list[list[int]], list[Any]]:
    """Ask two engines alone, and by one request id at once; return replies and their runners."""
    (first,), (second,) = prompts(522, seed=1), prompts(522, seed=2)
    with start(SNAPKV) as a, start(SNAPKV) as b:
        alone, together = [a.generate([first], 8)[0], b.generate([second], 8)[0]], [[], []]
        engines = [x.llm.llm_engine for x in (a, b)]
        for engine, ids in zip(engines, (first, second), strict=True):
            engine.add_request("same", {"prompt_token_ids": ids}, sampling(8))
        while any(engine.has_unfinished_requests() for engine in engines):
            for engine, reply in zip(engines, together, strict=True):
                for output in engine.step():
                    reply[:] = output.outputs[0].token_ids
        runners = [x.core.model_executor.driver_worker.worker.model_runner for x in (a, b)]
        return alone, together, [weakref.ref(x) for x in runners]


def test_two_engines_with_equal_request_ids_do_not_mix_and_are_freed(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    alone, together, runners = ask_two_engines(start)
    assert together == alone
    collect()
    assert [runner() for runner in runners] == [None, None]


def test_a_second_model_and_reloaded_weights_change_the_scores(
    start: Any, twin: Any, tiny: Path, tmp_path: Path
) -> None:
    other, ids = copy.deepcopy(twin), prompts(300, 555)
    with torch.no_grad():
        for layer in other.model.layers:  # condense weighs values by them
            layer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight.flip(1))
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    other.save_pretrained(tmp_path)
    for folder, model in ((tiny, twin), (tmp_path, other)):
        with start(CONDENSE, model=str(folder)) as engine:
            expected = reference(engine, model, "condense")
            assert engine.generate(ids, 8) == [expected.generate(x, 8) for x in ids]
            if model is other:
                engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny)})
                expected = reference(engine, twin, "condense")
                assert engine.generate(ids, 8) == [expected.generate(x, 8) for x in ids]
            assert batch.state().computed
            worker = MagicMock(model_runner=batch.runner())  # transfers of weights need a GPU
            with patch.object(gpu_worker, "set_current_vllm_config"):
                gpu_worker.Worker.finish_weight_update(worker)
            worker.weight_transfer_engine.finish_weight_update.assert_called_once()
            assert not batch.state().computed
