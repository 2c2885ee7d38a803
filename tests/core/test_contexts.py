"""A context is read once and asked about many times."""

import copy
import functools
import json
import math
from dataclasses import replace

import accelerate
import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

import mmkv
from helpers import zoo
from helpers.configs import CONFIGS
from helpers.contexts import rewrite
from helpers.marks import cases, older_than, since
from helpers.masking import held_by, held_sets, masked_logits
from helpers.models import PAD, make_inputs, make_model, row_of
from helpers.oracle import DECODING, generate, options_of, short
from mmkv.cache.group_index import GroupIndex
from mmkv.context_files import TOKENWISE
from mmkv.profiles import Profile

NEW = 5
POLICIES = ["condense", "snapkv", "adakv", "prefixkv", "h2o", "streaming"]


def question(length, seed=3, rows=1):
    ids = torch.randint(4, 120, (1, length), generator=torch.Generator().manual_seed(seed))
    ids = ids.expand(rows, -1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded(*questions):
    most = max(q["input_ids"].shape[1] for q in questions)
    pad = torch.nn.functional.pad
    sides = [(most - q["input_ids"].shape[1], 0) for q in questions]
    return {
        name: torch.cat([pad(q[name], side) for q, side in zip(questions, sides, strict=True)])
        for name in ("input_ids", "attention_mask")
    }


def ask(context, given, **options):
    """Logits [n, B, V] and tokens of a reply."""
    options |= {"return_dict_in_generate": True, "output_logits": True}
    out = context.ask(given, max_new_tokens=NEW, do_sample=False, **options)
    return torch.stack(out.logits), out.sequences, out.past_key_values


@cases("variant", DECODING, "condense", "h2o", ids=str)
def test_asking_equals_masking(models, variant):
    """Behind what `read` left, nothing is evicted but what decoding drops."""
    model, inputs = models("llama"), make_inputs("llama", (90, 41))
    asked, L = question(9, rows=2), model.config.num_hidden_layers
    policy = mmkv.get_policy(variant.policy, **options_of(variant))
    kept = []
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        context = mmkv.read(model, inputs)
        kept.append([held_by(context.cache, i) for i in range(L)])
        with model.register_forward_hook(
            lambda *args: kept.append([held_by(args[-1].past_key_values, i) for i in range(L)])
        ):
            logits, words, _ = ask(context, asked)
    for before, after in zip(kept[0], kept[1], strict=True):
        for b in range(2):
            wanted = [old | set(range(90, 99)) for old in held_sets(before, b)]
            assert held_sets(after, b) == wanted
    if policy.merge is not None and policy.merge.name != "groups":
        return  # the reference merges in every turn, and here nothing is merged
    feeds = [{"input_ids": asked["input_ids"]}]
    feeds += [{"input_ids": ids} for ids in words.split(1, dim=1)[:-1]]
    expected = masked_logits(model, inputs, feeds, kept)
    torch.testing.assert_close(logits, expected[1:], atol=1e-4, rtol=0)


@cases("policy", POLICIES, "condense")
def test_questions_at_once_equal_one_by_one(models, policy):
    """The context stays as it is; a batch of questions of any length is each by itself."""
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (70,))
    questions = [question(n, seed=n) for n in (4, 11, 7)]
    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        context = mmkv.read(model, inputs)
        before = [held_by(context.cache, i) for i in range(len(context.cache.layers))]
        size = context.nbytes
        alone = [ask(context, q) for q in questions]
        logits, words, _ = ask(context, padded(*questions))
        again = ask(context, questions[0])
        with pytest.raises(ValueError, match=r"attention_mask: a context gives it .* leave it out"):
            ask(context, questions[0], attention_mask=None)
    for i, (one, tokens, _) in enumerate(alone):
        torch.testing.assert_close(logits[:, i], one[:, 0], atol=1e-4, rtol=0)
        assert torch.equal(words[i], tokens[0])
    assert torch.equal(again[1], alone[0][1])
    assert context.nbytes == size
    assert all(torch.equal(x, held_by(context.cache, i)) for i, x in enumerate(before))


@cases(
    "name",
    [*zoo.FEW, "FalconForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM"],
    *("LlavaForConditionalGeneration", "Gemma2ForCausalLM"),
)
def test_every_kind_of_model(name, tmp_path):
    model = zoo.model_of(name)
    inputs = zoo.inputs_of(model, "one")
    asked = question(8)
    asked["input_ids"] = asked["input_ids"].clamp(min=8)
    plain, words, *_ = generate(model, {**inputs, **_behind(inputs, asked)}, new=NEW)
    with mmkv.wrapped(model, "condense", 1.0):
        context = mmkv.read(model, inputs)
        logits, tokens, _ = ask(context, asked)
        context.save(tmp_path / "read")
        assert torch.equal(ask(mmkv.load_context(tmp_path / "read", model), asked)[1], tokens)
    torch.testing.assert_close(logits, plain, atol=2e-4, rtol=0)
    assert torch.equal(tokens, words)


