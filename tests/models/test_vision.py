"""smollm2-vision: its drawn scenes, how its parts are trained and added, and what it can do."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import mmkv
from mmkv.builtin import drawings, example_pictures
from mmkv.builtin.training import evaluate, train
from mmkv.builtin.training.evaluate import user
from mmkv.loading import models, smollm2_vision
from mmkv.profiles import Profile


def thing(kind="shape", name="circle", color="red", place="top left", size="large", **more):
    given = {"kind": kind, "name": name, "color": color, "place": place}
    return drawings.Object(**given, size=size if kind == "shape" else "", **more)


SCENE = drawings.Scene(
    objects=(
        thing(),
        thing("word", "apple", "blue", "center"),
        thing(name="star", place="middle right"),
    )
)


@pytest.fixture(scope="module")
def text():
    """SmolLM2 with only its first four layers, and its tokenizer."""
    model, tokenizer = models.pretrained("smollm2")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:4], 4
    return model, tokenizer


@pytest.fixture(scope="module")
def untrained(text):
    """A model and its processor; who changes the model changes a copy."""
    return smollm2_vision.build(*text)


@pytest.fixture(scope="module")
def loaded():
    return mmkv.load_builtin()


def test_no_heldout_scene_is_a_training_scene():
    def content(split):
        made = (drawings.make_scene(i, split, 1) for i in range(400))
        return {tuple((x.phrase, x.place) for x in scene.objects) for scene in made}

    assert not content("train") & content("heldout")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (drawings.describe(SCENE), (3, 3)),
        ("A large red circle is at the top left.", (1, 3)),
        ("A small red circle is at the top left.", (0, 3)),
        ('The word "apples" in blue is at the center.', (0, 3)),
        (drawings.describe(SCENE) + " A small red bar is at the bottom left.", (3, 4)),
        ("Nothing.", (0, 3)),
    ],
)
def test_description_score_counts_every_statement(text, right):
    assert drawings.score_description(text, SCENE) == right


def test_answers_follow_from_the_scene():
    questions = (drawings.ask(SCENE, random.Random(i)) for i in range(3000))
    told = {q.text: q.answer for q in questions}
    of_picture = " in the picture?"
    expected = {
        "What is at the center of the picture?": 'The word "apple" in blue is at the center.',
        "What is at the bottom left of the picture?": "Nothing is at the bottom left.",
        f"How many things are{of_picture}": "There are three things in the picture.",
        f"How many red shapes are{of_picture}": "There are two red shapes in the picture.",
        f"Which word is printed{of_picture}": 'The word "apple" is at the center.',
        f"Is the red circle above the red star{of_picture}": "Yes, it is.",
        f"Is the red star to the left of the red circle{of_picture}": "No, it is not.",
        f"Is the red star{of_picture[:-1]} small or large?": "The red star is large.",
    }
    assert {x: told[x] for x in expected} == expected


def test_find_question_object_is_in_one_picture():
    scenes = [drawings.make_scene(i) for i in range(4)]
    for seed in range(20):
        asked = drawings.find_question(scenes, random.Random(seed), 2)
        name = asked.text.removeprefix("Which picture shows the ").removesuffix("?")
        assert [name in {x.short for x in s.objects} for s in scenes] == [False, False, True, False]
        assert asked.answer == f"The third picture shows the {name}."
    assert drawings.find_question([SCENE, SCENE], random.Random(0)) is None


def test_example_pictures_are_heldout_scenes():
    paths = example_pictures()
    assert len(paths) == 4
    for seed, path in enumerate(paths):
        drawn = drawings.draw(drawings.make_scene(seed, count=seed + 3, printed=seed % 3))
        assert (np.asarray(Image.open(path)) == np.asarray(drawn)).mean() > 0.98  # of a font


@pytest.mark.slow
def test_image_tokens_spell_their_cells(text):
    speller = train.Speller(text[1])
    ids, known = speller.ids(SCENE).view(12, 12), set(speller.all_ids().tolist())
    cells = {
        (0, 0): " large red circle,",
        (1, 0): " at top left,",
        (3, 0): " circle top left,",
        (4, 4): ' "apple",',
        (5, 4): " at center,,",
        (6, 4): " word in blue,",
        (8, 0): " nothing,,,",
    }
    for (row, column), said in cells.items():
        assert text[1].decode(ids[row, column : column + 4]) == said
    for seed in range(40):
        assert known >= set(speller.ids(train.scene_of(seed)).tolist())


@pytest.mark.slow
def test_training_rows_equal_template_and_processor(text, untrained):
    processor = untrained[1]
    rows = train.Rows(processor.tokenizer, [], 0)
    row = rows._encode(f"<|im_start|>{train._SYSTEM}<|im_end|>\n")
    row += rows._turn("Describe the picture.", "A circle.", 1) + rows._turn("What else?", "None.")
    messages = [
        *user("Describe the picture.", drawings.draw(SCENE)),
        {"role": "assistant", "content": "A circle."},
        *user("What else?"),
        {"role": "assistant", "content": "None."},
    ]
    how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(messages, **how)
    assert inputs["input_ids"][0].tolist() == [token for token, _ in row]
    answered = processor.tokenizer.decode([token for token, answer in row if answer])
    assert answered == "A circle.<|im_end|>None.<|im_end|>"
    sized = SimpleNamespace(choice=lambda sizes: sizes[-1])
    assert torch.equal(train.pixels(SCENE, sized), inputs["pixel_values"][0])
    plain = "Hello<|im_start|> you"
    assert processor.tokenizer(plain).input_ids == text[1](plain).input_ids


@pytest.mark.slow
def test_words_are_read_from_their_objects_cell(untrained):
    processor = untrained[1]
    (sample,) = evaluate.described(processor, 1)
    scene = drawings.make_scene(evaluate.FIRST)
    first = (sample["input_ids"][0] == processor.image_token_id).nonzero()[0].item()
    told = iter(zip(sample["reply"], sample["regions"], strict=True))
    for thing in scene.objects:
        row, column = thing.row_column
        cell = [first + 12 * (4 * row + i) + 4 * column + j for i in range(4) for j in range(4)]
        said = [next(told)]
        while "." not in processor.tokenizer.decode(said[-1][0]):
            said.append(next(told))
        assert thing.name in processor.tokenizer.decode([token for token, _ in said])
        assert all(region == cell for _, region in said)
    assert not list(told)


def test_visual_heads_are_compared_with_copying_heads():
    seen = Profile(visual=((0.4, 0.3), (0.2, 0.1)))
    copied = Profile(retrieval=((0.1, 0.9), (0.8, 0.0)))
    said = evaluate.beside_copies(seen, copied)
    assert said.startswith("2 of 4 heads do half of what is visual; 1 of them are among the 2")
    assert said.endswith("do 50% of it")


def with_random_updates(model):
    """A copy of a model with random low-rank updates, as training has them."""
    trained = train.prepare(copy.deepcopy(model))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, x in trained.named_parameters():
            if "lora_B" in name:
                x.normal_(0, 0.1)
    return trained


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for a name that is going
@pytest.mark.slow
def test_low_rank_updates_equal_peft(text, untrained):
    pytest.importorskip("peft", reason="peft trains the parts")
    trained = with_random_updates(untrained[0])
    parts = train.updates_of(trained)
    other = copy.deepcopy(untrained[0])
    smollm2_vision.add_parts(other, parts)
    merged = trained.merge_and_unload().state_dict()
    for name, x in other.state_dict().items():
        assert torch.allclose(x.float(), merged[name].float(), rtol=1e-2, atol=4e-3), name
    layers = other.model.language_model.layers, text[0].model.layers
    ours, before = (x[3].mlp.up_proj.weight for x in layers)
    assert not torch.allclose(ours, before, atol=1e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for a name that is going
@pytest.mark.slow
def test_training_makes_parts_that_answer(untrained, tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="peft trains the parts")
    monkeypatch.setattr(train, "KINDS", {"one": (1, 300, 1.0), "text": (2, 40, 0.0)})
    model, processor = untrained
    monkeypatch.setattr(train, "untrained", lambda: (copy.deepcopy(model), processor))
    train.train_tower(tmp_path, pictures=2, batch=1, compile=False)
    (tmp_path / "texts" / "a").mkdir(parents=True)
    (tmp_path / "texts" / "a" / "a.txt").write_text("Some words of a text. " * 400)
    first = tmp_path / "tower.safetensors"
    train.train_text(tmp_path, first, tmp_path / "texts", steps=2, compile=False)
    parts = load_file(tmp_path / "parts.safetensors")
    assert any("lora_B" in name and x.abs().max() > 0 for name, x in parts.items())
    assert all(x.dtype == torch.float16 for x in parts.values())
    model = copy.deepcopy(model)
    smollm2_vision.add_parts(model, load_file(tmp_path / "parts.safetensors"))
    figure = evaluate.FIGURES["which of four pictures shows a thing"]
    assert evaluate.measure(model, processor, (figure[0], 2), 1)[1] == 1


# Model -------------------------------------------------------------------------------------------

# By figure: how many pictures are shown, and the least share that is right.
LEAST = {
    "things described": (1, 0.8),
    "short questions answered": (2, 0.5),
    "printed words and numbers read": (2, 0.75),
}


@pytest.mark.slow
def test_parts_are_small_and_assembled_once(loaded, monkeypatch, tmp_path):
    assert smollm2_vision.PARTS.stat().st_size <= 25_000_000
    assert all(x.dtype == torch.float16 for x in load_file(smollm2_vision.PARTS).values())
    monkeypatch.setattr(smollm2_vision, "build", None)
    folder = models.find("smollm2-vision").path
    assert models.find("smollm2-vision").path == folder
    monkeypatch.setenv("MMKV_CACHE", str(tmp_path / "file" / "x"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="set MMKV_CACHE to another folder"):
        smollm2_vision.assembled(lambda: None, "x")


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_accuracy_reaches_stated_shares(loaded, name):
    figure = evaluate.FIGURES[name]
    pictures, least = LEAST[name]
    right, total = evaluate.measure(*loaded, figure, pictures, first=5000)
    assert right / total >= least
