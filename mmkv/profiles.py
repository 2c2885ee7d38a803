"""Profiles: layer sizes, or what each head costs, measured once over a few samples and reused.

PrefixKV's offline estimation (arXiv 2412.03409: 10 samples are enough, 1 is close) and XKV's
sampling (arXiv 2412.05896, section IV-C).

A profile file is JSON: `{"format": "mmkv-profile", "version": 1, "policy", "budget", "samples",
"fractions", "model"}`, where `fractions` holds the kept fraction of each compressed layer and
`model` the shape it was measured on. In place of "fractions" and "budget" it may have "levels" and
"costs", those of `mmkv.sizes.profiled`; "visual", how visual each head is (SparseMM); or
"retrieval", how much each copies (`mmkv.attach.copy_probe`). The PrefixKV authors' files, a JSON
list of one number per layer, the fraction removed, are read too. `FILE` and `VISUAL_FILE` in a
model's own folder are those it comes with.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from mmkv import adapters
from mmkv.budgets import number
from mmkv.loading import untrusted
from mmkv.sizes.profiled import FILE, Curves

_FORMAT, _VERSION = "mmkv-profile", 1
_MOST_BYTES = 2**20
# Budgets that differ by no more are the same but for whole tokens.
CLOSE = 0.01


@dataclass(frozen=True)
class Profile:
    """Kept fraction per compressed layer, or the cost of each of its heads.

    Attributes:
        fractions: one number in (0, 1] a layer; none with curves.
        budget: what was asked for, which is their mean but for rounding; None with curves, which
            serve every budget.
        policy: the policy it was measured with; None where unknown.
        samples: how many prompts it averages; None where unknown.
        model: the shape of the decoder it was measured on; None where unknown.
        curves: what each head costs, for layer and head sizes; None: layers have `fractions`.
        visual: [L][H], how visual each head is, for layer and head sizes, shares of 1.
        retrieval: [L][H], how much each head copies, for layer and head sizes, in [0, 1].
    """

    fractions: tuple[float, ...] = ()
    budget: float | None = None
    policy: str | None = None
    samples: int | None = None
    model: dict[str, Any] | None = None
    curves: Curves | None = None
    visual: tuple[tuple[float, ...], ...] | None = None
    retrieval: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a fraction."""
        of_heads = [x for x in ("curves", "visual", "retrieval") if getattr(self, x) is not None]
        if of_heads:
            if self.fractions or self.budget is not None or len(of_heads) > 1:
                also = [x for x in ("fractions", "budget") if getattr(self, x)]
                raise ValueError(f"profile: it has {' and '.join(of_heads + also)}: give one")
            self._check_heads()
            return
        for layer, f in enumerate(self.fractions):
            if not 0 <= f <= 1:
                raise ValueError(f"profile: layer {layer} keeps {f!r}, expected a number in [0, 1]")
        if not self.fractions:
            raise ValueError("profile: no layers")
        if self.budget is None or not 0 < self.budget <= 1:
            raise ValueError(f"profile: budget={self.budget!r}, expected a number in (0, 1]")

    def _check_heads(self) -> None:
        name, found = ("visual", self.visual) if self.visual else ("retrieval", self.retrieval)
        if found is None:
            return
        scores = [x for layer in found for x in layer]
        if len({len(layer) for layer in found}) != 1 or not scores:
            raise ValueError(f"profile: {name} needs as many heads in every layer, at least one")
        if not all(0 <= x < math.inf for x in scores) or not (self.retrieval or sum(scores)):
            least = "0 or more" if self.retrieval else "0 or more and not all 0"
            raise ValueError(f"profile: {name} scores must be {least}, got {scores[:9]}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        heads = data.pop("curves") or {}
        heads |= {x: y for x in ("visual", "retrieval") if (y := data.pop(x)) is not None}
        if heads:
            del data["fractions"], data["budget"]
        text = json.dumps(data | heads, indent=None if heads else 2)
        Path(path).write_text(text + "\n", encoding="utf-8")

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
            if "costs" in data:
                levels = _numbers(data.get("levels"), "levels", 1)
                return cls(curves=Curves(levels, _numbers(data["costs"], "costs", 3)), **known)
            for name in ("visual", "retrieval"):
                if name in data:
                    return cls(**{name: _numbers(data[name], name, 2)}, **known)
            fractions = _numbers(data.get("fractions"), "fractions", 1)
            return cls(fractions, budget=_number(data.get("budget"), "budget"), **known)
        except ValueError as error:
            raise ValueError(f"profile {os.fspath(path)}: {_reason(error)}") from None

    def check(self, config: Any, n_layers: int, budget: SupportsFloat | None) -> None:
        """Refuse it where it was measured on another model, or does not spend the budget."""
        of_heads = self.curves.costs if self.curves else self.visual or self.retrieval
        there = len(of_heads or self.fractions)
        if there != n_layers:
            raise ValueError(f"profile: it has {there} layers, this model compresses {n_layers}")
        mine = adapters.shape(config)
        known = mine if self.model is None else self.model
        if wrong := [name for name, value in mine.items() if known.get(name) != value]:
            both = ", ".join(f"{x} {known.get(x)!r} there, {mine[x]!r} here" for x in wrong)
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
    budget: SupportsFloat | None,
) -> Profile:
    """A profile, or the one at a path, that fits a decoder by its config and compressed layers.

    The budget is what is asked for beside it; None leaves it to the profile.
    """
    loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
    try:
        loaded.check(config, n_layers, budget)
    except ValueError as error:
        if isinstance(profile, Profile):
            raise
        raise ValueError(f"profile {os.fspath(profile)}: {_reason(error)}") from None
    return loaded


def beside(model: Any, file: str = FILE) -> Path | None:
    """Where a profile lies in the folder that a model was loaded from; None: nowhere."""
    folder = getattr(model.config, "_name_or_path", None)
    path = Path(folder or "", file)
    return path if folder and path.is_file() else None


def own(model: Any, file: str = FILE) -> Profile | None:
    """The profile `file` of the folder that a model was loaded from, if it is one of its shape."""
    path = beside(model, file)
    found = None if path is None else Profile.load(path)
    fits = found is not None and found.model == adapters.shape(model.get_decoder().config)
    return found if fits else None


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


def _numbers(x: Any, name: str, depth: int) -> Any:
    """Numbers in lists, `depth` of them in each other, as tuples."""
    if not depth:
        return _number(x, name)
    if not isinstance(x, list):
        raise ValueError(f"{name!r} is not a list{' of lists' * (depth - 1)}")
    return tuple(_numbers(y, name, depth - 1) for y in x)
