"""A model whose heads are spread over two processes: as in one process, or refused."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mmkv
from helpers.configs import TEXT
from helpers.models import make_inputs, make_model
from helpers.oracle import READING, Variant, depth, options_of
from helpers.processes import exit_code
from helpers.profiles import profile_of
from mmkv.scores.window import WindowAttention

SPREAD = "2 processes"
NEW = 3


def save_model(folder: Path) -> Path:
    """Four key-value heads; in float64, so that what a sum is rounded to decides nothing."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    sizes = {**TEXT, **heads, "num_hidden_layers": depth("squeeze")}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).double()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


UNIFORM = ("heads", "uniform")
ALL = [
    *READING,
    # What reads the output projection, of which each process has a part.
    Variant("snapkv", (("value", "output"),)),
    Variant("snapkv", (("value", "critical"),)),
    Variant("snapkv", (("value", "residual"),)),
    Variant("kvzip-plus", (UNIFORM,)),
    Variant("expected", (UNIFORM,)),
]


def outcomes(model):
    """What each variant says and keeps of two turns, or why it is refused."""
    first, second = (make_inputs("llama", (n,), seed=n) for n in (70, 17))
    for variant in ALL:
        try:
            mmkv.wrap(model, variant.policy, variant.budget, **options_of(variant))
        except ValueError as error:
            yield str(variant), str(error)
            continue
        said, cache, seen = [], None, first["input_ids"]
        for turn in (first, second):
            ids = turn["input_ids"] if cache is None else torch.cat([seen, turn["input_ids"]], 1)
            given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache}
            out = model.generate(
                ids, **given, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
            )
            seen, cache = out.sequences, out.past_key_values
            kept = torch.stack([cache.shares(i)[0] for i in range(len(cache.layers))])
            said.append((seen[0, ids.shape[1] :].tolist(), kept))
        mmkv.unwrap(model)
        yield str(variant), said


# Two processes, as torchrun starts them. The first forks the second after its imports, so that
# these run once. They find each other by a file here and not by a port.
SCRIPT = """
import os, sys
sys.path.insert(0, os.environ["TESTS"])
import torch
import torch.distributed as dist
from core import test_tensor_parallel as tests
from transformers import AutoModelForCausalLM
folder, out = sys.argv[1:]
other = os.fork()
rank = 0 if other else 1
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float64).eval()
torch.save((dict(tests.outcomes(model)), tests.refused(model)), f"{out}/{rank}.pt")
dist.barrier()
dist.destroy_process_group()
if other:
    sys.exit(os.waitpid(other, 0)[1] != 0)
"""


def refused(model) -> list[str]:
    """What says that heads are spread, of what needs all of them."""
    said = []
    mmkv.wrap(model, "snapkv", 0.4, window=6)
    context = mmkv.read(model, make_inputs("llama", (40,)))
    for call in (
        lambda: context.save("context"),
        lambda: mmkv.load_context("context", model),
    ):
        with pytest.raises(ValueError, match=SPREAD) as error:
            call()
        said.append(str(error.value))
    mmkv.unwrap(model)
    with pytest.raises(ValueError, match=SPREAD) as error:
        mmkv.calibrate(model, [make_inputs("llama", (40,))], "squeeze")
    return [*said, str(error.value)]


def launch(folder: Path, out: Path) -> list:
    """What both processes found; given again where the machine refused a connection."""
    env = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "TESTS": str(Path(__file__).parents[1]),
        "WORLD_SIZE": "2",
    }
    told = ""
    for i in range(3):
        place = out / str(i)
        place.mkdir()
        command = [sys.executable, "-c", SCRIPT, str(folder), str(place)]
        with (place / "log").open("w") as log:
            code = exit_code(command, 400, env=env, stderr=log)
        if code == 0:
            return [torch.load(place / f"{rank}.pt") for rank in (0, 1)]
        told += (place / "log").read_text()[-6000:]
    pytest.fail(told)


@pytest.mark.slow
def test_each_process_keeps_what_its_heads_keep_in_one(tmp_path):
    """Of every policy, over two turns; or both refuse it, alike."""
    folder = save_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    alone = dict(outcomes(model))
    (one, told), (other, _) = launch(folder, tmp_path)
    assert len(told) == 3
    compared = 0
    for name, wanted in alone.items():
        first, second = one[name], other[name]
        if isinstance(first, str):
            assert first == second, name
            assert SPREAD in first, name
            continue
        compared += 1
        for (said, kept), here, there in zip(wanted, first, second, strict=True):
            assert here[0] == there[0] == said, name
            torch.testing.assert_close(torch.cat([here[1], there[1]], dim=1), kept)
    assert compared > 15


@pytest.fixture
def spread():
    """A model that says its heads are spread, which is all that is looked at before it runs."""
    model = make_model("llama")
    model._tp_size = 2
    return model


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("adakv", {}, "heads='adaptive' .* use heads='uniform'"),
        ("kvzip", {}, "heads='global' .* use heads='uniform'"),
        ("prefixkv", {}, "average_heads=True .* use average_heads=False"),
        ("prefixkv", {"average_heads": False}, "layers='prefix' .* use layers='uniform'"),
        ("vlcache", {}, "layers='sparsity' .* use layers='uniform'"),
        ("tova", {}, "average_heads=True"),
        ("layer-defensive", {}, "score='defensive' needs all heads"),
        ("random", {}, "score='noise' needs all heads"),
    ],
)
def test_policies_comparing_heads_raise(spread, policy, options, said):
    with pytest.raises(ValueError, match=f"{SPREAD}.*{said}.*device_map"):
        mmkv.wrap(spread, policy, 0.3, **options)
    mmkv.wrap(spread, policy, 1.0, **options)  # nothing is evicted


def test_sizes_of_a_profile_are_refused_and_equal_ones_are_not():
    model = make_model("llama")
    profile, model._tp_size = profile_of(model), 2
    with pytest.raises(ValueError, match=r"a profile gives .* use heads='uniform'"):
        mmkv.wrap(model, "condense", 0.2, profile=profile)
    mmkv.wrap(model, "condense", 0.2, heads="uniform")


def test_plugin_score_declares_by_head(spread):
    class Own(WindowAttention):
        by_head = False

    policy = dataclasses.replace(mmkv.get_policy("snapkv"), score=Own())
    with pytest.raises(ValueError, match=SPREAD):
        mmkv.wrap(spread, policy, 0.3)


def test_uneven_heads_and_spread_layers_are_refused(spread):
    spread._tp_size = 4
    with pytest.raises(ValueError, match="splits 2 key-value heads evenly"):
        mmkv.wrap(spread, "snapkv", 0.3)
    spread._pp_stage = object()
    with pytest.raises(ValueError, match="pipeline parallelism"):
        mmkv.wrap(spread, "snapkv", 0.3)


def test_steps_of_spread_heads_are_not_replayed(spread):
    mmkv.wrap(spread, "snapkv", 0.3)
    assert not vars(spread)["_mmkv"].plan.graph