@since("5.18")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "InternVLForConditionalGeneration",
    ],
)
def test_appended_frames_equal_all_frames(name):
    """At full budget: pictures, their grids and positions are those of the whole prompt."""
    model = zoo.model_of(name)
    frames = [zoo.prompt(model, (60,), seed=s, pictures=1) for s in (1, 2, 3)]
    along = {*TOKENWISE, *(["pixel_values"] if "SmolVLM" in name else [])}
    whole = {k: torch.cat([f[k] for f in frames], int(k in along)) for k in frames[0]}
    options = {"max_new_tokens": NEW, "do_sample": False}
    want = model.generate(**whole, **options)[:, -NEW:]
    with mmkv.wrapped(model, "condense", 1.0):
        context = mmkv.read(model, frames[0])
        context.append(frames[1])
        assert torch.equal(context.ask(frames[2], **options), want)
        with pytest.raises(ValueError, match=r"2 beams or replies .* num_beams=1"):
            context.ask(frames[2], num_beams=2, **options)
        if "image_grid_thw" in whole:
            encoded = context.arguments_for(frames[2])["mm_encoder_outputs"]["image"]
            assert not encoded.pooler_output[0].requires_grad
            two = {k: x.expand(2, -1) if k in TOKENWISE else x for k, x in frames[2].items()}
            with pytest.raises(ValueError, match="image_grid_thw for 2 rows"):
                context.ask(two, **options)
    with mmkv.wrapped(model, "condense", 25):
        context = mmkv.read(model, frames[0])
        sizes = []
        for frame in frames * 2:
            context.append(frame)
            sizes.append(sum(n for x in context.report().layers for n in x.kept[0]))
        assert max(sizes) <= 25 * len(context.cache.layers) * len(
            context.report().layers[0].kept[0]
        )
        assert context.cache.lengths == [7 * 60]


def test_older_releases_cannot_encode_frames_after_a_context(monkeypatch):
    model = zoo.model_of("Qwen2_5_VLForConditionalGeneration")
    with mmkv.wrapped(model, "condense", 25):
        context = mmkv.read(model, zoo.prompt(model, (60,), pictures=1))
        monkeypatch.delattr(GenerationMixin, "_supports_mm_encoder_outputs", raising=False)
        with pytest.raises(ValueError, match=r"pixel_values .* need transformers 5\.18"):
            context.append(zoo.prompt(model, (60,), pictures=1))


def _behind(inputs, asked):
    """Every input that goes token by token, with the question's behind it."""
    ids = inputs["input_ids"]
    found = {}
    for name, x in inputs.items():
        if x.shape == ids.shape:
            more = asked.get(name, torch.zeros_like(asked["input_ids"], dtype=x.dtype))
            found[name] = torch.cat([x, more], 1)
    return found


@cases("policy", ["condense", "h2o", "snapkv"], "h2o", "snapkv")
def test_append_equals_a_turn(models, policy):
    """`append` competes with what is held, as the next turn of a conversation does."""
    model, inputs = models("llama"), make_inputs("llama", (60, 41))
    more = question(20, rows=2)
    whole = {k: torch.cat([inputs[k], more[k]], 1) for k in more}
    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        context = mmkv.read(model, inputs)
        context.append(more)
        *_, cache, _ = generate(model, inputs, new=1)
        *_, want, _ = generate(model, whole, new=1, past_key_values=cache)
        for i in range(len(want.layers)):
            assert torch.equal(context.cache.kept(i), want.kept(i))
        assert ask(context, question(5, rows=2))[1].shape == (2, NEW)
    assert context.cache.lengths == [80, 61]


@pytest.mark.parametrize("layer", [0, 1])
def test_interrupted_append_leaves_the_context_as_it_is(models, layer):
    def interrupt(*args):
        raise KeyboardInterrupt

    model, inputs, more = models("llama"), make_inputs("llama", (60,)), question(20)
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context, other = mmkv.read(model, inputs), mmkv.read(model, inputs)
        stop = model.model.layers[layer].register_forward_pre_hook(interrupt)
        with stop, pytest.raises(KeyboardInterrupt):
            context.append(more)
        assert torch.equal(ask(context, question(5))[0], ask(other, question(5))[0])
        context.append(more)
        other.append(more)
        assert torch.equal(ask(context, question(5))[0], ask(other, question(5))[0])


def storage(context):
    """Every tensor that its cache holds, of slots in use alone."""
    found = {}
    for i, layer in enumerate(context.cache.compressed):
        stored = layer.state.stored
        parts = stored.split() if hasattr(stored, "codes") else stored.read()
        for j, (block, stored) in enumerate(zip(layer.state.blocks, parts, strict=True)):
            filled = block.held >= 0
            slots = {"held": block.held, "scores": block.scores, "log_weights": block.log_weights}
            if hasattr(stored, "codes"):
                for name in ("codes", "steps"):
                    x = getattr(stored, name).unflatten(1, filled.shape)
                    slots[name] = x.permute(1, 2, 0, 3)
                is_exact = filled.gather(1, stored.exact_slots)
                found[i, j, "exact"] = stored.exact[is_exact]
                found[i, j, "exact_slots"] = stored.exact_slots[is_exact]
                found[i, j, "mean"] = stored.mean
                found[i, j, "how"] = torch.tensor([stored.bits, stored.start, stored.opened])
            else:
                slots["keys"], slots["values"] = stored
            found |= {(i, j, k): x[filled] for k, x in slots.items() if x is not None}
            found[i, j, "slots"] = filled[:, : block.schedule.used]
            found[i, j, "rows"] = torch.from_numpy(block.row_numbers)
            if block.bias is not None:
                found[i, j, "bias"] = block.bias[:, :, : block.schedule.used]
        rest = {k: getattr(layer.state, k) for k in ("sizes", "retained", "error")}
        index = layer.state.group_index
        rest["planes"] = None if index is None else index.planes
        found |= {(i, k): torch.as_tensor(x) for k, x in rest.items() if x is not None}
    return found


TYPES = None, "int8", "int4"
SAVED = [(x, TYPES[i % 3]) for i, x in enumerate(POLICIES)]
SAVED += [("condense", x) for x in TYPES if ("condense", x) not in SAVED]


