"""Profiles: per-layer kept fractions, measured once over a few samples and then reused.

PrefixKV's offline estimation (arXiv 2412.03409: 10 samples are enough, 1 is close) and XKV's
sampling (arXiv 2412.05896, section IV-C).

A profile file is JSON: `{"format": "mmkv-profile", "version": 1, "policy", "budget", "samples",
"fractions", "model"}`, where `fractions` holds the kept fraction of each compressed layer and
`model` the shape it was measured on. The PrefixKV authors' files, a JSON list of one number per
layer, the fraction removed, are read too.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from mmkv.budgets import number
from mmkv.loading import untrusted

_FORMAT, _VERSION = "mmkv-profile", 1
_MOST_BYTES = 2**20
# Budgets that differ by no more are the same but for whole tokens.
CLOSE = 0.01
_SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "num_key_value_heads")


@dataclass(frozen=True)
class Profile:
    """Kept fraction per compressed layer.

    Attributes:
        fractions: one number in (0, 1] a layer.
        budget: what was asked for, which is their mean but for rounding.
        policy: the policy it was measured with; None where unknown.
        samples: how many prompts it averages; None where unknown.
        model: the shape of the decoder it was measured on; None where unknown.
    """

    fractions: tuple[float, ...]
    budget: float
    policy: str | None = None
    samples: int | None = None
    model: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a fraction."""
        for layer, f in enumerate(self.fractions):
            if not isinstance(f, int | float) or isinstance(f, bool) or not 0 <= f <= 1:
                raise ValueError(f"profile: layer {layer} keeps {f!r}, expected a number in [0, 1]")
        if not self.fractions:
            raise ValueError("profile: no layers")
        if not 0 < self.budget <= 1:
            raise ValueError(f"profile: budget={self.budget!r}, expected a number in (0, 1]")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON."""
        data = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile, ours or one of the PrefixKV authors'.

        Raises:
            ValueError: unreadable, or not a profile; the message names the file.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"profile={path!r}: expected a Profile, or the path of one")
        try:
            data = untrusted.read_json(path, _MOST_BYTES)
            if isinstance(data, list):
                numbers = [_number(x) for x in data]
                kept = tuple(1.0 - x for x in numbers)
                return cls(kept, budget=sum(kept) / max(1, len(kept)), policy="prefixkv")
            if not isinstance(data, dict) or data.get("format") != _FORMAT:
                raise ValueError(f"expected a JSON list, or an object with format={_FORMAT!r}")
            if data.get("version") != _VERSION:
                raise ValueError(f"version {data.get('version')!r}, expected {_VERSION}")
            if not isinstance(data.get("fractions"), list):
                raise ValueError("'fractions' is not a list")
            fractions = tuple(_number(x) for x in data["fractions"])
            return cls(
                fractions,
                budget=_number(data.get("budget"), "budget"),
                policy=_typed(data, "policy", str),
                samples=_typed(data, "samples", int),
                model=_typed(data, "model", dict),
            )
        except ValueError as error:
            raise ValueError(f"profile {os.fspath(path)}: {_reason(error)}") from None

    def fractions_for(
        self, config: Any, n_layers: int, budget: SupportsFloat | None
    ) -> tuple[float, ...]:
        """The fractions, if they were measured on such a model and spend the budget.

        Raises:
            ValueError: another model's shape or another budget; the message says both.
        """
        if len(self.fractions) != n_layers:
            raise ValueError(
                f"profile: it has {len(self.fractions)} layers, this model compresses {n_layers}"
            )
        mine = model_shape(config)
        there = mine if self.model is None else self.model
        different = [
            f"{name} {there.get(name)!r} there, {value!r} here"
            for name, value in mine.items()
            if there.get(name) != value
        ]
        if different:
            raise ValueError(f"profile: measured on another model: {', '.join(different)}")
        size = None if budget is None else number(budget)
        if size is not None and (isinstance(size, int) or abs(size - self.budget) > CLOSE):
            raise ValueError(
                f"profile: budget={size}, but the profile keeps {self.budget:.4f}: leave the "
                "budget out, or calibrate for this one"
            )
        return self.fractions


def read(
    profile: Profile | str | os.PathLike[str],
    config: Any,
    n_layers: int,
    budget: SupportsFloat | None,
) -> tuple[tuple[float, ...], float]:
    """The kept fraction of each compressed layer, and their budget.

    Args:
        profile: a profile, or the path of one.
        config: of the decoder that is wrapped.
        n_layers: how many of its layers are compressed.
        budget: what is asked for beside it; None leaves it to the profile.

    Raises:
        ValueError: no profile, or one of another model or budget; the message names the file.
    """
    if isinstance(profile, Profile):
        return profile.fractions_for(config, n_layers, budget), profile.budget
    loaded = Profile.load(profile)
    try:
        return loaded.fractions_for(config, n_layers, budget), loaded.budget
    except ValueError as error:
        raise ValueError(f"profile {os.fspath(profile)}: {_reason(error)}") from None


def model_shape(config: Any) -> dict[str, Any]:
    """What a profile must agree with: the decoder's type, layers, width and key-value heads."""
    return {name: getattr(config, name, None) for name in _SHAPE}


def _reason(error: ValueError) -> str:
    """What is wrong with a file, without its name."""
    if isinstance(error.__cause__, OSError):
        return error.__cause__.strerror or str(error)
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return f"no JSON ({error})"
    return str(error).removeprefix("profile: ")


def _number(x: Any, name: str = "") -> float:
    # The bound comes first: an integer of JSON can be too large to be a float.
    if isinstance(x, bool) or not isinstance(x, int | float) or not -1e6 <= x <= 1e6:
        raise ValueError(f"{name and f'{name}: '}expected a number, got {str(x)[:40]!r}")
    return float(x)


def _typed(data: dict[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name!r} is {str(value)[:40]!r}, expected {kind.__name__}")
    return value
