"""The commands `mmkv bench` and `mmkv plan`.

Arguments are checked before a model is made: a wrong one is reported in one line, with exit code 2.
"""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv import options
from mmkv.budgets import DEFAULT
from mmkv.eval.arguments import (
    BudgetsOption,
    MemoryOption,
    budget_list,
    check_variants,
    commands,
    split,
    token_counter,
)
from mmkv.eval.speed.cards import CARDS
from mmkv.loading.names import DTYPES, NAMES, file_of
from mmkv.options import (
    MODELS,
    BudgetOption,
    DeviceOption,
    DtypeOption,
    KvDtypeOption,
    PairsOption,
    PluginOption,
    PolicyName,
    ProfileOption,
    checked,
    one_of,
)
from mmkv.terminal import Table, check_place, console, say, show_errors, tell

if TYPE_CHECKING:
    from mmkv.chat import Loaded
    from mmkv.eval.speed.bench import Setting

# Models with random weights (`mmkv.eval.speed.models`), and sets of rows (`mmkv.eval.speed.bench`).
RANDOM = (
    *("llama-120m-random", "llama-7b-2-layers-random", "llama-8b-random"),
    *("llava-1.5-7b-random", "llava-1.5-13b-random", "mistral-7b-random"),
)
PRESETS = ("ci", "prefixkv", "xkv", "squeeze")
_MODELS = f"{MODELS}; or random weights: {', '.join(RANDOM)}."


def _check_model(name: str) -> None:
    if name not in RANDOM and name.endswith("-random"):
        raise ValueError(f"model {name!r}: expected one of {', '.join(RANDOM)}")
    file_of(name, (*NAMES, *RANDOM))


_Model = Annotated[str, typer.Option(help=_MODELS, callback=checked(_check_model))]


