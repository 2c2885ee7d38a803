"""Calibration: measure a profile, layer sizes or head costs, over a few samples.

A head's cost is the divergence of the model's output when that head alone is compressed. It is
estimated to second order, with one backward pass per draw for all heads and levels together. The
model's own greedy reply is read again after the whole prompt. With random signs `z_tv = +-1` for
each of its tokens and each word of the vocabulary, the gradient `g` of `sum_tv z_tv sqrt(p_tv) log
p_tv`, the roots held constant, has the Fisher information as its covariance. So half the mean
square of `g . change` is, to second order, the Kullback-Leibler divergence that a change of a
head's output causes, summed over the reply. Labels drawn from p would have the same mean, but a
confident model seldom draws the most informative ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv import adapters, visual_heads
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.evict import evict
from mmkv.cache.forward_pass import AttentionCall
from mmkv.cache.layer import CompressedLayer
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.selection import sizes_of_rows
from mmkv.calls import cache_in, passing, unwrap_container
from mmkv.decode.slots import Grow
from mmkv.forcing import checked_inputs, greedy
from mmkv.policy import Policy
from mmkv.profiles import CLOSE, Profile
from mmkv.registry import exact_share, get_policy
from mmkv.sizes.heads import UniformHeads
from mmkv.sizes.layers import UniformLayers
from mmkv.sizes.profiled import CalibratedHeads, Curves, RetrievalHeads, VisualHeads
from mmkv.terminal import bar
from mmkv.wrapping import comparing, wrapped

LEVELS = (0.03, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.55, 0.75, 1.0)
# Most tokens of a reply, and draws of signs for each.
_REPLY, _DRAWS = 128, 16
# Only needed so that tokens are scored; any value will do.
_BUDGET = 0.5


@comparing()
def calibrate(
    model: Any,
    samples: Iterable[Mapping[str, Any]],
    policy: str = "condense",
    budget: float = 0.5,
    **policy_options: Any,
) -> Profile:
    """Measure a profile over samples.

    It holds the mean of a policy's kept fractions by layer; or, for heads="calibrated" or
    "retrieval" (condense), cost curves of the heads on the model's own greedy replies; or, for
    heads="visual" (sparsemm), how visual each head is (see `mmkv.visual_heads.measure` for image
    regions in samples).

    Args:
        model: not wrapped; it is wrapped for the length of the call.
        samples: inputs for `model(**sample)`, such as a processor returns; each row of a batch
            counts as a sample.
        policy: one whose layer sizes depend on the prompt: prefixkv, xkv, squeeze; or condense or
            sparsemm.
        budget: a fraction in (0, 1); measurements of heads do not depend on it.
        policy_options: override the policy's defaults, of which `least` is 0 here.

    Returns:
        A profile for `mmkv.wrap(model, profile=...)`.

    Raises:
        ValueError: there are no samples, one is not a mapping of inputs, or the policy's sizes do
            not depend on the prompt.
    """
    chosen = get_policy(policy, **exact_share(policy) | policy_options)
    if chosen.layers.learns:
        raise ValueError(
            "calibrate averages the sizes of all samples, and allocation='sampled' those of the "
            "first: use allocation='one-pass'"
        )
    parts = adapters.find(model)
    if parts.ranks > 1:
        raise ValueError(
            f"calibrate measures all heads, and those of this model are spread over {parts.ranks} "
            "processes: measure it in one, with device_map='auto'"
        )
    origin: Any = {"policy": chosen.name, "model": adapters.shape(parts.config)}
    if isinstance(chosen.heads, CalibratedHeads | RetrievalHeads):
        curves, n = cost_curves(model, _checked(samples), chosen)
        return Profile(curves=curves, samples=n, **origin)
    if isinstance(chosen.heads, VisualHeads):
        scores, n = visual_heads.measure(model, _checked(samples), chosen)
        return Profile(visual=scores, samples=n, **origin)
    if not chosen.layers.needs:
        raise ValueError(
            f"policy {chosen.name!r} sizes its layers without looking at the prompt "
            f"(layers={chosen.layers.name!r}): there is nothing to calibrate"
        )
    rows: list[list[float]] = []
    target = None if chosen.layers.retention is not None else budget
    with wrapped(model, chosen, target), torch.no_grad():
        for sample in _checked(samples):
            cache = cache_in(model(**sample, use_cache=True))
            for row, length in enumerate(cache.lengths):
                rows.append([x.keeping().sizes[row] / length for x in cache.compressed])
    if not rows:
        raise ValueError("calibrate: no samples")
    mean = tuple(sum(layer) / len(rows) for layer in zip(*rows, strict=True))
    mean_size = sum(mean) / len(mean)
    # Sizes are whole tokens, so their mean may differ from the budget by less than one token.
    size = mean_size if target is None or abs(mean_size - target) > CLOSE else target
    return Profile(mean, budget=size, samples=len(rows), **origin)


def _checked(samples: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the checked samples, with a progress bar; in a pipe, a line now and then."""
    total = len(samples) if isinstance(samples, Sized) else None
    with bar(total) as advance:
        for i, sample in enumerate(samples):
            yield checked_inputs(sample, i, "calibrate")
            advance(1, "calibrate")


