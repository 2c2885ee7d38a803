"""A tiny random LLaVA with the processor and chat template of a real one."""

from functools import cache
from typing import Any

import torch

from mmkv.chat import Loaded

# As LLaVA's: the template writes the marks of a text's beginning and of an answer's end.
TEMPLATE = (
    "{{- bos_token -}}{%- set seen = namespace(pictures=0) -%}"
    "{%- for m in messages -%}{{- m['role'] | upper ~ ':' -}}"
    "{%- set blank = '' if m['role'] == 'assistant' else ' ' -%}"
    "{%- if m['content'] is string -%}{{- blank ~ m['content'] | trim -}}{%- else -%}"
    "{%- for part in m['content'] -%}{%- if part['type'] == 'image' -%}"
    "{%- set seen.pictures = seen.pictures + 1 -%}"
    "{{- ' Picture ' ~ seen.pictures ~ ':<image>' -}}"
    "{%- else -%}{{- blank ~ part['text'] | trim -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- blank or eos_token -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)
SIDE, PATCH, LAYERS, HEADS, HEAD_DIM = 48, 4, 3, 2, 8
PATCHES = (SIDE // PATCH) ** 2
MARKS = ["<pad>", "<s>", "</s>", "<image>"]


def make_processor() -> Any:
    """A LLaVA's processor, whose tokenizer has a token for each byte."""
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({x: i for i, x in enumerate([*MARKS, *letters])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    pad, bos, eos, image = MARKS
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        extra_special_tokens=[image],
        padding_side="left",
    )
    size = {"height": SIDE, "width": SIDE}
    return hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token=image,
        chat_template=TEMPLATE,
    )


def make_picture_chat() -> tuple[Any, Any]:
    """A model of 144 tokens a picture, which says small letters alone, and its processor."""
    import transformers as hf

    processor = make_processor()
    tokenizer = processor.tokenizer
    text = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        initializer_range=0.6,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    tower = hf.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=16,
    )
    torch.manual_seed(0)
    config = hf.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=MARKS.index("<image>"),
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    model = hf.LlavaForConditionalGeneration(config).eval()
    said = set(map(tokenizer.convert_tokens_to_ids, "abcdefghijklmnopqrstuvwxyz"))
    silent = [i for i in range(len(tokenizer)) if i not in said]
    model.generation_config = hf.GenerationConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=2, suppress_tokens=silent
    )
    return model, processor


@cache
def picture_chat() -> Loaded:
    """One of a process; tests must leave its model unwrapped."""
    return Loaded("tiny", *make_picture_chat())
