"""What the plugin refuses, before a model is loaded, and the classes that it makes of heads."""

from __future__ import annotations

import random
import statistics
import time
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

from vllm.config import ModelConfig
from vllm_engines import BLOCK, HEADS, prompts

from mmkv.profiles import Profile
from mmkv.scores.window import WindowAttention
from mmkv.sizes.profiled import proportional
from mmkv.vllm import options, probes
from mmkv.vllm.classes import CLASSES, classes_of
from mmkv.vllm.settings import Sizes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give one of 'budget'"),
        ({"budget": 0.2, "memory": "8x"}, "give one of 'budget'"),
        ({"memory": "0x"}, "memory='0x'"),
        (0.2, "expected options"),
        ({"budget": 2.0}, "budget=2.0: a share must be above 0"),
        ({"budget": 200}, "budget=200: in vLLM a budget is a share"),
        ({"budget": 0.2, "polcy": "snapkv"}, "'polcy'"),
        ({"budget": 0.2, "policy": "snapvk"}, "'snapvk'"),
        ({"budget": 0.2, "name": "x"}, "unknown option 'name'"),
        ({"budget": 0.2, "policy": 3}, "policy=3: expected a name"),
        ({"budget": 0.2, "policy": "snapkv", "window": 0}, "window=0"),
        ({"budget": 0.2, "policy": "full"}, "keeps everything"),
        ({"budget": 0.2, "policy": "prefixkv"}, "'prefixkv' sizes layers by layers='prefix'"),
        ({"budget": 0.2, "policy": "kvzip"}, "'kvzip' reads a prompt twice"),
        ({"budget": 0.2, "policy": "expected"}, "heads='adaptive'"),
        ({"budget": 0.2, "policy": "h2o"}, "decode='fixed'"),
        ({"budget": 0.2, "policy": "defensive", "heads": "retrieval"}, "use heads='uniform'"),
        ({"budget": 0.2, "policy": "snapkv", "protect": "instruction"}, "protect is not supported"),
        (
            {"budget": 0.2, "policy": "snapkv", "score": WindowAttention()},
            "expected a value of JSON",
        ),
    ],
)
def test_bad_options_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        options.parsed(given)


@pytest.mark.parametrize(
    "policy", ["keydiff", "knorm", "lagkv", "mixkv", "random", "lookm", "snapkv", "condense"]
)
def test_policies_of_one_layer_are_accepted(policy: str) -> None:
    assert options.parsed({"budget": 0.2, "policy": policy})[0].name == policy


@pytest.mark.parametrize("memory", ["8x", "12.5%", 0.125])
def test_share_of_bytes_is_read_as_in_wrap(memory: Any) -> None:
    assert options.parsed({"memory": memory})[1] == 0.125


