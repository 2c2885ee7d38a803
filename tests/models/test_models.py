"""Every supported class, on a tiny random model: evicting is masking, full budget is identity.

Policies differ in what they ask of a class: unequal heads, all attention weights, a bias.
"""

import inspect
from contextlib import nullcontext

import pytest
import torch
import transformers as tf

import mmkv
from helpers import configs, zoo
from helpers.marks import cases, older_than
from helpers.masking import fed, generate, recorded, seeing
from helpers.oracle import measured_similarity, prefilled, short
from helpers.zoo import (
    EVERY_DECODER,
    FEW,
    NAMES,
    OWN_DECODER,
    SHELLS,
    SUPPORTED,
    inputs_of,
    model_of,
)
from mmkv import chat
from mmkv.cache.layer import CompressedLayer
from mmkv.calls import cache_in, has_pictures, passing

VISION = [name for name in NAMES if "Conditional" in name]
FEW_OWN = [name for name in FEW if name in OWN_DECODER]
# Layers of one kind, with sliding windows, with linear attention, and positions of three axes.
BEAMS = ("Llama", "Gemma2", "Gemma3", "Gemma4", "Qwen3_5For", "Qwen2VL", "OPT", "Falcon")


def needs_encoder_outputs(model) -> None:
    """Qwen's new pictures come behind old grids, which only encoded ones can."""
    known = inspect.signature(model.forward).parameters
    if zoo.has_grids(model) and "mm_encoder_outputs" not in known:
        pytest.skip("this transformers takes no new picture in a later turn of a Qwen model")


def test_every_class_is_tested():
    """What the table calls supported is in the lists of this file, and the other way round."""
    assert sorted({name.partition(":")[0] for name in NAMES}) == sorted(SUPPORTED)
    assert set(mmkv.adapters.MODELS) == set(SUPPORTED)
    tried = {(name.partition(":")[0], decoder_of(name)) for name in NAMES}
    assert tried == {(n, d) for n, kinds in mmkv.adapters.MODELS.items() for d in kinds}
    assert {kind for _, kind in tried} == set(mmkv.adapters.DECODERS)


def decoder_of(name: str) -> str:
    return configs.CONFIGS[name]().get_text_config(decoder=True).model_type


@cases(
    "name, policy",
    [(name, policy) for name in OWN_DECODER for policy in ("adakv", "condense")]
    + [(name, ("adakv", "h2o", "condense")[i % 3]) for i, name in enumerate(SHELLS)],
    *((name, "adakv") for name in FEW_OWN),
    *((name, "condense") for name in FEW_OWN[::3]),
    (SHELLS[0], "adakv"),
)
def test_eviction_equals_masking(name, policy):
    if "Falcon" in name and policy == "condense":
        pytest.skip("the reference cannot give Falcon's own attention pairs for its groups")
    model = model_of(name)
    inputs = inputs_of(model, "padded")
    with mmkv.wrapped(model, policy, 0.3, **short(policy)), recorded(model) as held:
        logits, tokens, cache = generate(model, inputs)
    assert cache.report().kept_fraction < 0.5, "nothing was evicted: the oracle saw nothing"
    with seeing(model, held):
        expected = fed(model, inputs, tokens)[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["Qwen2VLForCond", "Gemma3ForCond", "OPT", "Falcon"])
def test_masking_oracle_fails_on_wrong_set(kind):
    """The reference can fail: masking one kept token more changes the logits."""
    model = model_of(next(name for name in NAMES if name.startswith(kind)))
    inputs = inputs_of(model, "one")
    with mmkv.wrapped(model, "adakv", 0.3, **short("adakv")), recorded(model) as held:
        logits, tokens, _ = generate(model, inputs)
    for step in held:
        step[max(step)][:, 0, 4] = -1
    with seeing(model, held):
        assert (fed(model, inputs, tokens)[0] - logits)[1:].abs().max() > 1e-3


