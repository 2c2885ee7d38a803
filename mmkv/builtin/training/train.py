"""Trains the built-in model: `python -m mmkv.builtin.training.train --out DIR --minutes 90`.

Each step adds the gradients of batches with pictures and, every fourth step, one of texts. The
schedule runs on the share of the time (or of the steps) that has passed, so a run ends annealed
wherever it runs. `--resume` continues from the last checkpoint in DIR; the time already spent is
counted.

The shipped weights took 3,887 steps, about 90 minutes on two busy CPU cores. The schedule was not
yet what it is here: the probe came in at step 693, 1,566 steps of the vision tower alone followed
step 1,109, the probe took the word embeddings at step 2,893, and the picture counter of
`mmkv.builtin.training.build` was written into the model, with faint heads that compare its marks,
at about step 3,610. `python -m mmkv.builtin.training.evaluate` prints what they reach.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmkv.builtin import texts
from mmkv.builtin.training import build, curriculum
from mmkv.builtin.training.curriculum import IGNORE, Batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from transformers import LlavaProcessor

    from mmkv.builtin.training.probe import Probe


# Until which share of a run texts of 128, 256, 512 and 1152 tokens come how often.
_TEXTS = (
    (0.04, (1, 1, 0, 0)),
    (0.15, (1, 3, 1, 0)),
    (0.4, (0, 2, 3, 1)),
    (math.inf, (0, 1, 1, 2)),
)


@dataclass
class Progress:
    """How far a run is; what a checkpoint holds beside the tensors."""

    step: int = 0
    seconds: float = 0.0


def draw_batches(processor: LlavaProcessor, done: float, step: int, small: bool) -> list[Batch]:
    """The batches of one step when the share `done` of the run has passed.

    At first the vision tower learns alone, from the probe, beside short texts: its steps are
    several times cheaper without the text model. They go on beside the rest, while texts grow from
    128 to 1152 tokens; several pictures, and pictures with texts, come in last. `small` shrinks
    everything for a smoke run.
    """
    rng = random.Random(f"train:{step}")
    tokenizer = processor.tokenizer
    plan: list[tuple[str, int, int]] = []
    if step % 4 == 0:  # look-up is learnt early, then only kept and lengthened
        weights = next(weights for until, weights in _TEXTS if done < until)
        length, count = rng.choices([(128, 20), (256, 10), (512, 4), (1152, 2)], weights)[0]
        plan.append(("text", 128, 2) if small else ("text", length, count))
    several = 0.0 if done < 0.15 else 0.1 if done < 0.62 else 0.35
    kind = rng.random()
    plan.append(("cells", 0, 4 if small else 32))
    if done < 0.08:
        pass
    elif kind >= several:
        plan.append(("one picture", 304, 2 if small else 16))
    elif kind >= several / 3:
        plan.append(("two or three pictures", 640, 1 if small else 6))
    else:
        plan.append(("picture and text", 512, 1 if small else 8))

    batches = []
    for task, length, count in plan:
        writers = []
        for row in range(count):
            if task == "text":
                writers.append(curriculum.text_sequence(tokenizer, rng, length))
            elif task == "cells":
                writers.append(curriculum.scene_alone(tokenizer, rng))
            elif task == "picture and text":
                writers.append(curriculum.text_sequence(tokenizer, rng, length, picture=True))
            else:
                # Always 16 pictures in six rows: compiled code is kept for few shapes only.
                pictures = 1 if task == "one picture" else 3 - (row % 3 == 0)
                writers.append(curriculum.picture_sequence(tokenizer, rng, pictures, length))
        batches.append(curriculum.collate(f"{task} {length}" if task == "text" else task, writers))
    return batches


def batch_loss(
    model: Any, probe: Probe, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean loss over the answers, the probe's, the predictions and the labels."""
    import torch
    import torch.nn.functional as F

    keep = batch.labels[:, 1:] != IGNORE
    labels = batch.labels[:, 1:][keep]
    loss = seen = probe.nothing.bias.new_zeros(())
    guess = labels
    if batch.labels.shape[1] == 0:
        features = model.model.get_image_features(batch.pixel_values).pooler_output
        features = torch.cat(tuple(features))
    else:
        # The model's own forward would compute logits at every position; only answers need them.
        out = model.model(
            input_ids=batch.input_ids, pixel_values=batch.pixel_values, use_cache=False
        )
        features = out.image_hidden_states
        logits = model.lm_head(out.last_hidden_state[:, :-1][keep]).float()
        loss, guess = F.cross_entropy(logits, labels), logits.detach().argmax(-1)
    if batch.cells is not None:
        seen = probe(features, batch.cells, model.get_input_embeddings().weight)
    return loss, seen, guess, labels


