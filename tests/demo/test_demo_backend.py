"""The image chat without its page: two answers a turn, turns, users, and what goes wrong."""

from __future__ import annotations

import copy
import dataclasses
import threading

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import mmkv
from helpers.marks import slow_except
from helpers.models import make_model
from mmkv import chat
from mmkv.builtin import example_pictures

pytest.importorskip("rouge_score")

from mmkv.demo import options, session, views
from mmkv.demo.backend import Conversation, Engine
from mmkv.demo.outcome import rouge_l
from mmkv.demo.stepping import Stepper, Turnstile
from mmkv.demo.values import Settings, Turn

QUESTION, NEXT = "Describe the picture.", "How many objects are in the picture?"
SHORT = Settings(policy="prefixkv", max_new_tokens=6)


@pytest.fixture(scope="module")
def engine():
    return Engine(chat.load("builtin", device="cpu"))


@pytest.fixture(scope="module")
def pictures():
    return [chat.read_picture(path) for path in example_pictures()]


def last(turns) -> Turn:
    *_, turn = turns
    assert turn.done
    return turn


def texts(turn: Turn) -> tuple[str, str]:
    return turn.full.text, turn.compressed.text


def options_of(policy: str) -> dict:
    known = mmkv.get_policy(policy).options()
    return {"window": 8} if "window" in known else {}


def generated(loaded, ids, pixels, *, new=6, **more):
    mask = torch.ones_like(ids)
    out = loaded.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new,
        return_dict_in_generate=True,
        **({} if pixels is None else {"pixel_values": pixels}),
        **more,
    )
    text = loaded.processor.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip(), out.sequences, out.past_key_values


@pytest.mark.parametrize("policy", slow_except(mmkv.list_policies(), "h2o"))
def test_two_turns_are_what_generate_gives(engine, pictures, policy):
    """Both sides, on every policy, against plain calls of the wrapped and the unwrapped model."""
    loaded, options = engine.loaded, options_of(policy)
    talk = Conversation(engine)
    settings = dataclasses.replace(SHORT, policy=policy, budget=0.3, options=options)
    first = last(talk.ask(QUESTION, pictures[0], settings))
    second = last(talk.ask(NEXT, pictures[1], settings))

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


def test_the_tokens_of_a_conversation_are_the_templates(engine, pictures):
    talk = Conversation(engine)
    one = last(talk.ask(QUESTION, pictures[0], dataclasses.replace(SHORT, max_new_tokens=60)))
    two = last(talk.ask(NEXT, None, SHORT))
    kept = two.kept
    assert kept is not None
    said = "".join("<image>" if x.layers is None else x.text for x in kept.words)
    answer = one.compressed.text
    assert said.startswith(f"<s>USER: Picture 1:<image> {QUESTION} ASSISTANT: {answer}")
    assert said.endswith(f"</s>USER: {NEXT} ASSISTANT:")
    assert said.count("</s>") == 1
    assert sum(x.tokens for x in kept.words) == kept.seen


def test_another_policy_reads_the_conversation_again(engine, pictures):
    talk, loaded = Conversation(engine), engine.loaded
    last(talk.ask(QUESTION, pictures[0], SHORT))
    xkv = dataclasses.replace(SHORT, policy="xkv", budget=0.5)
    second = last(talk.ask(NEXT, pictures[1], xkv))
    assert "read the whole conversation again" in second.notes[0]
    assert second.label == "xkv 0.5"
    ids = talk._compressed.tokens.ids[:, : second.kept.seen]
    pixels = torch.cat([chat.encode(loaded, "?", [x])["pixel_values"] for x in pictures[:2]])
    with mmkv.wrapped(loaded.model, "xkv", 0.5):
        assert generated(loaded, ids, pixels)[0] == second.compressed.text
    assert last(talk.ask("And now?", None, xkv)).notes == ()


@pytest.mark.slow
def test_what_is_kept_can_be_held_in_few_bits(engine, pictures):
    """The bytes shrink, the same pairs are kept, and a change reads the conversation again."""
    talk = Conversation(engine)
    plain = Settings(policy="prefixkv", budget=0.4, max_new_tokens=8)
    whole = last(talk.ask(QUESTION, pictures[0], plain))
    few = last(
        Conversation(engine).ask(QUESTION, pictures[0], dataclasses.replace(plain, kv_dtype="int8"))
    )
    assert few.label == "prefixkv 0.4 in int8"
    assert few.compressed.kept == pytest.approx(whole.compressed.kept)
    assert few.compressed.nbytes < 0.3 * whole.compressed.nbytes
    assert few.full.nbytes == whole.full.nbytes
    again = last(talk.ask(NEXT, None, dataclasses.replace(plain, kv_dtype="int4")))
    assert "read the whole conversation again" in again.notes[0]


