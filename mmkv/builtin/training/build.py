"""The untrained built-in model: the shipped configuration with initial weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mmkv.builtin import WEIGHTS

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration, LlavaProcessor


def build() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The untrained model in float32, its first layers set so that look-up can start."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlavaConfig.from_pretrained(WEIGHTS)
    model = hf.LlavaForConditionalGeneration(config).float()  # type: ignore[arg-type]
    model.generation_config = hf.GenerationConfig.from_pretrained(WEIGHTS)
    with torch.no_grad():
        _start_lookup(model)
    return model, hf.LlavaProcessor.from_pretrained(WEIGHTS)


def _start_lookup(model: LlavaForConditionalGeneration) -> None:
    """Write an induction circuit into the first three text layers, in place.

    Look-up by "previous token, then match, then copy" is a phase change that a small model takes
    very long to find, and then sharpens quickly. Two steps of it are written here:

    - layer 0, key-value head 0: attend to the previous token (query head 0) and the one before it
      (query head 1), and write a random projection of what was there. Constant query and key
      biases whose rotary phases meet at that distance make the attention independent of content.
    - layers 1 and 2, key-value heads 0 and 1: the query reads the token itself, the key reads
      what layer 0 wrote there, so a token attends to the places that follow its earlier copies;
      value and output copy the token found there towards the logits. Matching uses the rotary
      pairs that hardly turn within the context.
    """
    text = model.model.language_model
    hidden, D = text.config.hidden_size, text.config.head_dim
    half = D // 2
    frequency = text.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    slow = torch.nonzero(frequency * 1024 < 1.0).flatten()
    slow = torch.cat([slow, slow + half])

    embedding = text.embed_tokens.weight
    embedding.normal_(0, 0.2)
    model.lm_head.weight.copy_(embedding * 0.1)

    first = text.layers[0].self_attn
    amplitude = torch.zeros(half)
    amplitude[:5] = torch.tensor([8.0, 6.5, 6.5, 6.0, 6.0])
    first.k_proj.weight[:D] = 0
    first.k_proj.bias[:D] = torch.cat([amplitude, torch.zeros(half)])
    read = torch.randn(D, hidden) / math.sqrt(hidden)
    first.v_proj.weight[:D] = read
    writes = [torch.linalg.qr(torch.randn(hidden, D)).Q for _ in range(2)]
    for head, write in enumerate(writes):
        rows = slice(head * D, (head + 1) * D)
        # A key at distance d is turned by -d against the query: turn it back by that distance.
        angle = (head + 1) * frequency
        first.q_proj.weight[rows] = 0
        turned = [amplitude * torch.cos(angle), -amplitude * torch.sin(angle)]
        first.q_proj.bias[rows] = torch.cat(turned)
        first.o_proj.weight[:, rows] = 0.4 * write

    for attention in (text.layers[1].self_attn, text.layers[2].self_attn):
        for head in (0, 1):
            keys = slice(head * D, (head + 1) * D)
            pick = torch.linalg.qr(torch.randn(D, D)).Q[: len(slow)]
            rows = torch.zeros(D, hidden)
            rows[slow] = pick @ read
            attention.k_proj.weight[keys] *= 0.25
            attention.k_proj.weight[keys][slow] += 1.3 * pick @ writes[0].T
            copy = torch.linalg.qr(torch.randn(hidden, D)).Q
            attention.v_proj.weight[keys] = 0.5 * copy.T
            for query in (2 * head, 2 * head + 1):
                span = slice(query * D, (query + 1) * D)
                attention.q_proj.weight[span] *= 0.25
                attention.q_proj.weight[span] += 1.6 * rows
                attention.o_proj.weight[:, span] = 0.5 * copy
