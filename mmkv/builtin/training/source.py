"""Trains a small language model on the Python standard library: `python -m
mmkv.builtin.training.source --out runs/source --minutes 60`.

One file in twelve is held out; `mmkv eval continuation` measures the model on these. Checkpoints
and `--resume` work as in `mmkv.builtin.training.train`. The weights are not shipped.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.builtin import source
from mmkv.builtin.training.build import BOS, EOS, PAD
from mmkv.builtin.training.train import Progress, export, learning_rate, restore, save

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

_VOCABULARY = 4096
_LENGTH = 1024


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )


def build_model(*, layers: int = 4, hidden: int = 192) -> LlamaForCausalLM:
    """A Llama without training: grouped-query attention, heads of 32 numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=hidden,
            intermediate_size=11 * hidden // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            max_position_embeddings=2 * _LENGTH,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def read_tokens(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts one behind the other, each after a mark of its beginning; int64 [N]."""
    import torch

    ids = tokenizer([f"{BOS}{text}" for text in texts], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for text in ids for token in text])


def train(
    out: Path,
    minutes: float | None = None,
    steps: int | None = None,
    resume: bool = False,
    peak: float = 4e-3,
    batch: int = 4,
    length: int = _LENGTH,
    log_every: int = 50,
    save_every: float = 240.0,
) -> Progress:
    """Train and leave `checkpoint.pt` and the exported model in `out`; return how far it got."""
    import torch

    if (minutes is None) == (steps is None):
        raise ValueError(f"give minutes or steps, got minutes={minutes} and steps={steps}")
    out.mkdir(parents=True, exist_ok=True)
    modules = source.files(held_out=False).values()
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in modules]
    tokenizer = build_tokenizer(texts)
    model: Any = build_model()
    tokens = read_tokens(tokenizer, texts)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    # Matrices of the layers by Muon, which learns more from a step; embeddings and norms by AdamW.
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not x for x in matrices)]
    muon = torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.98))
    parts: dict[str, Any] = {"model": model, "muon": muon, "adamw": adamw}
    progress, checkpoint = Progress(), out / "checkpoint.pt"
    if resume and checkpoint.exists():
        progress = restore(checkpoint, device, parts)
    model.train()
    begun, saved, losses = time.monotonic() - progress.seconds, time.monotonic(), []
    while True:
        progress.seconds = time.monotonic() - begun
        share = progress.step / steps if steps else progress.seconds / (60 * (minutes or 1))
        if share >= 1:
            break
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = learning_rate(share, progress.step, peak)
        # Drawn by the step's number, so that a resumed run reads what the whole one would.
        generator = torch.Generator().manual_seed(progress.step)
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        ids = torch.stack([tokens[at : at + length] for at in starts.tolist()]).to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        progress.step += 1
        if progress.step % log_every == 0:
            mean = math.fsum(losses) / len(losses)
            minute = progress.seconds / 60
            print(f"step {progress.step} {minute:.1f} min {share:.0%} loss {mean:.3f}", flush=True)
            losses = []
        if time.monotonic() - saved > save_every:
            save(checkpoint, progress, **parts)
            saved = time.monotonic()
    save(checkpoint, progress, **parts)
    export(model.eval(), tokenizer, out / "weights")
    return progress


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmkv.builtin.training.source", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and weights")
    parser.add_argument("--minutes", type=float, help="length of the run in minutes, all told")
    parser.add_argument("--steps", type=int, help="length of the run in steps")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in out")
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--batch", type=int, default=4, help="texts of a step")
    parser.add_argument("--length", type=int, default=_LENGTH, help="tokens of a text")
    parser.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    progress = train(**vars(parser.parse_args(argv)))
    print(f"done: {progress.step} steps in {progress.seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