@cases("policy, kv_dtype", SAVED, "snapkv")
def test_loaded_context_equals_saved_one(models, policy, kv_dtype, tmp_path):
    """Bit for bit, and so are replies and what a later turn leaves."""
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (70, 41))
    asked = question(8, rows=2)
    path = tmp_path / "read.safetensors"
    with mmkv.wrapped(model, policy, 0.4, kv_dtype=kv_dtype, **short(policy)):
        context = mmkv.read(model, inputs)
        for turn in (7, 8):
            context.save(path)
            found = mmkv.load_context(path, model)
            one, other = storage(context), storage(found)
            assert one.keys() == other.keys()
            for name, x in one.items():
                assert x.dtype == other[name].dtype, name
                assert torch.equal(x, other[name]), name
            # Slots set aside may differ, and so bytes.
            one, other = (
                replace(x, nbytes=0, layers=[replace(y, nbytes=0) for y in x.layers])
                for x in (context.report(), found.report())
            )
            assert one == other
            torch.testing.assert_close(ask(found, asked)[0], ask(context, asked)[0])
            for one in (context, found):
                one.append(question(9, seed=turn, rows=2))
    for i in range(len(found.cache.layers)):
        assert torch.equal(found.cache.kept(i), context.cache.kept(i))
        for one, other in zip(found.cache.groups(i), context.cache.groups(i), strict=True):
            assert torch.equal(one, other)
    assert found.cache.lengths == context.cache.lengths


@pytest.mark.parametrize("decode", ["grow", "ratio"])
def test_a_layer_that_keeps_no_token_is_saved_and_continued(models, decode, tmp_path):
    model, inputs, asked = models("llama"), make_inputs("llama", (20, 26)), question(8, rows=2)
    path = tmp_path / "read.safetensors"
    with mmkv.wrapped(model, "knorm", 0.04, layers="pyramid", decode=decode):
        context = mmkv.read(model, inputs)
        assert not (context.cache.kept(1) >= 0).any()
        assert context.report().layers[1].mean_kept == 0
        context.save(path)
        found = mmkv.load_context(path, model)
        torch.testing.assert_close(ask(found, asked)[0], ask(context, asked)[0])
        for one in (context, found):
            one.append(question(9, rows=2))
    for i in range(len(found.cache.layers)):
        assert torch.equal(found.cache.kept(i), context.cache.kept(i))


@cases(
    "policy, kv_dtype",
    [("condense", x) for x in TYPES] + [("h2o", None), ("snapkv", "int8"), ("adakv", "int4")],
    ("condense", "int4"),
)
def test_a_saved_context_has_about_the_bytes_of_its_cache(policy, kv_dtype, tmp_path):
    config, path = CONFIGS["LlamaForCausalLM"](), tmp_path / "read"
    config.head_dim = 64
    model = zoo.build("LlamaForCausalLM", config, "sdpa")
    with mmkv.wrapped(model, policy, 0.3, kv_dtype=kv_dtype, **short(policy)):
        context = mmkv.read(model, make_inputs("llama", (1500,)))
        context.save(path)
    given = sum(x.nbytes for x in context.inputs.values())
    assert path.stat().st_size <= 1.1 * context.nbytes + given + 4096


