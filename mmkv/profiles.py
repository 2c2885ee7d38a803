"""Profiles: layer sizes or head measurements, taken once over a few samples and reused.

PrefixKV's offline estimation (arXiv 2412.03409: 10 samples are enough, 1 is close) and XKV's
sampling (arXiv 2412.05896, section IV-C).

A profile file is JSON: `{"format": "mmkv-profile", "version": 1, "policy", "budget", "samples",
"fractions", "model"}`, where `fractions` holds the kept fraction of each compressed layer and
`model` the shape of the model measured. In place of "fractions" and "budget" it may have "visual",
how visual each head is (SparseMM), or "retrieval", how much each head copies
(`mmkv.attach.copy_probe`). The PrefixKV authors' files, a JSON list of
the fraction removed from each layer, are read too. A model's folder may hold profiles as `FILE` and
`VISUAL_FILE`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from mmkv import adapters
from mmkv.budgets import number
from mmkv.loading import untrusted
from mmkv.sizes.profiled import FILE

_FORMAT, _VERSION = "mmkv-profile", 1
_MOST_BYTES = 2**20
# Budgets that differ by no more count as equal, as sizes are rounded to whole tokens.
CLOSE = 0.01


@dataclass(frozen=True)
class Profile:
    """Kept fraction of each compressed layer, or a measurement of each of its heads.

    Attributes:
        fractions: one number in [0, 1] per layer; empty for measurements of heads.
        budget: the budget requested, the mean of the fractions up to rounding; None for
            measurements of heads, which serve every budget.
        policy: the policy it was measured with; None if unknown.
        samples: how many prompts it averages; None if unknown.
        model: the shape of the decoder it was measured on; None if unknown.
        visual: [L][H], how visual each head is, for layer and head sizes, of sum 1.
        retrieval: [L][H], how much each head copies, for layer and head sizes, in [0, 1].
    """

    fractions: tuple[float, ...] = ()
    budget: float | None = None
    policy: str | None = None
    samples: int | None = None
    model: dict[str, Any] | None = None
    visual: tuple[tuple[float, ...], ...] | None = None
    retrieval: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Check that it has one kind of measurement, with valid numbers."""
        of_heads = [x for x in ("visual", "retrieval") if getattr(self, x) is not None]
        if of_heads:
            if self.fractions or self.budget is not None or len(of_heads) > 1:
                others = [x for x in ("fractions", "budget") if getattr(self, x)]
                raise ValueError(f"profile: it has {' and '.join(of_heads + others)}: give one")
            self._check_heads(of_heads[0])
            return
        for layer, f in enumerate(self.fractions):
            if not 0 <= f <= 1:
                raise ValueError(f"profile: layer {layer} keeps {f!r}, expected a number in [0, 1]")
        if not self.fractions:
            raise ValueError("profile: no layers")
        if self.budget is None or not 0 < self.budget <= 1:
            raise ValueError(f"profile: budget={self.budget!r}, expected a number in (0, 1]")

    def _check_heads(self, name: str) -> None:
        layers = getattr(self, name)
        scores = [x for layer in layers for x in layer]
        if len({len(layer) for layer in layers}) != 1 or not scores:
            raise ValueError(f"profile: {name} needs as many heads in every layer, at least one")
        most, among = (1, "in [0, 1]") if name == "retrieval" else (sys.float_info.max, "0 or more")
        if not all(0 <= x <= most for x in scores):
            raise ValueError(f"profile: {name} scores must be numbers {among}, got {scores[:9]}")
        if name == "visual" and not sum(scores):
            raise ValueError("profile: visual scores must not all be 0")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        heads = {x: y for x in ("visual", "retrieval") if (y := data.pop(x)) is not None}
        if heads:
            del data["fractions"], data["budget"]
        text = json.dumps(data | heads, indent=None if heads else 2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile, of our format or of the PrefixKV authors'.

        Raises:
            ValueError: the file is unreadable, or not a profile; the message names it.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"profile={path!r}: expected a Profile, or the path of one")
        with _naming(path):
            data = untrusted.read_json(path, _MOST_BYTES)
            if isinstance(data, list):
                kept = tuple(1.0 - _number(x) for x in data)
                return cls(kept, budget=sum(kept) / max(1, len(kept)), policy="prefixkv")
            if not isinstance(data, dict) or data.get("format") != _FORMAT:
                raise ValueError(f"expected a JSON list, or an object with format={_FORMAT!r}")
            if data.get("version") != _VERSION:
                raise ValueError(f"version {data.get('version')!r}, expected {_VERSION}")
            known: dict[str, Any] = {}
            for name, kind in (("policy", str), ("samples", int), ("model", dict)):
                known[name] = value = data.get(name)
                if value is not None and not isinstance(value, kind):
                    raise ValueError(f"{name!r} is {str(value)[:40]!r}, expected {kind.__name__}")
            for name in ("visual", "retrieval"):
                if name in data:
                    return cls(**{name: _numbers(data[name], name, 2)}, **known)
            fractions = _numbers(data.get("fractions"), "fractions", 1)
            return cls(fractions, budget=_number(data.get("budget"), "budget"), **known)

    def check(self, config: Any, n_layers: int, budget: SupportsFloat | str | None) -> None:
        """Refuse a profile that was measured on another model, or with another budget."""
        by_head = self.visual or self.retrieval
        n = len(by_head or self.fractions)
        if n != n_layers:
            raise ValueError(f"profile: it has {n} layers, this model compresses {n_layers}")
        here = adapters.shape(config)
        there = here if self.model is None else self.model
        if wrong := [name for name, value in here.items() if there.get(name) != value]:
            both = ", ".join(f"{x} {there.get(x)!r} there, {here[x]!r} here" for x in wrong)
            raise ValueError(f"profile: measured on another model: {both}")
        if self.budget is None or budget is None:
            return
        size = number(budget)
        if isinstance(size, int) or abs(size - self.budget) > CLOSE:
            raise ValueError(
                f"profile: budget={size}, but the profile keeps {self.budget:.4f}: leave the "
                "budget out, or calibrate for this one"
            )


