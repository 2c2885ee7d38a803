"""A context is read once and asked about many times."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mmkv
from helpers import zoo
from helpers.marks import slow_except
from helpers.masking import held_by, masked_logits
from helpers.models import IMAGE, PAD, make_inputs, make_model
from helpers.oracle import VARIANTS, generate, options_of
from mmkv.registry import exact_share

NEW = 5
POLICIES = ["condense", "snapkv", "adakv", "prefixkv", "h2o", "streaming"]


def question(length, seed=3):
    ids = torch.randint(4, 120, (1, length), generator=torch.Generator().manual_seed(seed))
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
    out = context.ask(
        given,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return torch.stack(out.logits), out.sequences, out.past_key_values


def options_for(policy):
    return {"window": 6} if policy in ("snapkv", "adakv") else exact_share(policy)


@pytest.mark.parametrize(
    "variant",
    slow_except(VARIANTS, "condense", "snapkv", "h2o"),
    ids=str,
)
def test_asking_equals_masking(models, variant):
    """Behind what `read` left, nothing is evicted but what decoding drops."""
    model, inputs, asked = models("llama"), make_inputs("llama", (90, 41)), question(9)
    asked = {k: x.expand(2, -1) for k, x in asked.items()}
    policy = mmkv.get_policy(variant.policy, **options_of(variant))
    kept = []
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        context = mmkv.read(model, inputs)
        kept.append([held_by(context.cache, i) for i in range(3)])
        hook = model.register_forward_hook(
            lambda *args: kept.append([held_by(args[-1].past_key_values, i) for i in range(3)])
        )
        try:
            logits, words, _ = ask(context, asked)
        finally:
            hook.remove()
    for before, after in zip(kept[0], kept[1], strict=True):
        for b in range(2):
            for h in range(before.shape[1]):
                old = {p for p in before[b, h].tolist() if p >= 0}
                assert {p for p in after[b, h].tolist() if p >= 0} == old | set(range(90, 99))
    if policy.merge is not None and policy.merge.name != "groups":
        return  # the reference merges in every turn, and here nothing is merged
    feeds = [{"input_ids": asked["input_ids"]}]
    feeds += [{"input_ids": ids} for ids in words.split(1, dim=1)[:-1]]
    expected = masked_logits(model, inputs, feeds, kept, reposition=policy.reposition)
    torch.testing.assert_close(logits, expected[1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_questions_at_once_are_one_by_one(models, policy):
    """The context stays as it is; a batch of questions of any length is each by itself."""
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (70,))
    questions = [question(n, seed=n) for n in (4, 11, 7)]
    with mmkv.wrapped(model, policy, 0.4, **options_for(policy)):
        context = mmkv.read(model, inputs)
        before = [held_by(context.cache, i) for i in range(3)]
        size = context.nbytes
        alone = [ask(context, q) for q in questions]
        logits, words, _ = ask(context, padded(*questions))
        again = ask(context, questions[0])
    for i, (one, tokens, _) in enumerate(alone):
        torch.testing.assert_close(logits[:, i], one[:, 0], atol=1e-4, rtol=0)
        assert torch.equal(words[i], tokens[0])
    assert torch.equal(again[1], alone[0][1])
    assert context.nbytes == size
    assert all(torch.equal(x, held_by(context.cache, i)) for i, x in enumerate(before))


@pytest.mark.parametrize("name", slow_except(zoo.FEW, "LlavaForConditionalGeneration"))
def test_every_kind_of_model(name):
    model = zoo.model_of(name)
    inputs = zoo.inputs_of(model, "one")
    asked = question(8)
    asked["input_ids"] = asked["input_ids"].clamp(min=8)
    out = model.generate(
        **{**inputs, **_behind(inputs, asked)},
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    with mmkv.wrapped(model, "condense", 1.0):
        logits, tokens, _ = ask(mmkv.read(model, inputs), asked)
    torch.testing.assert_close(logits, torch.stack(out.logits), atol=2e-4, rtol=0)
    assert torch.equal(tokens, out.sequences[:, -NEW:])


@pytest.mark.parametrize(
    "name",
    slow_except(
        [
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen2VLForConditionalGeneration",
            "SmolVLMForConditionalGeneration",
            "LlavaForConditionalGeneration",
            "InternVLForConditionalGeneration",
        ],
        "Qwen2_5_VLForConditionalGeneration",
    ),
)
def test_frames_are_read_on_as_if_all_had_been_given(name):
    """At full budget: pictures, their grids and positions are those of the whole prompt."""
    model = zoo.model_of(name)
    frames = [zoo.prompt(model, (60,), seed=s, pictures=1) for s in (1, 2, 3)]
    whole = {
        k: torch.cat(
            [f[k] for f in frames], 1 if frames[0][k].shape[0] == 1 < frames[0][k].ndim else 0
        )
        for k in frames[0]
    }
    for k in whole:
        if k.endswith("grid_thw") or (k == "pixel_values" and "SmolVLM" not in name):
            whole[k] = torch.cat([f[k] for f in frames])
    options = {"max_new_tokens": NEW, "do_sample": False}
    want = model.generate(**whole, **options)[:, -NEW:]
    with mmkv.wrapped(model, "condense", 1.0):
        context = mmkv.read(model, frames[0])
        context.append(frames[1])
        assert torch.equal(context.ask(frames[2], **options), want)
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


def _behind(inputs, asked):
    """Every input that goes token by token, with the question's behind it."""
    ids = inputs["input_ids"]
    found = {}
    for name, x in inputs.items():
        if x.shape == ids.shape:
            more = asked.get(name, torch.zeros_like(asked["input_ids"], dtype=x.dtype))
            found[name] = torch.cat([x, more], 1)
    return found


