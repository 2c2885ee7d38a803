"""The command line. Heavy imports stay inside the commands, so that `mmkv --help` is quick.

Packages add commands by a `commands` in their `cli`, a `typer.Typer`: see `_MOUNTED`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.cli.serve import serve
from mmkv.terminal import check_place, console, say, show_warnings, told

if TYPE_CHECKING:
    from mmkv.chat import Answer

app = typer.Typer(
    name="mmkv",
    help="A several times smaller key-value cache for vision-language models and LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_MOUNTED = {
    "mmkv.eval": {
        "eval": "Measure policies on a suite.",
        "report": "Summarise measured results.",
        "plot": "Draw measured results.",
        "calibrate": "Measure a profile of layer or head sizes.",
    },
    "mmkv.eval.speed": {
        "bench": "Time policies beside the unwrapped model.",
        "plan": "Bound bytes, times and batches from a model's config.",
    },
}
_DEFAULT_BUDGET = 0.2
# What torch takes as a seed.
_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    show_warnings()
    app(args=None if argv is None else list(argv), prog_name="mmkv")


def _version(asked: bool) -> None:
    if asked:
        from mmkv import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
@told
def policies(
    parts: Annotated[
        bool, typer.Option("--parts", help="List the parts that policies are made of instead.")
    ] = False,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table.")] = False,
) -> None:
    """List the policies: their parts, papers, options and defaults."""
    from mmkv import tables

    if markdown:
        typer.echo(tables.part_markdown() if parts else tables.policy_markdown(), nl=False)
        return
    out = console()
    table = tables.part_table() if parts else tables.policy_tables(out.width)
    out.print(table, highlight=False, markup=False)


@app.command()
@told
def chat(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PICTURE|QUESTION",
            help="Pictures, and last the question; - reads the question from standard input. "
            "Without any, questions and commands are read line by line.",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="One more picture, before the others.")
    ] = None,
    policy: Annotated[str, typer.Option(help="See `mmkv policies`.")] = "condense",
    budget: Annotated[
        str | None,
        typer.Option(
            help="What is kept: 0.2 or 20% is a fraction, 200 a number of tokens per layer and "
            "head. [default: 0.2, or the profile's]"
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the policy.")
    ] = None,
    protect: Annotated[
        str | None, typer.Option(help="instruction keeps the prompt's text; none does not.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured layer or head sizes.")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="int8 or int4: hold what is kept in 8 or 4 bits.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="builtin, a folder, or an id that transformers loads.")
    ] = "builtin",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 80,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int,
        typer.Option(min=_LEAST_SEED, max=_MOST_SEED, help="For a temperature above 0."),
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the figures, or the file of a single one (.png, .jpg, ...)."),
    ] = Path("out"),
    context: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read the pictures without the question into this file, and ask about what it "
            "holds; once it is there, without them.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Answer a question with the full cache and with a compressed one, and show what was kept."""
    from mmkv import budgets
    from mmkv import chat as talk
    from mmkv.builtin import KNOWS
    from mmkv.cli import context as contexts
    from mmkv.profiles import Profile
    from mmkv.registry import get_policy

    pairs = [*(option or []), *([] if protect is None else [f"protect={protect}"])]
    options = talk.parse_options(policy, pairs)
    chosen = get_policy(policy, **options)
    kept = None if budget is None else budgets.parse(budget)
    if not words:
        from mmkv.cli import repl
        from mmkv.demo.values import Settings

        alone = {"--profile": profile, "--context": context, "--json": as_json or None}
        for name, given in alone.items():
            if given is not None:
                raise ValueError(f'{name} needs a question: mmkv chat [PICTURE]... "QUESTION"')
        if len(image or []) > 1:
            raise ValueError(
                f"{len(image or [])} times --image without a question: start with one picture, "
                "and change it by /image PATH"
            )
        settings = Settings(
            policy=policy,
            budget=_DEFAULT_BUDGET if kept is None else kept,
            options=options,
            kv_dtype=kv_dtype,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        where = {"model": model, "device": device, "dtype": dtype}
        raise typer.Exit(repl.run(console(), settings, images=image or [], **where))
    paths, question = _pictures_and_question(words, image or [])
    measured = None if profile is None else Profile.load(profile)
    sized = measured is not None and bool(measured.fractions)
    if kept is None and not sized and chosen.retention is None:
        kept = _DEFAULT_BUDGET
    if chosen.keeps_all and budget is not None:
        say(f"policy {chosen.name} keeps everything: --budget {budget} is ignored")
    elif note := budgets.note(kept):
        say(note)
    if context is not None:
        contexts.check(context, paths)
    pictures = [talk.read_picture(path) for path in paths]
    if paths:
        _check_out(out, len(paths))

    loaded = talk.load(model, device, dtype)
    more = {"profile": profile, "kv_dtype": kv_dtype}
    if context is not None:
        generation = talk.generation(max_new_tokens, temperature, seed)
        asked = (context, loaded, question, pictures, chosen, kept)
        contexts.answer(*asked, how=more, generation=generation, as_json=as_json)
        return
    inputs = talk.encode(loaded, question, pictures)
    how: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    # The compressed run first: a budget that cannot be honoured then costs no full run.
    compressed = talk.ask(loaded, inputs, chosen, kept, **more, **how)
    full = talk.ask(loaded, inputs, **how)
    assert compressed.report is not None
    size = "" if compressed.report.budget is None else f"-{compressed.report.budget}"
    title = f"{chosen.name}{size.replace('-', ', budget ')}: image patches kept after the prompt"
    written = _figure_paths(out, paths, f"{chosen.name}{size}")
    problem = None
    if pictures:
        try:
            talk.draw(loaded, inputs, compressed, pictures, written, title)
        except ValueError as error:
            written, problem = [], f"no picture written: {error}"

    n_image = int(talk.image_mask(loaded, inputs).sum())
    prompt = {"tokens": inputs["input_ids"].shape[1], "image_tokens": n_image}
    if as_json:
        data = {
            "model": model,
            "question": question,
            "pictures": [str(path) for path in paths],
            "prompt": prompt,
            "full": _numbers(full),
            "compressed": _numbers(compressed),
            "report": compressed.report.to_dict(),
            "png": [str(path) for path in written],
        }
        typer.echo(json.dumps(data, indent=2))
    else:
        _show(question, prompt, full, compressed, written)
        if model == "builtin":
            console().print(f"({KNOWS}; --model takes another)", style="dim", soft_wrap=True)
    if problem is not None:
        say(problem)


@app.command()
@told
def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="builtin, a folder, or an id that transformers loads; several can be chosen from.",
            show_default="builtin",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; the default is this computer only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7860,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Let the `mmkv serve` at this address answer instead."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MMKV_API_KEY", help="The key of that server.", show_envvar=True),
    ] = None,
) -> None:
    """Open the image chat in a browser: both answers side by side, and what was kept."""
    from mmkv.demo import server as page

    if server is not None and (model or device != "auto" or dtype != "auto"):
        raise ValueError("--server answers with its own models: leave out --model and where it is")
    page.run(
        models=model or ["builtin"],
        host=host,
        port=port or None,
        device=device,
        dtype=dtype,
        server=server,
        api_key=api_key or None,
    )


