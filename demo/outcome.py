"""What a compressed cache kept of a prompt, token by token and patch by patch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmkv import chat, picture

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from .turns import Tokens

Shares = NDArray[np.float32]


@dataclass(frozen=True)
class Word:
    """A token of the prompt, or a picture's `tokens` in a row, whose `text` is "".

    `layers` counts those in which at least one head holds it (None for a picture); `kept` is the
    share of heads and layers that hold it.
    """

    text: str
    layers: int | None
    tokens: int
    kept: float


@dataclass(frozen=True)
class Kept:
    """After the prompt, before the answer.

    Attributes:
        layers: indices of the compressed layers.
        sizes: for each, the tokens held by a head, mean over heads.
        seen: tokens seen.
        words: the prompt in order.
        patches: for each layer, float32 [rows, cols], the share of heads that hold each patch of
            the last picture; [] where there is no picture or its grid is not known.
        picture: the last picture as the model sees it, or None.
        problem: why there are no patches, or None.
    """

    layers: list[int]
    sizes: list[float]
    seen: int
    words: list[Word]
    patches: list[Shares]
    picture: Image.Image | None = None
    problem: str | None = None

    @property
    def mean(self) -> Shares:
        """Float32 [rows, cols], the mean of `patches` over layers."""
        return np.asarray(np.mean(self.patches, axis=0), dtype=np.float32)


def kept_of(
    loaded: chat.Loaded, prompt: Tokens, cache: Any, pictures: Sequence[Image.Image]
) -> Kept:
    """Read a compressed cache that has just been given a prompt with these pictures, in order."""
    from mmkv.cache.layer import CompressedLayer

    compressed = [i for i, x in enumerate(cache.layers) if isinstance(x, CompressedLayer)]
    seen = prompt.ids.shape[1]
    kept = [cache.shares(i)[0, :, :seen].cpu() for i in compressed]
    held = torch.stack([x.mean(dim=0) for x in kept])  # [L, N]
    ids = prompt.ids[0].cpu()
    image = chat.image_mask(loaded, {"input_ids": ids[None]})
    patches, problem = list[Shares](), None
    if pictures:
        try:
            patches = [picture.kept_patches(x, image, len(pictures))[-1] for x in kept]
        except ValueError as error:
            problem = str(error)
    return Kept(
        layers=compressed,
        sizes=[x.sum(dim=1).mean().item() for x in kept],
        seen=seen,
        words=_words(loaded, ids, image, held),
        patches=patches,
        picture=_as_seen(loaded, prompt, pictures) if patches else None,
        problem=problem,
    )


def _as_seen(loaded: chat.Loaded, prompt: Tokens, pictures: Sequence[Image.Image]) -> Image.Image:
    pixels = prompt.pictures.get("pixel_values")
    if pixels is None or pixels.ndim != 4 or len(pixels) != len(pictures):
        return pictures[-1]
    processor = loaded.processor.image_processor
    return picture.as_seen(pictures[-1], pixels[-1].float().cpu().numpy(), processor)


def _words(loaded: chat.Loaded, ids: Tensor, image: Tensor, held: Tensor) -> list[Word]:
    share = held.mean(dim=0).tolist()
    layers = (held > 0).sum(dim=0).tolist()
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    words: list[Word] = []
    for is_image, run in itertools.groupby(range(len(ids)), image.tolist().__getitem__):
        places = list(run)
        if is_image:
            words.append(Word("", None, len(places), fmean(share[i] for i in places)))
            continue
        words += [Word(tokenizer.decode([int(ids[i])]), layers[i], 1, share[i]) for i in places]
    return words


def rouge_l(one: str, other: str) -> float:
    """ROUGE-L F-measure between two texts, in [0, 1]; equal texts have 1, also empty ones."""
    from rouge_score.rouge_scorer import RougeScorer

    if one == other:
        return 1.0
    return float(RougeScorer(["rougeL"]).score(one, other)["rougeL"].fmeasure)
