"""Convert GGUF files, llama.cpp's quantised weights, to safetensors in the user's cache.

transformers dequantises a GGUF file each time it is loaded, which takes seconds to minutes. Here it
is converted once, to a folder named by the file's digest, which holds the tokenizer and the weights
in float16. float16 represents 4 to 8 bits more exactly than bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmkv.loading import cache_folder, first_line, is_sound, make_once, quiet

_MAGIC = b"GGUF"


def read(path: Path, **options: Any) -> tuple[Any, Any]:
    """Return the model of a GGUF file, in floating point, and its tokenizer.

    `options` are those of transformers' `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    interactive = sys.stderr.isatty()
    # One of transformers' progress bars for GGUF cannot be turned off.
    hidden = contextlib.nullcontext() if interactive else contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet(bars=interactive), hidden, _parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, trust_remote_code=False
            )
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
            model, info = loaded
            # transformers fills missing weights with random numbers.
            if wrong := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]})):
                raise ValueError(f"it lacks weights such as {wrong[0]}")
    except Exception as error:  # the reader raises errors of every type for unknown contents
        why = first_line(error)
        raise ValueError(
            f"transformers cannot read the GGUF file {path} ({why}): download it again, or name "
            "the folder of the original model"
        ) from error
    # Some versions of transformers give the tokenizer other special tokens than the model, and
    # let it drop blanks when it decodes.
    for kind in ("bos", "eos", "pad", "unk"):
        if (token := getattr(model.config, f"{kind}_token_id", None)) is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token))
    tokenizer.clean_up_tokenization_spaces = False
    # The weights are not quantised any more.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


@contextlib.contextmanager
def _parsed_once() -> Generator[None]:
    """Let gguf parse a file once: transformers asks it three times, and for each module again."""
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, call in before.items():
        setattr(gguf, name, functools.cache(call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(gguf, name, call)


def converted(path: Path, *, make: bool = True) -> Path | None:
    """Return the folder of a GGUF file's model in safetensors; convert the file if necessary.

    None if the cache folder is not writable, or if `make` is False and the file is not converted
    yet: the caller reads the file itself.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} does not begin like a GGUF file: download it again")
        file.seek(0)
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    folder = cache_folder() / "gguf" / digest
    if is_sound(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{path} needs the package gguf: pip install 'mmkv[gguf]'")
    return make_once(folder, partial(_convert, path), path.name) if make else None


def _convert(path: Path, folder: Path) -> None:
    model, tokenizer = read(path, dtype=torch.float16)
    if not all(bool(x.isfinite().all()) for x in model.state_dict().values()):
        model, tokenizer = read(path, dtype=torch.float32)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
