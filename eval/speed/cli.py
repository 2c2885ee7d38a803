"""The commands `mmkv bench`, `mmkv bench serve` and `mmkv plan`.

What can be checked without a model is checked before one is made: what a user got wrong is one line
and exit code 2.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.eval.speed.plan_cli import plan_command
from mmkv.eval.speed.serve_cli import serve_command
from mmkv.options import MODELS, DeviceOption, DtypeOption
from mmkv.terminal import Progress, check_place, console, say, told

if TYPE_CHECKING:
    from mmkv.eval.speed.presets import Setting
    from mmkv.eval.speed.report import Result
    from mmkv.eval.speed.rival import Worker

DEFAULTS: dict[str, Any] = {
    "model": "builtin",
    "prompt": 4096,
    "new": 128,
    "batch": 4,
    "policies": "full,snapkv,adakv,prefixkv",
    "budgets": "0.2",
}
_TOY_MEMORY = 64_000_000

commands = typer.Typer(
    name="mmkv", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


commands.command("plan")(plan_command)
bench = typer.Typer(rich_markup_mode=None)
bench.command("serve")(serve_command)
commands.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
@told
def bench_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"{MODELS}; or random weights: "
            "llama-120m-random, llama-7b-2-layers-random, llama-8b-random, llava-1.5-7b-random, "
            "llava-1.5-13b-random, mistral-7b-random. [default: builtin]",
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt. [default: 4096]")
    ] = None,
    new: Annotated[int | None, typer.Option(min=2, help="Tokens generated. [default: 128]")] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=0, help="Sequences at once; 0: the largest that fits. [default: 4]"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Names, or name:option=value:option=value, with commas between. "
            f"[default: {DEFAULTS['policies']}]"
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Fractions of the prompt, or tokens per layer and head. "
            f"[default: {DEFAULTS['budgets']}]"
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Instead of the above: ci, prefixkv, xkv, squeeze; commas between."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Prefills of each row. [default: 5; 20 with --preset ci]"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Fewer steps and prefills, and if need be a smaller batch, to be done by then. "
            "[default: 10 with --preset ci]",
        ),
    ] = None,
    unwrapped: Annotated[
        str,
        typer.Option(
            help="What else the unwrapped model is measured with: eager attention, a static cache "
            "(compiled on a GPU), flash attention; commas between."
        ),
    ] = "eager",
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Add the bound of a step's bytes on a GPU too.")
    ] = False,
    kvpress_python: Annotated[
        Path | None,
        typer.Option(help="Interpreter of an environment with kvpress: its nearest presses."),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    out: Annotated[Path, typer.Option(help="The JSON beside the table.")] = Path("out/bench.json"),
    toy: Annotated[
        bool, typer.Option("--toy", hidden=True, help="Shrink every model and prompt.")
    ] = False,
) -> None:
    """Time the unwrapped model, twice, its full cache wrapped, and policies, side by side.

    Each row's prompt is read once; then decode steps of all rows alternate in random order, and
    ratios are taken pair by pair. Warm-up is not counted, and the device is waited for.
    """
    if context.invoked_subcommand is not None:
        _check_nothing_before(context)
        return
    from mmkv.eval.speed import models, processor

    started = time.monotonic()
    if minutes is None and preset == "ci":
        minutes = 10
    given = {"model": model, "prompt": prompt, "new": new, "batch": batch}
    given |= {"policies": policies, "budgets": budgets}
    settings = _settings(given, preset, unwrapped)
    if rounds is not None:
        settings = [dataclasses.replace(s, rounds=rounds) for s in settings]
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    check_place(out.parent)
    for name in {s.model for s in settings}:
        if name.endswith("-random") and name not in models.SHAPES:
            raise ValueError(f"model {name!r}: expected one of {', '.join(models.SHAPES)}")
    where = _device(device, settings, preset, toy=toy)
    if where == "cpu":
        processor.use_vectors()
    _run(
        [s.toy() for s in settings] if toy else settings,
        device=where,
        dtype=dtype,
        python=kvpress_python,
        until=math.inf if minutes is None else started + 60 * minutes,
        roofline=roofline,
        out=out,
        toy=toy,
    )


def _check_nothing_before(context: typer.Context) -> None:
    """Refuse options of `mmkv bench` before the name of a command of its own."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option, command = name.replace("_", "-"), context.invoked_subcommand
            raise ValueError(f"--{option} stands before {command!r}, which has options of its own")


