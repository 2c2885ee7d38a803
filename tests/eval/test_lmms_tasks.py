"""lmms-eval's own tasks with a compressed model: their prompts and metrics, on pictures made here.

The data sets themselves lie on a hub. Here each task is given some rows of the same columns.
"""

from pathlib import Path
from typing import Any

import pytest

import mmkv
from helpers.picture_chat import make_picture_chat, picture_chat
from mmkv import chat
from mmkv.eval.suites.registry import load_suite

pytestmark = pytest.mark.slow

lmms_eval = pytest.importorskip("lmms_eval", reason="lmms-eval is not installed")
TASKS = Path(lmms_eval.__file__).parent / "tasks"
QUESTION = "what is in the picture ?"
ASKED = {"question": QUESTION, "answer": "ring"}
CHOICE = {"question": "<image 1> " + QUESTION, "question_type": "multiple-choice", "answer": "A"}
CHOICE |= {"options": "['ring', 'star']", "id": "validation_Art_1", "subfield": "x"}
# By task: its folder, a row of its data beside the picture, and what it reports.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "docvqa_val": ("docvqa", {"question": QUESTION, "answers": ["ring"]}, "anls,none"),
    "ocrbench": (
        "ocrbench",
        {**ASKED, "answer": ["ring"], "dataset": "x", "question_type": "Doc-oriented VQA"},
        "ocrbench_accuracy,none",
    ),
    "mmmu_val": ("mmmu", CHOICE, "mmmu_acc,none"),
}


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
    """Nothing of other runs, and files for a submission where they leave no trace."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def make_task(name: str, folder: Path, pictures: list[Any]) -> None:
    """The task as it is, with a row of each picture."""
    from datasets import Dataset

    place, row, _ = CASES[name]
    column = "image_1" if name == "mmmu_val" else "image"
    Dataset.from_list([row | {column: p} for p in pictures]).to_parquet(folder / "rows.parquet")
    each = {path: path.read_text().replace('"', "") for path in (TASKS / place).glob("*.yaml")}
    (own,) = [path for path, text in each.items() if f"task: {name}\n" in text]
    data = f"{{test: {folder}/rows.parquet, validation: {folder}/rows.parquet}}"
    (folder / "mine.yaml").write_text(
        f"include: {own}\ntask: mine\ntag: []\ndataset_path: parquet\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {data}}}\n"
    )


def reply(picture: Any, text: str) -> str:
    """What the compressed model says to a picture and a text, without lmms-eval."""
    loaded = picture_chat()
    inputs = chat.encode(loaded, text, [picture])
    with mmkv.wrapped(loaded.model, "snapkv", 0.1, window=8) as model:
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    new = ids[0, inputs["input_ids"].shape[1] :]
    return loaded.tokenizer.decode(new, skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", CASES)
def test_a_task_loads_and_runs(tmp_path, name):
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    # In batches of two.
    pictures = [s.images[0] for s in load_suite("description", limit=3)]
    make_task(name, tmp_path, pictures)
    for part in make_picture_chat():
        part.save_pretrained(tmp_path / "tiny")
    done = simple_evaluate(
        model="mmkv",
        model_args=f"pretrained={tmp_path}/tiny,policy=snapkv,budget=0.1,window=8,device=cpu",
        tasks=["mine"],
        task_manager=TaskManager("ERROR", str(tmp_path), include_defaults=False),
        batch_size=2,
        gen_kwargs="max_new_tokens=6",
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    assert 0 <= done["results"]["mine"][CASES[name][2]] <= 1
    for picture, sample in zip(pictures, done["samples"]["mine"], strict=True):
        text = sample["arguments"][0].removeprefix("<image 1> ")
        assert QUESTION[1:] in text
        assert sample["resps"] == [[reply(picture, text)]]
