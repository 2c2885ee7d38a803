"""ROUGE of two texts, by rouge-score."""

from __future__ import annotations

import re
import unicodedata

# Characters of scripts that set no blanks between words: each counts as a word.
_ALONE = re.compile("([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff])")


class _Words:
    """The words of a text in any script; in ASCII those of rouge-score's own tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        """Return the lower-case words: letters, digits and the marks on them."""
        kept = (x if unicodedata.category(x)[0] in "LMN" else " " for x in text.lower())
        return _ALONE.sub(r" \1 ", "".join(kept)).split()


def rouge(text: str, answer: str, *, kind: str = "rougeL") -> float:
    """Return the F-measure of word pairs ("rouge2") or the longest common sequence ("rougeL").

    Raises:
        ModuleNotFoundError: rouge-score, of the eval extra, is not installed.
    """
    from rouge_score.rouge_scorer import RougeScorer

    score = RougeScorer([kind], tokenizer=_Words()).score(answer, text)
    return float(score[kind].fmeasure)