@pytest.mark.parametrize("policy", ["condense", "h2o", "snapkv"])
def test_reading_on_is_a_turn(models, policy):
    """`append` competes with what is held, as the next turn of a conversation does."""
    model, inputs, more = models("llama"), make_inputs("llama", (60, 41)), question(20)
    more = {k: x.expand(2, -1) for k, x in more.items()}
    whole = {k: torch.cat([inputs[k], more[k]], 1) for k in more}
    with mmkv.wrapped(model, policy, 0.4, **options_for(policy)):
        context = mmkv.read(model, inputs)
        context.append(more)
        *_, cache, _ = generate(model, inputs, new=1)
        *_, want, _ = generate(model, whole, new=1, past_key_values=cache)
        for i in range(3):
            assert torch.equal(context.cache.kept(i), want.kept(i))
        asked = {k: x.expand(2, -1) for k, x in question(5).items()}
        assert ask(context, asked)[1].shape == (2, NEW)
    assert context.cache.lengths == [80, 61]


def test_reading_in_chunks(models):
    model, inputs = models("llama"), make_inputs("llama", (90,))
    with mmkv.wrapped(model, "condense", 0.3, least=0):
        whole = mmkv.read(model, inputs)
        chunks = mmkv.read(model, inputs, prefill_chunk_size=25)
        for i in range(3):
            assert torch.equal(whole.cache.kept(i), chunks.cache.kept(i))


@pytest.mark.parametrize("kv_dtype", slow_except([None, "int8"], None))
@pytest.mark.parametrize("policy", slow_except(POLICIES, "condense", "h2o"))
def test_saved_and_loaded_it_is_the_same(models, policy, kv_dtype, tmp_path):
    model, inputs, asked = models("llava-llama"), make_inputs("llava-llama", (70, 41)), question(8)
    asked = {k: x.expand(2, -1) for k, x in asked.items()}
    path = tmp_path / "read.safetensors"
    with mmkv.wrapped(model, policy, 0.4, kv_dtype=kv_dtype, **options_for(policy)):
        context = mmkv.read(model, inputs)
        context.save(path)
        found = mmkv.load_context(path, model)
        # Slots set aside may differ, and so bytes.
        one, other = (
            replace(x, nbytes=0, layers=[replace(y, nbytes=0) for y in x.layers])
            for x in (context.report(), found.report())
        )
        assert one == other
        atol = 1e-4 if kv_dtype is None else 2e-3
        torch.testing.assert_close(ask(found, asked)[0], ask(context, asked)[0], atol=atol, rtol=0)
        more = {k: x.expand(2, -1) for k, x in question(9, seed=8).items()}
        for one in (context, found):
            one.append(more)
    for i in range(3):
        assert torch.equal(found.cache.kept(i), context.cache.kept(i))
        for one, other in zip(found.cache.groups(i), context.cache.groups(i), strict=True):
            assert torch.equal(one, other)
    assert found.cache.lengths == context.cache.lengths


