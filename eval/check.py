"""`mmkv check`: `mmkv.check` on prompts of a file, in a folder that keeps every finished row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mmkv import options
from mmkv.terminal import check_place, console, say, show_errors

from .arguments import (
    BudgetsOption,
    LimitOption,
    MemoryOption,
    PromptsOption,
    RunOption,
    budget_list,
    commands,
)
from .store import Store, describe_environment, digest, file_digests, key_of, replace

FOLDER = Path("runs/check")
BUDGETS = "0.05,0.1,0.2,0.3,0.5"  # those of `mmkv.check`


@commands.command("check", short_help="Find the smallest budget for your prompts.")
@show_errors
def check_command(
    model: options.ModelOption = "builtin",
    prompts: PromptsOption = None,
    within: Annotated[float, typer.Option(help="Tolerated divergence, nats a token.")] = 0.05,
    policy: options.PolicyName = "condense",
    budgets: BudgetsOption = None,
    memory: MemoryOption = None,
    option: options.PairsOption = None,
    plugin: options.PluginOption = None,
    profile: options.ProfileOption = None,
    kv_dtype: options.KvDtypeOption = None,
    limit: LimitOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a reply, at most.")] = 48,
    out: RunOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Find the smallest cache for your prompts whose predictions stay within a tolerance.

    Each budget, and the full cache in 8 and in 4 bits, is compared with the full cache along the
    model's replies: divergence of next-token predictions, share of equal tokens, and bytes.
    """
    sizes = budget_list(budgets, BUDGETS, memory, kv_dtype)
    check_place(out or FOLDER)

    # These import torch.
    from mmkv import chat
    from mmkv.registry import get_policy

    from .prompts import encode_prompts, read_prompts

    chosen = get_policy(policy, **chat.parse_options(policy, option or []))
    user_prompts = None if prompts is None else read_prompts(prompts)
    from mmkv.divergence import check_arguments, check_prompts, measured, settings_of, summed_up
    from mmkv.loading import quiet

    check_arguments(chosen, sizes, within, max_new_tokens)
    loaded = chat.load(model, device, dtype)
    net = loaded.model
    try:
        with quiet():
            # The built-in model knows no English.
            inputs = encode_prompts(loaded, user_prompts, limit, drawn=model == "builtin")
            check_prompts(net, inputs, max_new_tokens)
            settings = settings_of(net, chosen, sizes, profile=profile, kv_dtype=kv_dtype)
            facts = {
                "model": loaded.name,
                "policy": settings[0].label,
                "options": json.loads(json.dumps(chosen.flat(), default=str)),
                "profile": None if profile is None else str(profile),
                "files": file_digests(net, [] if profile is None else [profile]),
                "budgets": sizes,
                **({} if memory is None else {"memory": True}),
                "max_new_tokens": max_new_tokens,
                "n": len(inputs),
                "prompts_digest": digest([x["input_ids"].tolist() for x in inputs]),
                "dtype": str(net.dtype).removeprefix("torch."),
                "device": net.device.type,
            }
            environment = describe_environment(net.device)
            folder = out or FOLDER / digest([facts, environment])
            store = Store(folder)
            store.claim(facts, environment)
            order = list(dict.fromkeys(x.label for x in settings)), [x.budget for x in settings]
            done = {key_of(row) for row in store.merge(*order)}
            if done:
                say(f"{len(done)} of {len(inputs) * len(settings)} rows are in {folder} already")
            for new_rows in measured(net, inputs, settings, max_new_tokens, done):
                store.append(new_rows)
            rows = store.merge(*order)
    except KeyboardInterrupt:
        say("stopped; finished rows are kept, the same command goes on")
        raise typer.Exit(130) from None
    report, path = summed_up(rows, within), folder / "report.json"
    text = json.dumps(facts | environment | report.to_dict() | {"each": rows}, indent=2) + "\n"
    replace(path, text)
    if as_json:
        typer.echo(text, nl=False)
    else:
        console().print(report)
        typer.echo(f"wrote {path}")
