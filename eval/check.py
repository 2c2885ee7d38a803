"""`mmkv check`: `mmkv.check` on prompts of a file, in a folder that keeps every finished row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv import chat
from mmkv.terminal import bar, say

from . import prompt_files
from .store import Row, Store, describe_environment, digest, key_of, replace

if TYPE_CHECKING:
    from mmkv.check_report import CheckReport
    from mmkv.policy import Policy

FOLDER = Path("runs/check")
# Seconds between two lines of progress, where there is no terminal.
_EVERY = 10.0


def prompts_of(
    loaded: chat.Loaded, path: Path | None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Inputs of a file's prompts, or of shipped ones.

    The built-in model knows no English: without a file it is asked about drawn pictures.

    Raises:
        ValueError: a file that cannot be read, or a prompt that the model cannot take.
    """
    if path is None and loaded.name == "builtin":
        from .prompts import Encoder
        from .suites.registry import load_suite

        encoder = Encoder.of(loaded.model, loaded.processor)
        samples = load_suite("description", limit=limit or len(prompt_files.shipped()))
        return list(encoder.each(loaded.model, samples))
    prompts = prompt_files.shipped() if path is None else prompt_files.read(path)
    return prompt_files.encoded(loaded, prompts[:limit])


def run(
    loaded: chat.Loaded,
    inputs: Sequence[dict[str, Any]],
    policy: Policy,
    budgets: Sequence[float | int],
    *,
    within: float,
    max_new_tokens: int,
    profile: Path | None = None,
    kv_dtype: str | None = None,
    out: Path | None = None,
) -> tuple[CheckReport, Path]:
    """Measure what a folder has no rows of yet; write the report beside them.

    Args:
        loaded: a model that is not wrapped.
        inputs: of one prompt each.
        policy, budgets, within, max_new_tokens, profile, kv_dtype: as for `mmkv.check`.
        out: the folder; or the report's file, FILE.json, with rows in the folder FILE. By default
            a folder of its own in `runs/check`.

    Returns:
        the report, and the file that it was written to.

    Raises:
        RunError: the folder holds rows of other settings.
        ValueError: as `mmkv.check`.
    """
    from mmkv.check_report import summed_up
    from mmkv.divergence import check_prompts, measure, settings_of

    model = loaded.model
    check_prompts(model, inputs, max_new_tokens)
    settings, notes = settings_of(model, policy, budgets, profile=profile, kv_dtype=kv_dtype)
    about = {
        "model": loaded.name,
        "policy": settings[0].label,
        "options": json.loads(json.dumps(policy.flat(), default=str)),
        "profile": None if profile is None else str(profile),
        "budgets": list(budgets),
        "max_new_tokens": max_new_tokens,
        "n": len(inputs),
        "prompts_digest": digest([x["input_ids"].tolist() for x in inputs]),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }
    environment = describe_environment(model.device)
    folder = FOLDER / digest([about, environment])
    if out is not None:
        folder = folder_of(out)
    store = Store(folder)
    store.check(about)
    store.claim(about, environment)
    order = list(dict.fromkeys(x.label for x in settings)), [x.budget for x in settings]
    rows = {key_of(row): row for row in store.merge(*order)}
    if rows:
        say(f"{len(rows)} of {len(inputs) * len(settings)} rows are in {folder} already")
    with bar(len(inputs) * len(settings), every=_EVERY) as advance:
        for i, prompt in enumerate(inputs):
            missing = [x for x in settings if key_of(_head(x.label, x.budget, i)) not in rows]
            name = f"prompt {i + 1} of {len(inputs)}"
            advance(len(settings) - len(missing), name)
            if not missing:
                continue
            for found in measure(model, prompt, missing, max_new_tokens, first=i):
                store.append(found)
                advance(1, name)
    each = store.merge(*order)
    report = summed_up(each, within, notes)
    path = folder / "report.json" if out in (None, folder) else out
    replace(
        path, json.dumps(about | environment | report.to_dict() | {"each": each}, indent=2) + "\n"
    )
    return report, path


def folder_of(out: Path) -> Path:
    """Where rows are kept: `out`, or beside a report's file."""
    return out.with_suffix("") if out.suffix == ".json" else out


def _head(policy: str, budget: float | int, index: int) -> Row:
    return {"policy": policy, "budget": budget, "index": index}
