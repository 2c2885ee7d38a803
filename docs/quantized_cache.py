"""Measure transformers' QuantizedCache beside kv_dtype="int4" (docs/quality.md).

`python docs/quantized_cache.py MODEL [PROMPTS]`, with `pip install hqq`: every cache holds all
tokens of prompts of the documents suite. Prints bytes after the prompt as a share of a 16-bit
cache's, the divergence from its next-token distributions in nats a token, and the share of equal
first choices. hqq cannot pack every number of rows: such prompts count for neither cache.
"""

import sys
from collections import defaultdict
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache

import mmkv
from mmkv import chat, forcing
from mmkv.eval.arguments import token_counter
from mmkv.eval.prompts import Encoder
from mmkv.eval.suites.registry import load_suite

OURS = 'mmkv, kv_dtype="int4"'


def nbytes(x: Any) -> int:
    """Return the bytes of all tensors in a quantised tensor of hqq: codes, steps and zeros."""
    if isinstance(x, torch.Tensor):
        return x.numel() * x.element_size()
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return sum(map(nbytes, inner))


def quantised(model: Any, filled: Any, nbits: int) -> Any:
    """Return a QuantizedCache of the pairs in a filled DynamicCache; groups of 64 numbers."""
    cache = QuantizedCache("hqq", model.config, nbits=nbits, axis_key=1, axis_value=1)
    for i, layer in enumerate(filled.layers):
        cache.update(layer.keys, layer.values, i)
    return cache


def main(name: str, prompts: int = 16) -> None:
    """Compare the caches on each prompt; print their means for 4 and for 2 bits."""
    loaded = chat.load(name, "cpu", "bfloat16", None)
    model, encoder = loaded.model, Encoder(loaded.processor, chat.max_positions(loaded.model))
    samples = load_suite("documents", "novels", limit=prompts, count=token_counter(name))
    found: dict[tuple[int, str], list[tuple[float, float, int, int]]] = defaultdict(list)
    for sample in samples:
        inputs = encoder.batch([sample])
        if sample.is_continuation:
            reply = [encoder.answer(sample)]
        else:
            reply = forcing.replies(model, inputs, sample.max_new_tokens)
        full = forcing.log_probabilities(model, inputs, reply)
        with torch.no_grad():
            filled: Any = DynamicCache(config=model.config)
            out = model(**inputs, use_cache=True, past_key_values=filled, logits_to_keep=1)
        plain = sum(nbytes([x.keys, x.values]) for x in filled.layers)
        with mmkv.wrapped(model, "full", kv_dtype="int4"):
            ours = forcing.score_answers(model, inputs, reply, full=full)
        for nbits in (4, 2):
            try:
                cache = quantised(model, filled, nbits)
                held = sum(nbytes([x._quantized_keys, x._quantized_values]) for x in cache.layers)
                read = cache, out.logits
                theirs = forcing.score_answers(
                    model, inputs, reply, full=full, read=lambda read=read: read
                )
            except RuntimeError as error:
                print(f"{nbits} bits, {inputs['input_ids'].shape[1]} tokens: {error}")
                continue
            for label, scored, size in (
                (f"QuantizedCache, hqq, {nbits} bits", theirs, held),
                (OURS, ours, ours.held_bytes),
            ):
                row = size / plain, scored.divergence[0], scored.same[0], scored.compared[0]
                found[nbits, label].append(row)
    for (nbits, label), rows in found.items():
        share, divergence, same, tokens = (sum(x) for x in zip(*rows, strict=True))
        print(
            f"{len(rows)} prompts that {nbits} bits can pack: {label}: {share / len(rows):.1%} of "
            f"the bytes, {divergence / tokens:.4f} nats a token, {same / tokens:.0%} same"
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
