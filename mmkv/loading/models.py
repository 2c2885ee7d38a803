"""Models that transformers loads, from a folder or a hub, and the device that they go to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.loading import gguf_files, names
from mmkv.loading.quiet import quiet

if TYPE_CHECKING:
    import torch


def pretrained(name: str, **options: Any) -> tuple[Any, Any, bool]:
    """A model in eval mode, its processor or tokenizer, and whether it reads pictures.

    Its weights come from safetensors or GGUF alone, and no code of its repository is run.

    Args:
        name: as for `names.find`.
        options: dtype and others of transformers' `from_pretrained`; "auto" is what the model was
            saved in, float32 for `names.NAMES` and GGUF files.

    Raises:
        ValueError: no such model, or one that cannot be loaded.
    """
    import transformers as hf

    source = names.find(name)
    if options.get("dtype", "auto") == "auto":
        options["dtype"] = source.dtype
    try:
        if source.gguf_file is not None:
            model, tokenizer = gguf_files.read(Path(source.path) / source.gguf_file, **options)
            return model.eval(), tokenizer, False
        # Large models load, or are downloaded, for minutes: who looks at a terminal sees it.
        with quiet(bars=sys.stderr.isatty() and name != names.BUILTIN):
            _, maker, reads_pictures = _config_and_class(source)
            reader: Any = hf.AutoProcessor if reads_pictures else hf.AutoTokenizer
            how: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, **options}
            model = maker.from_pretrained(source.path, **how).eval()
            processor = reader.from_pretrained(source.path, trust_remote_code=False)
            return model, processor, reads_pictures
    except source.errors as error:
        raise ValueError(f"cannot load model {name!r}: {source.why(error)}") from error


def load_tokenizer(name: str) -> Any:
    """A model's tokenizer, or its processor's, alone.

    Args:
        name: as for `names.find`.

    Raises:
        ValueError: no such model, or no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    source = names.find(name)
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                source.path, trust_remote_code=False, **source.options
            )
    except source.errors as error:
        raise ValueError(f"model {name!r}: no tokenizer: {source.why(error)}") from None


def empty(name: str, dtype: torch.dtype) -> Any:
    """A model on the meta device, from its config alone: modules and shapes without weights.

    Raises:
        ValueError: no such model, or one whose config transformers does not know.
    """
    import torch

    source = names.find(name, convert=False)
    try:
        with quiet(), torch.device("meta"):
            config, maker, _ = _config_and_class(source)
            return maker.from_config(config, dtype=dtype)
    except source.errors as error:
        raise ValueError(f"model {name!r}: {source.why(error)}") from None


def _config_and_class(source: names.Source) -> tuple[Any, Any, bool]:
    """A model's config, the auto class that makes it, and whether it reads pictures."""
    import transformers as hf
    from transformers.models.auto import modeling_auto

    config = hf.AutoConfig.from_pretrained(source.path, trust_remote_code=False, **source.options)
    pictures = config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    maker = hf.AutoModelForImageTextToText if pictures else hf.AutoModelForCausalLM
    return config, maker, pictures


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
