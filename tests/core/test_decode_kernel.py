"""The decoding kernels against their twin in plain torch, and the twin against a loop.

Without a GPU the kernels run in Triton's interpreter (see conftest.py), so sizes are small.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.marks import slow_except
from helpers.ragged import a_step, twice
from mmkv import kernels
from mmkv.kernels import twins

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 3e-3, "atol": 2e-3},
}


def of_row(given: dict[str, Any], name: str, r: int, n: int) -> Tensor:
    """The first n slots of a row."""
    store = given["store"]
    start = int(store.starts[r])
    return getattr(store, name)[start : start + n].double()


# --- the twin ------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_twin_is_a_loop(softcap: float | None, weighted: bool) -> None:
    lengths, own = [4, 11, 7], [4, 2, 6]  # behind all, in the place of an old one, of the last
    before = a_step(lengths, own, DV=24, weighted=weighted, lightest={})
    after, _ = twice(before, torch.device("cpu"))
    got = twins.decode_attention(**after, scale=0.4, softcap=softcap)
    assert after["store"].lengths.tolist() == [5, 11, 7]
    for r, (n, at) in enumerate(zip([5, 11, 7], own, strict=True)):
        keys, values = (of_row(before, name, r, n) for name in ("keys", "values"))
        mass, held = of_row(before, "mass", r, n), of_row(before, "positions", r, n)
        keys[at], values[at], mass[at] = before["key"][r], before["value"][r], 0
        held[at] = int(before["step"].position)
        total = torch.zeros(n, dtype=torch.float64)
        for g in range(4):
            logits = 0.4 * keys @ before["query"][r, g].double()
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if weighted:
                bias = of_row(before, "log_weights", r, n)
                bias[at] = 0
                logits = logits + bias
            attention = logits.softmax(0)
            torch.testing.assert_close(got[r, g].double(), attention @ values, rtol=1e-5, atol=1e-6)
            total += attention / 4
        for name, want in (("keys", keys), ("values", values), ("positions", held)):
            assert torch.equal(of_row(after, name, r, n), want)
        torch.testing.assert_close(of_row(after, "mass", r, n), mass + total)


def a_victim(given: dict[str, Any], r: int) -> int:
    """By a loop: the next token's slot, from what the step has left in the store."""
    store, how = given["store"], given["lightest"]
    n, newest = int(store.lengths[r]), int(given["step"].position)
    if n <= int(how.capacity[r]):
        return n
    at, mass = of_row(given, "positions", r, n).tolist(), of_row(given, "mass", r, n).tolist()
    recent = int(how.recent[r])
    until = newest - recent
    if how.places is not None and recent > newest - how.end + 1:
        until = int(how.places[r, len(how.places[r]) - (recent - (newest - how.end + 1))]) - 1
    free = [s for s in range(n) if s >= int(how.protected[r])]
    old = [s for s in free if at[s] <= until]
    return min(old, key=lambda s: mass[s]) if old else min(free, key=lambda s: at[s])


VICTIMS: dict[str, dict[str, Any]] = {
    "lightest": {"recent": [1, 3, 2]},
    "protected": {"protected": [2, 4, 0], "recent": [1, 3, 5]},
    "filling": {"capacity": [9, 11, 8]},
    "all recent": {"protected": [1, 0, 0], "recent": [90, 90, 2]},
}


@pytest.mark.parametrize("options", VICTIMS.values(), ids=VICTIMS)
def test_twin_frees_what_a_loop_finds(options: dict[str, Any]) -> None:
    given = a_step([6, 11, 7], [6, 2, 6], lightest=options)
    twins.decode_attention(**given, scale=0.3)
    want = [a_victim(given, r) for r in range(3)]
    assert given["lightest"].freed.tolist() == want


# --- the kernels ---------------------------------------------------------------------------------


def check(device: torch.device, given: dict[str, Any], **options: Any) -> Tensor:
    """Compare the kernel with its twin: what it gives, and what it leaves in the store."""
    mine, other = twice(given, device)
    want = twins.decode_attention(**other, scale=0.2, **options)
    got = kernels.decode_attention(**mine, scale=0.2, **options)
    assert got.dtype == mine["query"].dtype
    torch.testing.assert_close(got, want, **TOLERANCES[got.dtype])
    for name, x in mine["store"]._asdict().items():
        if x is not None:
            exact = {} if name == "mass" else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(x, getattr(other["store"], name), equal_nan=True, **exact)
    if mine["lightest"] is not None:
        assert torch.equal(mine["lightest"].freed, other["lightest"].freed)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G", slow_except([1, 4, 7], 4))
@pytest.mark.parametrize("D", slow_except([32, 64, 80, 96, 128, 256], 80))
def test_head_dims(device: torch.device, D: int, G: int, dtype: torch.dtype) -> None:
    check(device, a_step([99, 3], [99, 1], D=D, G=G, dtype=dtype))


