"""A context of texts and chat messages is the conversation that its template writes."""

import copy
import dataclasses
import functools

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import mmkv
from helpers.marks import cases
from helpers.picture_chat import picture_chat
from helpers.text_chat import text_chat
from mmkv import chat
from mmkv.builtin import example_pictures

ASKED = "What is at the top center?"
HOW = {"max_new_tokens": 8, "do_sample": False}
FEW = {**HOW, "max_new_tokens": 2}


@functools.cache
def tiny():
    return text_chat()


def user(*parts):
    return {"role": "user", "content": [text(x) if isinstance(x, str) else x for x in parts]}


def text(words):
    return {"type": "text", "text": words}


def picture(n):
    with Image.open(example_pictures()[n]) as found:
        return {"type": "image", "image": found.convert("RGB")}


def ids_of(processor, messages):
    """What the template makes of a whole conversation, and its answer's head."""
    if hasattr(processor, "image_processor"):
        loaded = picture_chat()
    else:
        loaded = chat.Loaded("any", tiny()[0], processor)
    return chat.encode_messages(loaded, messages)["input_ids"][0].tolist()


def seen(context, question):
    """All ids that a question's reply stands behind."""
    encoded, _ = context._encoded(question, None, ends=True)
    return context.arguments_for(encoded)["input_ids"][0].tolist()


def test_pictures_are_asked_about_in_words():
    model, processor = picture_chat().model, picture_chat().processor
    one, two = picture(0), picture(1)
    with mmkv.wrapped(model, budget=1.0):
        context = mmkv.read(model, [user(one)], processor=processor)
        assert seen(context, ASKED) == ids_of(processor, [user(one, ASKED)])
        inputs = chat.encode_messages(picture_chat(), [user(one, ASKED)])
        said = model.generate(**inputs, **HOW)[0, inputs["input_ids"].shape[1] :]
        assert context.answer(ASKED, **HOW) == processor.decode(said)
        # A picture of the question's own, and one that is read later: the template counts them.
        both = ids_of(processor, [user(one, two, ASKED)])
        assert seen(context, [user(two, ASKED)]) == both
        context.append([user(two)])
        assert seen(context, ASKED) == both
        said = {"role": "assistant", "content": [text("Two.")]}
        context.append([said])
        assert seen(context, ASKED) == ids_of(processor, [user(one, two), said, user(ASKED)])


