"""kvpress for comparison: the press nearest to a policy, and the process that runs it.

kvpress needs an older transformers than mmkv, so it runs in its own environment, where mmkv is not
installed: `PYTHON kvpress_worker.py FOLDERS_OF_MMKV` imports only `mmkv.eval.speed.models` there.
`Worker` sends it one JSON object a line, {"do": a method of its `Replies`} and its arguments, and
reads {"result": ...} or {"error": "..."}. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mmkv.policy import Policy


def nearest_press(policy: Policy, budget: float | int, prompt: int) -> dict[str, Any] | None:
    """Return the press that is most like a policy; None if there is none.

    Its fields are name, options, an inner press, and whether it needs eager attention.
    """
    kept = budget if isinstance(budget, float) else budget / prompt
    share = {"compression_ratio": max(0.0, round(1 - kept, 6))}
    name, parts = policy.name, cast("Any", policy)
    if name in ("streaming", "local"):
        return {"name": "StreamingLLMPress", "options": share | {"n_sink": policy.sinks}}
    if name == "h2o":
        return {"name": "ObservedAttentionPress", "options": share, "eager": True}
    if name == "expected":
        score = parts.score
        share |= {"n_future_positions": score.positions, "n_sink": score.skip}
        return {"name": "ExpectedAttentionPress", "options": share | {"epsilon": score.epsilon}}
    if name == "kvzip":
        return {"name": "KVzipPress", "options": share}
    if name not in ("snapkv", "adakv", "pyramidkv", "ada-pyramidkv"):
        return None
    share |= {"window_size": parts.score.window, "kernel_size": parts.score.kernel_size}
    press = {"name": "SnapKVPress", "options": share}
    if "pyramid" in name:
        press = {"name": "PyramidKVPress", "options": share | {"beta": round(parts.layers.beta)}}
    alpha = {"alpha_safeguard": parts.heads.alpha} if "ada" in name else {}
    return {"name": "AdaKVPress", "inner": press, "options": alpha} if alpha else press


def press_label(press: dict[str, Any]) -> str:
    """Return a press's name, such as "AdaKVPress(SnapKVPress)"."""
    return press["name"] + (f"({press_label(press['inner'])})" if "inner" in press else "")


class Worker:
    """A process of kvpress's interpreter that answers requests."""

    def __init__(self, python: Path) -> None:
        import mmkv

        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        # In a checkout `mmkv.eval` is not in the folder `mmkv`, but beside it.
        script = Path(__file__).resolve()
        command = [python, script, Path(mmkv.__file__).parent, script.parents[2]]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process: Any = subprocess.Popen(command, text=True, **pipes)
        self.versions: dict[str, str | None] = {}

    def load(self, name: str, model: Any) -> None:
        """Make the same model in the process. Raises ValueError if that fails."""
        import torch

        from mmkv.eval.speed.models import SHAPES
        from mmkv.loading.models import find

        spec: Any = {"device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
        spec |= {"shape": SHAPES[name]} if name in SHAPES else {"path": find(name).path}
        self.versions = self.ask("load", threads=torch.get_num_threads(), **spec)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def reply(self, label: str, **options: Any) -> Generator[tuple[float, int]]:
        """Yield as `models.reply`; `options` are those of `Replies.step`."""
        try:
            while True:
                seconds, nbytes = self.ask("step", label=label, **options)
                yield seconds, nbytes
        finally:
            # A failure of the process was reported before.
            with suppress(ValueError):
                self.ask("close", label=label)

    def ask(self, method: str, **arguments: Any) -> Any:
        """Return the result of a method of the worker's `Replies`. Raises ValueError: it failed."""
        line = ""
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"do": method, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            self._errors.seek(0)
            messages = [x.strip() for x in (line, *self._errors) if x.strip()] or ["it ended"]
            raise ValueError(f"--kvpress-python: its process failed: {messages[-1]}") from None
        if "error" in answer:
            raise ValueError(f"--kvpress-python: {answer['error']}")
        return answer["result"]


def main() -> None:
    """Answer requests until the input ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the error output
    # Modules beside this script must not shadow packages of the same names.
    here = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != here]
    sys.modules["mmkv"] = package = ModuleType("mmkv")  # skips the imports of `mmkv/__init__.py`
    package.__path__ = sys.argv[1:]
    replies = import_module("mmkv.eval.speed.models").Replies()
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = {"result": getattr(replies, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        output.write(json.dumps(answer) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
