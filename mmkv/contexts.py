"""Read a prompt once, ask about it many times: a compressed cache without its question.

    context = mmkv.read(model, document, processor=tokenizer)
    text = context.answer("What is it about?")

What `read` evicts, it evicts without knowing a question. Asking evicts nothing more: a question's
tokens, and the reply's as the policy has it, stand behind what is left, and the context stays as it
is for the next one.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmkv import context_files, context_texts
from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.calls import CACHE, cache_in, unwrap_container
from mmkv.context_files import GRIDS, TOKENWISE
from mmkv.context_texts import Opened
from mmkv.report import CacheReport

# What a processor returns; a text, or several; chat messages; ids.
Given = Mapping[str, Any] | str | Sequence[str] | Sequence[Mapping[str, Any]] | Tensor
# Of videos (Qwen2.5-VL), one for each grid.
_SECONDS = "second_per_grid_ts"
_MOST_NEW = 256


@dataclass(eq=False, repr=False)
class Context:
    """A prompt that was read, and what its compressed cache holds.

    Made by `mmkv.read` or `mmkv.load_context`.

    Attributes:
        model: the wrapped model that read it.
        cache: the `CompressedCache` it is held in.
        inputs: what was read, token by token [B, T], and the grids of its pictures.
        processor: turns texts and messages into inputs; None: they are given as inputs.
        opened: how texts and messages go on behind what was read.
    """

    model: Any
    cache: CompressedCache
    inputs: dict[str, Tensor]
    processor: Any = None
    opened: Opened = Opened()

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values."""
        return self.cache.nbytes

    def report(self) -> CacheReport:
        """What the cache holds."""
        return self.cache.report()

    def answer(self, question: Given, *, processor: Any = None, **options: Any) -> Any:
        """The model's reply as text: `ask`, and what the processor makes of its tokens.

        Args:
            question: as for `ask`.
            processor: as for `ask`.
            options: of `model.generate`; at most 256 new tokens where they do not say how many.

        Returns:
            A text; a list of them for several questions, or several replies.

        Raises:
            ValueError: as `ask`, or there is no processor.
        """
        processor = self.processor if processor is None else processor
        if not hasattr(processor, "decode"):
            raise ValueError("to answer in text takes the model's processor: pass processor=")
        if not {"max_new_tokens", "max_length", "generation_config"} & options.keys():
            options["max_new_tokens"] = _MOST_NEW
        out = self.ask(question, processor=processor, **options)
        rows = out if isinstance(out, Tensor) else out.sequences
        texts = [processor.decode(row, skip_special_tokens=True).strip() for row in rows]
        several = isinstance(question, list | tuple) and isinstance(question[0], str)
        return texts if several or len(texts) > 1 else texts[0]

    def ask(self, inputs: Given, *, processor: Any = None, **options: Any) -> Any:
        """The model's reply to a question behind the context, which stays as it is.

        Args:
            inputs: the question, a text, several, or chat messages; or what the processor or
                tokenizer makes of the question alone (without special tokens that begin a text),
                [Q, q], padded on the left, with pictures where it has any; or these ids alone. A
                context of one row answers Q questions at once.
            processor: of texts and messages; None: the one that the context was read with.
            options: of `model.generate`.

        Returns:
            int64 [Q, n], the new tokens; with `return_dict_in_generate=True` what `generate` gives,
            whose `sequences` are the new tokens.

        Raises:
            ValueError: the context has several rows, and the questions are not as many; the model
                was wrapped anew since; or a text or messages without a processor.
        """
        given = self.behind(self._encoded(inputs, processor, ends=True)[0])
        start = given["input_ids"].shape[1]
        config = options.get("generation_config") or self.model.generation_config
        asked = (options.get(x, getattr(config, x)) for x in ("num_beams", "num_return_sequences"))
        if (each := max(x or 1 for x in asked)) > 1:  # as `generate` does with the tokens
            given[CACHE].batch_repeat_interleave(each)
        out = self.model.generate(**given, **{"use_cache": True, **options})
        if isinstance(out, Tensor):
            return out[:, start:]
        out.sequences = out.sequences[:, start:]
        return out

    def behind(self, inputs: Mapping[str, Any], *, copied: bool = True) -> dict[str, Any]:
        """What `generate` is given for a question of `ask`: among it a cache that keeps it whole.

        The context is used up where the cache is not copied.
        """
        attachment_of(self.model)  # as long as it is wrapped
        cache = copy.deepcopy(self.cache) if copied else self.cache
        cache.evicts_turns = False
        return {**self._behind(inputs, cache), CACHE: cache}

    def append(
        self, inputs: Given, *, processor: Any = None, prefill_chunk_size: int | None = None
    ) -> None:
        """Read on: more pages, more frames, which compete with what is held under the same budget.

        Args:
            inputs: as for `ask`, one row for each of the context.
            processor: as for `ask`.
            prefill_chunk_size: how many tokens to read at a time; None: all at once.

        Raises:
            ValueError: another number of rows, or a text or messages without a processor.
        """
        more, opened = self._encoded(inputs, processor, ends=False)
        given = self._behind(more, self.cache)
        self.cache = _read(self.model, {**given, CACHE: self.cache}, prefill_chunk_size)
        self.inputs, self.opened = _lasting(given), opened

    def _encoded(
        self, given: Given, processor: Any, *, ends: bool
    ) -> tuple[Mapping[str, Any], Opened]:
        processor = self.processor if processor is None else processor
        return context_texts.encode(given, processor, self.opened, ends=ends)

    def __repr__(self) -> str:
        rows, seen = self.inputs["attention_mask"].shape
        what = f"{type(self.model).__name__}, {rows} x {seen} tokens, {self.nbytes} bytes"
        return f"Context({what}, {self.cache.plan.describe()})"

    def _behind(self, inputs: Mapping[str, Any], cache: CompressedCache) -> dict[str, Any]:
        """What `generate` is given: all tokens seen with the new ones, and the new pictures."""
        more = _tensors(inputs, self.model)
        before, asked = self.inputs, len(more["input_ids"])
        rows = len(before["input_ids"])
        if more["input_ids"].shape[1] == 0:
            raise ValueError("there are no tokens behind the context: give at least one")
        if rows != asked and (rows != 1 or cache is self.cache):
            raise ValueError(
                f"{asked} rows behind a context of {rows}: give one row for each of the context's"
                + ("" if cache is self.cache else ", or read one row and ask many questions")
            )
        grids = [name for name in more if name in GRIDS]
        if grids and asked > 1:
            raise ValueError(
                f"{grids[0]} for {asked} rows behind a context of {rows}: with pictures in the "
                "question, ask one row at a time"
            )
        if asked != rows:
            cache.batch_repeat_interleave(asked)
            before = {name: torch.cat([x] * asked) for name, x in before.items()}
        cache.rope_deltas = None  # positions are counted from all tokens and grids
        given: dict[str, Any] = dict(more)
        if grids:
            given |= _features(self.model, given)
        for name, old in before.items():
            if name in GRIDS:
                given[name] = torch.cat([old, more[name]]) if name in more else old
            else:
                new = more.get(name)
                if new is None:
                    new = old.new_zeros(more["input_ids"].shape)
                given[name] = torch.cat([old, new], dim=1)
        return given

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the context to a safetensors file; `mmkv.load_context` reads it.

        Raises:
            ValueError: some layers have linear attention, or heads are spread over processes.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"expected the path of a file, not a {type(path).__name__}")
        context_files.save(path, self.model, self.cache, self.inputs, asdict(self.opened))


