"""What results depend on beside a run's settings: files, weights, versions, device."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


def file_digests(model: Any, profiles: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """Return hashes of what results depend on: these profiles, those in the model's folder and
    plugins, by path, and the weights, unless they are offloaded."""
    from mmkv import registry
    from mmkv.digest import of_file, of_model
    from mmkv.profiles import beside
    from mmkv.sizes.profiled import FILE, VISUAL_FILE

    own = [path for file in (FILE, VISUAL_FILE) if (path := beside(model, file)) is not None]
    digests = {path.name: of_file(path) for path in own}
    digests |= {str(path): of_file(path) for path in profiles} | registry.plugins
    with suppress(NotImplementedError):
        digests["weights"] = of_model(model, model.config.get_text_config())[:8]
    return digests


def describe_environment(device: Any) -> dict[str, Any]:
    """Return the versions, commit and device that rows are computed with."""
    import torch
    import transformers

    import mmkv

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {x.__name__: x.__version__ for x in (mmkv, torch, transformers)}
    return {**versions, "commit": _commit(Path(mmkv.__file__).parent), "device": name}


def _commit(folder: Path) -> str | None:
    """Return the checkout's commit, with "+" if files were changed since; None outside of one."""
    options: Any = {"cwd": folder, "capture_output": True, "text": True, "check": True}
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        # An installed copy may lie inside the checkout of another project.
        subprocess.run(["git", "ls-files", "--error-unmatch", "__init__.py"], **options)
        return subprocess.run(command, **options).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
