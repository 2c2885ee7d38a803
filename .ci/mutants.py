"""How many small changes of the code the tests notice: `make mutants`, or with names of modules.

cosmic-ray changes one operator, number, comparison or condition at a time, in a copy of the
repository. Of each place of the code that it can change (types and guards aside) one change is
drawn, and of these some for each module. Tests that run the changed lines are run on it: those that
noticed others, and then the quickest. What survives is shown, for a reader
to find a test for it or to see that it changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from compileall import compile_dir
from difflib import unified_diff
from functools import cache
from itertools import accumulate
from pathlib import Path
from py_compile import PycInvalidationMode
from types import FrameType
from typing import Any

import hypothesis
import pytest
import torch
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
CORE = "contexts", "context_files", "context_texts", "digest"
FOLDERS = "cache", "merge", "parts", "scores", "sizes"
# Keywords of zip, dataclasses and json, and `non_blocking`, that tests do not see on a CPU.
GUARDS = ("strict", "eq", "repr", "sort_keys", "non_blocking", "daemon")
# Of small numbers, None, bools and objects without an equality of their own.
SAME = ("_BitAnd_Mul", "_Is_Eq", "_Eq_Is", "_IsNot_NotEq", "_NotEq_IsNot")
MEMORY = 12 * 2**30  # bytes that a mutant may map: some would take all that there is


def spared(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change changes nothing that runs: types, and guards of what the code has right."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.keyword) and node.arg in GUARDS:
            found.append(node.value)
    return [
        ((x.lineno, x.col_offset), (x.end_lineno or 0, x.end_col_offset or 0))
        for x in found
        if x is not None
    ]


def drawn(module: Path, seed: int, at_most: int) -> list[MutationSpec]:
    """One mutant for each of some places of a module, in the order of the code."""
    source = module.read_text(encoding="utf-8")
    without, lines = spared(source), source.splitlines()
    places: dict[tuple[int, int], list[MutationSpec]] = defaultdict(list)
    for item in _all_work_items([module], {}):
        mutant = item.mutations[0]
        if mutant.operator_name.endswith(SAME):
            continue
        # cosmic-ray fails on the name of an error that has a dot.
        if (
            mutant.operator_name.endswith("/ExceptionReplacer")
            and "." in lines[mutant.start_pos[0] - 1]
        ):
            continue
        if not any(start <= mutant.start_pos < end for start, end in without):
            places[mutant.start_pos].append(mutant)
    rng = random.Random(seed)
    chosen = sorted(rng.sample(sorted(places), min(at_most, len(places))))
    return [rng.choice(places[at]) for at in chosen]


class Watch:
    """Which lines of the package each test runs, in which time; or only which test fails first."""

    def __init__(self, *, lines: bool) -> None:
        self.lines, self.now = lines, set[tuple[str, int]]()
        self.root = Path.cwd()  # tests go elsewhere
        self.found: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self.bad = set[str]()

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """For `sys.settrace`."""
        name = frame.f_code.co_filename
        if event == "call" and not name.startswith(f"{self.root}/mmkv/"):
            return None
        self.now.add((name, frame.f_lineno))
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Note what a test runs, in its threads too."""
        if not self.lines:
            return (yield)
        self.now, began = set(), time.process_time()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            ran: dict[str, list[int]] = defaultdict(list)
            for name, line in self.now.copy():  # threads go on
                ran[str(Path(name).relative_to(self.root))].append(line)
            self.found[item.nodeid] = time.process_time() - began, ran

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one that fails."""
        if report.failed:
            (self.root / "failed").write_text(report.nodeid)
            self.bad.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Tell the process that started this one."""
        if self.lines:
            sound = {test: ran for test, ran in self.found.items() if test not in self.bad}
            (self.root / "lines.json").write_text(json.dumps(sound))
            (self.root / "failed").write_text(" ".join(sorted(self.bad)))


