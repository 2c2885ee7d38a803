"""Models that are converted once, into the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_RECORD = "mmkv-conversion.json"  # written last: what lies beside it is complete
_FORMAT = 1  # of a conversion; one of another number is made anew
_WHOLE = 2**24  # bytes up to which a file is checked whole
_BLOCKS, _BLOCK = 256, 4096  # of a larger file: how many, and bytes each


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
