"""Splits a layer's attention into modules: of heads that vLLM keeps whole, and of all others."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from mmkv.vllm.backend import Backend, HeadPart
from mmkv.vllm.blocks import SmallSpec, WholeSpec
from mmkv.vllm.pages import Pages
from mmkv.vllm.settings import Settings, Sizes


class WholeHeads(Attention):
    """vLLM's attention, for heads that keep the whole prompt; its spec is of a class of ours."""

    def __init__(self, *args: Any, heads: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heads = heads

    def get_kv_cache_spec(self, vllm_config: Any) -> WholeSpec:
        """Return vLLM's spec, for a group of ours."""
        return WholeSpec.of(super().get_kv_cache_spec(vllm_config))


class Paged:
    """A layer whose `kv_cache` is viewed as `Pages`, which live as long as vLLM holds it here."""

    head_size: int

    @property
    def kv_cache(self) -> Tensor:
        """The layer's cache, as vLLM sets it."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        self._kv_cache = cache
        self.pages = Pages.of(cache, self.head_size) if cache.numel() else None


class SmallHeads(Paged, Attention):
    """All heads of a layer that keep a part of a prompt, ordered by class.

    Each unit of heads has pages in a KV cache group of its own. This module is vLLM's layer of the
    first unit, and runs attention of all: calls of many modules would cost more than attention.
    """

    def __init__(
        self,
        *args: Any,
        settings: Settings,
        classes: dict[float, list[tuple[int, ...]]],
        prefix: str,
        **kwargs: Any,
    ) -> None:
        (share, units), *_ = classes.items()
        name = f"{prefix}.h{units[0][0]}"
        Attention.__init__(self, *args, prefix=name, attn_backend=Backend, **kwargs)
        self.sizes = settings.sizes[share]
        self.settings, self.heads, self.parts = settings, (), list[HeadPart]()
        for share, of_class in classes.items():
            units, first = list[Any](), len(self.heads)
            for unit in of_class:
                name = f"{prefix}.h{unit[0]}"
                units.append(Unit(self, name, settings.sizes[share]) if self.heads else self)
                self.heads += unit
            own = slice(first, len(self.heads))
            self.parts.append(HeadPart(self, self.heads[own], own, units))

    def get_kv_cache_spec(self, vllm_config: Any) -> SmallSpec:
        """Return the spec of the first unit's pages."""
        return self.spec(vllm_config, self.sizes)

    def spec(self, vllm_config: Any, sizes: Sizes) -> SmallSpec:
        """Return the spec of a unit's pages."""
        return SmallSpec.of(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.settings.unit,
            head_size=self.head_size,
            dtype=self.dtype,
            sizes=sizes,
        )


class Unit(Paged, AttentionLayerBase):
    """Pages of another unit of a module's heads, as a layer of vLLM's."""

    def __init__(self, owner: SmallHeads, name: str, sizes: Sizes) -> None:
        self.owner, self.impl, self.layer_name, self.sizes = owner, owner.impl, name, sizes
        self.num_heads, self.head_size = owner.num_heads, owner.head_size
        self.kv_cache = torch.tensor([])
        config = get_current_vllm_config_or_none()
        assert config is not None
        context = config.compilation_config.static_forward_context
        assert name not in context
        context[name] = self

    def get_attn_backend(self) -> type[Backend]:
        """Return the backend, whose builder sees this unit's block table."""
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> SmallSpec:
        """Return the spec of the pages."""
        return self.owner.spec(vllm_config, self.sizes)


class SplitAttention(nn.Module):
    """Stands for the `Attention` of a decoder layer."""

    back: Tensor  # [H], the places of the heads in the order of the parts

    def __init__(self, settings: Settings, layer: int, given: dict[str, Any]) -> None:
        super().__init__()
        heads, kv_heads = given.pop("num_heads"), given.pop("num_kv_heads")
        self.group, self.dim, unit = heads // kv_heads, given["head_size"], settings.unit
        self.kv_heads, prefix = kv_heads, given.pop("prefix")
        self.parts: list[Any] = []
        classes = dict(settings.classes[layer])
        for own in classes.pop(1.0, []) if 1.0 not in settings.sizes else []:
            name = f"{prefix}.h{own[0]}"
            self._add(WholeHeads(**self._sizes(unit), prefix=name, heads=own, **given))
        if classes:
            sizes = self._sizes(unit * sum(map(len, classes.values())))
            more: Any = {"settings": settings, "classes": classes, "prefix": prefix}
            self._add(SmallHeads(**sizes, **given, **more))
        order = torch.tensor([h for part in self.parts for h in part.heads])
        self.in_order = order.tolist() == list(range(kv_heads))
        self.register_buffer("back", order.argsort(), persistent=False)

    def _sizes(self, n: int) -> dict[str, int]:
        return {"num_heads": n * self.group, "num_kv_heads": n}

    def _add(self, part: Any) -> None:
        self.add_module(part.layer_name.rsplit(".", 1)[1], part)
        part.register_buffer("at", torch.tensor(part.heads), persistent=False)
        self.parts.append(part)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: Any = None,
        output_dtype: Any = None,
    ) -> Tensor:
        """Attend [tokens, Hq * D] -> [tokens, Hq * D], each part with its own heads."""
        if len(self.parts) == 1 and self.in_order:
            return self.parts[0](query, key, value, output_shape, output_dtype)
        shape = query.shape if output_shape is None else output_shape
        inputs = [
            x.view(-1, self.kv_heads, n * self.dim)
            for x, n in ((query, self.group), (key, 1), (value, 1))
        ]
        outputs: list[Tensor] = []  # torch.compile does not trace `list[Tensor]()`
        for part in self.parts:
            own = [x.index_select(1, part.at).flatten(1) for x in inputs]
            outputs.append(part(*own, None, output_dtype))
        out = torch.cat(outputs, 1).view(-1, self.kv_heads, self.group * self.dim)
        return out.index_select(1, self.back).view(shape)


