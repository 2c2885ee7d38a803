"""The probe that teaches the vision tower at every image token while the model is trained."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from mmkv.builtin import scenes
from mmkv.builtin.training.build import IMAGE_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Probe(nn.Module):
    """Asks each image token for the colour and the shape of what it shows.

    The scores of the words are dot products with the text model's own word embeddings, so that an
    image token comes to look like the words for its object and the text model can copy from it.
    Only "nothing" has vectors of its own. The probe is dropped after training.
    """

    words: torch.Tensor

    def __init__(self, tokenizer: PreTrainedTokenizerFast, hidden: int) -> None:
        super().__init__()
        names = [f" {word}" for word in (*scenes.COLORS, *scenes.SHAPES)]
        ids = tokenizer(names, add_special_tokens=False).input_ids
        self.register_buffer("words", torch.tensor(ids).flatten())
        self.nothing = nn.Linear(hidden, 2)

    def forward(
        self, features: torch.Tensor, cells: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
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
