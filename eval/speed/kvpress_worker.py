"""kvpress's turns, in an environment of its own: `PYTHON kvpress_worker.py`.

kvpress needs an older transformers, so it cannot be imported beside mmkv, and mmkv is not installed
where it is. One JSON object a line comes in, one goes out; the other end is
`mmkv.eval.speed.rival`:

- {"do": "load", "shape": {...} or "path": "...", "device", "dtype", "threads"} -> {"versions"}
- {"do": "run", "press": {...}, "batch", "prompt", "new", "trace"} -> the fields of a `Run`

A failure is {"error": "...", "memory": whether memory ran out}. The end of the input ends it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the error output
    # The script's folder must not hide packages of the same names: siblings are `speed.measure` ...
    here = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != here]
    sys.path.insert(0, str(here.parent))
    turns = Turns(import_module("speed.measure"), import_module("speed.models"))
    del sys.path[0]
    requests = {"load": turns.load, "run": turns.run}
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            answer = requests[asked.pop("do")](**asked)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            short = "OutOfMemory" in text or "not enough memory" in text
            answer = {"error": text, "memory": short}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Turns:
    """A model, and runs of it."""

    def __init__(self, measure: Any, models: Any) -> None:
        self.measure, self.models = measure, models
        self.model: Any = None

    def load(
        self,
        device: str,
        dtype: str,
        threads: int,
        shape: dict[str, Any] | None = None,
        path: str = "",
    ) -> dict[str, Any]:
        """Make the model of a shape, or load it from a path."""
        import torch
        import transformers as hf

        torch.set_num_threads(threads)
        self.model = None
        if shape is not None:
            self.model = self.models.make(self.models.Shape(**shape), device, dtype)
        else:
            config = hf.AutoConfig.from_pretrained(path)
            seeing = hasattr(config, "vision_config")
            maker: Any = hf.AutoModelForImageTextToText if seeing else hf.AutoModelForCausalLM
            chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
            model = maker.from_pretrained(path, dtype=chosen, use_safetensors=True)
            self.model = model.to(device).eval()
        gc.collect()
        gc.freeze()
        versions: dict[str, str | None] = dict.fromkeys(("kvpress", "transformers", "torch"))
        for name in versions:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        return {"versions": versions}

    def run(
        self, press: dict[str, Any], batch: int, prompt: int, new: int, trace: bool
    ) -> dict[str, Any]:
        """One timed run with a press."""
        model, pressed = self.model, _press(press)
        ids = self.models.make_prompt(model, batch, prompt)
        attention = "eager" if press.get("eager") else "sdpa"
        with self.measure.attention(model, attention), pressed(model):
            return dataclasses.asdict(self.measure.run_once(model, ids, new, trace=trace))


def _press(spec: dict[str, Any]) -> Any:
    inner = [_press(spec["inner"])] if "inner" in spec else []
    return getattr(import_module("kvpress"), spec["name"])(*inner, **spec["options"])


if __name__ == "__main__":
    main()
