"""Read a prompt once, ask about it many times: a compressed cache without its question.

    context = mmkv.read(model, document, processor=tokenizer)
    text = context.answer("What is it about?")

`read` evicts before any question is known. A question neither evicts tokens of the context nor
changes it: a copy of the cache stores the question's tokens after the kept ones, and those of the
reply as the policy decodes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmkv import context_files, context_texts, digest
from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.calls import CACHE, cache_in, has_pictures, refuse_soft_prompt, unwrap_container
from mmkv.context_files import GRIDS, TOKENWISE
from mmkv.context_texts import ChatState
from mmkv.report import CacheReport

# Output of a processor; a text, or several; chat messages; ids.
Input = Mapping[str, Any] | str | Sequence[str] | Sequence[Mapping[str, Any]] | Tensor
# An input for videos (Qwen2.5-VL), one number for each grid.
_SECONDS = "second_per_grid_ts"
_MAX_NEW_TOKENS = 256


@dataclass(eq=False, repr=False)
class Context:
    """A prompt that was read into a compressed cache.

    Made by `mmkv.read` or `mmkv.load_context`.

    Attributes:
        model: the wrapped model that read it.
        cache: the `CompressedCache` with the kept pairs.
        inputs: the tokens read and the other inputs per token, [B, T], and grids of pictures.
        processor: encodes texts and messages; None where only encoded inputs are used.
        chat: state of the chat, which later texts and messages continue.
        weights: hash of the weights and active adapters that read it, see `mmkv.digest`; None for
            offloaded weights, which cannot be hashed or compared.
    """

    model: Any
    cache: CompressedCache
    inputs: dict[str, Tensor]
    processor: Any = None
    chat: ChatState = ChatState()
    weights: str | None = None

    @property
    def nbytes(self) -> int:
        """`nbytes` of the cache."""
        return self.cache.nbytes

    def report(self) -> CacheReport:
        """Return the report of the cache."""
        return self.cache.report()

    def answer(self, question: Input, *, processor: Any = None, **options: Any) -> Any:
        """Return the model's reply to a question as text: `ask`, decoded by the processor.

        Args:
            question: as for `ask`.
            processor: as for `ask`.
            options: of `model.generate`; `max_new_tokens` is 256 by default.

        Returns:
            A text; a list of them for several questions, or several replies.

        Raises:
            ValueError: as `ask`, or there is no processor.
        """
        processor = self.processor if processor is None else processor
        if not hasattr(processor, "decode"):
            raise ValueError("a reply in text needs a processor: pass processor=, or use ask")
        if not {"max_new_tokens", "max_length", "generation_config"} & options.keys():
            options["max_new_tokens"] = _MAX_NEW_TOKENS
        out = self.ask(question, processor=processor, **options)
        rows = out if isinstance(out, Tensor) else out.sequences
        texts = [processor.decode(row, skip_special_tokens=True).strip() for row in rows]
        several = isinstance(question, list | tuple) and isinstance(question[0], str)
        return texts if several or len(texts) > 1 else texts[0]

    def ask(self, inputs: Input, *, processor: Any = None, **options: Any) -> Any:
        """Return the model's reply to a question about the context, which is not changed.

        Args:
            inputs: the question as a text, a list of texts or chat messages; or what the processor
                or tokenizer returns for the question alone, [Q, q], padded on the left, without
                special tokens at its start; or ids alone. A context of one row answers Q questions
                at once.
            processor: encodes texts and messages; None for the one that the context was read with.
            options: of `model.generate`.

        Returns:
            int64 [Q, n], the new tokens; with `return_dict_in_generate=True` the output of
            `generate`, whose `sequences` are the new tokens.

        Raises:
            ValueError: the context has several rows and the number of questions differs; the model
                was wrapped again since; a text or messages without a processor; several beams or
                replies for a picture after pictures; or an option that the context gives itself.
        """
        question, _ = self._encoded(inputs, processor, ends=True)
        arguments = self.arguments_for(question)
        if given := sorted(options.keys() & arguments.keys()):
            raise ValueError(
                f"{given[0]}: a context gives it to `generate` by itself: leave it out"
            )
        start = arguments["input_ids"].shape[1]
        # What one leaves unset `generate` takes from the next.
        configs = options.get("generation_config"), self.model.generation_config
        n_replies = 1
        for name in ("num_beams", "num_return_sequences"):
            given = (options.get(name), *(getattr(x, name, None) for x in configs))
            n_replies = max(n_replies, next(filter(None, given), 1))
        if n_replies > 1:
            # `generate` counts the context's pictures too when it repeats what a tower returned.
            parts, read = attachment_of(self.model).parts, self.inputs["input_ids"]
            if has_pictures(question) and bool(parts.is_image(read).any()):
                raise ValueError(
                    f"{n_replies} beams or replies for a question with pictures, after a context "
                    "with pictures: ask for one reply, with num_beams=1 and num_return_sequences=1"
                )
            arguments[CACHE].batch_repeat_interleave(n_replies)  # as `generate` does with tokens
        out = self.model.generate(**arguments, **{"use_cache": True, **options})
        if isinstance(out, Tensor):
            return out[:, start:]
        out.sequences = out.sequences[:, start:]
        return out

    def arguments_for(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `generate` for a question, with a copy of the cache."""
        self._check_weights()
        cache = copy.deepcopy(self.cache)
        cache.context_length = cache.get_seq_length()
        return self._with_context(inputs, cache, asks=True)

    def append(
        self, inputs: Input, *, processor: Any = None, prefill_chunk_size: int | None = None
    ) -> None:
        """Read more pages or frames, which compete with the kept tokens under the same budget.

        Args:
            inputs: as for `ask`, as many rows as the context has.
            processor: as for `ask`.
            prefill_chunk_size: how many tokens to read at a time; None: all at once.

        Raises:
            ValueError: another number of rows, or a text or messages without a processor.
        """
        self._check_weights()
        new, chat = self._encoded(inputs, processor, ends=False)
        # A copy, so that an interruption leaves the context as it is.
        arguments = self._with_context(new, copy.deepcopy(self.cache), asks=False)
        self.cache = _read(self.model, arguments, prefill_chunk_size)
        self.inputs, self.chat = _turn_inputs(arguments), chat

    def _check_weights(self) -> None:
        """Check that the model is wrapped, with the weights and adapters that read the context.

        Raises:
            ValueError: it is not.
        """
        now = weights_of(self.model)
        if self.weights not in (None, now):
            raise ValueError(
                "this context was read with other weights or adapters than the model has now: "
                "activate those again, or read the prompt again"
            )

    def _encoded(
        self, inputs: Input, processor: Any, *, ends: bool
    ) -> tuple[Mapping[str, Any], ChatState]:
        processor = self.processor if processor is None else processor
        return context_texts.encode(inputs, processor, self.chat, ends=ends)

    def __repr__(self) -> str:
        rows, seen = self.inputs["attention_mask"].shape
        what = f"{type(self.model).__name__}, {rows} x {seen} tokens, {self.nbytes} bytes"
        return f"Context({what}, {self.cache.plan.describe()})"

    def _with_context(
        self, inputs: Mapping[str, Any], cache: CompressedCache, *, asks: bool
    ) -> dict[str, Any]:
        """Return the arguments of `generate`: old and new tokens, the new pictures, and the cache.

        If it `asks`, a context of one row is repeated for all rows of `inputs`.
        """
        new_inputs = _tensors(inputs, self.model)
        earlier, n_new = self.inputs, len(new_inputs["input_ids"])
        rows = len(earlier["input_ids"])
        if rows != n_new and (rows != 1 or not asks):
            raise ValueError(
                f"{n_new} rows for a context of {rows}: give one row for each row of the context"
                + (", or read one row and ask many questions" if asks else "")
            )
        grids = [name for name in new_inputs if name in GRIDS]
        if grids and n_new > 1:
            raise ValueError(
                f"{grids[0]} for {n_new} rows: with pictures in the question, ask one row at a time"
            )
        if n_new != rows:
            cache.batch_repeat_interleave(n_new)
            earlier = {name: torch.cat([x] * n_new) for name, x in earlier.items()}
        cache.rope_deltas = None  # positions are counted from all tokens and grids
        arguments: dict[str, Any] = {**new_inputs, CACHE: cache}
        if grids:
            arguments |= _features(self.model, arguments)
        parts = earlier, new_inputs
        for name in {*earlier, *new_inputs} & GRIDS.keys():
            arguments[name] = torch.cat([x[name] for x in parts if name in x])
        for name in {*earlier, *new_inputs} & TOKENWISE.keys():
            text = [torch.zeros_like(x["input_ids"]) for x in parts]  # whose types are 0
            pieces = [x.get(name, of_text) for x, of_text in zip(parts, text, strict=True)]
            arguments[name] = torch.cat(pieces, dim=1)
        return arguments

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the context to a safetensors file; `mmkv.load_context` reads it.

        Raises:
            ValueError: some layers have linear attention, or heads are spread over processes.
        """
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"expected the path of a file, not a {type(path).__name__}")
        self._check_weights()
        if self.weights is None:
            raise ValueError("a context of offloaded weights cannot be saved: load the model whole")
        chat = asdict(self.chat)
        context_files.save(path, self.model, self.weights, self.cache, self.inputs, chat)


def read(
    model: nn.Module, inputs: Input, *, processor: Any = None, prefill_chunk_size: int | None = None
) -> Context:
    """Read a prompt without its question into a compressed cache, to ask about it many times.

    Args:
        model: a wrapped model.
        inputs: what its processor returns for the prompt: input_ids [B, N], attention_mask, and
            pixel values and the other inputs of pictures; or ids alone, [N] or [B, N]; or a text, a
            list of texts, or chat messages. Later texts continue the last message, the user's.
        processor: the model's processor or tokenizer, for texts and messages, here and whenever
            a question is asked; where it has a chat template, a text is a user's message.
        prefill_chunk_size: how many tokens to read at a time; None: all at once.

    Raises:
        ValueError: the model is not wrapped, there are no input_ids, or a text or messages without
            a processor.
    """
    attachment_of(model)  # raises ValueError for a model that is not wrapped
    inner = unwrap_container(model)
    refuse_soft_prompt(model)
    encoded, chat = context_texts.encode(inputs, processor, None, ends=False)
    tensors = _tensors(encoded, inner)
    cache = _read(inner, tensors, prefill_chunk_size)
    return Context(inner, cache, _turn_inputs(tensors), processor, chat, weights_of(inner))


def weights_of(model: Any) -> str | None:
    """Return the hash of a wrapped model's weights and adapters; None if they are offloaded."""
    config = attachment_of(model).parts.config
    with suppress(NotImplementedError):
        return digest.of_model(model, config)
    return None


