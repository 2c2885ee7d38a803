"""Reports of what a compressed cache keeps, as numbers and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv.sizes.profiled import NO_VISUAL_PROFILE, VisualHeads
from mmkv.terminal import Table, of_bytes, plain

if TYPE_CHECKING:
    from mmkv.cache.state import CacheState


@dataclass(frozen=True)
class LayerReport:
    """Contents of one layer of a cache."""

    layer: int  # its index in the decoder
    compressed: bool  # False for a layer with a sliding window or linear attention
    kept: list[list[int]]  # pairs of each head of each row, groups included; [] if not compressed
    nbytes: int  # of its storages
    # Share of the competing prompt tokens' scores that lies on kept tokens, without groups, as mean
    # over rows; None if the policy has no attention score.
    retained: float | None
    # Error of 8 or 4 bits, |x - dequantised x| / |x| over the kept pairs of the last prompt, mean
    # over rows; None where nothing is quantised.
    key_error: float | None = None
    value_error: float | None = None
    groups: float | None = None  # number of groups, mean over heads and rows

    @property
    def mean_kept(self) -> float:
        """Tokens per head, mean over rows and heads."""
        counts = [n for row in self.kept for n in row]
        return sum(counts) / len(counts) if counts else 0.0


@dataclass(frozen=True)
class CacheReport:
    """A cache's contents. `seen` counts tokens per row without padding, generated ones included.

    Attributes:
        policy: its name.
        budget: the budget given to `wrap`, or the one that its memory allows.
        size: the budget or the memory in words.
        seen: tokens seen by each row, [B].
        generated: how many of them came after the last prompt.
        layers: one report a layer.
        nbytes: bytes of all storages, empty slots included.
        full_nbytes: bytes that a cache of all tokens seen (padding included) would hold.
        kept_fraction: pairs kept over pairs seen, over all compressed layers.
        prompt_fraction: the same for the tokens up to the end of the last prompt, earlier turns
            and replies among them.
        retained: mean over layers of the retained importance; None where unknown.
        kv_dtype: type in which kept pairs are stored; None for the model's type.
        key_error, value_error: means over the compressed layers; None where nothing is quantised.
        notes: remarks in words, such as on rows that are kept whole.
    """

    policy: str
    budget: float | int | None
    size: str
    seen: list[int]
    generated: int
    layers: list[LayerReport]
    nbytes: int
    full_nbytes: int
    kept_fraction: float
    prompt_fraction: float
    retained: float | None
    kv_dtype: str | None
    key_error: float | None
    value_error: float | None
    notes: list[str]

    @classmethod
    def of(cls, cache: CacheState) -> CacheReport:
        """Return the report of a cache, which is not changed.

        Raises:
            ValueError: no prompt was run through the cache yet.
        """
        masks, layers = cache.masks, []
        if masks is None:
            raise ValueError("nothing is kept yet: run a prompt through the wrapped model first")
        full_nbytes, compressed = 0, {id(x): x for x in cache.compressed}
        merge = cache.plan.policy.merge
        weighted = merge is not None and merge.weighted
        for i, (layer, nbytes) in enumerate(zip(cache.layers, cache.layer_nbytes, strict=True)):
            if x := compressed.get(id(layer)):
                state = x.keeping()
                counts = state.counts().tolist()
                share = None if state.retained is None else float(state.retained.mean())
                errors = (None, None) if state.error is None else state.error.mean(0).tolist()
                groups = None
                if weighted:
                    groups = float((cache.groups(i)[0] > 0).sum(-1).float().mean())
                layers.append(LayerReport(i, True, counts, nbytes, share, *errors, groups=groups))
                width = state.stored.full_pair_bytes
                full_nbytes += state.batch * state.heads * x.seen * width
            else:
                full_nbytes += nbytes
                layers.append(LayerReport(i, False, [], nbytes, None))
        generated = cache.compressed[0].seen - masks.valid.shape[1]
        seen = [n + generated for n in cache.lengths]
        heads = cache.compressed[0].keeping().heads
        pairs = sum(n for x in layers for row in x.kept for n in row)
        n_heads, prompt_end = heads * len(cache.compressed), masks.valid.shape[1]
        prompt_pairs = sum(int(x.keeping().counts(prompt_end).sum()) for x in cache.compressed)
        return cls(
            policy=cache.plan.policy.name,
            budget=cache.plan.budget,
            size=cache.plan.size,
            seen=seen,
            generated=generated,
            layers=layers,
            nbytes=cache.nbytes,
            full_nbytes=full_nbytes,
            kept_fraction=pairs / (sum(seen) * n_heads),
            prompt_fraction=prompt_pairs / (sum(cache.lengths) * n_heads),
            retained=mean_known(x.retained for x in layers),
            kv_dtype=cache.plan.kv_dtype,
            key_error=mean_known(x.key_error for x in layers),
            value_error=mean_known(x.value_error for x in layers),
            notes=_notes(cache),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return the table that the terminal shows."""
        return plain(self)

    def __rich__(self) -> Table:
        """Return a table for the terminal, without columns that have no known value."""

        def figures(x: LayerReport | CacheReport) -> dict[str, str]:
            errors = [f"{e:.2%}" for e in (x.key_error, x.value_error) if e is not None]
            retained = "" if x.retained is None else f"{x.retained:.3f}"
            return {"retained": retained, "key, value error": ", ".join(errors)}

        rows: dict[str, dict[str, str]] = {}
        for x in self.layers:
            counts = [n for row in x.kept for n in row]
            rows[str(x.layer)] = {
                "kept per head": f"{x.mean_kept:.1f}" if x.compressed else "not compressed",
                "groups": "" if x.groups is None else f"{x.groups:.1f}",
                "min-max": f"{min(counts)}-{max(counts)}" if counts else "",
                "KiB": f"{x.nbytes / 1024:.1f}",
                **figures(x),
            }
        columns = [name for name in rows["0"] if any(row[name] for row in rows.values())]
        seen = sum(self.seen) / len(self.seen)
        rows["all"] = {
            "kept per head": f"{self.kept_fraction * seen:.1f} of {seen:.0f}",
            "KiB": f"{self.nbytes / 1024:.1f} of {self.full_nbytes / 1024:.1f}",
            **figures(self),
        }
        cells = [(name, [row.get(x, "") for x in columns]) for name, row in rows.items()]
        held = of_bytes(self.nbytes, self.full_nbytes)
        title = f"{self.policy}, {self.size}: {held}, {self.headline}"
        return Table("layer", columns, cells, title, [*self.notes, _LEGEND])

    @property
    def headline(self) -> str:
        """Share of the prompt that is kept, and how many generated tokens are, as text."""
        dtype = "" if self.kv_dtype is None else f" in {self.kv_dtype}"
        kept = f"{self.prompt_fraction:.1%} of the prompt kept{dtype}"
        if not self.generated:
            return kept
        seen, rows = sum(self.seen), len(self.seen)
        prompt = self.prompt_fraction * (seen - rows * self.generated)
        n_generated = f"{(self.kept_fraction * seen - prompt) / rows:.1f}".removesuffix(".0")
        fraction = "" if n_generated == str(self.generated) else f"{n_generated} of "
        return f"{kept}, and {fraction}{self.generated} generated tokens"


