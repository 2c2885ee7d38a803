"""Nothing is silently wrong: what a wrapped model says is right, or refused by name."""

import copy
import io
import pickle

import pytest
import torch
from transformers.models.llama import modeling_llama

import mmkv
from helpers.marks import cases
from helpers.masking import masked_logits
from helpers.models import continued, make_inputs, make_model
from helpers.oracle import depth, generate, short
from mmkv.cache.prompt_kv import PromptKV


def prefill(model, inputs, **more):
    with torch.no_grad():
        return model(**inputs, use_cache=True, **more)


def interrupt(*args):
    raise KeyboardInterrupt


class TestOurAttentionRuns:
    """A pass in which another attention function runs is an error, at the first layer."""

    @pytest.mark.parametrize("change", ["method", "config"])
    def test_changed_attention_implementation_runs(self, text_model, change, monkeypatch):
        inputs, calls = make_inputs("llama", (40,)), []
        plain = generate(text_model, inputs, new=6)[0]
        mmkv.wrap(text_model, "snapkv", 1.0)
        cache = prefill(text_model, inputs).past_key_values
        eager = modeling_llama.eager_attention_forward
        monkeypatch.setattr(
            modeling_llama,
            "eager_attention_forward",
            lambda *a, **k: calls.append(1) or eager(*a, **k),
        )
        if change == "method":
            text_model.set_attn_implementation("eager")
        else:
            text_model.config._attn_implementation = "eager"
        torch.testing.assert_close(generate(text_model, inputs, new=6)[0], plain)
        assert calls
        token = plain[0].argmax(-1, keepdim=True)
        with torch.no_grad():
            logits = text_model(input_ids=token, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, plain[1], atol=1e-4, rtol=0)

    def test_unsupported_attention_implementation_raises(self, text_model):
        inputs = make_inputs("llama", (40,))
        mmkv.wrap(text_model, "snapkv", 1.0)
        cache = prefill(text_model, inputs).past_key_values
        text_model.config._attn_implementation = "flex_attention"
        for call in (
            lambda: text_model.generate(**inputs, max_new_tokens=3),
            lambda: text_model(input_ids=torch.tensor([[7]]), past_key_values=cache),
        ):
            with pytest.raises(ValueError, match=r"changed to 'flex_attention'.*sdpa.*mmkv.unwrap"):
                call()

    @pytest.mark.parametrize("policy", ["snapkv", "prefixkv"])
    def test_cache_outliving_its_wrap_raises(self, text_model, policy):
        inputs = make_inputs("llama", (40,))
        with mmkv.wrapped(text_model, policy, 0.5, **short(policy)):
            cache = prefill(text_model, inputs).past_key_values
        with pytest.raises(ValueError, match=r"not wrapped.*mmkv.wrap"):
            text_model(input_ids=torch.tensor([[7]]), past_key_values=cache)
        with mmkv.wrapped(text_model, policy, 0.5, **short(policy)):  # and goes on within one
            text_model(input_ids=torch.tensor([[7]]), past_key_values=cache)

    def test_layer_bypassing_attention_raises(self, text_model):
        """The hand-over is checked at each layer, the last one included."""
        inputs = make_inputs("llama", (40,))
        for i in range(len(text_model.model.layers)):
            with mmkv.wrapped(text_model, "snapkv", 0.5, window=6):
                attn = text_model.model.layers[i].self_attn
                whole, attn.config = attn.config, text_model.config
                with pytest.raises(ValueError, match=f"layer {i} passed keys"):
                    text_model.generate(**inputs, max_new_tokens=3)
                attn.config = whole

    def test_continuing_interrupted_pass_raises(self, text_model):
        inputs = make_inputs("llama", (40,))

        with mmkv.wrapped(text_model, "snapkv", 0.5, window=6):
            cache = prefill(text_model, inputs).past_key_values
            ending = text_model.model.layers[1].register_forward_pre_hook(interrupt)
            with ending, pytest.raises(KeyboardInterrupt):
                text_model(input_ids=torch.tensor([[7]]), past_key_values=cache)
            with pytest.raises(ValueError, match=r"interrupted.*some of 41 tokens: start a new"):
                text_model(input_ids=torch.tensor([[7]]), past_key_values=cache)
            assert generate(text_model, inputs, new=3)[2].get_seq_length() == 42

    @pytest.mark.parametrize("policy", ["snapkv", "kvzip", "squeeze"])
    def test_prompt_stopped_between_chunks_is_continued(self, policy):
        model, inputs = make_model("llama", layers=depth(policy)), make_inputs("llama", (96,))
        chunked = {"prefill_chunk_size": 32, "new": 4}

        def stop_in_third_chunk(module, args, kwargs):
            if (cache := kwargs["past_key_values"]) is not None and cache.get_seq_length() == 64:
                caches.append(cache)
                raise KeyboardInterrupt

        with mmkv.wrapped(model, policy, 0.3, **short(policy)):
            whole, caches = generate(model, inputs, **chunked)[0], []
            stopping = model.register_forward_pre_hook(stop_in_third_chunk, with_kwargs=True)
            with stopping, pytest.raises(KeyboardInterrupt):
                generate(model, inputs, **chunked)
            continued = generate(model, inputs, **chunked, past_key_values=caches[0])[0]
        torch.testing.assert_close(continued, whole, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
    def test_continuing_pass_that_failed_in_last_layer_raises(self, text_model, kind, monkeypatch):
        """All layers have counted the turn's tokens, but the last has not stored them."""
        inputs, extended, calls = make_inputs("llama", (40,)), PromptKV.extended, []

        def fail(*args):
            calls.append(1)
            if len(calls) == len(text_model.model.layers):
                raise kind
            return extended(*args)

        with mmkv.wrapped(text_model, "snapkv", 0.5, window=6):
            _, said, cache, _ = generate(text_model, inputs, new=3)
            turn = continued(inputs, said, said.flip(1))
            monkeypatch.setattr(PromptKV, "extended", fail)
            with pytest.raises(kind):
                generate(text_model, turn, new=3, past_key_values=cache)
            turn = continued(turn, said[:, :1])
            with pytest.raises(ValueError, match="interrupted within a pass"):
                generate(text_model, turn, new=3, past_key_values=cache)

    @pytest.mark.parametrize("layer", [0, 1])
    def test_continuing_interrupted_turn_raises(self, text_model, layer):
        """Also if it was interrupted in layer 0, before any layer stored the turn's tokens."""
        inputs = make_inputs("llama", (40,))

        with mmkv.wrapped(text_model, "snapkv", 0.5, window=6):
            _, said, cache, _ = generate(text_model, inputs, new=3)
            turn = continued(inputs, said, said.flip(1))
            ending = text_model.model.layers[layer].register_forward_pre_hook(interrupt)
            with ending, pytest.raises(KeyboardInterrupt):
                generate(text_model, turn, new=3, past_key_values=cache)
            with pytest.raises(ValueError, match=r"interrupted.*some of 46 tokens: start a new"):
                generate(text_model, turn, new=3, past_key_values=cache)


class TestMasksOverThePast:
    """Masked tokens are neither attended to nor scored nor counted."""

    @cases("budget", [1.0, 0.5], 0.5)
    @cases("policy", ["full", "snapkv", "prefixkv", "h2o", "streaming", "adakv"], "prefixkv", "h2o")
    def test_chat_with_a_row_that_ended_early(self, models, policy, budget):
        """Each row of the second turn is what it is alone, without the other's pads."""
        model, inputs = models("llama"), make_inputs("llama", (60, 60))
        ended, total = 4, 12  # the second row says 4 words, then pads
        options = short(policy)
        feed = torch.randint(4, 120, (2, total), generator=torch.Generator().manual_seed(3))
        more = torch.randint(4, 120, (2, 20), generator=torch.Generator().manual_seed(4))

        def talk(rows, words, hole):
            """Two turns of some rows, the first answer fed; logits of the second turn."""
            with mmkv.wrapped(model, policy, budget, **options), torch.no_grad():
                one = {k: x[rows] for k, x in inputs.items()}
                cache = model(**one, use_cache=True).past_key_values
                mask = one["attention_mask"]
                for t in range(words.shape[1]):
                    mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                    model(input_ids=words[:, t : t + 1], attention_mask=mask, past_key_values=cache)
                mask[hole] = 0
                ids = torch.cat([one["input_ids"], words, more[rows]], dim=1)
                mask = torch.cat([mask, mask.new_ones(len(rows), 20)], dim=1)
                out = model.generate(
                    input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6,
                    do_sample=False, return_dict_in_generate=True, output_logits=True,
                )  # fmt: skip
            return torch.stack(out.logits), out.past_key_values

        pads = torch.zeros(2, 60 + total, dtype=torch.bool)
        pads[1, 60 + ended :] = True
        together, cache = talk([0, 1], feed, pads)
        first, _ = talk([0], feed[:1], pads[:1])
        torch.testing.assert_close(together[:, :1], first, atol=1e-4, rtol=0)
        # Decoding drops a token a step, so a row that took pads in has dropped others: the same as
        # alone where nothing was dropped before the pads were masked.
        if budget == 1.0 or policy in ("full", "snapkv", "adakv"):
            second, _ = talk([1], feed[1:, :ended], pads[1:, : 60 + ended] & False)
            torch.testing.assert_close(together[:, 1:], second, atol=1e-4, rtol=0)
        for i in range(len(cache.layers)):
            held = cache.kept(i)[1]
            assert not ((held >= 60 + ended) & (held < 60 + total)).any()
        assert cache.lengths == [92, 92 - (total - ended)]

    @cases("policy", ["full", "snapkv", "prefixkv", "h2o", "adakv"], "h2o", "adakv")
    def test_a_step_with_holes_in_its_mask(self, models, policy):
        """The hidden tokens are not attended to in that step, and come back in the next."""
        model, inputs = models("llama"), make_inputs("llama", (60, 41))
        options = {**short(policy)}
        steps = torch.randint(4, 120, (2, 3), generator=torch.Generator().manual_seed(3))
        held, found = [], []
        with mmkv.wrapped(model, policy, 0.5, **options), torch.no_grad():
            out = model(**inputs, use_cache=True)
            cache, mask = out.past_key_values, inputs["attention_mask"]
            found.append(out.logits[:, -1])
            for t in range(3):
                held.append([cache.kept(i) for i in range(len(cache.layers))])
                mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
                shown = mask.clone()
                if t == 1:
                    shown[:, 30:58] = 0
                out = model(
                    input_ids=steps[:, t : t + 1], attention_mask=shown, past_key_values=cache
                )
                found.append(out.logits[:, -1])
        visible = [[x.clone() for x in step] for step in held]
        for x in visible[1]:
            x[(x >= 30) & (x < 58)] = -1
        assert any((a != b).any() for a, b in zip(visible[1], held[1], strict=True))
        words = torch.cat([steps, steps[:, :1]], dim=1)
        expected = masked_logits(model, inputs, words, visible)
        torch.testing.assert_close(torch.stack(found), expected[: len(found)], atol=1e-4, rtol=0)

    def test_h2o_scores_ignore_hidden_tokens(self, models):
        model, inputs = models("llama"), make_inputs("llama", (60,))
        with mmkv.wrapped(model, "h2o", 0.5), torch.no_grad():
            cache = model(**inputs, use_cache=True).past_key_values
            block = cache.compressed[0].keeping().blocks[0]
            before, at = block.scores.clone(), block.positions.clone()
            mask = torch.ones(1, 61, dtype=torch.long)
            mask[:, 20:58] = 0
            model(input_ids=torch.tensor([[9]]), attention_mask=mask, past_key_values=cache)
        hidden, old = (at >= 20) & (at < 58), (at >= 0) & (at < 60)
        after = cache.compressed[0].keeping().blocks[0].scores[:, : at.shape[1]]
        assert hidden.any()
        assert torch.equal(after[hidden], before[hidden])
        assert (after[old & ~hidden] > before[old & ~hidden]).all()

    @pytest.mark.parametrize("n", [1, 5])
    @pytest.mark.parametrize("hidden", [(0,), (59,), (0, 1, 58, 59), range(10, 40)], ids=str)
    def test_tokens_behind_a_mask_with_holes(self, models, hidden, n):
        """Of the first and the last token too, and of no other: the new tokens see themselves."""
        model, inputs = models("llama"), make_inputs("llama", (60,))
        mask = torch.ones(1, 60 + n, dtype=torch.long)
        mask[:, hidden] = 0
        new = torch.arange(10, 10 + n)[None]
        with torch.no_grad():
            cache = model(**inputs, use_cache=True).past_key_values
            plain = model(input_ids=new, attention_mask=mask, past_key_values=cache).logits
            with mmkv.wrapped(model, "snapkv", 1.0):
                cache = model(**inputs, use_cache=True).past_key_values
                found = model(input_ids=new, attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(found, plain, atol=1e-4, rtol=0)

    def test_mask_showing_dropped_tokens_raises(self, models):
        model, inputs = models("llama"), make_inputs("llama", (60, 41))
        with mmkv.wrapped(model, "snapkv", 0.5, window=6):
            cache = prefill(model, inputs).past_key_values
            shown = torch.ones(2, 61, dtype=torch.long)
            with pytest.raises(ValueError, match="token 0 of row 1, which was padding"):
                model(
                    input_ids=torch.tensor([[7], [8]]), attention_mask=shown, past_key_values=cache
                )


class TestCopies:
    @cases("policy", ["snapkv", "xkv", "squeeze"], "xkv")
    def test_a_deep_copy_is_independent(self, policy):
        model, inputs = make_model("llama", layers=depth(policy)), make_inputs("llama", (70,))
        mmkv.wrap(model, policy, 0.5, **short(policy))
        before = generate(model, inputs, new=6)[0]
        twin = copy.deepcopy(model)
        for p in twin.parameters():
            torch.nn.init.normal_(p, std=0.15, generator=torch.Generator().manual_seed(1))
        alone = make_model("llama", layers=depth(policy))
        alone.load_state_dict(twin.state_dict())
        with mmkv.wrapped(alone, policy, 0.5, **short(policy)):
            expected = generate(alone, inputs, new=6)
        found = generate(twin, inputs, new=6)
        torch.testing.assert_close(found[0], expected[0])
        kept = [[x.kept(i) for i in range(len(x.layers))] for x in (found[2], expected[2])]
        assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))
        assert mmkv.is_wrapped(twin)
        mmkv.unwrap(twin)
        assert mmkv.is_wrapped(model)
        torch.testing.assert_close(generate(model, inputs, new=6)[0], before)
        assert not hasattr(generate(twin, inputs, new=2)[2], "kept")
        mmkv.unwrap(model)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())

    def test_a_shallow_copy_is_refused(self, text_model):
        inputs = make_inputs("llama", (40,))
        mmkv.wrap(text_model, "h2o", 0.5)
        twin = copy.copy(text_model)
        with pytest.raises(ValueError, match=r"shallow copy.*copy.deepcopy"):
            twin.generate(**inputs, max_new_tokens=2)
        with pytest.raises(ValueError, match=r"shallow copy.*copy.deepcopy"):
            mmkv.unwrap(twin)
        assert generate(text_model, inputs, new=3)[2].nbytes

    @pytest.mark.parametrize("how", ["pickle", "torch.save"])
    @cases("policy", ["snapkv", "xkv"], "xkv")
    def test_a_wrapped_model_can_be_saved_whole(self, text_model, how, policy):
        inputs = make_inputs("llama", (70,))
        mmkv.wrap(text_model, policy, 0.5, **short(policy))
        expected = generate(text_model, inputs, new=6)[0]
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(text_model))
        else:
            file = io.BytesIO()
            torch.save(text_model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        torch.testing.assert_close(generate(twin, inputs, new=6)[0], expected)
        mmkv.unwrap(twin)
        assert mmkv.is_wrapped(text_model)


class TestWhatPoliciesAreGiven:
    def test_a_cache_keeps_to_the_wrap_that_made_it(self, models):
        model, inputs = models("llama"), make_inputs("llama", (60,))
        with mmkv.wrapped(model, "squeeze", 0.5):
            _, words, cache, _ = generate(model, inputs, new=4)
        ids = torch.cat([inputs["input_ids"], words, words], dim=1)
        for policy, budget, options, named in (
            ("h2o", 0.5, {}, ""),
            ("squeeze", 0.4, {}, ""),
            ("squeeze", 0.5, {"p": 0.5}, r" \(p was 0.35 and is 0.5\)"),
        ):
            made = rf"made under policy='squeeze', budget=0.5.* now{named}: continue it"
            with (
                mmkv.wrapped(model, policy, budget, **options),
                pytest.raises(ValueError, match=made),
            ):
                model.generate(ids, past_key_values=cache, max_new_tokens=2)
        with mmkv.wrapped(model, "squeeze", 0.5):  # the same once more
            model.generate(ids, past_key_values=cache, max_new_tokens=2)

    def test_a_cache_of_another_model_is_refused(self, models):
        inputs = make_inputs("llama", (60,))
        with mmkv.wrapped(models("llama"), "h2o", 0.5):
            cache = prefill(models("llama"), inputs).past_key_values
        with (
            mmkv.wrapped(models("llama-mha"), "h2o", 0.5),
            pytest.raises(ValueError, match="made by another model"),
        ):
            models("llama-mha").generate(**inputs, past_key_values=cache, max_new_tokens=2)

    def test_reset_after_a_chunked_prompt(self, models):
        model, inputs = models("llama", depth("squeeze")), make_inputs("llama", (60,))
        with mmkv.wrapped(model, "squeeze", 0.5):
            expected = generate(model, inputs, new=2, prefill_chunk_size=16)[2]
            cache = generate(model, inputs, new=2, prefill_chunk_size=7)[2]
            cache.reset()
            assert cache.nbytes == 0
            prefill(model, inputs, past_key_values=cache)  # whole, not a chunk of 60
        assert all(torch.equal(cache.kept(i)[..., :20], expected.kept(i)[..., :20]) for i in (0, 1))


class TestModes:
    @cases("policy", ["snapkv", "prefixkv", "h2o", "streaming", "adakv"], "snapkv")
    def test_prefill_in_inference_mode_then_decoding_without(self, models, policy):
        model, inputs = models("llama"), make_inputs("llama", (90, 71))
        words = torch.randint(4, 120, (2, 40), generator=torch.Generator().manual_seed(3))
        found = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mmkv.wrapped(model, policy, 0.3, **short(policy)):
                with mode():
                    cache = model(**inputs, use_cache=True).past_key_values
                    for t in range(20):
                        model(input_ids=words[:, t : t + 1], past_key_values=cache)
                    for _ in range(2):  # rows in new storage, and back in order
                        cache.reorder_cache(torch.tensor([1, 0]))
                with torch.no_grad():
                    for t in range(20, 40):
                        out = model(input_ids=words[:, t : t + 1], past_key_values=cache)
                more = {"past_key_values": cache, "max_new_tokens": 4, "do_sample": False}
                again = model.generate(**continued(inputs, words, words[:, :5]), **more)
            found.append((out.logits, again))
        torch.testing.assert_close(found[1][0], found[0][0])
        assert torch.equal(found[1][1], found[0][1])

    @cases("policy", ["condense", "kvzip", "h2o", "prefixkv"], "h2o", "prefixkv")
    @pytest.mark.filterwarnings("ignore:.*full backward hook")
    def test_gradients_of_prompt_are_right_and_later_ones_raise(self, text_model, policy):
        inputs = make_inputs("llama", (40, 27))

        def gradients(model):
            model.zero_grad()
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            return [x.grad.clone() for x in model.parameters()]

        plain = gradients(text_model)
        mmkv.wrap(text_model, policy, 0.3, least=0)
        torch.testing.assert_close(gradients(text_model), plain)
        cache = text_model(**inputs, use_cache=True).past_key_values
        step = text_model(input_ids=torch.tensor([[7], [8]]), past_key_values=cache)
        with pytest.raises(ValueError, match=r"gradients cannot flow.*mmkv.unwrap"):
            step.logits.mean().backward()
