"""The commands `mmkv eval`, `report`, `calibrate` and `plot`; `check` has its own file.

Arguments are checked before a model is loaded: a wrong one is reported in one line, with exit
code 2. Ctrl-C keeps every finished row and exits with code 130.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.budgets import DEFAULT
from mmkv.options import DeviceOption, DtypeOption, ModelOption, PluginOption, checked, one_of
from mmkv.terminal import check_place, console, say, show_errors

from . import arguments
from . import check as check  # registers the command `mmkv check`
from .arguments import budget_list, check_variants, commands, split, token_counter
from .speed import cli as cli  # registers `mmkv bench` and `mmkv plan`
from .store import METRICS, QUESTIONS, check_metrics

if TYPE_CHECKING:
    from mmkv.chat import Loaded

    from .samples import Sample

BUDGETS = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
PLOTS = ("layers", "lorenz", "retention", "heads")


@commands.command("eval", short_help="Measure the quality of policies on a suite.")
@show_errors
def eval_command(
    suite: Annotated[
        str,
        typer.Argument(
            help="description, mmvet, longbench, needle, ruler, continuation, documents, "
            "cnn_dailymail or xsum."
        ),
    ],
    model: ModelOption = "builtin",
    data: arguments.DataOption = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Names, or name:option=value:..., commas between; or all.",
            callback=checked(lambda text: text == "all" or check_variants(text)),
        ),
    ] = "full,local,streaming,h2o,elastic,snapkv,pyramidkv,adakv,squeeze,xkv,prefixkv",
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
        int, typer.Option(min=1, help="For each context, at most; ruler and built-in mmvet only.")
    ] = 1,
    image_folder: arguments.ImagesOption = None,
    max_length: Annotated[
        int | None, typer.Option(min=64, help="Cut long texts to it. [default: the model's]")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: arguments.MapOption = None,
    seed: Annotated[int, typer.Option(help="Recorded with the run.")] = 0,
    replay: Annotated[
        bool, typer.Option("--replay", help="Read each prompt once for all policies, untimed.")
    ] = False,
) -> None:
    """Measure policies at budgets on a suite; every finished row is kept.

    The same command goes on with a run that was stopped. Changed options need another --out.
    A policy's window can be larger than a small budget: such rows hold the reason in `error`, and
    the report counts them; --option window=8 makes it smaller.
    """
    from .suites.registry import BUILTIN, default_data, load_suite

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
    from mmkv import chat
    from mmkv.registry import list_policies

    from .runner import check_arguments, find_processes, fitting, run
    from .tabulate import Report
    from .variants import parse_options, with_question

    options = parse_options(option or [])
    policy_texts = list_policies() if policies == "all" else split(policies)
    names = with_question(policy_texts, question)
    check_arguments(names, sizes, metric_names, options, builtin=data == BUILTIN)
    processes = find_processes(device)
    if processes.num_processes > 1:
        if device_map is not None:
            raise ValueError("--device-map spreads one process over all GPUs: start only one")
        device = str(processes.device)
    loaded = chat.load(model, device, dtype, device_map)
    _check_readable(loaded, samples)
    if policies == "all":
        names = with_question(fitting(loaded.model, sizes), question)
    settings: dict[str, Any] = {"policies": names, "budgets": sizes, "metrics": metric_names}
    settings |= {"options": options, "batch_size": batch_size, "model_name": model, "data": data}
    settings |= {"limit": limit, "max_length": max_length, "seed": seed, "replay": replay}
    try:
        run(loaded.model, loaded.processor, samples, out=folder, **settings)
    except KeyboardInterrupt:
        say(f"stopped; finished rows are in {folder}, the same command goes on")
        raise typer.Exit(130) from None
    if processes.is_main_process:
        report = Report(folder)
        console().print(report.main_table(), "")
        typer.echo(f"mmkv report {folder}  for all tables and curves")
        if not report.measured:
            say(f"nothing could be measured: {report.errors()[0]}")
            raise typer.Exit(1)


def _check_readable(loaded: Loaded, samples: Sequence[Sample]) -> None:
    """Raise ValueError if every sample has pictures and the model reads text only."""
    if samples and not loaded.reads_pictures and all(sample.images for sample in samples):
        raise ValueError(
            f"suite {samples[0].suite!r} shows pictures, and model {loaded.name!r} reads text only:"
            " use continuation, ruler, needle, longbench, documents, cnn_dailymail or xsum"
        )


@commands.command("report", short_help="Summarise the results of mmkv eval.")
@show_errors
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="A run's folder; or folders of several, yours or others', to compare."),
    ],
    every: Annotated[
        bool, typer.Option("--all", help="Print all tables of report.md, not only the papers'.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where several runs' files go. [default: the first folder]")
    ] = None,
) -> None:
    """Print a run's tables; write report.md, report.csv and curves.png into its folder.

    Of several runs: quality against bytes, time to the first token and speed, in runs.md, runs.csv
    and frontier.png.
    """
    from . import draw
    from .tabulate import Comparison, Report

    if len(folders) == 1 and (folders[0] / "run.json").exists():
        report = Report(folders[0])
        tables, paths = report.tables(first=not every), report.write()
        if not report.curves:
            say("nothing to draw: no row has any figures")
        elif len(report.every) > 1:
            paths.append(draw.save(draw.curves(report), folders[0] / "curves.png"))
    else:
        target = out or folders[0]
        check_place(target)
        runs = Comparison(folders)
        tables, paths = runs.tables(), runs.write(target)
        paths.append(draw.save(draw.frontier(runs.sections()), target / "frontier.png"))
    for table in tables:
        console().print(table, "")
    for path in paths:
        typer.echo(f"wrote {path}")


@commands.command("calibrate", short_help="Measure a profile of layer or head sizes.")
@show_errors
def calibrate_command(
    out: Annotated[Path, typer.Option(help="The profile's file.")] = Path("profile.json"),
    policy: Annotated[
        str,
        typer.Option(
            help="prefixkv, xkv or squeeze (layer sizes), condense or sparsemm.",
            callback=checked(check_variants),
        ),
    ] = "condense",
    budget: Annotated[str, typer.Option(help="Fraction of the prompt kept.")] = str(DEFAULT),
    model: ModelOption = "builtin",
    prompts: arguments.PromptsOption = None,
    suite: arguments.SuiteOption = None,
    data: arguments.DataOption = None,
    limit: arguments.LimitOption = 10,
    length: arguments.LengthOption = None,
    option: arguments.PolicyOption = None,
    plugin: PluginOption = None,
    image_folder: arguments.ImagesOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: arguments.MapOption = None,
) -> None:
    """Measure a policy's layer sizes, or what each head costs, on prompts of yours or a suite's.

    Use it by `mmkv.wrap(model, profile=...)`, or in a run as the policy prefixkv:profile=PATH, in
    which {budget} stands for each budget.
    """
    from mmkv.budgets import parse

    from .suites.registry import BUILTIN, default_data, load_suite

    fraction = parse(budget)
    if isinstance(fraction, int):
        raise ValueError(f"--budget {budget}: a profile keeps a fraction, such as 0.2 or 20%")
    uses_suite = any(x is not None for x in (suite, data, length, image_folder))
    suite = suite or "description"
    data = data or default_data(suite, model)
    if prompts is not None and uses_suite:
        raise ValueError(f"--prompts {prompts} takes the place of a suite and its options")
    _check_file(out)
    fields: Any = {"limit": limit, "image_folder": image_folder, "length": length}
    fields |= {"count": token_counter(model)}
    samples = load_suite(suite, data, **fields) if uses_suite else []

    # These import torch.
    from mmkv import chat
    from mmkv.calibration import calibrate

    from .prompts import encode_prompts, encode_samples, read_prompts
    from .variants import parse_options, parse_variants

    options = parse_options(option or [])
    user_prompts = None if prompts is None else read_prompts(prompts)
    (variant,) = parse_variants([policy], options, builtin=user_prompts is None and data == BUILTIN)
    loaded = chat.load(model, device, dtype, device_map)
    _check_readable(loaded, samples)
    if uses_suite:
        inputs = encode_samples(loaded, samples)
    else:
        inputs = encode_prompts(loaded, user_prompts, limit, drawn=loaded.reads_pictures)
        if not loaded.reads_pictures:
            (variant,) = parse_variants([policy], options)
    profile = calibrate(loaded.model, inputs, variant.policy.name, fraction, **variant.options)
    profile.save(out)
    kept, what = profile.fractions, "kept by layer"
    if profile.curves is not None:
        kept = profile.curves.by_layer(fraction)
    elif profile.visual is not None:
        kept, what = [sum(layer) for layer in profile.visual], "visual scores by layer"
    shares = " ".join(f"{share:.3f}" for share in kept)
    typer.echo(f"{what}, mean of {profile.samples} prompts: {shares}")
    typer.echo(f"wrote {out}")


@commands.command("plot", short_help="Plot layer sizes, head costs and importance.")
@show_errors
def plot_command(
    kind: Annotated[
        str,
        typer.Argument(
            help="layers: kept tokens; lorenz: importance held by the top tokens; retention: "
            "importance retained; heads: what heads cost, and their sizes, by a profile.",
            callback=one_of("plot", PLOTS),
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The figure (.png, .jpg, .svg, ...). [default: KIND.png]")
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            help="As for eval; lorenz draws the score of the first.",
            callback=checked(check_variants),
        ),
    ] = "prefixkv,xkv,squeeze,pyramidkv,snapkv",
    budget: arguments.BudgetsOption = None,
    memory: arguments.MemoryOption = None,
    profile: Annotated[
        Path | None, typer.Option(help="For heads. [default: what the model comes with]")
    ] = None,
    model: ModelOption = "builtin",
    suite: arguments.SuiteOption = None,
    data: arguments.DataOption = None,
    sample: Annotated[int, typer.Option(min=0, help="Number of the suite's sample.")] = 0,
    option: arguments.PolicyOption = None,
    plugin: PluginOption = None,
    image_folder: arguments.ImagesOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: arguments.MapOption = None,
) -> None:
    """Draw what policies keep of one prompt."""
    from mmkv.picture import check_format

    from . import draw
    from .suites.registry import BUILTIN, default_data, load_suite

    size, *more_budgets = budget_list(budget, str(DEFAULT), memory)
    if more_budgets:
        raise ValueError(f"--budget {budget or memory}: a plot has one budget")
    path = out or Path(f"{kind}.png")
    _check_file(path)
    check_format(path)
    if kind == "heads":
        typer.echo(f"wrote {draw.save(draw.heads(profile, model), path)}")
        return
    uses_suite = any(x is not None for x in (suite, data, image_folder))
    suite = suite or "description"
    data = data or default_data(suite, model)
    fields: Any = {"first": sample, "limit": sample + 1, "image_folder": image_folder}
    samples = load_suite(suite, data, count=token_counter(model), **fields)
    if not samples:
        raise ValueError(f"--sample {sample}: the suite has fewer")

    # These import torch.
    from mmkv import chat

    from .prompts import encode_prompts, encode_samples
    from .variants import parse_options, parse_variants

    options = parse_options(option or [])
    variants = parse_variants(split(policies), options, builtin=data == BUILTIN)
    loaded = chat.load(model, device, dtype, device_map)
    title = f"{Path(model).name}, {suite} {samples[0].id}"
    if not uses_suite and not loaded.reads_pictures:
        documents = encode_prompts(loaded, None, None)
        if sample >= len(documents):
            raise ValueError(f"--sample {sample}: there are {len(documents)} documents")
        inputs = documents[sample]
        variants = parse_variants(split(policies), options)
        title = f"{Path(model).name}, document {sample}"
    else:
        _check_readable(loaded, samples)
        (inputs,) = encode_samples(loaded, samples)
    figure = draw.plot_prompt(loaded.model, inputs, kind, variants, size, title)
    typer.echo(f"wrote {draw.save(figure, path)}")


def _check_file(out: Path) -> None:
    """Raise ValueError if `out` is a folder, or lies in none that exists and can be written."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: no such folder")
    check_place(out.parent)
