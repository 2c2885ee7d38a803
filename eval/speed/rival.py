"""kvpress as a rival: which press is nearest to a policy, and the process that runs it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmkv.eval.speed.measure import Start
from mmkv.policy import Policy
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.scores.position import Recency
from mmkv.scores.window import WindowAttention
from mmkv.sizes.heads import AdaptiveHeads
from mmkv.sizes.layers import PyramidLayers

WORKER = Path(__file__).with_name("kvpress_worker.py")


def nearest_press(policy: Policy, budget: float | int, prompt: int) -> dict[str, Any] | None:
    """The press that does most nearly what a policy's parts do; None if there is none.

    In the worker's words: name, options, an inner press, whether it needs eager attention.
    """
    kept = budget if isinstance(budget, float) else budget / prompt
    options: dict[str, Any] = {"compression_ratio": max(0.0, round(1 - kept, 6))}
    score, layers = policy.score, policy.layers
    if policy.keeps_all or layers.name in ("squeeze", "pooled", "geometric"):
        return None
    if policy.heads.is_global:
        return None
    if isinstance(score, Recency):
        return {"name": "StreamingLLMPress", "options": options | {"n_sink": policy.sinks}}
    if isinstance(score, AccumulatedAttention):
        return {"name": "ObservedAttentionPress", "options": options, "eager": True}
    if not isinstance(score, WindowAttention):
        return None
    options |= {"window_size": score.window, "kernel_size": score.kernel_size}
    press = {"name": "SnapKVPress", "options": options}
    if isinstance(layers, PyramidLayers) and policy.heads.equal:
        press = {"name": "PyramidKVPress", "options": options | {"beta": round(layers.beta)}}
    if isinstance(policy.heads, AdaptiveHeads):
        safeguard = {"alpha_safeguard": policy.heads.alpha}
        return {"name": "AdaKVPress", "inner": press, "options": safeguard}
    return press


def press_label(press: dict[str, Any]) -> str:
    """A press in words, such as "AdaKVPress(SnapKVPress)"."""
    inner = press.get("inner")
    return press["name"] if inner is None else f"{press['name']}({press_label(inner)})"


class WorkerError(RuntimeError):
    """kvpress could not do what was asked; `memory` says whether memory ran out."""

    def __init__(self, message: str, *, memory: bool = False) -> None:
        super().__init__(message)
        self.memory = memory


class Worker:
    """A process of kvpress's interpreter that waits to be asked.

    Raises:
        ValueError: no such program.
    """

    def __init__(self, python: str | Path) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        # Its own packages: nothing of this environment's.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHOME"}
        try:
            self._process = subprocess.Popen(
                [str(python), str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise ValueError(f"--kvpress-python {python}: {error.strerror}") from None
        self._pipe: Any = self._process.stdin
        self._answers: Any = self._process.stdout
        self.versions: dict[str, str | None] = {}

    def load(self, model: dict[str, Any], device: str, dtype: str, threads: int) -> None:
        """Make the model there: {"shape": ...} or {"path": ...}."""
        asked = {"do": "load", **model, "device": device, "dtype": dtype, "threads": threads}
        self.versions = self._ask(asked)["versions"]

    def open(
        self, press: dict[str, Any], batch: int, prompt: int, warm: int, *, trace: bool = False
    ) -> RemoteReply:
        """A prompt read with a press, and the first steps behind it.

        Raises:
            WorkerError: it failed there.
        """
        asked = {"press": press, "batch": batch, "prompt": prompt, "warm": warm, "trace": trace}
        answer = self._ask({"do": "open", **asked})
        return RemoteReply(self._ask, answer.pop("reply"), Start(**answer["start"]))

    def close(self) -> None:
        """End the process."""
        try:
            with suppress(OSError):
                self._pipe.close()
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._errors.close()

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            self._pipe.write(json.dumps(asked) + "\n")
            self._pipe.flush()
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line:
            self._process.wait()
            raise WorkerError(f"kvpress's process ended ({self._last_words()})")
        try:
            answer = json.loads(line)
        except ValueError:
            raise WorkerError(f"kvpress's process answered {line.strip()[:200]!r}") from None
        if "error" in answer:
            raise WorkerError(f"kvpress: {answer['error']}", memory=bool(answer.get("memory")))
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [x.strip() for x in self._errors.read().splitlines() if x.strip()]
        return lines[-1] if lines else f"exit code {self._process.returncode}"


class RemoteReply:
    """A `measure.Reply` in kvpress's process."""

    def __init__(self, ask: Callable[..., dict[str, Any]], number: int, start: Start) -> None:
        self._ask, self._number, self.start = ask, number, start
        self.nbytes = start.prefill_cache_bytes

    def steps(self, number: int) -> float:
        """Seconds of so many more decode steps; a `WorkerError` where they fail."""
        answer = self._ask({"do": "steps", "reply": self._number, "number": number})
        self.nbytes = answer["nbytes"]
        return answer["seconds"]

    def close(self) -> None:
        """Let go of the cache there; whatever is wrong with the process was said before."""
        with suppress(WorkerError):
            self._ask({"do": "close", "reply": self._number})
