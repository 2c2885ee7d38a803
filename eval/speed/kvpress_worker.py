"""Replies of kvpress in its own environment: `PYTHON kvpress_worker.py FOLDERS_OF_MMKV`.

kvpress needs an older transformers than mmkv, so it runs where mmkv is not installed, and only
`mmkv.eval.speed.models` is imported here. `mmkv.eval.speed.rival` sends one JSON object a line,
{"do": a method of `Replies`} and its arguments, and reads {"result": ...} or {"error": "..."}. The
process ends with its input.
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
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the error output
    # Modules beside this script must not shadow packages of the same names.
    here = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != here]
    sys.modules["mmkv"] = package = ModuleType("mmkv")  # skips the imports of `mmkv/__init__.py`
    package.__path__ = sys.argv[1:]
    replies = Replies(import_module("mmkv.eval.speed.models"))
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = {"result": getattr(replies, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        output.write(json.dumps(answer) + "\n")
        output.flush()


class Replies:
    """A model, and its unfinished replies by label."""

    def __init__(self, models: Any) -> None:
        self.models = models
        self.model: Any = None
        self.replies: dict[str, Any] = {}
        self.prompt, self.full = list[int](), None  # the last text, and its full cache's reply

    def load(
        self, device: str, dtype: str, threads: int, shape: Any = None, path: str = ""
    ) -> dict[str, Any]:
        """Make the model of a shape, or load it from a path; return the libraries' versions."""
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
        versions: dict[str, Any] = dict.fromkeys(("kvpress", "transformers", "torch"))
        return versions | {x.name: x.version for x in distributions() if x.name in versions}

    def step(self, label: str, press: dict[str, Any], batch: int, prompt: int) -> tuple[float, int]:
        """Read a reply's random prompt, or make its next step; return its seconds, and the cache's
        bytes after it."""
        if label not in self.replies:
            ids = self.models.make_prompt(self.model, batch, prompt)
            self.replies[label] = self._reply(press, ids)
        return next(self.replies[label])[:2]

    def close(self, label: str) -> None:
        """Close a reply and free its memory."""
        self.replies.pop(label).close()

    def distance(
        self, press: dict[str, Any], prompt: list[int], answer: list[int]
    ) -> tuple[float, float]:
        """Return the distance from the full cache along the answer to a prompt."""
        import torch

        models, device = self.models, self.model.device
        ids, tokens = torch.tensor([prompt], device=device), torch.tensor(answer, device=device)
        if prompt != self.prompt:
            full = models.along(models.reply(models.twin(self.model), ids), tokens)
            self.prompt, self.full = prompt, full
        return models.distance(self._reply(press, ids), tokens, self.full)

    def _reply(self, press: dict[str, Any], ids: Any) -> Any:
        import torch
        import transformers as hf

        # A twin for each reply, as presses leave state on modules.
        model = self.models.twin(self.model)
        if press.get("eager"):
            model.set_attn_implementation("eager")
        # KVzip finds the cache among the model's arguments.
        reply = self.models.reply(model, ids, hf.DynamicCache(config=model.config))
        start = self.models.now(ids.device)
        # KVzip reads the prompt again when its context is left, by itself with gradients.
        with torch.no_grad(), _press(press)(model):
            _, nbytes, logits = next(reply)
        sent = yield self.models.now(ids.device) - start, nbytes, logits
        while True:
            sent = yield reply.send(sent)


def _press(spec: dict[str, Any]) -> Any:
    inner = [_press(spec["inner"])] if "inner" in spec else []
    return getattr(import_module("kvpress"), spec["name"])(*inner, **spec["options"])


if __name__ == "__main__":
    main()
