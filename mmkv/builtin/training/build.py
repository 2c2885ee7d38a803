"""Builds the untrained built-in model: tokenizer, processor, configuration and initial weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mmkv.builtin import scenes, texts

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

PAD, BOS, EOS, IMAGE = "<pad>", "<s>", "</s>", "<image>"
IMAGE_SIZE, PATCH = 96, 8
IMAGE_TOKENS = (IMAGE_SIZE // PATCH) ** 2
VOCABULARY = 1280
ROPE_THETA = 1e6
HEAD_DIM = 32

# Pictures are numbered so that "the second picture" has something to point at.
CHAT_TEMPLATE = (
    "{{- bos_token -}}{%- set ns = namespace(pictures=0) -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{- 'ASSISTANT:' -}}"
    "{%- elif message['role'] == 'system' -%}{{- 'SYSTEM:' -}}"
    "{%- else -%}{{- 'USER:' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- ' ' + message['content'] | trim -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{%- set ns.pictures = ns.pictures + 1 -%}"
    "{{- ' Picture ' ~ ns.pictures ~ ':<image>' -}}"
    "{%- elif part['type'] == 'text' -%}{{- ' ' + part['text'] | trim -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- else -%}{{- ' ' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)


def _corpus() -> list[str]:
    """Text in which every word of the tasks is frequent enough to become one token."""
    import random

    rng = random.Random("tokenizer")
    words = [f" {w}" for w in (*texts.KEYS, *texts.VALUES, *scenes.COLORS, *scenes.SHAPES)]
    words += [f" {n}" for n in (*scenes.NUMBERS, *scenes.ORDINALS)]
    words += [f" {shape}s" for shape in scenes.SHAPES] + [" crosses"]
    lines = ["USER:", "ASSISTANT:", "SYSTEM:", " Picture 1: Picture 2: Picture 3:"]
    for seed in range(60):
        scene = scenes.make_scene(seed, "train")
        lines.append(f" {scenes.describe(scene)} {scenes.describe_question('the picture', rng)}")
        for which in ("the picture", "the first picture"):
            asked = scenes.ask(scene, rng, 8, which)
            lines += [f" {question.text} {question.answer}" for question in asked]
        lines += [f" {texts.filler(rng)} {texts.phrase('key', rng)}" for _ in range(8)]
    # Task words come out whole when each is seen far more often than any fragment needs to be.
    return ["".join(words)] * 40 + lines + [word for word in words for _ in range(20)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on the words of the tasks; any text is representable."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS, IMAGE],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> LlavaProcessor:
    """The processor: the tokenizer, a Pillow image processor and the chat template."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(processor: LlavaProcessor, seed: int = 0) -> LlavaForConditionalGeneration:
    """The untrained model, its first layers set so that look-up can start."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    tokenizer = processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        projection_dim=128,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HEAD_DIM,
        attention_bias=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        _start_lookup(model)
        _start_counting(model, tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.do_sample = False
    return model.float()


def _start_lookup(model: LlavaForConditionalGeneration) -> None:
    """Write an induction circuit into the first three text layers, in place.

    Look-up by "previous token, then match, then copy" is a phase change that a small model takes
    very long to find, and then sharpens quickly. Two steps of it are written here:

    - layer 0, key-value head 0: attend to the previous token (query head 0) and the one before it
      (query head 1), and write a random projection of what was there. Constant query and key
      biases whose rotary phases meet at that distance make the attention independent of content.
    - layers 1 and 2, key-value heads 0 and 1: the query reads the token itself, the key reads
      what layer 0 wrote there, so a token attends to the places that follow its earlier copies;
      value and output copy the token found there towards the logits. Matching uses the rotary
      pairs that hardly turn within the context.
    """
    import torch

    text = model.model.language_model
    hidden, half = text.config.hidden_size, HEAD_DIM // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    slow = torch.nonzero(frequency * 1024 < 1.0).flatten()
    slow = torch.cat([slow, slow + half])

    embedding = text.embed_tokens.weight
    embedding.normal_(0, 0.2)
    model.lm_head.weight.copy_(embedding * 0.1)

    first = text.layers[0].self_attn
    fast = 5
    amplitude = torch.zeros(half)
    amplitude[:fast] = torch.tensor([8.0, 6.5, 6.5, 6.0, 6.0])
    group = slice(0, HEAD_DIM)
    first.k_proj.weight[group] = 0
    first.k_proj.bias[group] = torch.cat([amplitude, torch.zeros(half)])
    read = torch.randn(HEAD_DIM, hidden) / math.sqrt(hidden)
    first.v_proj.weight[group] = read
    writes = []
    for head, distance in ((0, 1), (1, 2)):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        # A key at distance d is turned by -d against the query: turn it back by `distance`.
        angle = distance * frequency
        first.q_proj.weight[rows] = 0
        first.q_proj.bias[rows] = torch.cat(
            [amplitude * torch.cos(angle), -amplitude * torch.sin(angle)]
        )
        write = torch.linalg.qr(torch.randn(hidden, HEAD_DIM)).Q
        first.o_proj.weight[:, rows] = 0.4 * write
        writes.append(write)

    for layer in (1, 2):
        attention = text.layers[layer].self_attn
        for head in (0, 1):
            keys = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            pick = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM)).Q[: len(slow)]
            rows = torch.zeros(HEAD_DIM, hidden)
            rows[slow] = pick @ read
            attention.k_proj.weight[keys] *= 0.25
            attention.k_proj.weight[keys][slow] += 1.3 * pick @ writes[0].T
            copy = torch.linalg.qr(torch.randn(hidden, HEAD_DIM)).Q
            attention.v_proj.weight[keys] = 0.5 * copy.T
            for query in (2 * head, 2 * head + 1):
                span = slice(query * HEAD_DIM, (query + 1) * HEAD_DIM)
                attention.q_proj.weight[span] *= 0.25
                attention.q_proj.weight[span] += 1.6 * rows
                attention.o_proj.weight[:, span] = 0.5 * copy


def _start_counting(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write a picture counter into the last key-value head of text layer 0, in place.

    Every token attends to the latest number or ordinal before it (" 2" in "Picture 2:", or
    " second") and writes which one it is, so that image tokens and questions that belong together
    carry the same mark. Keys and values are fitted to the word embeddings by least squares.
    """
    import torch

    text = model.model.language_model
    hidden, half = text.config.hidden_size, HEAD_DIM // 2
    marks = [tokenizer.encode(w)[-1] for w in (" 1", " 2", " 3", " first", " second", " third")]
    embedding = text.layers[0].input_layernorm(text.embed_tokens.weight)
    inputs = torch.cat([embedding, torch.ones(len(embedding), 1)], dim=1)
    wanted = torch.zeros(len(embedding), 4)  # is it a mark; is it 1, 2 or 3
    weight = torch.ones(len(embedding), 1)
    for i, token in enumerate(marks):
        wanted[token, [0, 1 + i % 3]] = 1.0
        weight[token] = 200.0
    gram = inputs.T @ (weight * inputs) + 1e-3 * torch.eye(hidden + 1)
    fit = torch.linalg.solve(gram, inputs.T @ (weight * wanted))

    attention = text.layers[0].self_attn
    head = text.config.num_key_value_heads - 1
    keys = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    queries = slice(2 * head * HEAD_DIM, (2 * head + 1) * HEAD_DIM)
    both = slice(2 * head * HEAD_DIM, (2 * head + 2) * HEAD_DIM)
    # Slow rotary pairs make a mark score 60 at any distance; pair 7, a quarter turn ahead, takes
    # up to 30 off with the distance, so that the latest mark wins.
    key, query = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
    key[12:16], key[7] = 3.0, 6.0
    query[12:16], query[half + 7] = 60 * HEAD_DIM**0.5 / 12, 30 * HEAD_DIM**0.5 / 6
    attention.q_proj.weight[queries] = 0
    attention.q_proj.bias[queries] = query
    attention.k_proj.weight[keys] = key[:, None] * fit[:hidden, 0]
    attention.k_proj.bias[keys] = key * fit[hidden, 0]
    attention.v_proj.weight[keys] = 0
    attention.v_proj.weight[keys][:3] = fit[:hidden, 1:].T
    attention.v_proj.bias[keys][:3] = fit[hidden, 1:]
    attention.o_proj.weight[:, both] = 0
    write = torch.linalg.qr(torch.randn(hidden, 3)).Q
    attention.o_proj.weight[:, queries][:, :3] = 2.0 * write