def _pictures_and_question(words: list[str], images: list[Path]) -> tuple[list[Path], str]:
    """Split the arguments: the last is the question."""
    *pictures, question = words
    if question == "-":
        question = sys.stdin.read()
    elif _names_file(question):
        raise ValueError(f"no question: the last argument is the file {question!r}")
    if not question.strip():
        raise ValueError("the question is empty")
    return [*images, *map(Path, pictures)], question.strip()


def _names_file(text: str) -> bool:
    """Whether an argument is a file, or the name of a picture that is missing."""
    suffix = Path(text).suffix
    return bool(suffix) and (
        os.path.exists(text) or (suffix.lower() in _PICTURES and len(text.split()) == 1)
    )


def _is_folder(out: Path) -> bool:
    """Whether --out is a folder: one that is there, or a name without a suffix."""
    return out.is_dir() or not out.suffix


def _check_out(out: Path, pictures: int) -> None:
    """Refuse an --out that could not be written, before a model is loaded.

    Raises:
        ValueError: a file for several pictures, in no known format, or a place that is no folder.
    """
    from mmkv.picture import check_format

    if not _is_folder(out):
        if pictures > 1:
            raise ValueError(f"--out {out}: one file for {pictures} pictures; name a folder")
        try:
            check_format(out)
        except ValueError as error:
            raise ValueError(f"--out {error}, or a folder") from None
    check_place(out if _is_folder(out) else out.parent)


def _figure_paths(out: Path, pictures: Sequence[Path], name: str) -> list[Path]:
    if not _is_folder(out):
        return [out] * len(pictures)
    stems = [path.stem for path in pictures]
    return [
        out / (f"{stem}-{name}.png" if stems.count(stem) == 1 else f"{stem}-{i}-{name}.png")
        for i, stem in enumerate(stems, start=1)
    ]


def _numbers(answer: Answer) -> dict[str, Any]:
    return {"answer": answer.text, "tokens": answer.tokens, "nbytes": answer.nbytes}


def _show(
    question: str,
    prompt: dict[str, int],
    full: Answer,
    compressed: Answer,
    written: Sequence[Path],
) -> None:
    screen = console()

    def line(text: str = "", style: str | None = None) -> None:
        screen.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    report = compressed.report
    assert report is not None
    images = f", {prompt['image_tokens']} of them image tokens" if prompt["image_tokens"] else ""
    line(question, "bold")
    line(f"prompt: {prompt['tokens']} tokens{images}", "dim")
    for name, answer in (
        ("full cache", full),
        (f"{report.policy}, budget {report.budget}", compressed),
    ):
        line()
        line(f"{name}: {answer.nbytes / 1024:.1f} KiB after {answer.tokens} tokens", "bold")
        line(f"  {answer.text}")
    line()
    screen.print(report)
    for path in written:
        line(f"kept patches: {path}")


def _mount(package: str, commands: dict[str, str]) -> None:
    """Commands of a package, where it is installed; each imports it only when it runs."""
    if find_spec(package) is None or find_spec(f"{package}.cli") is None:
        return

    @told
    def forward(context: typer.Context) -> None:
        app: typer.Typer = import_module(f"{package}.cli").commands
        app(args=[str(context.info_name), *context.args], prog_name="mmkv")

    for name, summary in commands.items():
        app.command(
            name,
            help=summary,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(forward)


def _mount_evaluation() -> None:
    """All of them: what measures quality, and what measures speed."""
    for package, commands in _MOUNTED.items():
        _mount(package, commands)


app.command()(serve)
_mount_evaluation()
