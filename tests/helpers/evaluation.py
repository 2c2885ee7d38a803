"""A tokenizer, samples and a saved model for the tests of the evaluation."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.models import PAD, VOCAB, make_model
from mmkv.eval.samples import Sample

WORDS = [f"w{i}" for i in range(4, VOCAB)]


def letters(text: str) -> int:
    """Tokens of four letters."""
    return len(text) // 4


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def make_tokenizer() -> Any:
    """Whole words "w4" to "w119", blanks between them, and the models' special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<image>", *WORDS]
    words = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w4")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    assert names[PAD] == "<pad>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<image>"],
    )


def make_samples(lengths: tuple[int, ...] = (40, 31, 52, 36, 45), new: int = 6) -> list[Sample]:
    """Prompts of these many words, each with an answer of 3 to 7 words."""
    rng = random.Random(0)

    def text(n: int) -> str:
        return " ".join(rng.choices(WORDS, k=n))

    return [
        Sample(
            id=f"s{i}",
            suite="tiny",
            task="even" if i % 2 == 0 else "odd",
            prompt=text(n),
            answers=(text(3 + 2 * i % 5),),
            chat=False,
            max_new_tokens=new,
            metric="token_f1",
            tags=("all", "first") if i == 0 else ("all",),
        )
        for i, n in enumerate(lengths)
    ]


def asking(samples: list[Sample]) -> list[Sample]:
    """The samples, each of which asks with the last two words of its prompt."""
    return [replace(x, question=" ".join(x.prompt.split()[-2:])) for x in samples]


def predicted(model: Any, row: dict[str, Tensor], reply: list[int]) -> tuple[Tensor, Any]:
    """Logits [T, V] of each token of a reply to one prompt, token by token, and the cache."""
    with torch.no_grad():
        out = model(**row, use_cache=True)
        cache, found = out.past_key_values, [out.logits[0, -1]]
        for n, token in enumerate(reply[:-1], start=row["input_ids"].shape[1]):
            places = {"position_ids": torch.tensor([[n]]), "attention_mask": torch.ones(1, n + 1)}
            out = model(input_ids=torch.tensor([[token]]), past_key_values=cache, **places)
            found.append(out.logits[0, -1])
    return torch.stack(found).double(), cache


def divergence_of(given: Tensor, wanted: Tensor) -> float:
    """By torch's own formula, summed over tokens, of logits [T, V]."""
    logs = given.log_softmax(-1), wanted.log_softmax(-1)
    return torch.nn.functional.kl_div(*logs, reduction="sum", log_target=True).item()


def save_model(folder: Path) -> Path:
    """A tiny Llama and its tokenizer, as `from_pretrained` reads them."""
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