def learning_rate(done: float, step: int, peak: float) -> float:
    """The rate at the share `done`: 100 steps of warm-up, then a cosine to 2 %."""
    warm = min(1.0, (step + 1) / 100)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def save(path: Path, progress: Progress, **parts: Any) -> None:
    """Write a checkpoint so that a reader never sees half of one."""
    import torch

    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    state |= {"progress": asdict(progress), "rng": torch.get_rng_state()}
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def restore(path: Path, device: Any, parts: Mapping[str, Any]) -> Progress:
    """Give the parts and torch's generator the state that `save` wrote."""
    import torch

    state = torch.load(path, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["rng"].cpu())
    return Progress(**state["progress"])


def export(model: Any, processor: Any, folder: Path) -> None:
    """Write the weights in bfloat16 with configuration, tokenizer and processor."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    # safetensors writes files only the owner can read; an installed package is read by others.
    (folder / "model.safetensors").chmod(0o644)


def train(
    out: Path,
    minutes: float | None = None,
    steps: int | None = None,
    resume: bool = False,
    peak: float = 1.5e-3,
    small: bool = False,
    compiled: bool = True,
    log_every: int = 50,
    save_every: float = 240.0,
) -> Progress:
    """Train and leave `checkpoint.pt` and the exported model in `out`; return how far it got."""
    import torch

    from mmkv.builtin.training.probe import Probe

    if (minutes is None) == (steps is None):
        raise ValueError(f"give minutes or steps, got minutes={minutes} and steps={steps}")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    processor = build.build_processor()
    model: Any = build.build_model(processor)
    model.to(device)
    # Eager attention compiles into far faster backward code on a CPU than the fused kernel's.
    model.set_attn_implementation("eager")
    probe = Probe(processor.tokenizer, model.config.text_config.hidden_size).to(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    vectors += probe.parameters()
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98))
    parts: dict[str, Any] = {"model": model, "probe": probe, "optimizer": optimizer}
    progress = Progress()
    checkpoint = out / "checkpoint.pt"
    if resume and checkpoint.exists():
        progress = restore(checkpoint, device, parts)
    if compiled:
        torch.compiler.config.recompile_limit = 32  # one compiled shape for each kind of batch
        tower = model.model.vision_tower.encoder
        for layer in (*model.model.language_model.layers, *tower.layers):
            layer.compile(dynamic=False)
    values = torch.zeros(len(processor.tokenizer), dtype=torch.bool, device=device)
    words = [f" {w}" for w in texts.VALUES]
    values[processor.tokenizer(words, add_special_tokens=False).input_ids] = True

    model.train()
    meter: dict[str, NDArray[np.float64]] = {}
    begun, saved = time.monotonic() - progress.seconds, time.monotonic()
    while True:
        progress.seconds = time.monotonic() - begun
        share = progress.step / steps if steps else progress.seconds / (60 * (minutes or 1))
        if share >= 1:
            break
        rate = learning_rate(share, progress.step, peak)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for batch in draw_batches(processor, share, progress.step, small):
            started = time.monotonic()
            batch.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss, seen, guess, labels = batch_loss(model, probe, batch)
            (loss + 0.25 * seen).backward()
            right = (guess == labels)[values[labels]].float().mean().item()
            spent = time.monotonic() - started
            found = np.array([1.0, loss.item(), right, seen.item(), spent])
            meter[batch.task] = meter.get(batch.task, 0.0) + found
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        if progress.step % log_every == 0:
            print(_line(progress, share, rate, meter), flush=True)
            meter = {}
        if time.monotonic() - saved > save_every:
            save(checkpoint, progress, **parts)
            saved = time.monotonic()
    save(checkpoint, progress, **parts)
    export(model, processor, out / "weights")
    return progress


def _line(
    progress: Progress, share: float, rate: float, meter: dict[str, NDArray[np.float64]]
) -> str:
    parts = [f"step {progress.step} {progress.seconds / 60:.1f} min {share:.0%} lr {rate:.1e}"]
    for task, (n, loss, right, seen, spent) in sorted(meter.items()):
        # Share of look-up values predicted right; a batch without look-ups has none.
        value = f" value {right / n:.2f}" if right == right else ""
        probe = f" probe {seen / n:.3f}" if seen else ""
        parts.append(f"{task}: loss {loss / n:.3f}{value}{probe} {spent / n:.2f}s")
    return " | ".join(parts)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmkv.builtin.training.train", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and weights")
    parser.add_argument("--minutes", type=float, help="length of the run in minutes, all told")
    parser.add_argument("--steps", type=int, help="length of the run in steps")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in out")
    parser.add_argument("--peak", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--small", action="store_true", help="tiny batches, for a smoke run")
    parser.add_argument(
        "--no-compile", action="store_false", dest="compiled", help="do not compile the layers"
    )
    parser.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    progress = train(**vars(parser.parse_args(argv)))
    print(f"done: {progress.step} steps in {progress.seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
