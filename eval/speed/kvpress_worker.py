"""kvpress's replies, in an environment of its own: `PYTHON kvpress_worker.py`.

kvpress needs an older transformers, so it cannot be imported beside mmkv, and mmkv is not installed
where it is. One JSON object a line comes in, one goes out; the other end is
`mmkv.eval.speed.rival`:

- {"do": "load", "shape": {...} or "path": "...", "device", "dtype", "threads"} -> {"versions"}
- {"do": "open", "press": {...}, "batch", "prompt", "warm", "trace"} -> {"reply": its number,
  "start": the fields of a `Start`}
- {"do": "steps", "reply", "number"} -> {"seconds", "nbytes"}
- {"do": "close", "reply"} -> {}

A failure is {"error": "...", "memory": whether memory ran out}. The end of the input ends it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from contextlib import ExitStack, suppress
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
    replies = Replies(import_module("speed.measure"), import_module("speed.models"))
    del sys.path[0]
    requests = {name: getattr(replies, name) for name in ("load", "open", "steps", "close")}
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


class Replies:
    """A model, and replies of it that wait for their next steps."""

    def __init__(self, measure: Any, models: Any) -> None:
        self.measure, self.models = measure, models
        self.model: Any = None
        self.open_replies: dict[int, tuple[Any, ExitStack]] = {}
        self.number = 0

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

    def open(
        self, press: dict[str, Any], batch: int, prompt: int, warm: int, trace: bool
    ) -> dict[str, Any]:
        """Read a prompt with a press, in a model of its own: presses leave state on modules."""
        model, pressed = self.models.twin(self.model), _press(press)
        ids = self.models.make_prompt(model, batch, prompt)
        if press.get("eager"):
            model.set_attn_implementation("eager")
        with ExitStack() as stack:
            stack.enter_context(pressed(model))
            reply = self.measure.Reply(model, ids, warm, trace=trace)
            self.number += 1
            self.open_replies[self.number] = reply, stack.pop_all()
        return {"reply": self.number, "start": dataclasses.asdict(reply.start)}

    def steps(self, reply: int, number: int) -> dict[str, Any]:
        """So many more steps."""
        found = self.open_replies[reply][0]
        return {"seconds": found.steps(number), "nbytes": found.nbytes}

    def close(self, reply: int) -> dict[str, Any]:
        """Let go of a reply."""
        found, stack = self.open_replies.pop(reply)
        stack.close()
        found.close()
        return {}


def _press(spec: dict[str, Any]) -> Any:
    inner = [_press(spec["inner"])] if "inner" in spec else []
    return getattr(import_module("kvpress"), spec["name"])(*inner, **spec["options"])


if __name__ == "__main__":
    main()
