"""TOVA: keep the tokens that the newest query attends to, in the prompt and in every step.

Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104, section 3: after each step the
state with the lowest attention of the newest query, averaged over all heads of the layer, is
dropped. As in the authors' code, https://github.com/schwartz-lab-NLP/TOVA, a prompt's tokens are
evicted at once, by its last query. There the newest token may be dropped too; here, as in kvpress
(`TOVAPress`), it is kept.
"""

from dataclasses import dataclass

from mmkv.decode.victims import LeastAttended
from mmkv.policy import Decode, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention


@register_policy("tova")
@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Keep what the newest token attends to, by one ranking per layer, at a constant size."""

    paper = "TOVA, arXiv 2401.06104"
    score: Score = WindowAttention(window=1, pooling=None, average_heads=True)
    decode: Decode = LeastAttended()
