"""Models whose heads are spread over processes (tensor parallelism): what can be decided there.

Each process sees its own key-value heads, and chooses what these keep. A policy that compares heads
would choose otherwise in each process, and than in one: it is refused.
"""

from __future__ import annotations

from mmkv import adapters
from mmkv.adapters import Adapter
from mmkv.policy import Policy


def check(parts: Adapter, policy: Policy, *, sized: bool) -> None:
    """Refuse what cannot be decided by a part of the heads.

    Args:
        parts: of the model.
        policy: as it is used, with the sizes of a profile.
        sized: whether layer sizes are known before, so that its `layers` part is not asked.

    Raises:
        ValueError: names the option, and what to use instead.
    """
    if parts.ranks == 1:
        return
    spread = f"this model's heads are spread over {parts.ranks} processes (tensor parallelism)"
    heads = adapters.shape(parts.config)["num_key_value_heads"]
    if heads % parts.ranks:
        raise ValueError(
            f"{spread}, which {heads} key-value heads cannot be evenly: use a number of processes "
            "that divides them"
        )
    if (why := _comparing(policy, sized)) is not None:
        raise ValueError(
            f"{spread}, each of which sees its own alone, and {why}, or load the model in one "
            "process, with device_map='auto'"
        )


def _comparing(policy: Policy, sized: bool) -> str | None:
    """Which part looks at several heads, and what to use instead; None where none does."""
    score, layers, heads = policy.score, policy.layers, policy.heads
    if not score.by_head:
        return f"score={score.name!r} looks at all of a layer's: use another, such as 'window'"
    if score.ranks and score.shared_ranking:
        return "average_heads=True takes the mean of a layer's: use average_heads=False"
    if not sized and layers.needs not in ("", "similarity"):
        name = layers.name or type(layers).__name__
        return f"layers={name!r} sizes layers by all of them: use layers='uniform' or 'pyramid'"
    if not heads.equal:
        name = f"heads={heads.name!r}" if heads.name else "a profile"
        return f"{name} gives them sizes of their own: use heads='uniform'"
    return None
