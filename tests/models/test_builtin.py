"""The built-in model: its data, its processor, its weights and what it can do."""

import json
import random

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from mmkv.builtin import WEIGHTS, example_pictures, load_builtin, scenes, texts
from mmkv.builtin.training import evaluate
from mmkv.builtin.training.evaluate import encode

SCENE = scenes.Scene(
    objects=(
        scenes.Object(color="red", name="circle", place="top left"),
        scenes.Object(color="orange", name="star", place="center"),
        scenes.Object(color="blue", name="cross", place="bottom center"),
    )
)


@pytest.fixture(scope="module")
def builtin():
    return load_builtin()


@pytest.fixture(scope="module")
def processor(builtin):
    return builtin[1]


def test_no_heldout_scene_is_a_training_scene():
    content = {
        split: {
            tuple((o.color, o.name, o.place) for o in scenes.make_scene(i, split, 2).objects)
            for i in range(2000)
        }
        for split in ("train", "heldout")
    }
    assert not content["train"] & content["heldout"]


def test_a_scene_holds_distinct_objects_in_distinct_places_in_reading_order():
    for seed in range(50):
        objects = scenes.make_scene(seed).objects
        places = [scenes.PLACES.index(o.place) for o in objects]
        assert places == sorted(set(places))
        assert len({(o.color, o.name) for o in objects}) == len(objects)
        assert 2 <= len(objects) <= 6


@pytest.mark.parametrize("count", [0, 10])
def test_a_count_that_does_not_fit_the_grid_is_refused(count):
    with pytest.raises(ValueError, match=str(count)):
        scenes.make_scene(0, count=count)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (scenes.describe(SCENE), (3, 3)),
        ("A red circle is at the top left.", (1, 3)),
        ("A blue circle is at the top left. An orange star is at the center", (1, 3)),
        ("A red circle is at the top left. A red circle is at the top left.", (1, 3)),
        ("An orange star is at the top center.", (0, 3)),
        (scenes.describe(SCENE) + " A white ring is at the top right.", (3, 4)),
        ("", (0, 3)),
    ],
)
def test_descriptions_are_scored(text, score):
    assert scenes.score_description(text, SCENE) == score


def test_short_questions_have_answers_that_hold():
    answers = {
        "What is at the center?": "An orange star is at the center.",
        "Where is the blue cross?": "The blue cross is at the bottom center.",
        "How many objects are in the picture?": "There are three objects in the picture.",
        "How many crosses are in the picture?": "There is one cross in the picture.",
        "How many red objects are in the picture?": "There is one red object in the picture.",
    }
    rng = random.Random(0)
    asked = {x.text: x.answer for x in (scenes.ask(SCENE, rng) for _ in range(200))}
    assert {text: asked.get(text) for text in answers} == answers


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_texts_have_the_length_asked_for(processor, tokens):
    for seed in range(5):
        text = texts.make_lookup(seed, tokens).text
        length = len(processor.tokenizer.encode(f" {text}", add_special_tokens=False))
        assert tokens - 20 < length <= tokens
        assert length == texts.estimate(text)


def test_answers_to_lookups_are_scored_by_the_value():
    question = scenes.Question(text="What is the value of amber?", answer="amber ring.")
    assert texts.score_answer(" amber ring.", question)
    assert texts.score_answer("ring", question)
    assert not texts.score_answer("amber lamp.", question)
    assert not texts.score_answer("lamp ring", scenes.Question(text="", answer="amber lamp."))
    assert not texts.score_answer("", question)


def test_the_words_of_the_tasks_are_single_tokens(processor):
    for word in (*texts.KEYS, *texts.VALUES, *scenes.COLORS, *scenes.SHAPES, *scenes.NUMBERS):
        assert len(processor.tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word


@pytest.mark.parametrize("text", ["Grüße, 漢字 🎉", "x = {1: 'a'}\n\t", "", "<s> not closed"])
def test_any_text_survives_the_tokenizer(processor, text):
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    assert processor.tokenizer.decode(ids) == text


def test_each_picture_takes_144_tokens_and_pictures_are_numbered(processor):
    pictures = [scenes.draw(SCENE, size) for size in (96, 384)]
    inputs = encode(processor, evaluate.user("Describe the second picture.", *pictures))
    ids = inputs["input_ids"][0]
    assert int((ids == processor.image_token_id).sum()) == 2 * 144
    assert inputs["pixel_values"].shape == (2, 3, 96, 96)
    text = processor.tokenizer.decode(ids).replace("<image>" * 144, "<image>")
    assert text == (
        "<s>USER: Picture 1:<image> Picture 2:<image> Describe the second picture. ASSISTANT:"
    )


def test_the_shipped_weights_are_a_small_grouped_query_llava_in_bfloat16():
    path = WEIGHTS / "model.safetensors"
    assert path.stat().st_size <= 12_000_000
    with safe_open(path, "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}
    config = json.loads((WEIGHTS / "config.json").read_text())
    text = config["text_config"]
    assert text["num_attention_heads"] > text["num_key_value_heads"]
    assert text["max_position_embeddings"] >= 2048


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n", "least"),
    [("objects described", 12, 0.8), ("values looked up, 256 tokens", 20, 0.9)],
)
def test_what_the_shipped_model_can_do(builtin, name, n, least):
    right, total = evaluate.measure(*builtin, evaluate.FIGURES["builtin"][name], n)
    assert right / total >= least


def test_example_pictures_are_heldout_scenes():
    paths = example_pictures()
    assert len(paths) == 4
    for seed, path in enumerate(paths):
        picture = Image.open(path)
        drawn = scenes.draw(scenes.make_scene(seed, count=seed + 3))
        difference = np.abs(np.asarray(picture, float) - np.asarray(drawn, float))
        assert picture.size == (384, 384)
        assert difference.mean() < 2  # they differ in the smoothing of edges alone
