"""Arguments of lm_eval and lmms-eval that wrap the model under test."""

from __future__ import annotations

import logging
from typing import Any

from mmkv.budgets import note, number
from mmkv.eval.variants import KV_DTYPE
from mmkv.memory import Memory
from mmkv.policy_options import typed
from mmkv.registry import exact_share, get_policy, load_plugin, option_types, policy_class

logger = logging.getLogger(__name__)


def check_batch_size(batch_size: int | str) -> None:
    """Raise ValueError if a harness's batch size is not a number of at least 1."""
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise ValueError(f"batch_size={batch_size!r}: a compressed model needs a number, 1 or more")


def harness_arguments(
    policy: str, budget: float | int | str | None, kwargs: dict[str, Any]
) -> tuple[float | int | None, dict[str, Any], dict[str, Any]]:
    """Return the budget, options of `mmkv.wrap` and the policy's with least=0, other arguments.

    "memory" is a share of bytes. "plugin" names a file with policies or parts of the user, which is
    loaded first. Raises ValueError for an unknown policy, option or size, for both sizes, or a file
    that registers nothing.
    """
    if plugin := kwargs.get("plugin"):
        load_plugin(plugin)
    names = {*option_types(policy_class(policy)), KV_DTYPE}
    given_options = typed(policy, {k: v for k, v in kwargs.items() if k in names})
    policy_options = exact_share(policy) | given_options
    get_policy(policy, **{k: v for k, v in policy_options.items() if k != KV_DTYPE})
    size, memory = None if budget is None else number(budget), kwargs.get("memory")
    if size is not None and (warning := note(size)):
        logger.warning(warning)
    if memory is not None:
        if budget is not None:
            raise ValueError(f"memory={memory} stands in place of budget={budget}: give one")
        policy_options["memory"] = Memory.of(memory)
    names |= {"memory", "plugin"}
    return size, policy_options, {k: v for k, v in kwargs.items() if k not in names}
