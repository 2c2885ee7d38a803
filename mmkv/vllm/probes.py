"""The copy probe's result of a model that vLLM serves: `mmkv probe` writes it, the plugin reads it.

vLLM's weights are not those of transformers (fused, sharded, quantized), so the file is found by
the model's name and not by a hash of its weights.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from mmkv.loading import cache_folder


def path_of(model: str) -> Path:
    """Return where the probe of a model is saved, by its folder or its name on the hub.

    Without a network vLLM gives the folder of a hub model's snapshot in place of its name.
    """
    folder = Path(model).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else model
    if found := re.search(r"/models--([^/]+)/snapshots/[^/]+$", name):
        name = found[1].replace("--", "/")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return cache_folder() / "probes" / f"{Path(name).name}-{digest}.json"
