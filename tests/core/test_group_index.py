"""The group of each token in a few bits is read as it was stored."""

import pytest
import torch

from mmkv.cache.group_index import GroupIndex
from mmkv.layer_inputs import rows_of


def some_leaders(B, H, T, share, seed=0):
    """Heads with a share of leaders, each token led by any of them or by none; head 1 has none."""
    g = torch.Generator().manual_seed(seed)
    out = torch.full((B, H, T), -1)
    for b in range(B):
        for h in range(H):
            lead = torch.randperm(T, generator=g)[: max(1, int(share * T))]
            chosen = lead[torch.randint(0, len(lead), (T,), generator=g)]
            if h != 1:
                out[b, h] = torch.where(torch.rand(T, generator=g) < 0.8, chosen, -1)
                out[b, h, lead] = lead
    return out


@pytest.mark.parametrize("T", [1, 7, 8, 9, 300])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_stored_leaders_are_read_back(T, share):
    leaders = some_leaders(2, 3, T, share, seed=T)
    index = GroupIndex.of(leaders)
    assert torch.equal(index.leaders(), leaders)
    rows = torch.tensor([1, 0, 1])
    assert torch.equal(rows_of(index, rows).leaders(), leaders[rows])


@pytest.mark.parametrize(("bits", "n_ahead", "n_behind"), [(3, 2, 3), (4, 6, 7), (8, 126, 127)])
def test_bits_grow_with_leaders_between_a_token_and_its_own(bits, n_ahead, n_behind):
    """All tokens lead but one, which the farthest leads; of one leader more, a bit more."""
    for more in (0, 1):
        leaders = torch.arange(n_ahead + more + 1)
        leaders[0] = leaders[-1]
        assert GroupIndex.of(leaders[None, None]).planes.shape[2] == bits + more
        leaders = torch.arange(n_behind + more + 2)
        leaders[-1] = 0
        assert GroupIndex.of(leaders[None, None]).planes.shape[2] == bits + more


def test_no_groups_are_read_back():
    for shape in [(2, 3, 0), (1, 2, 20)]:
        leaders = torch.full(shape, -1)
        assert torch.equal(GroupIndex.of(leaders).leaders(), leaders)
