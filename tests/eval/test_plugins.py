"""The models that lm_eval and lmms-eval find."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from helpers.picture_chat import make_picture_chat
from mmkv.chat import Loaded
from mmkv.eval.harness.arguments import harness_arguments
from mmkv.memory import DEFAULT, Memory


@pytest.fixture
def plugin(monkeypatch):
    """Our module for lmms-eval, with a tiny model."""
    pytest.importorskip("lmms_eval", reason="lmms_eval is not installed")
    from mmkv.eval.harness import lmms_model

    monkeypatch.setattr(lmms_model, "load", lambda *_: Loaded("tiny", *make_picture_chat()))
    return lmms_model


def test_harness_arguments_are_split(caplog):
    found = harness_arguments("xkv", "0.2", {"window": "4", "device": "cpu"})
    assert found == (0.2, {"window": 4}, {"device": "cpu"})
    assert harness_arguments("xkv", "20%", {})[0] == 0.2
    assert harness_arguments("xkv", None, {}) == (None, {}, {})
    found = harness_arguments("xkv", None, {"memory": "1/8", "device": "cpu"})
    assert found == (None, {"memory": Memory(0.125)}, {"device": "cpu"})
    with pytest.raises(ValueError, match=r"memory=8x stands in place of budget=0\.2: give one"):
        harness_arguments("xkv", "0.2", {"memory": "8x"})
    assert not caplog.records
    assert harness_arguments("xkv", "1", {})[0] == 1
    assert "one token" in caplog.text
    for bad in (("nothing", 0.5), ("xkv", 2.0), ("xkv", "x")):
        with pytest.raises(ValueError):
            harness_arguments(*bad, {})


@pytest.mark.usefixtures("registering")
def test_a_policy_from_a_file(tmp_path, plugin):
    file = tmp_path / "mine.py"
    file.write_text(
        "from mmkv.registry import policy_class, register_policy\n"
        "@register_policy('mine')\n"
        "class Mine(policy_class('snapkv')):\n"
        '    """SnapKV by another name."""\n'
    )
    given = {"plugin": str(file), "window": "6"}
    model = plugin.MMKV(policy="mine", budget="0.3", device="cpu", **given)
    assert model.model._mmkv.plan.policy.name == "mine"
    for _ in range(2):  # a program may evaluate several models
        found = harness_arguments("mine", 0.3, {**given, "dtype": "float32"})
        assert found == (0.3, {"window": 6}, {"dtype": "float32"})
    with pytest.raises(ValueError, match="no such file"):
        harness_arguments("mine", 0.3, {"plugin": "mine"})


def test_lmms_model_accepts_policy_arguments(plugin):
    model = plugin.MMKV(policy="snapkv", budget="0.3", window="6", device="cpu", batch_size="2")
    plan = model.model._mmkv.plan
    assert (plan.policy.name, plan.policy.score.window, plan.budget) == ("snapkv", 6, 0.3)
    held = plugin.MMKV(policy="condense", memory="4x", device="cpu").model._mmkv.plan
    assert held.allotment.memory == Memory(0.25)
    plan = plugin.MMKV(device="cpu").model._mmkv.plan
    assert (plan.policy.name, plan.allotment.memory) == ("condense", DEFAULT)
    with pytest.raises(ValueError, match="batch_size='auto': a compressed"):
        plugin.MMKV(batch_size="auto")
    with pytest.raises(ValueError, match="unknown arguments: windw"):
        plugin.MMKV(policy="snapkv", windw=3)


def test_text_is_cut_at_stop_strings(plugin):
    assert plugin.cut("one two\n\nthree", ["\n\n", "two"]) == "one"
    assert plugin.cut(" one ", ()) == "one"


def test_lmms_eval_finds_the_model(plugin):
    (entry,) = entry_points(group="lmms_eval.models", name="mmkv")
    assert entry.load()().model_id == "mmkv"
    from lmms_eval.models import MODEL_REGISTRY_V2

    assert MODEL_REGISTRY_V2.get_model_class("mmkv") is plugin.MMKV


@pytest.mark.parametrize("harness", ["lm_eval", "lmms_eval"])
def test_tasks_of_the_page_are_the_harnesses(harness):
    """docs/evaluation.md names tasks and groups that the installed package defines."""
    package = pytest.importorskip(harness, reason=f"{harness} is not installed")
    heading = {"lm_eval": "## lm-evaluation-harness", "lmms_eval": "## lmms-eval"}[harness]
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    section = page.read_text(encoding="utf-8").split(heading)[1].split("\n## ")[0]
    named = re.findall(r"^\| [^|]* \| `(\w+)`", section, re.MULTILINE)
    assert len(named) >= 5
    for name in named:
        folder = Path(package.__file__).parent / "tasks" / name.split("_")[0]
        defined = rf'^(task|group): "?{name}"?$'
        texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")]
        assert any(re.search(defined, text, re.MULTILINE) for text in texts), name
