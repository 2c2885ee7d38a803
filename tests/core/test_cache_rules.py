"""Single rules of the cache by hand: what a whole run shows only in rare prompts."""

import torch

import mmkv
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.forward_pass import ForwardPass, Reading
from mmkv.cache.prompt_kv import PromptKV


class TestMasks:
    valid = torch.tensor([[True, True, True], [False, True, True]])

    def view(self, block):
        return ForwardPass(valid=self.valid).view(block[None, None].expand(2, 1, -1, -1))

    def test_causal_mask_becomes_none(self):
        assert self.view(torch.ones(3, 3, dtype=torch.bool).tril()) is None
        logits = torch.zeros(3, 5).masked_fill(torch.ones(3, 5).triu(3) > 0, -torch.inf)
        assert self.view(logits) is None, "columns of earlier tokens stand before"

    def test_bidirectional_mask_is_kept_without_padding(self):
        seen = self.view(torch.ones(3, 3, dtype=torch.bool))
        assert seen[0].all()
        assert seen[1, 0].tolist() == [[False] * 3, [False, True, True], [False, True, True]]


def test_keys_and_values_of_one_projection_are_counted_once():
    """As they lie while a prompt is read: views of all that it gave."""
    whole = torch.zeros(1, 2, 3, 8)
    positions = torch.arange(3)[None, None]
    assert PromptKV(whole[..., :4], whole[..., 4:], positions).nbytes == 48 * 4
    assert PromptKV(whole.clone(), whole, positions).nbytes == 2 * 48 * 4


def test_similarity_of_chunks_is_weighted_by_tokens():
    """The mean similarity of four tokens at 1, then of two at 4; nothing where there is none."""
    phase = Reading()
    phase.compare(0, torch.tensor([1.0, 9.0]), torch.tensor([4, 0]))
    phase.compare(0, torch.tensor([4.0, 5.0]), torch.tensor([2, 1]))
    mean, tokens = phase.similarity[0]
    assert mean.tolist() == [2.0, 5.0]
    assert tokens.tolist() == [6, 1]


def test_the_last_positions_of_rows_with_gaps():
    rows = [[1, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
    plan = CacheConfig(mmkv.get_policy("h2o"), 0.5)
    valid = torch.tensor(rows, dtype=torch.bool)
    prompt = TokenMasks.of(plan, valid, n_layers=1)
    places = [[i for i, there in enumerate(row) if there] for row in rows]
    for n in (1, 2, 3, 6, 8):
        wanted = [([-1] * n + row)[-n:] for row in places]
        assert prompt.last_positions(n).tolist() == wanted
    alike = TokenMasks.of(plan, valid[1:], n_layers=1)
    assert alike.last_positions(2) is None
