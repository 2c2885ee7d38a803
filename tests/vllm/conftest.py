"""A tiny model and its probe in files, and engines of vLLM in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_engines import BLOCK, CHAT, HEADS, LAYERS, SCORES, VOCAB, Engine, collect

if find_spec("xgrammar") and find_spec("vllm"):  # before vLLM is imported
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama with 16 KV heads, a tokenizer of words, and its probe."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from mmkv.profiles import Profile

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    Profile(policy="condense", samples=1, retrieval=SCORES).save(folder / "probe.json")
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_search_for_garbage() -> Iterator[None]:
    """Disable gc.collect: vLLM calls it eight times an engine, 6 seconds in all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield


@pytest.fixture(scope="session")
def start(tiny: Path) -> Callable[..., Any]:
    """Return what starts an engine: a context manager of mmkv's options and vLLM's own."""

    @contextmanager
    def starting(mmkv: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        given: dict[str, Any] = {
            "model": str(tiny),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1280,
            "block_size": BLOCK,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 2**26,
            "max_num_batched_tokens": 256,
        }
        if mmkv is not None:
            given["additional_config"] = {"mmkv": {"probe": str(tiny / "probe.json"), **mmkv}}
        llm: Any = LLM(**(given | options))
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
            collect()

    return starting


@pytest.fixture(scope="session")
def twin(tiny: Path) -> Any:
    """The same model in transformers, whose attention is that of `vllm_reference`."""
    from transformers import AutoModelForCausalLM
    from vllm_reference import NAME

    return AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.float32, attn_implementation=NAME
    ).eval()