# What a template writes behind a message's head, and behind a picture, may depend on what follows.
TEMPLATES = {
    "built-in": None,
    "nothing around pictures": (
        "{% for m in messages %}{{ m.role }}:\n{% for c in m.content %}"
        "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    ),
    "a blank before a text": (
        "{% for m in messages %}{{ m.role }}:"
        "{% if not m.content or m.content[0].type != 'image' %} {% endif %}"
        "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}"
        "{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "a line behind each picture": (
        "{% for m in messages %}{{ m.role }}: {% for c in m.content %}"
        "{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }} {% endif %}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_pictures_may_begin_and_end_what_is_read(template):
    loaded = copy.copy(picture_chat())
    if TEMPLATES[template]:
        processor = copy.copy(loaded.processor)
        processor.chat_template = TEMPLATES[template]
        loaded = dataclasses.replace(loaded, processor=processor)
    one, two = picture(0), picture(1)
    said = {"role": "assistant", "content": [text("Yes.")]}
    with mmkv.wrapped(loaded.model, budget=1.0):
        for first, then, whole in (
            ([user(one, "A?"), said], [user(two, "B?")], [user(one, "A?"), said, user(two, "B?")]),
            ([user(one)], [said, user("B?")], [user(one), said, user("B?")]),
            ([user(one)], [user(two, "B?")], [user(one, two, "B?")]),
            ([user("A.")], [user(two, "B?")], [user("A.", two, "B?")]),
        ):
            context = mmkv.read(loaded.model, first, processor=loaded.processor)
            expected = chat.encode_messages(loaded, whole)["input_ids"][0].tolist()
            assert seen(context, then) == expected


@cases("system", [True, False], True)
def test_texts_and_turns_are_one_conversation(system, tmp_path):
    """Byte by byte what the template writes of all of it at once."""
    model, tokenizer = text_chat()
    before = [{"role": "system", "content": "Be brief."}] if system else []
    said = {"role": "assistant", "content": "Yes."}

    def turn(*words):
        return {"role": "user", "content": "\n\n".join(words)}

    def wanted(*messages):
        loaded = chat.Loaded("any", model, tokenizer)
        return chat.encode_messages(loaded, [*before, *messages])["input_ids"][0].tolist()

    with mmkv.wrapped(model, budget=1.0):
        context = mmkv.read(model, [*before, turn("One. ")], processor=tokenizer)
        if not system:
            alone = mmkv.read(model, "One. ", processor=tokenizer)
            assert torch.equal(alone.inputs["input_ids"], context.inputs["input_ids"])
        assert seen(context, "Who?") == wanted(turn("One. ", "Who?"))
        asked = [turn("Who?"), said, turn("Really?")]
        assert seen(context, asked) == wanted(turn("One. ", "Who?"), said, turn("Really?"))
        rows = context.arguments_for(context._encoded(["Who?", "What is it?"], None, ends=True)[0])
        for text, ids, mask in zip(
            ("Who?", "What is it?"), rows["input_ids"], rows["attention_mask"].bool(), strict=True
        ):
            assert ids[mask].tolist() == wanted(turn("One. ", text))
        assert rows["attention_mask"][:, -1].all()
        context.append(inputs="Two.")
        assert seen(context, "Who?") == wanted(turn("One. ", "Two.", "Who?"))
        context.append([said])
        assert seen(context, "Who?") == wanted(turn("One. ", "Two."), said, turn("Who?"))
        context.append([turn("Three."), said, turn("Four. ")])
        whole = [turn("One. ", "Two."), said, turn("Three."), said]
        assert seen(context, "Who?") == wanted(*whole, turn("Four. ", "Who?"))
        context.save(tmp_path / "read")
        loaded = mmkv.load_context(tmp_path / "read", model, processor=tokenizer)
        assert seen(loaded, "Who?") == seen(context, "Who?")
        assert loaded.chat == context.chat
        assert loaded.answer("Who?", **FEW) == context.answer("Who?", **FEW)
        ends_blank = mmkv.read(model, [*before, turn("One.\n")], processor=tokenizer)
        ends_blank.append([said])
        assert seen(ends_blank, "Who?") == wanted(turn("One.\n"), said, turn("Who?"))


def test_one_reply_is_a_text_and_several_are_a_list(monkeypatch):
    """Of one question with beams of its own too; without a number they end after 256 tokens."""
    model, tokenizer = text_chat()
    with mmkv.wrapped(model, budget=1.0):
        context = mmkv.read(model, "One.", processor=tokenizer)
        one = context.answer("Who?", **FEW)
        assert isinstance(one, str)
        assert context.answer(["Who?"], **FEW) == [one]
        assert context.answer(["Who?", "Why?"], **FEW)[0] == one
        assert len(context.answer("Who?", num_beams=2, num_return_sequences=2, **FEW)) == 2
        given, ask = [], context.ask
        monkeypatch.setattr(
            context, "ask", lambda *x, **more: given.append(more) or ask(*x, **{**more, **FEW})
        )
        context.answer("Who?")
        context.answer("Who?", max_length=300)
        assert [x.get("max_new_tokens") for x in given] == [256, None]


def test_ids_and_plain_texts_continue_unchanged():
    model, tokenizer = tiny()
    words = tokenizer("One two three", return_tensors="pt").input_ids
    more = tokenizer(" four five", add_special_tokens=False, return_tensors="pt").input_ids
    with mmkv.wrapped(model, budget=1.0):
        wanted = model.generate(torch.cat([words, more], 1), **FEW)[:, -2:]
        for given in (words, words[0], words.int(), {"input_ids": words}):
            context = mmkv.read(model, given)
            assert torch.equal(context.ask(more, **FEW), wanted)
            assert torch.equal(context.ask(" four five", processor=tokenizer, **FEW), wanted)
        plain = copy.deepcopy(tokenizer)
        plain.chat_template = None
        context = mmkv.read(model, "One two", processor=plain)
        context.append(" three")
        assert torch.equal(context.ask(" four five", **FEW), wanted)
        with pytest.raises(ValueError, match="has no template for chat messages: give a text"):
            context.ask([user("four")])
        with pytest.raises(ValueError, match="of ids or plain text: give a text"):
            mmkv.read(model, words).ask([user("four")], processor=tokenizer)


def words(template, begins):
    """A tokenizer of words that begins a text with <s>, if it does, as it would be loaded."""
    known = {x: i for i, x in enumerate(["<s>", "user", "one", "two", "three", "?"])}
    raw = Tokenizer(models.WordLevel(known, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    marks = {"bos_token": "<s>"} if begins else {}
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template, **marks)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("chats", [True, False])
def test_special_tokens_begin_a_prompt_once(begins, writes, chats):
    """With the one mark that begins a text, whether its template writes it or not."""
    first = "<s> " if writes and begins else ""
    template = first + "{% for m in messages %}user {{ m.content }} {% endfor %}" if chats else None
    mark, user = [0] * begins, [1] * chats
    model = tiny()[0]
    with mmkv.wrapped(model, budget=1.0):
        context = mmkv.read(model, "one two", processor=words(template, begins))
        assert context.inputs["input_ids"].tolist() == [[*mark, *user, 2, 3]]
        assert seen(context, "three") == [*mark, *user, 2, 3, 4]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (5, "or a tensor of ids, not 5"),
        ([1, 2], r"or a tensor of ids, not \[1, 2\]"),
        (torch.ones(2, 3), r"ids of torch\.float32 \[2, 3\]: expected ints"),
        ([{"role": "user"}], "expected a role and a content"),
        ([user({"type": "image", "image": "x.png"})], "a picture of PIL"),
        ([user({"type": "audio"})], "a picture of PIL"),
        ([user(picture(0))], "the tokenizer reads text only"),
        ("", "an empty text"),
        (["four", ""], "an empty text"),
        (torch.tensor([[5, -5]]), "ids from -5 to 5: expected 0 to 263"),
        (torch.tensor([[263, 264]]), "ids from 263 to 264: expected 0 to 263"),
    ],
)
def test_invalid_prompts_raise(given, match):
    model, tokenizer = tiny()
    with mmkv.wrapped(model, "condense", 0.4):
        context = mmkv.read(model, "x", processor=tokenizer)
        for use in (context.ask, context.append, context.answer):
            with pytest.raises(ValueError, match=match):
                use(given)
        with pytest.raises(ValueError, match=match):
            mmkv.read(model, given, processor=tokenizer)


def test_text_without_processor_raises(tmp_path):
    model, _ = tiny()
    with mmkv.wrapped(model, "condense", 0.4):
        context = mmkv.read(model, torch.tensor([5, 6, 7]))
        for processor, name in ((None, "none"), ("gpt2", "a str")):
            for use in (context.ask, context.append, functools.partial(mmkv.read, model)):
                with pytest.raises(ValueError, match=f"got {name}: pass processor="):
                    use("x", processor=processor)
        with pytest.raises(ValueError, match=r"a reply in text .* pass processor="):
            context.answer("x")
        with pytest.raises(ValueError, match="path of a file, not a NoneType"):
            context.save(None)
        with pytest.raises(ValueError, match="path of a context's file, not a int"):
            mmkv.load_context(5, model)
        with pytest.raises(ValueError, match="a loaded model, not the path or name 'y'"):
            mmkv.load_context("x", "y")
    assert repr(context).startswith("Context(LlamaForCausalLM, 1 x 3 tokens, ")
    with pytest.raises(ValueError, match="is not wrapped: call"):
        context.ask(torch.tensor([5]))
