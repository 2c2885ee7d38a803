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
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the error output
    # The script's folder must not hide packages of the same names.
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent.resolve()]
    state: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            answer = _answer(state, json.loads(line))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            short = "OutOfMemory" in text or "not enough memory" in text
            answer = {"error": text, "memory": short}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(state: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "load":
        return _load(state, asked)
    if asked["do"] == "run":
        return _run(state, asked)
    raise ValueError(f"unknown request {asked['do']!r}")


def _load(state: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers as hf

    torch.set_num_threads(asked["threads"])
    models = state["models"] = _sibling("models")
    state["measure"] = _sibling("measure")
    state.pop("model", None)
    if "shape" in asked:
        shape = models.Shape(**asked["shape"])
        state["model"] = models.make(shape, asked["device"], asked["dtype"])
    else:
        path, config = asked["path"], hf.AutoConfig.from_pretrained(asked["path"])
        name = "AutoModelForImageTextToText" if hasattr(config, "vision_config") else None
        maker = getattr(hf, name or "AutoModelForCausalLM")
        chosen = asked["dtype"]
        if chosen != "auto":
            chosen = getattr(torch, chosen)
        model = maker.from_pretrained(path, dtype=chosen, use_safetensors=True)
        state["model"] = model.to(asked["device"]).eval()
    gc.collect()
    gc.freeze()
    return {"versions": {n: _version(n) for n in ("kvpress", "transformers", "torch")}}


def _run(state: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    model, press = state["model"], _press(asked["press"])
    ids = state["models"].make_prompt(model, asked["batch"], asked["prompt"])
    with _attention(model, "eager" if asked["press"].get("eager") else "sdpa"), press(model):
        run = state["measure"].run_once(model, ids, asked["new"], trace=asked["trace"])
    return dataclasses.asdict(run)


def _press(spec: dict[str, Any]) -> Any:
    cls = getattr(import_module("kvpress"), spec["name"])
    if "inner" in spec:
        return cls(_press(spec["inner"]), **spec["options"])
    return cls(**spec["options"])


@contextmanager
def _attention(model: Any, name: str) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _sibling(name: str) -> Any:
    """A module beside this file, under a name that hides no package."""
    spec = spec_from_file_location(
        f"mmkv_bench_{name}", Path(__file__).resolve().with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
