"""Tiny random models of every supported class, and prompts for them."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import mmkv
from helpers.configs import CONFIGS, IMAGE, PAD, VIDEO, VOCAB


def usual_attention(name: str) -> str:
    """The attention implementation that a model would be loaded with."""
    text = CONFIGS[name]().get_text_config()
    return "eager" if getattr(text, "attn_logit_softcapping", 0) else "sdpa"


def make(name: str, attn: str | None = None) -> nn.Module:
    """A tiny model, with the attention implementation it would be loaded with."""
    model = build(name, CONFIGS[name](), attn or usual_attention(name))
    # A reply with an image token would stand for a picture that nobody gave.
    model.generation_config.suppress_tokens = list(range(1, 8))
    return model


def build(name: str, config: Any, attn: str) -> nn.Module:
    """A random model of a class, by the name that `CONFIGS` has for it."""
    torch.manual_seed(0)
    config._attn_implementation = attn
    model = getattr(tf, name.partition(":")[0])(config)
    model.generation_config.eos_token_id = None  # every run gives as many tokens as asked for
    model.generation_config.pad_token_id = PAD
    return model.eval()


# Text stands between the frames of a video.
_FRAMES_APART = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")


def has_grids(model: nn.Module) -> bool:
    """Whether a model is told the grid of each picture, from which positions follow."""
    config = model.config
    return hasattr(config, "vision_config") and config.model_type.startswith(("qwen", "glm"))


@dataclass
class _Picture:
    """What stands for one picture or video in the ids, and what goes to the vision tower."""

    token: int
    count: int
    inputs: dict[str, Tensor]
    runs: int = 1  # text stands between the frames of a video (Qwen3-VL)


def _picture(model: nn.Module, n: int, g: torch.Generator) -> _Picture | None:
    """The n-th picture of a prompt, in the form its model wants."""
    kind = model.config.model_type
    if not hasattr(model.config, "vision_config"):
        return None
    if has_grids(model):
        t, h, w = [(1, 8, 8), (1, 4, 12), (2, 8, 4)][n % 3]
        film = t > 1 and not kind.startswith("glm")  # whose videos have a picture's tokens
        t = 2 if film else 1
        pixels = torch.randn(t * h * w, 3 * 2 * 4 * 4, generator=g)
        grid = torch.tensor([[t, h, w]])
        if film:
            inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid}
            return _Picture(VIDEO, t * h * w // 4, inputs, t if kind in _FRAMES_APART else 1)
        return _Picture(IMAGE, t * h * w // 4, {"pixel_values": pixels, "image_grid_thw": grid})
    if kind in ("llava_next", "llava_onevision"):
        if kind == "llava_onevision" and n % 3 == 2:
            frames = torch.randn(1, 5, 3, 16, 16, generator=g)
            return _Picture(VIDEO, 5 * 4 + 1, {"pixel_values_videos": frames})
        # One whole view and two tiles: 16 + 4 rows of 8 and a newline each.
        inputs = {
            "pixel_values": torch.randn(1, 3, 3, 16, 16, generator=g),
            "image_sizes": torch.tensor([[16, 32]]),
        }
        return _Picture(IMAGE, 16 + 4 * 9, inputs)
    if kind == "gemma4":
        # Patches of 4 x 4 pixels, pooled 2 by 2.
        pixels = torch.rand(1, 64, 3 * 4 * 4, generator=g)
        at = torch.cartesian_prod(torch.arange(8), torch.arange(8))[None]
        return _Picture(IMAGE, 16, {"pixel_values": pixels, "image_position_ids": at})
    if kind == "mistral3":
        # Patches of 4, merged 2 by 2.
        h, w = [(32, 32), (16, 24)][n % 2]
        pixels = torch.zeros(1, 3, 32, 32)
        pixels[..., :h, :w] = torch.randn(1, 3, h, w, generator=g)
        sizes = torch.tensor([[h, w]])
        return _Picture(IMAGE, h * w // 64, {"pixel_values": pixels, "image_sizes": sizes})
    side = model.config.vision_config.image_size
    side = side if isinstance(side, int) else side[0]
    return _Picture(IMAGE, 16, {"pixel_values": torch.randn(1, 3, side, side, generator=g)})


def prompt(
    model: nn.Module, lengths: tuple[int, ...], seed: int = 0, pictures: int = 2
) -> dict[str, Tensor]:
    """A left-padded batch of these lengths; rows hold 1, 2, ... pictures at most `pictures`."""
    g = torch.Generator().manual_seed(seed)
    N = max(lengths)
    ids = torch.full((len(lengths), N), PAD)
    mask = torch.zeros(len(lengths), N, dtype=torch.long)
    found: list[list[_Picture]] = []
    for b, n in enumerate(lengths):
        ids[b, N - n :] = torch.randint(8, VOCAB, (n,), generator=g)
        mask[b, N - n :] = 1
        at, row = N - n + 3, []
        for _ in range(min(pictures, 2 if n > 80 else 1)):
            one = _picture(model, sum(map(len, found)) + len(row), g)
            if one is None or at + one.count + 4 * one.runs + 4 > N:
                break
            for _ in range(one.runs):
                ids[b, at : at + one.count // one.runs] = one.token
                at += one.count // one.runs + 4
            row.append(one)
        found.append(row)
    inputs = {"input_ids": ids, "attention_mask": mask}
    for key in dict.fromkeys(k for row in found for p in row for k in p.inputs):
        inputs[key] = torch.cat([p.inputs[key] for row in found for p in row if key in p.inputs])
    if model.config.model_type in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = _by_row(found)
    return {**inputs, **_kinds(model, ids)}


def _by_row(found: list[list[_Picture]]) -> Tensor:
    """Pixels [B, pictures, 3, H, W]; zeros where a row has fewer pictures."""
    rows = [torch.cat([p.inputs["pixel_values"] for p in row]) for row in found]
    most = max(map(len, rows))
    return torch.stack([torch.cat([x, x.new_zeros(most - len(x), *x[0].shape)]) for x in rows])


def _kinds(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """What each token is, for models that want to be told."""
    kind = model.config.model_type
    if has_grids(model):
        return {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    if kind == "gemma4":
        return {"mm_token_type_ids": (ids == IMAGE).long()}
    if kind == "gemma3":
        return {"token_type_ids": (ids == IMAGE).long()}
    if kind == "paligemma":
        return {"token_type_ids": torch.zeros_like(ids)}
    return {}


def next_turn(
    model: nn.Module, inputs: dict[str, Tensor], words: Tensor, picture: bool, seed: int = 5
) -> dict[str, Any]:
    """The conversation of one row so far, with new text and perhaps one new picture."""
    g = torch.Generator().manual_seed(seed)
    one = _picture(model, 2, g) if picture else None
    new = torch.randint(8, VOCAB, (1, 20 if one is None else 30 + one.count), generator=g)
    ids = torch.cat([inputs["input_ids"], words, new], dim=1)
    at = ids.shape[1] - new.shape[1] + 4
    more: dict[str, Any] = {}
    if one is not None:
        for _ in range(one.runs):
            ids[:, at : at + one.count // one.runs] = one.token
            at += one.count // one.runs + 4
        more = dict(one.inputs)
    kind = model.config.model_type
    if has_grids(model):
        # Positions need the grids of every turn, the tower only this turn's pixels.
        for what, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels in more:
                encode, grid = getattr(model, f"get_{what}_features"), more[f"{what}_grid_thw"]
                found = encode(more.pop(pixels), grid, return_dict=True)
                more["mm_encoder_outputs"] = {what: found}
        for k, old in inputs.items():
            if k.endswith("grid_thw"):
                more[k] = torch.cat([old, more[k]]) if k in more else old
    if kind in ("idefics3", "smolvlm") and "pixel_values" in more:
        more["pixel_values"] = more["pixel_values"][None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more, **_kinds(model, ids)}


SUPPORTED = [row["class"] for row in mmkv.adapters.table() if row["status"] == "supported"]
NAMES = [name for name in CONFIGS if name.partition(":")[0] in SUPPORTED]
# For what is a decoder's own: without pictures before a decoder that has a class of its own.
_SHELLS = ("Llava", "InternVL", "Idefics3", "SmolVLM", "PaliGemma")
OWN_DECODER = [name for name in NAMES if not name.startswith(_SHELLS)]
SHELLS = [name for name in NAMES if name not in OWN_DECODER]
# Every decoder, and one in three of the classes around another's decoder.
EVERY_DECODER = [*OWN_DECODER, *SHELLS[::3]]
# For `make test`: rotary and learned positions, sliding layers, pictures in the text and in a grid.
FEW = (
    "LlamaForCausalLM",
    "OPTForCausalLM",
    "Gemma3ForCausalLM",
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)


@functools.cache
def model_of(name: str) -> torch.nn.Module:
    return make(name)


def inputs_of(model, rows: str, seed: int = 0) -> dict[str, torch.Tensor]:
    wide = model.config.model_type in ("llava_next", "llava_onevision")  # 52 tokens a picture
    lengths = {"one": (132 if wide else 90,), "padded": (132, 81) if wide else (88, 47)}
    return prompt(model, lengths[rows], seed)
