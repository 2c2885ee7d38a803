"""Ways of generating that a compressed cache cannot honour: refused, never done in another way."""

from __future__ import annotations

from typing import Any

# Ways that transformers moved into code on the Hub, and the settings that ask for them.
_MOVED = {
    "contrastive_search": ("penalty_alpha",),
    "dola_generation": ("dola_layers",),
    "group_beam_search": ("num_beam_groups",),
    "constrained_beam_search": ("force_words_ids", "constraints"),
}


def refuse_moved(config: Any) -> None:
    """What needs foreign code, which would treat the cache in ways that nobody here has checked.

    Raises:
        ValueError: names the setting.
    """
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    for name in _MOVED.get(mode, ()):
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(
                f"{name}={value!r} asks for {mode.replace('_', ' ')}, which transformers leaves to "
                "code on the Hub: drop it (greedy, sampling and beams work), or "
                "mmkv.unwrap(model) first"
            )


def refuse_other_caches(config: Any, mode: str) -> None:
    """A cache of another kind, or one that tokens are taken back from.

    Raises:
        ValueError: names the setting.
    """
    name = config.cache_implementation
    if name not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={name!r} asks for a cache of its own, but this model makes a "
            "compressed one: drop it, or mmkv.unwrap(model) first"
        )
    if "assisted" in mode:
        raise ValueError(
            "assisted decoding takes tokens back from the cache, which a compressed cache cannot: "
            "generate without an assistant, or mmkv.unwrap(model) first"
        )