def read(
    model: nn.Module, inputs: Given, *, processor: Any = None, prefill_chunk_size: int | None = None
) -> Context:
    """Read a prompt without its question into a compressed cache, to ask about it many times.

    Args:
        model: a wrapped model.
        inputs: what its processor returns for the prompt: input_ids [B, N], attention_mask, and
            pixel values and all else that belongs to pictures; or ids alone, [N] or [B, N]; or a
            text, several, or chat messages, whose last one, the user's, what follows belongs to.
        processor: the model's processor or tokenizer, for texts and messages, here and whenever
            the context is asked; where it has a chat template, a text is a user's message.
        prefill_chunk_size: how many tokens to read at a time; None: all at once.

    Raises:
        ValueError: the model is not wrapped, there are no input_ids, or a text or messages without
            a processor.
    """
    inner, attachment = unwrap_container(model), attachment_of(model)
    cache = CompressedCache(attachment.parts.config, attachment.plan)
    given, opened = context_texts.encode(inputs, processor, None, ends=False)
    context = read_into(cache, inner, given, prefill_chunk_size)
    context.processor, context.opened = processor, opened
    return context


def read_into(
    cache: CompressedCache, model: Any, inputs: Mapping[str, Any], chunk: int | None
) -> Context:
    """As `read`, into an empty cache, which may have a plan of its own."""
    if postpone := cache.plan.policy.postpone:
        raise ValueError(
            f"postpone={postpone} waits for generated tokens, and a context is read without any: "
            "wrap the model with postpone=0"
        )
    given = _tensors(inputs, model)
    return Context(model, _read(model, {**given, CACHE: cache}, chunk), _lasting(given))


