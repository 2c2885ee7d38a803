"""Tiny random models of the LLaMA family and of LLaVA, and prompts for them."""

import itertools
from collections.abc import Sequence
from functools import partial

import torch

from helpers import zoo
from helpers.configs import CONFIGS, IMAGE, PAD, VOCAB

IMAGE_TOKENS = 16  # of one picture: 16 x 16 pixels in patches of 4
_CLASSES = {"llama": "LlamaForCausalLM", "llava-llama": "LlavaForConditionalGeneration"}
_KEY_VALUE_HEADS = {"llama-mha": 4, "llama-mqa": 1}


def make_model(name: str, attn: str = "sdpa", layers: int | None = None) -> torch.nn.Module:
    """A tiny model: llama, llama-mha, llama-mqa or llava-llama; of two layers by default."""
    kind = _CLASSES["llama" if name in _KEY_VALUE_HEADS else name]
    config = CONFIGS[kind]()
    if name in _KEY_VALUE_HEADS:
        config.num_key_value_heads = _KEY_VALUE_HEADS[name]
    text = config.get_text_config()
    text.max_position_embeddings = 2048
    text.num_hidden_layers = layers or text.num_hidden_layers
    model = zoo.build(kind, config, attn)
    # A reply with an image token would stand for a picture that nobody gave.
    model.generation_config.suppress_tokens = [IMAGE]
    return model


def scaled_model(name: str, layers: int | None = None) -> torch.nn.Module:
    """With a scale of its own in each layer, as Gemma's differ from `D ** -0.5`."""
    model = make_model(name, "eager", layers)
    decoder_layers = model.get_decoder().layers
    scales = (0.5, 0.1, 0.9)[: len(decoder_layers)]
    for layer, scale in zip(decoder_layers, scales, strict=True):
        layer.self_attn.scaling = scale
    return model


def make_inputs(name: str, lengths: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """A left-padded batch with rows of these lengths; a LLaVA row holds one or two pictures."""
    g = torch.Generator().manual_seed(seed)
    N = max(lengths)
    ids = torch.full((len(lengths), N), PAD)
    mask = torch.zeros(len(lengths), N, dtype=torch.long)
    pictures = 0
    for b, n in enumerate(lengths):
        ids[b, N - n :] = torch.randint(4, VOCAB, (n,), generator=g)
        mask[b, N - n :] = 1
        if name.startswith("llava"):
            for i in range(2 if n > 60 else 1):
                start = N - n + 3 + i * (IMAGE_TOKENS + 5)
                ids[b, start : start + IMAGE_TOKENS] = IMAGE
                pictures += 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if pictures:
        inputs["pixel_values"] = torch.randn(pictures, 3, 16, 16, generator=g)
    return inputs


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def left_padded(N: int, padding: Sequence[int]) -> torch.Tensor:
    """bool [B, N]: which tokens of rows with so much padding are none of it."""
    return torch.stack([torch.arange(N) >= n for n in padding])


def row_of(inputs: dict[str, torch.Tensor], b: int) -> dict[str, torch.Tensor]:
    """One row of a batch, without its padding."""
    real = inputs["attention_mask"][b].bool()
    row = {k: inputs[k][b : b + 1, real] for k in ("input_ids", "attention_mask")}
    if "pixel_values" in inputs:
        per_row = [
            (inputs["input_ids"][i] == IMAGE).sum().item() // IMAGE_TOKENS for i in range(b + 1)
        ]
        start = sum(per_row[:b])
        row["pixel_values"] = inputs["pixel_values"][start : start + per_row[b]]
    return row


def continued(inputs, *more):
    """Rows that go on with more tokens."""
    ids, mask = torch.cat([inputs["input_ids"], *more], dim=1), inputs["attention_mask"]
    mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return {"input_ids": ids, "attention_mask": mask}


def next_turn(inputs, sequences, image: bool, seed: int = 5, new: int = 30):
    """The conversation so far with `new` tokens more, in LLaVA with a new picture among them."""
    g = torch.Generator().manual_seed(seed)
    B = len(sequences)
    ids = torch.randint(4, VOCAB, (B, new), generator=g)
    more = {}
    if image:
        ids[:, 4 : 4 + IMAGE_TOKENS] = IMAGE
        more["pixel_values"] = torch.randn(B, 3, 16, 16, generator=g)
    return {**continued({**inputs, "input_ids": sequences}, ids), **more}


def ragged_turn(inputs, words, lengths, seed=5, rows=None, pictures=()):
    """The conversation so far, `words` said last, and `lengths` [B] new tokens, left-padded.

    `rows` are those of the B that take part, all by default. In LLaVA the rows `pictures` show one
    more each, from their third new token on.
    """
    rows, g = range(len(lengths)) if rows is None else rows, torch.Generator().manual_seed(seed)
    new = [torch.randint(4, VOCAB, (n,), generator=g) for n in lengths]
    pixels = [torch.randn(1, 3, 16, 16, generator=g) for _ in lengths]
    for b in pictures:
        new[b][2 : 2 + IMAGE_TOKENS] = IMAGE
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    asked = [new[b] for b in rows]
    ids = inputs["input_ids"], words, pad(asked, padding_value=PAD)
    mask = inputs["attention_mask"], torch.ones_like(words), pad([*map(torch.ones_like, asked)])
    shown = [pixels[b] for b in rows if b in pictures]
    more = {"pixel_values": torch.cat(shown)} if shown else {}
    return {"input_ids": torch.cat(ids, 1), "attention_mask": torch.cat(mask, 1), **more}


def ending(error, after):
    """A hook that lets a layer run `after` times."""
    passes = itertools.count()

    def hook(*args):
        if next(passes) == after:
            raise error

    return hook
