"""The Gradio page of the image chat."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Generator
from pathlib import Path
from types import NoneType
from typing import Any

import gradio as gr
import jinja2
import numpy as np
from gradio.themes import Default
from matplotlib import colormaps
from matplotlib.colors import to_hex
from PIL import Image

from mmkv import policy_options
from mmkv.builtin import KNOWS, example_pictures
from mmkv.cache import codes
from mmkv.memory import DEFAULT, Memory
from mmkv.registry import list_policies, option_types, policy_class

from . import conversation
from .answer import Shares
from .conversation import Conversation, Models, Settings

_QUESTIONS = [
    ["Describe the picture."],
    ["How many things are in the picture?"],
    ["What is at the top right of the picture?"],
    ["Which word is printed in the picture?"],
]
CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
# The system's font: no font is downloaded.
THEME = Default(primary_hue="teal", neutral_hue="slate", font="system-ui")
_COLOURS = ["#d72828", "#f5dc32", "#28963c", "#2d55d7", "#191919", "#fcfcfc"]
_POLICY = "condense"
_MOST_TOKENS, _LONGEST_QUESTION = 512, 4000  # per answer; characters
_PLAIN = "the model's type"  # type of kept pairs by default
_BYTES, _TOKENS = "bytes", "tokens"
_ANNOUNCE = "element.setAttribute('role', '{0}'); element.setAttribute('aria-live', '{1}');"
# The editor decodes pictures in the browser, and says nothing of one that it cannot read.
_LOADED = """() => {
  document.querySelectorAll('#examples button').forEach((x, i) => {
    x.ariaLabel = `Use example picture ${i + 1}`;
  });
  const unreadable = document.querySelector('#unreadable p');
  addEventListener('unhandledrejection', (event) => {
    if (!(event.reason instanceof DOMException) || !/decode/i.test(event.reason.message)) return;
    unreadable.hidden = false;
    event.preventDefault();
  });
  addEventListener('click', () => { unreadable.hidden = true; });
}"""
# Events outside the queue, so that they work while an answer streams.
_quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def _uri(picture: Image.Image, side: int = 96) -> str:
    """Return a picture, at most `side` pixels wide and high, as a data URI."""
    picture = picture.copy()
    picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _edges(shares: Shares) -> str:
    """Return an SVG path around kept patches: dark objects look like evicted patches without it."""
    kept = np.pad(shares > 0, 1)
    across = zip(*np.nonzero(kept[:, :-1] != kept[:, 1:]), strict=True)
    down = zip(*np.nonzero(kept[:-1] != kept[1:]), strict=True)
    return "".join([f"M{c} {r - 1}v1" for r, c in across] + [f"M{c - 1} {r}h1" for r, c in down])


_environment: Any = jinja2.Environment(
    loader=jinja2.PackageLoader("mmkv.demo", ""), autoescape=True, undefined=jinja2.StrictUndefined
)
_environment.filters |= {"uri": _uri, "edges": _edges, "heat": colormaps["cividis"], "hex": to_hex}
views = _environment.get_template("views.html").module  # parts of the page, one macro each


def option_hints() -> dict[str, Any]:
    """Return the types of all policies' options but `protect`, which has another control."""
    hints = [option_types(policy_class(name)) for name in list_policies()]
    return {name: x for types in hints for name, x in types.items() if name != "protect"}


def shown_option(hint: Any, value: Any) -> Any:
    """Return an option's value as its control shows it."""
    return "none" if value is None and "none" in _choices(hint) else value


