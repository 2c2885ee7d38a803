"""The plan of a wrap: policy, budget, profile and model, checked before the model is changed.

`make_plan` makes the `CacheConfig` that all caches of the wrapped model share.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, SupportsFloat

from mmkv import adapters, budgets, profiles
from mmkv.attach import repetition
from mmkv.cache import codes
from mmkv.cache.allotment import allotted
from mmkv.cache.config import CacheConfig
from mmkv.cache.layer import CompressedLayer
from mmkv.cache.sampling import SampledSizes
from mmkv.cache.state import layers_of
from mmkv.memory import DEFAULT, Memory
from mmkv.policy import Policy
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.layers import UniformLayers
from mmkv.sizes.profiled import (
    NO_VISUAL_PROFILE,
    MeasuredHeads,
    VisualHeads,
    by_copying,
    by_pictures,
)

logger = logging.getLogger(__name__)

EQUAL_HEADS = (
    "{policy} gives all heads the same size; on most language models a few retrieval heads "
    "need the whole prompt: {finder}, and mmkv.check measures what a policy costs"
)
# Policies whose notice was logged: once a process, as researchers wrap hundreds of times.
_logged_policies = set[str]()
_comparing = ContextVar("mmkv_comparing", default=False)


def make_plan(
    model: Any,
    parts: adapters.Adapter,
    chosen: Policy,
    budget: SupportsFloat | str | None,
    *,
    profile: profiles.Profile | str | os.PathLike[str] | None = None,
    kv_dtype: str | None = None,
    evict_chunks: bool = False,
    graph: bool = True,
) -> tuple[CacheConfig, tuple[int, ...]]:
    """Return the configuration of caches and the compressed layers' indices; see `wrap`.

    A budget that is a `Memory` is a share of bytes. Where neither budget, type nor kept fractions
    are given, it is `mmkv.memory.DEFAULT`.
    """
    kind, memory = type(model).__name__, budget if isinstance(budget, Memory) else None
    layers = layers_of(parts.config)
    compressed = tuple(i for i, x in enumerate(layers) if isinstance(x, CompressedLayer))
    if not compressed:
        _refuse_sliding(parts, kind)
    if chosen.score.repeats:
        _check_repetition(parts, kind, chosen, len(layers) - len(compressed), len(layers))
    fractions, measured, table = None, None, None
    if profile is not None:
        given = None if memory is not None else budget
        measured = profiles.read(profile, parts.config, len(compressed), given)
    elif isinstance(chosen.heads, MeasuredHeads) and isinstance(chosen.layers, UniformLayers):
        measured = profiles.own(model, chosen.heads.profile)
    if measured is None:
        pass
    elif measured.visual is not None:
        table = by_pictures(chosen, measured.visual, compressed)
        chosen = replace(chosen, heads=UniformHeads())
    elif measured.retrieval is not None:
        table = by_copying(chosen, measured.retrieval, compressed)
        chosen = replace(chosen, heads=UniformHeads())
    else:
        if chosen.heads.scope == "model":
            raise ValueError(
                f"profile={str(profile)!r} gives layer sizes, and heads={chosen.heads.name!r} "
                "finds them for itself: leave out one of the two"
            )
        fractions, budget = measured.fractions, measured.budget if budget is None else budget
    if budget is None and kv_dtype is None and fractions is None and chosen.takes_budget:
        memory = DEFAULT
    if memory is not None:
        _check_memory(memory, chosen, profile if fractions is not None else None)
        budget = float(memory)
    _check_rest(parts, kind, chosen, profile, measured is not None, evict_chunks, kv_dtype, graph)
    checked_budget = budgets.checked(chosen, budget)
    config = CacheConfig(
        chosen,
        checked_budget,
        fractions,
        kv_dtype,
        evict_chunks,
        table=table,
        graph=graph and parts.ranks == 1,
        sampling=SampledSizes(chosen.layers.learns) if chosen.layers.learns else None,
    )
    if not config.keeps_all:
        _check_spread(parts, config)
    if memory is not None:
        _, head_dim = parts.pair_shape(compressed[0])
        config = allotted(config, memory, parts.dtype.itemsize, head_dim)
    if measured is None:
        _notify(model, config)
    return config, compressed


def _refuse_sliding(parts: adapters.Adapter, kind: str) -> NoReturn:
    """Refuse a model without a layer to compress."""
    window = getattr(parts.config, "sliding_window", None)
    positions: int | None = getattr(parts.config, "max_position_embeddings", None)
    if window is not None and positions is not None and window >= positions:  # Phi-3 128k
        raise ValueError(
            f"every layer of this {kind} has a sliding window of {window}, which never slides "
            f"within its {positions} positions but keeps a cache of its own: load the model "
            "with sliding_window=None"
        )
    raise ValueError(
        f"every layer of this {kind} has a sliding window (sliding_window={window}) or linear "
        "attention, and keeps its own cache small: there is nothing to compress"
    )


def _check_repetition(
    parts: adapters.Adapter, kind: str, policy: Policy, n_other: int, n_layers: int
) -> None:
    """Check that the model can read a prompt again; `n_other` layers are not compressed."""
    if n_other:
        raise ValueError(
            f"score={policy.score.name!r} feeds the prompt again to layers that still hold it, and "
            f"{n_other} of {n_layers} layers of this {kind} have a sliding window or "
            "linear attention: use another score"
        )
    if not hasattr(parts.decoder, "rotary_emb"):
        raise ValueError(
            f"score={policy.score.name!r} feeds the prompt again after its end, where this {kind} "
            "soon has no positions left: use another score"
        )
    repetition.check_instruction(parts, policy)


def _check_rest(
    parts: adapters.Adapter,
    kind: str,
    policy: Policy,
    profile: Any,
    is_measured: bool,
    evict_chunks: bool,
    kv_dtype: str | None,
    graph: bool,
) -> None:
    """Check protection, sampled layer sizes, chunks, types and `graph`."""
    protect = policy.protect
    if protect is not None and protect.needs_image and not parts.image_token_ids:
        raise ValueError(
            f"protect={protect.name!r} tells text from image tokens, and {kind} has no image "
            "tokens: use protect='none'"
        )
    if policy.layers.learns and is_measured:
        raise ValueError(
            f"profile={str(profile)!r} gives layer sizes, and allocation='sampled' learns them: "
            "leave out one of the two"
        )
    if evict_chunks not in (True, False):
        raise ValueError(
            f"evict_chunks={evict_chunks!r}: expected True or False; "
            "generate(..., prefill_chunk_size=...) sets the length of a chunk"
        )
    codes.check(kv_dtype)
    if graph not in (True, False):
        raise ValueError(
            f"graph={graph!r}: expected True or False: whether a GPU replays decode steps as a "
            "CUDA graph"
        )


def _check_memory(memory: Memory, policy: Policy, profile: Any) -> None:
    """Refuse a share of bytes beside a retention or a profile, which set sizes too."""
    given = f"retention={policy.layers.retention}" if policy.layers.retention is not None else ""
    given = f"profile={str(profile)!r}" if profile is not None else given
    if given:
        raise ValueError(
            f"memory={float(memory):.3g} and {given} both decide how much is kept: give one of them"
        )


def _check_spread(parts: adapters.Adapter, plan: CacheConfig) -> None:
    """Refuse a policy that compares heads of different processes (tensor parallelism).

    Each process has some of the key-value heads and selects tokens for these alone, so such a
    policy would select differently in each process.
    """
    if parts.ranks == 1:
        return
    heads = adapters.shape(parts.config)["num_key_value_heads"]
    if heads % parts.ranks:
        raise ValueError(
            f"tensor parallelism splits {heads} key-value heads evenly, which {parts.ranks} "
            f"processes do not allow: use a number of processes that divides {heads}"
        )
    score, layers, heads_part = plan.policy.score, plan.policy.layers, plan.policy.heads
    if not score.by_head:
        why = f"score={score.name!r} needs all heads of a layer: use another, such as 'window'"
    elif score.ranks and score.average_heads:
        why = "average_heads=True averages all heads of a layer: use average_heads=False"
    elif plan.fractions is None and layers.needs not in ("", "similarity"):
        name = layers.name or type(layers).__name__
        why = f"layers={name!r} compares all heads: use layers='uniform' or 'pyramid'"
    elif not plan.equal_heads:
        name = f"heads={heads_part.name!r}" if plan.table is None else "a profile"
        why = f"{name} gives heads different sizes: use heads='uniform'"
    else:
        return
    raise ValueError(
        f"with tensor parallelism each of {parts.ranks} processes has its own heads alone, and "
        f"{why}, or load the model in one process, with device_map='auto'"
    )


def _notify(model: Any, plan: CacheConfig) -> None:
    """Log a notice if heads get equal sizes because no profile of the model was found."""
    policy = plan.policy
    if isinstance(policy.heads, VisualHeads):
        _log_once(policy, NO_VISUAL_PROFILE.format(policy=policy.name))
    elif not policy.heads.scope:  # equal heads suit few language models
        exact = plan.keeps_all or plan.waits_for_probe
        if not exact and profiles.beside(model) is None:
            finder = "heads='retrieval' finds them"
            if policy.score.average_heads:
                finder = "policy 'condense' finds them"
            _log_once(policy, EQUAL_HEADS.format(policy=policy.name, finder=finder))


def _log_once(policy: Policy, text: str) -> None:
    """Log a notice once for a process and policy; not where policies are compared."""
    if policy.name not in _logged_policies and not _comparing.get():
        _logged_policies.add(policy.name)
        logger.warning("%s", text)


@contextmanager
def comparing() -> Generator[None]:
    """Log no notice about equal heads in this block, which compares policies on purpose."""
    token = _comparing.set(True)
    try:
        yield
    finally:
        _comparing.reset(token)
