"""The Gradio page of the image chat: controls, events, and nothing that computes."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes import Default

from mmkv.builtin import example_pictures
from mmkv.chat import read_picture
from mmkv.registry import list_policies

from . import options, views
from .backend import MOST_TOKENS, Settings, Turn
from .session import Engines, Session, read_upload

log = logging.getLogger(__name__)

QUESTIONS = (
    "Describe the picture.",
    "How many objects are in the picture?",
    "What is at the top right?",
    "Read out the picture from left to right.",
)
EXAMPLES = ("three shapes", "four shapes", "five shapes", "six shapes")
USERS = 8  # whose answers may stream at once
_POLICY, _BUDGET = "prefixkv", 0.2
_HERE = Path(__file__).parent
CSS = (_HERE / "page.css").read_text(encoding="utf-8")

_HEADER = """<header class="mm-header"><h1>mmkv image chat</h1>
<p>One question, two answers: with the full key-value cache and with a compressed one.</p>
</header>"""
_PAD = """{{#if value}}<div class="mm-pad"><div class="mm-pad-view">
<img src="${value}" alt="The picture you ask about">
<canvas role="img" aria-label="Draw on the picture with a mouse, a finger or a pen"></canvas>
</div></div><div class="mm-tools"><div class="mm-pens" role="group" aria-label="Colours"></div>
<button type="button" class="mm-undo">Undo</button>
<button type="button" class="mm-erase">Erase</button></div>
{{else}}<div class="mm-pad-none">No picture yet</div>{{/if}}"""
_CHOOSE = """element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-index]');
  if (button) trigger('chosen', { index: Number(button.dataset.index) });
});"""
_ANNOUNCE = "element.setAttribute('role', '{0}'); element.setAttribute('aria-live', '{1}');"
_LOST = "this page lost its session: reload it"

# Quick events: not in the queue, so that they work while an answer streams.
_quick: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
    "trigger_mode": "multiple",
}

from gradio.events import Dependency

class Upload(gr.UploadButton):
    """An upload button that hands on the file's path; Gradio's own leaves an empty file beside."""

    is_template = True  # the page shows it as its base class

    def preprocess(self, payload: Any) -> str | None:
        """Where the upload lies."""
        return getattr(payload, "path", None)
    from typing import Callable, Literal, Sequence, Any, TYPE_CHECKING
    from gradio.blocks import Block
    if TYPE_CHECKING:
        from gradio.components import Timer
        from gradio.components.base import Component


def theme() -> gr.Theme:
    """Calm greys and the fonts of the system: nothing is fetched."""
    return Default(
        primary_hue="teal",
        neutral_hue="slate",
        radius_size="md",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "Menlo", "Consolas", "monospace"],
    ).set(  # the default greys and teal are too pale to read
        body_text_color_subdued="*neutral_500",
        block_info_text_color="*neutral_500",
        input_placeholder_color="*neutral_500",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        slider_color="*primary_700",
    )


def build(engines: Engines) -> gr.Blocks:
    """The page for the models on offer.

    Args:
        engines: the models; the first is chosen.
    """
    known = options.all_options()
    samples = [read_picture(path) for path in example_pictures()]
    named = [(about, x) for about, x in zip(EXAMPLES, samples, strict=False)]
    with gr.Blocks(title="mmkv image chat", analytics_enabled=False, fill_width=True) as page:
        state: gr.State = gr.State(None, delete_callback=_leave)
        gr.HTML(_HEADER)
        with gr.Row(elem_id="main"):
            with gr.Column(min_width=0, elem_id="input"):
                pad = gr.HTML(
                    "",
                    html_template=_PAD,
                    js_on_load=(_HERE / "drawing.js").read_text(encoding="utf-8"),
                    elem_id="pad",
                )
                with gr.Row():
                    upload = Upload(
                        "Upload a picture", file_types=["image"], size="sm", elem_id="upload"
                    )
                    blank = gr.Button("Blank sheet", size="sm")
                examples = gr.HTML(views.examples(named), js_on_load=_CHOOSE, elem_id="examples")
                question = gr.Textbox(
                    label="Question",
                    placeholder="Ask about the picture",
                    max_lines=6,
                    elem_id="question",
                )
                chips = gr.HTML(views.questions(QUESTIONS), js_on_load=_CHOOSE, elem_id="chips")
                with gr.Row():
                    ask = gr.Button("Ask", variant="primary", min_width=80, elem_id="ask")
                    stop = gr.Button("Stop", interactive=False, min_width=80, elem_id="stop")
                    clear = gr.Button("Clear", min_width=80, elem_id="clear")
                problem = gr.HTML(
                    "", js_on_load=_ANNOUNCE.format("alert", "assertive"), elem_id="problem"
                )
            with gr.Column(min_width=0, elem_id="answers"):
                talk = gr.HTML(views.conversation([]), elem_id="talk")
                status = gr.HTML(
                    "", js_on_load=_ANNOUNCE.format("status", "polite"), elem_id="status"
                )
                with gr.Column(visible=False, elem_id="outcome") as outcome:
                    layer = gr.Slider(0, 1, value=0, step=1, label="Layer", elem_id="layer")
                    lit = gr.HTML(elem_id="patches")
                    bars = gr.HTML(elem_id="bars")
                    words = gr.HTML(elem_id="words")
            with gr.Column(min_width=0, elem_id="settings"):
                policy = gr.Dropdown(
                    list_policies(), value=_POLICY, label="Policy", elem_id="policy"
                )
                budget = gr.Slider(
                    0.01,
                    1,
                    value=_BUDGET,
                    step=0.01,
                    label="Budget",
                    info="The share of the prompt's cache that is kept",
                    elem_id="budget",
                )
                protect = gr.Checkbox(
                    label="Protect instructions",
                    info="Keep the prompt's text; only picture tokens compete",
                    elem_id="protect",
                )
                with gr.Accordion("Length, sampling, model", open=False):
                    longest = gr.Slider(1, MOST_TOKENS, value=80, step=1, label="Max new tokens")
                    temperature = gr.Slider(
                        0, 2, value=0, step=0.05, label="Temperature", info="0 is greedy"
                    )
                    model = gr.Dropdown(
                        engines.names,
                        value=engines.names[0],
                        label="Model",
                        info="Another model starts a new conversation",
                    )
                with gr.Accordion("Options of the policy", open=False):
                    controls = {x.name: _control(x) for x in known}

        def example(session: Session | None, event: gr.EventData) -> tuple[Any, str]:
            return _example(samples, session, event)

        page.load(partial(Session, engines), outputs=state, **_quick)
        for event, function, inputs in (
            (upload.upload, _uploaded, [state, upload]),
            (blank.click, _blank, [state]),
            (examples.chosen, example, [state]),
        ):
            event(function, inputs, [pad, problem], **_quick)
        pad.drawn(_drawn, [state], [problem], **_quick)
        chips.chosen(_question, None, [question], **_quick)
        policy.change(
            partial(_policy_chosen, [x.name for x in known]),
            [policy],
            list(controls.values()),
            **_quick,
        )

        simple = [state, question, policy, budget, protect, longest, temperature, model]
        answering = [ask, stop]
        shown = [talk, problem, status, *answering, outcome, layer, lit, bars, words, question]
        gr.on(
            [ask.click, question.submit],
            partial(_ask, [x.name for x in known]),
            [*simple, *controls.values()],
            shown,
            concurrency_limit=USERS,
            concurrency_id="ask",
            show_progress="hidden",
            api_visibility="private",
            trigger_mode="once",
        )
        stop.click(_stop, [state], None, **_quick)
        clear.click(_clear, [state], [talk, problem, status, outcome], **_quick)
        last: dict[str, Any] = {**_quick, "trigger_mode": "always_last"}
        layer.input(_layer, [state, layer], [lit], **last)
    page.queue(default_concurrency_limit=USERS, max_size=8 * USERS, api_open=False)
    return page


def _control(option: options.Option) -> Any:
    known = options.defaults(_POLICY)
    value = known.get(option.name, option.choices[0] if option.choices else None)
    common: dict[str, Any] = {
        "label": option.label[:1].upper() + option.label[1:],
        "visible": option.name in known,
        "elem_id": f"option-{option.name}",
    }
    shown = option.shown(value)
    if option.kind == "choice":
        return gr.Dropdown(list(option.choices), value=shown, **common)
    if option.kind == "switch":
        return gr.Checkbox(value=bool(shown), **common)
    if option.kind == "text":
        return gr.Textbox(value=shown, **common)
    info = "Empty for none" if option.optional else None
    precision = 0 if option.kind == "whole" else None
    return gr.Number(value=shown, precision=precision, info=info, **common)


def _policy_chosen(names: list[str], policy: str) -> list[Any]:
    """Show the options that this policy reads, at its defaults."""
    known = options.defaults(policy)
    by_name = {x.name: x for x in options.all_options()}
    return [
        gr.update(visible=True, value=by_name[name].shown(known[name]))
        if name in known
        else gr.update(visible=False)
        for name in names
    ]


def _leave(session: Session | None) -> None:
    if session is not None:
        session.close()


def _pad_of(session: Session) -> str:
    return "" if session.picture is None else views.data_uri(session.picture, side=640)


def _uploaded(session: Session | None, path: str | None) -> tuple[Any, str]:
    folder = Path(os.environ["GRADIO_TEMP_DIR"]).resolve()
    file = None if path is None else Path(path).resolve()
    if file is None or not file.is_relative_to(folder) or not file.is_file():
        return gr.skip(), views.message("no file arrived: upload it again")
    try:
        if session is None:
            raise ValueError(_LOST)
        session.use(read_upload(file))
    except ValueError as error:
        return gr.skip(), views.message(str(error))
    finally:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # two uploads of the same file share the folder
            file.parent.rmdir()
    return _pad_of(session), ""


def _blank(session: Session | None) -> tuple[Any, str]:
    if session is None:
        return gr.skip(), views.message(_LOST)
    session.use_blank()
    return _pad_of(session), ""


def _example(samples: list[Any], session: Session | None, event: gr.EventData) -> tuple[Any, str]:
    if session is None:
        return gr.skip(), views.message(_LOST)
    index = _index(event, len(samples))
    if index is None:
        return gr.skip(), views.message("there is no such example")
    session.use(samples[index])
    return _pad_of(session), ""


def _question(event: gr.EventData) -> Any:
    index = _index(event, len(QUESTIONS))
    return gr.skip() if index is None else QUESTIONS[index]


def _index(event: gr.EventData, size: int) -> int | None:
    index = event._data.get("index") if isinstance(event._data, dict) else None  # pyright: ignore
    return index if isinstance(index, int) and 0 <= index < size else None


def _drawn(session: Session | None, event: gr.EventData) -> str:
    if session is None:
        return views.message(_LOST)
    try:
        session.draw((event._data or {}).get("strokes"))  # pyright: ignore
    except ValueError as error:
        return views.message(str(error))
    return ""


def _ask(
    names: list[str],
    session: Session | None,
    question: str,
    policy: str,
    budget: float,
    protect: bool,
    longest: int,
    temperature: float,
    model: str,
    *values: Any,
) -> Generator[tuple[Any, ...]]:
    """Stream a turn; the outputs are those of `shown` in `build`."""
    idle = (gr.update(interactive=True), gr.update(interactive=False))
    busy = (gr.update(interactive=False), gr.update(interactive=True))
    rest = (gr.skip(),) * 6  # the outcome and the question
    if session is None:
        yield gr.skip(), views.message(_LOST), "", *idle, *rest
        return
    try:
        chosen = options.changed(policy, dict(zip(names, values, strict=True)))
        if protect:
            chosen["protect"] = "instruction"
        settings = Settings(
            policy=policy,
            budget=float(budget),
            options=chosen,
            max_new_tokens=int(longest),
            temperature=float(temperature),
        )
        yield gr.skip(), "", "Answering", *busy, *rest
        turn: Turn | None = None
        for turn in session.ask(question or "", settings, model):
            if not turn.done:
                shown = views.conversation(session.turns, turn)
                yield shown, gr.skip(), gr.skip(), gr.skip(), gr.skip(), *rest
        assert turn is not None
        yield _answered(session, turn, idle)
    except ValueError as error:
        yield views.conversation(session.turns), views.message(str(error)), "", *idle, *rest
    except Exception as error:
        log.exception("an answer failed")
        text = (
            f"the model failed: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        )
        yield views.conversation(session.turns), views.message(text), "", *idle, *rest


def _answered(session: Session, turn: Turn, idle: tuple[Any, Any]) -> tuple[Any, ...]:
    kept = turn.kept
    assert kept is not None
    status = (
        f"Answered. Full cache: {turn.full.text} Compressed, {turn.compressed.kept:.0%} kept: "
        f"{turn.compressed.text}"
    )
    return (
        views.conversation(session.turns),
        "",
        f'<span class="mm-hidden">{views.escape(status)}</span>',
        *idle,
        gr.update(visible=True),
        gr.update(
            maximum=max(len(kept.layers) - 1, 1),
            value=0,
            visible=bool(kept.patches) and len(kept.layers) > 1,
        ),
        views.patches(kept, 0),
        views.layer_bars(kept),
        views.words(kept),
        "",
    )


def _stop(session: Session | None) -> None:
    if session is not None:
        session.stop()


def _clear(session: Session | None) -> tuple[Any, ...]:
    if session is None:
        return gr.skip(), views.message(_LOST), gr.skip(), gr.skip()
    try:
        session.clear()
    except ValueError as error:
        return gr.skip(), views.message(str(error)), gr.skip(), gr.skip()
    return views.conversation([]), "", "Cleared", gr.update(visible=False)


def _layer(session: Session | None, place: int) -> Any:
    kept = session.turns[-1].kept if session is not None and session.turns else None
    return gr.skip() if kept is None else views.patches(kept, int(place))