@cases("lengths", [(88, 47), (12,)], (88, 47), ids=str)
@cases(
    "name",
    ["Gemma3ForCausalLM", "Gemma2ForCausalLM", "Gemma4ForCausalLM", "Llama4ForCausalLM"],
    "Gemma3ForCausalLM",
)
def test_windows_of_sliding_layers_are_saved_too(name, lengths, tmp_path):
    model, path = zoo.model_of(name), tmp_path / "read.safetensors"
    asked = question(8, rows=len(lengths))
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context = mmkv.read(model, zoo.prompt(model, lengths))
        context.save(path)
        found = mmkv.load_context(path, model)
        for one in (context, found):
            one.append(asked)
        for one, other in zip(ask(found, asked)[:2], ask(context, asked)[:2], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_a_file_of_another_model_or_wrap_is_refused(models, tmp_path):
    model, inputs, path = models("llama"), make_inputs("llama", (40,)), tmp_path / "read"
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        mmkv.read(model, inputs).save(path)
        mmkv.load_context(path, model)
    with pytest.raises(ValueError, match="is not wrapped"):
        mmkv.load_context(path, model)
    half, other = copy.deepcopy(model).bfloat16(), copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    turned = type(model)(config).eval()
    turned.load_state_dict(model.state_dict())
    same = "condense", 0.4, {"least": 0}
    remedy = "give the policy, size and options that it was read with"
    for one, (policy, budget, options), message in (
        (model, ("snapkv", 0.4, {"window": 6}), remedy),
        (model, ("condense", 0.4, {"chunk": 64}), remedy),
        (model, ("condense", 0.5, {"least": 0}), r"budget.*0\.4"),
        (model, ("condense", None, {"memory": 1 / 4}), r"budget=0\.4, .* memory=0\.25 now"),
        (half, same, r"read in torch\.float32, and the model is in .*bfloat16"),
        *((x, same, "other weights") for x in (other, turned, make_model("llama-mha"))),
    ):
        with mmkv.wrapped(one, policy, budget, **options), pytest.raises(ValueError, match=message):
            mmkv.load_context(path, one)


def test_a_file_of_other_layer_sizes_or_chunks_is_refused(models, tmp_path):
    model, inputs, path = models("llama"), make_inputs("llama", (60,)), tmp_path / "read"
    profiles = [(0.6, 0.2), (0.2, 0.6)]
    wraps = [{"profile": Profile(fractions=x, budget=0.4)} for x in profiles]
    with mmkv.wrapped(model, "prefixkv", 0.4, **wraps[0]):
        mmkv.read(model, inputs).save(path)
        mmkv.load_context(path, model)
    for wrap, message in ((wraps[1], "fractions="), ({"evict_chunks": True}, "evict_chunks=None")):
        with (
            mmkv.wrapped(model, "prefixkv", 0.4, **wrap),
            pytest.raises(ValueError, match=f"read with .*{message}"),
        ):
            mmkv.load_context(path, model)


def test_context_with_other_weights_raises(tmp_path):
    model, asked, path = make_model("llama"), question(8), tmp_path / "read"
    o_proj = model.model.layers[1].self_attn.o_proj.weight
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context = mmkv.read(model, make_inputs("llama", (40,)))
        wanted, was = ask(context, asked)[0], o_proj.detach().clone()
        o_proj.data[:, 16:32] = 0.0  # unseen by torch's version counter
        for use in (
            lambda: ask(context, asked),
            lambda: context.append(asked),
            lambda: context.save(path),
        ):
            with pytest.raises(ValueError, match="read with other weights or adapters"):
                use()
        assert not path.exists()
        o_proj.data.copy_(was)
        assert torch.equal(ask(context, asked)[0], wanted)
        context.save(path)
        with torch.no_grad():
            o_proj[:, 16:32] = 0.0
        with pytest.raises(ValueError, match="a model with other weights or adapters"):
            mmkv.load_context(path, model)


def test_a_context_of_offloaded_weights_is_asked_but_not_saved(tmp_path):
    model = make_model("llama")
    with mmkv.wrapped(model, "snapkv", 0.4, **short("snapkv")):
        model.register_buffer("offloaded", torch.ones(3, device="meta"))
        context = mmkv.read(model, make_inputs("llama", (40,)))
        assert ask(context, question(8))[1].shape == (1, NEW)
        with pytest.raises(ValueError, match="offloaded weights cannot be saved"):
            context.save(tmp_path / "read")
        del model.offloaded
        mmkv.read(model, make_inputs("llama", (40,))).save(tmp_path / "read")
        model.register_buffer("offloaded", torch.ones(3, device="meta"))
        with pytest.raises(ValueError, match=r"weights are offloaded, .* without offloading"):
            mmkv.load_context(tmp_path / "read", model)


def test_a_model_whose_weights_are_all_offloaded_reads_contexts():
    model, inputs = make_model("llama"), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "snapkv", 0.4, **short("snapkv")):
        expected = ask(mmkv.read(model, inputs), question(8))[1]
    accelerate.cpu_offload(model, execution_device="cpu")
    with mmkv.wrapped(model, "snapkv", 0.4, **short("snapkv")):
        assert torch.equal(ask(mmkv.read(model, inputs), question(8))[1], expected)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_a_model_with_lora_on_its_embeddings_reads_contexts():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "embed_tokens"])
    lora = peft.get_peft_model(make_model("llama"), config).eval()
    with mmkv.wrapped(lora, "snapkv", 0.4, **short("snapkv")):
        context = mmkv.read(lora, make_inputs("llama", (40,)))
        assert ask(context, question(8))[1].shape == (1, NEW)
        with pytest.raises(ValueError, match=r"ids from 4 to 999: expected 0 to \d+; encode"):
            context.ask(torch.tensor([4, 999]))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_a_file_belongs_to_the_active_adapter(tmp_path):
    """An adapter that is loaded and not active makes no difference."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, inputs = make_model("llama"), make_inputs("llama", (40,))
    config = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    base, path = tmp_path / "base", tmp_path / "read"
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        mmkv.read(model, inputs).save(base)
    lora = peft.get_peft_model(model, config, "one").eval()
    with mmkv.wrapped(lora, "condense", 0.4, least=0):
        mmkv.read(lora, inputs).save(path)
        lora.add_adapter("other", config)
        mmkv.load_context(path, lora)

        def refused(path):
            with pytest.raises(ValueError, match="other weights or adapters"):
                mmkv.load_context(path, lora)

        refused(base)
        lora.set_adapter("other")
        refused(path)
        lora.set_adapter("one")
        layer = lora.get_submodule("base_model.model.model.layers.1.self_attn.v_proj")
        layer.set_scale("one", 0.5)
        refused(path)
        layer.set_scale("one", 1.0)
        mmkv.load_context(path, lora)
        context = mmkv.load_context(path, lora)
        with lora.disable_adapter():
            refused(path)
            mmkv.load_context(base, lora)
            for use in (context.ask, context.append):
                with pytest.raises(ValueError, match="read with other weights or adapters"):
                    use(question(8))
        context.ask(question(8), max_new_tokens=2)
        lora.merge_adapter()
        with pytest.raises(ValueError, match="read with other weights or adapters"):
            context.ask(question(8))


@pytest.mark.parametrize("how", ["no context", "flipped", "cut", "nowhere", "folder"])
def test_unreadable_file_is_named(models, how, tmp_path):
    model, path = models("llama"), tmp_path / "read"
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context = mmkv.read(model, make_inputs("llama", (40,)))
        context.save(path)
        raw = bytearray(path.read_bytes())
        raw[-9] ^= 1
        change = {
            "no context": lambda: save_file({"x": torch.ones(1)}, path),
            "flipped": lambda: path.write_bytes(raw),
            "cut": lambda: path.write_bytes(raw[:-9]),
            "nowhere": path.unlink,
            "folder": lambda: (path.unlink(), path.mkdir()),
        }[how]
        wanted = {
            "no context": "it holds no context",
            "flipped": "damaged",
            "folder": "unreadable: it is a folder",
        }.get(how, "unreadable")
        with pytest.raises(ValueError, match=r"below: .*: there is no folder"):
            context.save(path / "below")
        change()
        with pytest.raises(ValueError, match=f"read: {wanted}"):
            mmkv.load_context(path, model)


def put(name, value, where=(-1,)):
    """One number of a tensor is another."""

    def change(tensors, about):
        if where == "added":
            tensors[name] += value
        else:
            tensors[name][where] = value

    return change


def made(name, change):
    """A tensor is another one; None: it is gone."""

    def changed(tensors, about):
        found = change(tensors.get(name))
        tensors.update({name: found}) if found is not None else tensors.pop(name)

    return changed


def said(name, value):
    """An entry of the header is another."""
    return lambda tensors, about: about.update({name: value})


def floats(name, other=torch.float16):
    """What no tensor of numbers may be."""
    return [
        *(put(name, value, (0,)) for value in (float("nan"), float("inf"))),
        made(name, lambda x: x[..., 1:]),
        made(name, lambda x: torch.cat([x, x])),
        made(name, lambda x: x.to(other)),
        made(name, lambda x: x.to(torch.float64)),
        made(name, lambda x: x[None]),
        made(name, lambda x: x.new_zeros(())),
    ]


def lead_itself(group):
    """A head's first member that does not lead its group is a group by itself."""
    place = torch.arange(group.shape[-1])
    member = ((group[0, 0] >= 0) & (group[0, 0] != place)).nonzero()[0, 0]
    group[0, 0, member] = member
    return group