def load_context(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    processor: Any = None,
) -> Context:
    """Read a context from a file that `Context.save` wrote.

    Args:
        path: the file; no code in it is run.
        model: the model that read it, wrapped in the same way.
        processor: as for `read`.

    Raises:
        ValueError: the file is no context, is damaged, or is of another model, policy or budget; or
            the model's heads are spread over processes. The message names the file.
    """
    inner = unwrap_container(model)
    refuse_soft_prompt(model)
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"expected the path of a context's file, not a {type(path).__name__}")
    cache, inputs, chat, weights = context_files.load(path, inner)
    return Context(inner, cache, inputs, processor, ChatState(**chat), weights)


def _read(model: Any, arguments: dict[str, Any], chunk: int | None) -> CompressedCache:
    """Run a prompt, or more of it, through the model; return its cache."""
    if chunk is not None and not (isinstance(chunk, int) and chunk > 0):
        raise ValueError(f"prefill_chunk_size={chunk!r}: expected a number of tokens, 1 or more")
    out = model.generate(
        **arguments,
        max_new_tokens=1,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        stop_strings=None,  # of the generation config, as token healing; they need a tokenizer
        token_healing=False,
        prefill_chunk_size=chunk,
        use_cache=True,
        return_dict_in_generate=True,
    )
    return cache_in(out)


