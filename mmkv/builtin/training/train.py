"""Trains the built-in model: `python -m mmkv.builtin.training.train --out DIR --minutes 90`.

Each step adds the gradients of batches with pictures and, every fourth step, one of texts. The
schedule runs on the share of the time (or of the steps) that has passed, so a run ends annealed
wherever it runs. `--resume` continues from the last checkpoint in DIR; the time already spent is
counted.

The shipped weights took 3,887 steps, about 90 minutes on two busy CPU cores, in which the schedule
was changed by hand. `python -m mmkv.builtin.training.evaluate` prints what they reach.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from mmkv.builtin import scenes
from mmkv.builtin.training import curriculum
from mmkv.builtin.training.build import build
from mmkv.builtin.training.curriculum import IGNORE, IMAGE_TOKENS

_SAVE_EVERY = 240.0  # seconds between two checkpoints


class Probe(nn.Module):
    """Asks each image token for the colour and the shape of what it shows, which teaches the tower.

    The scores of the words are dot products with the text model's own word embeddings, so that an
    image token comes to look like the words for its object and the text model can copy from it.
    Only "nothing" has vectors of its own. The probe is dropped after training.
    """

    words: Tensor

    def __init__(self, tokenizer: Any, hidden: int) -> None:
        super().__init__()
        names = [f" {word}" for word in (*scenes.COLORS, *scenes.SHAPES)]
        ids = tokenizer(names, add_special_tokens=False).input_ids
        self.register_buffer("words", torch.tensor(ids).flatten())
        self.nothing = nn.Linear(hidden, 2)

    def forward(self, features: Tensor, cells: Tensor, embedding: Tensor) -> Tensor:
        """The loss for `features` `[N * 144, D]` and what the `cells` `[N, 9, 2]` hold."""
        side = math.isqrt(IMAGE_TOKENS) // 3
        # Of each cell the inner 2 x 2 of 4 x 4 tokens: the outer ones often see background alone.
        grid = features.reshape(-1, 3, side, 3, side, features.shape[-1])
        inner = grid[:, :, 1:3, :, 1:3].transpose(2, 3).flatten(0, 4)
        wanted = cells.flatten(0, 1).repeat_interleave(4, 0)
        scores = (inner @ embedding[self.words].T).float()
        nothing = self.nothing(inner).float()
        colors, shapes = scores.split([len(scenes.COLORS), len(scenes.SHAPES)], dim=1)
        loss = F.cross_entropy(torch.cat([nothing[:, :1], colors], 1), wanted[:, 0])
        return loss + F.cross_entropy(torch.cat([nothing[:, 1:], shapes], 1), wanted[:, 1])


def batch_loss(model: Any, probe: Probe, batch: curriculum.Batch) -> Tensor:
    """The mean loss over the answers, and a quarter of the probe's."""
    keep = batch["labels"][:, 1:] != IGNORE
    pixels, loss = batch.get("pixel_values"), torch.zeros((), device=keep.device)
    if keep.numel():
        # The model's own forward would compute logits at every position; only answers need them.
        out = model.model(input_ids=batch["input_ids"], pixel_values=pixels, use_cache=False)
        features = out.image_hidden_states
        logits = model.lm_head(out.last_hidden_state[:, :-1][keep]).float()
        loss = F.cross_entropy(logits, batch["labels"][:, 1:][keep])
    else:
        features = torch.cat(tuple(model.model.get_image_features(pixels).pooler_output))
    if "cells" not in batch:
        return loss
    return loss + 0.25 * probe(features, batch["cells"], model.get_input_embeddings().weight)


def learning_rate(done: float, step: int, peak: float) -> float:
    """The rate at the share `done`: 100 steps of warm-up, then a cosine to 2 %."""
    warm = min(1.0, (step + 1) / 100)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def save(path: Path, parts: dict[str, Any], **progress: float) -> None:
    """Write a checkpoint so that a reader never sees half of one."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, **progress}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def train(
    out: Annotated[Path, typer.Option(help="Folder for checkpoint and weights.")],
    minutes: Annotated[float | None, typer.Option(help="Length of the run, all told.")] = None,
    steps: Annotated[int | None, typer.Option(help="Length of the run in steps.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the checkpoint in out.")] = False,
    peak: Annotated[float, typer.Option(help="Highest learning rate.")] = 1.5e-3,
    small: Annotated[bool, typer.Option(help="Tiny batches, for a smoke run.")] = False,
    compile: Annotated[bool, typer.Option(help="Compile the layers.")] = True,
    log_every: Annotated[int, typer.Option(help="Steps between log lines.")] = 50,
) -> int:
    """Train and leave `checkpoint.pt` and the exported model in `out`; return the steps made."""
    if (minutes is None) == (steps is None):
        raise ValueError(f"give minutes or steps, got minutes={minutes} and steps={steps}")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    built, processor = build()
    model: Any = built.to(device)  # type: ignore[arg-type]
    # Eager attention compiles into far faster backward code on a CPU than the fused kernel's.
    model.set_attn_implementation("eager")
    probe = Probe(processor.tokenizer, model.config.text_config.hidden_size).to(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2] + [*probe.parameters()]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98))
    parts = {"model": model, "probe": probe, "optimizer": optimizer}
    checkpoint, step, seconds = out / "checkpoint.pt", 0, 0.0
    if resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        step, seconds = state["step"], state["seconds"]
    if compile:
        torch.compiler.config.recompile_limit = 32  # one compiled shape for each kind of batch
        tower = model.model.vision_tower.encoder
        for layer in (*model.model.language_model.layers, *tower.layers):
            layer.compile(dynamic=False)

    model.train()
    meter: dict[str, list[float]] = {}
    begun, saved = time.monotonic() - seconds, time.monotonic()
    while (done := step / steps if steps else seconds / (60 * (minutes or 1))) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, step, peak)
        for task, batch in curriculum.draw_batches(processor, done, step, small):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = batch_loss(model, probe, {k: x.to(device) for k, x in batch.items()})
            loss.backward()
            meter.setdefault(task, []).append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seconds = step + 1, time.monotonic() - begun
        if step % log_every == 0:
            losses = [f"{k}: {math.fsum(x) / len(x):.3f}" for k, x in sorted(meter.items())]
            print(f"step {step} {seconds / 60:.1f} min {done:.0%}", *losses, sep=" | ", flush=True)
            meter = {}
        if time.monotonic() - saved > _SAVE_EVERY:
            save(checkpoint, parts, step=step, seconds=seconds)
            saved = time.monotonic()
    save(checkpoint, parts, step=step, seconds=seconds)
    model.to(device="cpu", dtype=torch.bfloat16).save_pretrained(out / "weights")
    processor.save_pretrained(out / "weights")
    # safetensors writes files only the owner can read; an installed package is read by others.
    (out / "weights" / "model.safetensors").chmod(0o644)
    print(f"done: {step} steps in {seconds / 60:.1f} minutes")
    return step


if __name__ == "__main__":
    typer.run(train)
