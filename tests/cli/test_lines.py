"""mmkv chat without a question: lines from a pipe, commands and answers."""

import io

import pytest
from rich.console import Console

from helpers.commands import run
from helpers.marks import cases
from helpers.picture_chat import picture_chat
from helpers.text_chat import text_chat
from mmkv import chat
from mmkv.builtin import example_pictures
from mmkv.cli.converse import Lines, converse
from mmkv.demo.conversation import Conversation, Settings
from mmkv.loading import untrusted
from mmkv.memory import DEFAULT
from mmkv.profiles import Profile

QUESTION = "How many objects are in the second picture?"


def picture(i):
    return untrusted.read_named_picture(example_pictures()[i])


@pytest.fixture
def loaded():
    return picture_chat()


ADAKV = Settings(policy="adakv", budget=0.3, options={"window": 8}, max_new_tokens=12)


def talk(
    loaded, *lines: str, terminal: bool = False, settings: Settings = ADAKV
) -> tuple[str, int, Conversation]:
    screen = Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)
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


def lines_of(out):
    return [x for x in out.splitlines() if x.startswith(("from now on", "error", "without"))]


def test_another_policy_takes_the_default_size_where_none_was_chosen(loaded):
    settings = Settings(policy="condense", budget=DEFAULT, max_new_tokens=2)
    asked = f"/image {example_pictures()[0]}", "Describe it."
    out, refused, _ = talk(loaded, "/policy full", *asked, "/policy h2o", settings=settings)
    assert refused == 0
    assert lines_of(out) == ["from now on full", "from now on h2o 12.5% of bytes"]
    out, _, _ = talk(loaded, "/memory 60%", "/policy full", "/policy h2o", settings=settings)
    assert lines_of(out) == [f"from now on {x} 60% of bytes" for x in ("condense", "full", "h2o")]


def test_another_policy_leaves_the_profile_out(loaded, tmp_path):
    path = tmp_path / "profile.json"
    Profile((0.2, 0.4, 0.3), 0.3).save(path)
    settings = Settings(policy="prefixkv", budget=None, profile=path, max_new_tokens=2)
    out, refused, _ = talk(loaded, "/budget 0.5", "/policy snapkv", settings=settings)
    assert refused == 1
    assert lines_of(out) == [
        f"error: the profile {path} sets the size: /policy NAME leaves the profile out",
        f"without the profile {path}",
        "from now on snapkv 12.5% of bytes",
    ]


def test_a_line_that_is_not_utf8_is_refused_alone(loaded, monkeypatch):
    piped = io.TextIOWrapper(io.BytesIO(b"/budget 0.5\ncaf\xe9?\n/budget 0.4\n"), encoding="ascii")
    monkeypatch.setattr("sys.stdin", piped)
    screen = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr("mmkv.cli.converse.console", lambda: screen)
    assert converse(loaded, Settings(policy="adakv", budget=0.3, max_new_tokens=2)) == 2
    assert lines_of(screen.file.getvalue()) == [
        "from now on adakv 0.5",
        r"error: 'caf\udce9?' is not in UTF-8",
        "from now on adakv 0.4",
    ]


def test_a_picture_for_a_model_that_reads_text_only_is_refused():
    out, refused, _ = talk(chat.Loaded("tiny", *text_chat()), f"/image {example_pictures()[0]}")
    assert refused == 1
    assert "reads text only: leave the pictures out" in out


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
