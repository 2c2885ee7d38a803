"""SparseMM: which heads are visual, against a loop, and the head sizes that follow."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmkv
from helpers.models import IMAGE, make_inputs, make_model
from helpers.oracle import generate
from mmkv import planning
from mmkv.sizes.profiled import VISUAL_FILE, proportional

L, H, G = 2, 2, 2


def with_regions(seed: int = 0):
    """A prompt with two pictures, a reply, and what each of its words is read from."""
    inputs = make_inputs("llava-llama", (70,))
    places = (inputs["input_ids"][0] == IMAGE).nonzero()[:, 0].tolist()
    g = torch.Generator().manual_seed(seed)
    reply = torch.randint(4, 100, (40,), generator=g).tolist()
    regions = [places[t % 5 : t % 5 + 3 + t % 4] if t % 3 else [] for t in range(len(reply))]
    return {**inputs, "reply": reply, "regions": regions}


def naive_scores(model, sample):
    """Word by word: where the query that predicts it looks most."""
    prompt, reply = sample["input_ids"], torch.tensor(sample["reply"])[None]
    ids = torch.cat([prompt, reply], dim=1)
    with torch.no_grad():
        out = model(input_ids=ids, pixel_values=sample["pixel_values"], output_attentions=True)
    N, found = prompt.shape[1], [[0.0] * H for _ in range(L)]
    for t, region in enumerate(sample["regions"]):
        for layer in range(L):
            for head in range(H * G):
                seen = out.attentions[layer][0, head, N + t - 1].tolist()
                if seen.index(max(seen)) in region:
                    found[layer][head // G] += 1 / len(region)
    total = sum(map(sum, found))
    return [[x / total for x in layer] for layer in found]


def test_visual_scores_equal_the_loop():
    model, sample = make_model("llava-llama", "eager"), with_regions()
    profile = mmkv.calibrate(model, [sample], "sparsemm")
    expected = naive_scores(model, sample)
    assert len({x for layer in expected for x in layer}) > 3, "the sample tells heads apart"
    for mine, theirs in zip(profile.visual, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert (profile.samples, profile.policy) == (1, "sparsemm")
    assert not mmkv.is_wrapped(model)


@pytest.mark.slow
def test_without_regions_every_image_token_counts():
    """And without a reply, the model's own is read."""
    model, sample = make_model("llava-llama", "eager"), with_regions()
    places = (sample["input_ids"][0] == IMAGE).nonzero()[:, 0].tolist()
    inputs = {k: v for k, v in sample.items() if k not in ("reply", "regions")}
    said = model.generate(**inputs, max_new_tokens=128, do_sample=False)[0, 70:].tolist()
    whole = {**inputs, "reply": said, "regions": [places] * len(said)}
    found = mmkv.calibrate(model, [inputs], "sparsemm").visual
    assert found == mmkv.calibrate(model, [whole], "sparsemm").visual


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"regions": [[3]]}, r'"regions" of 1 tokens for a reply of 40'),
        ({"regions": [[70]] * 40}, r"token 0 is read from \[70\], expected .* the 70 tokens"),
        ({"regions": [[]] * 40}, "no head attends most to an image region"),
        ({"input_ids": torch.full((2, 9), 7)}, "input_ids of 2 rows"),
        ({"input_ids": torch.full((1, 70), 7), "regions": None}, "sample 0 has no image tokens"),
    ],
)
def test_samples_without_pictures_raise(change, why):
    model, sample = make_model("llava-llama"), with_regions()
    sample = {**sample, **change}
    if "input_ids" in change:
        del sample["pixel_values"], sample["attention_mask"]
    with pytest.raises(ValueError, match=why):
        mmkv.calibrate(model, [sample], "sparsemm")
    with pytest.raises(ValueError, match="no samples"):
        mmkv.calibrate(model, [], "sparsemm")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.just(0.0) | st.floats(1e-3, 5), min_size=1, max_size=9),
    st.floats(0, 1),
    st.integers(1, 50),
)
def test_sizes_are_proportional_below_what_there_is(weights, share, most):
    total = share * len(weights) * most
    sizes = proportional(weights, total, most)
    assert sum(sizes) == pytest.approx(total)
    assert all(-1e-9 <= n <= most + 1e-9 for n in sizes)
    below = [(n, w) for n, w in zip(sizes, weights, strict=True) if w > 0 and n < most - 1e-6]
    for (n, w), (m, v) in itertools.pairwise(below):
        assert n * v == pytest.approx(m * w, rel=1e-6, abs=1e-9)
    if any(n < most - 1e-6 for n, w in zip(sizes, weights, strict=True) if w > 0):
        assert all(n <= 1e-6 for n, w in zip(sizes, weights, strict=True) if w == 0)


def test_missing_profile_gives_equal_heads_and_a_note(caplog, monkeypatch):
    monkeypatch.setattr(planning, "_logged_policies", set())
    model, inputs = make_model("llava-llama"), make_inputs("llava-llama", (60,))
    found = []
    for policy in ("snapkv", "sparsemm"):
        with mmkv.wrapped(model, policy, 0.3, window=4):
            found.append(generate(model, inputs, new=2))
    assert torch.equal(found[0][0], found[1][0])
    why = "mmkv.calibrate(model, samples, policy='sparsemm')"
    assert why in caplog.text
    assert any(why in note for note in found[1][2].report().notes)


def test_a_profile_in_the_models_folder_is_taken(caplog, tmp_path):
    model = make_model("llava-llama")
    mmkv.calibrate(model, [with_regions()], "sparsemm").save(tmp_path / VISUAL_FILE)
    model.config._name_or_path = str(tmp_path)
    with mmkv.wrapped(model, "sparsemm", 0.2, window=4):
        assert not model._mmkv.plan.equal_heads
    assert "profile" not in caplog.text
