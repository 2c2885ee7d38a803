"""Figures of docs/serving.md: requests at once in one pool, and step times, beside stock vLLM.

`python docs/serving_figures.py FOLDER`, with `--budget 0.2` or `--memory 8x` for compressed heads
and without for stock vLLM, on one thread, in float32, on a GPU in bfloat16. Prompts are random
tokens. On a CPU times are the process's CPU seconds, so that other programs on the machine change
them little.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

POOL = 143 * 10**6  # bytes, room for three requests of stock vLLM


def main() -> None:
    """Print the figures of one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--memory", help="a share of bytes, such as 8x, in its place")
    parser.add_argument("--policy", default="condense")
    parser.add_argument("--capacity", action="store_true", help="20 requests in a small pool")
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(1)
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    from mmkv.merge import k_means
    from mmkv.scores import observers
    from mmkv.vllm import backend

    on_cpu, options = current_platform.is_cpu(), dict[str, Any]()
    given = {"budget": arguments.budget, "memory": arguments.memory}
    if size := {k: v for k, v in given.items() if v is not None}:
        options["additional_config"] = {"mmkv": {"policy": arguments.policy, **size}}
    llm = LLM(
        arguments.model,
        dtype="float32" if on_cpu else "bfloat16",
        enforce_eager=True,
        max_model_len=1056,
        block_size=32,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=POOL if arguments.capacity else 2**30,
        **options,
    )

    def clock() -> float:
        if on_cpu:
            return time.process_time()
        torch.accelerator.synchronize()  # what was launched before counts as before
        return time.perf_counter()

    core: Any = llm.llm_engine.engine_core.engine_core
    steps, parts = list[tuple[int, float, int]](), dict[str, float]()
    run, preempt, preempted = core.model_executor.execute_model, core.scheduler._preempt_request, []

    def timed(output: Any, *args: Any, **kwargs: Any) -> Any:
        start = clock()
        result = run(output, *args, **kwargs)
        decoding = sum(r.num_output_tokens > 0 for r in core.scheduler.running)
        steps.append((output.total_num_scheduled_tokens, clock() - start, decoding))
        return result

    def adding(name: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            parts[name] = parts.get(name, 0.0) + clock() - start
            return result

        return timed

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    core.model_executor.execute_model, core.scheduler._preempt_request = timed, counted
    # The last two are parts of the first: products and softmax of observers, and of k-means.
    inner = (observers, "_changes"), (k_means, "_k_means")
    for module, name in ((backend, "compress"), (backend, "causal"), *inner):
        setattr(module, name, adding(name, getattr(module, name)))
    lengths = (
        [900 - 3 * i for i in range(20)] if arguments.capacity else [900 - i for i in range(8)]
    )
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1000, 30000, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(
        temperature=0, max_tokens=96 if arguments.capacity else 40, ignore_eos=True
    )
    start = clock()
    llm.generate([{"prompt_token_ids": x} for x in ids], params, use_tqdm=False)
    seconds = clock() - start
    print(f"{len(ids)} requests of {lengths[-1]} to {lengths[0]} tokens in {seconds:.1f} s")
    print(f"most decoding at once {max(x for _, _, x in steps)}, preemptions {len(preempted)}")
    prefill = sum(s for n, s, _ in steps if n > len(ids))
    decode = [s for n, s, _ in steps if n <= len(ids)]
    print(f"steps that read prompts {prefill:.1f} s, {len(decode)} others {sum(decode):.1f} s")
    if not arguments.capacity:
        full = [s for n, s, _ in steps if n == len(ids)]
        print(f"a decode step of all {1000 * median(full):.0f} ms")
    for name, of_it in parts.items():
        print(f"{name} {of_it:.1f} s")


if __name__ == "__main__":
    main()
