"""Models, checkpoints and files from elsewhere, read with care."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


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
