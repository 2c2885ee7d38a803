"""Single rules of the cache by hand: what a whole run shows only in rare prompts."""

from types import SimpleNamespace

import pytest
import torch

import mmkv
from mmkv.attach.graph import step_of
from mmkv.cache import evict, quantize, selection
from mmkv.cache.config import CacheConfig
from mmkv.cache.forward_pass import ForwardPass
from mmkv.cache.phases import Reading
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.token_masks import TokenMasks
from mmkv.layer_inputs import reposition


def test_chunks_of_a_prompt_count_by_their_tokens():
    """The mean similarity of four tokens at 1, then of two at 4; nothing where there is none."""
    phase = Reading()
    phase.compare(0, torch.tensor([1.0, 9.0]), torch.tensor([4, 0]))
    phase.compare(0, torch.tensor([4.0, 5.0]), torch.tensor([2, 1]))
    mean, tokens = phase.similarity[0]
    assert mean.tolist() == [2.0, 5.0]
    assert tokens.tolist() == [6, 1]


class TestMasks:
    valid = torch.tensor([[True, True, True], [False, True, True]])

    def view(self, block):
        return ForwardPass(ids=None, parts=None).view(
            block[None, None].expand(2, 1, -1, -1), self.valid
        )

    def test_a_causal_one_is_none(self):
        assert self.view(torch.ones(3, 3, dtype=torch.bool).tril()) is None
        logits = torch.zeros(3, 5).masked_fill(torch.ones(3, 5).triu(3) > 0, -torch.inf)
        assert self.view(logits) is None, "columns of earlier tokens stand before"

    def test_one_in_which_all_see_all_is_kept_without_padding(self):
        seen = self.view(torch.ones(3, 3, dtype=torch.bool))
        assert seen[0].all()
        assert seen[1, 0].tolist() == [[False] * 3, [False, True, True], [False, True, True]]


def test_what_must_stay_of_a_padded_row():
    policy = mmkv.get_policy("snapkv", sinks=1, window=2, decode="rounds", latest=4)
    valid = torch.tensor([[True] * 6, [False, False, True, True, False, True]])
    prompt = TokenMasks.of(policy, valid, None, budget=6, n_layers=1)
    assert prompt.lengths == [6, 3]
    assert prompt.inner == [0, 1], "a token that is gone between others"
    assert prompt.always_kept.long().tolist() == [[1, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 1]]


@pytest.mark.parametrize("first", [0, 1])
def test_the_share_that_is_kept_counts_the_first_token(first):
    scores, free = torch.tensor([[[3.0, 1.0]]]), torch.ones(1, 1, 2, dtype=torch.bool)
    share = evict.retained_share(scores, torch.tensor([[[first, -1]]]), free)
    assert share.tolist() == [[0.75, 0.25][first]]


def test_head_sizes_that_four_bits_can_hold():
    for head_dim in (6, 8, 64, 66, None):
        quantize.check("int4", head_dim)
    for head_dim in (5, 7, 63):
        with pytest.raises(ValueError, match=f"a head has {head_dim}"):
            quantize.check("int4", head_dim)


def test_keys_and_values_of_one_projection_are_counted_once():
    """As they lie while a prompt is read: views of all that it gave."""
    whole = torch.zeros(1, 2, 3, 8)
    positions = torch.arange(3)[None, None]
    assert PromptKV(whole[..., :4], whole[..., 4:], positions).nbytes == 48 * 4
    assert PromptKV(whole.clone(), whole, positions).nbytes == 2 * 48 * 4


@pytest.mark.parametrize("hidden", [1, 2, 3])
def test_the_first_token_stays_where_others_are_hidden(hidden):
    pairs = torch.arange(4.0)[None, None, :, None]
    held = PromptKV(pairs, pairs, torch.arange(4)[None, None])
    left = held.masked(torch.arange(4)[None] != hidden)
    wanted = [x for x in range(4) if x != hidden]
    assert left.positions.tolist() == [[wanted]]
    assert left.keys.flatten().tolist() == left.values.flatten().tolist() == wanted


