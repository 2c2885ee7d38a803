"""An engine of vLLM in this process, with what tests look at, and what they ask it."""

from __future__ import annotations

import gc
from typing import Any

import torch

collect = gc.collect  # the fixture `no_search_for_garbage` replaces it

LAYERS, HEADS, VOCAB, BLOCK = 4, 4, 512, 32
# Copy scores: with a budget of 0.3 two heads keep all, two about a half, and so on.
SCORES = (
    (0.9, 0.02, 0.2, 0.0),
    (0.05, 0.8, 0.0, 0.4),
    (0.01, 0.1, 0.5, 0.0),
    (0.0, 0.03, 0.2, 0.1),
)
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


class Engine:
    """An engine of vLLM in this process, with what tests look at."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers

    @property
    def shares(self) -> dict[tuple[int, int], float]:
        """The share of a prompt that each head keeps."""
        options = self.llm.llm_engine.vllm_config.additional_config["mmkv"]
        return {tuple(place): share for share, heads in options["classes"] for place in heads}

    @property
    def codes(self) -> list[int] | None:
        """Bytes of a slot, and of a pair in 8 bits; None: pairs are in the model's type."""
        return self.llm.llm_engine.vllm_config.additional_config["mmkv"]["codes"]

    @property
    def all_free(self) -> bool:
        """No block is held but the null block."""
        return self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1

    def generate(self, ids: list[list[int]], n: int = 16, **options: Any) -> list[list[int]]:
        """Return n greedy tokens of each prompt, all in one batch."""
        done = self.llm.generate(
            [{"prompt_token_ids": x} for x in ids], sampling(n, **options), use_tqdm=False
        )
        return [list(x.outputs[0].token_ids) for x in done]


def sampling(tokens: int, **options: Any) -> Any:
    """Return greedy sampling of exactly so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        **(
            {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
            | options
        )
    )