def _settings(given: dict[str, Any], preset: str | None, unwrapped: str) -> list[Setting]:
    """The presets asked for, or one setting of the user's own."""
    from mmkv.budgets import note, parse_list
    from mmkv.eval.speed.presets import PRESETS, Setting
    from mmkv.eval.speed.rows import make_rows
    from mmkv.eval.variants import split

    asked = {k: v for k, v in given.items() if v is not None}
    if preset is not None:
        if asked:
            name = next(iter(asked))
            raise ValueError(f"--preset names the {name} too: drop --{name}")
        names = split(preset)
        for name in names:
            if name not in PRESETS:
                raise ValueError(f"preset {name!r}: expected {', '.join(PRESETS)}")
        return [setting for name in names for setting in PRESETS[name]]
    asked = DEFAULTS | asked
    for name in ("policies", "budgets"):
        asked[name] = tuple(split(asked[name]))
        if not asked[name]:
            raise ValueError(f"--{name} {given[name]!r} names none")
    asked["budgets"] = tuple(parse_list(",".join(asked["budgets"])))
    for text in filter(None, map(note, asked["budgets"])):
        say(text)
    own = Setting(**asked, unwrapped=tuple(split(unwrapped)))
    make_rows(own, kvpress=False)
    return [own]


def _device(device: str, settings: list[Setting], preset: str | None, *, toy: bool) -> str:
    """The device's name; the presets say themselves where they belong."""
    from mmkv.loading.models import find_device

    found = find_device("cpu" if device == "auto" and preset == "ci" else device)
    if found.type == "cpu" and not toy and preset is not None and preset != "ci":
        raise ValueError(
            f"--preset {preset} is for a GPU ({len(settings)} settings of 7B and more)"
        )
    return str(found)


def _run(
    settings: list[Setting],
    *,
    device: str,
    dtype: str,
    python: Path | None,
    until: float,
    roofline: bool,
    out: Path,
    toy: bool,
) -> None:
    """Measure setting after setting; the JSON is written after each."""
    from mmkv.eval.speed.presets import SAME
    from mmkv.eval.speed.report import save
    from mmkv.eval.speed.rival import Worker
    from mmkv.eval.speed.runner import Bench

    worker = None if python is None else Worker(python)
    screen, tell = console(), Progress()
    results: list[Result] = []
    verdicts: list[dict[str, Any]] = []
    model, name = None, ""
    try:
        for i, setting in enumerate(settings):
            if model is None or setting.model != name:
                model = None  # frees the last model before the next one is made
                name = setting.model
                tell(f"making {name}")
                model = _load(name, device, dtype, worker, toy=toy)
            now = time.monotonic()
            result = Bench(
                setting,
                model,
                device=_in_words(device),
                dtype=str(model.dtype).removeprefix("torch."),
                worker=worker,
                until=now + (until - now) / (len(settings) - i),
                roofline=roofline,
                memory=_TOY_MEMORY if toy else None,
                tell=tell,
            ).run()
            results.append(result)
            judged = [check.judge(result) for check in (*SAME, *setting.checks)]
            verdicts += [{"setting": setting.name, **dataclasses.asdict(v)} for v in judged]
            save(out, results, verdicts)
            tell("")
            screen.print(result.table())
            screen.print(result.conditions, style="dim", markup=False, highlight=False)
            notes = [f"{row.label}: {row.note}" for row in result.rows if row.note]
            for line in [*notes, *map(str, judged)]:
                screen.print(line, markup=False, highlight=False, soft_wrap=True)
    finally:
        if worker is not None:
            worker.close()
    typer.echo(f"wrote {out}")
    if not any(result.measured for result in results):
        say(f"nothing could be measured: {results[0].missing}")
        raise typer.Exit(1)


def _load(name: str, device: str, dtype: str, worker: Worker | None, *, toy: bool) -> Any:
    """The model, in kvpress's process too."""
    import torch

    from mmkv import chat
    from mmkv.eval.speed import models
    from mmkv.eval.speed.rival import WorkerError
    from mmkv.loading.models import find

    shape = models.SHAPES.get(name)
    if shape is None:
        model = chat.load(name, device, dtype).model
        there: dict[str, Any] = {"path": find(name).path}
    else:
        shape = shape.toy() if toy else shape
        model = models.make(shape, device, dtype)
        there = {"shape": dataclasses.asdict(shape.decoder)}
    if worker is not None:
        found = str(model.dtype).removeprefix("torch.")
        try:
            worker.load(there, device, found, torch.get_num_threads())
        except WorkerError as error:
            raise ValueError(f"--kvpress-python: {error}") from None
    return model


def _in_words(device: str) -> str:
    import torch

    from mmkv.eval.speed import processor

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor.in_words()
