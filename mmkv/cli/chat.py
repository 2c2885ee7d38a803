"""`mmkv chat`: one question to both caches; without one it calls `mmkv.cli.converse`.

`--context` reads pictures and texts once and saves their compressed cache, for later questions.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv import cli_options
from mmkv.loading.names import DEFAULT_MODEL
from mmkv.terminal import check_place, check_utf8, console, install_hint, say, show_errors, write

if TYPE_CHECKING:
    from PIL import Image

    from mmkv.chat import Loaded
    from mmkv.demo.answer import Side
    from mmkv.demo.conversation import Settings

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_TEXTS = (".txt", ".md")
# Of a question of more than three times as many characters, so many at each end are printed.
_SHOWN = 200
_OUT = Path("out")


@show_errors
def chat(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|QUESTION",
            help="Pictures and texts (in UTF-8), then the question; - reads a text or the "
            "question from standard input. "
            "Without arguments, questions and commands are read line by line.",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="A picture before the others.")
    ] = None,
    policy: cli_options.PolicyName = "condense",
    budget: cli_options.BudgetOption = None,
    option: cli_options.PairsOption = None,
    plugin: cli_options.PluginOption = None,
    profile: cli_options.ProfileOption = None,
    kv_dtype: cli_options.KvDtypeOption = None,
    memory: cli_options.MemoryOption = None,
    model: cli_options.ModelOption = DEFAULT_MODEL,
    device: cli_options.DeviceOption = "auto",
    dtype: cli_options.DtypeOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 80,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int,  # in the range that torch accepts
        typer.Option(min=-(2**63), max=2**64 - 1, help="Seed of a temperature above 0."),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the figures, or a file for a single one (.png, .jpg, ...). "
            "[default: out]",
        ),
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the compressed pictures and texts, read without the question, to this file "
            "and answer from it; if the file exists, answer from it without them.",
        ),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Print what every layer keeps, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Answer a question with the full and a compressed cache. Show what was kept."""
    from mmkv.loading.untrusted import read_named_picture

    size = cli_options.size_of(budget, memory, kv_dtype)
    paths, text, question = list(image or []), "", ""
    if words:
        files, question = _files_and_question(words)
        texts = [x for x in files if _is_text(x)]
        paths += [Path(x) for x in files if x not in texts]
        text = "\n\n".join(map(_read_text, texts))
        if context is not None:
            _check_context(context, [*map(str, image or []), *files])
            if out is not None:
                raise ValueError(f"--out {out}: with --context no figures are drawn: leave it out")
        elif paths:
            _check_out(out or _OUT, len(paths))
        elif out is not None:
            raise ValueError(f"--out {out}: without a picture no figures are drawn: leave it out")
    else:
        given = {"--context": context, "--out": out, "--json": as_json, "--layers": layers}
        for name, value in given.items():
            if value:
                raise ValueError(f'{name} needs a question: mmkv chat [PICTURE]... "QUESTION"')
    pictures = [read_named_picture(path) for path in paths]

    # These import torch.
    from mmkv import budgets
    from mmkv import chat as talk
    from mmkv.demo.conversation import Settings
    from mmkv.policy_options import default_budget, parse_options
    from mmkv.registry import get_policy
    from mmkv.report import CacheReport

    options = parse_options(policy, option or [])
    chosen = get_policy(policy, **options)
    settings = Settings(
        policy=policy,
        budget=default_budget(chosen, profile, kv_dtype) if size is None else size,
        options=options,
        kv_dtype=kv_dtype,
        profile=profile,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    settings.chosen()  # raises for a wrong option before the model is loaded
    if not words:
        from mmkv.cli.converse import converse

        loaded = talk.load(model, device, dtype)
        talk.check_pictures(loaded, pictures)
        raise typer.Exit(converse(loaded, settings, *pictures))
    if chosen.keeps_all and budget is not None:
        say(f"policy {chosen.name} keeps everything: --budget {budget} is ignored")
    elif note := budgets.note(settings.budget):
        say(note)
    loaded = talk.load(model, device, dtype)
    talk.check_pictures(loaded, pictures)
    if context is not None:
        data, lines = _ask_context(context, loaded, question, pictures, text, settings)
    else:
        prompt = f"{text}\n\n{question}" if text else question
        data, lines = _ask_both(loaded, prompt, pictures, paths, out or _OUT, settings)
    lines = [x for x in lines if layers or not isinstance(x[0], CacheReport)]
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    for text, style in () if as_json else lines:
        write(console(), text, style)


def _check_context(context: Path, files: Sequence[str]) -> None:
    """Refuse a context file beside pictures or texts if it exists, without any if it does not."""
    if context.exists() and files:
        raise ValueError(
            f"--context {context} exists already: leave {files[0]} out, or name a new file"
        )
    if not context.exists() and not files:
        raise ValueError(f"--context {context}: no such file; add a picture or text to create it")
    check_place(context.parent, "--context")


def _files_and_question(words: list[str]) -> tuple[list[str], str]:
    """Split the arguments into pictures and texts, and the question, which is the last one."""
    *files, question = words
    check_utf8(question)
    suffix = Path(question).suffix
    one_word = len(question.split()) == 1
    names_picture = suffix.lower() in _PICTURES and one_word
    names_file = suffix.lower() in (*_PICTURES, *_TEXTS) and one_word
    if question == "-":
        question = _read_text("-")
    elif suffix and (os.path.exists(question) or names_file):
        several = f", or ask several with: mmkv chat --image {shlex.quote(question)}"
        raise ValueError(
            f"no question: the last argument is the file {question!r}: add the question after it"
            + (several if names_picture else "")
        )
    if not question.strip():
        raise ValueError("the question is empty")
    return files, question.strip()


def _is_text(name: str) -> bool:
    """Return whether a file is a text and not a picture: by its suffix, else if it is in UTF-8."""
    suffix = Path(name).suffix.lower()
    if suffix in _PICTURES:
        return False
    if name == "-" or suffix in _TEXTS:
        return True
    try:
        Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _read_text(path: str) -> str:
    """Return a file's text; that of standard input for "-"."""
    from mmkv.eval.suites.files import read_text

    text = (sys.stdin.read() if path == "-" else read_text(Path(path))).strip()
    if not text:
        raise ValueError(f"{'standard input' if path == '-' else path} is empty")
    return text


def _check_out(out: Path, pictures: int) -> None:
    """Refuse an --out that cannot be written, before a model is loaded."""
    from mmkv.picture import check_format

    if not _is_folder(out):
        if pictures > 1:
            raise ValueError(f"--out {out}: one file for {pictures} pictures; name a folder")
        try:
            check_format(out)
        except ValueError as error:
            raise ValueError(f"--out {error}, or a folder") from None
        out = out.parent
    check_place(out)


def _is_folder(out: Path) -> bool:
    return out.is_dir() or not out.suffix


# Lines to print: texts or tables, each with its style.
StyledLines = list[tuple[Any, str | None]]


def _ask_both(
    loaded: Loaded,
    question: str,
    pictures: Sequence[Image.Image],
    paths: Sequence[Path],
    out: Path,
    settings: Settings,
) -> tuple[dict[str, Any], StyledLines]:
    """Ask both caches and write the figures; return the result as JSON and as lines to print."""
    from mmkv import picture as figures
    from mmkv.builtin import KNOWS
    from mmkv.demo.conversation import Conversation
    from mmkv.loading import quiet

    with quiet():
        *_, turn = Conversation(loaded, timed=False).ask(question, settings, *pictures)
    report, kept = turn.report, turn.kept
    assert report is not None
    assert kept is not None
    size = "" if report.budget is None else f"-{report.size.removeprefix('budget ').rstrip('%')}"
    size = size.replace(" ", "-")
    written, stems = [out] * len(paths), [path.stem for path in paths]
    if _is_folder(out):
        names = [f"{x}-{i}" if stems.count(x) > 1 else x for i, x in enumerate(stems, start=1)]
        written = [out / f"{name}-{report.policy}{size}.png" for name in names]
    title = f"{report.policy}, {report.size}: image patches kept after the prompt"
    try:
        if kept.problem is not None:
            raise ValueError(kept.problem)
        for i, (seen_picture, path) in enumerate(zip(kept.pictures, written, strict=True)):
            layers = [(layer, x[i]) for layer, x in zip(kept.layers, kept.patches, strict=True)]
            figures.save(path, seen_picture, layers, title)
    except (ValueError, ModuleNotFoundError) as error:
        needs = install_hint(error, "plot") if isinstance(error, ModuleNotFoundError) else None
        say(f"no picture written: {error if needs is None else f'that {needs}'}")
        written = []
    n_image = sum(x.tokens for x in kept.words if x.layers is None)
    images = f", {n_image} of them image tokens" if n_image else ""
    lines: StyledLines = [
        (_shortened(question), "bold"),
        (f"prompt: {kept.seen} tokens{images}", "dim"),
    ]
    data: dict[str, Any] = {
        "model": loaded.name,
        "question": question,
        "pictures": list(map(str, paths)),
        "prompt": {"tokens": kept.seen, "image_tokens": n_image},
    }
    for key, answer in (("full", turn.full), ("compressed", turn.compressed)):
        name = "full cache" if key == "full" else f"{report.policy}, {report.size}"
        caption = f"{name}: {answer.tokens} tokens"
        if answer.tokens == settings.max_new_tokens:
            caption += ", the most that --max-new-tokens allows"
        lines += [("", None), (caption, "bold"), (f"  {answer.text}", None)]
        data[key] = {"answer": answer.text, "tokens": answer.tokens, "nbytes": answer.nbytes}
    data |= {"report": report.to_dict(), "png": list(map(str, written))}
    lines += [("", None), *((text, "bold") for text in verdict(turn.full, turn.compressed))]
    lines += [*((note, "dim") for note in turn.notes), (report, None)]
    lines += [(f"kept patches: {path}", None) for path in written]
    if pictures and (knows := KNOWS.get(loaded.name)):
        lines.append((f"({knows}; --model takes another)", "dim"))
    return data, lines


def _shortened(text: str) -> str:
    """Return a long text's beginning and end, and a short one as it is."""
    left_out = len(text) - 2 * _SHOWN
    if left_out <= _SHOWN:
        return text
    return f"{text[:_SHOWN].rstrip()}\n[{left_out:,} characters]\n{text[-_SHOWN:].lstrip()}"


def verdict(full: Side, compressed: Side) -> list[str]:
    """Return lines that compare the answers, the caches' bytes and the times of a token."""
    words, others = full.text.split(), compressed.text.split()
    pairs = zip_longest(words, others)
    part = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    lines = ["same answer"]
    if part is not None:
        ends = " / ".join(" ".join(x[part : part + 5]) or "(end)" for x in (words, others))
        lines = [f"the answers differ after {part} of {len(words)} words: {ends}"]
    lines.append(f"cache: {compressed.size}")
    # The first tokens of a few would time the setup.
    if full.rate and compressed.rate and min(full.tokens, compressed.tokens) >= 32:
        lines.append(f"{1000 / compressed.rate:.0f} ms a token, full {1000 / full.rate:.0f}")
    return lines


def _ask_context(
    path: Path,
    loaded: Loaded,
    question: str,
    pictures: Sequence[Image.Image],
    text: str,
    settings: Settings,
) -> tuple[dict[str, Any], StyledLines]:
    """Answer from the context file, which is made of pictures and text if it does not exist."""
    import mmkv
    from mmkv.demo.answer import generation
    from mmkv.loading import quiet

    is_new, processor = not path.exists(), loaded.processor
    policy, budget = settings.chosen()
    wrapped = mmkv.wrapped(
        loaded.model, policy, budget, profile=settings.profile, kv_dtype=settings.kv_dtype
    )
    with wrapped, quiet():
        if is_new:
            content = [{"type": "image", "image": x} for x in pictures]
            content += [{"type": "text", "text": text}] if text else []
            messages = [{"role": "user", "content": content}]
            context = mmkv.read(loaded.model, messages if pictures else text, processor=processor)
            context.save(path)
        else:
            context = mmkv.load_context(path, loaded.model, processor=processor)
        reply_ids = context.ask(question, **generation(settings, loaded.model.device))[0]
    tokens, nbytes = context.inputs["input_ids"].shape[1], context.nbytes
    answer = loaded.processor.decode(reply_ids, skip_special_tokens=True).strip()
    file_info = {"file": str(path), "made": is_new, "tokens": tokens, "nbytes": nbytes}
    origin = "read into" if is_new else "from"
    summary = f"{tokens} tokens {origin} {path}, held in {nbytes / 1024:.1f} KiB"
    data = {"question": question, "answer": answer, "tokens": len(reply_ids), "context": file_info}
    report, shown = context.report(), _shortened(question)
    data["report"] = report.to_dict()
    return data, [(shown, "bold"), (summary, "dim"), (answer, None), (report, None)]
