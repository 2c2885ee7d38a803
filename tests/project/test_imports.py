"""No import runs upward, and no modules import each other in a circle (see pyproject.toml)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def laid_out(tmp_path):
    """Copies of the sources, laid out as they import: mmkv/policies, mmkv/eval, mmkv/demo."""
    ignore = shutil.ignore_patterns("__pycache__", "weights", "pictures")
    shutil.copytree(ROOT / "mmkv", tmp_path / "mmkv", ignore=ignore)
    for name in ("policies", "eval", "demo"):
        shutil.copytree(ROOT / name, tmp_path / "mmkv" / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the sources in a folder."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import importlinter.cli as c; c.lint_imports_command()",
            "--no-cache",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_import_runs_upward_and_none_in_a_circle(laid_out):
    done = lint(laid_out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "imported", "broken"),
    [
        ("mmkv/scores/window.py", "mmkv.cache.compressed", "no import runs upward BROKEN"),
        ("mmkv/eval/store.py", "mmkv.eval.runner", "no circle among modules BROKEN"),
    ],
)
def test_a_wrong_import_is_found(laid_out, module, imported, broken):
    with (laid_out / module).open("a", encoding="utf-8") as file:
        file.write(f"\ndef later():\n    import {imported}\n")
    done = lint(laid_out)
    assert done.returncode == 1
    assert broken in done.stdout
