"""First stage of a LLaVA around SmolLM2: its vision tower and projector learn without the text.

    python -m mmkv.builtin.training.tower --out DIR [--pictures 80000]

Each image token is asked what it shows: kind, name, colour, size and place of the thing that covers
it. The projector learns to give the sum of the text model's own embeddings of those words, so that
the text model finds words it knows. A step costs a hundredth of one with the text model.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmkv.builtin import drawings
from mmkv.builtin.training.assembly import PATCH, SIDE, arguments, untrained

IGNORE = -100
_KINDS = ("shape", "word", "number")
_NAMES = (*drawings.SHAPES, *drawings.WORDS, *map(str, range(100)))
# What an image token is asked for, and between how many answers it chooses.
FIELDS = {"kind": 4, "name": len(_NAMES), "color": 10, "size": 2}
_SIZES = (192, 192, 256, 384)


def pixels(scene: drawings.Scene, rng: random.Random) -> Tensor:
    """A drawn scene as the image processor gives it, `[3, SIDE, SIDE]`."""
    from PIL import Image

    image = drawings.draw(scene, rng.choice(_SIZES))
    if image.size != (SIDE, SIDE):
        image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 127.5 - 1


def labels(scene: drawings.Scene) -> Tensor:
    """What each image token shows, `[144, 5]`: the fields, and the number of its place."""
    side, names = SIDE // PATCH, {name: i for i, name in enumerate(_NAMES)}
    colors, sizes = tuple(drawings.COLORS), tuple(drawings.SIZES)
    out = torch.full((side, side, 5), IGNORE)
    out[..., 0] = 0
    cells = torch.arange(side) * 3 // side
    out[..., 4] = cells[:, None] * 3 + cells
    for thing in scene.objects:
        left, top, right, bottom = (side * x for x in drawings.box(thing))
        rows, columns = (
            # The tokens whose middle it covers, or the one that its own middle is in.
            slice(min(int(low + 0.5), int((low + high) / 2)), max(int(high + 0.5), int(low) + 1))
            for low, high in ((top, bottom), (left, right))
        )
        size = sizes.index(thing.size) if thing.size else IGNORE
        kind, place = 1 + _KINDS.index(thing.kind), drawings.PLACES.index(thing.place)
        row = [kind, names[thing.name], colors.index(thing.color), size, place]
        out[rows, columns] = torch.tensor(row)
    return out.flatten(0, 1)


class Tower(nn.Module):
    """The tower and the projector of a model, asked what each image token shows."""

    kinds: Tensor
    names: Tensor
    colors: Tensor
    sizes: Tensor
    places: Tensor

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.tower, self.projector = model.model.vision_tower, model.model.multi_modal_projector
        self.heads = nn.Linear(model.config.vision_config.hidden_size, sum(FIELDS.values()))
        embedding = model.get_input_embeddings().weight.detach()

        def words(texts: Any, drop: int = 0, decay: float = 0.6) -> Tensor:
            rows = []
            for text in texts:
                ids = tokenizer(text, add_special_tokens=False).input_ids
                ids = ids[drop : len(ids) - drop] if drop else ids
                weights = decay ** torch.arange(len(ids))  # the order of a number's digits counts
                rows.append((weights[:, None] * embedding[ids]).sum(0) / weights.norm())
            return torch.stack(rows)

        shapes = words(f" {x}" for x in drawings.SHAPES)
        printed = words((f' "{x}"' for x in _NAMES[len(shapes) :]), drop=1)
        self.register_buffer("kinds", words((" nothing", " shape", " word", " number")))
        self.register_buffer("names", torch.cat([shapes, printed]))
        self.register_buffer("colors", words(f" {x}" for x in drawings.COLORS))
        self.register_buffer("sizes", words(f" {x}" for x in drawings.SIZES))
        self.register_buffer("places", words((f" {x}" for x in drawings.PLACES), decay=1.0))
        self.norm = float(embedding.norm(dim=1).mean())

    def targets(self, labels: Tensor) -> Tensor:
        """Sums of the embeddings of what the tokens show, `[..., D]`."""
        kind, name, color, size, place = labels.unbind(-1)
        total = self.places[place] * 2**0.5  # both words of a place count in full
        tables = (self.names, 1.3), (self.colors, 1.0), (self.sizes, 0.7)
        for (table, weight), index in zip(tables, (name, color, size), strict=True):
            total = total + weight * table[index.clamp(min=0)] * (index >= 0)[..., None]
        return total + 0.7 * self.kinds[kind] * (kind != 1)[..., None]

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss, and of the tokens that show something the share told rightly, by field."""
        features = self.tower(pixel_values).last_hidden_state[:, 1:]
        scores = self.heads(features).float().split(list(FIELDS.values()), dim=-1)
        loss, right = torch.zeros(()), []
        for i, score in enumerate(scores):
            flat, wanted = score.flatten(0, 1), labels[..., i].flatten()
            loss = loss + F.cross_entropy(flat, wanted, ignore_index=IGNORE)
            known = (labels[..., 0].flatten() > 0) & (wanted != IGNORE)
            right.append((flat.argmax(-1) == wanted)[known].float().mean())
        projected = self.projector(features).float()
        aligned = F.mse_loss(projected, self.targets(labels)) * projected.shape[-1] / self.norm**2
        return {"loss": loss + aligned, "right": torch.stack(right), "aligned": aligned.detach()}


def sample(seeds: dict[str, list[int]]) -> dict[str, list[Tensor]]:
    """Pictures and labels for a batch of seeds: fuller ones than are asked about later."""
    out: dict[str, list[Tensor]] = {"pixel_values": [], "labels": []}
    for seed in seeds["seed"]:
        rng = random.Random(f"tower:{seed}")
        count = rng.randint(3, 9)
        scene = drawings.make_scene(seed, "train", count, rng.randint(0, count * 2 // 3))
        out["pixel_values"].append(pixels(scene, rng))
        out["labels"].append(labels(scene))
    return out


def main(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the parts.")],
    pictures: Annotated[int, typer.Option(help="How many pictures are shown.")] = 80_000,
    batch: int = 32,
    rate: float = 1e-3,
    start: Annotated[Path | None, typer.Option(help="A tower's parts to begin with.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
) -> None:
    """Train, and leave `tower.safetensors` in `out`."""
    import datasets
    import transformers as hf

    model, processor = untrained()
    if start is not None:
        model.load_state_dict(load_file(start), strict=False)
    model.set_attn_implementation("eager")  # the fused kernel's backward pass is slow on a CPU
    tower = Tower(model, processor.tokenizer)
    for layer in tower.tower.encoder.layers:
        layer.compile(dynamic=False)

    class Trainer(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            told = model(**inputs)
            if self.state.global_step % 100 == 0:
                fields = dict(zip(FIELDS, told["right"].tolist(), strict=True))
                self.log({**fields, "aligned": told["aligned"].item()})
            return told["loss"]

    data = datasets.Dataset.from_dict({"seed": list(range(pictures))}).with_transform(sample)
    how = arguments(
        out,
        rate,
        per_device_train_batch_size=batch,
        warmup_steps=200,
        weight_decay=0.05,
        logging_steps=100,
        save_steps=500,
        dataloader_drop_last=True,
    )
    Trainer(tower, how, train_dataset=data).train(resume_from_checkpoint=resume or None)
    parts = {k: x for k, x in model.state_dict().items() if "language_model" not in k}
    parts = {k: x.contiguous() for k, x in parts.items() if "lm_head" not in k}
    save_file(parts, out / "tower.safetensors")


if __name__ == "__main__":
    typer.run(main)
