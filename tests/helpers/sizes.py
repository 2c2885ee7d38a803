"""Layer sizes of one row, as the cache finds them."""

from typing import Any

import torch

from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.sizing import sizes_of_rows


def row_sizes(
    policy: Any,
    budget: Any,
    *,
    n_layers: int,
    length: int,
    floor: int,
) -> list[int]:
    """Tokens that each layer keeps of a row of which the first `floor` tokens must stay.

    Args:
        policy, budget: as of `mmkv.wrap`.
        n_layers: L.
        length: of the row.
        floor: of each layer.
    """
    valid = torch.ones(1, length, dtype=torch.bool)
    must = torch.arange(length)[None] < floor
    hosted: Any = [length], [0], [floor], [floor], [0], [1.0], [False]
    prompt = TokenMasks(valid, ~valid, valid, must, must, *hosted)
    (found,) = sizes_of_rows(CacheConfig(policy, budget), prompt, n_layers)
    return found


def of_row(by: Any, importance: torch.Tensor, total: int = 0, **options: Any) -> list[int]:
    """What `mmkv.sizes.prefix` or `pooled` gives each layer of one row's importance [L, N]."""
    return by(importance[None], torch.tensor([total]), **options)[0]
