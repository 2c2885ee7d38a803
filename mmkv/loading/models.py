"""Models that transformers loads, from a folder or a hub, and the device that they go to."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def pretrained(name: str, **options: Any) -> tuple[Any, Any, bool]:
    """A model in eval mode, its processor or tokenizer, and whether it reads pictures.

    Its weights come from safetensors alone, and no code of its repository is run.

    Args:
        name: a folder or a hub's id.
        options: dtype and others of transformers' `from_pretrained`.

    Raises:
        ValueError: no such model, or one that cannot be loaded.
    """
    import transformers as hf
    from safetensors import SafetensorError

    _check_model_folder(name)
    try:
        # Large models load, or are downloaded, for minutes: who looks at a terminal sees it.
        with quiet(bars=sys.stderr.isatty()):
            _, maker, reads_pictures = _config_and_class(name)
            reader: Any = hf.AutoProcessor if reads_pictures else hf.AutoTokenizer
            how: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, **options}
            model = maker.from_pretrained(name, **how).eval()
            return model, reader.from_pretrained(name, trust_remote_code=False), reads_pictures
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        # What follows the first line is advice for callers of transformers.
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        here = "" if Path(name).is_dir() else "it is no folder here, and "
        raise ValueError(f"cannot load model {name!r}: {here}{why[0]}") from error


def empty(name: str, dtype: torch.dtype) -> Any:
    """A model on the meta device, from its config alone: modules and shapes without weights.

    Raises:
        ValueError: no such model, or one whose config transformers does not know.
    """
    import torch

    try:
        with quiet(), torch.device("meta"):
            _check_model_folder(name)
            config, maker, _ = _config_and_class(name)
            return maker.from_config(config, dtype=dtype)
    except (OSError, KeyError) as error:
        raise ValueError(f"model {name!r}: {str(error).splitlines()[0]}") from None


def _config_and_class(name: str) -> tuple[Any, Any, bool]:
    """A model's config, the auto class that makes it, and whether it reads pictures."""
    import transformers as hf
    from transformers.models.auto import modeling_auto

    config = hf.AutoConfig.from_pretrained(name, trust_remote_code=False)
    pictures = config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    maker = hf.AutoModelForImageTextToText if pictures else hf.AutoModelForCausalLM
    return config, maker, pictures


def _check_model_folder(name: str) -> None:
    """Refuse a name that can only be a folder, where there is no model in it."""
    path = Path(name)
    why = None
    if path.is_dir():
        if not (path / "config.json").is_file():
            why = "this folder holds no config.json"
    elif path.exists():
        why = "this is a file; name the model's folder"
    elif not name.strip():
        why = "expected builtin, a folder, or a hub's id"
    elif name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1:
        why = "no such folder"
    if why is not None:
        raise ValueError(f"cannot load model {name!r}: {why}")


def find_device(name: str) -> torch.device:
    """A device by name; "auto" is the GPU where there is one.

    Raises:
        ValueError: there is no such device, or none that computes.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(f"device {name!r}: {why} (auto takes what there is)") from None
    return device


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
