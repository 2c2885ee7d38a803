"""The models that lm_eval and lmms-eval find."""

import json
import re
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mmkv
from helpers.evaluation import make_samples, make_tokenizer
from helpers.models import make_model
from mmkv.eval.variants import plugin_arguments
from mmkv.forcing import score_answers

NO_LM_EVAL = "lm_eval is not installed"


@pytest.fixture(scope="module")
def harness():
    """lm_eval with our model registered."""
    found = pytest.importorskip("lm_eval", reason=NO_LM_EVAL)
    import mmkv.eval.harness.lm_eval  # noqa: F401 - registers the model

    return found


@pytest.fixture
def plugin(monkeypatch):
    """Our module for lmms-eval, which reads a sample's pictures and prompt."""
    pytest.importorskip("lmms_eval", reason="lmms_eval is not installed")
    from mmkv.eval.harness import lmms_model

    monkeypatch.setattr(lmms_model, "ChatMessages", Messages)
    return lmms_model


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Two tasks from local files: pick one of two continuations, and write one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {"text": s.prompt, "choices": [s.answers[0], "w9 w17 w30"], "label": 0}
        for s in make_samples((60, 41, 52, 47))
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
doc_to_text: "{{{{text}}}}"
num_fewshot: 0
"""
    (tmp_path / "choose.yaml").write_text(
        f"task: choose{common}output_type: multiple_choice\n"
        "doc_to_target: label\ndoc_to_choice: choices\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "write.yaml").write_text(
        f"task: write{common}output_type: generate_until\n"
        'doc_to_target: "{{choices[0]}}"\n'
        "generation_kwargs: {until: [w5], max_gen_toks: 5, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    return tmp_path


def answers(harness: Any, folder: Any, name: str, **arguments: Any) -> dict[str, list[Any]]:
    """What a model replied in both tasks, by document."""
    from lm_eval.tasks import TaskManager

    model = {"pretrained": make_model("llama"), "tokenizer": make_tokenizer(), "batch_size": 3}
    done = harness.simple_evaluate(
        model=name,
        model_args={**model, **arguments},
        tasks=["choose", "write"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    return {
        task: [s["resps"] for s in sorted(done["samples"][task], key=lambda s: s["doc_id"])]
        for task in ("choose", "write")
    }


def flat(found: Any) -> list[float]:
    return [float(x[0]) for row in found for resp in row for x in resp]


@pytest.mark.slow
def test_full_budget_answers_as_lm_evals_own_model(harness, tasks):
    plain = answers(harness, tasks, "hf")
    ours = answers(harness, tasks, "mmkv", policy="xkv", budget=1.0)
    assert ours["write"] == plain["write"]
    assert flat(ours["choose"]) == pytest.approx(flat(plain["choose"]), rel=1e-4)


@pytest.mark.slow
def test_continuations_are_scored_behind_the_compressed_context(harness, tasks):
    ours = answers(harness, tasks, "mmkv", policy="snapkv", budget="0.3", window=6, kernel_size=3)
    plain = answers(harness, tasks, "hf")
    assert ours["write"] != plain["write"]
    from mmkv.eval.prompts import Encoder

    model, sample = make_model("llama"), make_samples((60,))[0]
    encoder = Encoder(make_tokenizer())
    with mmkv.wrapped(model, "snapkv", 0.3, window=6, kernel_size=3):
        scored = score_answers(model, encoder.batch([sample]), [encoder.answer(sample)])
    assert flat(ours["choose"])[0] == pytest.approx(-scored.nll[0], rel=1e-4)


def test_arguments(caplog):
    found = plugin_arguments("xkv", "0.2", None, {"window": "4", "device": "cpu"})
    assert found == (0.2, {"window": 4}, {"device": "cpu"})
    assert plugin_arguments("prefixkv", 0.5, "p.json", {})[0] is None
    assert plugin_arguments("xkv", "20%", None, {})[0] == 0.2
    assert not caplog.records
    assert plugin_arguments("xkv", "1", None, {})[0] == 1
    assert "one token" in caplog.text
    for bad in (("nothing", 0.5), ("xkv", 2.0), ("xkv", "x")):
        with pytest.raises(ValueError):
            plugin_arguments(*bad, None, {})


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
        found = plugin_arguments("mine", 0.3, None, {**given, "dtype": "float32"})
        assert found == (0.3, {"window": 6}, {"dtype": "float32"})
    with pytest.raises(ValueError, match="expected a Python file"):
        plugin_arguments("mine", 0.3, None, {"plugin": "mine"})


class Messages:
    """Stands in for lmms-eval's messages."""

    def __init__(self, messages: Any) -> None:
        self.sample = messages

    def extract_media(self) -> tuple[list[Any], list[Any], list[Any]]:
        return list(self.sample.images), [], []

    def to_hf_messages(self) -> list[dict[str, Any]]:
        content = [{"type": "image"}, {"type": "text", "text": self.sample.prompt}]
        return [{"role": "user", "content": content}]


@pytest.mark.slow
def test_lmms_model_replies_from_a_compressed_cache(plugin):
    from mmkv.eval.suites.registry import load_suite

    model = plugin.MMKV(policy="snapkv", budget="0.3", window="6", device="cpu", batch_size="2")
    plan = model.model._mmkv.plan
    assert (plan.policy.name, plan.policy.score.window, plan.budget) == ("snapkv", 6, 0.3)
    model.task_dict = {"t": {"test": load_suite("description", limit=3)}}

    def ask(options: dict[str, Any]) -> list[str]:
        arguments = [("", lambda s: s, options, i, "t", "test") for i in range(3)]
        return model.generate_until([SimpleNamespace(args=a) for a in arguments])

    long, short = ask({"max_new_tokens": 6}), ask({"max_new_tokens": 3})
    assert len(long) == 3
    assert all(a.startswith(b) for a, b in zip(long, short, strict=True))
    with pytest.raises(ValueError, match="batch_size='auto': a compressed"):
        plugin.MMKV(batch_size="auto")
    with pytest.raises(ValueError, match="unknown arguments: windw"):
        plugin.MMKV(policy="snapkv", windw=3)


def test_stops(plugin):
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