def changed_options(policy: str, shown: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a policy whose controls differ from its defaults.

    Raises:
        ValueError: an unknown policy, or a control without a value of its type.
    """
    hints, defaults = option_hints(), policy_class(policy).options()
    texts = {x: "none" if shown[x] in (None, "") else str(shown[x]) for x in defaults if x in hints}
    options = {x: policy_options.parse_value(x, text, hints[x]) for x, text in texts.items()}
    return {name: value for name, value in options.items() if value != defaults[name]}


def _choices(hint: Any) -> list[str]:
    kinds = policy_options.flat(hint)
    literals = [x for x in kinds if isinstance(x, str)]
    return [*literals, "none"] if literals and NoneType in kinds else literals


def _control(name: str, hint: Any) -> Any:
    kinds, defaults = policy_options.flat(hint), policy_class(_POLICY).options()
    common: dict[str, Any] = {
        "value": shown_option(hint, defaults.get(name)),
        "label": name.replace("_", " ").capitalize(),
        "visible": name in defaults,
        "elem_id": f"option-{name}",
    }
    if choices := _choices(hint):
        return gr.Dropdown(choices, **common)
    if bool in kinds:
        return gr.Checkbox(**common)
    if int in kinds or float in kinds:
        info = "Empty for none" if NoneType in kinds else None
        return gr.Number(precision=0 if int in kinds else None, info=info, **common)
    return gr.Textbox(**common)


def _policy_chosen(policy: str) -> list[Any]:
    """Return updates that show the policy's options, at its defaults."""
    defaults = policy_class(policy).options()
    return [
        gr.update(visible=name in defaults, value=shown_option(hint, defaults.get(name)))
        for name, hint in option_hints().items()
    ]


def _least(policy: str) -> int:
    return policy_class(policy).options().get("least", 0)


def _floor(least: Any) -> str:
    """Return the note below the budget: what it means, and the floor of short prompts."""
    floor = f"; at least {least:g} tokens of a short prompt (option Least)" if least else ""
    return f"The share that is kept{floor}"


def number(value: Any, name: str) -> float:
    """Return a control's number. Raises ValueError if its field is empty."""
    if value is None or value == "":
        raise ValueError(f"{name}: the field is empty, give a number")
    return float(value)


def _floor_chosen(least: Any) -> Any:
    return gr.update(info=_floor(least))


def _unit_chosen(unit: str) -> Any:
    """Show the control of the pairs' type if the budget is of tokens; bytes set the type."""
    return gr.update(visible=unit == _TOKENS)


def check_limits(question: str, settings: Settings) -> None:
    """Refuse requests that would block the page for others; a browser's limits can be evaded.

    Raises:
        ValueError: a question or an answer that is too long, or a temperature out of range.
    """
    if len(question) > _LONGEST_QUESTION:
        raise ValueError(
            f"the question has {len(question)} characters: shorten it to {_LONGEST_QUESTION}"
        )
    if not 1 <= settings.max_new_tokens <= _MOST_TOKENS:
        raise ValueError(
            f"max new tokens {settings.max_new_tokens}: expected a number from 1 to {_MOST_TOKENS}"
        )
    if not 0 <= settings.temperature <= 2:
        raise ValueError(f"temperature {settings.temperature}: expected a number from 0 to 2")


def build(models: Models) -> gr.Blocks:
    """Build the page for these models, the first of which is selected."""
    with gr.Blocks(title="mmkv image chat", analytics_enabled=False, fill_width=True) as page:
        conversation_state = gr.State(None, delete_callback=lambda ended: ended and ended.close())
        gr.HTML(views.header({name: KNOWS[name] for name in models.names if name in KNOWS}))
        with gr.Row(elem_id="main"):
            with gr.Column(min_width=0, elem_id="input"):
                editor = gr.ImageEditor(
                    label="Picture",
                    sources=("upload", "clipboard"),
                    transforms=None,
                    layers=False,
                    buttons=[],
                    brush=gr.Brush(colors=[*_COLOURS], color_mode="fixed"),
                    canvas_size=(384, 384),
                    height=360,
                    elem_id="picture",
                )
                gr.HTML(views.unreadable(), elem_id="unreadable")
                pictures = [[str(path)] for path in example_pictures()]
                gr.Examples(pictures, [editor], label="Example pictures", elem_id="examples")
                hint = "Ask about the picture"
                question = gr.Textbox("", label="Question", placeholder=hint, elem_id="question")
                gr.Examples(_QUESTIONS, [question], label="Example questions", elem_id="chips")
                with gr.Row():
                    ask = gr.Button("Ask", variant="primary", min_width=80, elem_id="ask")
                    stop = gr.Button("Stop", interactive=False, min_width=80, elem_id="stop")
                    clear = gr.Button("Clear", min_width=80, elem_id="clear")
                alert = _ANNOUNCE.format("alert", "assertive")
                problem = gr.HTML(js_on_load=alert, elem_id="problem")
            with gr.Column(min_width=0, elem_id="answers"):
                newest = gr.HTML(views.newest([]), elem_id="talk")
                status = gr.HTML(js_on_load=_ANNOUNCE.format("status", "polite"), elem_id="status")
                with gr.Column(visible=False, elem_id="outcome") as outcome:
                    layer = gr.Slider(0, 1, value=0, step=1, label="Layer", elem_id="layer")
                    patches = gr.HTML(elem_id="patches")
                    bars = gr.HTML(elem_id="bars")
                    words = gr.HTML(elem_id="words")
                earlier = gr.HTML(elem_id="earlier")
            with gr.Column(min_width=0, elem_id="settings"):
                policies = list_policies()
                policy = gr.Dropdown(policies, value=_POLICY, label="Policy", elem_id="policy")
                unit = gr.Radio(
                    [_BYTES, _TOKENS],
                    value=_BYTES,
                    label="The budget is a share of",
                    elem_id="unit",
                )
                info = _floor(_least(_POLICY))
                budget = gr.Slider(0.01, 1, float(DEFAULT), step=0.005, label="Budget", info=info)
                info = "8 or 4 bits for each number that is kept"
                kv_dtype = gr.Dropdown(
                    [_PLAIN, *codes.BITS], label="Held as", info=info, visible=False
                )
                info = "Keep the prompt's text; only picture tokens compete"
                protect = gr.Checkbox(label="Protect instructions", info=info, elem_id="protect")
                with gr.Accordion("Length, sampling, model", open=False):
                    max_tokens = gr.Slider(1, _MOST_TOKENS, 80, step=1, label="Max new tokens")
                    info = "0 is greedy"
                    temperature = gr.Slider(0, 2, 0, step=0.05, label="Temperature", info=info)
                    info = "Another model starts a new conversation"
                    model = gr.Dropdown(models.names, label="Model", info=info)
                with gr.Accordion("Options of the policy", open=False):
                    controls = [_control(*x) for x in option_hints().items()]
                    least = controls[[*option_hints()].index("least")]

        idle = {ask: gr.update(interactive=True), stop: gr.update(interactive=False)}
        busy = {ask: gr.update(interactive=False), stop: gr.update(interactive=True)}

        def turns_of(shown: list[conversation.Turn]) -> dict[Any, Any]:
            return {newest: views.newest(shown[-1:]), earlier: views.earlier(shown[:-1])}

        def cleared() -> dict[Any, Any]:
            said = {problem: "", status: views.status("Cleared")}
            return {**idle, **turns_of([]), **said, outcome: gr.update(visible=False)}

        def answer(talk: Conversation | None, edit: Any, *values: Any) -> Generator[dict[Any, Any]]:
            inputs = dict(zip(controlled, values, strict=False))
            try:
                yield busy | {problem: "", status: views.status("Answering")}
                option_values = dict(zip(option_hints(), values[len(controlled) :], strict=True))
                options = changed_options(inputs[policy], option_values)
                if inputs[protect]:
                    options["protect"] = "instruction"
                in_bytes, share = inputs[unit] == _BYTES, number(inputs[budget], "budget")
                plain = in_bytes or inputs[kv_dtype] == _PLAIN
                settings = Settings(
                    policy=inputs[policy],
                    budget=Memory.of(share) if in_bytes else share,
                    options=options,
                    kv_dtype=None if plain else inputs[kv_dtype],
                    max_new_tokens=int(number(inputs[max_tokens], "max new tokens")),
                    temperature=number(inputs[temperature], "temperature"),
                )
                check_limits(inputs[question], settings)
                composite = edit and edit["composite"]
                picture = conversation.read_upload(composite["path"]) if composite else None
                loaded = models.get(inputs[model])
                if talk is None or talk.loaded is not loaded:
                    talk = Conversation(loaded, earlier=talk.shown if talk else ())
                    yield {conversation_state: talk}
                if loaded.reads_pictures and picture is None and not talk.turns:
                    raise ValueError(
                        "there is no picture yet: choose an example or upload one; if you have "
                        "uploaded a very large one, scale it down"
                    )
                yield {earlier: views.earlier(talk.shown)}
                for turn in talk.ask(inputs[question], settings, *([picture] if picture else [])):
                    if talk.closed:
                        break
                    yield {newest: views.newest([turn])}
                    if kept := turn.kept:
                        last = max(len(kept.layers) - 1, 1)
                        answers = f"Full cache: {turn.full.text} Compressed: {turn.compressed.text}"
                        yield {
                            **idle,
                            status: views.status(f"Answered. {answers}"),
                            outcome: gr.update(visible=True),
                            layer: gr.update(maximum=last, value=0, visible=bool(kept.patches)),
                            patches: views.patches(kept, 0),
                            bars: views.layer_bars(kept),
                            words: views.words(kept),
                        }
                if talk.closed:  # the page may get what is above after the reply to Clear
                    yield cleared()
            except Exception as error:
                why = str(error)
                if not isinstance(error, ValueError):
                    logging.getLogger(__name__).exception("an answer failed")
                    why = f"the model failed: {why.splitlines()[0] if why else 'no reason given'}"
                yield idle | {problem: views.message(why), status: ""}
                yield turns_of(talk.shown if talk else [])

        def halt(talk: Conversation | None) -> None:
            if talk is not None:
                talk.stop()

        def other_layer(talk: Conversation | None, index: float | None) -> Any:
            place = max(0, int(index or 0))
            return views.patches(talk.turns[-1].kept, place) if talk and talk.turns else gr.skip()

        def forget(ended: Conversation | None) -> dict[Any, Any]:
            if ended is not None:
                ended.close()
            return {**cleared(), conversation_state: None}

        controlled = [question, policy, unit, budget, kv_dtype, protect, max_tokens, temperature]
        controlled += [model]
        updated = [conversation_state, newest, earlier, problem, status, ask, stop, outcome]
        gr.on(
            [ask.click, question.submit],
            answer,
            [conversation_state, editor, *controlled, *controls],
            [*updated, layer, patches, bars, words],
            concurrency_limit=1,
            show_progress="minimal",
            show_progress_on=[problem],
            api_visibility="private",
            preprocess=False,  # Gradio would decode any picture
        )
        stop.click(halt, [conversation_state], None, **_quick)
        policy.change(_policy_chosen, [policy], controls, **_quick)
        least.change(_floor_chosen, [least], [budget], **_quick)
        unit.change(_unit_chosen, [unit], [kv_dtype], **_quick)
        clear.click(forget, [conversation_state], updated, **_quick)
        # Without "always_last", moves of the slider during a reply of the server would be lost.
        inputs = [conversation_state, layer]
        layer.input(other_layer, inputs, [patches], trigger_mode="always_last", **_quick)
        page.load(js=_LOADED)
    page.queue(max_size=64, api_open=False)
    return page
