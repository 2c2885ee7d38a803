"""allocation="sampled": layer sizes of a task's first requests, averaged, for all others."""

import contextlib
import copy
import pickle
import threading

import pytest
import torch

import mmkv
from helpers.contexts import rewrite
from helpers.models import make_inputs, make_model, row_of
from helpers.oracle import generate
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.sampling import SampledSizes

L = 2
SAMPLED = {"allocation": "sampled", "samples": 2, "window": 6}


def prompt(seed: int, length: int = 80):
    return make_inputs("llama", (length,), seed=seed)


def sizes_of(model, inputs):
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    return [x.keeping().sizes for x in cache.compressed], cache


def own_sizes(model, inputs, budget=0.3):
    with mmkv.wrapped(model, "xkv", budget, window=6, allocation="one-pass"):
        return [n for (n,) in sizes_of(model, inputs)[0]]


@pytest.mark.parametrize("budget", [0.3, 24])
def test_the_mean_of_the_first_requests_serves_the_others(budget):
    """By hand: each layer's share of the total, averaged; 80 tokens learned from, 120 served."""
    model = make_model("llama")
    first = [own_sizes(model, prompt(seed), budget) for seed in (0, 1)]
    assert first[0] != first[1], "the prompts need the same sizes"
    with mmkv.wrapped(model, "xkv", budget, **SAMPLED):
        for seed, expected in enumerate(first):
            sizes, cache = sizes_of(model, prompt(seed))
            assert [n for (n,) in sizes] == expected
            note = f"learning layer sizes, {seed + 1} of 2 requests so far"
            assert note in cache.report().notes
        later, cache = sizes_of(model, prompt(2, 120))
        assert "the mean layer sizes of 2 requests" in cache.report().notes
    total = round(budget * L * 120) if isinstance(budget, float) else budget * L
    shares = [sum(sizes[i] / sum(sizes) for sizes in first) / 2 for i in range(L)]
    for (n,), share in zip(later, shares, strict=True):
        assert abs(n - share * total) < 1
    assert sum(n for (n,) in later) == total


def test_learned_sizes_need_no_first_pass(monkeypatch):
    model, passes = make_model("llama"), []
    model.model.layers[0].register_forward_hook(lambda *args: passes.append(1))
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        found = []
        for seed in range(4):
            passes.clear()
            sizes_of(model, prompt(seed))
            found.append(len(passes))
    assert found == [2, 2, 1, 1]


def test_rows_are_requests_and_short_ones_do_not_count():
    """Each row that loses tokens counts, up to the number; one that keeps all says nothing."""
    model, inputs = make_model("llama"), make_inputs("llama", (80, 20, 66, 70))
    first = [own_sizes(model, row_of(inputs, b), 24) for b in (0, 2)]
    with mmkv.wrapped(model, "xkv", 24, **SAMPLED):
        sizes_of(model, inputs)
        found = model._mmkv.plan.sampling.shares("")
    for i, share in enumerate(found):
        assert share == pytest.approx(sum(sizes[i] / sum(sizes) for sizes in first) / 2)


def test_known_sizes_evict_each_layer_as_it_is_read(monkeypatch):
    """Also in a second turn, before which a policy that learns sizes holds all layers whole."""
    model, whole = make_model("llama"), []
    evict = CompressedCache._evict

    def counted(cache, layer, *args):
        whole[-1] = max(whole[-1], sum(isinstance(x.state, PromptKV) for x in cache.compressed))
        evict(cache, layer, *args)

    monkeypatch.setattr(CompressedCache, "_evict", counted)
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        for seed in (0, 1, 2):
            cache = words = None
            for length in (80, 120):
                whole.append(0)
                inputs = prompt(seed, length)
                if cache is not None:
                    inputs["input_ids"][:, 80:82] = words
                _, words, cache, _ = generate(model, inputs, new=2, past_key_values=cache)
    assert whole == [1, L, 1, L, 1, 1]
    held = sum((cache.kept(i)[0] >= 0).float().sum(-1).mean().item() for i in range(L))
    assert held == round(0.3 * L * 120) + L  # and the token generated since


def test_a_prompt_in_chunks_is_learned_from_whole():
    """Not by its first chunk's sizes; a cache that is reset begins another request."""
    model = make_model("llama")
    with mmkv.wrapped(model, "xkv", 0.3, evict_chunks=True, **SAMPLED):
        *_, cache, held = generate(model, prompt(0), new=2, prefill_chunk_size=30)
        sizes = [(x[0] >= 0).sum(-1)[0].item() for x in held[2]]
        cache.reset()
        model(**prompt(0), past_key_values=cache)
        again = [n for (n,) in (x.keeping().sizes for x in cache.compressed)]
        shares = model._mmkv.plan.sampling.shares("")
    for share, one, other in zip(shares, sizes, again, strict=True):
        assert share == pytest.approx((one / sum(sizes) + other / sum(again)) / 2)


