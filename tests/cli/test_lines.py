"""mmkv chat without a question: lines from a pipe, commands and answers."""

import io

import pytest
from rich.console import Console

from helpers.commands import run
from helpers.marks import cases
from helpers.picture_chat import picture_chat
from mmkv import chat
from mmkv.builtin import example_pictures
from mmkv.cli.converse import Lines
from mmkv.demo.conversation import Conversation, Settings
from mmkv.loading import untrusted

QUESTION = "How many objects are in the second picture?"


def picture(i):
    return untrusted.read_named_picture(example_pictures()[i])


@pytest.fixture
def loaded():
    return picture_chat()


def talk(loaded, *lines: str, terminal: bool = False) -> tuple[str, int, Conversation]:
    screen = Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)
    settings = Settings(policy="adakv", budget=0.3, options={"window": 8}, max_new_tokens=12)
    chatting = Lines(Conversation(loaded), settings, screen)
    refused = chatting.run(lines)
    return screen.file.getvalue(), refused, chatting.conversation


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True])
def test_two_turns_about_a_picture(loaded, terminal):
    out, refused, conversation = talk(
        loaded,
        f"/image {example_pictures()[0]}\n",
        "Describe the picture.\n",
        "\n",
        "How many objects are in the picture?\n",
        "/quit\n",
        "never asked\n",
        terminal=terminal,
    )
    assert refused == 0
    assert [turn.question for turn in conversation.turns] == [
        "Describe the picture.",
        "How many objects are in the picture?",
    ]
    for turn in conversation.turns:
        assert f"full cache: {turn.full.text.strip()}" in out
        assert f"adakv 0.3: {turn.compressed.text.strip()}" in out
        assert f"{turn.compressed.nbytes / 2**10:.1f} of" in out
        said = f"{turn.compressed.kept:.1%} of the prompt kept, {turn.compressed.tokens} generated"
        assert said in out
        assert turn.compressed.kept == pytest.approx(0.3, abs=0.01)
        assert turn.compressed.nbytes < turn.full.nbytes


@pytest.mark.slow
def test_commands_change_settings(loaded):
    out, refused, conversation = talk(
        loaded,
        f"/image {example_pictures()[1]}",
        "/policy snapkv window=4",
        "/budget 0.5",
        "/kv-dtype int8",
        "Describe the picture.",
        "/clear",
        "How many objects are in the picture?",
        "/clear",
        "/help",
    )
    assert refused == 0
    assert out.count("full cache: ") == 2  # the picture can be asked about again
    assert out.count("conversation cleared; the picture stays") == 2
    assert "from now on snapkv 0.3\n" in out
    assert "from now on snapkv 0.5\n" in out
    assert "snapkv 0.5 in int8: " in out
    assert "/image PATH" in out
    assert conversation.turns == []


@pytest.mark.slow
def test_pictures_before_a_question_are_all_asked_about(loaded):
    first, second, third = (f"/image {path}" for path in example_pictures()[:3])
    _, refused, conversation = talk(loaded, first, second, QUESTION, third, "And in this one?")
    assert refused == 0
    assert [list(turn.pictures) for turn in conversation.turns] == [
        [picture(0), picture(1)],
        [picture(2)],
    ]
    _, _, conversation = talk(loaded, first, "/clear", second, "How many objects are there?")
    assert [list(turn.pictures) for turn in conversation.turns] == [[picture(1)]]


def test_doubtful_budgets_print_a_note(loaded):
    out, refused, _ = talk(loaded, "/budget 1", "/policy full", "/budget 0.5")
    assert refused == 0
    assert out.splitlines() == [
        "from now on adakv 1",
        "a budget of 1 is one token per layer and head; 1.0 or 100% keeps everything",
        "from now on full",
        "from now on full",
        "policy full takes no budget: it is ignored",
    ]


def test_a_type_beside_a_share_of_bytes_is_refused(loaded):
    out, refused, _ = talk(loaded, "/memory 6%", "/kv-dtype int8", "/budget 0.5", "/kv-dtype int8")
    assert refused == 1
    assert out.splitlines() == [
        "from now on adakv 6% of bytes",
        "error: kv_dtype='int8' beside a memory of 6%, which sets the type too: choose a budget "
        "first",
        "from now on adakv 0.5",
        "from now on adakv 0.5 in int8",
    ]


@cases(
    "line, message",
    [
        ("/image nowhere.png", "nowhere.png"),
        ("/policy nosuch", "unknown policy 'nosuch'"),
        ("/policy snapkv windw=3", "'windw'"),
        ("/budget much", "much"),
        ("/kv-dtype int3", "expected int8, int4 or none"),
    ],
    ("/image nowhere.png", "nowhere.png"),
)
def test_refused_line_prints_reason_and_chat_continues(loaded, line, message):
    out, refused, conversation = talk(
        loaded, line, f"/image {example_pictures()[0]}", "Describe it."
    )
    assert refused == 1
    assert message in out
    assert "Traceback" not in out
    assert len(conversation.turns) == 1


def test_an_unknown_command_is_named_before_the_help(loaded):
    out, refused, conversation = talk(loaded, "/polcy snapkv", "/help", "/budget")
    first, *rest = out.splitlines()
    assert first == "error: unknown command '/polcy'"
    assert refused == 1
    assert sum(line.startswith("/policy NAME") for line in rest) == 3
    assert "error" not in "\n".join(rest)
    assert conversation.turns == []


@pytest.mark.slow
def test_chat_works_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(chat, "load", lambda *args: picture_chat())
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
    pictures = [word for path in example_pictures()[:2] for word in ("--image", path)]
    out, _, code = run(capsys, "chat", "--max-new-tokens", 8, *pictures)
    assert code == 0
    inputs = chat.encode(picture_chat(), QUESTION, [picture(0), picture(1)])
    ids = picture_chat().model.generate(**inputs, max_new_tokens=8, do_sample=False)
    text = picture_chat().processor.decode(ids[0, inputs["input_ids"].shape[1] :])
    assert f"full cache: {text}\n" in out
