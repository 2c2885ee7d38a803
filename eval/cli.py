"""The commands `mmkv eval`, `report`, `calibrate` and `plot`, beside `check`.

What can be checked without a model is checked before one is loaded: what a user got wrong is one
line and exit code 2. Ctrl-C keeps every finished row and exits with 130.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.options import DeviceOption, DtypeOption, ModelOption, PluginOption
from mmkv.terminal import check_place, console, say, told

from . import check  # its command is among these
from .arguments import (
    BudgetsOption,
    DataOption,
    ImagesOption,
    LengthOption,
    LimitOption,
    MapOption,
    PolicyOption,
    PromptsOption,
    budget_list,
    commands,
)

if TYPE_CHECKING:
    from mmkv.chat import Loaded

    from .samples import Sample

__all__ = ["check", "commands"]

PLOTS = ("layers", "lorenz", "retention", "heads")


@commands.command("eval")
@told
def eval_command(
    suite: Annotated[
        str,
        typer.Argument(
            help="description, mmvet, longbench, needle, ruler, continuation, documents, "
            "cnn_dailymail or xsum."
        ),
    ],
    model: ModelOption = "builtin",
    data: DataOption = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Names, or name:option=value:option=value, with commas between; all: each that "
            "the model can have."
        ),
    ] = "full,local,streaming,h2o,elastic,snapkv,pyramidkv,adakv,squeeze,xkv,prefixkv",
    budgets: BudgetsOption = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9",
    metrics: Annotated[
        str,
        typer.Option(help="Of ppl, divergence, next, rouge, score; the last two generate replies."),
    ] = "ppl,rouge",
    question: Annotated[
        str,
        typer.Option(help="visible: compressed with the prompt; hidden: asked afterwards; both."),
    ] = "visible",
    limit: LimitOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; the same command goes on. [default: runs/SUITE]"),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples at once; a stop loses at most one batch.")
    ] = 25,
    option: PolicyOption = None,
    plugin: PluginOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Of longbench, ruler or documents; commas between. [default: all]"),
    ] = None,
    length: LengthOption = None,
    questions: Annotated[
        int, typer.Option(min=1, help="Most on each context, of ruler and the built-in mmvet.")
    ] = 1,
    image_folder: ImagesOption = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=64, help="Cut long texts to it. [default: the model's length]"),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: MapOption = None,
    seed: Annotated[int, typer.Option(help="Recorded with the run.")] = 0,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Read each prompt once for all policies; nothing is timed."),
    ] = False,
) -> None:
    """Measure policies at budgets on a suite; every finished row is kept.

    The same command goes on with a run that was stopped. Changed options need another --out.
    A policy's window can be larger than a small budget: such rows hold the reason in `error`, and
    the report counts them; --option window=8 makes it smaller.
    """
    from mmkv import chat
    from mmkv.registry import list_policies

    from .prompts import token_counter
    from .runner import check_arguments, find_processes, fitting, run
    from .suites.registry import BUILTIN, default_data, load_suite
    from .tabulate import Report
    from .variants import parse_options, split, with_question

    chosen, sizes = parse_options(option or []), budget_list(budgets)
    named = list_policies() if policies == "all" else split(policies)
    names, wanted = with_question(named, question), split(metrics)
    if {"rouge", "score"} & {*wanted}:
        import_module("rouge_score")  # what is missing is said before anything is measured
    data = data or default_data(suite, model)
    check_arguments(names, sizes, wanted, chosen, builtin=data == BUILTIN)
    more: dict[str, Any] = {"tasks": None if tasks is None else split(tasks), "limit": limit}
    more |= {"length": length, "image_folder": image_folder, "questions": questions}
    samples = load_suite(suite, data, count=token_counter(model), **more)
    folder = out or Path("runs") / suite
    check_place(folder)
    processes = find_processes(device)
    if processes.num_processes > 1:
        if device_map is not None:
            raise ValueError("--device-map spreads one process over all GPUs: start only one")
        device = str(processes.device)
    loaded = chat.load(model, device, dtype, device_map)
    _check_readable(loaded, samples)
    if policies == "all":
        names = with_question(fitting(loaded.model, sizes), question)
    how: dict[str, Any] = {"options": chosen, "batch_size": batch_size, "model_name": model}
    how |= {"data": data, "limit": limit, "max_length": max_length, "seed": seed, "replay": replay}
    how |= {"policies": names, "budgets": sizes, "metrics": wanted, "processes": processes}
    try:
        run(loaded.model, loaded.processor, samples, out=folder, **how)
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
    """Refuse pictures for a model that reads text only.

    Raises:
        ValueError: names suites that it can read.
    """
    if samples and not loaded.reads_pictures and all(sample.images for sample in samples):
        raise ValueError(
            f"suite {samples[0].suite!r} shows pictures, and model {loaded.name!r} reads text only:"
            " use continuation, ruler, needle, longbench, documents, cnn_dailymail or xsum"
        )


@commands.command("report")
@told
def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="A run's folder; or folders of several, yours or others', to compare."),
    ],
    every: Annotated[
        bool, typer.Option("--all", help="Print all tables of report.md, not only the papers'.")
    ] = False,
    plots: Annotated[bool, typer.Option(help="Draw the curves, or the fronts.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Where several runs' files go. [default: the first folder]")
    ] = None,
) -> None:
    """Print a run's tables; write report.md, report.csv and curves.png into its folder.

    Of several runs: what quality costs in bytes, in time to the first token and in speed; runs.md,
    runs.csv and fronts.png.
    """
    if len(folders) == 1 and (folders[0] / "run.json").exists():
        from .tabulate import Report

        report = Report(folders[0])
        tables, written = report.tables(first=not every), report.write()
        if plots and len(report.every) > 1:
            from . import draw

            written.append(draw.save(draw.curves(report), folders[0] / "curves.png"))
    else:
        from .compare import Comparison

        place = out or folders[0]
        check_place(place)
        runs = Comparison(folders)
        tables, written = runs.tables(), runs.write(place)
        if plots:
            from . import draw

            written.append(draw.save(draw.fronts(runs.sections()), place / "fronts.png"))
    for table in tables:
        console().print(table, "")
    for path in written:
        typer.echo(f"wrote {path}")


@commands.command("calibrate")
@told
def calibrate_command(
    out: Annotated[Path, typer.Option(help="The profile's file.")] = Path("profile.json"),
    policy: Annotated[
        str,
        typer.Option(help="prefixkv, xkv or squeeze, which size layers; condense or sparsemm."),
    ] = "condense",
    budget: Annotated[str, typer.Option(help="Fraction of the prompt kept.")] = "0.2",
    model: ModelOption = "builtin",
    prompts: PromptsOption = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="The suite that prompts are from. [default: description, where the model reads "
            "pictures]"
        ),
    ] = None,
    data: DataOption = None,
    limit: LimitOption = 10,
    length: LengthOption = None,
    option: PolicyOption = None,
    plugin: PluginOption = None,
    image_folder: ImagesOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: MapOption = None,
) -> None:
    """Measure a policy's layer sizes, or what each head costs, on prompts of yours or a suite's.

    Use it by `mmkv.wrap(model, profile=...)`, or in a run as the policy prefixkv:profile=PATH, in
    which {budget} stands for each budget.
    """
    from mmkv.budgets import parse

    from .prompts import encode_prompts, encode_samples, read_prompts, token_counter
    from .suites.registry import BUILTIN, default_data, load_suite
    from .variants import parse_options, parse_variants

    size = parse(budget)
    if isinstance(size, int):
        raise ValueError(f"--budget {budget}: a profile keeps a fraction, such as 0.2 or 20%")
    chosen = parse_options(option or [])
    named = any(x is not None for x in (suite, data, length, image_folder))
    suite = suite or "description"
    data = data or default_data(suite, model)
    if prompts is not None and named:
        raise ValueError(f"--prompts {prompts} takes the place of a suite and its options")
    own = None if prompts is None else read_prompts(prompts)
    (variant,) = parse_variants([policy], chosen, builtin=own is None and data == BUILTIN)
    samples: list[Any] = []
    if named:
        more: Any = {"limit": limit, "image_folder": image_folder, "length": length}
        samples = load_suite(suite, data, count=token_counter(model), **more)
    _check_file(out)

    from mmkv import chat
    from mmkv.calibration import calibrate

    loaded = chat.load(model, device, dtype, device_map)
    _check_readable(loaded, samples)
    if named:
        inputs = encode_samples(loaded, samples)
    else:
        inputs = encode_prompts(loaded, own, limit, drawn=loaded.reads_pictures)
        if not loaded.reads_pictures:
            (variant,) = parse_variants([policy], chosen)
    profile = calibrate(loaded.model, inputs, variant.name, size, **variant.options)
    profile.save(out)
    kept, what = profile.fractions, "kept by layer"
    if profile.curves is not None:
        kept = profile.curves.by_layer(size)
    elif profile.visual is not None:
        kept, what = [sum(layer) for layer in profile.visual], "visual scores by layer"
    shares = " ".join(f"{share:.3f}" for share in kept)
    typer.echo(f"{what}, mean of {profile.samples} prompts: {shares}")
    typer.echo(f"wrote {out}")


@commands.command("plot")
@told
def plot_command(
    kind: Annotated[
        str,
        typer.Argument(
            help="layers: kept tokens by layer; lorenz: importance held by the top tokens, by "
            "layer; retention: importance retained by layer; heads: what heads cost, and their "
            "sizes, by a profile of calibrate."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The figure (.png, .jpg, .svg, ...). [default: KIND.png]")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="As for eval; lorenz draws the score of the first.")
    ] = "prefixkv,xkv,squeeze,pyramidkv,snapkv",
    budget: Annotated[str, typer.Option(help="As for eval.")] = "0.2",
    profile: Annotated[
        Path | None, typer.Option(help="For heads. [default: what the model comes with]")
    ] = None,
    model: ModelOption = "builtin",
    suite: Annotated[
        str | None,
        typer.Option(
            help="The suite that the prompt is from. [default: description, where the model reads "
            "pictures]"
        ),
    ] = None,
    data: DataOption = None,
    sample: Annotated[int, typer.Option(min=0, help="Number of the suite's sample.")] = 0,
    prompt: Annotated[str | None, typer.Option(help="A prompt instead of a sample.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Pictures before the prompt.")] = None,
    option: PolicyOption = None,
    plugin: PluginOption = None,
    image_folder: ImagesOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: MapOption = None,
) -> None:
    """Draw what policies keep of one prompt."""
    from mmkv import chat
    from mmkv.picture import check_format

    from . import draw
    from .prompts import encode_prompts, encode_samples, token_counter
    from .samples import Sample, check_image
    from .suites.registry import BUILTIN, default_data, load_suite
    from .variants import parse_options, parse_variants, split

    if kind not in PLOTS:
        raise ValueError(f"plot {kind!r}: expected one of {', '.join(PLOTS)}")
    size, *others = budget_list(budget)
    if others:
        raise ValueError(f"--budget {budget}: a plot has one budget")
    if image and prompt is None:
        raise ValueError(f"--image {image[0]} goes before a --prompt: give one")
    path = out or Path(f"{kind}.png")
    _check_file(path)
    check_format(path)
    if kind == "heads":
        typer.echo(f"wrote {draw.save(draw.heads(profile, model), path)}")
        return
    chosen = parse_options(option or [])
    named = any(x is not None for x in (suite, data, image_folder))
    suite = suite or "description"
    data = data or default_data(suite, model)
    variants = parse_variants(split(policies), chosen, builtin=data == BUILTIN)
    if prompt is not None:
        pictures = tuple(image or [])
        for picture in pictures:
            check_image(picture)
        shown = Sample(id="prompt", suite="prompt", task="prompt", prompt=prompt, images=pictures)
    else:
        more: Any = {"limit": sample + 1, "image_folder": image_folder}
        samples = load_suite(suite, data, count=token_counter(model), **more)
        if sample >= len(samples):
            raise ValueError(f"--sample {sample}: the suite has {len(samples)}")
        shown = samples[sample]
    loaded = chat.load(model, device, dtype, device_map)
    about = f"{Path(model).name}, {shown.suite} {shown.id}"
    if prompt is None and not named and not loaded.reads_pictures:
        documents = encode_prompts(loaded, None, None)
        if sample >= len(documents):
            raise ValueError(f"--sample {sample}: there are {len(documents)} documents")
        inputs = documents[sample]
        variants = parse_variants(split(policies), chosen)
        about = f"{Path(model).name}, document {sample}"
    else:
        _check_readable(loaded, [shown])
        (inputs,) = encode_samples(loaded, [shown])
    figure = draw.plot_prompt(loaded.model, inputs, kind, variants, size, about)
    typer.echo(f"wrote {draw.save(figure, path)}")


def _check_file(out: Path) -> None:
    """Refuse an --out that is no file, before a model is loaded."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: no such folder")
    check_place(out.parent)