def created(folder: Path, mmkv: Any, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given: dict[str, Any] = {"max_model_len": 512, "additional_config": {"mmkv": mmkv}}
    arguments = EngineArgs(str(folder), dtype="float32", **(given | more))
    return arguments.create_engine_config()


def test_an_engine_is_refused_before_its_model_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"budget": 0.3, "probe": str(tiny / "probe.json")}
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with pytest.raises(ValueError, match="budget=0: must be above 0"):
        created(tiny, given | {"budget": 0})
    with pytest.raises(ValueError, match="speculative decoding: leave --speculative-config out"):
        created(tiny, given, speculative_config=speculation)
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with pytest.raises(ValueError, match=r"KV cache events, .*: leave --kv-events-config out"):
        created(tiny, given, kv_events_config=events)
    with pytest.raises(ValueError, match="split over processes: use --data-parallel-size"):
        created(tiny, given, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="split in two: leave --enable-dbo"):
        created(tiny, given, ubatch_size=2, all2all_backend="deepep_low_latency")
    with pytest.raises(ValueError, match="units of 16 tokens: leave --prefix-match-unit out"):
        created(tiny, given, prefix_match_unit=16, block_size=BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(ModelConfig, "is_mm_prefix_lm", True)
        with pytest.raises(ValueError, match=r"attend to later ones \(PaliGemma\): serve this"):
            created(tiny, given)
    with pytest.raises(ValueError, match="leave --disable-hybrid-kv-cache-manager out"):
        created(tiny, given, disable_hybrid_kv_cache_manager=True)
    with pytest.raises(ValueError, match=r"transformers' implementation .*: leave --model-impl"):
        created(tiny, given, model_impl="transformers")
    with pytest.raises(ValueError, match="pooling: serve this model without mmkv"):
        created(tiny, given, runner="pooling")
    with pytest.raises(ValueError, match="all have a sliding window, of 64 tokens"):
        created(tiny, given, hf_overrides={"sliding_window": 64})
    kinds = ["full_attention", "sliding_attention"] * 2
    windows = {"sliding_window": 64, "layer_types": kinds, "model_type": "llama"}
    some: Any = {"hf_overrides": windows, "enable_prefix_caching": False}
    uniform = created(tiny, {"budget": 0.3, "heads": "uniform"}, **some)
    assert uniform.additional_config["mmkv"]["unit"] == HEADS
    Profile(retrieval=((0.5,) * HEADS,) * 2).save(tmp_path / "half.json")
    with pytest.raises(ValueError, match=r"beside layers with a sliding window, .*: use 'heads'"):
        created(tiny, given | {"probe": str(tmp_path / "half.json")}, **some)
    for memory, given_share, codes in ((0.08, 0.08 * 256 / 70, [260, 70]), (0.5, 1.0, [260, 70])):
        found = created(tiny, {"memory": memory, "heads": "uniform"}).additional_config["mmkv"]
        assert found["classes"][0][0] == pytest.approx(given_share, abs=1e-6)
        assert found["codes"] == codes
    found = created(tiny, {"memory": 0.08, "heads": "uniform"}, **some).additional_config["mmkv"]
    assert (found["classes"][0][0], found["codes"]) == (0.08, None)
    with pytest.raises(ValueError, match="keeps everything: leave the mmkv options out"):
        created(tiny, {"memory": 1})
    for share in (1.0, 0.9999999):
        with pytest.raises(ValueError, match="keeps everything: leave the mmkv options out"):
            created(tiny, {"budget": share, "heads": "uniform"})
    few = created(tiny, {"budget": 1e-7, "heads": "uniform"}).additional_config["mmkv"]
    assert few["classes"][0][0] == 1e-6
    with pytest.raises(ValueError, match="unknown option 'classes'"):
        created(tiny, given | {"classes": 5})
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    assert options._kv_cache_scheme(LlamaConfig(quantization_config=scheme)) == {"num_bits": 8}
    with monkeypatch.context() as patch:
        patch.setattr(options, "_kv_cache_scheme", lambda config: {"num_bits": 8})
        with pytest.raises(ValueError, match=r"\(kv_cache_scheme\): add --kv-cache-dtype float32"):
            created(tiny, given)
    with pytest.raises(ValueError, match="dual chunk attention: serve this model without mmkv"):
        created(tiny, given, hf_overrides={"dual_chunk_attention_config": {"chunk_size": 64}})
    for kind in ("fp8", "bfloat16"):
        with pytest.raises(ValueError, match=f"a KV cache of {kind} for a model of torch.float32"):
            created(tiny, given, kv_cache_dtype=kind)


def test_other_versions_of_vllm_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "VERSIONS", ("0.99.",))
    with pytest.raises(ValueError, match=r"vLLM 0\.32\.0.* is not supported: install vllm==0\.32"):
        created(tiny, {"budget": 0.3, "heads": "uniform"})


