"""The commands `mmkv bench` and `mmkv plan`.

Arguments are checked before a model is made: a wrong one is reported in one line, with exit code 2.
"""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv import cli_options
from mmkv.budgets import DEFAULT
from mmkv.cli_options import (
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
from mmkv.eval.arguments import (
    BudgetsOption,
    MemoryOption,
    budget_list,
    check_variants,
    commands,
    split,
)
from mmkv.eval.speed.cards import CARDS
from mmkv.loading.names import DTYPES, NAMES, SMOLLM2, file_of
from mmkv.terminal import Table, check_place, console, say, show_errors, tell

if TYPE_CHECKING:
    from mmkv.chat import Loaded

# Models with random weights: `mmkv.eval.speed.models.SHAPES`.
RANDOM = (
    *("llama-120m-random", "llama-7b-2-layers-random", "llama-8b-random"),
    "llava-1.5-7b-random",
)
_MODELS = f"{MODELS}; or random weights: {', '.join(RANDOM)}."


def _check_model(name: str) -> None:
    if name not in RANDOM and name.endswith("-random"):
        raise ValueError(f"model {name!r}: expected one of {', '.join(RANDOM)}")
    file_of(name, (*NAMES, *RANDOM))


_Model = Annotated[str, typer.Option(help=_MODELS, callback=checked(_check_model))]


@commands.command("bench", short_help="Measure the speed and memory of policies.")
@show_errors
def bench_command(
    model: _Model = SMOLLM2,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 4096,
    new: Annotated[int, typer.Option(min=2, help="Tokens generated in each round.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 4,
    policies: Annotated[
        str,
        typer.Option(
            help="Names, or name:option=value:option=value, with commas between.",
            callback=checked(check_variants),
        ),
    ] = "full,condense,snapkv,prefixkv",
    budgets: BudgetsOption = None,
    memory: MemoryOption = None,
    plugin: PluginOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Replies timed for each row.")] = 6,
    minutes: Annotated[float, typer.Option(min=0.0, help="Time limit on rounds.")] = 0.0,
    kvpress_python: Annotated[
        Path | None,
        typer.Option(help="Interpreter with kvpress, of which the nearest presses are timed."),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    out: Annotated[
        Path, typer.Option(help="JSON file; the table goes to a .md file beside it.")
    ] = Path("out/bench.json"),
) -> None:
    """Time the unwrapped model, twice, its full cache wrapped, and policies, side by side.

    In every round each row reads its prompt; then decode steps of all rows alternate in random
    order, and ratios are taken pair by pair. Warm-up is excluded, and the device is synchronised.
    """
    until = time.monotonic() + 60 * (minutes or math.inf)
    for name, text in (("policies", policies), ("budgets", budgets)):
        if text is not None and not split(text):
            raise ValueError(f"--{name} {text!r} names none")
    sizes = tuple(budget_list(budgets, str(DEFAULT), memory))
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder, not a file")
    if out.suffix == ".md":
        raise ValueError(
            f"--out {out}: the table goes there, so name the JSON file, {out.with_suffix('.json')}"
        )
    check_place(out.parent)

    # These import torch.
    from mmkv.eval.speed.bench import BOUND, Bench, Setting, make_rows
    from mmkv.eval.speed.kvpress_worker import Worker

    setting = Setting(model, prompt, new, batch, tuple(split(policies)), sizes, rounds)
    make_rows(setting, kvpress=False)
    with nullcontext() if kvpress_python is None else closing(Worker(kvpress_python)) as worker:
        tell(f"making {model}")
        loaded = _load(model, device, dtype)
        if worker is not None:
            worker.load(loaded.name, loaded.model)
        _warn_beyond(loaded.model, prompt + new)
        bench = Bench(setting, loaded.model, worker, until)
        result = bench.run()
    result.save(out)
    tell("")
    console().print(result.table)
    typer.echo(f"wrote {out}")
    user_rows = [row for row in result.rows if row.policy and row.label not in (BOUND, "full")]
    if user_rows and not any(row.step_s for row in user_rows):
        say(f"nothing could be measured: {user_rows[0].label}: {user_rows[0].note}")
        raise typer.Exit(1)
    if bench.stopped:
        raise typer.Exit(130)


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
    from mmkv.chat import max_positions

    limit = max_positions(model)
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
    memory: cli_options.MemoryOption = None,
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
    given = cli_options.size_of(budget, memory, kv_dtype)

    import torch

    from mmkv import adapters
    from mmkv.cache.config import CacheConfig
    from mmkv.chat import max_positions
    from mmkv.eval.speed.models import SHAPES, make
    from mmkv.eval.speed.plan import Load, Sizes, plan
    from mmkv.loading.models import empty
    from mmkv.memory import Memory
    from mmkv.planning import comparing, make_plan
    from mmkv.policy_options import default_budget, parse_options
    from mmkv.registry import get_policy

    chosen = get_policy(policy, **parse_options(policy, option or []))
    if chosen.layers.retention is not None:
        raise ValueError(
            f"retention={chosen.layers.retention}: what it keeps depends on the prompt; plan a "
            "budget without retention"
        )
    size = given or default_budget(chosen, profile, kv_dtype)
    shape = SHAPES.get(model)
    net = make(shape, "meta", dtype) if shape else empty(model, getattr(torch, dtype))
    limit = max_positions(net) or 4096
    length = prompt or max(1, min(4096, limit - new))
    _warn_beyond(net, length + new)
    with comparing():
        config, _ = make_plan(
            net, adapters.find(net), chosen, size, profile=profile, kv_dtype=kv_dtype
        )
    sizes = Sizes.of(net)
    load, card = Load(batch=batch, prompt=length, new=new), CARDS[gpu]
    plain = plan(sizes, load, card, CacheConfig(get_policy("full"), 1.0))
    smaller = plan(sizes, load, card, config)
    kept = None if chosen.keeps_all else budget or f"{config.budget:.3g}"
    name = " ".join(filter(None, (policy, kept, config.kv_dtype)))
    if isinstance(size, Memory) and not chosen.keeps_all:
        least = "at least " if config.waits_for_probe else ""
        share = f"{least}{config.budget:.1%} of tokens"
        name = f"{policy}, memory {size}: {share} in {config.kv_dtype or dtype}"
    cells = {"full cache": plain.cells(load), name: smaller.cells(load)}
    rows = [(label, [*figures.values()]) for label, figures in cells.items()]
    title = (
        f"{model}, {sizes.weights / 1e9:.1f} GB of weights in {dtype}; {gpu}, "
        f"{card.memory / 1e9:.0f} GB; {batch} x ({length:,} + {new:,}) tokens. Least times."
    )
    console().print(Table("", [*cells[name]], rows, title))
