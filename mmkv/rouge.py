"""ROUGE of two texts, by rouge-score."""

from __future__ import annotations


def rouge(text: str, answer: str, *, kind: str = "rougeL") -> float:
    """Return the F-measure of word pairs ("rouge2") or the longest common sequence ("rougeL").

    Raises:
        ModuleNotFoundError: rouge-score, of the eval extra, is not installed.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    # Without a tokenizer it logs by absl, which makes the root logger print all messages again.
    scorer = RougeScorer([kind], tokenizer=DefaultTokenizer(use_stemmer=False))
    return float(scorer.score(answer, text)[kind].fmeasure)
