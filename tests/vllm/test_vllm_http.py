"""`mmkv serve` as a process of its own, asked by the openai client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

import openai
from vllm_engines import BLOCK, prompts
from vllm_reference import Reference, condense

from mmkv.vllm import options


@pytest.fixture(scope="module")
def client(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    flags = (
        "--dtype float32 --enforce-eager --max-model-len 1280 --max-num-seqs 8 --block-size 32 "
        "--kv-cache-memory-bytes 67108864 --max-num-batched-tokens 256 --served-model-name tiny "
        f"--no-enable-prefix-caching --host 127.0.0.1 --port {port}"
    )
    env = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = "import sys; from mmkv.cli.commands import main; main(sys.argv[1:])"
    arguments = ["serve", str(tiny), "--budget", "0.3", *flags.split()]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", command, *arguments],
            stdout=out,
            stderr=out,
            env=env | {"VLLM_LOGGING_LEVEL": "INFO"},
        )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        for _ in range(1200):
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-3000:])
        assert "mmkv: policy condense, budget 0.3: " in log.read_text()
        yield client
    finally:
        process.terminate()
        process.wait(120)


def test_completions_at_once_equal_transformers(client: Any, tiny: Path, twin: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs

    def complete(ids: list[int]) -> list[int]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        done = client.completions.create(
            model="tiny", prompt=ids, max_tokens=12, temperature=0, extra_body=extra
        )
        return done.choices[0].token_ids

    ids = prompts(300, 555, 64, 129, seed=2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(complete, ids))
    config = EngineArgs(str(tiny), dtype="float32", max_model_len=512).create_engine_config()
    given = {"budget": 0.3}
    resolved = options.resolved(config, given, *options.parsed(given))
    shares = {tuple(place): share for share, heads in resolved["classes"] for place in heads}
    expected = Reference(twin, shares, condense, least=64, always=2, block=BLOCK)
    assert found == [expected.generate(x, 12) for x in ids]


def test_a_chat_answers(client: Any) -> None:
    text = " ".join(f"w{i % 500}" for i in range(400))
    done = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0
    )
    assert done.usage.prompt_tokens >= 400
    assert done.choices[0].message.content


def test_a_bad_prefix_is_answered_with_its_error(client: Any) -> None:
    extra = {"vllm_xargs": {"mmkv_prefix": "800"}}
    with pytest.raises(openai.BadRequestError, match="mmkv_prefix='800': expected how many first"):
        client.completions.create(model="tiny", prompt=[7] * 40, max_tokens=1, extra_body=extra)
