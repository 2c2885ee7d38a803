"""Which replica a request goes to: where its prefix was read, while that one is not busy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import RequestRouter

_SPREAD = 1.25  # the largest load beside the mean: `c` of the paper


def ranked(key: str, loads: Mapping[str, int], busy: int) -> list[str]:
    """Replicas, the best first.

    Each prefix has an order of all replicas, which others that come or go leave as it is; those
    with too many requests already come last. Nothing is remembered, so the second of two requests
    follows the first at once.

    Args:
        key: what the requests have in common that begin alike.
        loads: the requests of each replica, by name.
        busy: so many are never too many.

    Source: rendezvous hashing with bounded loads (arXiv 1608.01350).
    """
    most = max(busy, _SPREAD * (sum(loads.values()) + 1) / max(len(loads), 1))

    def rank(name: str) -> tuple[bool, bytes]:
        digest = hashlib.blake2b(f"{key} {name}".encode(), digest_size=16).digest()
        return loads[name] >= most, digest

    return sorted(loads, key=rank)


class PrefixRouter(RequestRouter):
    """Ray's own for a deployment whose requests have their prefix's key as the first argument."""

    def initialize_state(self, busy: int = 16, **_: Any) -> None:
        """Remember how many requests of a replica are never too many."""
        self._busy = busy

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """The candidates, best first; without a key, all of them, and Ray takes the idlest."""
        key = pending_request.args[0] if pending_request is not None else ""
        if not key:
            return [candidate_replicas]
        known = {x.replica_id.unique_id: x for x in candidate_replicas}
        held = self.replica_queue_len_cache
        loads = {name: held.get(x.replica_id) or 0 for name, x in known.items()}
        return [[known[name]] for name in ranked(key, loads, self._busy)]