@pytest.mark.slow
def test_eight_users_at_once_get_their_own_answers(engine, pictures):
    """Different pictures, questions, policies and draws, against the same asked alone."""
    policies = ["prefixkv", "snapkv", "xkv", "squeeze", "h2o", "streaming", "adakv", "full"]

    def talk(user: int) -> list[tuple[str, str]]:
        conversation = Conversation(engine)
        settings = Settings(
            policy=policies[user],
            budget=0.3 + 0.05 * user,
            options=options_of(policies[user]),
            max_new_tokens=8,
            temperature=0.9 if user % 2 else 0.0,
            seed=user,
        )
        picture = pictures[user % len(pictures)]
        questions = [(QUESTION, picture), (NEXT, None)]
        return [texts(last(conversation.ask(q, p, settings))) for q, p in questions]

    alone = [talk(user) for user in range(8)]
    together: dict[int, list[tuple[str, str]]] = {}
    threads = [threading.Thread(target=lambda u=u: together.update({u: talk(u)})) for u in range(8)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert [together[u] for u in range(8)] == alone
    assert len({turns[0] for turns in alone}) > 1


def test_the_answers_stream_with_their_numbers(engine, pictures):
    talk = Conversation(engine)
    settings = Settings(max_new_tokens=40, options={"least": 0})
    turns = list(talk.ask(QUESTION, pictures[0], settings))
    assert turns[0].full.tokens == 0
    assert not any(x.done for x in turns[:-1])
    final = turns[-1]
    assert final.done
    for side in (final.full, final.compressed):
        assert side.done
        assert 0 < side.tokens <= 40
        assert side.first > 0
        assert side.rate > 0
    assert final.full.kept == 1
    assert final.full.nbytes == final.full.full_nbytes
    # 8 layers, 4 heads, keys and values of 32 float32: the last token is never read.
    seen = final.kept.seen + final.full.tokens - 1
    assert final.full.nbytes == seen * 8 * 4 * 2 * 32 * 4
    assert final.compressed.nbytes < 0.5 * final.compressed.full_nbytes
    assert final.compressed.kept == pytest.approx(0.2, abs=0.01)  # of the prompt
    assert final.rouge == rouge_l(*texts(final))
    assert talk.turns == [final]


def test_what_is_kept_after_the_prompt(engine, pictures):
    final = last(
        Conversation(engine).ask(
            QUESTION, pictures[0], dataclasses.replace(SHORT, options={"protect": "instruction"})
        )
    )
    kept = final.kept
    assert kept.layers == list(range(8))
    assert len(kept.sizes) == len(kept.patches) == 8
    assert sum(kept.sizes) == pytest.approx(round(0.2 * 8 * kept.seen), abs=0.5)
    assert kept.mean.shape == (12, 12)
    words = [x for x in kept.words if x.layers is not None]
    assert all(x.layers == 8 for x in words)
    (image,) = (x for x in kept.words if x.layers is None)
    assert image.tokens == 144
    assert image.kept == pytest.approx(float(kept.mean.mean()), abs=1e-6)
    held = sum(x.kept * x.tokens for x in kept.words)
    assert held == pytest.approx(sum(kept.sizes) / 8, abs=1e-3)


@pytest.mark.slow
def test_draws_repeat_with_their_seed(engine, pictures):
    def said(seed: int) -> tuple[str, str]:
        settings = Settings(max_new_tokens=20, temperature=1.5, seed=seed)
        return texts(last(Conversation(engine).ask(QUESTION, pictures[0], settings)))

    assert said(1) == said(1)
    assert len({said(seed) for seed in range(4)}) > 1


def test_stop_keeps_what_was_said_and_the_conversation_goes_on(engine, pictures):
    talk = Conversation(engine)
    long = dataclasses.replace(SHORT, max_new_tokens=200, temperature=2.0)
    for turn in talk.ask(QUESTION, pictures[0], long):
        if turn.full.tokens:
            talk.stop()
    assert turn.done
    assert turn.notes == ("Stopped before the end.",)
    assert turn.full.tokens < 200
    assert last(talk.ask(NEXT, None, SHORT)).notes == ()


def test_a_page_that_is_left_ends_its_answer(engine, pictures):
    talk = Conversation(engine)
    turns = talk.ask(QUESTION, pictures[0], Settings(max_new_tokens=200))
    next(turns)
    next(turns)
    turns.close()
    assert talk.turns == []
    assert not [x for x in threading.enumerate() if "_run" in x.name]
    assert last(talk.ask(QUESTION, pictures[0], SHORT)).done


def test_clear_and_close_free_the_caches(engine, pictures):
    talk = Conversation(engine)
    turn = last(talk.ask(QUESTION, pictures[0], SHORT))
    assert talk.nbytes == turn.full.nbytes + turn.compressed.nbytes
    talk.clear()
    assert (talk.nbytes, talk.turns) == (0, [])
    with pytest.raises(ValueError, match="no picture yet"):
        next(talk.ask(NEXT, None, SHORT))
    talk.close()
    assert talk.nbytes == 0


def test_a_budget_too_small_for_the_window_is_a_note(engine, pictures):
    settings = dataclasses.replace(SHORT, policy="snapkv", budget=0.01)
    turn = last(Conversation(engine).ask(QUESTION, pictures[0], settings))
    (note,) = turn.notes
    assert note.startswith("budget 0.01 gives ")
    assert "too few for window 32" in note


WRONG = {
    "empty": ({}, "  \n", "the question is empty"),
    "long": ({}, "x" * 4001, "4001 characters"),
    "mark": ({}, "what is <image>?", "stands for a picture"),
    "policy": ({"policy": "snap"}, "?", "Did you mean 'snapkv'"),
    "option": ({"options": {"windw": 1}}, "?", "Did you mean 'window'"),
    "idle option": ({"policy": "streaming", "options": {"window": 4}}, "?", "has no effect"),
    "option value": ({"policy": "snapkv", "options": {"kernel_size": 4}}, "?", "odd"),
    "budget": ({"budget": 1.5}, "?", "in \\(0, 1\\]"),
    "no tokens": ({"max_new_tokens": 0}, "?", "from 1 to 512"),
    "temperature": ({"temperature": -1.0}, "?", "from 0 to 2"),
}


@pytest.mark.parametrize("wrong", slow_except(WRONG, "policy", "budget"))
def test_errors_are_one_line_and_change_nothing(engine, pictures, wrong):
    settings, question, message = WRONG[wrong]
    talk = Conversation(engine)
    first = last(talk.ask(QUESTION, pictures[0], SHORT))
    before = talk.nbytes
    with pytest.raises(ValueError, match=message) as error:
        list(talk.ask(question, pictures[1], dataclasses.replace(SHORT, **settings)))
    assert len(str(error.value).splitlines()) == 1
    assert talk.turns == [first]
    assert talk.nbytes == before
    other = Conversation(engine)
    last(other.ask(QUESTION, pictures[0], SHORT))
    expected = last(other.ask(NEXT, None, SHORT))
    assert texts(last(talk.ask(NEXT, None, SHORT))) == texts(expected)


def test_a_second_question_while_one_streams_is_refused(engine, pictures):
    talk = Conversation(engine)
    turns = talk.ask(QUESTION, pictures[0], SHORT)
    next(turns)
    with pytest.raises(ValueError, match="still streaming"):
        next(talk.ask(NEXT, None, SHORT))
    assert last(turns).done


def test_a_conversation_longer_than_the_model_reads_is_refused(engine, pictures):
    talk = Conversation(engine)
    with pytest.raises(ValueError, match=r"the model reads 2048: clear the conversation"):
        list(talk.ask("7 8 9 " * 660, pictures[0], Settings(max_new_tokens=512)))


def test_a_model_that_reads_text_alone(engine):
    """No chat template, no pictures: the questions are appended as they are."""
    torch.manual_seed(0)
    tokenizer = engine.loaded.processor.tokenizer
    model = make_model("llama")
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = None
    talk = Conversation(Engine(chat.Loaded("tiny", model.eval(), tokenizer, False)))
    settings = dataclasses.replace(SHORT, policy="local", budget=0.5)
    last(talk.ask(QUESTION, None, settings))
    turn = last(talk.ask(NEXT, None, settings))
    assert turn.kept.patches == []
    assert turn.kept.problem is None
    assert NEXT in "".join(x.text for x in turn.kept.words)
    with pytest.raises(ValueError, match="text only"):
        list(talk.ask(NEXT, chat.read_picture(example_pictures()[0]), settings))


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("sees", slow_except([True, False], True))
def test_a_conversation_begins_once(engine, pictures, sees, written):
    """The mark of the beginning, whether the chat template writes it or the tokenizer adds it."""
    processor = copy.deepcopy(engine.loaded.processor)
    tokenizer = processor.tokenizer
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    template = processor.chat_template
    assert template.startswith("{{- bos_token -}}")
    if not written:
        template = template.removeprefix("{{- bos_token -}}")
    processor.chat_template = tokenizer.chat_template = template
    if sees:
        loaded = dataclasses.replace(engine.loaded, processor=processor)
    else:
        model = make_model("llama")
        model.resize_token_embeddings(len(tokenizer))
        loaded = chat.Loaded("tiny", model.eval(), tokenizer, False)
    talk = Conversation(Engine(loaded))
    last(talk.ask(QUESTION, pictures[0] if sees else None, SHORT))
    last(talk.ask(NEXT, None, SHORT))
    ids = talk._full.tokens.ids[0].tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_an_error_of_generate_reaches_the_caller():
    class Broken:
        def register_forward_hook(self, hook):
            return self

        def remove(self):
            pass

        def generate(self, **options):
            raise RuntimeError("out of memory")

    stepper = Stepper(Broken(), {})
    with pytest.raises(RuntimeError, match="out of memory"):
        stepper.step()
    assert stepper.step() is False
    stepper.close()


def test_the_turnstile_serves_in_order():
    turnstile, order = Turnstile(), list[int]()

    def wait(i: int) -> None:
        with turnstile.turn():
            order.append(i)

    with turnstile.turn():
        threads = [threading.Thread(target=wait, args=(i,)) for i in range(5)]
        for i, x in enumerate(threads):
            x.start()
            while turnstile._next < i + 2:
                pass
    for x in threads:
        x.join()
    assert order == list(range(5))


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [("", "", 1.0), ("a b c d", "a c", 2 / 3), ("a", "", 0.0), ("a b", "b a", 0.5)],
)
def test_rouge_l(one, other, score):
    assert rouge_l(one, other) == pytest.approx(score)


