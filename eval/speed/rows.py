"""What takes turns: the unwrapped model, policies at budgets, their nearest presses; presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mmkv.budgets import named
from mmkv.eval.speed.rival import nearest_press, press_label
from mmkv.eval.variants import parse_variants
from mmkv.registry import get_policy

# The row that ratios compare with, and the same once more: a bench must not tell them apart.
UNWRAPPED, AGAIN = "unwrapped sdpa", "unwrapped sdpa again"
# The attention of what the unwrapped model is measured with, see `Setting.unwrapped`.
ATTENTION = {"eager": "eager", "static": "sdpa", "flash": "flash_attention_2"}


@dataclass(frozen=True)
class Setting:
    """One model, prompt and batch, and what is compared on them."""

    name: str
    model: str
    prompt: int  # tokens
    new: int  # tokens generated in each round
    batch: int  # sequences at once
    # "name" or "name:option=value:option=value", as for `mmkv eval`; and "graph=false"
    policies: tuple[str, ...]
    budgets: tuple[float | int, ...] = (0.2,)
    rounds: int = 6
    unwrapped: tuple[str, ...] = ()  # keys of `ATTENTION`


@dataclass
class Row:
    """What takes turns, and what was measured of it: seconds, and bytes."""

    label: str
    kind: str  # "unwrapped", "again", "policy" or "kvpress"
    policy: str  # its name, or what the unwrapped model has, or the press
    budget: float | int | None = None  # None: nothing is evicted
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    press: dict[str, Any] | None = None  # as kvpress's worker takes it
    prefill_s: list[float] = field(default_factory=list[float])  # to the first token
    step_s: list[float] = field(default_factory=list[float])  # the same steps for all rows
    warm_s: float | None = None  # these three are `models.Reply.start`'s of the first reply
    prefill_cache_bytes: int = 0
    peak_bytes: int | None = None
    cache_bytes: int | None = None  # held at the end of a reply
    note: str = ""  # why there are no numbers


def make_rows(setting: Setting, *, kvpress: bool) -> list[Row]:
    """A setting's rows. The full cache, wrapped, is always among them: what it gains or loses is
    not compression's.

    Raises:
        ValueError: an unknown policy or option, or a value out of range.
    """
    rows, presses = [Row(UNWRAPPED, "unwrapped", "sdpa"), Row(AGAIN, "again", "sdpa")], list[Row]()
    for name in setting.unwrapped:
        if name not in ATTENTION:
            raise ValueError(f"unwrapped {name!r}: expected {', '.join(ATTENTION)}")
        rows.append(Row(f"unwrapped {name}", "unwrapped", name))
    for text in dict.fromkeys(("full", *setting.policies)):
        replayed = text.replace(":graph=false", "")
        (variant,) = parse_variants([replayed])
        if variant.hidden or variant.evict_chunks:
            raise ValueError(f"policy {text!r}: the bench knows neither questions nor chunks")
        policy = get_policy(variant.name, **variant.options)
        options = variant.recorded | ({} if replayed == text else {"graph": False})
        whole = policy.keeps_all or policy.retention is not None
        for budget in (None,) if whole else setting.budgets:
            label = text if budget is None else f"{text} {named(budget)}"
            rows.append(Row(label, "policy", policy.name, budget, options))
            press = nearest_press(policy, budget, setting.prompt) if kvpress and budget else None
            if press is not None and budget is not None:
                title = f"kvpress {press_label(press)} {named(budget)}"
                presses.append(Row(title, "kvpress", press_label(press), budget, press=press))
    if len(setting.policies) > len(set(setting.policies)):
        raise ValueError(f"--policies {','.join(setting.policies)} names a policy twice")
    return [*rows, *{press.label: press for press in presses}.values()]


_CI = ("full", "condense", "snapkv", "adakv", "prefixkv", "h2o", "xkv", "squeeze:base=local")
_PREFIXKV = ("full", "prefixkv", "prefixkv:graph=false", "condense")
_SQUEEZE, _SHARES = ("full", "squeeze", "local"), (0.2, 0.4, 0.6, 0.8)
_paper = partial(Setting, unwrapped=("static", "flash"))
PRESETS: dict[str, tuple[Setting, ...]] = {
    "ci": (Setting("ci", "llama-120m-random", 2048, 33, 1, _CI, rounds=20),),
    "prefixkv": tuple(
        _paper(f"prefixkv {batch} x ({n} + {new})", model, n, new, batch, _PREFIXKV, _SHARES)
        for model, batch, n, new in (
            ("llava-1.5-7b-random", 16, 1024, 512),
            ("llava-1.5-7b-random", 48, 624, 256),
            ("llava-1.5-13b-random", 8, 1024, 512),
        )
    ),
    "xkv": (_paper("xkv", "llama-8b-random", 8192, 128, 16, ("full", "xkv")),),
    "squeeze": tuple(
        _paper(f"squeeze batch {n}", "mistral-7b-random", 512, 1024, n, _SQUEEZE)
        for n in (1, 32, 64, 128, 224)
    ),
}
