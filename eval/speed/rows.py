"""What takes turns: the unwrapped model, policies at budgets, and their nearest presses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mmkv.eval.speed.presets import AGAIN, UNWRAPPED, Setting
from mmkv.eval.speed.rival import nearest_press, press_label

T = TypeVar("T")

# The attention of what the unwrapped model is measured with, see `Setting.unwrapped`.
ATTENTION = {"eager": "eager", "static": "sdpa", "flash": "flash_attention_2"}

# What `mmkv.wrap` takes beside a policy's own options.
_OF_WRAP = ("profile", "graph", "kv_dtype")


@dataclass(frozen=True)
class Row:
    """What takes turns; the first fields are those of a `RowResult`.

    `options` are the policy's, and of `mmkv.wrap`: profile, graph, kv_dtype. `press` is as
    kvpress's worker takes it.
    """

    label: str
    kind: str
    name: str
    budget: float | int | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    press: dict[str, Any] | None = None


def make_rows(setting: Setting, *, kvpress: bool) -> list[Row]:
    """A setting's rows, in the order of their turns.

    Raises:
        ValueError: an unknown policy or option, or a value out of range.
    """
    from mmkv.budgets import named
    from mmkv.registry import exact_share, get_policy

    rows = [Row(UNWRAPPED, "unwrapped", "sdpa"), Row(AGAIN, "again", "sdpa")]
    for name in setting.unwrapped:
        if name not in ATTENTION:
            raise ValueError(f"unwrapped {name!r}: expected {', '.join(ATTENTION)}")
        rows.append(Row(f"unwrapped {name}", "unwrapped", name))
    presses: list[Row] = []
    for text in setting.policies:
        name, options = parse(text)
        options = exact_share(name) | options
        policy = get_policy(name, **{k: v for k, v in options.items() if k not in _OF_WRAP})
        label = ":".join([policy.name, *text.split(":")[1:]])
        if policy.keeps_all or policy.retention is not None:
            rows.append(Row(label, "policy", policy.name, None, options))
            continue
        for budget in setting.budgets:
            rows.append(Row(f"{label} {named(budget)}", "policy", policy.name, budget, options))
            press = nearest_press(policy, budget, setting.prompt)
            wanted = setting.presses is None or label in setting.presses
            if kvpress and wanted and press is not None:
                title = f"kvpress {press_label(press)} {named(budget)}"
                if all(r.label != title for r in presses):
                    presses.append(Row(title, "kvpress", press_label(press), budget, {}, press))
    doubled = {r.label for r in rows if [x.label for x in rows].count(r.label) > 1}
    if doubled:
        raise ValueError(f"--policies names a row twice: {', '.join(sorted(doubled))}")
    return rows + presses


def shuffled(rows: Sequence[T], order: random.Random) -> list[T]:
    """Every row once, in random order."""
    return order.sample(rows, len(rows))


def falling_profile(layers: int, budget: float | int | None) -> Any:
    """A made-up profile: the first layer keeps 1.5 times the budget, the last half of it."""
    from mmkv.profiles import Profile

    if not isinstance(budget, float):
        raise ValueError(f"profile=falling needs a fraction as its budget, not {budget!r}")
    spread = min(0.5, 1 / budget - 1)
    steps = [2 * i / max(1, layers - 1) - 1 for i in range(layers)]
    return Profile(tuple(budget * (1 - spread * s) for s in steps), budget=budget)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """A policy's name and options from "name:option=value"."""
    from mmkv.chat import parse_options, parse_value

    name, *pairs = text.strip().split(":")
    others = [p for p in pairs if not p.startswith(tuple(f"{own}=" for own in _OF_WRAP))]
    own: dict[str, Any] = dict(p.split("=", 1) for p in pairs if p not in others)
    if "graph" in own:
        own["graph"] = parse_value("graph", own["graph"], bool)
    if "kv_dtype" in own:
        from mmkv.cache.quantize import check

        check(own["kv_dtype"])
    return name, parse_options(name, others) | own
