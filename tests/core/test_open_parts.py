"""A score in one file, word for word that of docs/extending.md, works everywhere by itself."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_oracles as oracles

import mmkv
from helpers.oracle import Variant

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
OPTIONS = (("score", "small-keys"), ("power", 2.0))
# Several ways to size layers and heads, to merge and to drop generated tokens.
VARIANTS = [
    Variant("knorm", OPTIONS),
    Variant("knorm", (*OPTIONS, ("heads", "adaptive"))),
    Variant("knorm", (*OPTIONS, ("heads", "global"))),
    Variant("prefixkv", (*OPTIONS, ("distance", 4))),
    Variant("lookm", OPTIONS),
    Variant("condense", OPTIONS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the file, and the metadata by which an installed package would be found."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if 'register_part("small-keys")' in block)
    entry = re.search(r"^small-keys = .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert entry is not None
    found = tmp_path_factory.mktemp("package")
    (found / "small_keys.py").write_text(code, encoding="utf-8")
    info = found / "small_keys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: small-keys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mmkv.parts]\n{entry[0].replace(chr(34), '')}\n")
    return found


@pytest.fixture
def score(folder, monkeypatch, registering):
    """The score, registered by an import, for the length of a test."""
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("small_keys", None)
    return importlib.import_module("small_keys").SmallKeys


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_documented_score_passes_the_oracles(models, score, variant):
    assert isinstance(mmkv.get_policy(variant.policy, **dict(variant.options)).score, score)
    oracles.test_eviction_equals_masking(models, variant, "padded")
    oracles.test_batch_equals_singles(models, variant)
    oracles.test_budget_is_spent_exactly(models, variant)


def said_by(code, path, cwd):
    """What a process of its own prints."""
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_installed_package_is_found_by_its_entry_point(folder, tmp_path):
    found = "import mmkv; print(mmkv.get_policy('knorm', score='small-keys'))"
    assert "SmallKeys" in said_by(found, path=folder, cwd=tmp_path)
