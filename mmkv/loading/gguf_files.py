"""Models in GGUF, llama.cpp's file of quantised weights, as safetensors in the user's cache.

transformers dequantises a GGUF file whenever it loads it, for seconds to minutes. Here that is done
once: weights in float16, which is nearer to 4 to 8 bits than bfloat16, and the tokenizer, in a
folder that is named by the GGUF file's digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from mmkv.loading import cache_folder, quiet

logger = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_RECORD = "mmkv-conversion.json"  # written last: what lies beside it is complete
_FORMAT = 1  # of a conversion; one of another number is made anew
_WHOLE = 2**24  # bytes up to which a file is checked whole
_BLOCKS, _BLOCK = 256, 4096  # of a larger file: how many, and bytes each


def read(path: Path, **options: Any) -> tuple[Any, Any]:
    """The model of a GGUF file, in floating point, and its tokenizer.

    Args:
        path: the file.
        options: of transformers' `from_pretrained`.

    Raises:
        ValueError: transformers cannot read it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    there: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    watched = sys.stderr.isatty()
    # One of transformers' bars for GGUF heeds no setting.
    unseen = contextlib.nullcontext() if watched else contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet(bars=watched), unseen:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **there)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, output_loading_info=True, **there, **options
            )
            model, info = loaded
            # transformers fills what is missing with random numbers.
            if wrong := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]})):
                raise ValueError(f"it lacks weights such as {wrong[0]}")
    except Exception as error:  # the reader meets what it does not know with errors of every type
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"transformers cannot read the GGUF file {path} ({why}): if it is whole, name the "
            "folder of the original model instead"
        ) from error
    # Some versions of transformers tell the tokenizer other special tokens than the model, and
    # have it drop blanks when it decodes.
    for kind in ("bos", "eos", "pad", "unk"):
        if (token := getattr(model.config, f"{kind}_token_id", None)) is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token))
    tokenizer.clean_up_tokenization_spaces = False
    # Nothing in it is quantised any more.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def converted(path: Path, *, make: bool = True) -> Path | None:
    """The folder that holds a GGUF file's model as safetensors, made where it is not there yet.

    Several processes may ask at once: one converts, the others wait for it.

    Args:
        path: the file.
        make: False looks only whether it is there.

    Returns:
        None where it is not: the cache folder cannot be written. Read the file itself then.

    Raises:
        ValueError: no GGUF file, one that transformers cannot read, or no package `gguf`.
    """
    from filelock import FileLock
    from safetensors import SafetensorError

    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is no GGUF file, by its first bytes: download it again")
        file.seek(0)
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    root = cache_folder() / "gguf"
    folder, part = root / digest, root / f"{digest}.part"
    if _is_sound(folder, digest):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{path} needs the package gguf: pip install 'mmkv[gguf]'")
    if not make:
        return None
    if sys.stderr.isatty():
        sys.stderr.write(f"mmkv: converting {path.name}, once, in {root}\n")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{digest}.lock"):
            if not _is_sound(folder, digest):
                # What is there is damaged, or was left by a process that was killed.
                for left in filter(Path.exists, (folder, part)):
                    shutil.rmtree(left)
                part.mkdir()
                try:
                    _convert(path, part, digest)
                    part.rename(folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError, NotImplementedError) as error:  # the last: no locks there
        logger.warning(
            "%s is read anew each time, as %s cannot be written (%s): MMKV_CACHE names another "
            "folder",
            *(path.name, root, error),
        )
        return None
    return folder


def _convert(path: Path, folder: Path, digest: str) -> None:
    import torch

    model, tokenizer = read(path, dtype=torch.float16)
    if not all(bool(x.isfinite().all()) for x in model.state_dict().values()):
        model, tokenizer = read(path, dtype=torch.float32)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = {file.name: _fingerprint(file) for file in sorted(folder.iterdir())}
    record = {"format": _FORMAT, "gguf": digest, "files": files}
    (folder / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _is_sound(folder: Path, digest: str) -> bool:
    """Whether a conversion is complete and as it was written."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return (record["format"], record["gguf"]) == (_FORMAT, digest) and all(
            _fingerprint(folder / name) == known for name, known in record["files"].items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> str:
    """A digest of a file's size and content; of a large file, of blocks spread over it."""
    size = path.stat().st_size
    found = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE:
            found.update(file.read())
        else:
            found.update(file.read(2**20))  # safetensors' header, which says what lies where
            for i in range(_BLOCKS):
                file.seek((size - _BLOCK) * i // (_BLOCKS - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()