def regrouped(change):
    """A file whose tokens have other leaders."""
    return made(
        KEPT + "group_index", lambda x: GroupIndex.of(change(GroupIndex(x, 40).leaders())).planes
    )


def led_by(token, ahead):
    """A file whose token has the leader that is so many leaders ahead."""

    def change(planes):
        w, (byte, bit) = planes.shape[2], divmod(token, 8)
        bits = torch.tensor([(ahead + 2 ** (w - 1)) >> i & 1 for i in range(w)])
        planes[0, 0, :, byte] = planes[0, 0, :, byte] & ~(1 << bit) | bits << bit
        return planes

    return made(KEPT + "group_index", change)


KEPT = "layers.1."
HOSTILE = {
    **{f"{n}-{i}": f for n in ("keys", "values") for i, f in enumerate(floats(KEPT + n))},
    **{f"scores-{i}": f for i, f in enumerate(floats(KEPT + "scores"))},
    **{f"bias-{i}": f for i, f in enumerate(floats(KEPT + "bias"))},
    **{f"retained-{i}": f for i, f in enumerate(floats(KEPT + "retained")[:6])},
    **{
        f"no {n}": made(KEPT + n, lambda x: None)
        for n in ("keys", "values", "positions", "scores", "bias", "group_index")
    },
    "no pairs": made(KEPT + "keys", lambda x: x[:0]),
    "pairs of fewer slots": made(KEPT + "keys", lambda x: x[1:]),
    "negative scores": put(KEPT + "scores", -0.1),
    "bias too large": put(KEPT + "bias", 90.0, slice(None)),
    "bias of one token": put(KEPT + "bias", 0.5),
    "retained -0.1": put(KEPT + "retained", -0.1, 0),
    "retained 1.1": put(KEPT + "retained", 1.1, 0),
    "position T": put(KEPT + "positions", 40),
    "position -1": put(KEPT + "positions", -1, (0,)),
    "position behind the prompt": put(KEPT + "positions", 2**14),
    "positions repeat": put(KEPT + "positions", 39, (-2,)),
    "positions backwards": made(KEPT + "positions", lambda x: x.flip(-1)),
    "positions of a head backwards": put(KEPT + "positions", torch.tensor([39, 38]), slice(-2, 99)),
    "a sink is lost": put(KEPT + "positions", 1, (0,)),
    "the newest is lost": put(KEPT + "positions", 38),
    **{f"token {i} masked": put("inputs.attention_mask", 0, (0, i)) for i in range(9, 30, 4)},
    "positions of int64": made(KEPT + "positions", lambda x: x.long()),
    "a position": made(KEPT + "positions", lambda x: x[0]),
    "positions of fewer slots": made(KEPT + "positions", lambda x: x[1:]),
    **{
        f"{name}-{i}": made(KEPT + name, change)
        for name in ("counts", "sizes")
        for i, change in enumerate((
            lambda x: None, torch.Tensor.long, torch.Tensor.float, torch.flatten, lambda x: -x,
            lambda x: x + 1000, lambda x: x[..., 1:], lambda x: x.new_full(x.shape, 2**31 - 1),
        ))
        if not (name == "sizes" and change is torch.flatten)
    },
    "another head's slot": put(KEPT + "counts", torch.tensor([5, -5]), "added"),
    "more slots": put(KEPT + "counts", torch.tensor([0, 1]), "added"),
    "groups of int64": made(KEPT + "group_index", lambda x: x.long()),
    "groups of fewer tokens": made(KEPT + "group_index", lambda x: x[..., 1:]),
    "groups of more bits": made(KEPT + "group_index", lambda x: x.repeat(1, 1, 9, 1)),
    "groups of one bit": made(KEPT + "group_index", lambda x: x[:, :, :1]),
    "groups of no bits": made(KEPT + "group_index", lambda x: x[:, :, :0]),
    "a leader behind the last": led_by(39, 1),
    "a leader before the first": led_by(0, -1),
    "a leader that is not held": regrouped(lambda x: x.masked_fill(x >= 0, 1)),
    "a group of one that is not held": regrouped(lead_itself),
    "error without kv_dtype": made(KEPT + "error", lambda x: torch.zeros(1, 2)),
    "no ids": made("inputs.input_ids", lambda x: None),
    "ids of floats": made("inputs.input_ids", lambda x: x.float()),
    "ids in a row": made("inputs.input_ids", lambda x: x[0]),
    "ids without tokens": made("inputs.input_ids", lambda x: x[:, :0]),
    "an id too large": put("inputs.input_ids", 10**6, (0, 3)),
    "a negative id": put("inputs.input_ids", -1, (0, 3)),
    "no mask": made("inputs.attention_mask", lambda x: None),
    "a shorter mask": made("inputs.attention_mask", lambda x: x[:, 1:]),
    "a mask of 2": put("inputs.attention_mask", 2, (0, 3)),
    "a mask of nothing": made("inputs.attention_mask", torch.zeros_like),
    "padding at the end": put("inputs.attention_mask", 0, (0, -1)),
    "padding at the start": put("inputs.attention_mask", 0, (0, 0)),
    "other inputs": made("inputs.labels", lambda x: torch.zeros(1, 40, dtype=torch.long)),
    "grids": made("inputs.image_grid_thw", lambda x: torch.ones(1, 3, dtype=torch.long)),
    "another tensor": made("weights", lambda x: torch.zeros(3)),
    "a long name": made("x" * 9000, lambda x: torch.zeros(3)),
    "many pictures": lambda tensors, about: about.update(roles=["user"], pictures=[10_001]),
    "another layer": made("layers.7.keys", lambda x: torch.zeros(3)),
    "one layer less": made("layers.1.keys", lambda x: None),
    "a window": made("windows.0.keys", lambda x: torch.zeros(1, 2, 3, 16)),
    "no header": lambda tensors, about: "",
    "header no JSON": lambda tensors, about: "not JSON",
    "header a list": lambda tensors, about: "[]",
    "header nested": lambda tensors, about: "[" * 10**5,
    "header a long number": lambda tensors, about: "9" * 5000,
    "header of one entry": lambda tensors, about: json.dumps({"version": 7}),
    **{
        f"{name}={value!r}": said(name, value)
        for name, values in {
            "version": (3, 5, 6, True, "7", None, 7.0),
            "plan": ("", {}, [], "[" * 10**5, {"policy": []}, 3, None),
            "weights": ("", 3),
            "dtype": ("torch.float16", "nonsense", 3),
            "roles": (["user"], [3], "user", None),
            "pictures": ([1], [-1], ["a"], {}),
            "lead": (3, None),
            "task": ("qa", 3, None),
            "learned": ([0.2, 0.8], [1, 0], [0.5], ["a"], [float("nan")] * 2, {}, None),
            "more": (1,),
        }.items()
        for value in values
    },
}  # fmt: skip


