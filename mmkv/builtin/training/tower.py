"""First stage of a LLaVA around SmolLM2: its vision tower and projector learn without the text.

    python -m mmkv.builtin.training.tower --out DIR [--pictures 25000]

Image tokens learn to read as text. A picture has 3 x 3 cells of 4 x 4 image tokens; each row
of a cell spells four tokens about what the cell shows, such as "large red circle,". The projector
learns to give the text model's own embeddings of those tokens, so that the text model finds words
it knows. A step costs a hundredth of one with the text model.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from mmkv.builtin import drawings
from mmkv.loading import models
from mmkv.loading.smollm2_vision import SIDE, build

IGNORE = -100
_SIZES = (192, 192, 256, 384)
_SHARPNESS = 8.0  # of the softmax over tokens by distance
Bf16 = Annotated[
    bool, typer.Option(help="In bfloat16: faster on a GPU, and on a processor with AMX.")
]


def untrained() -> tuple[Any, Any]:
    """Return the untrained model and processor around SmolLM2, in float32."""
    return build(*models.pretrained(models.SMOLLM2, dtype=torch.float32))


def arguments(out: Path, rate: float, bf16: bool, **options: Any) -> Any:
    """Return training arguments of both stages: one epoch, with checkpoints."""
    import transformers as hf

    return hf.TrainingArguments(
        output_dir=str(out),
        num_train_epochs=1,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        save_total_limit=1,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        report_to=[],
        seed=0,
        **options,
    )


def pixels(scene: drawings.Scene, rng: random.Random) -> Tensor:
    """Draw a scene; return the image processor's output, `[3, SIDE, SIDE]`."""
    image = drawings.draw(scene, rng.choice(_SIZES))
    if image.size != (SIDE, SIDE):
        image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 127.5 - 1


def spelled(thing: drawings.Object | None, place: str) -> tuple[str, str, str, str]:
    """Return the texts of a cell's four rows, of at most four tokens each."""
    where = f" at {place}"
    if thing is None:
        return " nothing", where, "", ""
    if thing.kind == "shape":
        return f" {thing.phrase}", where, f" {thing.phrase}", f" {thing.name} {place}"
    name = f' "{thing.name}"' if thing.kind == "word" else f" number {thing.name}"
    return name, where, f" {thing.kind} in {thing.color}", name


@lru_cache(maxsize=20_000)
def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return a text's tokens, without special ones."""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


class Speller:
    """Returns the text tokens that a scene's image tokens stand for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.filler = tokenizer, encoded(tokenizer, ",")[0]

    def ids(self, scene: drawings.Scene) -> Tensor:
        """Return token ids [144], row by row of the picture."""
        by_place = {x.place: x for x in scene.objects}
        cells = [spelled(by_place.get(place), place) for place in drawings.PLACES]
        rows = torch.tensor([[self._four(text) for text in cell] for cell in cells])
        return rows.view(3, 3, 4, 4).transpose(1, 2).flatten()

    def _four(self, text: str) -> list[int]:
        return [*encoded(self.tokenizer, text)[:4], *[self.filler] * 4][:4]

    def all_ids(self) -> Tensor:
        """Return all tokens that `ids` may contain, ascending."""
        texts = [*drawings.SHAPES, *drawings.COLORS, *drawings.SIZES, *drawings.PLACES]
        texts += ["at", "in", "nothing", "word", "number", *map(str, range(100))]
        texts += [f'"{word}"' for word in drawings.WORDS]
        return torch.tensor(sorted({i for text in texts for i in self._four(f" {text}")}))


def scene_of(seed: int) -> drawings.Scene:
    """Return a training scene, with more things and print than the scenes of questions."""
    rng = random.Random(f"fuller:{seed}")
    count = rng.randint(3, 9)
    return drawings.make_scene(seed, "train", count, rng.randint(count // 3, count))


class Tower(nn.Module):
    """Tower and projector of a model, trained to give the text token of each image token."""

    words: Tensor

    def __init__(self, model: Any, speller: Speller) -> None:
        super().__init__()
        self.tower, self.projector = model.model.vision_tower, model.model.multi_modal_projector
        self.ids = speller.all_ids()
        embedding = model.get_input_embeddings().weight.detach()
        self.register_buffer("words", embedding[self.ids].clone(), persistent=False)
        self.norm = float(embedding.norm(dim=1).mean())

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss for token ids `labels` [B, 144]."""
        features = self.tower(pixel_values).last_hidden_state[:, 1:]
        projected = self.projector(features).float().flatten(0, 1)
        distances = (torch.cdist(projected, self.words) / self.norm) ** 2
        targets = torch.searchsorted(self.ids, labels.flatten())
        choice = F.cross_entropy(-_SHARPNESS * distances, targets)
        return {"loss": choice + distances.gather(1, targets[:, None]).mean()}


def main(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the parts.")],
    pictures: Annotated[int, typer.Option(help="How many pictures are shown.")] = 25_000,
    batch: int = 32,
    rate: float = 1e-3,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    bf16: Bf16 = True,
    compile: Annotated[bool, typer.Option(help="Compile the layers.")] = True,
) -> None:
    """Train, and write `tower.safetensors` to `out`."""
    import datasets
    import transformers as hf

    model, processor = untrained()
    model.set_attn_implementation("eager")  # the fused kernel's backward pass is slow on a CPU
    speller = Speller(processor.tokenizer)
    tower = Tower(model, speller)
    for layer in tower.tower.encoder.layers if compile else ():
        layer.compile(dynamic=False)

    def sample(rows: dict[str, list[int]]) -> dict[str, list[Tensor]]:
        scenes = {seed: scene_of(seed) for seed in rows["seed"]}
        images = [pixels(scene, random.Random(f"tower:{i}")) for i, scene in scenes.items()]
        return {"pixel_values": images, "labels": [speller.ids(x) for x in scenes.values()]}

    data = datasets.Dataset.from_dict({"seed": list(range(pictures))}).with_transform(sample)
    pace = {"warmup_steps": 50, "weight_decay": 0.05, "logging_steps": 50, "save_steps": 200}
    options: Any = {"per_device_train_batch_size": batch, "dataloader_drop_last": True, **pace}
    training = arguments(out, rate, bf16, **options)
    hf.Trainer(tower, training, train_dataset=data).train(resume_from_checkpoint=resume or None)
    text = ("language_model", "lm_head")
    parts = {k: x for k, x in model.state_dict().items() if not any(name in k for name in text)}
    save_file({k: x.contiguous() for k, x in parts.items()}, out / "tower.safetensors")


if __name__ == "__main__":
    typer.run(main)
