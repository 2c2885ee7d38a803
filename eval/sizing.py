"""The commands `mmkv calibrate` and `mmkv plot`: layer and head sizes on prompts of a suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.budgets import DEFAULT
from mmkv.cli_options import DeviceOption, DtypeOption, ModelOption, PluginOption, checked
from mmkv.loading.names import DEFAULT_MODEL
from mmkv.terminal import check_place, show_errors

from . import arguments
from .arguments import budget_list, check_variants, commands, split, token_counter
from .cli import check_readable

if TYPE_CHECKING:
    from mmkv.chat import Loaded

    from .samples import Sample


@commands.command("calibrate", short_help="Measure a profile of layer or head sizes.")
@show_errors
def calibrate_command(
    out: Annotated[Path, typer.Option(help="The profile's file.")] = Path("profile.json"),
    policy: Annotated[
        str,
        typer.Option(
            help="prefixkv, xkv or squeeze (layer sizes), or sparsemm (visual heads).",
            callback=checked(check_variants),
        ),
    ] = "prefixkv",
    budget: Annotated[str, typer.Option(help="Fraction of the prompt kept.")] = str(DEFAULT),
    model: ModelOption = DEFAULT_MODEL,
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
    """Measure a policy's layer sizes, or its visual heads, on prompts of a suite.

    Use it by `mmkv.wrap(model, profile=...)`, or in a run as the policy prefixkv:profile=PATH, in
    which {budget} stands for each budget.
    """
    from mmkv.budgets import parse

    fraction = parse(budget)
    if isinstance(fraction, int):
        raise ValueError(f"--budget {budget}: a profile keeps a fraction, such as 0.2 or 20%")
    _check_file(out)
    find = _samples_of(model, suite, data, limit=limit, image_folder=image_folder, length=length)

    # These import torch.
    from mmkv import chat, policy_options
    from mmkv.calibration import calibrate, measurable

    from .prompts import encode_samples
    from .variants import parse_variants

    options = policy_options.option_texts(option or [])
    (variant,) = parse_variants([policy], options)
    measurable(variant.policy.name, **variant.options)
    loaded = chat.load(model, device, dtype, device_map)
    inputs = encode_samples(loaded, find(loaded))
    profile = calibrate(loaded.model, inputs, variant.policy.name, fraction, **variant.options)
    profile.save(out)
    kept, what = profile.fractions, "kept by layer"
    if profile.visual is not None:
        kept, what = [sum(layer) for layer in profile.visual], "visual scores by layer"
    shares = " ".join(f"{share:.3f}" for share in kept)
    typer.echo(f"{what}, mean of {profile.samples} prompts: {shares}")
    typer.echo(f"wrote {out}")


def _samples_of(
    model: str, suite: str | None, data: str | None, **fields: Any
) -> Callable[[Loaded], list[Sample]]:
    """Return a function from the loaded model to a suite's samples.

    A suite that the options name is read at once. Without one the model decides: "description" if
    it reads pictures, else "prompts".
    """
    from .suites.registry import default_data, load_suite

    def read(name: str) -> list[Sample]:
        count = token_counter(model)
        return load_suite(name, data or default_data(name, model), count=count, **fields)

    others = {name for name, x in fields.items() if x is not None} - {"limit"}
    named = suite or ("description" if data is not None or others else None)
    samples = None if named is None else read(named)

    def of(loaded: Loaded) -> list[Sample]:
        found = samples
        if found is None:
            found = read("description" if loaded.reads_pictures else "prompts")
        check_readable(loaded, found)
        return found

    return of


@commands.command("plot", short_help="Plot the tokens that policies keep in each layer.")
@show_errors
def plot_command(
    out: Annotated[Path, typer.Option(help="The figure (.png, .jpg, .svg, ...).")] = Path(
        "layers.png"
    ),
    policies: Annotated[
        str, typer.Option(help="As for eval.", callback=checked(check_variants))
    ] = "prefixkv,xkv,squeeze,pyramidkv,snapkv",
    budget: arguments.OneBudgetOption = None,
    memory: arguments.OneMemoryOption = None,
    model: ModelOption = DEFAULT_MODEL,
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
    """Draw how many tokens policies keep of one prompt, layer by layer."""
    from mmkv.picture import check_format

    from . import draw

    size, *more_budgets = budget_list(budget, str(DEFAULT), memory)
    if more_budgets:
        raise ValueError(f"--budget {budget or memory}: a plot has one budget")
    _check_file(out)
    check_format(out)
    find = _samples_of(model, suite, data, limit=sample + 1, image_folder=image_folder)

    # These import torch.
    from mmkv import chat, policy_options

    from .prompts import encode_samples
    from .variants import parse_variants

    variants = parse_variants(split(policies), policy_options.option_texts(option or []))
    loaded = chat.load(model, device, dtype, device_map)
    samples = find(loaded)[sample:]
    if not samples:
        raise ValueError(f"--sample {sample}: the suite has fewer")
    (inputs,) = encode_samples(loaded, samples)
    title = f"{Path(model).name}, {samples[0].suite} {samples[0].id}"
    figure = draw.layers(loaded.model, inputs, variants, size, title)
    typer.echo(f"wrote {draw.save(figure, out)}")


def _check_file(out: Path) -> None:
    """Raise ValueError if `out` is a folder, or lies in none that exists and can be written."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: no such folder")
    check_place(out.parent)
