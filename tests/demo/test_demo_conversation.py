"""The image chat without its page: two answers a turn, turns, users, and what goes wrong."""

import copy
import dataclasses
import gc
import importlib
import threading
import weakref

import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import LlavaForConditionalGeneration

import mmkv
from helpers.models import make_model
from helpers.picture_chat import HEAD_DIM, HEADS, LAYERS, PATCHES, picture_chat
from mmkv import chat, policy_options
from mmkv.builtin import example_pictures
from mmkv.demo import answer
from mmkv.demo.conversation import Conversation, Models, Settings, Turn, read_upload, rouge_l
from mmkv.loading import untrusted
from mmkv.memory import Memory

QUESTION, NEXT = "Describe the picture.", "How many objects are in the picture?"
SHORT = Settings(policy="prefixkv", max_new_tokens=6)


@pytest.fixture(scope="module")
def loaded():
    return picture_chat()


@pytest.fixture(scope="module")
def page():
    """Imported late: gradio takes seconds."""
    pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'mmkv[demo]'")
    return importlib.import_module("mmkv.demo.page")


@pytest.fixture(scope="module")
def pictures():
    return [untrusted.read_named_picture(path) for path in example_pictures()]


def talking(loaded) -> Conversation:
    """A conversation whose answers are not timed: its models need not run before."""
    return Conversation(loaded, timed=False)


def last(turns) -> Turn:
    *_, turn = turns
    assert turn.done
    return turn


def texts(turn: Turn) -> tuple[str, str]:
    return turn.full.text, turn.compressed.text


def generated(loaded, ids, pixels, **more):
    out = loaded.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels,
        max_new_tokens=6,
        return_dict_in_generate=True,
        **more,
    )
    text = loaded.processor.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip(), out.sequences, out.past_key_values


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "condense", "kvzip"])
def test_two_turns_equal_generate(loaded, pictures, policy):
    """Both sides, against plain calls of the wrapped and the unwrapped model."""
    options = {"window": 8} if "window" in mmkv.get_policy(policy).options() else {}
    talk = talking(loaded)
    settings = dataclasses.replace(SHORT, policy=policy, budget=0.3, options=options)
    first = last(talk.ask(QUESTION, settings, pictures[0]))
    second = last(talk.ask(NEXT, settings, pictures[1]))

    def reference():
        inputs = chat.encode(loaded, QUESTION, pictures[:1])
        one, ids, cache = generated(loaded, inputs["input_ids"], inputs["pixel_values"])
        between = f"</s>USER: Picture 2:<image> {NEXT} ASSISTANT:"
        new = loaded.processor(
            text=between, images=pictures[1:2], return_tensors="pt", add_special_tokens=False
        )
        if ids[0, -1] == 2:
            new["input_ids"] = new["input_ids"][:, 1:]
        ids = torch.cat([ids, new["input_ids"]], dim=1)
        two, *_ = generated(loaded, ids, new["pixel_values"], past_key_values=cache)
        return one, two

    full = reference()
    with mmkv.wrapped(loaded.model, policy, 0.3, **options):
        compressed = reference()
    assert (first.full.text, second.full.text) == full
    assert (first.compressed.text, second.compressed.text) == compressed
    assert not any("read the whole" in x for x in second.notes)


@pytest.mark.slow
def test_both_models_have_run_before_they_are_timed(pictures, monkeypatch):
    """With a picture each; not again for the same policy."""
    runs = []
    generate = LlavaForConditionalGeneration.generate

    def recorded(self, **options):
        runs.append((mmkv.is_wrapped(self), "pixel_values" in options, options["max_new_tokens"]))
        return generate(self, **options)

    monkeypatch.setattr(LlavaForConditionalGeneration, "generate", recorded)
    talk = Conversation(Models(["tiny"], lambda name: picture_chat()).get("tiny"))
    last(talk.ask(QUESTION, SHORT, pictures[0]))
    assert runs[:2] == [(False, True, 2), (True, True, 2)]
    assert sorted(runs[2:]) == [(False, True, 6), (True, True, 6)]
    last(talk.ask(NEXT, SHORT, pictures[0]))
    assert len(runs) == 6