@pytest.mark.parametrize(
    "more", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=str
)
def test_beams_and_repeated_rows_are_one_request(more):
    model = make_model("llama")
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        model.generate(**make_inputs("llama", (80,)), max_new_tokens=3, **more)
        assert model._mmkv.plan.sampling.known("") == 1


def test_contexts_keep_their_first_sizes(tmp_path):
    """Asking and reading on teach nothing; a file says what sizes the context goes on with."""
    model, path, question = make_model("llama"), tmp_path / "context", prompt(9, 30)
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        sampling = model._mmkv.plan.sampling
        context = mmkv.read(model, prompt(0))
        context.ask(question, max_new_tokens=2)
        context.append(question)
        context.save(path)
        mmkv.load_context(path, model).append(question)
        assert sampling.known("") == 1
        mmkv.read(model, prompt(1))
        context = mmkv.read(model, prompt(2))
        context.save(path)
        other = copy.deepcopy(context)
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        loaded = mmkv.load_context(path, model)
        for one in (other, loaded):
            one.append(question)
            assert "the mean layer sizes of 2 requests" in one.report().notes
    for i in range(L):
        assert torch.equal(loaded.cache.kept(i), other.cache.kept(i))
    for learned in ([0.5], [0.1, 0.2, 0.6], [0.1, -0.1, 1.0], [0.1, 0.2, float("nan")]):
        rewrite(path, lambda tensors, about, x=learned: about.update(learned=x))
        with (
            mmkv.wrapped(model, "xkv", 0.3, **SAMPLED),
            pytest.raises(ValueError, match="learned="),
        ):
            mmkv.load_context(path, model)


def test_tasks_are_learned_apart():
    model = make_model("llama")
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        with mmkv.task("qa"):
            for seed in range(2):
                sizes_of(model, prompt(seed))
            *_, cache = sizes_of(model, prompt(5))
        assert "task 'qa': the mean layer sizes of 2 requests" in cache.report().notes
        *_, other = sizes_of(model, prompt(5))
        assert "learning layer sizes, 1 of 2 requests so far" in other.report().notes
        # A cache goes on with what it began with, whatever task goes on with it.
        assert cache.plan.learned is not None
        ids = torch.cat([prompt(5)["input_ids"], torch.full((1, 30), 9)], 1)
        generate(model, {"input_ids": ids}, new=2, past_key_values=cache)
        assert "task 'qa': the mean layer sizes of 2 requests" in cache.report().notes
        cache.reset()
        generate(model, prompt(6), new=2, past_key_values=cache)
        assert "learning layer sizes, 2 of 2 requests so far" in cache.report().notes
    for name in ("", 3):
        with pytest.raises(ValueError, match="expected the name of a task"), mmkv.task(name):
            pass


def test_threads_learn_from_requested_number():
    """Each adds between another's look at the number and its own addition."""
    meeting = threading.Barrier(4)

    class Slow(list):
        def __len__(self):
            n = super().__len__()
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.05)
            return n

    sampling = SampledSizes(1)
    sampling._seen[""] = Slow()
    threads = [threading.Thread(target=sampling.add, args=("", (1, 3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(sampling._seen[""]) == [(0.25, 0.75)]


def test_copied_models_continue_learning():
    model = make_model("llama")
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        sizes_of(model, prompt(0))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin._mmkv.plan.sampling.known("") == 1
            sizes_of(twin, prompt(1))
            assert twin._mmkv.plan.sampling.known("") == 2
            assert model._mmkv.plan.sampling.known("") == 1
    with mmkv.wrapped(model, "xkv", 0.3, **SAMPLED):
        assert model._mmkv.plan.sampling.known("") == 0, "a new wrap begins anew"


@pytest.mark.parametrize(("requests", "n"), [(200, 20), (31, 4)])
def test_a_tenth_of_an_announced_number(requests, n):
    assert mmkv.get_policy("xkv", allocation="sampled", requests=requests).layers.learns == n


def test_calibrate_refuses_sampled_sizes():
    with pytest.raises(ValueError, match="calibrate averages the sizes of all samples"):
        mmkv.calibrate(make_model("llama"), [prompt(0)], "xkv", allocation="sampled", requests=20)