def _of_layer(settings: Settings, given: dict[str, Any]) -> SplitAttention | None:
    """Return what stands for an attention module; None: it stays vLLM's own.

    Raises:
        ValueError: its heads are to be compressed, and its logits are no plain softmax's.
    """
    sliding = given.get("per_layer_sliding_window")
    if sliding is None and (cache_config := given.get("cache_config")) is not None:
        sliding = cache_config.sliding_window
    layer = extract_layer_index(given["prefix"])
    if (
        given.get("attn_type", AttentionType.DECODER) != AttentionType.DECODER
        or given.get("kv_sharing_target_layer_name") is not None
        or sliding is not None
        or layer not in settings.classes
    ):
        return None
    for name in ("alibi_slopes", "logits_soft_cap", "head_size_v", "sinks"):
        if given.get(name) not in (None, 0, given["head_size"] if name == "head_size_v" else None):
            raise ValueError(
                f"mmkv in vLLM does not support {name}, which layer {layer} has: serve this model "
                "without mmkv"
            )
    given.setdefault("num_kv_heads", given["num_heads"])
    return SplitAttention(settings, layer, given)


def register() -> None:
    """Let `Attention(...)` of a decoder layer make a `SplitAttention`, if the plugin is on."""
    if getattr(Attention.__new__, "mmkv", False):
        return
    signature = inspect.signature(Attention.__init__)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = get_current_vllm_config_or_none()
        settings = None if cls is not Attention or config is None else Settings.of(config)
        if settings is not None:
            given = dict(signature.bind(None, *args, **kwargs).arguments)
            given.pop("self")
            given |= given.pop("extra_impl_args", {})
            if (split := _of_layer(settings, given)) is not None:
                return split
        return object.__new__(cls)

    new.mmkv = True  # type: ignore[attr-defined]
    Attention.__new__ = staticmethod(new)
