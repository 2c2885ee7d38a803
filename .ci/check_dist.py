"""Check what `make dist` built: the wheel holds all it needs to run, and no training scripts."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = (
    "mmkv/builtin/vision/*",
    "mmkv/py.typed",
)
FOLDERS, SUFFIXES = ("policies", "eval", "demo"), (".py", ".json", ".css", ".js", ".html", ".xz")
LEFT_OUT = ("mmkv/builtin/training/", "tests/", "docs/")


def wanted() -> set[str]:
    """Every module and data file of the sources, as the wheel should hold it."""
    found = {x.relative_to(ROOT).as_posix() for x in (ROOT / "mmkv").rglob("*.py")}
    for pattern in NEEDED:
        found |= {x.relative_to(ROOT).as_posix() for x in ROOT.glob(pattern)}
    for folder in FOLDERS:
        files = [x for x in (ROOT / folder).rglob("*") if x.suffix in SUFFIXES]
        found |= {f"mmkv/{x.relative_to(ROOT).as_posix()}" for x in files}
    return {x for x in found if not x.startswith(LEFT_OUT)}


def main(folder: Path) -> int:
    """Print what is wrong; 1 if anything is."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    with tarfile.open(source) as archive:
        sources = {x.partition("/")[2] for x in archive.getnames()}
    wrong = [f"the wheel lacks {x}" for x in sorted(wanted() - held)]
    wrong += [f"the wheel holds {x}" for x in sorted(held) if x.startswith(LEFT_OUT)]
    wrong += [f"the source archive lacks {x}" for x in ("README.md", "LICENSE") if x not in sources]
    for line in wrong:
        print(line, file=sys.stderr)
    size = wheel.stat().st_size / 2**20
    print(f"{wheel.name}: {len(held)} files, {size:.1f} MiB; {source.name}: {len(sources)} files")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
