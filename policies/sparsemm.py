"""SparseMM: heads that read from pictures keep many tokens, all others few.

Wang et al., "SparseMM: Head Sparsity Emerges from Visual Concept Responses in MLLMs",
arXiv 2506.05344, section 3. Window and pooling are the paper's; its code,
https://github.com/CR400AF-A/SparseMM, uses average pooling over 5. Visual scores are measured
once, by `mmkv.calibrate(model, samples, policy="sparsemm")`. If
a head's size exceeds the prompt, the rest goes to other heads; the code leaves it unspent.
"""

from dataclasses import dataclass

from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention
from mmkv.sizes.profiled import VisualHeads


@register_policy("sparsemm")
@dataclass(frozen=True, kw_only=True)
class SparseMM(Policy):
    """SnapKV with head sizes, over the whole model, by how visual each head is."""

    paper = "SparseMM, arXiv 2506.05344"
    score: Score = WindowAttention(window=32, kernel_size=7, pooling="max")
    heads: Heads = VisualHeads()
