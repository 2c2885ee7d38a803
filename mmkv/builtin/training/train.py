"""Trains the parts of smollm2-vision: `python -m mmkv.builtin.training.train tower`, then `text`.

First stage, `tower --out DIR [--pictures 25000]`: tower and projector learn without the text model.
Image tokens learn to read as text. A picture has 3 x 3 cells of 4 x 4 image tokens; each row of a
cell spells four tokens about what the cell shows, such as "large red circle,". The projector learns
to give the text model's own embeddings of those tokens, so that the text model finds words it
knows. A step costs a hundredth of one with the text model.

Second stage, `text --out DIR --tower TOWER/tower.safetensors --texts FOLDER`: low-rank updates of
SmolLM2's layers learn to answer in SmolLM2's own instruction format; tower and projector are
frozen, since a few hundred batches make them worse. Every eighth batch has texts without pictures,
on which the updated model learns to keep the next-token distributions of SmolLM2. FOLDER holds
English texts as `.txt` files.

`--resume` continues from the last checkpoint in DIR.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmkv.builtin import drawings
from mmkv.loading import models
from mmkv.loading.smollm2_vision import IMAGE_TOKEN, IMAGE_TOKENS, LORA_SCALE, SIDE, build

IGNORE = -100
_SIZES = (192, 192, 256, 384)
_SHARPNESS = 8.0  # of the softmax over tokens by distance
RANK = 16
# Rows, tokens per row and share of the batches, by kind of batch.
KINDS = {"one": (8, 448, 0.52), "several": (4, 800, 0.36), "text": (8, 256, 0.12)}
_SYSTEM = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
_REQUESTS = ("Summarize this text.", "What is this about?", "Continue.", "Explain this.", "Why?")
Out = Annotated[Path, typer.Option(help="Folder for checkpoints and the parts.")]
Resume = Annotated[bool, typer.Option(help="Go on from the last checkpoint.")]
Compile = Annotated[bool, typer.Option(help="Compile the layers and the loss.")]


app = typer.Typer(pretty_exceptions_enable=False)


def untrained() -> tuple[Any, Any]:
    """Return the untrained model and processor around SmolLM2, in float32."""
    return build(*models.pretrained(models.SMOLLM2, dtype=torch.float32))


def arguments(out: Path, rate: float, **options: Any) -> Any:
    """Return training arguments of both stages: one epoch, with checkpoints."""
    import transformers as hf

    return hf.TrainingArguments(
        output_dir=str(out),
        num_train_epochs=1,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
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
        projected = self.projector(features).flatten(0, 1)
        distances = (torch.cdist(projected, self.words) / self.norm) ** 2
        targets = torch.searchsorted(self.ids, labels.flatten())
        choice = F.cross_entropy(-_SHARPNESS * distances, targets)
        return {"loss": choice + distances.gather(1, targets[:, None]).mean()}


@app.command("tower")
def train_tower(
    out: Out,
    pictures: Annotated[int, typer.Option(help="How many pictures are shown.")] = 25_000,
    batch: int = 32,
    rate: float = 1e-3,
    resume: Resume = False,
    compile: Compile = True,
) -> None:
    """Train tower and projector, and write `tower.safetensors` to `out`."""
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
    training = arguments(out, rate, **options)
    hf.Trainer(tower, training, train_dataset=data).train(resume_from_checkpoint=resume or None)
    text = ("language_model", "lm_head")
    parts = {k: x for k, x in model.state_dict().items() if not any(name in k for name in text)}
    save_file({k: x.contiguous() for k, x in parts.items()}, out / "tower.safetensors")


class Rows:
    """Draws the rows of one batch."""

    def __init__(self, tokenizer: Any, texts: list[str], step: int) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.rng = random.Random(f"vision:{step}")

    def batch(self) -> dict[str, Tensor]:
        """`input_ids` and `labels` [B, L]; with pictures `pixel_values` [N, 3, 192, 192]."""
        kind = self.rng.choices(list(KINDS), [share for *_, share in KINDS.values()])[0]
        rows, length, _ = KINDS[kind]
        ids = torch.full((rows, length), self.tokenizer.pad_token_id)
        labels, images = torch.full((rows, length), IGNORE), list[Tensor]()
        for row in range(rows):
            tokens = self._text(length) if kind == "text" else self._pictures(kind, length, images)
            for i, (token, answered) in enumerate(tokens[:length]):
                ids[row, i] = token
                if answered:
                    labels[row, i] = token
        out = {"input_ids": ids, "labels": labels}
        return {**out, "pixel_values": torch.stack(images)} if images else out

    def _encode(self, text: str, answered: bool = False) -> list[tuple[int, bool]]:
        return [(token, answered) for token in encoded(self.tokenizer, text)]

    def _turn(self, question: str, answer: str, pictures: int = 0) -> list[tuple[int, bool]]:
        image_text = "".join(
            f"The {order} picture:\n{IMAGE_TOKEN * IMAGE_TOKENS}\n"
            for order in drawings.ORDINALS[:pictures]
        )
        prompt = f"<|im_start|>user\n{image_text}{question}<|im_end|>\n<|im_start|>assistant\n"
        answer_tokens = self._encode(f"{answer}<|im_end|>", True)
        return self._encode(prompt) + answer_tokens + self._encode("\n")

    def _pictures(self, kind: str, length: int, images: list[Tensor]) -> list[tuple[int, bool]]:
        """Return a conversation about one picture, or about two to four."""
        rng = self.rng
        number = 1 if kind == "one" else rng.choice((2, 3, 3, 4, 4))
        seeds = [rng.randrange(2**40) for _ in range(number)]
        printed = (None, 1, 2)  # two thirds of the pictures hold print
        scenes = [drawings.make_scene(x, "train", None, rng.choice(printed)) for x in seeds]
        images += [pixels(scene, rng) for scene in scenes]
        turns: list[drawings.Question] = []
        for scene, order in zip(scenes, drawings.ORDINALS, strict=False):
            which = "the picture" if number == 1 else f"the {order} picture"
            turns += [drawings.ask(scene, rng, which) for _ in range(14 if number == 1 else 4)]
            if number == 1 or rng.random() < 0.5:
                request = drawings.describe_question(which, rng)
                turns.append(drawings.Question(text=request, answer=drawings.describe(scene)))
        if number > 1:
            candidates = (drawings.find_question(scenes, rng) for _ in range(3))
            turns += [x for x in candidates if x is not None]
        rng.shuffle(turns)
        if number == 1 and rng.random() < 0.5:  # the first question is often to describe it
            turns.sort(key=lambda x: x.answer != drawings.describe(scenes[0]))
        row = self._encode(f"<|im_start|>{_SYSTEM}<|im_end|>\n")
        for i, turn in enumerate(turns):
            tokens = self._turn(turn.text, turn.answer, 0 if i else number)
            if len(row) + len(tokens) > length:
                break
            row += tokens
        return row

    def _text(self, length: int) -> list[tuple[int, bool]]:
        """Return a piece of a text, every second one inside a request."""
        text = self.rng.choice(self.texts)
        start = self.rng.randrange(max(1, len(text) - 6 * length))
        piece = text[start : start + 6 * length]
        if self.rng.random() < 0.5:
            return self._encode(piece)
        request = self.rng.choice(_REQUESTS)
        head = f"<|im_start|>{_SYSTEM}<|im_end|>\n<|im_start|>user\n{request}\n"
        body = self._encode(head) + self._encode(piece)[: length - 60]
        return body + self._encode("<|im_end|>\n<|im_start|>assistant\n")


def loss_of(
    model: Any, inputs: dict[str, Tensor], answered: Callable[..., Tensor]
) -> tuple[str, Tensor]:
    """Return a batch's kind and loss: cross entropy of answers, divergence on texts.

    Logits are computed only for the tokens that the loss uses; `answered` is `_answered`, or that
    compiled.
    """
    inner, labels = model.get_base_model(), inputs["labels"][:, 1:]
    head = inner.lm_head

    def hidden(where: Tensor) -> Tensor:
        model_inputs = {k: x for k, x in inputs.items() if k != "labels"}
        return inner.model(**model_inputs, use_cache=False).last_hidden_state[:, :-1][where]

    if "pixel_values" in inputs:
        where = labels != IGNORE
        kind = "one" if inputs["pixel_values"].shape[0] == len(labels) else "several"
        return kind, answered(hidden(where), head.weight, labels[where])
    ids = inputs["input_ids"]
    where = torch.zeros_like(labels, dtype=torch.bool)
    where[:, 16::3] = True
    where &= ids[:, :-1] != model.config.text_config.pad_token_id
    with torch.no_grad(), model.disable_adapter():
        target = head(hidden(where)).log_softmax(-1)
    log_probs = head(hidden(where)).log_softmax(-1)
    return "text", F.kl_div(log_probs, target, log_target=True, reduction="batchmean")


def _answered(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, embedding), targets)


def prepare(model: Any) -> Any:
    """Add low-rank updates to the text layers, the only weights that are trained."""
    import peft

    layers = r".*language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
    config = peft.LoraConfig(r=RANK, lora_alpha=int(LORA_SCALE * RANK), target_modules=layers)
    return peft.get_peft_model(model, config)


def updates_of(model: Any) -> dict[str, Tensor]:
    """Return the trained weights, by their names in the model without updates."""
    updates = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
    for mark in ("base_model.model.", ".default.weight"):
        updates = {name.replace(mark, "", 1): x for name, x in updates.items()}
    return updates


@app.command("text")
def train_text(
    out: Out,
    tower: Annotated[Path, typer.Option(help="File written by the first stage.")],
    texts: Annotated[Path, typer.Option(help="Plain texts, in folders.")],
    steps: Annotated[int, typer.Option(help="Number of batches.")] = 800,
    rate: float = 6e-4,
    resume: Resume = False,
    compile: Compile = True,
) -> None:
    """Train updates of the text model, and write `parts.safetensors` to `out`."""
    import datasets
    import transformers as hf

    model, processor = untrained()
    parts = load_file(tower)
    model.load_state_dict(parts, strict=False)
    model = prepare(model)
    files = [path for path in sorted(texts.glob("*/*.txt")) if "novels" not in path.parts]
    corpus = [path.read_text() for path in files]
    answered = torch.compile(_answered, dynamic=True, disable=not compile)
    if compile:
        torch.compiler.config.recompile_limit = 64
        inner = model.get_base_model().model
        for layer in (*inner.language_model.layers, *inner.vision_tower.encoder.layers):
            layer.compile(dynamic=False)

    class Trainer(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            kind, loss = loss_of(model, inputs, answered)
            self.log({kind: loss.item()})
            return loss

    def draw(rows: dict[str, list[int]]) -> dict[str, Any]:
        return {"batch": [Rows(processor.tokenizer, corpus, step).batch() for step in rows["step"]]}

    data = datasets.Dataset.from_dict({"step": list(range(steps))}).with_transform(draw)
    pace = {"warmup_steps": 20, "logging_steps": 20, "save_steps": 50}
    training = arguments(out, rate, per_device_train_batch_size=1, **pace)

    def collate(rows: list[dict[str, Any]]) -> Any:
        return rows[0]["batch"]

    trainer = Trainer(model, training, train_dataset=data, data_collator=collate)
    trainer.train(resume_from_checkpoint=resume or None)
    parts |= updates_of(model)
    save_file({name: x.half() for name, x in parts.items()}, out / "parts.safetensors")


if __name__ == "__main__":
    app()
