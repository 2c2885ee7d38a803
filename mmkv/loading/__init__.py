"""Models, checkpoints and files from elsewhere, read with care; some are made once, and kept."""

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

_RECORD = "mmkv-conversion.json"  # written last: what lies beside it is complete
_FORMAT = 1  # of a conversion; one of another number is made anew
_WHOLE = 2**24  # bytes up to which a file is checked whole
_BLOCKS, _BLOCK = 256, 4096  # of a larger file: how many, and bytes each


def cache_folder() -> Path:
    """Where results that take long to make are kept; it may not exist yet or not be writable.

    It is `$MMKV_CACHE`, else `mmkv` in `$XDG_CACHE_HOME`, else `~/.cache/mmkv`.
    """
    if own := os.environ.get("MMKV_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "mmkv"
    try:
        return Path.home() / ".cache" / "mmkv"
    except RuntimeError:
        # A user without a home keeps nothing: a folder that all users share could be anybody's.
        return Path(os.devnull) / "mmkv"


@contextmanager
def quiet(*, bars: bool = False) -> Generator[None]:
    """No warnings of transformers between an answer's lines, and progress bars where asked for."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub.get_verbosity()
    shown = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(hub_level)
        if shown:
            logging.enable_progress_bar()


def make_once(folder: Path, digest: str, make: Callable[[Path], None], name: str) -> Path | None:
    """The folder with what `make` writes into it, made where it is not there or is damaged.

    Several processes may ask at once: one makes it, the others wait. None where it cannot be
    written. The digest is of what it is made from; the name is the model's, for people.
    """
    from filelock import FileLock
    from safetensors import SafetensorError

    if is_sound(folder, digest):
        return folder
    root, part = folder.parent, folder.with_name(f"{folder.name}.part")
    if sys.stderr.isatty():
        sys.stderr.write(f"mmkv: converting {name}, once, in {root}\n")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if not is_sound(folder, digest):
                # What is there is damaged, or was left by a process that was killed.
                for left in filter(Path.exists, (folder, part)):
                    shutil.rmtree(left)
                part.mkdir()
                try:
                    make(part)
                    files = {file.name: _fingerprint(file) for file in sorted(part.iterdir())}
                    record = {"format": _FORMAT, "gguf": digest, "files": files}
                    (part / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
                    part.rename(folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError, NotImplementedError) as error:  # the last: no locks there
        why = f"{name} is read anew each time, as {root} cannot be written ({error})"
        logger.warning("%s: MMKV_CACHE names another folder", why)
        return None
    return folder


def is_sound(folder: Path, digest: str) -> bool:
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
