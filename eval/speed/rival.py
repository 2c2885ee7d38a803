"""kvpress as a rival: which press is nearest to a policy, and the process that runs it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import mmkv
from mmkv.eval.speed.models import SHAPES
from mmkv.loading.models import find
from mmkv.policy import Policy


def nearest_press(policy: Policy, budget: float | int, prompt: int) -> dict[str, Any] | None:
    """The press that does most nearly what a policy does; None if there is none.

    In the worker's words: name, options, an inner press, whether it needs eager attention.
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
    if name not in ("snapkv", "adakv", "pyramidkv", "ada-pyramidkv"):
        return None
    share |= {"window_size": parts.score.window, "kernel_size": parts.score.kernel_size}
    press = {"name": "SnapKVPress", "options": share}
    if "pyramid" in name:
        press = {"name": "PyramidKVPress", "options": share | {"beta": round(parts.layers.beta)}}
    alpha = {"alpha_safeguard": parts.heads.alpha} if "ada" in name else {}
    return {"name": "AdaKVPress", "inner": press, "options": alpha} if alpha else press


def press_label(press: dict[str, Any]) -> str:
    """A press in words, such as "AdaKVPress(SnapKVPress)"."""
    return press["name"] + (f"({press_label(press['inner'])})" if "inner" in press else "")


class Worker:
    """A process of kvpress's interpreter that waits to be asked."""

    def __init__(self, python: Path) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        # Its own packages: nothing of this environment's but what the script imports of mmkv.
        script, mine = Path(__file__).with_name("kvpress_worker.py"), Path(mmkv.__file__).parent
        how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process: Any = subprocess.Popen([python, script, mine], text=True, **how)
        self.versions: dict[str, str | None] = {}

    def load(self, name: str, model: Any) -> None:
        """Make the same model there; a ValueError: it cannot be made there."""
        how: Any = {"device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
        how |= {"shape": SHAPES[name]} if name in SHAPES else {"path": find(name).path}
        self.versions = self.ask("load", threads=torch.get_num_threads(), **how)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, do: str, **asked: Any) -> Any:
        """What a method of `kvpress_worker.Replies` gives; a ValueError: it failed there."""
        line = ""
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            self._errors.seek(0)
            said = [x.strip() for x in (line, *self._errors) if x.strip()] or ["it ended"]
            raise ValueError(f"--kvpress-python: its process failed: {said[-1]}") from None
        if "error" in answer:
            raise ValueError(f"--kvpress-python: {answer['error']}")
        return answer["found"]


def remote_reply(
    worker: Worker, label: str, **asked: Any
) -> Generator[tuple[float, int, Tensor | None]]:
    """As `models.reply`, in kvpress's process, with a press; tokens are not told."""
    try:
        yield *worker.ask("open", label=label, **asked), None
        while True:
            yield *worker.ask("step", label=label), None
    finally:
        # Whatever is wrong with the process was said before.
        with suppress(ValueError):
            worker.ask("close", label=label)
