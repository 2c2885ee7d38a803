"""Which patches are kept, and the PNG that shows it."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor

import mmkv
from helpers.marks import cases
from helpers.models import IMAGE, make_inputs
from helpers.oracle import prefilled, short
from mmkv import picture
from mmkv.builtin import example_pictures


@pytest.mark.parametrize("size", [(40, 3), (7, 41), (30, 30), (333, 20)])
def test_predicted_size_equals_image_processor(monkeypatch, size):
    monkeypatch.setattr(picture, "_MAX_PIXELS", 0)
    shown = Image.new("RGB", size)
    grows = CLIPImageProcessor(size={"shortest_edge": 18}, do_center_crop=False)
    bounded = CLIPImageProcessor(size={"height": 18, "width": 18}, do_center_crop=False)
    made = grows(shown, return_tensors="pt")["pixel_values"].shape
    with pytest.raises(ValueError, match=rf"would scale to {made[3]} x {made[2]}:"):
        picture.check_size(shown, grows)
    picture.check_size(shown, bounded)


@pytest.mark.parametrize("size", [(2000, 1), (1, 2000), (60000, 100)])
def test_a_picture_of_extreme_shape_is_refused(size):
    """Nothing of that size is made: scaled, 2000 x 1 pixels would take gigabytes."""
    processor = CLIPImageProcessor()  # the shorter side to 224, then a square of it
    with pytest.raises(ValueError, match=rf"{size[0]} x {size[1]} pixels.* 224"):
        picture.check_size(Image.new("RGB", size), processor)
    picture.check_size(Image.new("RGB", (2000, 10)), processor)


def naive(kept, weights, group, image, pictures):
    """Patch by patch, head by head."""
    places = [i for i, is_image in enumerate(image.tolist()) if is_image]
    side = int((len(places) / pictures) ** 0.5)
    shares = np.zeros((pictures, side, side))
    for n, place in enumerate(places):
        p, r, c = n // side**2, n // side % side, n % side
        for head in range(len(kept)):
            found = 1.0 if place in kept[head].tolist() else 0.0
            if (g := int(group[head, place])) >= 0:
                assert found == 0
                found = 1 / int(weights[head, g])
            shares[p, r, c] += found / len(kept)
    return shares


@pytest.mark.parametrize("policy", ["prefixkv", "adakv", "streaming", "condense"])
def test_shares_match_the_naive_twin(models, policy):
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (90, 41))
    cache = prefilled(model, inputs, policy, 0.3, **short(policy))
    for row, pictures in enumerate((2, 1)):
        image = inputs["input_ids"][row] == IMAGE
        for layer in range(len(cache.layers)):
            weights, group = (x[row] for x in cache.groups(layer))
            shares = picture.kept_patches(cache.shares(layer)[row], image, pictures)
            assert shares.shape == (pictures, 4, 4)
            want = naive(cache.kept(layer)[row], weights, group, image, pictures)
            np.testing.assert_allclose(shares, want, atol=1e-6)


@pytest.mark.parametrize("policy", ["adakv", "h2o", "condense"])
def test_shares_of_all_tokens_add_up_to_the_pairs_held(models, policy):
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (90, 41))
    with mmkv.wrapped(model, policy, 0.3, **short(policy)):
        out = model.generate(**inputs, max_new_tokens=5, return_dict_in_generate=True)
    cache = out.past_key_values
    for layer, held in enumerate(cache.report().layers):
        shares = cache.shares(layer)
        assert shares.shape[-1] == cache.get_seq_length() == 94
        np.testing.assert_allclose(shares.sum(-1), held.kept, atol=1e-4)
        assert not shares[1, :, :49].any(), "padding"


@pytest.mark.parametrize(("tokens", "pictures"), [(144, 0), (0, 1), (145, 1), (577, 1), (50, 3)])
def test_an_unknown_grid_is_named(tokens, pictures):
    with pytest.raises(ValueError, match=f"grid is not known: {tokens} image tokens of {pictures}"):
        picture.kept_patches(torch.zeros(1, tokens), torch.ones(tokens), pictures)
    for tokens, pictures, side in ((576, 1, 24), (288, 2, 12)):
        shares = picture.kept_patches(torch.zeros(1, tokens), torch.ones(tokens), pictures)
        assert shares.shape == (pictures, side, side)


class Processor:
    image_mean, image_std = [0.5, 0.4, 0.3], [0.5, 0.6, 0.7]


def pixels_of(image: Image.Image) -> np.ndarray:
    x = np.asarray(image, dtype=np.float64).transpose(2, 0, 1) / 255
    return (x - np.reshape(Processor.image_mean, (3, 1, 1))) / np.reshape(
        Processor.image_std, (3, 1, 1)
    )


def test_as_seen_equals_model_input():
    original = Image.open(example_pictures()[0]).convert("RGB").resize((300, 200))
    stretched = original.resize((96, 96), Image.Resampling.BICUBIC)
    cropped = original.crop((50, 0, 250, 200))
    small = cropped.resize((96, 96), Image.Resampling.BICUBIC)
    turned = small.transpose(Image.Transpose.ROTATE_90)
    for seen, sharp in ((stretched, original), (small, cropped)):
        shown = picture.as_seen(original, pixels_of(seen), Processor)
        assert shown.size == (256, 256)
        np.testing.assert_allclose(np.asarray(shown), np.asarray(sharp.resize((256, 256))), atol=1)
    shown = picture.as_seen(original, pixels_of(turned), Processor)  # nothing that we know of
    np.testing.assert_allclose(np.asarray(shown), np.asarray(turned), atol=1)


def test_evicted_patches_are_darker(tmp_path):
    white = Image.new("RGB", (80, 80), "white")
    shares = np.zeros((4, 4), dtype=np.float32)
    shares[0] = 1
    shares[1] = 0.5
    lit = picture._lit(white, shares).mean(axis=(1, 2))
    assert lit[0] == 255
    assert lit[0] > lit[30] > lit[70]
    assert len(set(lit[40:])) == 1


@cases("layers", [1, 8, 32], 8)
def test_figure_is_written_as_png(tmp_path, layers):
    path = tmp_path / "new" / "kept.png"
    shares = np.random.default_rng(0).random((layers, 6, 6)).round().astype(np.float32)
    picture.save(path, Image.new("RGB", (60, 60), "gray"), list(enumerate(shares)), "title")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width < 2600
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 50


def test_no_compressed_layer_raises(tmp_path):
    with pytest.raises(ValueError, match="no compressed layer"):
        picture.save(tmp_path / "x.png", Image.new("RGB", (60, 60)), [], "title")
