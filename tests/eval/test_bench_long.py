"""A long prompt within a limit of cache memory."""

import mmkv
from mmkv.eval.speed import long
from mmkv.eval.speed.models import SHAPES, make, make_prompt


def test_a_cache_that_evicts_chunks_stays_within_what_a_full_one_passes():
    model = make(SHAPES["llama-120m-random"].toy(), "cpu")
    ids = make_prompt(model, 1, 900)
    pair = 3 * 2 * 64 * 4  # layers, keys and values, width, bytes: of one token
    limit = 400 * pair
    with mmkv.wrapped(model, "condense", 200, evict_chunks=True):
        small = long.read(model, ids, 100, limit)
    full = long.read(model, ids, 100, limit)
    assert (small.tokens, full.tokens) == (900, 500)
    assert small.token_s is not None
    assert full.token_s is None
    assert full.most_bytes == 500 * pair
    # Groups also hold each slot's weight, and for each token and head which slot it is in.
    numbers = 4 * 12 * (200 + 900)
    assert 200 * pair <= small.most_bytes < 210 * pair + numbers
    assert not model._forward_hooks


def test_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(long, "use_vectors", lambda: None)
    long.main(tokens=300, policy="snapkv", budget=64, chunk=100, cache_memory=1, toy=True)
    shown = capsys.readouterr().out
    assert "snapkv, 64 tokens" in shown
    assert shown.count("300") >= 2
    assert "over the limit" not in shown
