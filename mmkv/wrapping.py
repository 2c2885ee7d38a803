"""`wrap` and `unwrap`: attach a policy to a model, and undo every step of it.

What is changed on the model is in `mmkv.attach`. State of a sequence lives on the cache, so one
wrapped model serves several threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, SupportsFloat, TypeVar

from torch import nn

from mmkv import adapters, budgets, profiles
from mmkv.attach import attention, repetition
from mmkv.attach.attachment import Attachment, attachment_of
from mmkv.attach.copy_probe import measure
from mmkv.cache import codes
from mmkv.cache.allotment import allotted
from mmkv.cache.config import CacheConfig
from mmkv.cache.layer import CompressedLayer
from mmkv.cache.sampling import SampledSizes
from mmkv.cache.state import layers_of
from mmkv.calls import unwrap_container
from mmkv.memory import DEFAULT, Memory
from mmkv.policy import Policy
from mmkv.registry import get_policy
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

M = TypeVar("M", bound=nn.Module)

EQUAL_HEADS = (
    "{policy} gives all heads the same size; on most language models a few heads look things up "
    "and need the whole prompt: heads='retrieval' finds them, and mmkv.check measures what a "
    "policy costs"
)
# Policies whose notice was logged: once a process, as researchers wrap hundreds of times.
_logged_policies = set[str]()
_comparing = ContextVar("mmkv_comparing", default=False)


def wrap(
    model: M,
    policy: str | Policy = "condense",
    budget: SupportsFloat | str | None = None,
    *,
    profile: profiles.Profile | str | os.PathLike[str] | None = None,
    kv_dtype: str | None = None,
    memory: SupportsFloat | str | None = None,
    evict_chunks: bool = False,
    graph: bool = True,
    **policy_options: Any,
) -> M:
    """Attach an eviction policy to a model; `model.generate(...)` then works as before.

    Args:
        model: a `from_pretrained` object, see `mmkv.adapters` for the supported classes; or one
            inside PEFT, torch.compile or DataParallel.
        policy: a registered name (`mmkv.list_policies()`) or a `Policy`.
        budget: what is kept. A float in (0, 1], or a text such as "20%", is the fraction of the
            prompt's key-value pairs, averaged over layers and heads; 1.0 keeps everything, in
            decoding too. An int is the mean number of tokens per layer and head. NumPy's numbers,
            `Fraction` and `Decimal` are accepted too.
        profile: measured by `mmkv.calibrate`, or a file of it. Kept fractions replace the policy's
            layer sizes and give the budget where none is named; copy and visual scores
            replace layer and head sizes. None: policies with heads="retrieval" or
            "visual" look for "mmkv-profile.json" or "mmkv-visual-heads.json" in the folder that the
            model was loaded from; "retrieval" otherwise measures one here, in one pass.
        kv_dtype: "int8" or "int4" to hold what is kept in 8 or 4 bits; None for the model's type.
        memory: in place of both: the share, in (0, 1], of the bytes that the full cache of a prompt
            has in the model's type, such as 1/16, "6%" or "16x". It sets tokens and type together,
            see `mmkv.memory`. Layers with a sliding window or linear attention do not count. If no
            budget, type or profile is given either, it is 1/8.
        evict_chunks: evict after every chunk of a prompt that is read in chunks
            (`generate(..., prefill_chunk_size=1024)`), so that memory is the budget and one chunk
            at any length, and later chunks attend to what is left. Otherwise a prompt is evicted
            once, when it is complete, and chunks change nothing else.
        graph: on a GPU, replay decode steps as a CUDA graph where that is possible and pays.
        policy_options: override the policy's defaults.

    Returns:
        The same model, configured.

    Raises:
        ValueError: an unsupported model, an unknown policy or option, a budget or memory out of
            range, memory beside a budget or a type, a profile of another model or budget, or a
            model that is wrapped already. The model is not changed then.
    """
    outer, model = model, unwrap_container(model)
    kind = type(model).__name__
    if is_wrapped(model):
        label = attachment_of(model).plan.describe()
        raise ValueError(f"this {kind} is wrapped already ({label}): call mmkv.unwrap(model) first")
    if isinstance(policy, Policy) and policy_options:
        raise ValueError(
            f"options {sorted(policy_options)} were given beside a Policy object: "
            "give them to the policy, or name it by a string"
        )
    chosen = policy if isinstance(policy, Policy) else get_policy(policy, **policy_options)
    if memory is not None:
        if budget is not None or kv_dtype is not None:
            given = f"budget={budget!r}" if kv_dtype is None else f"kv_dtype={kv_dtype!r}"
            raise ValueError(
                f"memory={memory!r} sets the budget and the type of kept pairs, and {given} is "
                "given beside it: take memory alone, or budget and kv_dtype"
            )
        budget = Memory.of(memory)
    elif budget is None and kv_dtype is None and profile is None and chosen.takes_budget:
        budget = DEFAULT
    parts = adapters.find(outer)
    if attention.is_view(parts.config):
        raise ValueError(
            f"the decoder of this {kind} is wrapped already, as a part of another model: "
            "mmkv.unwrap that first"
        )
    base = parts.config._attn_implementation
    if base not in attention.NAMES:
        raise ValueError(
            f"attn_implementation={base!r} is not supported: load the model with one of "
            f"{', '.join(attention.NAMES)}"
        )
    plan, compressed = planned(
        model,
        parts,
        chosen,
        budget,
        profile=profile,
        kv_dtype=kv_dtype,
        evict_chunks=evict_chunks,
        graph=graph,
    )
    attachment = Attachment(model, parts, plan, compressed)
    vars(model)["_mmkv"] = attachment
    try:
        attachment.attach()
        attachment.settle()
    except BaseException:
        unwrap(model)
        raise
    return outer


def probe(model: nn.Module) -> profiles.Profile:
    """Measure which heads of a model look things up, in one pass over random tokens.

    heads="retrieval" sizes heads by the result, see `mmkv.attach.copy_probe`; `wrap` measures and
    saves it by itself. The model is not changed.

    Args:
        model: wrapped or not, with its weights, in eval mode.

    Returns:
        A profile for `mmkv.wrap(model, profile=...)`, with `retrieval` [L][H], the share of its
        attention, in [0, 1], that each head gives to what it can copy.

    Raises:
        ValueError: a model that cannot be wrapped, one with too few tokens or positions, or whose
            heads are spread over processes.
    """
    with nullcontext() if is_wrapped(model) else wrapped(model, "full"):
        return measure(attachment_of(model))


def planned(
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

    A budget that is a `Memory` is a share of bytes.
    """
    kind, memory = type(model).__name__, budget if isinstance(budget, Memory) else None
    layers = layers_of(parts.config)
    compressed = tuple(i for i, x in enumerate(layers) if isinstance(x, CompressedLayer))
    n_layers, n_all = len(compressed), len(layers)
    if n_layers == 0:
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
    if chosen.score.repeats and n_layers < n_all:
        raise ValueError(
            f"score={chosen.score.name!r} feeds the prompt again to layers that still hold it, and "
            f"{n_all - n_layers} of {n_all} layers of this {kind} have a sliding window or "
            "linear attention: use another score"
        )
    if chosen.score.repeats and not hasattr(parts.decoder, "rotary_emb"):
        raise ValueError(
            f"score={chosen.score.name!r} feeds the prompt again behind its end, where this {kind} "
            "soon has no positions left: use another score"
        )
    if chosen.score.repeats:
        repetition.check_instruction(parts, chosen)
    fractions, measured, table = None, None, None
    if profile is not None:
        given = None if memory is not None else budget
        measured = profiles.read(profile, parts.config, n_layers, given)
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
    if memory is not None:
        _check_memory(memory, chosen, kv_dtype, profile if fractions is not None else None)
        budget = float(memory)
    checked_budget = budgets.checked(chosen, budget)
    if chosen.protect is not None and not parts.image_token_ids:
        raise ValueError(
            "protect='instruction' keeps the prompt's text and lets image tokens compete; "
            f"{kind} has no image tokens: use protect='none'"
        )
    if chosen.layers.learns and measured is not None:
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
    sampling = SampledSizes(chosen.layers.learns) if chosen.layers.learns else None
    fields = checked_budget, fractions, kv_dtype, evict_chunks
    graph = graph and parts.ranks == 1
    config = CacheConfig(chosen, *fields, table=table, graph=graph, sampling=sampling)
    if not config.keeps_everything:
        _check_spread(parts, config)
    if memory is not None:
        _, head_dim = parts.pair_shape(compressed[0])
        config = allotted(config, memory, model.dtype.itemsize, head_dim)
    if measured is None and isinstance(chosen.heads, VisualHeads):
        _log_once(chosen, NO_VISUAL_PROFILE)
    elif measured is None and not chosen.heads.scope:  # equal heads suit few language models
        exact = config.keeps_everything or config.waits_for_probe
        if not exact and profiles.beside(model) is None:
            _log_once(chosen, EQUAL_HEADS)
    return config, compressed