@pytest.mark.parametrize("G", slow_except([1, 4], 4))
@pytest.mark.parametrize("n", slow_except([0, 1, 40, 63, 64, 65, 128, 200], 64))
def test_lengths(device: torch.device, n: int, G: int) -> None:
    """At and around the edges of chunks, new tokens behind all and in any chunk."""
    own = [n, max(0, n - 1), 0, n // 2]
    check(device, a_step([n, max(1, n), max(1, n), n + 1], own, G=G, DV=48))


@pytest.mark.parametrize("softcap", slow_except([None, 3.0], 3.0))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("G", slow_except([1, 4], 4))
def test_weights_and_softcap(
    device: torch.device, G: int, dtype: torch.dtype, softcap: float | None
) -> None:
    given = a_step([140, 30, 98], [7, 30, 70], G=G, dtype=dtype, weighted=True)
    check(device, given, softcap=softcap)


@pytest.mark.parametrize("G", slow_except([1, 4], 4))
@pytest.mark.parametrize("options", slow_except([*VICTIMS.values()], VICTIMS["protected"]))
def test_what_is_dropped(device: torch.device, options: dict[str, Any], G: int) -> None:
    check(device, a_step([6, 11, 70], [6, 2, 66], G=G, lightest=options))


@pytest.mark.parametrize("places", slow_except([None, [30, 31, 35, 36]], None))
def test_recent_tokens_are_counted_over_padding(device: torch.device, places: Any) -> None:
    given = a_step([20, 20], [3, 20], lightest={"recent": [3, 6], "end": 22})
    if places is not None:
        how = given["lightest"]._replace(places=torch.tensor([places, places]), end=38)
        newest = torch.tensor(39, dtype=torch.int32)
        given |= {"lightest": how, "step": given["step"]._replace(position=newest)}
        given["store"].positions.add_(15)
    check(device, given)


def test_heads_that_drop_together(device: torch.device) -> None:
    """The mean of the step's attention over a layer's heads decides, as for TOVA."""
    given = a_step([9, 9, 70, 70], [9, 9, 66, 66], G=2, lightest={"heads": 2})
    given["store"].mass.fill_(5.0)
    check(device, given)
    freed = twice(given, device)[0]
    kernels.decode_attention(**freed, scale=0.2)
    assert freed["lightest"].freed.unflatten(0, (2, 2)).diff(dim=1).eq(0).all()


@pytest.mark.parametrize("table", ["entries", "one for all"])
def test_rows_that_share_their_slots(device: torch.device, table: str) -> None:
    given = a_step([9, 9, 30, 30], [5, 5, 5, 5] if table == "one for all" else [5, 5, 30, 30])
    slots = given["step"].slots
    if table == "entries":
        shared = {"slots": slots[:, ::2].contiguous(), "entries": torch.tensor([0, 0, 1, 1])}
    else:
        shared = {"slots": slots[:, :1].contiguous()}
    want = check(device, given)
    given["step"] = given["step"]._replace(**shared)
    torch.testing.assert_close(check(device, given), want, rtol=0, atol=0)


def test_strided_queries_and_pairs(device: torch.device) -> None:
    """As a projection leaves them."""
    given = a_step([40, 70, 3], [40, 7, 3])
    want = check(device, given)
    for name in ("query", "key", "value"):
        x = given[name]
        wide = torch.full((2 * len(x), *x.shape[1:-1], x.shape[-1] + 8), torch.nan)
        wide[::2, ..., 8:] = x
        given[name] = wide[::2, ..., 8:]
    mine, _ = twice(given, device)
    for name in ("query", "key", "value"):
        mine[name] = given[name].to(device)
    got = kernels.decode_attention(**mine, scale=0.2)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_chunks_cover_the_slots() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from mmkv.kernels.decode import split

    for R in (1, 8, 32, 512, 1536, 5000):
        for S in (1, 63, 64, 65, 125, 1500, 1501, 32768, 131072):
            chunks, chunk = split(R, S)
            assert (chunks - 1) * chunk < S <= chunks * chunk
            assert 1 <= chunks <= 64
            assert chunk % 64 == 0
    assert split(512, 1500)[0] > 1  # a full batch of long rows, and still no long last program
    assert split(32, 1500)[0] * 32 > 4 * 132  # one sequence busies a large GPU


GIVEN = a_step([3, 2], [3, 2])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": GIVEN["query"][0]}, r"query must be \[R, G, D\]"),
        ({"key": GIVEN["key"][:, 1:]}, "query and key one D"),
        ({"value": GIVEN["value"][:1]}, "one R"),
        ({"value": GIVEN["value"][:, 1:]}, "the store has 2 rows"),
        ({"key": GIVEN["key"].half()}, "one dtype"),
        ({"softcap": 0.0}, "softcap must be above 0, got 0.0"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ValueError, match=message):
        kernels.decode_attention(**(GIVEN | changed), scale=1.0)