@cases("name", HOSTILE, *list(HOSTILE)[::10])
def test_a_hostile_file_is_refused(models, read_file, name, tmp_path):
    """Signed anew: each change is found by its own check, not by the digest of the whole."""
    model, path = models("llama"), tmp_path / "bad"
    path.write_bytes(read_file.read_bytes())
    rewrite(path, HOSTILE[name])
    with (
        mmkv.wrapped(model, "condense", 0.4, least=0),
        pytest.raises(ValueError, match=r"bad: (?!damaged)") as found,
    ):
        mmkv.load_context(path, model)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 400


@cases("policy", ["snapkv", "condense"], "snapkv")
def test_hostile_masks_of_kept_or_grouped_tokens_raise(models, policy, tmp_path):
    model, path, n = models("llama"), tmp_path / "read", 0
    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        context = mmkv.read(model, make_inputs("llama", (40,)))
        shares = [context.cache.shares(i) for i in range(len(context.cache.layers))]
        shares = torch.stack(shares)
        context.save(path)
        good = path.read_bytes()
        for i in (shares > 0).any(0).any(1)[0].nonzero()[:, 0].tolist():
            path.write_bytes(good)
            rewrite(path, put("inputs.attention_mask", 0, (0, i)))
            with pytest.raises(ValueError, match=r"read: (?!damaged)"):
                mmkv.load_context(path, model)
            n += 1
    assert n > 20


@pytest.mark.slow
def test_hostile_errors_windows_and_grids_are_refused(tmp_path):
    """What the table's model has not: 8 bits, a sliding window, pictures with grids, a film."""
    path, qwen = tmp_path / "read", "Qwen2_5_VLForConditionalGeneration"
    for name, tensor, changes in (
        ("Gemma3ForCausalLM", "windows.0.values", floats("windows.0.values")),
        ("LlamaForCausalLM", "layers.0.error", [
            *(lambda tensors, about, x=x: about.update(roles=["user"], pictures=[x])
              for x in (-1, True, 0.5, 10**9)),
            *floats("layers.0.error"), put("layers.0.error", -0.1, 0),
            made("layers.0.error", lambda x: None),
        ]),
        *(("LlamaForCausalLM", f"layers.0.{part}", [
            *floats(f"layers.0.{part}"), made(f"layers.0.{part}", lambda x: None),
            made(f"layers.0.{part}", lambda x: x[1:]),
        ]) for part in ("exact", "mean")),
        ("LlamaForCausalLM", "layers.0.steps", floats("layers.0.steps")[:4]),
        ("LlamaForCausalLM", "layers.0.codes", [
            made("layers.0.codes", change)
            for change in (torch.Tensor.short, torch.flatten, lambda x: x[1:], lambda x: x[:, 1:],
                           lambda x: None, lambda x: torch.cat([x, x]))
        ]),
        (qwen, "inputs.image_grid_thw", [
            put("inputs.image_grid_thw", value, (0, 1)) for value in (0, -4, 5, 9, 2**40)
        ] + [  # as many patches as 8 x 8, of which the model cannot merge two by two
            put("inputs.image_grid_thw", torch.tensor(grid), 0)
            for grid in ((1, 64, 1), (64, 1, 1), (4, 16, 1))
        ] + [
            made("inputs.image_grid_thw", change)
            for change in (torch.Tensor.float, torch.flatten, lambda x: x[:0], lambda x: None)
        ]),
        (qwen, "inputs.mm_token_type_ids", [
            put("inputs.mm_token_type_ids", 3, (0, 0)), put("inputs.mm_token_type_ids", 2, (0, 0)),
            made("inputs.mm_token_type_ids", torch.zeros_like),
        ]),
        (qwen, "inputs.second_per_grid_ts", [
            put("inputs.second_per_grid_ts", x, 0) for x in (0.0, -1.0, math.nan, math.inf)
        ]),
    ):  # fmt: skip
        model = zoo.model_of(name)
        kv_dtype = "int8" if name == "LlamaForCausalLM" else None
        with mmkv.wrapped(model, "condense", 0.4, least=0, kv_dtype=kv_dtype):
            of_film = film(model, 1, [2.0]) if "second" in tensor else None
            context = mmkv.read(model, of_film or zoo.prompt(model, (88,)))
            for change in changes:
                context.save(path)
                rewrite(path, lambda tensors, about: None)
                mmkv.load_context(path, model)
                rewrite(path, change)
                with pytest.raises(ValueError, match=r"read: (?!damaged)") as found:
                    mmkv.load_context(path, model)
                assert "\n" not in str(found.value)


