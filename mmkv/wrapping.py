"""`wrap` and `unwrap`: attach a policy to a model, and undo every step of it.

What is changed on the model is in `mmkv.attach`. State of a sequence lives on the cache, so one
wrapped model serves several threads.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, SupportsFloat, TypeVar

from torch import nn

from mmkv import adapters, profiles
from mmkv.attach import attention, copy_probe
from mmkv.attach.attachment import Attachment, attachment_of
from mmkv.calls import unwrap_container
from mmkv.memory import Memory
from mmkv.planning import make_plan
from mmkv.policy import Policy
from mmkv.registry import get_policy

M = TypeVar("M", bound=nn.Module)


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
        memory: in place of `budget` and `kv_dtype`: the share, in (0, 1], of the bytes that the
            full cache of a prompt has in the model's type, such as 1/16, "6%" or "16x". It sets
            tokens and type together, see `mmkv.memory`. Layers with a sliding window or linear
            attention do not count. It is 1/8 if the policy takes a budget, and neither a
            budget, a type nor a profile of kept fractions is given.
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
    parts = adapters.find(outer)
    _check_decoder(parts, kind)
    plan, compressed = make_plan(
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
        attachment.complete_plan()
    except BaseException:
        unwrap(model)
        raise
    return outer


def _check_decoder(parts: adapters.Adapter, kind: str) -> None:
    """Check that the decoder is not wrapped, and attends by a function that can be replaced."""
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


def probe(model: nn.Module) -> profiles.Profile:
    """Find the retrieval heads of a model, in one pass over random tokens.

    heads="retrieval" sizes heads by the result, see `mmkv.attach.copy_probe`; `wrap` measures and
    saves it by itself. The model is not changed.

    Args:
        model: wrapped or not, with its weights, in eval mode.

    Returns:
        A profile for `mmkv.wrap(model, profile=...)`, with `retrieval` [L][H], the share of its
        attention, in [0, 1], that each head gives to what it can copy.

    Raises:
        ValueError: a model that cannot be wrapped, one with too few tokens or positions, one that
            overflows, or whose heads are spread over processes.
    """
    with nullcontext() if is_wrapped(model) else wrapped(model, "full"):
        return copy_probe.measure(attachment_of(model))


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
    attachment = attachment_of(model)
    try:
        yield model
    finally:
        # The block may have unwrapped the model, and wrapped it anew.
        if is_wrapped(model) and attachment_of(model) is attachment:
            unwrap(model)


def is_wrapped(model: nn.Module) -> bool:
    """Return whether `wrap` was called on this model, or on a container around it."""
    return "_mmkv" in vars(unwrap_container(model))
