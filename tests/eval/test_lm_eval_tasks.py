"""lm_eval's own tasks with a compressed model: their prompts and metrics, on data made here.

The data sets themselves lie on a hub. Here each task is given some rows of the same columns.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mmkv
from helpers.evaluation import make_tokenizer
from helpers.models import make_model
from mmkv.forcing import score_answers

pytestmark = pytest.mark.slow

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
TASKS = Path(lm_eval.__file__).parent / "tasks"
TEXT = " ".join(f"w{i}" for i in range(3, 80))
SUM = "w4 w5 = 7\n#### 7"
LONG = {"context": TEXT, "question": "w7"}
CHOICE = {"choices": ["w8", "w9", "w10", "w11"], "answer": "B"}
ASKED = {"key": 1, "prompt": TEXT, "instruction_id_list": ["keywords:existence"]}
ASKED |= {"kwargs": [{"keywords": ["w8"]}]}
# By task: its folder, the extra packages it needs, a row of its data, and what it reports.
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str]] = {
    "gsm8k": ("gsm8k", (), {"question": "w7 w5", "answer": SUM}, "exact_match,strict-match"),
    "longbench2_academic_single": ("longbench2", (), LONG | CHOICE, "acc,none"),
    "longbench_hotpotqa": (
        "longbench",
        ("jieba", "fuzzywuzzy", "rouge"),
        LONG | {"answers": ["w8"], "all_classes": None},
        "qa_f1_score,none",
    ),
    "ifeval": ("ifeval", ("langdetect", "immutabledict"), ASKED, "prompt_level_strict_acc,none"),
}


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
    """Nothing of other runs, and nltk's data as if it were downloaded: no task here reads it."""
    import mmkv.eval.harness.lm_eval  # noqa: F401 - registers the model

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found = tmp_path / "nltk" / "tokenizers" / "punkt_tab"
    found.mkdir(parents=True)
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])


def run(name: str, folder: Path, model: str = "mmkv", metadata: Any = None, **how: Any) -> Any:
    """What lm_eval makes of a task."""
    from lm_eval.tasks import TaskManager

    made = {"pretrained": make_model("llama"), "tokenizer": make_tokenizer(), "batch_size": 2}
    tasks = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    return lm_eval.simple_evaluate(
        model=model,
        model_args={**made, **how},
        tasks=[name],
        task_manager=tasks,
        gen_kwargs={"max_gen_toks": 8},
        limit=2,
        bootstrap_iters=0,
        verbosity="ERROR",
    )


COMPARED = ("gsm8k", "longbench2_academic_single")  # one that writes, one that chooses
SMALL = {"policy": "snapkv", "window": 6, "kernel_size": 3}


@pytest.mark.parametrize("name", CASES)
def test_a_task_loads_and_runs(tmp_path, name):
    """As lm_eval's own model where the whole cache is kept, and behind a compressed context."""
    folder, needs, row, metric = CASES[name]
    for package in needs:
        pytest.importorskip(package)
    data = tmp_path / "rows.jsonl"
    # Of several lengths.
    lines = [json.dumps(row).replace("w7 ", "w7 " * n) + "\n" for n in range(1, 9)]
    data.write_text("".join(lines))
    (own,) = [x for x in (TASKS / folder).glob("*.yaml") if f"task: {name}\n" in x.read_text()]
    (tmp_path / "mine.yaml").write_text(
        f"include: {own}\ntask: mine\ntag: null\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{train: {data}, test: {data}}}}}\n"
    )
    done = run("mine", tmp_path, budget="0.3", **SMALL)
    assert 0 <= done["results"]["mine"][metric] <= 1
    samples = in_order(done)
    assert "w7" in json.dumps(samples[0]["arguments"], default=str)
    assert samples[0]["doc"].keys() >= row.keys()
    if name not in COMPARED:
        return
    plain = in_order(run("mine", tmp_path, "hf"))
    whole = in_order(run("mine", tmp_path, budget=1.0, policy="xkv"))
    model, tokenizer = make_model("llama"), make_tokenizer()
    for mine, full, theirs in zip(samples, whole, plain, strict=True):
        if "choices" not in row:
            assert full["resps"] == theirs["resps"]
            continue
        assert likelihoods(full) == pytest.approx(likelihoods(theirs), rel=1e-4)
        for (context, choice), found in zip(mine["arguments"], likelihoods(mine), strict=True):
            inputs, answer = tokenizer(context, return_tensors="pt"), tokenizer(choice).input_ids
            with mmkv.wrapped(model, budget=0.3, **SMALL):
                scored = score_answers(model, inputs, [answer])
            assert found == pytest.approx(-scored.nll[0], rel=1e-4)


def in_order(done: Any) -> list[dict[str, Any]]:
    return sorted(done["samples"]["mine"], key=lambda sample: sample["doc_id"])


def likelihoods(sample: dict[str, Any]) -> list[float]:
    return [float(value) for ((value, _),) in sample["resps"]]


def test_ruler_makes_its_own_data(tmp_path, monkeypatch):
    words = {"nouns": ["ring"], "adjectives": ["red"], "verbs": ["run"]}
    for package in ("wonderwords", "nltk"):
        pytest.importorskip(package)
    with monkeypatch.context() as patch:  # all pairs of its words are millions
        patch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=words))
        from lm_eval.tasks.ruler import prepare_niah

    make = prepare_niah.generate_samples
    monkeypatch.setattr(
        prepare_niah, "generate_samples", lambda *args, **k: make(*args, **{**k, "num_samples": 2})
    )
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.ruler.niah_utils", raising=False)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    metadata = {"tokenizer": str(tmp_path / "tokenizer"), "max_seq_lengths": [256]}
    done = run("niah_single_1", TASKS / "ruler", metadata=metadata, budget=0.4, **SMALL)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.ruler.niah_utils", raising=False)
    assert 0 <= done["results"]["niah_single_1"]["256,none"] <= 1
    asked = done["samples"]["niah_single_1"][0]["arguments"]
    assert "special magic" in json.dumps(asked, default=str)


def test_long_context_is_cut_as_by_lm_evals_own_model():
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from mmkv.eval.harness.lm_eval import MMKV

    request = Instance("loglikelihood", {}, (TEXT, " w8 w9 w4"), 0)
    given = {"tokenizer": make_tokenizer(), "max_length": 30}
    (expected,) = HFLM(make_model("llama"), **given).loglikelihood([request])
    (found,) = MMKV(make_model("llama"), "full", **given).loglikelihood([request])
    assert found == (pytest.approx(expected[0], rel=1e-5), expected[1])
    long = Instance("loglikelihood", {}, (TEXT, " w8" * 31), 0)
    with pytest.raises(ValueError, match=r"continuation has 31 tokens, more than .* 30 positions"):
        MMKV(make_model("llama"), "full", **given).loglikelihood([long])
    with pytest.raises(ValueError, match=r"batch_size=0: .* a number, 1 or more"):
        MMKV(make_model("llama"), batch_size=0, **given)