@pytest.fixture(scope="module")
def read_file(tmp_path_factory):
    """A good file, which is one still when it is signed anew."""
    model, path = make_model("llama"), tmp_path_factory.mktemp("context") / "good"
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        mmkv.read(model, make_inputs("llama", (40,))).save(path)
        rewrite(path, lambda tensors, about: None)
        mmkv.load_context(path, model)
    return path


GRIDS = ("Qwen2_5_VL", "Qwen2VL", "Qwen3VL", "Qwen3_5", "Glm4v")
GRIDS = [f"{name}ForConditionalGeneration" for name in GRIDS]


@cases("name", GRIDS, GRIDS[0])
def test_what_is_read_between_questions_changes_no_reply(name):
    """Models with three axes of positions remember how far the last call's pictures moved text."""
    model = zoo.model_of(name)
    first, other = (zoo.prompt(model, (60 + 28 * i,), seed=i, pictures=1 + i) for i in range(2))
    with mmkv.wrapped(model, "condense", 0.5, least=0):
        context = mmkv.read(model, first)
        wanted = ask(context, question(8))[0]
        model.generate(**other, max_new_tokens=2)
        assert torch.equal(ask(context, question(8))[0], wanted)
        model.generate(**question(30), max_new_tokens=2)
        assert torch.equal(ask(context, question(8))[0], wanted)


def film(model, seed, seconds):
    g = torch.Generator().manual_seed(seed)
    frames = zoo._picture(model, 2, g)
    ids = torch.randint(8, 60, (1, 7 + frames.count), generator=g)
    ids[:, 5:-2] = frames.token
    kinds = zoo._kinds(model, ids)
    return {
        **padded({"input_ids": ids, "attention_mask": torch.ones_like(ids)}),
        **frames.inputs,
        **kinds,
        "second_per_grid_ts": seconds,
    }


@since("5.18")
def test_seconds_of_films_are_remembered(tmp_path):
    model, path = zoo.model_of(GRIDS[0]), tmp_path / "read.safetensors"
    one, two, asked = film(model, 1, [2.0]), film(model, 2, torch.tensor([3.0])), question(8)
    asked["input_ids"] = asked["input_ids"].clamp(min=8)

    def whole(*parts):
        ids = torch.cat([x["input_ids"] for x in parts], 1)
        more = {
            name: torch.cat([torch.as_tensor(x[name]) for x in parts if name in x])
            for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
        }
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
        return generate(model, {**given, **zoo._kinds(model, ids)}, new=NEW)[0]

    close = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=0)
    plain, both = whole(one, asked), whole(one, two, asked)
    with mmkv.wrapped(model, "condense", 1.0):
        context = mmkv.read(model, one)
        close(ask(context, asked)[0], plain)
        context.save(path)
        close(ask(mmkv.load_context(path, model), asked)[0], plain)
        context.append(two)
        close(ask(context, asked)[0], both)


@cases("rows", [(60,), (60, 41)], (60, 41), ids=str)
def test_a_question_is_asked_with_beams(models, rows, monkeypatch):
    model, inputs = models("llama"), make_inputs("llama", rows)
    asked = question(8, rows=len(rows))
    whole = {k: torch.cat([inputs[k], asked[k]], 1) for k in asked}
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": NEW}
    wanted = model.generate(**whole, **beams)[:, whole["input_ids"].shape[1] :]
    with mmkv.wrapped(model, "condense", 1.0):
        context = mmkv.read(model, inputs)
        assert torch.equal(context.ask(asked, **beams), wanted)
        config = copy.deepcopy(model.generation_config)
        config.update(**beams)
        assert torch.equal(context.ask(asked, generation_config=config), wanted)
        with monkeypatch.context() as patch:  # `generate` takes what a config leaves unset from it
            for name, value in beams.items():
                patch.setattr(model.generation_config, name, value)
            unset = GenerationConfig(pad_token_id=PAD)
            assert torch.equal(context.ask(asked, generation_config=unset), wanted)
        torch.manual_seed(0)
        drawn = context.ask(asked, do_sample=True, num_return_sequences=3, max_new_tokens=NEW)
        assert drawn.shape == (3 * len(rows), NEW)