@cases("name", EVERY_DECODER, *FEW[2:4])
def test_a_prompt_in_chunks_equals_masking(name):
    """Each chunk is masked as the model masks it, pictures that see all of themselves too."""
    model = model_of(name)
    inputs = inputs_of(model, "padded")
    if older_than("5.23") and has_pictures(inputs):
        pytest.skip("transformers before 5.23 does not look at pictures in chunks")
    try:
        generate(model, inputs, new=1, prefill_chunk_size=33)
    except (RuntimeError, KeyError) as error:  # Llama 4's
        pytest.skip(f"the plain model cannot take a prompt in chunks: {error}")
    with mmkv.wrapped(model, "h2o", 0.4), recorded(model) as held:
        logits, tokens, _ = generate(model, inputs, prefill_chunk_size=33)
    with seeing(model, held, chunks=-(-inputs["input_ids"].shape[1] // 33)):
        expected = fed(model, inputs, tokens, prefill_chunk_size=33)[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


def second_turn(model, policy: str, picture: bool) -> None:
    if picture:
        needs_encoder_outputs(model)
    inputs = inputs_of(model, "one")
    with mmkv.wrapped(model, policy, 0.4, **short(policy)), recorded(model) as held:
        first, words, cache = generate(model, inputs)
        turn = zoo.next_turn(model, inputs, words, picture)
        second, answer, _ = generate(model, turn, past_key_values=cache)
    with seeing(model, held):
        plain, _, cache = fed(model, inputs, words)
        again, _, _ = fed(model, turn, answer, past_key_values=cache)
    torch.testing.assert_close(first, plain, atol=2e-4, rtol=0)
    torch.testing.assert_close(second, again, atol=2e-4, rtol=0)


@cases(
    "name, picture",
    [(n, n in VISION) for n in EVERY_DECODER] + [(n, False) for n in FEW if n in VISION],
    *((name, False) for name in FEW[1::3]),
)
def test_a_second_turn_equals_masking(name, picture):
    """Positions count all tokens seen, not only those kept."""
    second_turn(model_of(name), "h2o", picture)


def test_a_new_picture_in_paligemma_has_the_mask_of_the_plain_model():
    model, found = model_of("PaliGemmaForConditionalGeneration"), []
    for context in (nullcontext(), mmkv.wrapped(model, "full")):
        with context:
            inputs = zoo.prompt(model, (40,), 1603)
            _, words, cache = generate(model, inputs, new=2)
            turn = zoo.next_turn(model, inputs, words, True, 1604)
            found.append(generate(model, turn, new=2, past_key_values=cache)[0])
    torch.testing.assert_close(*found, atol=2e-4, rtol=0)


@cases("name", ["Falcon", "Gemma3ForCond", "PaliGemma", "Qwen2VL", "OPT"], "Qwen2VL")
def test_second_turn_with_eager_attention_equals_masking(name):
    """Masks are numbers there, not bool."""
    name = next(x for x in NAMES if x.startswith(name))
    second_turn(zoo.make(name, "eager"), "prefixkv", name in VISION)


@cases("name", NAMES, *FEW)
def test_plain_forward_computes_positions(name):
    """Without `generate`, positions come from the tokens seen (and the model's rope deltas)."""
    model = model_of(name)
    inputs = inputs_of(model, "one")
    new = torch.randint(8, zoo.VOCAB, (4, 1, 1), generator=torch.Generator().manual_seed(9))

    def talk():
        out = model(**inputs, use_cache=True)
        logits = [out.logits[:, -1]]
        for ids in new:
            out = model(input_ids=ids, **passing(model, cache_in(out)), use_cache=True)
            logits.append(out.logits[:, -1])
        return torch.stack(logits)

    with torch.no_grad():
        with mmkv.wrapped(model, "h2o", 0.3), recorded(model) as held:
            logits = talk()
        with seeing(model, held):
            torch.testing.assert_close(logits, talk(), atol=2e-4, rtol=0)


@cases("name", VISION, *(n for n in FEW if n in VISION), "LlavaOnevisionForConditionalGeneration")
def test_image_and_video_tokens_compete(name):
    """protect="instruction" knows the tokens of pictures and videos; all text stays."""
    model = model_of(name)
    inputs = inputs_of(model, "padded")
    options = {"protect": "instruction", **short("prefixkv")}
    cache = prefilled(model, inputs, "prefixkv", 0.8, **options)
    ids, valid = inputs["input_ids"], inputs["attention_mask"].bool()
    image = (ids == zoo.IMAGE) | (ids == zoo.VIDEO)
    assert image.any(-1).all()
    assert torch.equal(cache.masks.image, image)
    assert torch.equal(chat.image_mask(chat.Loaded(name, model, None), inputs), image[0])
    dropped = 0
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, CompressedLayer):
            continue
        for b in range(len(ids)):
            text = set((valid & ~image)[b].nonzero()[:, 0].tolist())
            assert all(text <= set(head.tolist()) for head in cache.kept(i)[b])
        dropped += int(valid.sum() - (cache.kept(i)[:, 0] >= 0).sum())
    assert dropped > 0


@cases("name", EVERY_DECODER, *FEW)
def test_mini_prefill_scores_the_compressed_layers(name):
    """XKV's first pass finds the sizes that one pass finds; sliding layers do not count."""
    model = model_of(name)
    inputs = inputs_of(model, "padded")
    kept = []
    for allocation in ("mini-prefill", "one-pass"):
        options = {"allocation": allocation, **short("xkv")}
        cache = prefilled(model, inputs, "xkv", 0.4, **options)
        layers = [i for i, x in enumerate(cache.layers) if isinstance(x, CompressedLayer)]
        kept.append([cache.kept(i) for i in layers])
        types = getattr(model.get_decoder().config, "layer_types", None) or []
        others = sum(kind != "full_attention" for kind in types)
        assert len(layers) == len(cache.layers) - others > 0
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


# The norm that sees the residual stream after the attention, where a block has one.
AFTER = {
    "gemma2": "pre_feedforward_layernorm",
    "gemma3_text": "pre_feedforward_layernorm",
    "gemma4_text": "pre_feedforward_layernorm",
    "opt": "final_layer_norm",
}


@cases("name", [n for n in OWN_DECODER if "Falcon" not in n], *FEW_OWN)
def test_squeeze_compares_the_residual_stream(name):
    """SqueezeAttention's similarity is that of the stream before and after the attention."""
    model = model_of(name)
    inputs = inputs_of(model, "one")
    decoder = mmkv.adapters.find(model).decoder
    before, after, hooks = {}, {}, []
    kind = decoder.config.model_type
    norm = AFTER.get(kind, "post_attention_layernorm")
    if name.endswith("post-norm"):
        norm = "self_attn_layer_norm"
    parallel = kind == "gpt_neox" and decoder.config.use_parallel_residual
    for i, block in enumerate(decoder.layers):

        def enter(module, args, i=i):
            before[i] = args[0]

        def leave(module, args, i=i):
            after[i] = args[0].view_as(before[i])

        def add(module, args, output, i=i):
            after[i] = before[i] + output

        hooks.append(block.register_forward_pre_hook(enter))
        if parallel:
            hooks.append(block.attention.dense.register_forward_hook(add))
        else:
            hooks.append(getattr(block, norm).register_forward_pre_hook(leave))
    try:
        with mmkv.wrapped(model, "squeeze", 0.4), torch.no_grad(), measured_similarity() as found:
            cache = model(**inputs, use_cache=True).past_key_values
    finally:
        for hook in hooks:
            hook.remove()
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, CompressedLayer):
            expected = torch.cosine_similarity(before[i], after[i], dim=-1).mean()
            torch.testing.assert_close(found[i], expected[None], atol=1e-5, rtol=0)


def changed(name: str, **settings):
    config = configs.CONFIGS[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    return getattr(tf, name)(config)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: tf.BloomForCausalLM(
                tf.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=9)
            ),
            r"BloomForCausalLM: its ALiBi.*supported: .*Llama",
        ),
        (lambda: changed("FalconForCausalLM", alibi=True), "FalconForCausalLM with alibi=True"),
        (
            lambda: changed("Gemma4ForCausalLM", num_kv_shared_layers=2),
            r"Gemma4ForCausalLM with num_kv_shared_layers=2: .*take a checkpoint without",
        ),
        (
            lambda: changed("Gemma4ForCausalLM", use_bidirectional_attention="all"),
            r"Gemma4ForCausalLM with .*attention='all': its tokens see later ones",
        ),
        (
            lambda: changed(
                "LlavaForConditionalGeneration", text_config=tf.Qwen3Config(**configs.TEXT)
            ),
            r"decoder is a Qwen3Model.*decoders: llama, mistral, qwen2",
        ),
        (
            lambda: tf.Qwen3_5ForCausalLM(
                tf.Qwen3_5TextConfig(**configs.TEXT, layer_types=["linear_attention"] * 2)
            ),
            r"or linear attention.*nothing to compress",
        ),
        *(
            (lambda cls=cls: changed(f"{cls}ForCausalLM", sliding_window=16), "nothing to compress")
            for cls in ("Mistral", "Mixtral", "Phi3")
        ),
    ],
)
def test_unsupported_models_raise(make, why):
    with pytest.raises(ValueError, match=why):
        mmkv.wrap(make().eval(), "prefixkv", 0.5)


