"""How many kept tokens condense's scores change in TF32, or in bfloat16 with float32 sums.

    python docs/score_precision.py

The model reads pages of this documentation in float32. The operands of the scores' products are
rounded as a GPU's tensor cores round them; sums stay in float32. A head keeps its best-scored
tokens, a fifth or a twentieth of them; the share of these that differ is averaged over layers.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mmkv
from mmkv.layer_inputs import LayerInputs
from mmkv.loading.models import pretrained
from mmkv.scores.observers import Observers

PAGES, TOKENS, SHARES = ("behaviour",), 1024, (0.2, 0.05)


def tf32(x: Tensor) -> Tensor:
    """Round float32 numbers to the ten bits of a TF32 mantissa."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def bfloat16(x: Tensor) -> Tensor:
    """Round float32 numbers to bfloat16."""
    return x.bfloat16().float()


class Rounded(TorchDispatchMode):
    """Rounds the operands of matrix products."""

    def __init__(self, rounding: Any) -> None:
        super().__init__()
        self.rounding = rounding

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            args = tuple(map(self.rounding, args))
        return func(*args, **(kwargs or {}))


class Compared(Observers):
    """The scores, which also counts what other precisions would keep."""

    changed: ClassVar[dict[tuple[str, float], list[float]]] = {}

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the scores in float32."""
        exact = super().__call__(layer)
        for rounding in (tf32, bfloat16):
            with Rounded(rounding):
                rounded = super().__call__(layer)
            for share in SHARES:
                n = round(share * exact.shape[-1])
                best, others = (x.topk(n).indices for x in (exact, rounded))
                kept = torch.zeros_like(exact).scatter_(-1, best, 1.0).gather(-1, others)
                found = self.changed.setdefault((rounding.__name__, share), [])
                found.append(float(1 - kept.mean()))
        return exact


def main() -> None:
    """Print a table."""
    model, tokenizer = pretrained("smollm2")
    with mmkv.wrapped(model, "condense", 0.2, score=Compared()), torch.no_grad():
        for page in PAGES:
            text = (Path(__file__).parent / f"{page}.md").read_text()
            ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
            model(ids)
    print("| products in | of the tokens | kept otherwise | in the worst layer |")
    print("| --- | ---: | ---: | ---: |")
    for (name, share), found in Compared.changed.items():
        mean = sum(found) / len(found)
        print(f"| {name} | {share:.0%} | {mean:.3%} | {max(found):.3%} |")


if __name__ == "__main__":
    main()
