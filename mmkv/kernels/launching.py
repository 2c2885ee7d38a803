"""What the kernels' launches share."""

from typing import Any

import triton
from torch import Tensor

from mmkv.kernels import DTYPES, MAX_HEAD_DIM


@triton.jit
def _nothing():
    pass


# Whether Triton's interpreter is on, by what its decorator made of a function. In the interpreter
# a dot product of bfloat16 reads the bits as integers, so kernels widen its factors there.
INTERPRETED = not isinstance(_nothing, triton.JITFunction)


def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What starts a kernel on a grid of programs when it is called."""
    return kernel[grid]


def padded(size: int) -> int:
    """The tile that holds `size` numbers: a power of 2, and what a dot product takes at least."""
    return int(max(16, triton.next_power_of_2(size)))


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor itself if its rows lie contiguously in memory, else a copy."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def check_dtypes(**tensors: Tensor) -> None:
    """Raise a ValueError unless all are of one dtype that the kernels take."""
    dtypes = {t.dtype for t in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        got = ", ".join(f"{name} {t.dtype}" for name, t in tensors.items())
        raise ValueError(f"{' and '.join(tensors)} must be of one dtype of {DTYPES}, got {got}")


def check_widths(**tensors: Tensor) -> None:
    """Raise a ValueError unless a tile holds the last dimension of each."""
    for name, t in tensors.items():
        if not 1 <= t.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"the last dimension must be at most {MAX_HEAD_DIM}, got {name} {tuple(t.shape)}"
            )