def test_head_number_is_of_full_attention_layers():
    """Gemma 4's layers with full attention have heads of their own."""
    config = configs.CONFIGS["Gemma4ForCausalLM"]()
    assert mmkv.adapters.shape(config)["num_key_value_heads"] == 1


def test_unwrap_restores_falcon_forward():
    """Its attention's forward is replaced while it is wrapped, and given back."""
    model = model_of("FalconForCausalLM")
    attn = model.transformer.h[0].self_attention
    own = vars(attn)["forward"] = attn.forward
    try:
        with mmkv.wrapped(model, "prefixkv", 0.5):
            assert vars(attn)["forward"] is not own
        assert vars(attn)["forward"] is own
    finally:
        del vars(attn)["forward"]
    with mmkv.wrapped(model, "prefixkv", 0.5):
        pass
    assert "forward" not in vars(attn)


@cases("name", [x for x in OWN_DECODER if x.startswith(BEAMS)], *FEW[:3])
def test_beams_at_full_budget_are_the_plain_beams(name):
    """Beam search reorders rows in all layers, those with sliding windows included."""
    model = model_of(name)
    inputs = inputs_of(model, "padded")
    options = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    try:
        expected = model.generate(**inputs, **options)
    # Qwen's, in transformers 5.17: it looks for marks around images; Llama 4's repeats no pictures.
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"the plain model cannot search with beams over this prompt: {error}")
    with mmkv.wrapped(model, "adakv", 1.0, **short("adakv")):
        assert torch.equal(model.generate(**inputs, **options), expected)
