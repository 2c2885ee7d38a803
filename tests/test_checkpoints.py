"""Original LLaVA checkpoints: a tiny one in that layout gives the logits of the same weights."""

from __future__ import annotations

import json

import pytest
import torch
import zoo
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mmkv

NAME = "LlavaForConditionalGeneration"
TOWER = "clip-tiny"


def original(name: str) -> str:
    """The name an original checkpoint gives to one of transformers' weights."""
    for ours, theirs in {
        "model.language_model.": "model.",
        "model.vision_tower.": "model.vision_tower.vision_tower.vision_model.",
        "model.multi_modal_projector.linear_1.": "model.mm_projector.0.",
        "model.multi_modal_projector.linear_2.": "model.mm_projector.2.",
    }.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours).removeprefix("vision_model.")
    return name


@pytest.fixture(scope="module")
def native():
    return zoo.make(NAME)


@pytest.fixture
def write(native, tmp_path):
    """Writes the native model as an original checkpoint; returns its folder."""

    def make(shards: int = 1, tower: str = "inside", **changes):
        folder = tmp_path / "llava-tiny"
        folder.mkdir()
        weights = {original(k): v.clone() for k, v in native.state_dict().items()}
        text = native.config.text_config.to_dict()
        config = {k: text[k] for k in ("rms_norm_eps", "hidden_act") if k in text}
        config |= {k: v for k, v in zoo.TEXT.items() if k != "pad_token_id"}
        config |= {
            "_name_or_path": "../../somewhere",
            "architectures": ["LlavaLlamaForCausalLM"],
            "auto_map": {"AutoModel": "code.Evil"},
            "model_type": "llava_llama",
            "mm_vision_tower": f"openai/{TOWER}",
            "mm_hidden_size": 32,
            "mm_vision_select_layer": -1,
            "mm_vision_select_feature": "patch",
            "mm_projector_type": "mlp2x_gelu",
            "image_aspect_ratio": "pad",
            "torch_dtype": "float32",
            "use_mm_proj": True,
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(config))
        clip = folder / TOWER if tower == "inside" else folder.parent / tower
        clip.mkdir()
        vision = native.config.vision_config.to_dict()
        (clip / "config.json").write_text(json.dumps({"vision_config": vision}))
        if tower != "inside":
            own = "model.vision_tower.vision_tower."
            held = {k: weights.pop(k) for k in list(weights) if k.startswith(own)}
            held = {k.removeprefix(own): v for k, v in held.items()}
            save_file({**held, "text_model.x": torch.zeros(1)}, clip / "model.safetensors")
        names = sorted(weights)
        if shards == 1:
            save_file(weights, folder / "model.safetensors")
        else:
            parts = {f"model-{i}.safetensors": names[i::shards] for i in range(shards)}
            for file, part in parts.items():
                save_file({k: weights[k] for k in part}, folder / file)
            index = {k: file for file, part in parts.items() for k in part}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(zoo.VOCAB - 3))]
        raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        ).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tower", ["inside", TOWER, "elsewhere"])
def test_logits_are_those_of_the_same_weights(native, write, tower, shards):
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
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 4}, "do not fit"),
        ({"intermediate_size": 95}, "do not fit"),
    ],
)
def test_what_differs_is_refused(write, changes, message):
    folder = write(**changes)
    if changes.get("vocab_size", 1) is None:
        config = json.loads((folder / "config.json").read_text())
        del config["vocab_size"]
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        mmkv.load(folder)


def test_weights_load_through_safetensors_only(write):
    folder = write()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ValueError, match=r"pytorch_model-00001.*pickle.*convert"):
        mmkv.load(folder)


def test_a_sentencepiece_tokenizer_says_what_it_needs(write, monkeypatch):
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
def test_an_index_cannot_leave_its_folder(write, name):
    folder = write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="is not a safetensors file of this folder"):
        mmkv.load(folder)


def test_a_missing_part_is_named(write, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        mmkv.load(tmp_path / "nothing")
    folder = write(tower="elsewhere")
    with pytest.raises(ValueError, match="does not hold its vision tower 'openai/clip-tiny'"):
        mmkv.load(folder)
    with pytest.raises(ValueError, match=r"no folder with a config\.json"):
        mmkv.load(folder, vision_tower=tmp_path / "nowhere")
