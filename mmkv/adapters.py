"""Where a model keeps what we need. The only module that knows one model from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Top-level classes, and the decoders they may hold (by `config.model_type`).
TEXT_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
VISION_MODELS = ("LlavaForConditionalGeneration",)
DECODERS = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class Adapter:
    """A model's parts.

    Attributes:
        decoder: the text decoder; its forward sees embeddings, mask and cache.
        config: the decoder's config, which carries the attention implementation.
        layers: its blocks, in order. The residual stream enters a block as its first argument.
        attentions: the attention module of each block; its output is added to the residual stream.
        image_token_id: stands in `input_ids` for each image token; None for a text-only model.
    """

    decoder: nn.Module
    config: Any
    layers: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    image_token_id: int | None

    def rotary_frequencies(self) -> Tensor:
        """Frequencies of the rotary embedding, [D / 2]; pair i is dimensions i and i + D / 2.

        Raises:
            ValueError: the embedding changes with the length, so keys cannot be turned afterwards.
        """
        rotary = self.decoder.rotary_emb
        if rotary.rope_type not in ("default", "linear", "llama3"):
            raise ValueError(
                f"reposition=True turns keys by fixed frequencies, but rope_type="
                f"{rotary.rope_type!r} changes them with the length: use reposition=False"
            )
        return rotary.inv_freq  # type: ignore[return-value]


def find(model: nn.Module) -> Adapter:
    """Find a model's parts.

    Raises:
        ValueError: the class or its decoder is not supported; the message names it and those that
            are.
    """
    supported = f"supported: {', '.join((*VISION_MODELS, *TEXT_MODELS))}"
    names = {cls.__name__ for cls in type(model).__mro__}
    if not names & {*TEXT_MODELS, *VISION_MODELS}:
        raise ValueError(f"mmkv cannot wrap a {type(model).__name__}; {supported}")
    decoder = model.get_decoder()  # type: ignore[operator]
    config = decoder.config
    if config.model_type not in DECODERS:
        raise ValueError(
            f"mmkv cannot wrap a {type(model).__name__} whose decoder is a "
            f"{type(decoder).__name__} ({config.model_type!r}); decoders: {', '.join(DECODERS)}"
        )
    layers = tuple(decoder.layers)
    return Adapter(
        decoder=decoder,
        config=config,
        layers=layers,
        attentions=tuple(layer.self_attn for layer in layers),
        image_token_id=model.config.image_token_id if names & {*VISION_MODELS} else None,  # type: ignore[union-attr]
    )