@pytest.mark.parametrize("lengths", [(88, 47), (12,)], ids=str)
@pytest.mark.parametrize(
    "name",
    slow_except(
        ["Gemma3ForCausalLM", "Gemma2ForCausalLM", "Gemma4ForCausalLM", "Llama4ForCausalLM"],
        "Gemma3ForCausalLM",
    ),
)
def test_windows_of_sliding_layers_are_saved_too(name, lengths, tmp_path):
    model, path = zoo.model_of(name), tmp_path / "read.safetensors"
    asked = {k: x.expand(len(lengths), -1) for k, x in question(8).items()}
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context = mmkv.read(model, zoo.prompt(model, lengths))
        context.save(path)
        found = mmkv.load_context(path, model)
        for one in (context, found):
            one.append(asked)
        for one, other in zip(ask(found, asked)[:2], ask(context, asked)[:2], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
        tensors = load_file(path)
        windows = [key for key in tensors if key.startswith("windows.")]
        for key in (windows[0], windows[-1]):
            save_file({**tensors, key: tensors[key][:, :, 1:].contiguous()}, path, header)
            with pytest.raises(ValueError, match=r"layer \d holds a window"):
                mmkv.load_context(path, model)


def test_a_file_of_another_model_or_wrap_is_refused(models, tmp_path):
    model, inputs, path = models("llama"), make_inputs("llama", (40,)), tmp_path / "read"
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        mmkv.read(model, inputs).save(path)
        mmkv.load_context(path, model)
    with pytest.raises(ValueError, match="is not wrapped"):
        mmkv.load_context(path, model)
    for policy, options in (("snapkv", {"window": 6}), ("condense", {"chunk": 64})):
        with (
            mmkv.wrapped(model, policy, 0.4, **options),
            pytest.raises(ValueError, match="wrap it as it was"),
        ):
            mmkv.load_context(path, model)
    with (
        mmkv.wrapped(model, "condense", 0.5, least=0),
        pytest.raises(ValueError, match=r"budget.*0\.4"),
    ):
        mmkv.load_context(path, model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[2].self_attn.v_proj.weight.mul_(1.01)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    turned = type(model)(config).eval()
    turned.load_state_dict(model.state_dict())
    for one in (other, turned, make_model("llama-mha")):
        with (
            mmkv.wrapped(one, "condense", 0.4, least=0),
            pytest.raises(ValueError, match="other weights"),
        ):
            mmkv.load_context(path, one)


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
        with lora.disable_adapter():
            refused(path)
            mmkv.load_context(base, lora)


def test_a_broken_file_is_named(models, tmp_path):
    model, inputs, path = models("llama"), make_inputs("llama", (40,)), tmp_path / "read"
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        mmkv.read(model, inputs).save(path)
        with safe_open(path, framework="pt") as file:
            header = file.metadata()["mmkv-context"]
        tensors = load_file(path)

        def refused(match, header=header, **changed):
            save_file({**tensors, **changed}, tmp_path / "bad", {"mmkv-context": header})
            with pytest.raises(ValueError, match=match) as found:
                mmkv.load_context(tmp_path / "bad", model)
            assert "bad" in str(found.value)

        about = json.loads(header)
        refused("header has not the entries", json.dumps({"version": 1}))
        refused("Expecting value", "not JSON")
        refused("version 9", json.dumps({**about, "version": 9}))
        refused("seen=many", json.dumps({**about, "seen": "many"}))
        refused("number of rows", json.dumps({**about, "lengths": [40, 40]}))
        refused("layers, expected 3", json.dumps({**about, "sizes": [[5]]}))
        far = tensors["layers.1.positions"].clone()
        far[0, 0, -1] = 4000
        refused("layer 1 holds positions out of place", **{"layers.1.positions": far})
        refused("layer 0 holds keys", **{"layers.0.keys": torch.zeros(1, 2, 9, 3)})
        refused(r"valid is torch\.bool \(1, 3\)", **{"prompt.valid": torch.ones(1, 3).bool()})
        (tmp_path / "bad").write_bytes(b"no tensors here")
        with pytest.raises(ValueError, match="bad: unreadable"):
            mmkv.load_context(tmp_path / "bad", model)
        with pytest.raises(ValueError, match="nowhere: unreadable"):
            mmkv.load_context(tmp_path / "nowhere", model)


GRIDS = ("Qwen2_5_VL", "Qwen2VL", "Qwen3VL", "Qwen3_5", "Glm4v")
GRIDS = [f"{name}ForConditionalGeneration" for name in GRIDS]


@pytest.mark.parametrize("name", slow_except(GRIDS, GRIDS[0]))
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


@pytest.mark.parametrize("rows", [(60,), (60, 41)], ids=str)
def test_a_question_is_asked_with_beams(models, rows):
    model, inputs = models("llama"), make_inputs("llama", rows)
    asked = {k: x.expand(len(rows), -1) for k, x in question(8).items()}
    whole = {k: torch.cat([inputs[k], asked[k]], 1) for k in asked}
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": NEW}
    wanted = model.generate(**whole, **beams)[:, whole["input_ids"].shape[1] :]
    with mmkv.wrapped(model, "condense", 1.0):
        context = mmkv.read(model, inputs)
        assert torch.equal(context.ask(asked, **beams), wanted)
        config = copy.deepcopy(model.generation_config)
        config.update(**beams)
        assert torch.equal(context.ask(asked, generation_config=config), wanted)
        torch.manual_seed(0)
        drawn = context.ask(asked, do_sample=True, num_return_sequences=3, max_new_tokens=NEW)
        assert drawn.shape == (3 * len(rows), NEW)


def test_a_model_told_to_use_no_cache_is_asked_with_one(models, monkeypatch):
    model, inputs = models("llama"), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context = mmkv.read(model, inputs)
        wanted = ask(context, question(8))[0]
        monkeypatch.setattr(model.generation_config, "use_cache", False)
        assert torch.equal(ask(context, question(8))[0], wanted)
        assert torch.equal(ask(mmkv.read(model, inputs), question(8))[0], wanted)


def test_what_cannot_be_asked_is_said(models):
    model, inputs = models("llama"), make_inputs("llama", (40, 30))
    with pytest.raises(ValueError, match="is not wrapped"):
        mmkv.read(model, inputs)
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        with pytest.raises(ValueError, match="no input_ids among"):
            mmkv.read(model, {"pixel_values": torch.zeros(1)})
        context = mmkv.read(model, inputs)
        with pytest.raises(ValueError, match="3 rows behind a context of 2"):
            context.ask(padded(*[question(4)] * 3), max_new_tokens=2)
        with pytest.raises(ValueError, match="1 rows behind a context of 2"):
            context.append(question(4))
        for use in (context.ask, context.append):
            with pytest.raises(ValueError, match="no tokens behind the context"):
                use({k: x.expand(2, -1) for k, x in question(0).items()})
        with pytest.raises(ValueError, match=r"position_ids: .* leave them out"):
            mmkv.read(model, {**inputs, "position_ids": torch.arange(40).expand(2, -1)})
        with pytest.raises(ValueError, match="use_cache=False behind"):
            context.ask(padded(question(4), question(5)), use_cache=False)
    with (
        mmkv.wrapped(model, "condense", 0.5, least=0),
        pytest.raises(ValueError, match="made under"),
    ):
        context.ask(padded(question(4), question(5)), max_new_tokens=2)


def test_a_question_may_bring_a_picture(models):
    model, inputs = models("llava-llama"), make_inputs("llava-llama", (60,))
    ids = torch.cat([torch.full((1, 16), IMAGE), question(5)["input_ids"]], 1)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        context = mmkv.read(model, inputs)
        one = ask(context, {"input_ids": ids, "pixel_values": pixels})[0]
        other = ask(context, {"input_ids": ids, "pixel_values": -pixels})[0]
    assert not torch.allclose(one, other, atol=1e-2)
    assert PAD not in ids
