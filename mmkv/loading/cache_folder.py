"""Where results that take long to make are kept for the next time."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the user's cache folder, which may not exist yet or not be writable.

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
