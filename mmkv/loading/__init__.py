"""Load models, checkpoints and untrusted files; conversions are made once, and cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_RECORD = "mmkv-conversion.json"  # written last: with it the folder is complete
_FORMAT = 1  # of a conversion; others are converted again
_WHOLE = 2**24  # bytes of the largest file that is hashed whole
_BLOCKS, _BLOCK = 256, 4096  # of a larger file: number of blocks, bytes of each


def cache_folder() -> Path:
    """Return the folder for conversions and probes; it may not exist or be writable.

    It is `$MMKV_CACHE`, else `mmkv` in `$XDG_CACHE_HOME`, else `~/.cache/mmkv`.
    """
    if folder := os.environ.get("MMKV_CACHE"):
        return Path(folder).expanduser()
    if user_caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_caches).expanduser() / "mmkv"
    try:
        return Path.home() / ".cache" / "mmkv"
    except RuntimeError:
        # Without a home nothing is cached: anybody could change files in a shared folder.
        return Path(os.devnull) / "mmkv"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet(*, bars: bool = False) -> Generator[None]:
    """Silence transformers' warnings in this block, and its progress bars unless `bars`."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub.get_verbosity()
    bars_enabled = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(hub_level)
        if bars_enabled:
            logging.enable_progress_bar()


def make_once(folder: Path, make: Callable[[Path], None], name: str) -> Path | None:
    """Return the folder, filled by `make` if it is missing or damaged; None if not writable.

    One process fills it while others wait. The folder's name is a digest of its source; `name` is
    the model's, for messages.
    """
    from filelock import FileLock
    from safetensors import SafetensorError

    if is_sound(folder):
        return folder
    root, partial = folder.parent, folder.with_name(f"{folder.name}.part")
    if sys.stderr.isatty():
        sys.stderr.write(f"mmkv: converting {name}, once, in {root}\n")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if not is_sound(folder):
                # Damaged, or left by a process that was killed.
                for leftover in filter(Path.exists, (folder, partial)):
                    shutil.rmtree(leftover)
                partial.mkdir()
                try:
                    make(partial)
                    files = {file.name: _fingerprint(file) for file in sorted(partial.iterdir())}
                    record = {"format": _FORMAT, "files": files}
                    (partial / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError, NotImplementedError) as error:  # the last: no file locks
        notice = f"{name} is read again each time, because {root} cannot be written ({error})"
        logger.warning("%s: set MMKV_CACHE to another folder", notice)
        return None
    return folder


def is_sound(folder: Path) -> bool:
    """Return whether a conversion is complete and unchanged."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return record["format"] == _FORMAT and all(
            _fingerprint(folder / name) == stored for name, stored in record["files"].items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> str:
    """Return a digest of a file's size and content; of a large file, of blocks spread over it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            digest.update(file.read(2**20))  # safetensors' header, which has the offsets
            for i in range(_BLOCKS):
                file.seek((size - _BLOCK) * i // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
