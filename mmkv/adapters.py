"""Names of each model's parts. No other module depends on the class of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv import digest
from mmkv.calls import check_container, unwrap_container


@dataclass(frozen=True)
class Decoder:
    """Names and properties of one kind of text decoder."""

    layers: str = "layers"  # name of its list of blocks
    attention: str = "self_attn"  # name of a block's attention module
    output: str = "o_proj"  # name of the attention module's output projection
    # Name of the block's module that is applied to attention's output before it is added to the
    # residual stream; None: no module.
    added: str | None = None
    interleaved: bool = False  # rotary embedding of dimensions 2 i and 2 i + 1 together
    others: str | None = None  # kind of its layers that are not compressed, such as "sliding"
    # Whether its `prepare_inputs_for_generation` drops the cache at some length, and is otherwise
    # that of all models.
    drops_cache: bool = False
    # Replaces the attention module's forward, called with the module first, if that does not use
    # transformers' AttentionInterface.
    forward: Callable[..., Any] | None = None
    # Settings of the config, their allowed values, and why others are refused.
    refused: tuple[tuple[str, tuple[Any, ...], str], ...] = ()


def _falcon_attention(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Falcon's attention [B, q, C] -> [B, q, C], through the AttentionInterface."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    assert position_embeddings is not None
    fused = module.query_key_value(hidden_states)
    query, key, value = (x.transpose(1, 2) for x in module._split_heads(fused))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    scale = module.inv_norm_factor
    out, weights = attend(module, query, key, value, attention_mask, scaling=scale)
    return module.dense(out.flatten(2)), weights


_GEMMA2 = Decoder(added="post_attention_layernorm", others="sliding")

# Decoders by `config.model_type`.
DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("gemma", "llama", "ministral3", "mistral", "mixtral"), Decoder()),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), Decoder()),
    **dict.fromkeys(("qwen3", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_moe_text"), Decoder()),
    "falcon": Decoder(
        layers="h",
        attention="self_attention",
        output="dense",
        forward=_falcon_attention,
        refused=(("alibi", (False,), "its ALiBi position biases change with the distance"),),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "gemma4_text": replace(
        _GEMMA2,
        refused=(
            (
                "num_kv_shared_layers",
                (0,),
                "its last layers (E2B, E4B) attend to the keys and values of earlier ones, which "
                "are not kept for them: take a checkpoint without (26B-A4B, 31B)",
            ),
            (
                "use_bidirectional_attention",
                (None, "vision"),
                "its tokens see later ones: it embeds texts, and does not generate",
            ),
        ),
    ),
    "glm4v_text": Decoder(added="post_self_attn_layernorm", interleaved=True),
    "gpt_neox": Decoder(attention="attention", output="dense"),
    "llama4_text": Decoder(interleaved=True, others="chunked"),
    "opt": Decoder(output="out_proj"),
    "phi3": Decoder(drops_cache=True),
    "qwen3_5_moe_text": Decoder(others="linear-attention"),
    "qwen3_5_text": Decoder(others="linear-attention"),
}


# Allowed decoders by the name of the model's class; a subclass counts as its base.
MODELS: dict[str, tuple[str, ...]] = {
    "FalconForCausalLM": ("falcon",),
    "Gemma2ForCausalLM": ("gemma2",),
    "Gemma3ForCausalLM": ("gemma3_text",),
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Gemma4ForCausalLM": ("gemma4_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "GemmaForCausalLM": ("gemma",),
    "Glm4vForConditionalGeneration": ("glm4v_text",),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe_text",),
    "GPTNeoXForCausalLM": ("gpt_neox",),
    "Idefics3ForConditionalGeneration": ("llama",),
    "InternVLForConditionalGeneration": ("qwen2", "qwen3", "llama"),
    "Llama4ForCausalLM": ("llama4_text",),
    "Llama4ForConditionalGeneration": ("llama4_text",),
    "LlamaForCausalLM": ("llama",),
    "LlavaForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "LlavaNextForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "LlavaOnevisionForConditionalGeneration": ("qwen2",),
    "MistralForCausalLM": ("mistral",),
    "Mistral3ForConditionalGeneration": ("ministral3", "mistral"),
    "MixtralForCausalLM": ("mixtral",),
    "OPTForCausalLM": ("opt",),
    "PaliGemmaForConditionalGeneration": ("gemma", "gemma2"),
    "Phi3ForCausalLM": ("phi3",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text",),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text",),
    "Qwen3_5ForCausalLM": ("qwen3_5_text",),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text",),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text",),
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text",),
    "SmolVLMForConditionalGeneration": ("llama",),
}

# Known classes that cannot be wrapped, and why.
REFUSED: dict[str, str] = {
    "BloomForCausalLM": "its ALiBi position biases are added outside the AttentionInterface",
    "GptOssForCausalLM": "its attention has learned sinks",
    "MptForCausalLM": "its ALiBi position biases are added outside the AttentionInterface",
}


@dataclass(frozen=True)
class Adapter:
    """The parts of a model."""

    decoder: nn.Module  # its forward takes embeddings, mask and cache
    config: Any  # the decoder's, which names the attention implementation
    layers: tuple[nn.Module, ...]  # blocks; their first argument is the residual stream
    attentions: tuple[Any, ...]  # of each block; None for linear attention
    image_token_ids: tuple[int, ...]  # images and videos in `input_ids`; () for a text model
    facts: Decoder
    ranks: int = 1  # number of processes that share each layer's heads (tensor parallelism)
    # For each layer a weight, its address and version, a sample, and what was computed of it.
    computed: dict[int, tuple[ref[Tensor], tuple[int, int], Tensor, Tensor]] = field(
        default_factory=dict[int, "tuple[ref[Tensor], tuple[int, int], Tensor, Tensor]"], repr=False
    )

    @property
    def dtype(self) -> torch.dtype:
        """The type of the decoder's weights, in which its cache holds pairs."""
        decoder: Any = self.decoder
        return decoder.dtype

    def is_image(self, ids: Tensor) -> Tensor:
        """Return which ids are tokens of images or videos: bool, on the device of `ids`."""
        return torch.isin(ids, ids.new_tensor(self.image_token_ids))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: nothing is computed of its weights yet."""
        return {**vars(self), "computed": {}}

    def added(self, index: int, output: Tensor) -> Tensor:
        """Return what a block adds to the residual stream, from its attention module's output."""
        name = self.facts.added
        return output if name is None else getattr(self.layers[index], name)(output)

    def output_weight(self, index: int) -> Tensor:
        """Return the output projection of a block's attention by query head, [Hq, hidden, Dv].

        It does not include the gate that some models (Qwen3.5) apply before it. With tensor
        parallelism it has the heads of this process.

        Raises:
            ValueError: it is quantised or adapted, and spread over processes or different in each
                row (`adapter_names` of PEFT).
        """
        linear = self._output(index)
        weight = _plain_weight(linear)
        if self.ranks > 1:
            if weight is None:
                raise ValueError(
                    f"the output projection is a {type(linear).__name__} spread over {self.ranks} "
                    "processes, whose part of each head is not known: use a score that does not "
                    "read it, such as score='window'"
                )
            weight = getattr(weight, "to_local", lambda: linear.weight)()
        elif weight is None:
            hooks: Any = vars(linear)["_forward_pre_hooks"].values()
            if any("adapter_names" in getattr(x, "keywords", ()) for x in hooks):
                raise ValueError(
                    "adapter_names: each row has an output projection of its own, and the scores "
                    "read one for all rows: use a score that reads none, such as score='window'"
                )
            # Quantised, adapted or offloaded: apply it to each unit vector.
            layer = self.layers[index]
            held = [*linear.parameters(), *linear.buffers(), *layer.parameters()]
            devices = [x.device for x in held if not x.is_meta]  # offloaded weights move by a hook
            unit = torch.eye(linear.in_features, device=devices[0] if devices else None)
            dtype = next(layer.parameters()).dtype
            unit = unit.to(dtype if dtype.is_floating_point else torch.float32)
            weight = (linear(unit) - linear(unit[:1] * 0)).T
        heads = self.config.num_attention_heads // self.ranks
        return weight.unflatten(1, (heads, -1)).transpose(0, 1)

    def of_output_weight(self, index: int, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `function(output_weight(index))`, and keep it. Each call has the same `function`.

        It is computed anew if the weight was replaced or written to, see `forget_changed`.
        """
        weight = _plain_weight(self._output(index))
        if weight is None or self.ranks > 1 or weight.is_inference():
            return function(self.output_weight(index))
        now, known = (weight.data_ptr(), weight._version), self.computed.get(index)
        if known is not None and known[0]() is weight and known[1] == now:
            return known[3]
        found = function(self.output_weight(index))
        self.computed[index] = ref(weight), now, digest.sample(weight.detach()), found
        return found

    def forget_changed(self) -> None:
        """Drop what was computed of weights that have been written to through `weight.data`.

        PEFT merges adapters so. Address and version stay the same, so samples are compared.
        """
        written: dict[int, Tensor] = {}  # for each layer, whether the sample is another one
        for i, (weight_ref, then, sample, _) in self.computed.copy().items():
            weight = weight_ref()
            if weight is not None and then == (weight.data_ptr(), weight._version):
                written[i] = (digest.sample(weight.detach()) != sample).any()
        if not written:
            return
        device = next(iter(written.values())).device
        flags = torch.stack([x.to(device) for x in written.values()])
        for i, differs in zip(written, flags.tolist(), strict=True):  # the host waits once
            if differs:
                self.computed.pop(i, None)

    def _output(self, index: int) -> Any:
        """Return the output projection of a block's attention."""
        attention: Any = self.attentions[index]
        inner = getattr(attention, "model", attention)  # LLaMA-Adapter (PEFT) puts its own around
        return getattr(inner, self.facts.output)

    def pair_shape(self, index: int) -> tuple[int, int]:
        """Return H and D of a layer: its number of key-value heads, and their dimension."""
        module, config = self.attentions[index], self.config.per_layer_config[index]
        heads: int = config.num_attention_heads // getattr(module, "num_key_value_groups", 1)
        if self.facts.forward is not None:  # Falcon
            heads = module.num_heads if module.new_decoder_architecture else module.num_kv_heads
        return heads, _dim(config)

    def frequencies(self) -> Tensor:
        """Return radians per position of each rotated pair of dimensions, [R / 2]."""
        rotary: Any = self.decoder.rotary_emb
        name = "inv_freq" if hasattr(rotary, "inv_freq") else "full_attention_inv_freq"
        return getattr(rotary, name)


def _plain_weight(linear: nn.Module) -> Tensor | None:
    """Return the weight of a plain linear layer; None if it is quantised, adapted or offloaded."""
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        return None
    return None if linear.weight.is_meta else linear.weight


def of_full_layers(config: Any) -> Any:
    """Return the config of a decoder's layers with full attention (Gemma 4's others differ)."""
    kinds: list[str] = getattr(config, "layer_types", None) or []
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    return config.per_layer_config[full]


def short_positions(config: Any) -> int | None:
    """Return after how many positions the rotary frequencies of all tokens change (longrope).

    None: they never do.
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


def _dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def shape(config: Any) -> dict[str, Any]:
    """Return the settings in which a decoder must equal that of a cache or profile."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_key_value_heads")
    full = of_full_layers(config)
    return {name: getattr(full, name, None) for name in names}