@pytest.mark.parametrize("policy", slow_except(mmkv.list_policies(), "prefixkv"))
def test_controls_come_from_the_registry(policy):
    known = options.defaults(policy)
    by_name = {x.name: x for x in options.all_options()}
    shown = {x.name: x.shown(known.get(x.name)) for x in by_name.values()}
    assert options.changed(policy, shown) == {}
    for name, value in known.items():
        option = by_name[name]
        if option.kind == "switch":
            assert options.changed(policy, {**shown, name: not value}) == {name: not value}
        elif option.kind == "whole":
            more = 1 if value is None else value + 1
            assert options.changed(policy, {**shown, name: float(more)}) == {name: more}
        elif option.kind == "choice":
            for choice in option.choices:
                optional = choice == "none" and option.optional
                expected = None if optional else choice
                changed = {} if expected == value else {name: expected}
                assert options.changed(policy, {**shown, name: choice}) == changed
    mmkv.get_policy(policy, **options.changed(policy, shown))


@pytest.mark.parametrize(
    ("name", "value"), [("window", None), ("window", 1.5), ("kernel_size", "")]
)
def test_a_control_without_a_sensible_value_is_named(name, value):
    known = options.defaults("snapkv")
    shown = {x.name: x.shown(known.get(x.name)) for x in options.all_options()}
    with pytest.raises(ValueError, match=f"option '{name.replace('_', ' ')}'"):
        options.changed("snapkv", {**shown, name: value})


