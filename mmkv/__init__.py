"""mmkv: a several times smaller key-value cache for vision-language models and LLMs.

    model = mmkv.wrap(model, policy="prefixkv", budget=0.2)

and `model.generate(...)` works as before with a fifth of the cache.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmkv import adapters, scores, sizes
    from mmkv.builtin import load_builtin
    from mmkv.cache.compressed import CompressedCache
    from mmkv.cache.sampling import task
    from mmkv.calibration import calibrate
    from mmkv.contexts import Context, load_context, read
    from mmkv.eval.check import CheckReport, check
    from mmkv.loading.checkpoints import load
    from mmkv.policy import Policy
    from mmkv.profiles import Profile
    from mmkv.registry import get_policy, list_policies, register_policy
    from mmkv.report import CacheReport
    from mmkv.wrapping import is_wrapped, probe, unwrap, wrap, wrapped

__version__ = "0.1.0"

# Everything public, by the module that holds it. Loaded on first use, so that `import mmkv` and
# `mmkv --help` do not wait for torch and transformers.
_NAMES = {
    "mmkv.builtin": ("load_builtin",),
    "mmkv.cache.compressed": ("CompressedCache",),
    "mmkv.cache.sampling": ("task",),
    "mmkv.calibration": ("calibrate",),
    "mmkv.contexts": ("Context", "load_context", "read"),
    "mmkv.eval.check": ("CheckReport", "check"),
    "mmkv.loading.checkpoints": ("load",),
    "mmkv.policy": ("Policy",),
    "mmkv.profiles": ("Profile",),
    "mmkv.registry": ("get_policy", "list_policies", "register_policy"),
    "mmkv.report": ("CacheReport",),
    "mmkv.wrapping": ("is_wrapped", "probe", "unwrap", "wrap", "wrapped"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("adapters", "scores", "sizes")

__all__ = [
    "CacheReport",
    "CheckReport",
    "CompressedCache",
    "Context",
    "Policy",
    "Profile",
    "adapters",
    "calibrate",
    "check",
    "get_policy",
    "is_wrapped",
    "list_policies",
    "load",
    "load_builtin",
    "load_context",
    "probe",
    "read",
    "register_policy",
    "scores",
    "sizes",
    "task",
    "unwrap",
    "wrap",
    "wrapped",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mmkv.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'mmkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