@pytest.mark.slow
def test_the_tokens_of_a_conversation_are_the_templates(loaded, pictures):
    talk = talking(loaded)
    one = last(talk.ask(QUESTION, dataclasses.replace(SHORT, max_new_tokens=60), pictures[0]))
    kept = last(talk.ask(NEXT, SHORT, pictures[0])).kept  # the same picture is none of its own
    said = "".join("<image>" if x.layers is None else x.text for x in kept.words)
    assert said == (
        f"<s>USER: Picture 1:<image> {QUESTION} ASSISTANT:{one.compressed.text}"
        f"</s>USER: {NEXT} ASSISTANT:"
    )
    assert sum(x.tokens for x in kept.words) == kept.seen


@pytest.mark.slow
def test_another_policy_reads_the_conversation_again(loaded, pictures):
    talk = talking(loaded)
    last(talk.ask(QUESTION, SHORT, pictures[0]))
    xkv = dataclasses.replace(SHORT, policy="xkv", budget=0.5, kv_dtype="int8")
    second = last(talk.ask(NEXT, xkv, pictures[1]))
    assert second.notes[0] == "The compressed side read the whole conversation again."
    assert second.label == "xkv 0.5 in int8"
    prompt = talk._sides[0].prompt
    with mmkv.wrapped(loaded.model, "xkv", 0.5, kv_dtype="int8"):
        text, *_ = generated(loaded, prompt["input_ids"], prompt["pixel_values"])
    assert second.compressed.text == text
    assert not any("again" in note for note in last(talk.ask("And now?", xkv)).notes)


def test_a_share_of_bytes_sets_tokens_and_their_type(loaded, pictures):
    settings = dataclasses.replace(SHORT, policy="condense", budget=Memory(0.25))
    settings = dataclasses.replace(settings, options={"least": 0})
    turn = last(talking(loaded).ask(QUESTION, settings, pictures[0]))
    assert turn.label == "condense 25% of bytes"
    assert (turn.report.size, turn.report.kv_dtype) == ("memory 25%", "int8")
    both = dataclasses.replace(settings, kv_dtype="int8")
    with pytest.raises(ValueError, match="beside a memory of 25%, which sets the type too"):
        last(talking(loaded).ask(QUESTION, both, pictures[0]))


@pytest.mark.slow
def test_unfitting_cache_is_read_again(loaded, pictures):
    """A template that writes earlier answers otherwise than they were: they are read again."""
    processor = copy.deepcopy(loaded.processor)
    turn = "{{ m['role'] }}: {% for x in m['content'] %}{{ x.get('text', '<image>') | upper }}"
    processor.chat_template = "{% for m in messages %}" + turn + "{% endfor %}{% endfor %}A:"
    processor.chat_template = processor.chat_template.replace("'<image>') | upper", "'<image>')")
    talk = talking(dataclasses.replace(loaded, processor=processor))
    last(talk.ask(QUESTION, SHORT, pictures[0]))
    processor.chat_template = processor.chat_template.replace("m['role']", "m['role'] | upper")
    turn = last(talk.ask(NEXT, SHORT))
    assert turn.notes[0] == "The compressed side read the whole conversation again."
    prompt = talk._sides[1].prompt
    assert turn.full.text == generated(loaded, prompt["input_ids"], prompt["pixel_values"])[0]


@pytest.mark.slow
def test_alternating_conversations_stay_separate(loaded, pictures):
    users = [
        dataclasses.replace(SHORT, policy=policy, temperature=temperature, seed=seed)
        for seed, (policy, temperature) in enumerate([("snapkv", 0.9), ("h2o", 1.5)])
    ]

    def turns(user: int, talk: Conversation):
        yield texts(last(talk.ask(QUESTION, users[user], pictures[user])))
        yield texts(last(talk.ask(NEXT, users[user])))

    alone = [list(turns(i, talking(loaded))) for i in range(2)]
    together = [turns(i, talking(loaded)) for i in range(2)]
    assert list(zip(*[[next(x) for x in together] for _ in range(2)], strict=True)) == [
        tuple(x) for x in alone
    ]
    assert alone[0][0] != alone[1][0]