def load_context(
    path: str | os.PathLike[str] | nn.Module,
    model: nn.Module | str | os.PathLike[str],
    *,
    processor: Any = None,
) -> Context:
    """Read a context from a file that `Context.save` wrote.

    Args:
        path: the file. Nothing in it is run. File and model may stand in either order.
        model: the model that read it, wrapped in the same way.
        processor: as for `read`.

    Raises:
        ValueError: no context, or one of another model, policy or budget, or damaged; the message
            names the file. Or the model's heads are spread over processes.
    """
    if isinstance(path, nn.Module):
        path, model = model, path
    inner = unwrap_container(model)
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"expected the path of a context's file, not a {type(path).__name__}")
    cache, inputs, opened = context_files.load(path, inner)
    return Context(inner, cache, inputs, processor, Opened(**opened))


def _read(model: Any, given: dict[str, Any], chunk: int | None) -> CompressedCache:
    """The cache of a prompt, or of one with more behind it."""
    how: Any = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    how |= {"use_cache": True, "return_dict_in_generate": True, "prefill_chunk_size": chunk}
    return cache_in(model.generate(**given, **how))


@torch.no_grad()
def _features(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the vision tower makes of new pictures with grids (Qwen), which it is not given then.

    Positions need the grids of all pictures seen, the tower those of the new ones.
    """
    found: dict[str, Any] = {}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels in given:
            encode = getattr(model, f"get_{kind}_features")
            grid = given[f"{kind}_grid_thw"]
            found[kind] = encode(given.pop(pixels), grid, return_dict=True)
    return {"mm_encoder_outputs": found} if found else {}


def _tensors(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Model inputs on the model's device, pictures in its type, with a mask."""
    found = dict(inputs)
    if isinstance(seconds := found.get(_SECONDS), list):
        found[_SECONDS] = torch.tensor(seconds)
    found = {k: x.to(model.device) if isinstance(x, Tensor) else x for k, x in found.items()}
    # Processors give float32, and not every vision tower makes it the model's type (Llama 4).
    found |= {k: x.to(model.dtype) for k, x in found.items() if k.startswith("pixel_values")}
    if "input_ids" not in found:
        raise ValueError(f"there are no input_ids among {sorted(inputs)}")
    if found["input_ids"].ndim != 2:
        shape = tuple(found["input_ids"].shape)
        raise ValueError(f"input_ids of shape {shape}: expected [B, N]")
    ids, known = found["input_ids"], model.get_input_embeddings().num_embeddings
    if bool(((ids < 0) | (ids >= known)).any()):
        few, many = int(ids.min()), int(ids.max())
        raise ValueError(f"ids from {few} to {many}: expected 0 to {known - 1}")
    if "position_ids" in found:
        raise ValueError(
            "position_ids: those of a context and of what comes behind it are the model's own, "
            "leave them out"
        )
    found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
    return found


def _lasting(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """What later turns must be told: all that goes token by token, and grids of pictures."""
    known = given.keys() & {*TOKENWISE, *GRIDS}
    return {k: x for k, x in given.items() if k in known and isinstance(x, Tensor)}
