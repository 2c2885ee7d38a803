"""How few tokens a text can come to, without encoding it: that takes a minute for the longest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# A composed character stands for so many at the most (Unicode Standard Annex 15, table 10).
_COMPOSED = 4
# What leaves all characters in place, blanks apart.
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Whitespace", "WhitespaceSplit"}


def least_tokens(text: str, per_token: int) -> int:
    """Tokens that a text has at the least: blanks may be dropped, or be part of a mark."""
    return -(-_dark(text) // per_token)


def _dark(text: str) -> int:
    """Characters that are no blanks."""
    return sum(map(len, text.split()))


def characters_per_token(tokenizer: Any) -> int | None:
    """Characters that one token stands for at the most, blanks apart; None: that is not known.

    Known of byte-pair encodings that have a token for every byte, so that no character is dropped.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    kinds, vocabulary = {x["type"] for x in parts}, backend.get_vocab()
    if "ByteLevel" in kinds:
        from tokenizers.pre_tokenizers import ByteLevel

        every = ByteLevel.alphabet()
    else:
        every = [f"<0x{i:02X}>" for i in range(256)] if backend.model.byte_fallback else [""]
    if not all(x in vocabulary for x in every) or not all(map(_keeps, parts)):
        return None
    return max(map(len, vocabulary)) * (_COMPOSED if "NFC" in kinds else 1)


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer leaves all characters in place."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and _dark(part["content"]) >= _dark(pattern)
    return part["type"] in _KEEPING or part.get("behavior", "Removed") != "Removed"


def _parts(whole: Any) -> Iterator[dict[str, Any]]:
    """Each normalizer or pre-tokenizer of those that may be in sequence, as its JSON."""
    found = [] if whole is None else [json.loads(whole.__getstate__())]
    for x in found:
        more = x.get("normalizers", x.get("pretokenizers"))
        if more is None:
            yield x
        else:
            found += more
