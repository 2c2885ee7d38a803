"""The commands `mmkv eval`, `check` and `report`; `calibrate` and `plot` are in `mmkv.eval.sizing`.

Arguments are checked before a model is loaded: a wrong one is reported in one line, with exit
code 2. Ctrl-C keeps every finished row and exits with code 130.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mmkv.cli_options import DeviceOption, DtypeOption, ModelOption, PluginOption, checked, one_of
from mmkv.loading.names import DEFAULT_MODEL, SMOLLM2
from mmkv.terminal import Table, check_place, console, say, show_errors

from . import arguments
from .arguments import budget_list, check_variants, commands, split, token_counter
from .speed import cli as cli  # registers `mmkv bench` and `mmkv plan`
from .store import METRICS, QUESTIONS, RunError, check_metrics

if TYPE_CHECKING:
    from mmkv.chat import Loaded

    from .samples import Sample

BUDGETS = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
CHECKED = ",".join(arguments.MEMORY)


@commands.command("eval", short_help="Measure the quality of policies on a suite.")
@show_errors
def eval_command(
    suite: Annotated[
        str,
        typer.Argument(
            help="description, mmvet, longbench, needle, ruler, continuation, documents, "
            "prompts, cnn_dailymail or xsum."
        ),
    ],
    model: ModelOption = DEFAULT_MODEL,
    data: arguments.DataOption = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Names, or name:option=value:..., commas between; or all.",
            callback=checked(lambda text: text == "all" or check_variants(text)),
        ),
    ] = "full,condense,local,streaming,h2o,elastic,snapkv,pyramidkv,adakv,squeeze,xkv,prefixkv",
    budgets: arguments.BudgetsOption = None,
    memory: arguments.MemoryOption = None,
    metrics: Annotated[
        str, typer.Option(help=f"Of {', '.join(METRICS)}; the last two need replies.")
    ] = "ppl,rouge",
    question: Annotated[
        str,
        typer.Option(
            help="visible: compressed with the prompt; hidden: read after it; both.",
            callback=one_of("question", QUESTIONS),
        ),
    ] = "visible",
    limit: arguments.LimitOption = None,
    out: arguments.RunOption = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples at once; a stopped run loses at most one batch.")
    ] = 25,
    option: arguments.PolicyOption = None,
    plugin: PluginOption = None,
    tasks: Annotated[
        str | None, typer.Option(help="Of longbench, ruler or documents. [default: all]")
    ] = None,
    length: arguments.LengthOption = None,
    questions: Annotated[
        int, typer.Option(min=1, help="For each context, at most; ruler, and mmvet of drawings.")
    ] = 1,
    image_folder: arguments.ImagesOption = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=64, help="Cut longbench and summaries to so many tokens. [default: the model's]"
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: arguments.MapOption = None,
    seed: Annotated[
        int, typer.Option(help="Seed of torch, for policies of your own that use random numbers.")
    ] = 0,
    replay: Annotated[
        bool, typer.Option("--replay", help="Read each prompt once for all policies, untimed.")
    ] = False,
) -> None:
    """Measure policies at budgets on a suite; every finished row is kept.

    The same command resumes a run that was stopped. Changed options need another --out.
    A budget of fewer tokens than a policy's window and sinks is refused before the run; --option
    window=8 makes the window smaller.
    """
    from .suites.registry import default_data, load_suite

    sizes, metric_names = budget_list(budgets, BUDGETS, memory), split(metrics)
    check_metrics(metric_names)
    if {"rouge", "score"} & {*metric_names}:
        import_module("rouge_score")  # a missing package is reported before any measurement
    folder = out or Path("runs") / suite
    check_place(folder)
    data = data or default_data(suite, model)
    fields: dict[str, Any] = {"tasks": None if tasks is None else split(tasks), "limit": limit}
    fields |= {"length": length, "image_folder": image_folder, "questions": questions}
    samples = load_suite(suite, data, count=token_counter(model), **fields)

    # These import torch.
    from mmkv import chat, policy_options
    from mmkv.registry import list_policies

    from .runner import check_arguments, find_processes, fitting, run
    from .tabulate import Report
    from .variants import with_question

    options = policy_options.option_texts(option or [])
    policy_texts = list_policies() if policies == "all" else split(policies)
    names = with_question(policy_texts, question)
    check_arguments(names, sizes, metric_names, options)
    processes = find_processes(device)
    if processes.num_processes > 1:
        if device_map is not None:
            raise ValueError("--device-map spreads one process over all GPUs: start only one")
        device = str(processes.device)
    loaded = chat.load(model, device, dtype, device_map)
    check_readable(loaded, samples)
    if policies == "all":
        names = with_question(fitting(loaded.model, sizes), question)
    settings: dict[str, Any] = {"policies": names, "budgets": sizes, "metrics": metric_names}
    settings |= {"options": options, "batch_size": batch_size, "model_name": model, "data": data}
    settings |= {"limit": limit, "max_length": max_length, "seed": seed, "replay": replay}
    try:
        run(loaded.model, loaded.processor, samples, out=folder, **settings)
    except KeyboardInterrupt:
        _stopped(folder)
    if processes.is_main_process:
        report = Report(folder)
        console().print(report.main_table(), "")
        typer.echo(f"mmkv report {shlex.quote(str(folder))}  for all tables")
        if not report.measured:
            say(f"nothing could be measured: {report.errors()[0]}")
            raise typer.Exit(1)


def check_readable(loaded: Loaded, samples: Sequence[Sample]) -> None:
    """Raise ValueError if every sample has pictures and the model reads text only."""
    if samples and not loaded.reads_pictures and all(sample.images for sample in samples):
        raise ValueError(
            f"suite {samples[0].suite!r} shows pictures, and model {loaded.name!r} reads text only:"
            " use prompts, continuation, ruler, needle, longbench, documents, cnn_dailymail or xsum"
        )


@commands.command("check", short_help="Find the smallest cache for your prompts.")
@show_errors
def check_command(
    model: ModelOption = SMOLLM2,
    prompts: arguments.PromptsOption = None,
    within: Annotated[float, typer.Option(help="Tolerated divergence, nats a token.")] = 0.05,
    policies: Annotated[
        str, typer.Option(help="As for eval.", callback=checked(check_variants))
    ] = "condense",
    budgets: arguments.BudgetsOption = None,
    memory: Annotated[
        str | None,
        typer.Option(help=f"{arguments.MEMORY_HELP} [default: {CHECKED}, without budgets]"),
    ] = None,
    option: arguments.PolicyOption = None,
    plugin: PluginOption = None,
    limit: arguments.LimitOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a reply, at most.")] = 48,
    out: Annotated[
        Path, typer.Option(help="The run's folder; the same command resumes it.")
    ] = Path("runs/check"),
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Find the cache of the fewest bytes whose predictions stay within a tolerance.

    It is `mmkv eval prompts --metrics divergence,next` for some shares of bytes, and the full cache
    in 8 and in 4 bits: divergence along the model's own replies, share of equal tokens, and bytes.
    """
    from .suites.registry import default_data, load_suite

    if budgets is None:
        memory = memory or CHECKED
    sizes = budget_list(budgets, "", memory)
    check_place(out)
    data = default_data("prompts", model) if prompts is None else str(prompts)
    samples = load_suite("prompts", data, limit=limit)
    samples = [replace(sample, max_new_tokens=max_new_tokens) for sample in samples]

    # These import torch.
    from mmkv import chat, policy_options

    from . import check
    from .prompts import encode_samples
    from .runner import run

    options = policy_options.option_texts(option or [])
    variants = check.variants_of(split(policies), sizes, within, max_new_tokens, options)
    loaded = chat.load(model, device, dtype)
    lengths = [x["input_ids"].shape[1] for x in encode_samples(loaded, samples)]
    check.check_lengths(loaded.model, lengths, max_new_tokens)
    settings: dict[str, Any] = {"policies": [x.label for x in variants], "budgets": sizes}
    settings |= {"metrics": check.METRICS, "options": options, "batch_size": 1, "limit": limit}
    settings |= {"model_name": model, "data": data, "exact": False}
    try:
        rows = run(loaded.model, loaded.processor, samples, out=out, **settings)
    except KeyboardInterrupt:
        _stopped(out)
    pairs = [(variant, size) for variant in variants for size in variant.budgets(sizes)]
    report = check.summed_up(rows, pairs, within)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console().print(report)
        typer.echo(f"mmkv report {shlex.quote(str(out))}  for tables by bytes")


