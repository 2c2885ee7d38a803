"""lmms-eval's tasks on compressed caches: a model named `mmkv`, found through an entry point.

    lmms-eval --model mmkv --tasks NAME \\
        --model_args pretrained=PATH_OR_ID,policy=condense,budget=0.2

Tasks that generate are supported. The entry point (group `lmms_eval.models`) is `manifest`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """Return the manifest; imported here, as lmms-eval loads it while it is itself imported."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="mmkv", chat_class_path="mmkv.eval.harness.lmms_model.MMKV")
