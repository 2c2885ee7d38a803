"""KVzip: a token is worth what repeating the prompt asks of it, whatever the question will be.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv 2505.23416, section 3; one ranking over the heads of all layers. After the prefill the prompt
is fed again in pieces, against the full cache; a query's attention is shared among 4 sinks, the
piece and what is repeated of it. In the authors' code, https://github.com/snu-mllab/KVzip, all of
the system prompt is the sinks; 4 of them are kvpress' (`KVzipPress`). That costs one prefill more.
Pictures are repeated by their embeddings.

mmkv knows no tokenizer: the words that ask for a repetition are `instruction`, token ids, and by
default none. The code asks in other words from the second piece on, and names the 8 tokens before
it; here every piece is asked for alike. In a later turn the turn alone is repeated, and earlier
tokens keep their scores.
"""

from dataclasses import dataclass

from mmkv.parts.global_heads import GlobalHeads
from mmkv.parts.repetition import Repetition
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy


@register_policy("kvzip")
@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Keep what the model needs to repeat the prompt; one ranking over all heads."""

    paper = "KVzip, arXiv 2505.23416"
    score: Score = Repetition()
    heads: Heads = GlobalHeads()
    sinks: int = 4
