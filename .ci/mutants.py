"""How many small changes of the code the tests notice: `make mutants`, or with names of modules.

cosmic-ray changes one operator, number, comparison or condition at a time, in a copy of the
repository. Of each place of the code that it can change (annotations aside) one change is drawn,
and of these some for each module. The module's own tests run on each, and then others. What
survives is shown, for a reader to find a test for it or to see that it changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import gc
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from compileall import compile_dir
from difflib import unified_diff
from functools import cache
from pathlib import Path
from py_compile import PycInvalidationMode

import hypothesis
import pytest
import torch
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
CORE, SERVING = "tests/core/test_{}.py".format, "tests/serving/test_{}.py".format
FAST = ["-m", "not slow"]
PROMISE = [SERVING("promise"), *FAST]
# What runs on every mutant of a module, and then on those that survived.
TESTS = {
    **{
        f"scores/{name}": [
            [CORE("scores"), *FAST],
            [CORE("scores"), "-m", "slow"],
            [CORE("layer_inputs"), CORE("trust"), *FAST],
        ]
        for name in ("accumulated", "position", "window")
    },
    **{
        f"sizes/{name}": [[CORE("allocation")], [CORE("properties"), CORE("budgets"), *FAST]]
        for name in ("heads", "layers", "retention", "squeeze")
    },
    "policies/pyramidkv": [[CORE("budgets"), *FAST], [CORE("ways"), *FAST]],
    "merge/groups": [
        [CORE("grouping"), CORE("group_weights"), *FAST],
        [CORE("properties"), CORE("condense"), CORE("varlen"), CORE("oracles"), *FAST],
    ],
    "cache/quantize": [
        [CORE("quantised"), *FAST],
        [CORE("contexts"), CORE("oracles"), CORE("graph"), *FAST],
    ],
    "cache/selection": [
        [CORE("kept"), *FAST],
        [CORE("properties"), *FAST],
        [CORE("budgets"), CORE("later_turns"), CORE("trust"), *FAST],
    ],
    **{
        f"cache/{name}": [
            [CORE("kept"), CORE("properties"), *FAST],
            [CORE("oracles"), *FAST, "-k", "masking or budget or spent"],
            [CORE("grouping"), CORE("quantised"), CORE("bytes"), *FAST],
            [CORE("reserve"), CORE("later_turns"), CORE("turns"), CORE("postpone"), *FAST],
            [CORE("least"), CORE("contexts"), *FAST, "-k", "ratio or saved or questions"],
            [CORE("device"), *FAST],
        ]
        for name in ("compressed", "evict", "layer", "padded_blocks", "prompt_kv", "state")
    },
    **{
        f"parts/{name}": [[CORE("decoding")], [CORE("properties"), CORE("reserve"), *FAST]]
        for name in ("slots", "victims")
    },
    **{
        name: [
            [CORE("contexts"), *FAST],
            [CORE("context_texts"), CORE("sampling"), CORE("device"), *FAST],
        ]
        for name in ("contexts", "context_files")
    },
    "context_texts": [[CORE("context_texts"), *FAST]],
    "digest": [[CORE("contexts"), *FAST, "-k", "file"], [SERVING("prefixes"), *FAST]],
    "serving/prompts": [[SERVING("prefixes"), SERVING("engine"), *FAST]],
    "serving/pool": [[SERVING("pool"), *FAST], [SERVING("engine"), *FAST]],
    "serving/reply": [[SERVING("prefixes"), SERVING("requests"), *FAST]],
    "serving/choose": [[SERVING("requests"), SERVING("protocol"), *FAST]],
    **{
        f"serving/{name}": [[SERVING("engine"), *FAST], [SERVING("prefixes"), *FAST], PROMISE]
        for name in ("engine", "memory", "request", "worker")
    },
}
# Of small numbers, None and objects without an equality of their own.
SAME = ("_Is_Eq", "_Eq_Is", "_IsNot_NotEq", "_NotEq_IsNot")
MEMORY = 12 * 2**30  # bytes that a mutant may map: some would take all that there is


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types are named: a change there changes nothing that runs."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
    return [
        ((x.lineno, x.col_offset), (x.end_lineno or 0, x.end_col_offset or 0))
        for x in found
        if x is not None
    ]


def drawn(module: Path, seed: int, at_most: int) -> list[MutationSpec]:
    """One mutant for each of some places of a module, in the order of the code."""
    types = annotations(module.read_text(encoding="utf-8"))
    places: dict[tuple[int, int], list[MutationSpec]] = defaultdict(list)
    for item in _all_work_items([module], {}):
        mutant = item.mutations[0]
        if mutant.operator_name.endswith(SAME):
            continue
        if not any(start <= mutant.start_pos < end for start, end in types):
            places[mutant.start_pos].append(mutant)
    rng = random.Random(seed)
    chosen = sorted(rng.sample(sorted(places), min(at_most, len(places))))
    return [rng.choice(places[at]) for at in chosen]


class KillersFirst:
    """Tests that noticed earlier mutants run first; each process adds those that it sees fail."""

    seen = Path("killers")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order them, if tests have failed before."""
        counts = Counter(self.seen.read_text().splitlines() if self.seen.exists() else ())
        items.sort(key=lambda item: -counts[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one that fails."""
        if report.failed:
            with self.seen.open("a") as file:
                file.write(f"{report.nodeid}\n")


def passes(tests: list[str], most: float) -> bool:
    """Whether tests pass, in a process that has torch at hand and reads mmkv anew."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        without = ("cacheprovider", "xdist", "unraisableexception")  # the last one takes a second
        how = ["-x", *(f"-pno:{name}" for name in without)]
        os._exit(pytest.main([*how, *tests], [KillersFirst()]) != 0)
    until = time.monotonic() + most
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def survives(mutant: MutationSpec, tests: list[list[str]]) -> str | None:
    """What the mutant changes, if the tests all pass on it."""
    operator = get_operator(mutant.operator_name)(**mutant.operator_args)
    with use_mutation(mutant.module_path, operator, mutant.occurrence) as (old, new):
        if not all(passes(some, patience(*some)) for some in tests):
            return None
    return "\n".join(unified_diff(old.split("\n"), new.split("\n"), lineterm="", n=1))


@cache
def patience(*tests: str) -> float:
    """How many seconds tests may take on a mutant: several times their own time."""
    began = time.monotonic()
    if not passes(list(tests), 600):
        sys.exit(f"{' '.join(tests)} fails without any change")
    return 10 + 3 * (time.monotonic() - began)


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
    parser.add_argument("modules", nargs="*", help=f"of {', '.join(TESTS)}; all unless given")
    parser.add_argument("--at-most", type=int, default=60, help="mutants of each module")
    parser.add_argument("--minutes", type=float, default=20, help="for each module")
    parser.add_argument("--sets", type=int, default=99, help="of a module's tests, from the first")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if unknown := set(chosen.modules) - set(TESTS):
        parser.error(f"no tests are named for {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        copied(folder)
        for name in chosen.modules or TESTS:
            mutants = drawn(Path("mmkv", f"{name}.py"), chosen.seed, chosen.at_most)
            random.Random(chosen.seed).shuffle(mutants)  # a sample, where time ends it
            sets = TESTS[name][: chosen.sets]
            for tests in sets:
                patience(*tests)
            killed, run, began = 0, 0, time.monotonic()
            for mutant in mutants:
                if time.monotonic() - began > 60 * chosen.minutes:
                    break
                left = survives(mutant, sets)
                run, killed = run + 1, killed + (left is None)
                print(f"{name}: {killed} of {run}", end="\r", file=sys.stderr, flush=True)
                if left is not None:
                    print(f"survived: {mutant.operator_name}\n{left}\n", flush=True)
            if not passes(TESTS[name][0], 600):
                failed = KillersFirst.seen.read_text().splitlines()[-1:]
                sys.exit(f"{name}: its tests fail now without any change: {failed}")
            low, high = interval(killed, max(run, 1))
            print(
                f"{name}: seed {chosen.seed}, {killed} of {run} killed, {killed / max(run, 1):.1%} "
                f"(95 %: {low:.1%} to {high:.1%}), {time.monotonic() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
