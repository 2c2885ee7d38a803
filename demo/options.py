"""A policy's options as the page's controls: read from the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mmkv import chat
from mmkv.registry import list_policies, option_types, policy_class

Kind = Literal["choice", "switch", "whole", "number", "text"]
# Has a control of its own.
_ELSEWHERE = ("protect",)


@dataclass(frozen=True)
class Option:
    """One option of policies; `choices` are for the kind "choice", `optional` ones can be None."""

    name: str
    kind: Kind
    choices: tuple[str, ...] = ()
    optional: bool = False

    @property
    def label(self) -> str:
        """The name in words."""
        return self.name.replace("_", " ")

    def shown(self, value: Any) -> Any:
        """A field's value as its control shows it."""
        return "none" if value is None and self.kind == "choice" else value

    def read(self, shown: Any) -> Any:
        """A field's value from what its control shows.

        Raises:
            ValueError: no number where one is needed.
        """
        if shown is None or shown == "":
            if self.optional:
                return None
            raise ValueError(f"option {self.label!r} is empty: give it a value")
        if self.kind == "choice" and self.optional and shown == "none":
            return None
        if self.kind == "whole":
            if shown != int(shown):
                raise ValueError(f"option {self.label!r} is {shown}: expected a whole number")
            return int(shown)
        return float(shown) if self.kind == "number" else shown


def all_options() -> list[Option]:
    """The options of every registered policy, each once, in their order."""
    found: dict[str, Option] = {}
    for name in list_policies():
        for option, hint in option_types(policy_class(name)).items():
            if option not in found and option not in _ELSEWHERE:
                found[option] = _option(option, hint)
    return list(found.values())


def _option(name: str, hint: Any) -> Option:
    values = chat.flat(hint)
    optional = type(None) in values
    literals = [x for x in values if isinstance(x, str)]
    if literals:
        return Option(name, "choice", (*literals, *(["none"] if optional else [])), optional)
    kinds: dict[Any, Kind] = {bool: "switch", float: "number", int: "whole"}
    found: list[Kind] = [kind for known, kind in kinds.items() if known in values]
    return Option(name, found[0] if found else "text", optional=optional)


def defaults(policy: str) -> dict[str, Any]:
    """The options that a policy reads, with their defaults."""
    return {k: v for k, v in policy_class(policy).options().items() if k not in _ELSEWHERE}


def changed(policy: str, shown: dict[str, Any]) -> dict[str, Any]:
    """What the controls say where it differs from the policy's defaults.

    Options that the policy does not read are ignored.

    Raises:
        ValueError: an unknown policy, or a control without a value.
    """
    known = defaults(policy)
    read = {x.name: x.read(shown[x.name]) for x in all_options() if x.name in known}
    return {name: value for name, value in read.items() if value != known[name]}
