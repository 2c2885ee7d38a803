"""Which group holds each token of a layer, in a few bits a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class GroupIndex:
    """The group of each of T tokens, for all heads of a layer.

    A group is named by its leader, one of its tokens. A token's code has w bits. It is 0 for a
    token in no group and 2 ** w - 1 for a leader. For any other token it is 2 ** (w - 1) + n: its
    leader is the n-th one after it or, if n is 0, the last one before it; if n is -1, the one
    before that. |n| is small, as groups are formed inside runs of the prompt.

    Attributes:
        planes: uint8 [B, H, w, T / 8], the bits of the codes, eight tokens a byte.
        n_tokens: T.
    """

    planes: Tensor
    n_tokens: int

    @classmethod
    def of(cls, leaders: Tensor) -> GroupIndex:
        """Store `leaders`, int64 [B, H, T], the position of each token's leader; -1 for none."""
        T, device = leaders.shape[-1], leaders.device
        leads = leaders == torch.arange(T, device=device)
        number = leads.cumsum(-1)
        ahead = number.gather(-1, leaders.clamp(min=0)) - number
        ahead.masked_fill_(leaders < 0, 0)
        w = _bits(ahead)
        code = ahead.add_(2 ** (w - 1)).masked_fill_(leaders < 0, 0).masked_fill_(leads, 2**w - 1)
        bits = (code.int()[:, :, None] >> torch.arange(w, device=device)[:, None]) & 1
        eights = pad(bits.to(torch.uint8), (0, -T % 8)).unflatten(-1, (-1, 8))
        places = torch.arange(8, device=device, dtype=torch.uint8)
        return cls((eights << places).sum(-1, dtype=torch.uint8), T)

    def leaders(self) -> Tensor:
        """Return the position of each token's leader, int64 [B, H, T]; -1 for none."""
        (B, H, w, _), T, device = self.planes.shape, self.n_tokens, self.planes.device
        places = torch.arange(8, device=device, dtype=torch.uint8)
        bits = ((self.planes[..., None] >> places) & 1).flatten(-2)[..., :T].int()
        code = (bits << torch.arange(w, device=device)[:, None]).sum(2)
        leads = code == 2**w - 1
        number = leads.cumsum(-1)
        # The position of the n-th leader is at index n, from 1 on.
        at = number.new_full((B, H, T + 1), -1)
        at.scatter_(
            -1, number.masked_fill(~leads, 0), torch.arange(T, device=device).expand_as(at[..., :T])
        )
        at[..., 0] = -1
        own = torch.where(leads, number, number + code - 2 ** (w - 1))
        return at.gather(-1, own.clamp(0, T)).masked_fill_(code == 0, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.planes.untyped_storage().nbytes()


def _bits(ahead: Tensor) -> int:
    """Return how many bits a code needs. The host waits for the device."""
    least, most = torch.stack(ahead.aminmax()).tolist() if ahead.numel() else (0, 0)
    return max(-least, 1 + most).bit_length() + 1