def passes(tests: list[str], most: float, *, lines: bool = False) -> bool:
    """Whether tests pass, in a process that has torch at hand and reads mmkv anew."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        without = ("cacheprovider", "xdist", "unraisableexception")  # the last one takes a second
        how = [*(f"-pno:{name}" for name in without), "-m", "not slow", *["-x"] * (not lines)]
        os._exit(pytest.main([*how, *tests], [Watch(lines=lines)]) != 0)
    until = time.monotonic() + most
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


class Tests:
    """The tests of some folders, by the lines that they run.

    Args:
        folders: of tests.
        known: a file to take that from, or to leave it in; None: it is not kept.
    """

    def __init__(self, folders: list[str], known: Path | None) -> None:
        if known is None or not known.exists():
            if not passes(folders, 3600, lines=True):
                print(f"left out, for it fails: {Path('failed').read_text()}", file=sys.stderr)
            if known is not None:
                shutil.copy("lines.json", known)
        self.ran = json.loads(Path(known or "lines.json").read_text())
        self.killers = Counter[str]()

    def of(self, module: Path, lines: range, seconds: float) -> list[str]:
        """Tests that run any of these lines, the likeliest to fail first; of `seconds` in all."""
        functions = Counter[str]()
        found: list[tuple[int, float, float, str]] = []
        for test, (took, ran) in sorted(self.ran.items(), key=lambda x: x[1][0]):
            if any(line in lines for line in ran.get(str(module), ())):
                functions[function := test.partition("[")[0]] += 1
                late = took * functions[function]  # quick ones first, and not all of one kind
                found.append((-self.killers[test], late, took, test))
        found.sort()
        total = accumulate(took for *_, took, _ in found)
        return [x[-1] for x, until in zip(found, total, strict=True) if until - x[2] < seconds]

    def notice(self, mutant: MutationSpec, seconds: float) -> str | None:
        """What the mutant changes, if the tests all pass on it."""
        path = Path(mutant.module_path)
        tests = self.of(path, statement(path, mutant.start_pos[0]), seconds)
        operator = get_operator(mutant.operator_name)(**mutant.operator_args)
        with use_mutation(path, operator, mutant.occurrence) as (old, new):
            Path("failed").unlink(missing_ok=True)
            # As many seconds again and more where the machine has others to serve.
            if tests and not passes(tests, 60 + 10 * seconds):
                if Path("failed").exists():
                    self.killers[Path("failed").read_text()] += 1
                return None
        shown = "\n".join(unified_diff(old.split("\n"), new.split("\n"), lineterm="", n=1))
        return f"{shown}\n{len(tests)} tests run it"


@cache
def _statements(path: Path) -> list[range]:
    """The lines of each statement; of one that has others in it, those of its head."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
            found.append(range(first, max(end, node.lineno + 1)))
    return found


def statement(path: Path, line: int) -> range:
    """The lines of the statement in which a line is; of a class, or of the module, all of them."""
    inner = [x for x in _statements(path) if line in x]
    found = min(inner, key=len, default=range(line, line + 1))
    held = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)]
    inside = any(x.lineno <= line <= (x.end_lineno or 0) for x in held)
    return found if inside else range(1, 10**6)


def interval(killed: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z = 1.96
    centre, around = killed / n + z * z / (2 * n), killed / n * (1 - killed / n) / n
    wide = z * math.sqrt(around + z * z / (4 * n * n))
    return (centre - wide) / (1 + z * z / n), (centre + wide) / (1 + z * z / n)


def copied(folder: str) -> None:
    """Make a folder the repository's copy, which every process from now on imports."""
    without = shutil.ignore_patterns("__pycache__")
    for name in ("mmkv", "tests"):
        shutil.copytree(ROOT / name, Path(folder, name), ignore=without)
    for name in ("policies", "eval", "demo"):  # where they import from, lest the originals are
        shutil.copytree(ROOT / name, Path(folder, "mmkv", name), ignore=without)
    shutil.copy(ROOT / "pyproject.toml", folder)
    os.chdir(folder)
    sys.path[:0] = [folder, str(Path(folder, "tests"))]
    sys.dont_write_bytecode = True
    # By hash: a mutant may be written in the same second, and be as long.
    compile_dir("mmkv", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    torch.set_num_threads(1)
    from helpers.models import make_model

    make_model("llava-llama")  # what it loads of transformers is at hand then, and mmkv is not
    for name in [x for x in sys.modules if x.partition(".")[0] in ("helpers", "mmkv")]:
        del sys.modules[name]
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    gc.freeze()


def main() -> None:
    """Draw, run, show."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="such as cache/evict; all of them unless given")
    parser.add_argument("--at-most", type=int, default=60, help="mutants of each module")
    parser.add_argument("--minutes", type=float, default=20, help="for each module")
    parser.add_argument("--seconds", type=float, default=20, help="of tests for each mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", type=Path, help="file of what tests run, taken or left there")
    chosen = parser.parse_args()
    known = chosen.known and chosen.known.resolve()
    with tempfile.TemporaryDirectory() as folder:
        copied(folder)
        inside = (x for name in FOLDERS for x in sorted(Path("mmkv", name).glob("[a-z]*.py")))
        every = [*CORE, *(f"{x.parent.name}/{x.stem}" for x in inside)]
        names = chosen.modules or every
        if missing := [x for x in names if not Path("mmkv", f"{x}.py").exists()]:
            parser.error(f"no such modules: {', '.join(missing)}")
        tests = Tests(["tests/core"], known)
        for name in names:
            mutants = drawn(Path("mmkv", f"{name}.py"), chosen.seed, chosen.at_most)
            random.Random(chosen.seed).shuffle(mutants)  # a sample, where time ends it
            killed, run, began = 0, 0, time.monotonic()
            for mutant in mutants:
                if time.monotonic() - began > 60 * chosen.minutes:
                    break
                left = tests.notice(mutant, chosen.seconds)
                run, killed = run + 1, killed + (left is None)
                print(f"{name}: {killed} of {run}", end="\r", file=sys.stderr, flush=True)
                if left is not None:
                    print(f"survived: {mutant.operator_name}\n{left}\n", flush=True)
            low, high = interval(killed, max(run, 1))
            print(
                f"{name}: seed {chosen.seed}, {killed} of {run} killed, {killed / max(run, 1):.1%} "
                f"(95 %: {low:.1%} to {high:.1%}), {time.monotonic() - began:.0f} s",
                flush=True,
            )
        if tests.killers and not passes([*tests.killers], 3600):
            sys.exit(f"fails now without any change: {Path('failed').read_text()}")


if __name__ == "__main__":
    main()
