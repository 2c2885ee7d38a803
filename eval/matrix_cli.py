"""The commands `mmkv eval matrix` and `mmkv eval merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmkv.options import DeviceOption, DtypeOption, ModelOption
from mmkv.terminal import check_place, say, told

from .arguments import (
    LengthOption,
    LimitOption,
    MapOption,
    PolicyOption,
    budget_list,
    commands,
)

BUDGETS = "0.05,0.1,0.2,0.4"
SUITES = "description,longbench,ruler"


@commands.command("eval matrix")
@told
def matrix_command(
    suites: Annotated[str, typer.Option(help="Suites, with commas between.")] = SUITES,
    model: ModelOption = "builtin",
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="SUITE=PATH", help="A suite's published data. [default: builtin]"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="As for eval. [default: all that this model can have]"),
    ] = None,
    budgets: Annotated[str, typer.Option(help="As for eval.")] = BUDGETS,
    question: Annotated[str, typer.Option(help="visible, hidden or both.")] = "both",
    limit: LimitOption = 25,
    length: LengthOption = None,
    out: Annotated[Path, typer.Option(help="The matrix's folder.")] = Path("runs/matrix"),
    batch_size: Annotated[int, typer.Option(min=1, help="Samples at once.")] = 25,
    option: PolicyOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: MapOption = None,
) -> None:
    """Measure policies x budgets x suites x questions; write one page of what quality costs.

    The same command goes on with a matrix that was stopped. Started by `accelerate launch`, its
    processes share the work.
    """
    from .suites.registry import BUILTIN, SUITES, load_suite
    from .variants import parse_options, split, with_question

    paths = parse_options(data or [])
    names = split(suites)
    if unknown := [name for name in (*names, *paths) if name not in SUITES]:
        raise ValueError(f"suite {unknown[0]!r}: expected some of {', '.join(SUITES)}")
    if unused := [name for name in paths if name not in names]:
        raise ValueError(f"--data {unused[0]}={paths[unused[0]]}: --suites does not name it")
    sizes, chosen = budget_list(budgets), parse_options(option or [])
    asked = None if policies is None else with_question(split(policies), question)
    check_place(out)

    from .loading import load_model, token_counter
    from .processes import find_processes
    from .runner import check_arguments, fitting, run

    loads = {}
    for name in names:
        path = paths.get(name, BUILTIN)
        count = token_counter(model) if SUITES[name].has_length and path != BUILTIN else None
        size = length if count is not None else None
        loads[name] = load_suite(name, path, limit=limit, length=size, count=count)
    if asked is not None:
        check_arguments(asked, sizes, ["ppl"], chosen, builtin=not paths)
    processes = find_processes(device)
    if processes.count > 1:
        device = str(processes.device)
    loaded, processor = load_model(model, device=device, dtype=dtype, device_map=device_map)
    if asked is None:
        asked = with_question(fitting(loaded, sizes), question)
    try:
        for name, samples in loads.items():
            path = str(paths.get(name, BUILTIN))
            run(
                loaded,
                processor,
                samples,
                policies=asked,
                budgets=sizes,
                metrics=["score"] if any(s.metric for s in samples) else ["ppl", "rouge"],
                out=out / name,
                options=chosen,
                batch_size=batch_size,
                model_name=model,
                data=path,
                limit=limit,
                processes=processes,
            )
            if processes.main:
                _write(out)
    except KeyboardInterrupt:
        say(f"stopped; finished rows are in {out}, the same command goes on")
        raise typer.Exit(130) from None


@commands.command("eval merge")
@told
def merge_command(
    sources: Annotated[list[Path], typer.Argument(help="Folders of runs, or of matrices.")],
    out: Annotated[Path, typer.Option(help="The matrix they are added to.")],
) -> None:
    """Add runs that were measured elsewhere to a matrix, and write its page again."""
    from .matrix import merge

    check_place(out)
    for folder in merge(sources, out):
        typer.echo(f"merged {folder}")
    _write(out)


def _write(folder: Path) -> None:
    from .matrix import Matrix

    for path in Matrix(folder).write():
        typer.echo(f"wrote {path}")