def _check_memory(memory: Memory, policy: Policy, kv_dtype: str | None, profile: Any) -> None:
    """Refuse a share of bytes beside what sets tokens or their type too."""
    given = f"retention={policy.layers.retention}" if policy.layers.retention is not None else ""
    given = f"profile={str(profile)!r}" if profile is not None else given
    given = f"kv_dtype={kv_dtype!r}" if kv_dtype is not None else given
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
    spread = f"this model's heads are spread over {parts.ranks} processes (tensor parallelism)"
    heads = adapters.shape(parts.config)["num_key_value_heads"]
    if heads % parts.ranks:
        raise ValueError(
            f"{spread}, which {heads} key-value heads cannot be evenly: use a number of processes "
            "that divides them"
        )
    score, layers, heads_part = plan.policy.score, plan.policy.layers, plan.policy.heads
    if not score.by_head:
        why = f"score={score.name!r} looks at all of a layer's: use another, such as 'window'"
    elif score.ranks and score.average_heads:
        why = "average_heads=True takes the mean of a layer's: use average_heads=False"
    elif plan.fractions is None and layers.needs not in ("", "similarity"):
        name = layers.name or type(layers).__name__
        why = f"layers={name!r} sizes layers by all of them: use layers='uniform' or 'pyramid'"
    elif not plan.equal_heads:
        name = f"heads={heads_part.name!r}" if plan.table is None else "a profile"
        why = f"{name} gives them sizes of their own: use heads='uniform'"
    else:
        return
    raise ValueError(
        f"{spread}, each of which sees its own alone, and {why}, or load the model in one "
        "process, with device_map='auto'"
    )