@commands.command("bench", short_help="Measure the speed and memory of policies.")
@show_errors
def bench_command(
    context: typer.Context,
    model: _Model = "builtin",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 4096,
    new: Annotated[int, typer.Option(min=2, help="Tokens generated in each round.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 4,
    policies: Annotated[
        str,
        typer.Option(
            help="Names, or name:option=value:option=value, with commas between.",
            callback=checked(check_variants),
        ),
    ] = "full,snapkv,adakv,prefixkv",
    budgets: BudgetsOption = None,
    memory: MemoryOption = None,
    plugin: PluginOption = None,
    preset: Annotated[
        str, typer.Option(help=f"{', '.join(PRESETS)}: in place of all the above.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Replies timed for each row.")] = 6,
    minutes: Annotated[float, typer.Option(min=0.0, help="Time limit on rounds.")] = 0.0,
    kvpress_python: Annotated[
        Path | None,
        typer.Option(help="Interpreter with kvpress, of which the nearest presses are timed."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of texts: on ten of them rows are compared with the model."),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    out: Annotated[Path, typer.Option(help="JSON file; tables go to a .md file beside it.")] = Path(
        "out/bench.json"
    ),
) -> None:
    """Time the unwrapped model, twice, its full cache wrapped, and policies, side by side.

    In every round each row reads its prompt; then decode steps of all rows alternate in random
    order, and ratios are taken pair by pair. Warm-up is excluded, and the device is synchronised.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    names = [name for name, x in sources.items() if x is not None and x.name == "COMMANDLINE"]
    typed = [name.replace("_", "-") for name in names]
    until = time.monotonic() + 60 * (minutes or math.inf)
    presets = split(preset)
    if unknown := [x for x in presets if x not in PRESETS]:
        raise ValueError(f"preset {unknown[0]!r}: expected {', '.join(PRESETS)}")
    replaced = ("model", "prompt", "new", "batch", "policies", "budgets", "memory")
    if presets and (conflicting := [name for name in replaced if name in typed]):
        raise ValueError(f"--preset names the {conflicting[0]} too: drop --{conflicting[0]}")
    for name, text in (("policies", policies), ("budgets", budgets)):
        if text is not None and not split(text):
            raise ValueError(f"--{name} {text!r} names none")
    sizes = tuple(budget_list(budgets, str(DEFAULT), memory))
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    check_place(out.parent)

    # These import torch.
    from mmkv.eval.speed import bench as benchmark
    from mmkv.eval.suites.registry import load_suite
    from mmkv.loading.models import find_device

    settings = [setting for name in presets for setting in benchmark.PRESETS[name]]
    if not settings:
        of_options = model, prompt, new, batch, tuple(split(policies)), sizes
        settings = [benchmark.Setting("bench", *of_options)]
    if str(find_device(device)) == "cpu" and preset not in ("", "ci"):
        raise ValueError(f"--preset {preset} is for a GPU: its models have 7B and more")
    for setting in settings:
        benchmark.make_rows(setting, kvpress=False)
    samples = dict[str, list[Any]]()
    if data is not None:
        if preset or model in RANDOM:
            raise ValueError(f"--data {data}: models with random weights read no texts")
        request: Any = {"limit": 10, "length": prompt, "count": token_counter(model)}
        for suite, task in (("documents", "text"), ("ruler", "niah_single_2")):
            samples[task] = load_suite(suite, data, tasks=[task], **request)
    settings = [replace(setting, rounds=rounds) for setting in settings]
    _run(settings, device, dtype, kvpress_python, samples, until, out)


def _run(
    settings: list[Setting],
    device: str,
    dtype: str,
    python: Path | None,
    samples: dict[str, list[Any]],
    until: float,
    out: Path,
) -> None:
    """Measure the settings one by one; write the files after each."""
    from mmkv.eval.speed.bench import BOUND, Bench, Result, save
    from mmkv.eval.speed.rival import Worker

    results = list[Result]()
    loaded: Loaded | None = None
    with nullcontext() if python is None else closing(Worker(python)) as worker:
        for i, setting in enumerate(settings):
            if loaded is None or setting.model != loaded.name:
                loaded = None  # frees the last model before the next one is made
                tell(f"making {setting.model}")
                loaded = _load(setting.model, device, dtype)
                if worker is not None:
                    worker.load(loaded.name, loaded.model)
            _warn_beyond(loaded.model, setting.prompt + setting.new)
            now = time.monotonic()
            deadline = now + (until - now) / (len(settings) - i)
            texts = {task: _encoded(loaded, x, setting.new) for task, x in samples.items()}
            results.append(Bench(setting, loaded.model, worker, texts, deadline).run())
            save(out, results)
            tell("")
            console().print(results[-1].table)
    typer.echo(f"wrote {out}")
    rows = [row for result in results for row in result.rows if row.policy]
    user_rows = [row for row in rows if row.label not in (BOUND, "full")]
    if user_rows and not any(row.step_s for row in user_rows):
        say(f"nothing could be measured: {user_rows[0].label}: {user_rows[0].note}")
        raise typer.Exit(1)


def _encoded(loaded: Loaded, samples: list[Any], new: int) -> list[tuple[Any, Any]]:
    """Return prompts, int64 [1, N], and up to `new` tokens of their answers, int64 [R]."""
    import torch

    from mmkv.eval.prompts import Encoder, encode_samples

    encoder, device = Encoder(loaded.processor), loaded.model.device
    answers = [torch.tensor(encoder.answer(x)[:new], device=device) for x in samples]
    prompts = [x["input_ids"] for x in encode_samples(loaded, samples)]
    return list(zip(prompts, answers, strict=True))


def _load(name: str, device: str = "auto", dtype: str = "auto") -> Loaded:
    """Return a model by its name; one of random weights has no processor."""
    from mmkv import chat
    from mmkv.eval.speed.models import SHAPES, make
    from mmkv.loading.models import find_device

    if name not in SHAPES:
        return chat.load(name, device, dtype)
    made = make(SHAPES[name], str(find_device(device)), dtype)
    return chat.Loaded(name, made, None)


def _warn_beyond(model: Any, tokens: int) -> None:
    """Print a warning if the model was not trained for so many tokens."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        say(f"{tokens:,} tokens are beyond the {limit:,} positions that the model reads")


@commands.command("plan", short_help="Compute bounds on memory, times and batches.")
@show_errors
def plan_command(
    model: Annotated[str, typer.Argument(help=_MODELS, callback=checked(_check_model))],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each prompt. [default: 4096, or what the model reads]"),
    ] = None,
    new: Annotated[int, typer.Option(min=1, help="Tokens generated.")] = 256,
    policy: PolicyName = "condense",
    budget: BudgetOption = None,
    memory: options.MemoryOption = None,
    option: PairsOption = None,
    plugin: PluginOption = None,
    profile: ProfileOption = None,
    gpu: Annotated[
        str, typer.Option(help=f"{', '.join(CARDS)}.", callback=one_of("gpu", CARDS))
    ] = "h100",
    dtype: Annotated[
        str,
        typer.Option(help="bfloat16, float16 or float32.", callback=one_of("dtype", DTYPES[1:])),
    ] = "bfloat16",
    kv_dtype: KvDtypeOption = None,
) -> None:
    """Bound bytes, times and batches from a model's config alone.

    Times are lower bounds by a card's published speed; real ones are longer. Only the config is
    read, no weights.
    """
    given = options.size_of(budget, memory, kv_dtype)
    size: float | int = DEFAULT if given is None else given

    import torch

    from mmkv import adapters
    from mmkv.chat import parse_options
    from mmkv.eval.speed.models import SHAPES, make
    from mmkv.eval.speed.plan import Load, Sizes, plan
    from mmkv.loading.models import empty
    from mmkv.registry import get_policy
    from mmkv.wrapping import planned

    chosen = get_policy(policy, **parse_options(policy, option or []))
    shape = SHAPES.get(model)
    net = make(shape, "meta", dtype) if shape else empty(model, getattr(torch, dtype))
    limit: int = getattr(net.config.get_text_config(), "max_position_embeddings", None) or 4096
    length = prompt or max(1, min(4096, limit - new))
    _warn_beyond(net, length + new)
    if profile is not None or memory is not None:
        config, _ = planned(net, adapters.find(net), chosen, size, profile=profile)
        chosen = config.policy
        if memory is not None and config.budget is not None:
            size, kv_dtype = config.budget, config.kv_dtype
    sizes = Sizes.of(net)
    load, card = Load(batch=batch, prompt=length, new=new), CARDS[gpu]
    plain = plan(sizes, load, card, get_policy("full"))
    smaller = plan(sizes, load, card, chosen, size, kv_dtype)
    name = " ".join(filter(None, (policy, budget or f"{size:.3g}", kv_dtype)))
    cells = {"full cache": plain.cells(load), name: smaller.cells(load)}
    rows = [(label, [*figures.values()]) for label, figures in cells.items()]
    title = (
        f"{model}, {sizes.weights / 1e9:.1f} GB of weights in {dtype}; {gpu}, "
        f"{card.memory / 1e9:.0f} GB; {batch} x ({length:,} + {new:,}) tokens. Least times."
    )
    console().print(Table("", [*cells[name]], rows, title))
