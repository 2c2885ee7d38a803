"""The parts of `mmkv.eval.speed.gpu`: each measures one thing on a card and writes its rows.

`--tiny` measures toy sizes on a CPU.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mmkv.loading import first_line

# Batch and prompt length of the decode steps, on a model of LLaVA-1.5-7B's shape.
SETTINGS = [(8, 8192), (1, 8192), (16, 2048), (1, 2048)]
MODEL, PREFILL_MODEL = "llava-1.5-7b-random", "llama-7b-2-layers-random"
TINY = ("llama", (256, 256, 3, 4, 4, 1000, 1024))
WARM, STEPS = 20, 32

Row = dict[str, Any]


class Bench:
    """What the parts share: where rows go, and whether sizes are tiny."""

    def __init__(self, out: Path, tiny: bool, seconds: float) -> None:
        self.out, self.tiny = out, tiny
        self.device = "cpu" if tiny else "cuda"
        self.stop = time.monotonic() + seconds

    def put(self, part: str, **values: Any) -> None:
        """Append a row to gpu.jsonl; it is on disk when this returns."""
        line = json.dumps({"part": part, **values})
        with (self.out / "gpu.jsonl").open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line[:400], flush=True)

    def timed(self, call: Callable[[], object], times: int) -> float:
        """Return the mean seconds of a call, the device synchronised before and after all."""
        call()
        start = self.now()
        for _ in range(times):
            call()
        return (self.now() - start) / times

    def now(self) -> float:
        """Return the time in seconds, after all work of the device."""
        import torch

        if not self.tiny:
            torch.cuda.synchronize()
        return time.perf_counter()


def card(bench: Bench) -> None:
    """Record versions, the card, and the bandwidth of a copy, bytes read and written."""
    import torch
    import transformers

    row: Row = {"torch": torch.__version__, "transformers": transformers.__version__}
    if not bench.tiny:
        properties = torch.cuda.get_device_properties(0)
        source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        seconds = bench.timed(lambda: target.copy_(source), 10)
        row |= {"card": properties.name, "cuda": torch.version.cuda}
        row |= {"cudnn": torch.backends.cudnn.version(), "copy_gb_s": round(2**32 / seconds / 1e9)}
    bench.put("card", **row)


def kernels(bench: Bench) -> None:
    """Time ways to attend from one token, without the host: twenty calls in a CUDA graph.

    R rows of G queries attend to U slots of D numbers. "products" are two matrix products and a
    softmax, "mmkv" is what the cache calls; gb_s counts the bytes of keys and values or of codes.
    """
    import torch
    from torch.nn.attention import SDPBackend

    from mmkv.cache.kernels import attend

    dtype = torch.float32 if bench.tiny else torch.bfloat16
    shapes = [(32, 1, 1600), (32, 1, 8192), (256, 1, 1600), (256, 1, 8192), (8, 4, 1600)]
    shapes += [(22, 1, 576)]
    for R, G, U in [(2, 1, 64)] if bench.tiny else shapes:
        for D in (64, 128):
            qkv = [torch.randn(R, n, D, device=bench.device, dtype=dtype) for n in (G, U, U)]
            bias = torch.zeros(R, 1, U, device=bench.device, dtype=dtype)
            in_8, in_4 = ((qkv[0].float(), *_coded(qkv[1], qkv[2], bits)) for bits in (8, 4))
            ours = partial(attend, scale=D**-0.5, softcap=None, replayed=True)
            ways: dict[str, Any] = {
                "flash, no bias": partial(_fused, SDPBackend.FLASH_ATTENTION, *qkv),
                "cudnn": partial(_fused, SDPBackend.CUDNN_ATTENTION, *qkv, bias),
                "products": partial(_by_products, *qkv, bias),
                "mmkv": partial(ours, *qkv, bias),
                "products, 8 bits": partial(_by_products, *in_8, bias),
                "mmkv, 8 bits": partial(ours, *in_8, bias),
                "products, 4 bits": partial(_by_products, *in_4, bias),
                "mmkv, 4 bits": partial(ours, *in_4, bias),
            }
            for name, call in ways.items():
                about: Row = {"R": R, "G": G, "U": U, "D": D, "way": name}
                try:
                    start = time.perf_counter()
                    call()
                    first = bench.now() - start
                    us = 1e6 * (bench.timed(call, 3) if bench.tiny else _graphed(call))
                except RuntimeError as error:
                    bench.put("kernels", **about, error=first_line(error)[:120])
                    continue
                size = next((n for kind, n in _BYTES.items() if kind in name), bias.itemsize)
                gb_s = round(2 * R * U * D * size / us / 1e3)
                row = about | {"us": round(us, 1), "gb_s": gb_s, "first_ms": round(1e3 * first, 1)}
                bench.put("kernels", **row)


# Of a code, and of a number of a key or a value.
_BYTES = {"8 bits": 1, "4 bits": 0.5}

# Calls in one graph whose replay is timed.
_CALLS = 20


def _coded(keys: Any, values: Any, bits: int) -> Any:
    """Return keys and values [R, U, D] as codes, with an exact first token and a full window."""
    import torch

    from mmkv.cache.quantize import WINDOW, QuantizedKV

    (R, U, _), device = keys.shape, keys.device
    filled = torch.ones(R, U, dtype=torch.bool, device=device)
    slots = torch.tensor([*range(U - WINDOW, U), 0], device=device).expand(R, -1).contiguous()
    stored = QuantizedKV.of(
        keys, values, filled, slots, bits=bits, start=U, opened=True, reuses=False
    )
    return stored.pairs([U], whole=False)[0]


def _by_products(q: Any, k: Any, v: Any, bias: Any) -> object:
    """Attend by two matrix products and a softmax."""
    from mmkv.cache.products import products, weighted_sums

    return weighted_sums((products(q, k, q.shape[-1] ** -0.5) + bias).softmax(-1), v)


def _fused(backend: Any, q: Any, k: Any, v: Any, bias: Any = None) -> object:
    """Attend by one of torch's kernels; queries [R, G, D], keys and values [R, U, D]."""
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    mask = None if bias is None else bias[:, None]
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)