_LEGEND = (
    "kept per head: mean over heads, groups and generated tokens included; min-max: of single "
    "heads; retained: the share of scores that lies on tokens with a pair of their own"
)


def mean_known(numbers: Iterable[float | None]) -> float | None:
    """Return the mean of the known numbers; None where none is known."""
    known = [x for x in numbers if x is not None]
    return sum(known) / len(known) if known else None


def _notes(cache: CacheState) -> list[str]:
    policy, masks = cache.plan.policy, cache.masks
    assert masks is not None
    if cache.plan.keeps_all:
        return ["the full cache: nothing is evicted"]
    notes = list[str]()
    plan, n_whole = cache.plan, 0
    setting = plan.size
    for row, length in enumerate(cache.lengths):
        sizes = [x.keeping().sizes[row] for x in cache.compressed]
        raised = plan.raised(length, len(sizes), sum(sizes))
        if all(n == length for n in sizes):
            n_whole += 1
            why = f"window {policy.window_size}, " if policy.window_size else ""
            why += f"least={policy.least}, " if raised else ""
            notes.append(f"row {row}: all {length} prompt tokens are kept ({why}{setting})")
        elif raised:
            kept = f"least={policy.least} keeps {policy.least} of {length} tokens"
            notes.append(f"row {row}: {kept}, more than {setting}; least=0 switches this off")
    if policy.merge is not None and policy.merge.weighted and n_whole < len(cache.lengths):
        notes.append("tokens without a pair of their own are merged into groups")
    if plan.kv_dtype is not None and cache.compressed[0].seen > masks.valid.shape[1]:
        notes.append("the bytes include slots in the model's type for the newest generated tokens")
    competed = int((masks.valid & ~masks.is_prompt).sum())
    if competed and policy.decode.every:
        notes.append("generated tokens count as prompt once they have competed")
    if (sampling := cache.plan.sampling) is not None:
        task = f"task {cache.plan.task!r}: " if cache.plan.task else ""
        learned, n = sampling.known(cache.plan.task), sampling.samples
        notes.append(
            f"{task}learning layer sizes, {learned} of {n} requests so far"
            if cache.plan.learned is None
            else f"{task}the mean layer sizes of {n} requests"
        )
    if isinstance(policy.heads, VisualHeads):
        notes.append(NO_VISUAL_PROFILE.format(policy=policy.name))
    return notes + cache.plan.shortfalls(masks, len(cache.compressed))
