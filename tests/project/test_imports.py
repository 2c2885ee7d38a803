"""No import runs upward, and no modules import each other in a circle (see pyproject.toml)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_run_downward_without_cycles(tmp_path):
    """In copies of the sources, laid out as they import: mmkv/policies, mmkv/eval, mmkv/demo."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mmkv", tmp_path / "mmkv", ignore=ignore)
    for name in ("policies", "eval", "demo"):
        shutil.copytree(ROOT / name, tmp_path / "mmkv" / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code = "import importlinter.cli as c; c.lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout
