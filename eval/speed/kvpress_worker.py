"""kvpress's replies, in an environment of its own: `PYTHON kvpress_worker.py FOLDER_OF_MMKV`.

kvpress needs an older transformers, so it cannot be imported beside mmkv, and mmkv is not installed
where it is: of mmkv, `mmkv.eval.speed.models` alone is imported. `mmkv.eval.speed.rival` sends one
JSON object a line, {"do": a method of `Replies`} and its arguments, and reads {"found": ...} or
{"error": "..."}; the end of the input ends it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the error output
    # The script's folder must not hide packages of the same names.
    here = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != here]
    sys.modules["mmkv"] = package = ModuleType("mmkv")  # without what mmkv itself imports
    package.__path__ = sys.argv[1:]
    replies = Replies(import_module("mmkv.eval.speed.models"))
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            answer = {"found": getattr(replies, asked.pop("do"))(**asked)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Replies:
    """A model, and by their labels replies of it that wait for their next steps."""

    def __init__(self, models: Any) -> None:
        self.models = models
        self.model: Any = None
        self.replies: dict[str, Any] = {}

    def load(
        self, device: str, dtype: str, threads: int, shape: Any = None, path: str = ""
    ) -> dict[str, Any]:
        """Make the model of a shape, or load it from a path; the libraries' versions."""
        import torch
        import transformers as hf

        torch.set_num_threads(threads)
        if shape is not None:
            self.model = self.models.make(shape, device, dtype)
        else:
            maker: Any = hf.AutoModelForCausalLM
            model = maker.from_pretrained(path, dtype=getattr(torch, dtype), use_safetensors=True)
            self.model = model.to(device).eval()
        gc.collect()
        gc.freeze()
        found: dict[str, Any] = dict.fromkeys(("kvpress", "transformers", "torch"))
        return found | {x.name: x.version for x in distributions() if x.name in found}

    def open(self, label: str, **asked: Any) -> tuple[float, int]:
        """Read a prompt; its seconds, and bytes held then."""
        self.replies[label] = self._reply(**asked)
        return self.step(label)

    def step(self, label: str) -> tuple[float, int]:
        """Seconds of one more step, and bytes held then."""
        return next(self.replies[label])[:2]

    def close(self, label: str) -> None:
        """Let go of a reply."""
        self.replies.pop(label).close()

    def _reply(self, press: dict[str, Any], batch: int, prompt: int, warm: int) -> Any:
        # A model of its own: presses leave state on modules.
        model = self.models.twin(self.model)
        if press.get("eager"):
            model.set_attn_implementation("eager")
        with _press(press)(model):
            yield from self.models.reply(model, self.models.make_prompt(model, batch, prompt), warm)


def _press(spec: dict[str, Any]) -> Any:
    inner = [_press(spec["inner"])] if "inner" in spec else []
    return getattr(import_module("kvpress"), spec["name"])(*inner, **spec["options"])


if __name__ == "__main__":
    main()
