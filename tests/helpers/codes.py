"""Blocks of codes for tests of the attention to them."""

import torch

from mmkv.cache.quantize import QuantizedKV


def coded_block(
    rows: int,
    slots: int,
    D: int,
    Dv: int,
    *,
    bits: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> QuantizedKV:
    """Return a block of random pairs after five generated tokens, with an exact first token.

    The tokens took slots that others had: of the first row one that its first token had, of the
    last row the same one twice.
    """

    def pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(rows, n, size, device=device, dtype=dtype) for size in (D, Dv))

    filled = torch.ones(rows, slots, dtype=torch.bool, device=device)
    first = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    stored = QuantizedKV.of(
        *pairs(slots), filled, first, bits=bits, start=slots, opened=False, reuses=True
    )
    for i in range(5):
        key, value = pairs(1)
        of_rows = torch.arange(rows, device=device) * 7 + 3 * i
        of_rows[-1] = slots - 10
        key = key.to(stored.rotation.dtype) @ stored.rotation
        stored.write(stored.new(key, value), [of_rows], slots + i)
    return stored
