"""The command `mmkv check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmkv.options import (
    DeviceOption,
    DtypeOption,
    KvDtypeOption,
    ModelOption,
    PairsOption,
    PolicyName,
    ProfileOption,
)
from mmkv.terminal import check_place, console, say, told

from .arguments import LimitOption, PromptsOption, budget_list, commands


@commands.command("check")
@told
def check_command(
    model: ModelOption = "builtin",
    prompts: PromptsOption = None,
    within: Annotated[
        float, typer.Option(help="Divergence that is tolerated, nats a token.")
    ] = 0.05,
    policy: PolicyName = "condense",
    budgets: Annotated[
        str, typer.Option(help="Fractions of the prompt (0.2), or tokens per layer and head (128).")
    ] = "0.05,0.1,0.2,0.3,0.5",
    option: PairsOption = None,
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

    from . import check, prompt_files

    chosen = get_policy(policy, **chat.parse_options(policy, option or []))
    sizes = budget_list(budgets)
    if prompts is not None:
        prompt_files.read(prompts)
    folder = check.folder_of(out or check.FOLDER)
    if out is not None and (out.is_dir() if folder != out else out.is_file()):
        raise ValueError(f"--out {out}: expected a folder, or a file named FILE.json")
    check_place(folder)

    from mmkv.divergence import check_arguments
    from mmkv.loading import models

    check_arguments(chosen, sizes, within, max_new_tokens)
    loaded = chat.load(model, device, dtype)
    try:
        with models.quiet():
            report, path = check.run(
                loaded,
                check.prompts_of(loaded, prompts, limit),
                chosen,
                sizes,
                within=within,
                max_new_tokens=max_new_tokens,
                profile=profile,
                kv_dtype=kv_dtype,
                out=out,
            )
    except KeyboardInterrupt:
        say("stopped; finished rows are kept, the same command goes on")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
        return
    console().print(report)
    typer.echo(f"wrote {path}")