def find(model: nn.Module) -> Adapter:
    """Return the parts of a model, also inside containers such as PEFT's.

    Raises:
        ValueError: the class or its decoder is not supported; the message lists supported ones.
    """
    check_container(model)
    model = unwrap_container(model)
    name = type(model).__name__
    if getattr(model, "_pp_stage", None) is not None:
        raise ValueError(
            f"mmkv cannot wrap a {name} whose layers are spread over processes (pipeline "
            "parallelism), each of which would hold a part of the cache: load it with "
            "device_map='auto'"
        )
    names = [cls.__name__ for cls in type(model).__mro__]
    kinds = next((MODELS[n] for n in names if n in MODELS), None)
    if kinds is None:
        why = next((f": {REFUSED[n]}" for n in names if n in REFUSED), "")
        classes = [n for n in MODELS if n.startswith(f"{name.removesuffix('Model')}For")]
        if classes and name.endswith("Model"):
            raise ValueError(
                f"mmkv cannot wrap a {name}: load it as {' or '.join(classes)}, which can generate"
            )
        raise ValueError(f"mmkv cannot wrap a {name}{why}; supported: {', '.join(MODELS)}")
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    if type(decoder).__name__ in MODELS:  # for Llama 4 a whole language model
        decoder = decoder.model
    kind = decoder.config.model_type
    if kind not in kinds:
        raise ValueError(
            f"mmkv cannot wrap a {name} whose decoder is a {type(decoder).__name__} ({kind!r}); "
            f"decoders: {', '.join(kinds)}"
        )
    facts = DECODERS[kind]
    for setting, allowed, why in facts.refused:
        value = getattr(decoder.config, setting)
        if value not in allowed:
            raise ValueError(f"mmkv cannot wrap a {name} with {setting}={value!r}: {why}")
    layers = tuple(attrgetter(facts.layers)(decoder))
    attentions = tuple(getattr(layer, facts.attention, None) for layer in layers)
    token_ids = (getattr(model.config, f"{x}_token_id", None) for x in ("image", "video"))
    return Adapter(
        decoder=decoder,
        config=decoder.config,
        layers=layers,
        attentions=attentions,
        image_token_ids=tuple(token for token in token_ids if token is not None),
        facts=facts,
        ranks=_ranks((model, decoder, *layers), attentions),
    )