@torch.no_grad()
def _features(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the tower's output for new pictures with grids (Qwen), whose pixels are removed.

    Positions need the grids of all pictures, and the tower needs those of the new ones only.
    """
    features: dict[str, Any] = {}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels in inputs:
            if not hasattr(model, "_supports_mm_encoder_outputs"):
                raise ValueError(f"{pixels} after a context need transformers 5.18 or newer")
            encode = getattr(model, f"get_{kind}_features")
            grid = inputs[f"{kind}_grid_thw"]
            features[kind] = encode(inputs.pop(pixels), grid, return_dict=True)
    return {"mm_encoder_outputs": features} if features else {}


def _tensors(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return inputs on the model's device, pixels in its dtype, with an attention mask."""
    tensors = dict(inputs)
    if isinstance(seconds := tensors.get(_SECONDS), list):
        tensors[_SECONDS] = torch.tensor(seconds)
    if model.device.type != "meta":  # if all weights are offloaded, accelerate moves the inputs
        tensors |= {k: x.to(model.device) for k, x in tensors.items() if isinstance(x, Tensor)}
    # Processors return float32, which not every vision tower converts (Llama 4).
    tensors |= {k: x.to(model.dtype) for k, x in tensors.items() if k.startswith("pixel_values")}
    if "input_ids" not in tensors:
        raise ValueError(f"there are no input_ids among {sorted(inputs)}")
    if not isinstance(tensors["input_ids"], Tensor):
        raise ValueError(
            f"input_ids is a {type(tensors['input_ids']).__name__}: expected a tensor [B, N], as "
            'processors return with return_tensors="pt"'
        )
    if tensors["input_ids"].ndim != 2 or not tensors["input_ids"].numel():
        shape = tuple(tensors["input_ids"].shape)
        raise ValueError(f"input_ids of shape {shape}: expected [B, N], with tokens")
    ids, n_ids = tensors["input_ids"], len(model.get_input_embeddings().weight)
    if bool(((ids < 0) | (ids >= n_ids)).any()):
        lowest, highest = int(ids.min()), int(ids.max())
        raise ValueError(
            f"ids from {lowest} to {highest}: expected 0 to {n_ids - 1}; encode with this model's "
            "tokenizer"
        )
    if "position_ids" in tensors:
        raise ValueError(
            "position_ids: a context uses the model's own positions: leave position_ids out"
        )
    mask = tensors.setdefault("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)}: expected that of input_ids, "
            f"{tuple(ids.shape)}"
        )
    return tensors


def _turn_inputs(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the inputs that later turns need too: those per token, and grids of pictures."""
    names = {*TOKENWISE, *GRIDS}
    return {k: x for k, x in inputs.items() if k in names and isinstance(x, Tensor)}