def cost_curves(
    model: Any, samples: Iterable[Mapping[str, Any]], policy: Policy
) -> tuple[Curves, int]:
    """Measure cost curves, means over all tokens of the replies; also return the number of prompts.

    Tokens are chosen and merged by the policy, with equal sizes for all heads of a layer. Model and
    samples are as for `mmkv.calibrate`.
    """
    config, model = adapters.find(model).config, unwrap_container(model)
    uniform = replace(policy, layers=UniformLayers(), heads=UniformHeads(), decode=Grow(), least=0)
    generator = torch.Generator().manual_seed(0)
    total, tokens, rows = torch.zeros(()), 0, 0
    # In a caller's inference mode no gradients could be computed.
    with torch.inference_mode(False):
        for sample in samples:
            reply, valid = greedy(model, sample, _REPLY)
            if not bool(valid.any()):
                continue
            cache = _Probe(config, CacheConfig(uniform, _BUDGET))
            cache_arguments = passing(model, cache)
            with wrapped(model, uniform, _BUDGET):
                with torch.no_grad():
                    model(**sample, **cache_arguments, use_cache=True)
                with torch.enable_grad():
                    outputs = model(
                        input_ids=reply,
                        attention_mask=_extended(config, sample.get("attention_mask"), reply),
                        **cache_arguments,
                        use_cache=True,
                    )
                    log_p = outputs.logits.float().log_softmax(-1)
            total = total + cache.costs(log_p, valid, generator)
            tokens, rows = tokens + int(valid.sum()), rows + int(valid.any(-1).sum())
    if not tokens:
        raise ValueError("calibrate: no samples with a reply of two tokens or more")
    mean = (total / tokens).tolist()
    rounded = [[[float(f"{c:.4g}") for c in head] for head in layer] for layer in mean]
    return Curves(LEVELS, tuple(tuple(map(tuple, layer)) for layer in rounded)), rows


class _Probe(CompressedCache):
    """A cache that keeps a prompt whole, and measures on a reply what compressing heads changes."""

    def __init__(self, config: Any, plan: CacheConfig) -> None:
        super().__init__(config, plan)
        # For each layer: the reply's outputs [B, T, Hq, D], and changes [R - 1, B, T, Hq, D].
        self.outputs: list[Tensor] = []
        self.changes: list[Tensor] = []
        self.heads = 1  # H

    def _evict(self, *args: Any, **kwargs: Any) -> None:
        """Do not evict."""

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Discard a reply's states, as writing them in place would break the gradient."""
        if self.expects_prompt:
            return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        return recurrent_states

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the reply's attention over the whole prompt, and over the pairs of each level.

        In float32, as bfloat16 would round small changes of outputs away.
        """
        if self.expects_prompt:
            return super().attend(call)
        query, key, value, _, scale, softcap, layer_idx = call
        layer, prompt = self.layers[layer_idx], self.prompt
        assert isinstance(layer, CompressedLayer)
        assert isinstance(layer.state, PromptKV)
        assert prompt is not None
        prompt_kv = layer.state
        new = torch.arange(layer.seen - query.shape[2], layer.seen, device=key.device)
        new = new.expand(len(key), 1, -1)

        def attend_to(past: PromptKV) -> Tensor:
            past = past.extended(key.float(), value.float(), new)
            return past.attend(query.float(), scale=scale, softcap=softcap)

        output = attend_to(prompt_kv)
        if not output.requires_grad:
            output.requires_grad_()
        self.outputs.append(output)
        self.heads = key.shape[1]
        with torch.no_grad():
            changes: list[Tensor] = []
            for level in LEVELS[:-1]:
                plan = replace(self.plan, budget=level)
                sizes = [n for (n,) in sizes_of_rows(plan, prompt, 1)]
                kept = evict(prompt_kv, self.plan, prompt, sizes, 0, layer_idx).dense()
                changes.append(attend_to(kept) - output)
        self.changes.append(torch.stack(changes))
        return output.to(query.dtype)

    def costs(self, log_p: Tensor, valid: Tensor, generator: torch.Generator) -> Tensor:
        """Return cost curves [L, H, R], in nats, summed over all tokens that are `valid` [B, T].

        `log_p` [B, T, V] predicts the token after each of these. Signs are drawn on the host.
        """
        weight = log_p.detach().mul(0.5).exp() * valid[..., None].to(log_p.device)
        draws = list[Tensor]()
        for _ in range(_DRAWS):
            signs = torch.randint(0, 2, log_p.shape, generator=generator, dtype=torch.int8) * 2 - 1
            loss = (log_p * weight * signs.to(log_p.device)).sum()
            gradients = torch.autograd.grad(loss, self.outputs, retain_graph=True)
            terms = [
                torch.einsum("bthd,rbthd->bhr", g, change).cpu()
                for g, change in zip(gradients, self.changes, strict=True)
            ]
            draws.append(torch.stack(terms, dim=1).double().unflatten(2, (self.heads, -1)).sum(3))
        mean = torch.stack(draws).square().mean(0)  # [B, L, H, R - 1]
        return pad(mean.sum(0) / 2, (0, 1))


def _extended(config: Any, mask: Tensor | None, reply: Tensor) -> Tensor | None:
    """Extend a prompt's mask by the reply, for models that compute positions from it.

    Padding is refused where it would shift positions in a way that changes the output: with MRoPE,
    and if queries are scaled by their position.
    """
    if mask is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    for name, what in (("mrope_section", "MRoPE"), ("llama_4_scaling_beta", "scaled queries")):
        if name in rope and bool(mask.all()):
            return None
        if name in rope:
            raise ValueError(
                f"calibrate: padded prompts of a model with {what}: give them one by one"
            )
    return pad(mask, (0, reply.shape[1]), value=1)