def _graphed(call: Callable[[], object]) -> float:
    """Return the median seconds of a call in a replayed graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    measured: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        measured.append(start.elapsed_time(end) / 1e3 / _CALLS)
    return statistics.median(measured[1:])


def tests(bench: Bench) -> None:
    """Run the tests that need a card; on a CPU they skip."""
    where = "tests/core/test_gpu.py"
    if not Path(where).exists():
        bench.put("tests", note=f"{where} is in the source alone: run this in a clone")
        return
    command = [sys.executable, "-m", "pytest", where, "-p", "no:cacheprovider"]
    command += [] if bench.tiny else ["-n", "8"]
    process = subprocess.run(command, capture_output=True, text=True)
    bench.put("tests", rc=process.returncode, tail=process.stdout.strip().splitlines()[-12:])


def skewed_profile(model: Any) -> Any:
    """Return a profile of made-up copy scores, of which few are high, as in a language model."""
    from mmkv import adapters
    from mmkv.profiles import Profile

    r, config = random.Random(0), model.config.get_text_config()

    def share() -> float:
        (mean,) = r.choices((0.9, 0.4, 0.1, 0.01), (4, 6, 15, 75))
        return round(mean * r.uniform(0.7, 1.1), 4)

    H, L = config.num_key_value_heads, config.num_hidden_layers
    shares = [[share() for _ in range(H)] for _ in range(L)]
    shares[0][0] = 0.95
    found = tuple(map(tuple, shares))
    return Profile(policy="condense", samples=1, model=adapters.shape(config), retrieval=found)


def decode(bench: Bench) -> None:
    """Time decode steps of replies side by side: median milliseconds of a step, and bytes."""
    import torch

    from mmkv.attach import graph
    from mmkv.eval.speed import models

    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    graph.logger.setLevel(logging.INFO)
    graph.logger.addHandler(Said())
    model = models.make(TINY if bench.tiny else models.SHAPES[MODEL], bench.device)
    settings = [(1, 96)] if bench.tiny else SETTINGS
    for (batch, tokens), (label, options, cudnn) in _rows(settings, model):
        about: Row = {"B": batch, "N": tokens, "row": label}
        if time.monotonic() > bench.stop:
            bench.put("decode", **about, note="no time was left")
            return
        gc.collect()
        said.clear()
        if not bench.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
        try:
            measured = _reply(bench, model, batch, tokens, options)
        except RuntimeError as error:
            measured = {"error": f"{type(error).__name__}: {first_line(error)[:160]}"}
        bench.put("decode", **about, **measured, **({"graph": said[-1][:160]} if said else {}))


def _rows(
    settings: list[tuple[int, int]], model: Any
) -> Iterator[tuple[tuple[int, int], tuple[str, dict[str, Any] | None, bool]]]:
    """Yield settings and rows: a label, options of `wrap` or None, whether cuDNN may be chosen."""
    default = {"profile": skewed_profile(model)}
    fifth = {**default, "policy": "condense", "budget": 0.2}
    rows: list[tuple[str, dict[str, Any] | None, bool]] = [
        ("unwrapped", None, False),
        ("full", {"policy": "full"}, False),
        ("default", default, False),
        ("condense 0.2", fifth, False),
        ("condense 0.2, 8 bits", {**fifth, "kv_dtype": "int8"}, False),
        ("condense 0.2, 4 bits", {**fifth, "kv_dtype": "int4"}, False),
        ("snapkv 0.2", {"policy": "snapkv", "budget": 0.2}, False),
        ("condense 0.2, no graph", {**fifth, "graph": False}, False),
        ("unwrapped, cuDNN", None, True),
    ]
    for setting in settings:
        for row in rows:
            yield setting, row


def _reply(
    bench: Bench, model: Any, batch: int, tokens: int, options: dict[str, Any] | None
) -> Row:
    """Read one batch of prompts and decode; return its times and bytes."""
    import torch

    import mmkv
    from mmkv import calls
    from mmkv.attach.attachment import attachment_of
    from mmkv.cache.compressed import CompressedCache
    from mmkv.eval.speed import models

    warm, n = (2, 3) if bench.tiny else (WARM, STEPS)
    twin, cache = calls.twin(model), None
    if options is not None:
        attachment = attachment_of(mmkv.wrap(twin, **options))
        length = tokens + warm + n
        cache = CompressedCache(attachment.parts.config, attachment.plan, max_length=length)
    reply = models.reply(twin, models.make_prompt(model, batch, tokens), cache)
    row: Row = {"prefill_s": round(next(reply)[0], 3)}
    if not bench.tiny:
        row["prefill_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    early = [next(reply)[0] for _ in range(3)]
    slow = early[-1] > 0.5  # a kernel is planned in each step
    for _ in range(0 if slow else warm - 3):
        next(reply)
    steps = [next(reply) for _ in range(3 if slow else n)]
    seconds = statistics.median(s for s, *_ in steps)
    reply.close()
    row |= {"ms": round(1e3 * seconds, 2), "tokens_s": round(batch / seconds, 1)}
    row |= {"cache_mb": round(steps[-1][1] / 1e6, 1), "first_ms": [round(1e3 * x) for x in early]}
    return row


def prefill(bench: Bench) -> None:
    """Time the prefill of two layers of a 7B model's width; find where its time goes.

    Counts kernel launches, and lists condense's ten operations that take the device longest.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    import mmkv
    from mmkv import calls
    from mmkv.eval.speed import models

    model = models.make(TINY if bench.tiny else models.SHAPES[PREFILL_MODEL], bench.device)
    for tokens in (128,) if bench.tiny else (4096, 32768):
        ids = models.make_prompt(model, 1, tokens)
        for label in ("unwrapped", "condense", "condense, TF32", "snapkv", "prefixkv"):
            if time.monotonic() > bench.stop:
                bench.put("prefill", N=tokens, row=label, note="no time was left")
                return
            twin, policy = calls.twin(model), label.split(",")[0]
            heads = {"profile": skewed_profile(model)} if policy == "condense" else {}
            if policy != "unwrapped":
                mmkv.wrap(twin, policy, 0.2, **heads)
            torch.set_float32_matmul_precision("high" if "TF32" in label else "highest")

            def run(twin: Any = twin, ids: Any = ids) -> object:
                with torch.no_grad():
                    return twin(input_ids=ids, use_cache=True, logits_to_keep=1)

            ms = 1e3 * bench.timed(run, 1 if bench.tiny else 3)
            kinds = [ProfilerActivity.CPU, *([] if bench.tiny else [ProfilerActivity.CUDA])]
            with profile(activities=kinds) as events:
                run()
            found = events.key_averages()
            launches = sum(e.count for e in found if "LaunchKernel" in e.key)
            row = {"N": tokens, "row": label}
            bench.put("prefill", **row, ms=round(ms, 1), launches=launches)
            if label == "condense":
                _put_operations(bench, found, **row)


def _put_operations(bench: Bench, found: Any, **row: Any) -> None:
    """Record the ten operations of a profile that take longest: calls and milliseconds."""
    own = "self_cpu_time_total" if bench.tiny else "self_device_time_total"
    operations = [e for e in found if e.key.startswith("aten::")]
    for e in sorted(operations, key=lambda e: -getattr(e, own))[:10]:
        times = {"device_ms": round(e.self_device_time_total / 1e3, 2)}
        times["host_ms"] = round(e.self_cpu_time_total / 1e3, 2)
        bench.put("operations", **row, operation=e.key[6:], calls=e.count, **times)
