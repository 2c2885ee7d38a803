"""`mmkv serve`: a server with OpenAI's API, of one process or several."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mmkv import options as cli_options
from mmkv.terminal import bind, say, show_errors, wait_asleep

_CONFIG_BYTES = 2**20  # most bytes of a file of options


def parse_size(text: str) -> int:
    """Parse a size such as "8GiB", "500MB" or "1000000" into bytes, or raise a ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"size {text!r}: expected bytes such as 8GiB, 500MB or 1000000")
    number, unit, binary = match.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".find(unit.lower() or " "))


@show_errors
def _from_file(context: typer.Context, path: Path | None) -> None:
    """Read defaults from a YAML file of options, checked as on the command line."""
    wait_asleep()
    if path is None:
        return
    import yaml

    with path.open("rb") as file:
        raw = file.read(_CONFIG_BYTES + 1)
    if len(raw) > _CONFIG_BYTES:
        raise ValueError(f"{path}: more than {_CONFIG_BYTES} bytes")
    try:
        config = yaml.safe_load(raw) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: no YAML: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected options by name, such as max_batch: 16")
    options = {x.name: x for x in context.command.params if x.name != "config"}
    defaults = dict[str, Any]()
    for name, value in config.items():
        if name not in options:
            raise ValueError(f"{path}: {name}: no option of mmkv serve")
        if value is None:
            continue
        texts = [str(x) for x in (value if isinstance(value, list) else [value])]
        defaults[name] = texts if options[name].multiple else ", ".join(texts)
        try:
            if options[name].callback is None:
                options[name].process_value(context, defaults[name])
        except typer.BadParameter as error:
            raise ValueError(f"{path}: {name}: {error.message}") from None
    context.default_map = defaults


@show_errors
def serve(
    model: cli_options.ModelOption = "builtin",
    policy: cli_options.PolicyName = "condense",
    budget: cli_options.BudgetOption = None,
    option: cli_options.PairsOption = None,
    plugin: cli_options.PluginOption = None,
    profile: cli_options.ProfileOption = None,
    kv_dtype: cli_options.KvDtypeOption = None,
    device: cli_options.DeviceOption = "auto",
    dtype: cli_options.DtypeOption = "auto",
    cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory limit of all caches, such as 8GiB; requests wait until theirs fits. "
            "[default: no limit]",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests in a batch.")] = 32,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Most requests that wait; further ones get status 429.")
    ] = 1024,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Prompt tokens to read between two decode steps.")
    ] = 512,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Longest answer in tokens if the request sets no limit and there is room."
        ),
    ] = 1024,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds per request; 0: no limit.")] = 600,
    name: Annotated[
        str | None, typer.Option(help="Model name for clients. [default: the last part of --model]")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is this computer only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="MMKV_API_KEY", help="Key that clients must send; repeatable.", show_envvar=True
        ),
    ] = None,
    share_prefixes: Annotated[
        Literal["key", "all"],
        typer.Option(help="Read what prompts begin with once per key, or once for all keys."),
    ] = "key",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A host to fetch pictures from; repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A web page's origin that may ask; repeatable."),
    ] = None,
    ignore_unknown: Annotated[
        bool, typer.Option(help="Ignore unsupported fields of requests, with a line in the log.")
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that answers may continue when the server stops.")
    ] = 30,
    replicas: Annotated[
        int, typer.Option(min=1, help="Engines, each in its own process, through Ray Serve.")
    ] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Start up to this many replicas under load.")
    ] = None,
    target_requests: Annotated[
        int, typer.Option(min=1, help="Requests per replica before another one is started.")
    ] = 16,
    replica_gpus: Annotated[float, typer.Option(min=0, help="GPUs per replica, or a part.")] = 0,
    ray_address: Annotated[
        str | None, typer.Option(help="A running cluster's address. [default: start one here]")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_from_file,
            is_eager=True,
            help="YAML file of these options, as in max_batch: 16; the command line overrides it.",
        ),
    ] = None,
) -> None:
    """Serve a model with OpenAI's completions API. Messages may have pictures."""
    from mmkv import budgets, chat
    from mmkv.registry import get_policy
    from mmkv.serving import engine as engines
    from mmkv.serving import server

    options = chat.parse_options(policy, option or [])
    parsed_budget = chat.parse_budget(budget, get_policy(policy, **options), profile)
    if warning := budgets.note(parsed_budget):
        say(warning)
    settings: dict[str, Any] = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "policy": policy,
        "budget": parsed_budget,
        "options": options,
        "profile": None if profile is None else str(profile.absolute()),
        "kv_dtype": kv_dtype,
        "plugins": [str(file.absolute()) for file in plugin or []],
        "cache_memory": None if cache_memory is None else parse_size(cache_memory),
        "max_batch": max_batch,
        "max_waiting": max_waiting,
        "prefill_chunk": prefill_chunk,
        "max_new_tokens": max_new_tokens,
    }
    # Report an address in use before loading the model.
    listening = bind(host, port)
    with listening, ExitStack() as ending:
        if replicas > 1 or max_replicas is not None or ray_address is not None:
            from mmkv.serving import cluster

            engine = cluster.Replicas(
                settings,
                replicas=replicas,
                max_replicas=max_replicas,
                target_requests=target_requests,
                gpus=replica_gpus,
                address=ray_address,
            )
        else:
            engine = engines.make_engine(**settings)
        ending.callback(engine.close)
        model_name = name or Path(model).name
        app = server.app(
            engine,
            name=model_name,
            api_keys=[key for key in api_key or [] if key],
            share_prefixes=share_prefixes,
            allow_hosts=allow_host or [],
            allow_origins=allow_origin or [],
            ignore_unknown=ignore_unknown,
            timeout=timeout or None,
        )
        address = f"[{host.strip('[]')}]" if ":" in host else host
        url = f"http://{address}:{listening.getsockname()[1]}/v1"
        ready = f"{model_name} is served at {url} (Ctrl-C ends it)"
        server.run(app, listening, grace=grace, ready=lambda: print(ready, flush=True))