def test_a_missing_probe_says_how_to_make_one(tiny: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("MMKV_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=f"run `mmkv probe {tiny}` once, or use 'heads'"):
        created(tiny, {"budget": 0.3})
    with pytest.raises(ValueError, match=f"probe='{tmp_path}' is no file: name one, or leave"):
        created(tiny, {"budget": 0.3, "probe": str(tmp_path)})
    found = created(tiny, {"budget": 0.3, "heads": "uniform"}).additional_config["mmkv"]
    assert [share for share, _ in found["classes"]] == [0.3]
    path = probes.path_of(str(tiny))
    path.parent.mkdir()
    path.write_text((tiny / "probe.json").read_text())
    found = created(tiny, {"budget": 0.3}).additional_config["mmkv"]
    assert len(found["classes"]) == CLASSES
    # Without a network vLLM names a hub model by the folder of its snapshot.
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert probes.path_of(str(snapshot)) == probes.path_of("me/tiny") != probes.path_of("me/other")
    Profile(retrieval=((0.5, 0.5),) * 4).save(path)
    with pytest.raises(ValueError, match="is no probe of this model, which has 4 layers of 4 KV"):
        created(tiny, {"budget": 0.3})


def test_classes_keep_the_budget_and_divide_evenly() -> None:
    shares = 1.0, 0.9, 0.3, 0.1, 0.05
    targets = {(i, h): shares[(i + 3 * h) % 5] for i in range(30) for h in range(3)}
    budget = sum(targets.values()) / 90
    found = classes_of(targets, budget)
    counts = [len(x.heads) for x in found]
    assert sorted(place for x in found for place in x.heads) == sorted(targets)
    assert sum(len(x.heads) * x.share for x in found) == pytest.approx(90 * budget)
    assert all(n % min(counts) == 0 for n in counts)
    assert 1 < len(found) <= CLASSES
    assert found[0].share == 1.0
    # Heads of higher targets are in classes of larger shares.
    lowest = [min(targets[x] for x in of.heads) for of in found]
    highest = [max(targets[x] for x in of.heads) for of in found]
    assert all(a >= b for a, b in zip(lowest, highest[1:], strict=False))


def test_targets_differ_least_from_the_means_of_their_classes() -> None:
    targets = {(i, 0): random.Random(i).random() ** 4 for i in range(19)}
    ordered = sorted(targets.values(), reverse=True)

    def classes(ends: tuple[int, ...]) -> list[list[float]]:
        return [ordered[a:b] for a, b in pairwise((0, *ends, 19))]

    def difference(ends: tuple[int, ...]) -> float:
        return sum(len(x) * statistics.pvariance(x) for x in classes(ends))

    cuts = (x for k in range(CLASSES) for x in combinations(range(1, 19), k))
    least = min((x for x in cuts if 1 in map(len, classes(x))), key=difference)
    found = classes_of(targets, statistics.mean(ordered))
    assert [len(x.heads) for x in found] == [len(x) for x in classes(least)]


def test_heads_of_many_layers_are_classed_at_once() -> None:
    targets = {(i, h): random.Random(8 * i + h).random() ** 4 for i in range(61) for h in range(8)}
    started = time.perf_counter()
    assert len(classes_of(targets, 0.2)) == CLASSES
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("codes", [None, (516, 266)])  # a head of 128 numbers in 16 bits
@pytest.mark.parametrize("share", [0.02, 0.2, 0.6, 1.0])
def test_sizes_are_blocks_near_the_share(share: float, codes: Any) -> None:
    sizes = Sizes(share, least=8, always=2, codes=codes)
    in_block = BLOCK if codes is None else int(BLOCK * 516 / 266)
    for tokens in range(1, 1500, 7):
        dropped = int(sizes.dropped(tokens, BLOCK))
        kept = int(sizes.kept(tokens, dropped, BLOCK))
        target = min(tokens, max(8, share * tokens))
        assert 0 < kept <= tokens
        if dropped and kept < tokens:
            assert kept == (tokens // BLOCK - dropped) * in_block + tokens % BLOCK
        if dropped:
            assert 0.74 * target - 1 <= kept < target + 1.01 * in_block
        if share == 1:
            assert kept == tokens


def test_short_prompts_keep_the_least_as_a_mean_over_heads() -> None:
    """What a head cannot keep of a short prompt, the others do, as in `mmkv.wrap`."""
    classes = (1.0, 10), (0.3, 20), (0.05, 60)
    shares = [share for share, n in classes for _ in range(n)]
    for tokens in (1, 40, 64, 70, 100, 200, 300):
        found = [int(Sizes(x, 64, 2, classes).target(tokens)) for x in shares]
        wanted = proportional(shares, len(shares) * min(64, tokens), tokens)
        assert found == pytest.approx(wanted, abs=0.51)
    assert [int(Sizes(x, 64, 2, classes).target(3000)) for x, _ in classes] == [3000, 900, 150]


def test_without_options_vllm_is_as_ever(start: Any, twin: Any) -> None:
    from vllm_reference import Reference, snapkv

    ids = prompts(40, 300)
    with start(None) as engine:
        assert len(engine.managers) == 1
        whole = {(i, h): 1.0 for i in range(4) for h in range(4)}
        expected = Reference(twin, whole, snapkv, block=BLOCK)
        assert engine.generate(ids, 8) == [expected.generate(x, 8) for x in ids]