def _log_once(policy: Policy, text: str) -> None:
    """Log a notice once for a process and policy; not where policies are compared."""
    if policy.name not in _logged_policies and not _comparing.get():
        _logged_policies.add(policy.name)
        logger.warning("%s", text.format(policy=policy.name))


@contextmanager
def comparing() -> Generator[None]:
    """Log no notice about equal heads in this block, which compares policies on purpose."""
    token = _comparing.set(True)
    try:
        yield
    finally:
        _comparing.reset(token)


def unwrap(model: M) -> M:
    """Restore a wrapped model exactly.

    Raises:
        ValueError: the model is not wrapped.
    """
    inner, attachment = unwrap_container(model), attachment_of(model)
    if attachment.model is not inner:
        raise ValueError(
            "this is a shallow copy of a wrapped model and shares its parts: unwrap the original, "
            "or copy with copy.deepcopy(model)"
        )
    del vars(inner)["_mmkv"]
    attachment.detach()
    return model


@contextmanager
def wrapped(model: M, *args: Any, **kwargs: Any) -> Generator[M]:
    """Wrap a model within a `with` block; takes the arguments of `wrap`."""
    wrap(model, *args, **kwargs)
    try:
        yield model
    finally:
        unwrap(model)


def is_wrapped(model: nn.Module) -> bool:
    """Return whether `wrap` was called on this model, or on a container around it."""
    return "_mmkv" in vars(unwrap_container(model))
