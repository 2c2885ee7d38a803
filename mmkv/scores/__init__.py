"""Scores of a prompt's tokens: each file holds one formula and the part that uses it.

Every score is a pure function of tensors: float32 out, higher = keep, inputs are never written to.

Shape letters, here and in the rest of the package:

- `B` rows of the batch
- `Hq` query heads, `H` key-value heads; query head `h` reads key-value head `h // G`, `G = Hq // H`
- `N` prompt tokens, padding included
- `D` head dimension
- `L` attention layers

`valid` is a bool `[B, N]`, False for padding, which lies before a row's tokens (the cache
moves padding between turns there). Padding scores 0 and influences nothing: a left-padded row has
exactly the scores that it has alone.
"""

from mmkv.scores.accumulated import accumulated_attention
from mmkv.scores.position import recency
from mmkv.scores.window import window_attention

__all__ = ["accumulated_attention", "recency", "window_attention"]