@pytest.mark.slow
def test_the_answers_stream_with_their_numbers(loaded, pictures):
    talk = talking(loaded)
    settings = Settings(max_new_tokens=40, options={"least": 0})
    turns = list(talk.ask(QUESTION, settings, pictures[0]))
    assert turns[0].full.tokens == 0
    assert not any(x.done for x in turns[:-1])
    final = turns[-1]
    for side in (final.full, final.compressed):
        assert 0 < side.tokens <= 40
        assert side.first > 0
        assert side.rate > 0
    assert final.full.kept == 1
    assert final.full.nbytes == final.full.full_nbytes
    # Keys and values of float32: the last token is never read.
    seen = final.kept.seen + final.full.tokens - 1
    assert final.full.nbytes == seen * LAYERS * HEADS * 2 * HEAD_DIM * 4
    assert final.compressed.nbytes < 0.5 * final.compressed.full_nbytes
    assert final.compressed.kept == pytest.approx(0.2, abs=0.01)  # of the prompt
    assert final.rouge == rouge_l(*texts(final))
    assert talk.turns == [final]


def test_kept_tokens_are_those_after_the_prompt(loaded, pictures):
    settings = dataclasses.replace(SHORT, budget=0.5, options={"protect": "instruction"})
    kept = last(talking(loaded).ask(QUESTION, settings, pictures[0])).kept
    assert kept.layers == list(range(LAYERS))
    assert len(kept.sizes) == len(kept.patches) == LAYERS
    assert sum(kept.sizes) == pytest.approx(round(0.5 * LAYERS * kept.seen), abs=0.5)
    assert kept.mean.shape == (12, 12)
    assert all(x.layers == LAYERS for x in kept.words if x.layers is not None)
    (image,) = (x for x in kept.words if x.layers is None)
    assert image.tokens == PATCHES
    assert image.kept == pytest.approx(float(kept.mean.mean()), abs=1e-6)
    held = sum(x.kept * x.tokens for x in kept.words)
    assert held == pytest.approx(sum(kept.sizes) / LAYERS, abs=1e-3)


