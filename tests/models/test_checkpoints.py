"""Original LLaVA checkpoints: a tiny one in that layout gives the logits of the same weights."""

import json

import pytest
import torch
from PIL import Image

import mmkv
from helpers import zoo
from helpers.checkpoints import TOWER
from helpers.marks import cases
from mmkv.loading import checkpoints


@cases("shards", [1, 3], 3)
@pytest.mark.parametrize("tower", ["inside", TOWER, "elsewhere"])
def test_loaded_logits_equal_same_weights(native, write, tower, shards):
    folder = write(shards, tower)
    given = {"vision_tower": folder.parent / tower} if tower == "elsewhere" else {}
    model, processor = mmkv.load(folder, **given)
    inputs = zoo.prompt(native, (60, 40))
    with torch.no_grad():
        expected = native(**inputs).logits
        ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == zoo.IMAGE, zoo.VOCAB)
        logits = model(**{**inputs, "input_ids": ids}).logits
    assert model.config.image_token_id == zoo.VOCAB == processor.image_token_id
    assert model.config.text_config.vocab_size == logits.shape[-1] == 128
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[valid][:, : zoo.VOCAB], expected[valid])
    assert not model.training
    assert model.dtype == torch.float32


def test_a_loaded_model_answers_about_a_picture(write):
    model, processor = mmkv.load(write())
    picture = Image.new("RGB", (40, 20), "red")
    content = [{"type": "text", "text": "w1 w2 w3"}, {"type": "image"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    assert text.endswith("USER: <image> \nw1 w2 w3 ASSISTANT:")
    assert text.startswith("<s> A chat between")
    inputs = processor(images=[picture], text=[text], return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 16
    # Bars above and below: the picture is padded to a square, not cut.
    mean = processor.image_processor.image_mean
    assert inputs["pixel_values"][0, :, 0, 8].abs().max() < 0.02, mean
    with mmkv.wrapped(model, "snapkv", 0.5, window=4):
        out = model.generate(
            **inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
    assert out.past_key_values.report().kept_fraction < 0.6
    assert int(out.sequences[0, -3:].max()) < zoo.VOCAB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_projector_type": "linear"}, "mm_projector_type='linear'"),
        ({"model_type": "llava_mpt"}, "model_type='llava_mpt'"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end"),
        ({"image_aspect_ratio": "anyres"}, "LLaVA-1.6"),
        ({"mm_vision_select_feature": "mean"}, "mm_vision_select_feature='mean'"),
        ({"torch_dtype": "load"}, "torch_dtype='load'"),
        ({"vocab_size": ...}, "has no mm_vision_tower and vocab_size"),
        ({"num_hidden_layers": 4}, "do not fit"),
        ({"intermediate_size": 95}, "do not fit"),
    ],
)
def test_unsupported_config_raises(write, changes, message):
    folder = write(**{k: v for k, v in changes.items() if v is not ...})
    if ... in changes.values():
        config = json.loads((folder / "config.json").read_text())
        left = {k: v for k, v in config.items() if k not in changes}
        (folder / "config.json").write_text(json.dumps(left))
    with pytest.raises(ValueError, match=message):
        mmkv.load(folder)


def test_pickled_checkpoint_raises(write):
    folder = write()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ValueError, match=r"pytorch_model-00001.*pickle.*convert"):
        mmkv.load(folder)


def test_sentencepiece_without_package_names_extra(write, monkeypatch):
    folder = write()
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'mmkv\[llava\]'"):
        mmkv.load(folder)


def test_a_picture_is_followed_by_a_space(write, tmp_path):
    """The original encodes the text around pictures piece by piece; so does the chat template."""
    spm = pytest.importorskip("sentencepiece", reason="pip install 'mmkv[llava]'")
    folder = write()
    (folder / "tokenizer.json").unlink()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("USER: what is in this picture ? ASSISTANT: a cat on a mat\n" * 50)
    spm.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model, processor = mmkv.load(folder)
    content = [{"type": "image"}, {"type": "text", "text": "what is this ?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    piece = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    before = text.removeprefix("<s> ").split("<image>")[0]
    after = "\nwhat is this ? ASSISTANT:"
    image = model.config.image_token_id
    expected = [1, *piece.encode(before), image, *piece.encode(after)]
    assert processor.tokenizer(text, add_special_tokens=False).input_ids == expected


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/x.safetensors", "x.bin"])
def test_index_outside_folder_raises(write, name):
    folder = write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="is not a safetensors file of this folder"):
        mmkv.load(folder)


def test_missing_part_raises(write, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        mmkv.load(tmp_path / "nothing")
    folder = write(tower="elsewhere")
    with pytest.raises(ValueError, match="does not hold its vision tower 'openai/clip-tiny'"):
        mmkv.load(folder)
    with pytest.raises(ValueError, match=r"no folder with a config\.json"):
        mmkv.load(folder, vision_tower=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "side"), [("clip-vit-large-patch14-336", 336), ("clip-vit-large-patch14", 224)]
)
def test_a_known_tower_has_the_sizes_of_clip_large(name, side):
    """They are defaults of transformers' LLaVA, and must stay those of OpenAI's checkpoints."""
    fields = {"model_type": "llava", "mm_vision_tower": f"openai/{name}"}
    tower = checkpoints._config(fields, None, rows=64, image=1, pad=2).vision_config
    assert (tower.hidden_size, tower.intermediate_size, tower.num_hidden_layers) == (1024, 4096, 24)
    assert (tower.num_attention_heads, tower.patch_size, tower.projection_dim) == (16, 14, 768)
    assert (tower.model_type, tower.image_size) == ("clip_vision_model", side)