@pytest.mark.parametrize("shape", [(3, 2, 9), (3, 4, 8), (1, 4, 9), (4, 9), (3, 4, 9, 1)])
def test_scores_of_another_shape_are_refused(shape):
    """Of three rows, four heads and nine tokens; one ranking for all heads will do."""
    query, key = torch.zeros(3, 8, 9, 2), torch.zeros(3, 4, 9, 2)
    for good in ((3, 4, 9), (3, 1, 9)):
        selection._check_scores(None, torch.zeros(good), query, key)
    with pytest.raises(ValueError, match="expected scores"):
        selection._check_scores(None, torch.zeros(shape), query, key)


def test_the_last_places_of_rows_with_gaps():
    rows = [[1, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
    policy = mmkv.get_policy("h2o")
    valid = torch.tensor(rows, dtype=torch.bool)
    prompt = TokenMasks.of(policy, valid, budget=0.5, n_layers=1)
    places = [[i for i, there in enumerate(row) if there] for row in rows]
    for n in (1, 2, 3, 6, 8):
        wanted = [([-1] * n + row)[-n:] for row in places]
        assert prompt.last_places(n).tolist() == wanted
    alike = TokenMasks.of(policy, valid[1:], budget=0.5, n_layers=1)
    assert alike.last_places(2) is None


class TestSteps:
    def blocks(self, *steps, decided=()):
        def schedule(at, needs):
            return SimpleNamespace(at=at, needs_decode_attention=needs, prepare=lambda: None)

        made = [schedule(at, False) for at in steps] + [schedule(at, True) for at in decided]
        return [SimpleNamespace(schedule=x) for x in made]

    def test_it_is_that_of_all(self):
        assert step_of(self.blocks(3, 3, decided=[9])) == 3
        assert step_of(self.blocks(decided=[9])) == 0

    def test_layers_at_other_steps_are_refused(self):
        with pytest.raises(ValueError, match=r"at \[3, 4\]"):
            step_of(self.blocks(3, 4))


def test_an_empty_slot_is_at_no_distance():
    """Its key stays as it is, and the others close up."""
    keys = torch.ones(1, 3, 2)
    moved = reposition(keys, torch.tensor([[2, -1, 9]]), 9, torch.tensor([1.0]))
    assert torch.equal(moved[:, 1:], keys[:, 1:])
    back = torch.tensor(6.0)  # from seven before the newest to one
    turned = torch.stack([back.cos() - back.sin(), back.sin() + back.cos()])
    torch.testing.assert_close(moved[0, 0], turned)


def uniform(length, rows=1):
    """A plan whose window and sinks are 36 tokens a layer, and a prompt of alike rows for it."""
    plan = CacheConfig(mmkv.get_policy("snapkv", window=32, sinks=4), 0.2)
    valid = torch.ones(rows, length, dtype=torch.bool)
    return plan, TokenMasks.of(plan.policy, valid, budget=0.2, n_layers=3)


@pytest.mark.parametrize(("length", "said"), [(185, False), (183, True), (181, True), (180, True)])
def test_a_row_with_less_than_a_token_a_layer_for_its_scores_is_named(length, said):
    """A fifth of 185 is 37, one more than must stay; of the others less, over the layers."""
    plan, prompt = uniform(length)
    assert [", all for window 32, sinks 4" in x for x in plan.shortfalls(prompt, 3)] == [
        True
    ] * said


@pytest.mark.parametrize(("rows", "more"), [(3, ""), (4, "; and 1 rows more")])
def test_three_rows_are_named_and_the_others_counted(rows, more, caplog):
    plan, prompt = uniform(180, rows)
    plan.log_shortfalls(prompt, 3)
    (said,) = caplog.messages
    assert said == "; ".join(plan.shortfalls(prompt, 3)[:3]) + more


@pytest.mark.parametrize(
    ("length", "total", "raised"),
    [(199, None, True), (200, None, False), (199, 120, True), (199, 121, False), (30, 90, True)],
)
def test_a_row_is_raised_where_the_floor_is_more_than_its_share(length, total, raised):
    """A fifth of 3 * 200 tokens is 120, the floor's 3 * 40; a row of 30 has no more than 90."""
    plan = CacheConfig(mmkv.get_policy("condense", least=40), 0.2)
    assert plan.raised(length, 3, total) == raised
    assert not CacheConfig(plan.policy, 40).raised(length, 3, total)