@pytest.mark.parametrize(
    "name", ["Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"]
)
def test_a_picture_after_a_context_of_ids_equals_one_prompt(name, tmp_path):
    """A processor says which tokens are of pictures; ids that were read before it are text."""
    model = zoo.model_of(name)
    ids = torch.randint(8, 120, (1, 60), generator=torch.Generator().manual_seed(2))
    asked = zoo.prompt(model, (50,), seed=4, pictures=1)
    (types,) = [x for x in asked if x.endswith("type_ids")]
    whole = {
        **asked,
        "input_ids": torch.cat([ids, asked["input_ids"]], dim=1),
        "attention_mask": torch.ones(1, 110, dtype=torch.long),
        types: torch.cat([torch.zeros_like(ids), asked[types]], dim=1),
    }
    logits, *_ = generate(model, whole, new=NEW)
    with mmkv.wrapped(model, "full"):
        found = ask(mmkv.read(model, ids), asked)[0]
        context = mmkv.read(model, ids)
        context.append(asked)
        context.save(tmp_path / "context")
        loaded = mmkv.load_context(tmp_path / "context", model)
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)
    assert loaded.inputs[types].tolist() == whole[types].tolist()


def test_a_model_with_stop_strings_reads_without_a_tokenizer(models, monkeypatch):
    model, inputs = models("llama"), make_inputs("llama", (40,))
    monkeypatch.setattr(model.generation_config, "stop_strings", ["end"])
    monkeypatch.setattr(model.generation_config, "token_healing", True)
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        assert mmkv.read(model, inputs).cache.get_seq_length() == 40


def test_a_model_told_to_use_no_cache_is_asked_with_one(models, monkeypatch):
    model, inputs = models("llama"), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context = mmkv.read(model, inputs)
        wanted = ask(context, question(8))[0]
        monkeypatch.setattr(model.generation_config, "use_cache", False)
        assert torch.equal(ask(context, question(8))[0], wanted)
        assert torch.equal(ask(mmkv.read(model, inputs), question(8))[0], wanted)


def test_invalid_questions_raise(models):
    model, inputs = models("llama"), make_inputs("llama", (40, 30))
    with pytest.raises(ValueError, match="is not wrapped"):
        mmkv.read(model, inputs)
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        with pytest.raises(ValueError, match="no input_ids among"):
            mmkv.read(model, {"pixel_values": torch.zeros(1)})
        context = mmkv.read(model, inputs)
        with pytest.raises(ValueError, match="3 rows for a context of 2"):
            context.ask(question(4, rows=3), max_new_tokens=2)
        with pytest.raises(ValueError, match="1 rows for a context of 2"):
            context.append(question(4))
        empty = question(0, rows=2)
        for use in (context.ask, context.append, functools.partial(mmkv.read, model)):
            for given in (empty, empty["input_ids"]):
                with pytest.raises(ValueError, match=r"input_ids of shape \(2, 0\): .* tokens"):
                    use(given)
        with pytest.raises(ValueError, match=r"position_ids: .* leave position_ids out"):
            mmkv.read(model, {**inputs, "position_ids": torch.arange(40).expand(2, -1)})
        with pytest.raises(ValueError, match=r"attention_mask of shape \(2, 3\): .*\(2, 4\)"):
            context.ask(question(4, rows=2) | {"attention_mask": torch.ones(2, 3)})
        with pytest.raises(ValueError, match="prefill_chunk_size=0: expected a number of tokens"):
            mmkv.read(model, inputs, prefill_chunk_size=0)
        with pytest.raises(ValueError, match=r'input_ids is a list: .* return_tensors="pt"'):
            mmkv.read(model, {"input_ids": inputs["input_ids"].tolist()})
        with pytest.raises(ValueError, match="use_cache=False leaves nothing"):
            context.ask(padded(question(4), question(5)), use_cache=False)
    with (
        mmkv.wrapped(model, "condense", 0.5, least=0),
        pytest.raises(ValueError, match="made under"),
    ):
        context.ask(padded(question(4), question(5)), max_new_tokens=2)


@pytest.mark.skipif(not older_than("5.24"), reason="Llama 4 reads no pictures in transformers 5.24")
def test_pictures_are_read_in_the_models_type():
    """A processor gives float32, which Llama 4's vision tower does not take in bfloat16."""
    model = copy.deepcopy(zoo.model_of("Llama4ForConditionalGeneration")).bfloat16()
    inputs = zoo.inputs_of(model, "one")
    inputs["pixel_values"] = inputs["pixel_values"].float()
    with mmkv.wrapped(model, "condense", 1.0):
        assert mmkv.read(model, inputs).cache.lengths == [inputs["input_ids"].shape[1]]


def test_rows_of_one_head_that_lost_tokens_are_asked_as_alone(models):
    """A layer may keep the longest row whole, so its width is the prompt's."""
    model, inputs = models("llama-mqa"), make_inputs("llama", (60, 12, 41))
    question = torch.randint(4, 100, (3, 3), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    with mmkv.wrapped(model, "xkv", 0.97, window=1, kernel_size=1):
        together = mmkv.read(model, inputs).ask({"input_ids": question}, **options)
        for row in range(3):
            context = mmkv.read(model, row_of(inputs, row))
            alone = context.ask({"input_ids": question[row : row + 1]}, **options)
            for x, y in zip(together.logits, alone.logits, strict=True):
                torch.testing.assert_close(x[row], y[0])


def test_a_reset_cache_of_a_question_evicts_prompts_again(models):
    model, prompt = models("llama"), make_inputs("llama", (90,), seed=4)
    with mmkv.wrapped(model, "snapkv", 0.2, **short("snapkv")):
        expected, _, _, held = generate(model, prompt, new=5)
        *_, cache = ask(mmkv.read(model, make_inputs("llama", (60,))), question(9))
        cache.reset()
        logits, _, _, kept = generate(model, prompt, new=5, past_key_values=cache)
    torch.testing.assert_close(logits, expected)
    assert all(torch.equal(*pair) for pair in zip(held[0], kept[0], strict=True))
