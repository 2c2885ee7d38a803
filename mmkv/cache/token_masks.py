"""Masks of the tokens seen, and the number of tokens that a budget keeps of them.

Budgets are per row: a row of a left-padded batch is sized by its own length, so it keeps the same
tokens in a batch as alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.policy import Policy


@dataclass(frozen=True)
class TokenMasks:
    """Masks of the T tokens seen so far and those of the next pass, and counts for each row.

    Attributes:
        valid: bool [B, T], False for padding.
        image: bool [B, T], True for image tokens.
        is_prompt: bool [B, T], True for tokens of a prompt, False for generated ones.
        always_kept: bool [B, T], tokens that every layer keeps whatever their scores.
        protected: bool [B, T], the part of `always_kept` that decoding may not drop either.
        lengths: the number of valid tokens.
        windows: the length of the observation window, whose tokens are all `always_kept`; less
            than the policy's if a short row's budget is below the number of `always_kept` tokens.
        floors: the number of `always_kept` tokens.
        n_pinned: the number of protected tokens.
        inner: padding behind a row's first token, such as that of a later turn.
        granted: the share of the `always_kept` tokens that the budget has room for, in [0, 1].
    """

    valid: Tensor
    image: Tensor
    is_prompt: Tensor
    always_kept: Tensor
    protected: Tensor
    lengths: list[int]
    windows: list[int]
    floors: list[int]
    n_pinned: list[int]
    inner: list[int]
    granted: list[float]

    @classmethod
    def of(
        cls,
        policy: Policy,
        valid: Tensor,
        image: Tensor | None = None,
        *,
        budget: float | int | None,
        n_layers: int,
        before: TokenMasks | None = None,
        earlier: Tensor | None = None,
    ) -> TokenMasks:
        """Mark the tokens that are always kept: sinks, the observation window, protected text.

        Args:
            policy, budget, n_layers: see `total_kept`; without a budget `retention` decides.
            valid: bool [B, q], the new tokens; q is 0 in a round of generated tokens, of which the
                last `decode.latest` are always kept.
            image: bool [B, q], or None without pictures.
            before: the masks of the tokens up to the end of the last prompt.
            earlier: bool [B, seen], valid earlier tokens, those generated since `before` included.
        """
        round_of_replies = valid.shape[1] == 0
        image = torch.zeros_like(valid) if image is None else image
        is_prompt = torch.ones_like(valid)
        if before is not None and earlier is not None:
            generated = earlier.shape[1] - before.valid.shape[1]
            padding = valid.new_zeros(valid.shape[0], generated)
            valid = torch.cat([earlier, valid], dim=1)
            image = torch.cat([before.image, padding, image], dim=1)
            is_prompt = torch.cat([before.is_prompt, padding, is_prompt], dim=1)
        order, window = valid.cumsum(-1), policy.window_size
        length = order[:, -1:]
        protected = valid & (order <= policy.sinks)
        if policy.protect is not None:
            protected = protected | policy.protect.marks(valid, is_prompt, image)
        always_kept = protected | (valid & (order > length - window))
        before_first = (order == 0).sum(-1)
        counts = torch.stack([length[:, 0], always_kept.sum(-1), protected.sum(-1), before_first])
        lengths, floors, n_pinned, n_before = counts.tolist()
        inner = [valid.shape[1] - n - m for n, m in zip(lengths, n_before, strict=True)]
        totals = [total_kept(policy, budget, n_layers, n) for n in lengths]
        windows = [
            window
            if budget is None or total >= n_layers * floor
            else min(window, max(1, total // (2 * n_layers)))  # at most half of the row's budget
            for total, floor in zip(totals, floors, strict=True)
        ]
        if any(w < window for w in windows):
            windows_column = torch.tensor(windows, device=valid.device)[:, None]
            always_kept = protected | (valid & (order > length - windows_column))
            floors = always_kept.sum(-1).tolist()
        if round_of_replies:
            always_kept = always_kept | (valid & (order > length - policy.decode.latest))
            floors = always_kept.sum(-1).tolist()
        granted = [
            1.0 if budget is None or floor == 0 else min(1.0, total / (n_layers * floor))
            for total, floor in zip(totals, floors, strict=True)
        ]
        masks = valid, image, is_prompt, always_kept, protected
        return cls(*masks, lengths, windows, floors, n_pinned, inner, granted)

    def rows(self, batch: Tensor) -> TokenMasks:
        """Return the rows `batch`, which may repeat."""
        fields: dict[str, Any] = {}
        for name, x in vars(self).items():
            is_mask = isinstance(x, Tensor)
            fields[name] = x[batch.to(x.device)] if is_mask else [x[b] for b in batch.tolist()]
        return TokenMasks(**fields)

    def check_ends(self) -> None:
        """Check that every row can be continued by generated tokens.

        Raises:
            ValueError: a row has only padding, or ends in padding.
        """
        if not all(self.lengths):
            raise ValueError(
                f"row {self.lengths.index(0)} of the batch is padding alone: it has no token"
            )
        if not bool(self.valid[:, -1].all()):
            raise ValueError(
                "a row of the batch ends in padding: pad on the left (processor.tokenizer."
                "padding_side = 'left'), as generation needs"
            )

    def last_places(self, n: int) -> Tensor | None:
        """Return the positions of each row's n last tokens, int64 [B, n]; None without gaps.

        They are ascending, with -1 as filler before a row's first token.
        """
        if not any(self.inner):
            return None
        T = self.valid.shape[1]
        positions = torch.arange(T, device=self.valid.device).expand_as(self.valid)
        places = positions.masked_fill(~self.valid, -1).sort(dim=-1).values
        return pad(places, (max(0, n - T), 0), value=-1)[:, -n:]


def total_kept(policy: Policy, budget: float | int | None, n_layers: int, length: int) -> int:
    """Return the budget over all layers, in tokens per head: a float is a fraction, an int a mean.

    More tokens are kept if the always-kept ones are more, or if `retention` needs more.
    """
    share = round(budget * n_layers * length) if isinstance(budget, float) else 0
    return max(share, n_layers * min(kept_whole(policy, budget), length))


def kept_whole(policy: Policy, budget: float | int | None) -> int:
    """Return the length up to which a row loses no token: `policy.least`, or a budget in tokens."""
    return budget if isinstance(budget, int) else policy.least


def keeps_everything(policy: Policy, budget: float | int | None) -> bool:
    """Return whether no token is ever evicted. budget=1.0 is the full cache, in decoding too."""
    return policy.keeps_all or (isinstance(budget, float) and budget >= 1.0)
