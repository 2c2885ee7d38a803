"""`mmkv serve`: vLLM's own server, with compressed caches by the plugin `mmkv.vllm`."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mmkv import budgets
from mmkv.cli_options import PairsOption, PluginOption, PolicyName, checked
from mmkv.loading.names import SMOLLM2, SMOLLM2_VISION, file_of
from mmkv.memory import DEFAULT, Memory
from mmkv.terminal import show_errors, tell

# All options of vLLM's that follow are passed on.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_NAMES = SMOLLM2, SMOLLM2_VISION
ModelArgument = Annotated[
    str,
    typer.Argument(
        help=f"{', '.join(_NAMES)}, a folder, or an id that vLLM loads.",
        callback=checked(lambda name: file_of(name, _NAMES)),
    ),
]


@show_errors
def serve(
    context: typer.Context,
    model: ModelArgument,
    policy: PolicyName = "condense",
    budget: Annotated[
        str | None,
        typer.Option(
            callback=checked(budgets.parse),
            help="Share of each prompt's tokens to keep in the model's type: 0.2 or 20%.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            callback=checked(Memory.of),
            help="In its place the share of bytes, in 8 bits: 12.5% or 8x. [default: 8x]",
        ),
    ] = None,
    option: PairsOption = None,
    plugin: PluginOption = None,
) -> None:
    """Serve a model by vLLM with compressed caches. All other options are those of vllm serve."""
    if find_spec("vllm") is None:
        raise ValueError(
            "mmkv serve runs vLLM: install mmkv into an environment that has vllm==0.32.*; "
            "docs/serving.md says how, on a CPU too"
        )
    if any(x.replace("_", "-").startswith("--additional-config") for x in context.args):
        raise ValueError(
            "mmkv serve gives vLLM an --additional-config of its own: leave yours out, or write "
            "both into one for `vllm serve`, as docs/serving.md shows"
        )
    if model.startswith("-"):
        raise ValueError(f"{model} is an option of vLLM's: name the model before such options")
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "mmkv" not in plugins.split(","):
        raise ValueError(
            f"VLLM_PLUGINS={plugins!r} keeps vLLM from loading mmkv, and caches would not be "
            "compressed: add mmkv to the list, or unset the variable"
        )
    from mmkv import policy_options
    from mmkv.loading import models
    from mmkv.sizes.profiled import RetrievalHeads
    from mmkv.vllm import options, probes

    given = {**policy_options.parse_options(policy, option or []), "policy": policy}
    if memory is not None or budget is None:
        given["memory"] = DEFAULT if memory is None else memory
    if budget is not None:
        given["budget"] = budgets.parse(budget)
    if plugin:
        given["plugins"] = list(map(str, plugin))  # each of vLLM's processes loads them
    chosen, _ = options.parsed(given)
    path = models.find(model).path
    if isinstance(chosen.heads, RetrievalHeads) and not probes.path_of(path).is_file():
        _probe(model, path)
    # The plugin reads batches from vLLM's first model runner, whatever a device's default is.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    how = ("--additional-config", json.dumps({"mmkv": given}))
    command = ("-m", "vllm.entrypoints.cli.main", "serve", path, *how)
    os.execv(sys.executable, (sys.executable, *command, *context.args))


@show_errors
def probe(model: ModelArgument) -> None:
    """Find the retrieval heads of a model, for vLLM, and save the result."""
    from mmkv.loading import models

    typer.echo(f"wrote {_probe(model, models.find(model).path)}")


def _probe(model: str, path: str) -> Path:
    """Measure a model's copy scores; save them in the file that the plugin reads, and return it."""
    from mmkv import chat, wrapping
    from mmkv.vllm import probes

    target = probes.path_of(path)
    tell(f"finding the retrieval heads of {model}")
    profile = wrapping.probe(chat.load(model, "cpu", "auto").model)
    target.parent.mkdir(parents=True, exist_ok=True)
    profile.save(target)
    tell("")
    return target
