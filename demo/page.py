"""The Gradio page of the image chat: controls, events, and nothing that computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes import Default

from mmkv.builtin import example_pictures
from mmkv.cache import quantize
from mmkv.chat import read_picture
from mmkv.registry import list_policies

from . import events, options, views
from .session import Engines, Session
from .values import MOST_TOKENS

EXAMPLES = ("three shapes", "four shapes", "five shapes", "six shapes")
USERS = 8  # whose answers may stream at once
_POLICY, _BUDGET = "condense", 0.2
_HERE = Path(__file__).parent
CSS = (_HERE / "page.css").read_text(encoding="utf-8")

_ABOUT = "One question, two answers: with the full key-value cache and with a compressed one."
_ABOUT_SERVER = (
    "Answered by the server at {}, with a cache that is compressed as chosen here. What it keeps "
    "of a picture, and the answer of a full cache, a server does not tell."
)
_CHOOSE = """element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-index]');
  if (button) trigger('chosen', { index: Number(button.dataset.index) });
});"""
_ANNOUNCE = "element.setAttribute('role', '{0}'); element.setAttribute('aria-live', '{1}');"

# Quick events: not in the queue, so that they work while an answer streams.
_quick: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
    "trigger_mode": "multiple",
}


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
    known, here = options.all_options(), not engines.server
    samples = [read_picture(path) for path in example_pictures()]
    named = [(about, x) for about, x in zip(EXAMPLES, samples, strict=False)]
    with gr.Blocks(title="mmkv image chat", analytics_enabled=False, fill_width=True) as page:
        state: gr.State = gr.State(None, delete_callback=events.leave)
        about = _ABOUT_SERVER.format(engines.server) if engines.server else _ABOUT
        gr.HTML(views.header(about))
        with gr.Row(elem_id="main"):
            with gr.Column(min_width=0, elem_id="input"):
                pad = gr.HTML(
                    "",
                    html_template=(_HERE / "pad.html").read_text(encoding="utf-8"),
                    js_on_load=(_HERE / "drawing.js").read_text(encoding="utf-8"),
                    elem_id="pad",
                )
                with gr.Row():
                    upload = gr.UploadButton(
                        "Upload a picture", file_types=["image"], size="sm", elem_id="upload"
                    )
                    # Gradio's own hands on the same path and leaves an empty file beside it.
                    upload.preprocess = events.path_of
                    blank = gr.Button("Blank sheet", size="sm")
                examples = gr.HTML(views.examples(named), js_on_load=_CHOOSE, elem_id="examples")
                question = gr.Textbox(
                    label="Question",
                    placeholder="Ask about the picture",
                    max_lines=6,
                    elem_id="question",
                )
                chips = gr.HTML(
                    views.questions(events.QUESTIONS), js_on_load=_CHOOSE, elem_id="chips"
                )
                with gr.Row():
                    # Until the page has its session.
                    ask = gr.Button(
                        "Ask", variant="primary", interactive=False, min_width=80, elem_id="ask"
                    )
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
                    visible=here,
                )
                with gr.Accordion("Length, sampling, model", open=False):
                    longest = gr.Slider(1, MOST_TOKENS, value=80, step=1, label="Max new tokens")
                    temperature = gr.Slider(
                        0, 2, value=0, step=0.05, label="Temperature", info="0 is greedy"
                    )
                    held = gr.Dropdown(
                        [events.FULL, *quantize.BITS],
                        value=events.FULL,
                        label="Held as",
                        info="8 or 4 bits for each number that is kept",
                        elem_id="held",
                        visible=here,
                    )
                    model = gr.Dropdown(
                        engines.names,
                        value=engines.names[0],
                        label="Model",
                        info="Another model starts a new conversation",
                    )
                with gr.Accordion("Options of the policy", open=False, visible=here):
                    controls = {x.name: _control(x) for x in known}

        def example(session: Session | None, event: gr.EventData) -> tuple[Any, str]:
            return events.example(samples, session, event)

        page.load(partial(events.enter, engines), outputs=[state, ask], **_quick)
        for event, function, inputs in (
            (upload.upload, events.uploaded, [state, upload]),
            (blank.click, events.blank, [state]),
            (examples.chosen, example, [state]),
        ):
            event(function, inputs, [pad, problem], **_quick)
        pad.drawn(events.drawn, [state], [problem], **_quick)
        chips.chosen(events.question, None, [question], **_quick)
        policy.change(
            partial(events.policy_chosen, [x.name for x in known]),
            [policy],
            list(controls.values()),
            **_quick,
        )

        simple = [state, question, policy, budget, protect, longest, temperature, held, model]
        answering = [ask, stop]
        shown = [talk, problem, status, *answering, outcome, layer, lit, bars, words, question]
        gr.on(
            [ask.click, question.submit],
            partial(events.ask, [x.name for x in known]),
            [*simple, *controls.values()],
            shown,
            concurrency_limit=USERS,
            concurrency_id="ask",
            show_progress="hidden",
            api_visibility="private",
            trigger_mode="once",
        )
        stop.click(events.stop, [state], None, **_quick)
        clear.click(events.clear, [state], [talk, problem, status, outcome], **_quick)
        last: dict[str, Any] = {**_quick, "trigger_mode": "always_last"}
        layer.input(events.layer, [state, layer], [lit], **last)
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
