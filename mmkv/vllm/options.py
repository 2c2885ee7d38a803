"""The plugin's options, checked before a model is loaded, and the features of vLLM that it refuses.

`--additional-config '{"mmkv": {"budget": 0.2, "policy": "condense", ...}}'`; all other keys are
options of the policy.
"""

from __future__ import annotations

import functools
import json
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from mmkv import adapters, budgets
from mmkv.memory import Memory
from mmkv.policy import Policy
from mmkv.profiles import Profile
from mmkv.registry import get_policy, load_plugin
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.layers import UniformLayers
from mmkv.sizes.profiled import RetrievalHeads, by_copying, proportional
from mmkv.vllm import probes
from mmkv.vllm.classes import HeadClass, classes_of, equal_class
from mmkv.vllm.pages import code_bytes, slot_bytes
from mmkv.vllm.settings import Settings

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers

VERSIONS = ("0.32.",)
# Decoders whose queries, keys and positions are those that a policy expects.
_DECODERS = ("gemma", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3")
_OWN = ("budget", "memory", "policy", "probe", "plugins")
# Keys of what `resolved` returns, from which vLLM makes configurations again.
_RESOLVED = {"policy", "plugins", "options", "budget", "unit", "classes", "codes"}


def supported() -> bool:
    """Return whether this is a version of vLLM that the plugin knows."""
    return metadata.version("vllm").startswith(VERSIONS)


def register() -> None:
    """Check the options whenever vLLM makes its configuration."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "mmkv", False):
        return

    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: Any = (self.additional_config or {}).get("mmkv")
        if given is None or (isinstance(given, dict) and given.keys() == _RESOLVED):
            return original(self, *args, **kwargs)
        policy, budget = parsed(given)
        _check_version()
        config: Any = original(self, *args, **kwargs)
        _check_engine(config)
        extra = config.additional_config
        config.additional_config = {**extra, "mmkv": resolved(config, given, policy, budget)}
        return config

    create.mmkv = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create
    if supported():
        from vllm.v1.engine.input_processor import InputProcessor

        InputProcessor.process_inputs = _checked(InputProcessor.process_inputs)


def _checked(original: Any) -> Any:
    """Return `InputProcessor.process_inputs` with a check of each request.

    It refuses prompts that arrive in pieces, as each piece would be compressed where the prompt
    ends at the time, and earlier ones not again; and an `mmkv_prefix` that is no number.
    """

    from vllm.exceptions import VLLMValidationError  # a server answers it with status 400

    @functools.wraps(original)
    def process(
        self: Any,
        request_id: str,
        prompt: Any,
        params: Any,
        *args: Any,
        resumable: bool = False,
        **kwargs: Any,
    ) -> Any:
        if Settings.of(self.vllm_config) is not None:
            if resumable:
                raise VLLMValidationError(
                    "mmkv in vLLM does not support prompts in pieces (StreamingInput): send the "
                    "whole prompt at once"
                )
            prefix = (getattr(params, "extra_args", None) or {}).get("mmkv_prefix", 0)
            if type(prefix) is not int:
                raise VLLMValidationError(
                    f"mmkv_prefix={prefix!r}: expected how many first tokens later prompts share, "
                    "such as 480"
                )
        return original(self, request_id, prompt, params, *args, resumable=resumable, **kwargs)

    return process


def parsed(given: Any) -> tuple[Policy, float]:
    """Return the policy, and the share of a prompt's tokens or bytes that the options give.

    Raises:
        ValueError: an option is unknown or out of range, or the policy is none for vLLM.
    """
    if not isinstance(given, dict):
        raise ValueError(f"mmkv={given!r}: expected options, such as {{'budget': 0.2}}")
    load_plugins(given.get("plugins", []))
    name = given.get("policy", "condense")
    if not isinstance(name, str):
        raise ValueError(f"mmkv: policy={name!r}: expected a name, see `mmkv policies`")
    policy = get_policy(name, **{k: v for k, v in given.items() if k not in _OWN})
    _check_policy(policy)
    if ("budget" in given) == ("memory" in given):
        raise ValueError(
            "mmkv: give one of 'budget', the share of a prompt's tokens to keep, such as 0.2, and "
            "'memory', that of its bytes, such as '8x'"
        )
    share = given["budget"] if "budget" in given else float(Memory.of(given["memory"]))
    budget = budgets.checked(policy, share)
    if not isinstance(budget, float):
        raise ValueError(
            f"mmkv: budget={budget}: in vLLM a budget is a share of the prompt, such as 0.2"
        )
    if not isinstance(given.get("probe", ""), str):
        raise ValueError(f"mmkv: probe={given['probe']!r}: expected the path of a file, as a text")
    for option in given.keys() - _OWN:
        try:
            json.dumps(given[option])
        except TypeError:
            raise ValueError(
                f"mmkv: {option}={given[option]!r}: expected a value of JSON, such as a text or a "
                "number, as vLLM's processes get the options in JSON"
            ) from None
    return policy, budget


def load_plugins(files: Any) -> None:
    """Load files that register policies, in each of vLLM's processes.

    Raises:
        ValueError: these are no paths of such files.
    """
    if not isinstance(files, list) or not all(isinstance(x, str) for x in files):
        raise ValueError(f"mmkv: plugins={files!r}: expected a list of paths")
    for file in files:
        load_plugin(Path(file))


def _check_policy(policy: Policy) -> None:
    """Refuse what needs more than a layer's queries, keys and values when its prompt ends."""
    name = f"mmkv: policy {policy.name!r}"
    if policy.keeps_all:
        raise ValueError(f"{name} keeps everything: leave the mmkv options out")
    if policy.score.repeats:
        raise ValueError(f"{name} reads a prompt twice, which vLLM cannot: use policy 'condense'")
    if not isinstance(policy.layers, UniformLayers):
        raise ValueError(
            f"{name} sizes layers by layers={policy.layers.name!r}, and in vLLM sizes are fixed "
            "before a prompt is read: use layers='uniform'"
        )
    if not isinstance(policy.heads, UniformHeads | RetrievalHeads):
        raise ValueError(
            f"{name} sizes heads by heads={policy.heads.name!r}, and in vLLM sizes are fixed "
            "before a prompt is read: use heads='retrieval' or heads='uniform'"
        )
    if isinstance(policy.heads, RetrievalHeads) and not policy.score.by_head:
        raise ValueError(
            f"{name} compares the heads of a layer, which heads='retrieval' puts into different "
            "modules: use heads='uniform'"
        )
    if policy.decode.name != "grow":
        raise ValueError(
            f"{name} drops tokens while it decodes (decode={policy.decode.name!r}), which vLLM's "
            "blocks cannot: use decode='grow'"
        )
    if policy.protect is not None:
        raise ValueError(f"{name}: protect is not supported in vLLM: leave it out")


def _check_version() -> None:
    if not supported():
        raise ValueError(
            f"mmkv: vLLM {metadata.version('vllm')} is not supported: install vllm==0.32.*"
        )


def _kv_cache_scheme(config: Any) -> Any:
    """Return how a checkpoint quantises its KV cache; None if it does not."""
    quantization = getattr(config, "quantization_config", None) or {}
    return quantization.get("kv_cache_scheme")


def _check_engine(config: Any) -> None:
    """Refuse features of vLLM with which compressed heads would be wrong.

    Raises:
        ValueError: one is on; the message says how to turn it off.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    kind, window = model.hf_text_config.model_type, model.get_sliding_window()
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    sliding = "sliding_attention" in kinds
    all_sliding = "full_attention" not in kinds if kinds else bool(window)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
    for refused, what, remedy in (
        (config.speculative_config, "speculative decoding", "leave --speculative-config out"),
        (
            config.kv_transfer_config,
            "a KV-transfer connector",
            "leave --kv-transfer-config and --kv-offloading-size out",
        ),
        (
            getattr(config.kv_events_config, "enable_kv_cache_events", False),
            "KV cache events, which would announce prefixes that no request can hit,",
            "leave --kv-events-config out",
        ),
        (model.use_mla, "latent attention (MLA)", "serve this model without mmkv"),
        (
            model.is_mm_prefix_lm,
            "tokens of pictures that attend to later ones (PaliGemma)",
            "serve this model without mmkv",
        ),
        (model.is_encoder_decoder, "cross-attention", "serve this model without mmkv"),
        (model.is_hybrid, "layers of linear attention", "serve this model without mmkv"),
        (model.uses_mrope, "positions of three axes (M-RoPE)", "serve this model without mmkv"),
        (config.lora_config, "LoRA", "merge the adapter into the model"),
        (
            model.using_transformers_backend(),
            "transformers' implementation of a model, as it cannot read its rotary embedding",
            "leave --model-impl out",
        ),
        (
            any(getattr(parallel, x, 1) > 1 for x in sizes),
            "a model that is split over processes",
            "use --data-parallel-size",
        ),
        (
            parallel.use_ubatching,
            "batches that are split in two",
            "leave --enable-dbo and --ubatch-size out",
        ),
        (
            cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
            f"a KV cache of {cache.cache_dtype} for a model of {model.dtype}",
            "leave --kv-cache-dtype out",
        ),
        (
            cache.cache_dtype == "auto" and _kv_cache_scheme(model.hf_config),
            "a checkpoint whose KV cache is quantised (kv_cache_scheme)",
            f"add --kv-cache-dtype {str(model.dtype).removeprefix('torch.')}",
        ),
        (
            getattr(model.hf_text_config, "dual_chunk_attention_config", None),
            "dual chunk attention",
            "serve this model without mmkv",
        ),
        (config.use_v2_model_runner, "Model Runner V2", "set VLLM_USE_V2_MODEL_RUNNER=0"),
        (
            all_sliding,
            f"a model whose layers all have a sliding window, of {window} tokens",
            "serve this model without mmkv",
        ),
        (model.runner_type == "pooling", "embeddings and pooling", "serve this model without mmkv"),
        (
            config.scheduler_config.disable_hybrid_kv_cache_manager,
            "a single KV cache group",
            "leave --disable-hybrid-kv-cache-manager out",
        ),
        (
            sliding and cache.enable_prefix_caching,
            "prefix caching of a model with sliding windows",
            "add --no-enable-prefix-caching",
        ),
        (
            cache.enable_prefix_caching and cache.prefix_match_unit not in (None, cache.block_size),
            f"prefixes that are matched in units of {cache.prefix_match_unit} tokens",
            "leave --prefix-match-unit out",
        ),
        (
            kind not in _DECODERS,
            f"a decoder of type {kind!r}",
            f"supported are {', '.join(_DECODERS)}",
        ),
    ):
        if refused:
            raise ValueError(f"mmkv in vLLM does not support {what}: {remedy}")


def resolved(config: Any, given: dict[str, Any], policy: Policy, budget: float) -> dict[str, Any]:
    """Return the options with the classes of heads, as JSON.

    With `memory`, kept pairs are in 8 bits, and `budget` is how many tokens fit. A model with
    sliding windows has them in its own type: vLLM's kernel may not read codes as numbers, and the
    pages of these layers were others' before.
    """
    model = config.model_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or []
    full, codes = 2 * model.get_head_size() * model.dtype.itemsize, None
    if "memory" in given and budget < 1 and "sliding_attention" not in kinds:
        codes = [slot_bytes(full), code_bytes(model.get_head_size())]
        budget = min(1.0, budget * full / codes[1])
    layers = [
        i
        for i in range(model.get_total_num_hidden_layers())
        if not kinds or kinds[i] == "full_attention"
    ]
    heads, unit, found = model.get_total_num_kv_heads(), 1, list[HeadClass]()
    if isinstance(policy.heads, RetrievalHeads) and budget < 1:
        scores = _probed(model, given.get("probe"), len(layers), heads)
        if kinds and len(layers) < len(kinds) and heads > 1:
            raise ValueError(
                "mmkv in vLLM does not support heads of different sizes beside layers with a "
                "sliding window, as vLLM pads the pages of single heads to those of whole layers: "
                "use 'heads': 'uniform'"
            )
        if (table := by_copying(policy, scores, tuple(layers))) is not None:
            flat = [weight for of_layer in table.weights(budget) for weight in of_layer]
            shares = proportional(flat, budget * len(flat), 1.0)
            places = [(i, h) for i in layers for h in range(heads)]
            found = classes_of(dict(zip(places, shares, strict=True)), budget)
    if not found:
        unit, found = heads, equal_class(layers, heads, budget)
    if codes is None and all(round(x.share, 6) == 1 for x in found):
        raise ValueError(f"mmkv: budget={budget:g} keeps everything: leave the mmkv options out")
    classes = [[max(round(x.share, 6), 1e-6), [list(place) for place in x.heads]] for x in found]
    sizes = ", ".join(f"{len(x.heads)} heads keep {100 * x.share:.0f} %" for x in found)
    kind = "" if codes is None else ", in 8 bits"
    logger.info("mmkv: policy %s, budget %.3g%s: %s", policy.name, budget, kind, sizes)
    if config.device_config.device_type != "cpu":
        logger.warning(
            "mmkv in vLLM has not been run on a %s yet", config.device_config.device_type
        )
    options = {k: v for k, v in given.items() if k not in _OWN}
    return {
        "policy": policy.name,
        "plugins": given.get("plugins", []),
        "options": options,
        "budget": budget,
        "unit": unit,
        "classes": classes,
        "codes": codes,
    }


def _probed(model: Any, given: str | None, layers: int, heads: int) -> Any:
    """Return the copy scores [L][H] of a model from its probe.

    Raises:
        ValueError: there is no such file, or it belongs to another model.
    """
    path = probes.path_of(model.model) if given is None else Path(given)
    if not path.is_file():
        if given is not None:
            raise ValueError(
                f"mmkv: probe={given!r} is no file: name one, or leave 'probe' out and run "
                f"`mmkv probe {model.model}` once"
            )
        raise ValueError(
            f"mmkv: {path} is missing, which says how much each head keeps: run `mmkv probe "
            f"{model.model}` once, or use 'heads': 'uniform'"
        )
    profile = Profile.load(path)
    scores = profile.retrieval
    if scores is None or len(scores) != layers or len(scores[0]) != heads:
        raise ValueError(
            f"mmkv: {path} is no probe of this model, which has {layers} layers of {heads} KV "
            f"heads: run `mmkv probe {model.model}`"
        )
    shape = adapters.shape(model.hf_text_config)
    if profile.model is not None and profile.model != shape:
        raise ValueError(f"mmkv: {path} is of {profile.model}, and this model is {shape}")
    return scores