def read(
    profile: Profile | str | os.PathLike[str],
    config: Any,
    n_layers: int,
    budget: SupportsFloat | str | None,
) -> Profile:
    """Return a profile, read if it is a path, after a check that it fits the decoder and budget.

    `n_layers` is the number of compressed layers; `budget` is None to take the profile's.
    """
    if isinstance(profile, Profile):
        profile.check(config, n_layers, budget)
        return profile
    loaded = Profile.load(profile)
    with _naming(profile):
        loaded.check(config, n_layers, budget)
    return loaded


def beside(model: Any, file: str = FILE) -> Path | None:
    """Return the path of a profile in the folder that a model was loaded from; None if missing."""
    folder = getattr(model.config, "_name_or_path", None)
    path = Path(folder or "", file)
    return path if folder and path.is_file() else None


def own(model: Any, file: str) -> Profile | None:
    """Return the profile `file` from a model's folder, or None if missing or of another shape."""
    if (path := beside(model, file)) is None:
        return None
    profile = Profile.load(path)
    return profile if profile.model == adapters.shape(model.get_decoder().config) else None


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Generator[None]:
    """Let errors of this block name the profile's file."""
    try:
        yield
    except ValueError as error:
        why = str(error).removeprefix("profile: ")
        if isinstance(error.__cause__, OSError):
            why = error.__cause__.strerror or why
        elif isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            why = f"no JSON ({why})"
        raise ValueError(f"profile {os.fspath(path)}: {why}") from None


def _number(x: Any, name: str = "") -> float:
    # Bounded before float(), which fails on too large integers of JSON.
    if isinstance(x, bool) or not isinstance(x, int | float) or not -1e6 <= x <= 1e6:
        raise ValueError(f"{name and f'{name}: '}expected a number, got {str(x)[:40]!r}")
    return float(x)


def _numbers(x: Any, name: str, depth: int) -> Any:
    """Convert lists of numbers, nested `depth` deep, to tuples."""
    if not depth:
        return _number(x, name)
    if not isinstance(x, list):
        raise ValueError(f"{name!r} is not a list{' of lists' * (depth - 1)}")
    return tuple(_numbers(y, name, depth - 1) for y in x)
