"""The command `mmkv chat`: one question with both caches, or the chat in a terminal."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.options import (
    BudgetOption,
    DeviceOption,
    DtypeOption,
    KvDtypeOption,
    ModelOption,
    PairsOption,
    PolicyName,
    ProfileOption,
)
from mmkv.terminal import check_place, console, say, told

if TYPE_CHECKING:
    from mmkv.chat import Answer

# What torch takes as a seed.
_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


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
    policy: PolicyName = "condense",
    budget: BudgetOption = None,
    option: PairsOption = None,
    protect: Annotated[
        str | None, typer.Option(help="instruction keeps the prompt's text; none does not.")
    ] = None,
    profile: ProfileOption = None,
    kv_dtype: KvDtypeOption = None,
    model: ModelOption = "builtin",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
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
            budget=talk.DEFAULT_BUDGET if kept is None else kept,
            options=options,
            kv_dtype=kv_dtype,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        where = {"model": model, "device": device, "dtype": dtype}
        raise typer.Exit(repl.run(console(), settings, images=image or [], **where))
    paths, question = _pictures_and_question(words, image or [])
    kept = talk.budget_or_default(kept, chosen, profile)
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


def _pictures_and_question(words: list[str], images: list[Path]) -> tuple[list[Path], str]:
    """Split the arguments: the last is the question."""
    *pictures, question = words
    if question == "-":
        question = sys.stdin.read()
    elif _names_file(question):
        raise ValueError(
            f"no question: the last argument is the file {question!r}: put the question behind it, "
            f"or ask several by: mmkv chat --image {shlex.quote(question)}"
        )
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
