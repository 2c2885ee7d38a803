"""`mmkv chat --context`: pictures are read once, kept in a file, and asked about any time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmkv.terminal import check_place, console

if TYPE_CHECKING:
    from mmkv.chat import Loaded
    from mmkv.contexts import Context
    from mmkv.policy import Policy


def check(path: Path, pictures: Sequence[Path]) -> None:
    """What can be refused before a model is loaded.

    Raises:
        ValueError: pictures for a context that is there already, or no place to write it to.
    """
    if path.exists() and pictures:
        raise ValueError(
            f"--context {path} holds what was read: leave {pictures[0]} out, or name a new file"
        )
    if not path.exists() and not pictures:
        raise ValueError(f"--context {path}: no such file; with a picture it is made")
    check_place(path.parent)


def answer(
    path: Path,
    loaded: Loaded,
    question: str,
    pictures: Sequence[Any],
    policy: Policy,
    budget: float | int | None,
    *,
    how: dict[str, Any],
    generation: dict[str, Any],
    as_json: bool,
) -> None:
    """Ask about the context in the file, which is made of the pictures if it is not there.

    Args:
        path: the file.
        loaded: the model.
        question: what is asked.
        pictures: what a new context is made of.
        policy, budget: as for `mmkv.wrap`.
        how: what else `mmkv.wrap` takes.
        generation: of `model.generate`.
        as_json: print JSON.
    """
    import mmkv
    from mmkv import chat
    from mmkv.loading import models

    made = not path.exists()
    with mmkv.wrapped(loaded.model, policy, budget, **how), models.quiet():
        if made:
            read, asked = chat.split_prompt(loaded, question, pictures)
            context = mmkv.read(loaded.model, read)
            context.save(path)
        else:
            context = mmkv.load_context(path, loaded.model)
            asked = _question(loaded, context, question)
        new = context.ask(asked, **generation)[0]
        nbytes = context.nbytes
    tokens = context.inputs["input_ids"].shape[1]
    text = loaded.processor.decode(new, skip_special_tokens=True).strip()
    if as_json:
        about = {"file": str(path), "made": made, "tokens": tokens, "nbytes": nbytes}
        found = {"question": question, "answer": text, "tokens": len(new), "context": about}
        typer.echo(json.dumps(found, indent=2))
        return
    screen = console()

    def line(text: str, style: str | None = None) -> None:
        screen.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    what = "read into" if made else "from"
    line(question, "bold")
    line(f"{tokens} tokens {what} {path}, held in {nbytes / 1024:.1f} KiB", "dim")
    line(text)


def _question(loaded: Loaded, context: Context, question: str) -> dict[str, Any]:
    """The question as it stands behind pictures, if the context has any: these are not needed."""
    from PIL import Image

    from mmkv import chat

    ids = context.inputs["input_ids"]
    pictured = bool(chat.image_mask(loaded, {"input_ids": ids}).any())
    blank = [Image.new("RGB", (64, 64))] if pictured else []
    return chat.split_prompt(loaded, question, blank)[1]