def _ranks(containers: Sequence[Any], attentions: Sequence[Any]) -> int:
    """Return how many processes share the heads; `containers` hold the attention modules."""
    n_ranks = getattr(containers[0], "_tp_size", None) or 1
    if n_ranks > 1 or any(type(x).__name__.startswith("FSDP") for x in containers):
        return n_ranks  # FSDP gathers the weights of a layer before it runs
    for module in attentions:
        for weight in () if module is None else module.parameters():
            if any(x.is_shard() for x in getattr(weight, "placements", ())):
                return weight.device_mesh.size()  # by torch's own parallelize_module
    return 1


def table() -> list[dict[str, str]]:
    """Return every known class: "class", "status" ("supported", "refused") and "compressed"."""
    statuses = {name: ("refused", f"nothing: {why}") for name, why in REFUSED.items()}
    for name, kinds in MODELS.items():
        others = {DECODERS[kind].others for kind in kinds}
        layers = "every layer"
        if None not in others:
            layers = f"layers with full attention, not {others.pop()} layers"
        elif len(others) > 1:
            layers = "every layer, or layers with full attention if others slide"
        statuses[name] = "supported", layers
    rows = sorted(statuses.items(), key=lambda row: row[0].lower())
    return [{"class": name, "status": x, "compressed": y} for name, (x, y) in rows]
