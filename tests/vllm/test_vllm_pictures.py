"""A LLaVA of the shape of smollm2-vision, with one to three pictures, next to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

from PIL import Image
from vllm.model_executor.models import llava as llava_of_vllm
from vllm.model_executor.models.utils import maybe_prefix as join
from vllm_engines import BLOCK, VOCAB, sampling
from vllm_reference import NAME, Reference, condense

from mmkv.loading.smollm2_vision import IMAGE_TOKENS, SIDE, build, save
from mmkv.vllm import backend

TEXTS = (
    "w5 w9 <image> w40 w41 w42",
    "w7 <image> w50 w51 <image> w60 w61 w62 w63",
    "<image> <image> w80 w81 <image> w90 w91",
)


@pytest.fixture(scope="module")
def llava(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Llama with an untrained tower of pictures."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<filename>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<filename>"]})
    model, processor = build(LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32), fast)
    projector = model.model.multi_modal_projector.linear_2
    torch.nn.init.normal_(projector.weight, std=0.3)  # pictures count as much as words
    folder = tmp_path_factory.mktemp("models") / "llava"
    save(model, processor, folder)
    return folder


def pictures(number: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (number, SIDE // 32, SIDE // 32, 3), generator=generator)
    images = (Image.fromarray(x.to(torch.uint8).numpy()) for x in pixels)
    return [x.resize((SIDE, SIDE), Image.Resampling.NEAREST) for x in images]


@pytest.mark.parametrize("size", [{"budget": 0.3}, {"memory": 0.08}], ids=["budget", "memory"])
def test_prompts_with_pictures_equal_transformers(
    start: Any, llava: Path, monkeypatch: pytest.MonkeyPatch, size: dict[str, float]
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    asked = [(text, pictures(text.count("<image>"), i)) for i, text in enumerate(TEXTS)]
    asked.append((TEXTS[0], pictures(1, 7)))
    marks, compress = list[torch.Tensor](), backend.compress

    def noting(prompt: Any, *args: Any) -> Any:
        marks.append(prompt.image)
        return compress(prompt, *args)

    monkeypatch.setattr(backend, "compress", noting)
    # In some of vLLM's models a layer's name is no path of modules, as kanana_v's `model` here.
    names = {"language_model": "model"}
    monkeypatch.setattr(llava_of_vllm, "maybe_prefix", lambda a, b: join(a, names.get(b, b)))
    requests = [{"prompt": x, "multi_modal_data": {"image": images}} for x, images in asked]
    with start(size, model=str(llava), limit_mm_per_prompt={"image": 3}) as engine:
        done = engine.llm.generate(requests, sampling(12), use_tqdm=False)
        found = [list(x.outputs[0].token_ids) for x in done]
        assert engine.all_free
        shares, codes = engine.shares, engine.codes
    model = AutoModelForImageTextToText.from_pretrained(
        llava,
        dtype=torch.float32,
        attn_implementation={"text_config": NAME, "vision_config": "sdpa"},
    ).eval()
    processor = AutoProcessor.from_pretrained(llava)
    sizes: Any = {"least": 64, "always": 2, "block": BLOCK, "codes": codes}
    expected = Reference(model, shares, condense, **sizes)
    for (text, images), reply, request in zip(asked, found, done, strict=True):
        inputs = dict(processor(images=images, text=text, return_tensors="pt"))
        ids = inputs.pop("input_ids")[0].tolist()
        del inputs["attention_mask"]
        assert request.prompt_token_ids == ids
        assert ids.count(VOCAB - 1) == len(images) * IMAGE_TOKENS
        assert reply == expected.generate(ids, 12, **inputs)
        assert any(x.tolist() == [token == VOCAB - 1 for token in ids] for x in marks)
    assert found[0] != found[3]  # the pictures matter
