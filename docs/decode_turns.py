"""A decode step of stock vLLM and of the plugin, in turns: the ratio of docs/serving.md.

`python docs/decode_turns.py FOLDER 0.2`, or `8x` for a share of bytes, starts both engines, each in
a process of its own with one thread, on the same core and in float32. Each reads eight prompts of
893 to 900 random tokens. Then they decode two steps at a time, in turns, so that other programs on
the machine slow both alike. Times are CPU seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median, quantiles
from typing import Any

REQUESTS, TURNS, STEPS = 8, 70, 2


def engine(model: str, given: str) -> None:
    """Print the CPU seconds of the prompts, then those of a step for each line of the input."""
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    size: Any = given if given.endswith("x") or not given else float(given)
    kind = "memory" if given.endswith("x") else "budget"
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1088,
        block_size=32,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**30,
        additional_config={"mmkv": {kind: size}} if size else {},
    )
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=TURNS * STEPS + 20, ignore_eos=True)
    for i in range(REQUESTS):
        ids = torch.randint(1000, 30000, (900 - i,), generator=generator).tolist()
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    start, begun = time.process_time(), set[str]()
    while len(begun) < REQUESTS:
        begun |= {x.request_id for x in llm.llm_engine.step() if x.outputs[0].token_ids}
    print("time", time.process_time() - start, flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        for _ in range(STEPS):
            llm.llm_engine.step()
        print("time", (time.process_time() - start) / STEPS, flush=True)


def main() -> None:
    """Print both engines' times and the ratio."""
    model, budget = sys.argv[1:]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # the engines inherit it

    def start(budget: str) -> Any:
        command = [sys.executable, __file__, "--engine", model, budget]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def read(process: Any) -> float:
        line = next(x for x in process.stdout if x.startswith("time "))
        return float(line.split()[1])

    def turn(process: Any) -> float:
        process.stdin.write("\n")
        process.stdin.flush()
        return read(process)

    engines, prompts = list[Any](), list[float]()
    for given in ("", budget):
        engines.append(start(given))
        prompts.append(read(engines[-1]))
    steps = [[turn(x) for x in engines] for _ in range(TURNS)]
    for process in engines:
        process.stdin.close()
        process.wait()
    low, middle, high = quantiles([b / a for a, b in steps], n=4)
    columns = zip(("stock", budget), prompts, zip(*steps, strict=True), strict=True)
    for name, read_in, times in columns:
        print(f"{name}: prompts {read_in:.1f} s, a step {1000 * median(times):.0f} ms")
    print(f"step, ratio {middle:.3f}, quartiles {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        engine(*sys.argv[2:])
    else:
        main()
