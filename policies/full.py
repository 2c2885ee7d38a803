"""The full cache: nothing is evicted, at any budget. All policies are compared with it."""

from dataclasses import dataclass

from mmkv.policy import Policy
from mmkv.registry import register_policy


@register_policy("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep every key and value."""

    paper = "baseline"
    keeps_all = True
