"""How far the next tokens of vLLM with compressed heads are from those of stock vLLM.

`python docs/serving_divergence.py FOLDER 8x 0.125`: the model, then shares of bytes (8x) or of
tokens. Texts of the documents suite go on for 160 tokens behind a compressed prefix, in float16.
The divergence is over the 100 likeliest tokens of stock vLLM and all others together, in nats a
token. Pages are those of the prefix, as a share of stock vLLM's.
"""

from __future__ import annotations

import gc
import math
import os
import sys

from mmkv.eval.suites.registry import load_suite
from mmkv.vllm.settings import Settings

TEXTS, TOKENS, REPLY, LIKELIEST, BLOCK = 16, 800, 160, 100, 32


def logprobs(
    model: str, size: str, texts: list[list[int]] | None
) -> tuple[list[list[int]], list[dict[int, float]], float]:
    """Return the texts' ids, log-probabilities of each of their last tokens, and share of pages."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    in_bytes = size.endswith("x")
    mmkv = {"memory": size} if in_bytes else {"budget": float(size or 1)}
    llm = LLM(
        model,
        dtype="float16",
        enforce_eager=True,
        max_model_len=1088,
        block_size=BLOCK,
        max_logprobs=4 * LIKELIEST,
        kv_cache_memory_bytes=2**30,
        additional_config={"mmkv": mmkv} if size else {},
    )
    if texts is None:
        tokenizer = llm.get_tokenizer()
        samples = load_suite("documents", "novels", tasks=["text"], limit=TEXTS)
        ids = (tokenizer(x.prompt)["input_ids"][:TOKENS] for x in samples)
        texts = [x for x in ids if len(x) == TOKENS]
    params = SamplingParams(
        max_tokens=1,
        prompt_logprobs=LIKELIEST if not size else 4 * LIKELIEST,
        extra_args={"mmkv_prefix": TOKENS - REPLY},
    )
    found, held = list[dict[int, float]](), 1.0
    for x in texts:
        (done,) = llm.generate([{"prompt_token_ids": x}], params, use_tqdm=False)
        found += [
            {k: v.logprob for k, v in of.items()} for of in done.prompt_logprobs[-REPLY + 1 :]
        ]
    if settings := Settings.of(llm.llm_engine.vllm_config):
        prefix, pages, heads = TOKENS - REPLY, 0, 0
        for of_layer in settings.classes.values():
            for share, units in of_layer.items():
                sizes, n = settings.sizes.get(share), sum(map(len, units))
                freed = 0 if sizes is None else int(sizes.dropped(prefix, BLOCK))
                pages, heads = pages + n * (prefix // BLOCK - freed), heads + n
        held = pages / heads / (prefix // BLOCK)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return texts, found, held


def likeliest(found: dict[int, float]) -> int:
    """Return the token of the largest log-probability."""
    return max(found, key=lambda x: found[x])


def divergence(full: dict[int, float], found: dict[int, float]) -> float:
    """Return the divergence of one token's distribution."""
    least, known = min(found.values()), sorted(full, key=lambda x: -full[x])[:LIKELIEST]
    p, q = ([math.exp(x.get(k, least)) for k in known] for x in (full, found))
    p, q = ([*x, max(1e-9, 1 - sum(x))] for x in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def main() -> None:
    """Print the divergence of each size."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    model, *sizes = sys.argv[1:]
    texts, full, _ = logprobs(model, "", None)
    for size in sizes:
        _, found, held = logprobs(model, size, texts)
        lost = [divergence(a, b) for a, b in zip(full, found, strict=True)]
        same = [likeliest(a) == likeliest(b) for a, b in zip(full, found, strict=True)]
        print(
            f"{size}: {held:.1%} of the pages, divergence {sum(lost) / len(lost):.4f} nats, same "
            f"next token {sum(same) / len(same):.1%}, {len(texts)} texts, {len(lost)} tokens"
        )


if __name__ == "__main__":
    main()