@pytest.mark.slow
def test_draws_repeat_with_their_seed_and_are_equal_on_both_sides(loaded, pictures):
    def said(seed: int) -> tuple[str, str]:
        settings = Settings(policy="full", max_new_tokens=12, temperature=1.5, seed=seed)
        return texts(last(talking(loaded).ask(QUESTION, settings, pictures[0])))

    found = [said(seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert all(full == compressed for full, compressed in found)


def test_stop_keeps_text_and_conversation_continues(loaded, pictures):
    talk = talking(loaded)
    long = dataclasses.replace(SHORT, max_new_tokens=200, temperature=2.0)
    for turn in talk.ask(QUESTION, long, pictures[0]):
        if turn.full.tokens:
            talk.stop()
    assert turn.done
    assert turn.notes == ("Stopped before the end.",)
    assert 0 < turn.full.tokens < 200
    assert last(talk.ask(NEXT, SHORT)).notes == ()
    assert len(talk.turns) == 2


@pytest.mark.slow
def test_closed_page_stops_answer_and_frees_memory(loaded, pictures):
    talk = talking(loaded)
    last(talk.ask(QUESTION, SHORT, pictures[0]))
    caches = [weakref.ref(x.cache) for x in talk._sides]
    turns = talk.ask(NEXT, Settings(max_new_tokens=200))
    next(turns)
    next(turns)
    turns.close()
    assert len(talk.turns) == 1
    assert not [x for x in threading.enumerate() if "(run)" in x.name]
    del talk, turns
    gc.collect()
    assert [x() for x in caches] == [None, None]


WRONG = [
    ({}, "  \n", "the question is empty"),
    ({"max_new_tokens": 512}, "7 8 9 " * 660, "the model reads 2048: clear the"),
    ({}, "what is <image>?", "stands for a picture"),
    ({"policy": "snap"}, "?", "Did you mean 'snapkv'"),
    ({"options": {"windw": 1}}, "?", "Did you mean 'window'"),
    ({"policy": "streaming", "options": {"window": 4}}, "?", "has no effect"),
    ({"budget": 1.5}, "?", "budget=1.5"),
]


@pytest.mark.slow
def test_errors_are_one_line_and_change_nothing(loaded, pictures):
    talk, other = talking(loaded), talking(loaded)
    first = last(talk.ask(QUESTION, SHORT, pictures[0]))
    last(other.ask(QUESTION, SHORT, pictures[0]))
    for settings, question, message in WRONG:
        with pytest.raises(ValueError, match=message) as error:
            list(talk.ask(question, dataclasses.replace(SHORT, **settings), pictures[1]))
        assert len(str(error.value).splitlines()) == 1
        assert talk.turns == [first]
    assert texts(last(talk.ask(NEXT, SHORT))) == texts(last(other.ask(NEXT, SHORT)))


@pytest.mark.parametrize(
    ("question", "settings", "message"),
    [
        ("x" * 4001, Settings(), "4001 characters"),
        ("?", Settings(max_new_tokens=0), "from 1 to 512"),
        ("?", Settings(max_new_tokens=513), "from 1 to 512"),
        ("?", Settings(temperature=-1.0), "from 0 to 2"),
    ],
)
def test_page_limits_raise(page, question, settings, message):
    page.check_limits("?" * 4000, Settings(max_new_tokens=512, temperature=2.0))
    with pytest.raises(ValueError, match=message):
        page.check_limits(question, settings)


@pytest.mark.parametrize("words", [1, 3])
def test_cleared_answer_ends_with_an_empty_page(page, loaded, words):
    """Its last words may reach the page after the reply to Clear."""
    events = {x.name: x for x in page.build(Models(["tiny"], lambda _: loaded)).fns.values()}
    ask, clear = events["answer"], events["forget"]
    shown = next(x for x in ask.outputs if x.elem_id == "talk")
    values = {x: x.value for x in ask.inputs}
    (length,) = [x for x in values if x.label == "Max new tokens"]
    (question,) = [x for x in values if x.elem_id == "question"]
    talk = talking(loaded)
    values |= {length: 6, question: QUESTION, ask.inputs[0]: talk}
    values[ask.inputs[1]] = {"composite": {"path": str(example_pictures()[0])}}
    sent = ask.fn(*values.values())
    for _ in range(words):
        while shown not in next(sent):
            pass
    empty = clear.fn(talk)[shown]
    assert "mm-empty" in empty
    assert [x[shown] for x in sent if shown in x][-1] == empty


def test_picture_without_placeholder_raises(loaded, pictures):
    processor = copy.deepcopy(loaded.processor)
    processor.chat_template = None
    talk = talking(dataclasses.replace(loaded, processor=processor))
    with pytest.raises(ValueError, match="no place for pictures"):
        next(talk.ask(QUESTION, SHORT, pictures[0]))


def text_model(loaded):
    torch.manual_seed(0)
    model, tokenizer = make_model("llama"), copy.deepcopy(loaded.processor.tokenizer)
    model.resize_token_embeddings(len(tokenizer))
    return chat.Loaded("tiny", model.eval(), tokenizer)


def test_text_model_gets_no_pictures(loaded, pictures):
    """No chat template: the questions are appended as they are; a picture is left out."""
    tiny = text_model(loaded)
    tiny.processor.chat_template = None
    talk = talking(tiny)
    settings = dataclasses.replace(SHORT, policy="local", budget=0.5)
    first = last(talk.ask(QUESTION, settings, pictures[0]))
    turn = last(talk.ask(NEXT, settings))
    assert (first.pictures, turn.kept.patches, turn.kept.problem) == ((), [], None)
    said = "".join(x.text for x in turn.kept.words)
    assert QUESTION in said
    assert NEXT in said


@pytest.mark.slow
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("sees", [True, False])
def test_a_conversation_begins_once(loaded, pictures, sees, written):
    """The mark of the beginning, whether the chat template writes it or the tokenizer adds it."""
    model = loaded if sees else text_model(loaded)
    processor = copy.deepcopy(model.processor)
    tokenizer = processor.tokenizer if sees else processor
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    template = loaded.processor.chat_template
    assert template.startswith("{{- bos_token -}}")
    processor.chat_template = template if written else template.removeprefix("{{- bos_token -}}")
    talk = talking(dataclasses.replace(model, processor=processor))
    last(talk.ask(QUESTION, SHORT, pictures[0]))
    last(talk.ask(NEXT, SHORT))
    ids = talk._sides[1].prompt["input_ids"][0].tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_an_error_of_generate_reaches_the_caller():
    class Broken(torch.nn.Module):
        def generate(self, **options):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        next(answer._steps(Broken(), {}))


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [("", "", 1.0), ("a b c d", "a c", 2 / 3), ("a", "", 0.0), ("a b", "b a", 0.5)],
)
def test_rouge_l(one, other, score):
    assert rouge_l(one, other) == pytest.approx(score)


def shown_of(page, policy: str) -> dict:
    known = mmkv.get_policy(policy).options()
    return {x: page.shown_option(hint, known.get(x)) for x, hint in page.option_hints().items()}


def test_controls_come_from_the_registry(page):
    """What they show is the policy's defaults, and what is changed in them is what it gets."""
    hints, changed_before = page.option_hints(), set()
    for policy in mmkv.list_policies():
        shown, known = shown_of(page, policy), mmkv.get_policy(policy).options()
        assert page.changed_options(policy, shown) == {}
        for name in known.keys() & hints.keys() - changed_before:
            value, optional = known[name], type(None) in policy_options.flat(hints[name])
            for choice, _ in getattr(page._control(name, hints[name]), "choices", []):
                new = None if choice == "none" and optional else choice
                changed = {} if new == value else {name: new}
                assert page.changed_options(policy, {**shown, name: choice}) == changed
            if isinstance(value, bool | int):
                new = not value if isinstance(value, bool) else value + 1
                assert page.changed_options(policy, {**shown, name: new}) == {name: new}
        changed_before |= known.keys()


@pytest.mark.parametrize(
    ("name", "value"), [("window", None), ("window", 1.5), ("kernel_size", "")]
)
def test_invalid_control_value_raises(page, name, value):
    with pytest.raises(ValueError, match=f"option {name}=.*expected a whole number"):
        page.changed_options("snapkv", {**shown_of(page, "snapkv"), name: value})


def test_models_are_known_by_their_last_part_and_loaded_once(loaded, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
    names, asked = ["smollm2", str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model")], []
    models = Models(names, lambda name: asked.append(name) or loaded)
    assert models.names == ["smollm2", "model (2)", "model (3)"]
    assert models.get("model (3)") is models.get("model (3)") is loaded
    assert asked == names[2:]
    with pytest.raises(ValueError, match="'/etc' is not offered here"):
        models.get("/etc")


def test_editor_upload_is_read(tmp_path):
    """Nothing on an empty sheet, a stroke on a grey one; large ones shrink."""
    sheet = Image.new("RGBA", (2048, 1024))
    sheet.save(tmp_path / "sheet.png")
    assert read_upload(tmp_path / "sheet.png") is None
    sheet.paste((215, 40, 40), (0, 0, 1024, 1024))
    sheet.save(tmp_path / "sheet.png")
    drawn = read_upload(tmp_path / "sheet.png")
    assert (drawn.size, drawn.mode) == ((1024, 512), "RGB")
    assert (drawn.getpixel((9, 9)), drawn.getpixel((999, 9))) == ((215, 40, 40), (180, 180, 180))


def test_the_page_says_what_its_model_knows(page):
    assert page.KNOWS["smollm2-vision"] in page.views.header(page.KNOWS)
    assert "knows" not in page.views.header({})


def test_a_turn_has_its_settings_and_earlier_ones_stay_with_another_model(page, loaded, pictures):
    settings = dataclasses.replace(SHORT, options={"least": 0}, temperature=0.5)
    first = last(talking(loaded).ask(QUESTION, settings, pictures[0]))
    assert (first.label, first.details) == ("prefixkv 0.2", "tiny, least=0, temperature 0.5")
    talk = Conversation(loaded, timed=False, earlier=[first])
    second = last(talk.ask(NEXT, SHORT, pictures[1]))
    assert talk.shown == [first, second]
    assert second.kept.words[0].text == "<s>"
    assert QUESTION not in "".join(x.text for x in second.kept.words)
    assert first.details in page.views.earlier([first])


@pytest.mark.parametrize("value", [None, ""])
def test_an_empty_field_is_named(page, value):
    with pytest.raises(ValueError, match="budget: the field is empty"):
        page.number(value, "budget")


def test_a_floor_is_said_below_the_budget(page):
    assert "at least 64 tokens" in page._floor(page._least("condense"))
    assert "at least" not in page._floor(page._least("snapkv"))


def test_text_is_escaped(page, loaded, pictures):
    turn = last(talking(loaded).ask("<b>bold</b> & more", SHORT, pictures[0]))
    for part in (page.views.newest([turn]), page.views.words(turn.kept)):
        assert "<b>bold" not in part
        assert "&lt;" in part
    assert "<b>" not in page.views.message("<b>")