def test_a_session_asks_about_a_picture_once(engine, pictures):
    offered = session.Engines(["builtin"], lambda name: engine)
    tab = session.Session(offered)
    tab.use(pictures[0])
    tab.draw([{"colour": "#d72828", "width": 0.05, "points": [[0.1, 0.1], [0.9, 0.1]]}])
    first = last(tab.ask(QUESTION, SHORT, "builtin"))
    assert first.picture.getpixel((192, 38)) == (215, 40, 40)
    assert tab.picture.getpixel((192, 38)) != (215, 40, 40)
    assert last(tab.ask(NEXT, SHORT, "builtin")).picture is None
    tab.draw([])
    assert last(tab.ask(NEXT, SHORT, "builtin")).picture is not None
    with pytest.raises(ValueError, match="not on offer"):
        next(tab.ask(NEXT, SHORT, "/etc"))
    tab.clear()
    assert tab.turns == []
    assert last(tab.ask(NEXT, SHORT, "builtin")).picture is not None
    tab.close()
    with pytest.raises(ValueError, match="was closed"):
        next(tab.ask(NEXT, SHORT, "builtin"))


@pytest.mark.parametrize(
    "data",
    [
        None,
        "x",
        [1],
        [{"colour": "url(x)", "width": 0.1, "points": []}],
        [{"colour": "#000000", "width": 2, "points": []}],
        [{"colour": "#000000", "width": 0.1, "points": [[float("nan"), 0]]}],
        [{"colour": "#000000", "width": 0.1, "points": [["x", 0]]}],
    ],
)
def test_what_is_no_drawing_is_refused(data):
    with pytest.raises(ValueError, match="could not be read"):
        session.checked_strokes(data)


def test_pages_know_folders_by_their_last_part(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
    names = ["builtin", str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model")]
    assert session.Engines(names, chat.load).names == ["builtin", "model (2)", "model (3)"]


def test_text_is_escaped(engine, pictures):
    turn = last(Conversation(engine).ask("<b>bold</b> & more", pictures[0], SHORT))
    for part in (views.conversation([turn]), views.words(turn.kept), views.message("<b>")):
        assert "<b>bold" not in part
        assert "&lt;" in part
