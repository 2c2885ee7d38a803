"""What is known of the tokens seen, and what a budget means for them.

Budgets are per row: a row of a left-padded batch is sized by its own length, so it keeps exactly
what it keeps alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.policy import Policy

# The fields of `TokenMasks`: bool [B, T], and lists of a number for each row.
MASKS = ("valid", "image", "is_prompt", "always_kept", "protected")
HOSTED = ("lengths", "windows", "floors", "n_pinned", "inner", "granted")


@dataclass(frozen=True)
class TokenMasks:
    """What is known of the T tokens seen so far, before the last of them run through the layers.

    Attributes:
        valid: bool [B, T], False for padding.
        image: bool [B, T], True where an image token stands.
        is_prompt: bool [B, T], True for tokens given in a prompt, False for generated ones.
        always_kept: bool [B, T], kept in every layer whatever the scores say.
        protected: bool [B, T], the part of `always_kept` that decoding may not drop either.
        lengths: valid tokens of each row, on the host.
        windows: how many last tokens of each row observe, all of them `always_kept`, on the host;
            fewer than the policy's where a short row's budget is below what must be kept.
        floors: how many tokens each row must keep, on the host.
        n_pinned: how many of them are protected, on the host.
        inner: padding of each row behind its first token, as a later turn's is, on the host.
        granted: how much of those `total_kept` has room for, in [0, 1], on the host.
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
        """Mark what the policy always keeps: sinks, the observation window, protected text.

        Args:
            policy, budget, n_layers: see `total_kept`; no budget: `policy.retention` decides.
            valid: bool [B, q], the new tokens; none of them where generated ones compete, of which
                the policy's `decode.latest` last ones stay.
            image: bool [B, q], or None without pictures.
            before: what was known of earlier tokens.
            earlier: bool [B, seen], which of them still count; the last were generated since.
        """
        round_of_replies = valid.shape[1] == 0
        image = torch.zeros_like(valid) if image is None else image
        is_prompt = torch.ones_like(valid)
        if before is not None and earlier is not None:
            generated = earlier.shape[1] - before.valid.shape[1]
            neither = valid.new_zeros(valid.shape[0], generated)
            valid = torch.cat([earlier, valid], dim=1)
            image = torch.cat([before.image, neither, image], dim=1)
            is_prompt = torch.cat([before.is_prompt, neither, is_prompt], dim=1)
        order, window = valid.cumsum(-1), policy.window_size
        length = order[:, -1:]
        protected = valid & (order <= policy.sinks)
        if policy.protect is not None:
            protected = protected | policy.protect.marks(valid, is_prompt, image)
        always_kept = protected | (valid & (order > length - window))
        before_first = (order == 0).sum(-1)
        counted = torch.stack([length[:, 0], always_kept.sum(-1), protected.sum(-1), before_first])
        lengths, floors, n_pinned, outer = counted.tolist()
        inner = [valid.shape[1] - n - m for n, m in zip(lengths, outer, strict=True)]
        windows = [
            _window(policy, budget, n_layers=n_layers, length=n, floor=floor)
            for n, floor in zip(lengths, floors, strict=True)
        ]
        if any(w < window for w in windows):
            last = torch.tensor(windows, device=valid.device)[:, None]
            always_kept = protected | (valid & (order > length - last))
            floors = always_kept.sum(-1).tolist()
        if round_of_replies:
            always_kept = always_kept | (valid & (order > length - policy.decode.latest))
            floors = always_kept.sum(-1).tolist()
        granted = [
            1.0
            if budget is None or floor == 0
            else min(1.0, total_kept(policy, budget, n_layers, n) / (n_layers * floor))
            for n, floor in zip(lengths, floors, strict=True)
        ]
        marks = valid, image, is_prompt, always_kept, protected
        return cls(*marks, lengths, windows, floors, n_pinned, inner, granted)

    def to(self, device: torch.device) -> TokenMasks:
        """The same on another device, for models split over several."""
        return self if self.valid.device == device else self._each(lambda x: x.to(device))

    def rows(self, batch: Tensor) -> TokenMasks:
        """A choice of rows, which may repeat."""
        hosted = {name: [getattr(self, name)[int(b)] for b in batch] for name in HOSTED}
        return replace(self._each(lambda x: x[batch.to(x.device)]), **hosted)

    def check_ends(self) -> None:
        """Whether generated tokens can go on from every row.

        Raises:
            ValueError: a row is padding alone, or ends in padding.
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

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenMasks:
        return replace(self, **{name: change(getattr(self, name)) for name in MASKS})

    def last_places(self, n: int) -> Tensor | None:
        """Positions of each row's n last tokens, int64 [B, n], ascending; None without gaps.

        Fillers before a row's first token are below 0.
        """
        if not any(self.inner):
            return None
        T = self.valid.shape[1]
        place = torch.arange(T, device=self.valid.device).expand_as(self.valid)
        found = place.masked_fill(~self.valid, -1).sort(dim=-1).values
        return pad(found, (max(0, n - T), 0), value=-1)[:, -n:]

    def at(self, positions: Tensor, *names: str) -> list[Tensor]:
        """These masks of the tokens at `positions` [B, 1 or H, U]; False where there is none."""
        place, present = positions.clamp(min=0), positions >= 0
        marks = (getattr(self, x)[:, None].expand(-1, positions.shape[1], -1) for x in names)
        return [x.gather(-1, place) & present for x in marks]

    def marks(self, positions: Tensor) -> list[Tensor]:
        """Which tokens at `positions` are always kept, protected, and of a picture."""
        return self.at(positions, "always_kept", "protected", "image")


def total_kept(policy: Policy, budget: float | int | None, n_layers: int, length: int) -> int:
    """Tokens asked for over all layers (per head): a float is a fraction, an int a mean per layer.

    More than these are kept where more must be, or where `policy.retention` asks for more.
    """
    share = round(budget * n_layers * length) if isinstance(budget, float) else 0
    return max(share, n_layers * min(kept_whole(policy, budget), length))


def kept_whole(policy: Policy, budget: float | int | None) -> int:
    """Up to how many tokens a row loses none: `policy.least`, or a budget in tokens."""
    return budget if isinstance(budget, int) else policy.least


def keeps_everything(policy: Policy, budget: float | int | None) -> bool:
    """Whether nothing is ever evicted. budget=1.0 is the full cache, in decoding too."""
    return policy.keeps_all or (isinstance(budget, float) and budget >= 1.0)


def _window(
    policy: Policy, budget: float | int | None, *, n_layers: int, length: int, floor: int
) -> int:
    """How many last tokens of one row observe: half of its budget where that is below the floor."""
    window = policy.window_size
    if budget is None or keeps_everything(policy, budget):
        return window
    total = total_kept(policy, budget, n_layers, length)
    if total >= n_layers * floor:
        return window
    return min(window, max(1, total // (2 * n_layers)))
