"""VL-Cache's score and layer sizes against loops, and against a model's own attention."""

import pytest
import torch

import mmkv
from helpers.marks import since
from helpers.models import make_inputs, make_model
from helpers.oracle import generate
from mmkv.layer_inputs import LayerInputs
from mmkv.policies import vlcache

B, HQ, H, N, D = 3, 4, 2, 23, 8
# Where image tokens lie: before text, nowhere, and at the very end.
IMAGES = [range(4, 12), range(0), range(17, 23)]
PADDING = [0, 5, 3]


def random_layer(queries: int = N, softcap: float | None = None) -> LayerInputs:
    torch.manual_seed(0)
    valid, image = (torch.zeros(B, N, dtype=torch.bool) for _ in range(2))
    for b in range(B):
        valid[b, PADDING[b] :] = True
        image[b, list(IMAGES[b])] = True
    query, key = 3 * torch.randn(B, HQ, queries, D), 3 * torch.randn(B, H, N, D)
    value = torch.randn(B, H, N, D)
    return LayerInputs(query=query, key=key, value=value, valid=valid, image=image, softcap=softcap)


def rows_of(layer: LayerInputs, b: int) -> list[int]:
    """The queries that observe, by hand: behind the image, or all."""
    first = max(PADDING[b], N - layer.query.shape[2])
    last = max(IMAGES[b], default=-1)
    behind = [i for i in range(first, N) if i > last]
    return behind or list(range(first, N))


def attention_of(layer: LayerInputs, b: int, head: int, i: int) -> torch.Tensor:
    """What query i of a head pays to each token, [N]."""
    query = layer.query[b, head, i - N + layer.query.shape[2]]
    logits = layer.key[b, head // (HQ // H)] @ query * D**-0.5
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    seen = (torch.arange(N) <= i) & layer.valid[b]
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("queries", [N, 9])
def test_the_score_is_the_attention_of_the_text_behind_the_picture(queries, softcap):
    layer = random_layer(queries, softcap)
    found = vlcache.PostVision()(layer)
    for b in range(B):
        for h in range(H):
            expected = torch.zeros(N)
            for i in rows_of(layer, b):
                for g in range(HQ // H):
                    expected += attention_of(layer, b, h * (HQ // H) + g, i) / (HQ // H)
            torch.testing.assert_close(found[b, h], expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("queries", [N, 9])
@pytest.mark.parametrize("threshold", [0.01, 0.2])
def test_density_counts_entries_above_threshold(monkeypatch, queries, softcap, threshold):
    monkeypatch.setattr(vlcache, "_BLOCK", 4)
    layer = random_layer(queries, softcap)
    found = vlcache.SparsityLayers(threshold=threshold).measure(layer)
    for b in range(B):
        large = seen = 0
        for i in rows_of(layer, b):
            for head in range(HQ):
                paid = attention_of(layer, b, head, i)
                large += int((paid >= threshold * paid.max()).sum())
                seen += i + 1 - PADDING[b]
        assert found[b].item() == pytest.approx(large / seen, abs=1e-6)


@pytest.mark.parametrize("chunk", [None, pytest.param(20, marks=since("5.23"))])
def test_layer_sizes_are_proportional_to_density(chunk):
    model, inputs = make_model("llava-llama", "eager"), make_inputs("llava-llama", (80,))
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True, use_cache=False).attentions
    image = inputs["input_ids"][0] == 3
    first = int(image.nonzero()[-1]) + 1
    assert 0 < first < 70
    threshold, shares = 0.5, []
    for a in attentions:
        paid = a[0, :, first:]
        large = (paid >= threshold * paid.amax(-1, keepdim=True)) & (paid > 0)
        shares.append(large.sum().item() / (paid > 0).sum().item())
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    with mmkv.wrapped(model, "vlcache", 0.3, threshold=threshold):
        *_, cache, _ = generate(model, inputs, new=1, **options)
    sizes = [x.kept[0][0] for x in cache.report().layers]
    total = round(0.3 * len(sizes) * 80)
    assert sum(sizes) == total
    assert len(set(sizes)) > 1
    for size, share in zip(sizes, shares, strict=True):
        assert size == pytest.approx(total * share / sum(shares), abs=1)
