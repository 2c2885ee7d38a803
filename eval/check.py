"""`mmkv check`: `mmkv.check` on prompts of a file, in a folder that keeps every finished row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.options import (
    DeviceOption,
    DtypeOption,
    KvDtypeOption,
    ModelOption,
    PairsOption,
    PluginOption,
    PolicyName,
    ProfileOption,
)
from mmkv.terminal import check_place, console, say, told

from .arguments import BudgetsOption, LimitOption, PromptsOption, budget_list, commands
from .store import Store, describe_environment, digest, key_of, replace

if TYPE_CHECKING:
    from mmkv.chat import Loaded
    from mmkv.check_report import CheckReport
    from mmkv.policy import Policy

FOLDER = Path("runs/check")


@commands.command("check")
@told
def check_command(
    model: ModelOption = "builtin",
    prompts: PromptsOption = None,
    within: Annotated[float, typer.Option(help="Tolerated divergence, nats a token.")] = 0.05,
    policy: PolicyName = "condense",
    budgets: BudgetsOption = "0.05,0.1,0.2,0.3,0.5",
    option: PairsOption = None,
    plugin: PluginOption = None,
    profile: ProfileOption = None,
    kv_dtype: KvDtypeOption = None,
    limit: LimitOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.")] = 48,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the rows and the report, or FILE.json for the report and rows in the "
            "folder FILE; the same command goes on. [default: one of its own in runs/check]"
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Find the smallest cache that serves your prompts, by how far its predictions move.

    Each budget, and the full cache in 8 and in 4 bits, is compared with the full cache on the
    model's own replies: divergence of the next-token distribution, the share of the same next
    tokens, and bytes.
    """
    from mmkv import chat
    from mmkv.registry import get_policy

    from . import prompt_files

    chosen = get_policy(policy, **chat.parse_options(policy, option or []))
    sizes = budget_list(budgets)
    own = None if prompts is None else prompt_files.read(prompts)
    folder = _folder(out or FOLDER)
    if out is not None and (out.is_dir() if folder != out else out.is_file()):
        raise ValueError(f"--out {out}: expected a folder, or a file named FILE.json")
    check_place(folder)

    from mmkv.divergence import check_arguments
    from mmkv.loading import quiet

    check_arguments(chosen, sizes, within, max_new_tokens)
    loaded = chat.load(model, device, dtype)
    how: dict[str, Any] = {"within": within, "max_new_tokens": max_new_tokens}
    how |= {"profile": profile, "kv_dtype": kv_dtype, "out": out}
    try:
        with quiet():
            # The built-in model knows no English.
            inputs = prompt_files.inputs(loaded, own, limit, drawn=model == "builtin")
            report, path = run(loaded, inputs, chosen, sizes, **how)
    except KeyboardInterrupt:
        say("stopped; finished rows are kept, the same command goes on")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
        return
    console().print(report)
    typer.echo(f"wrote {path}")


def run(
    loaded: Loaded,
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
        out: as for the command.

    Returns:
        the report, and the file that it was written to.

    Raises:
        RunError: the folder holds rows of other settings.
        ValueError: as `mmkv.check`.
    """
    from mmkv.check_report import summed_up
    from mmkv.divergence import check_prompts, measured, settings_of

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
    folder = FOLDER / digest([about, environment]) if out is None else _folder(out)
    store = Store(folder)
    store.claim(about, environment)
    order = list(dict.fromkeys(x.label for x in settings)), [x.budget for x in settings]
    done = {key_of(row) for row in store.merge(*order)}
    if done:
        say(f"{len(done)} of {len(inputs) * len(settings)} rows are in {folder} already")
    for found in measured(model, inputs, settings, max_new_tokens, done):
        store.append(found)
    each = store.merge(*order)
    report = summed_up(each, within, notes)
    path = folder / "report.json" if out in (None, folder) else out
    found = about | environment | report.to_dict() | {"each": each}
    replace(path, json.dumps(found, indent=2) + "\n")
    return report, path


def _folder(out: Path) -> Path:
    """Where rows are kept: `out`, or beside a report's file."""
    return out.with_suffix("") if out.suffix == ".json" else out