def _stopped(folder: Path) -> NoReturn:
    """Say how to go on, and exit with code 130."""
    say(f"stopped; finished rows are in {folder}, the same command resumes the run")
    raise typer.Exit(130) from None


@commands.command("report", short_help="Summarise the results of mmkv eval.")
@show_errors
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="A run's folder; or folders of several, yours or others', to compare."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where several runs' files go. [default: the first folder]")
    ] = None,
) -> None:
    """Print a run's tables, or several runs': quality against bytes, time to the first token and
    speed.

    Of one run, report.md and report.csv are written into its folder; of several, runs.md and
    runs.csv; of either the picture frontier.png.
    """
    from . import draw
    from .compare import Comparison
    from .tabulate import Report

    single, target = (folders[0] / "run.json").exists() and len(folders) == 1, out or folders[0]
    check_place(target, "--out" if out else "run")
    tables, paths = list[Table](), list[Path]()
    if single:
        report = Report(folders[0])
        tables, paths = report.tables(), report.write()
    try:
        runs = Comparison(folders)
    except RunError as error:
        if not single:
            raise
        say(f"nothing to draw: {error}")
    else:
        tables += runs.tables()
        target.mkdir(parents=True, exist_ok=True)
        paths += [] if single else runs.write(target)
        paths.append(draw.save(draw.frontier(runs.sections()), target / "frontier.png"))
    for table in tables:
        console().print(table, "")
    for path in paths:
        typer.echo(f"wrote {path}")
