"""Silence of transformers while an answer is printed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def quiet(*, bars: bool = False) -> Generator[None]:
    """No warnings of transformers between an answer's lines, and progress bars where asked for."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    level, hub_level, shown = (
        logging.get_verbosity(),
        hub.get_verbosity(),
        logging.is_progress_bar_enabled(),
    )
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
