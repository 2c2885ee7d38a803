"""One answer of the image chat, token by token, and what its cache keeps of the prompt."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import LogitsProcessor

from mmkv import chat, picture
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.layer import CompressedLayer, nbytes
from mmkv.calls import CACHE, cache_in
from mmkv.terminal import of_bytes

if TYPE_CHECKING:
    from .conversation import Settings

Inputs = dict[str, Tensor]  # output of a processor
Shares = NDArray[np.float32]


@dataclass(frozen=True)
class Side:
    """State of one of the two answers."""

    text: str = ""
    tokens: int = 0
    first: float | None = None  # seconds of computation until the first token
    rate: float | None = None  # tokens a second after the first
    nbytes: int = 0  # of the cache
    full_nbytes: int = 0  # of a full cache of the same tokens
    kept: float = 1.0  # share of the prompt's key-value pairs
    compressed: bool = False  # whether its cache evicts

    @property
    def size(self) -> str:
        """The cache's bytes beside a full one's; if it is no smaller, the text says why."""
        text = of_bytes(self.nbytes, self.full_nbytes)
        short = self.compressed and self.nbytes >= self.full_nbytes
        return f"{text}, prompt too short to save memory" if short else text


class Answer:
    """One of a turn's two answers, token by token; it continues this side's last answer.

    Attributes:
        prompt: inputs of the whole conversation.
        reads_again: True if the whole conversation is read again, without the last answer's cache.
        cache: the model's cache; None before the first token.
        done: True once no token will follow.
    """

    def __init__(
        self,
        loaded: chat.Loaded,
        model: Any,
        before: Answer | None,
        question: str,
        pictures: Sequence[Image.Image],
        settings: Settings,
    ) -> None:
        """Prepare the prompt, with new pictures; a ValueError if it exceeds the model's length."""
        self.model, self._loaded = model, loaded
        self.cache: Any = None
        self.done = self.reads_again = False
        earlier = list[dict[str, Any]]()
        if before is not None:
            earlier = [*before._messages, loaded.message(before.side().text, role="assistant")]
        messages = self._messages = [*earlier, loaded.message(question, pictures)]
        if loaded.processor.chat_template is None:
            messages = [{"role": "user", "content": "\n".join(x["content"] for x in messages)}]
        self.prompt = inputs = chat.encode_messages(loaded, messages)
        self._ids = ids = inputs["input_ids"][0].cpu()  # the answer's tokens are appended
        self._start, self._seconds = len(ids), list[float]()
        needed = len(ids) + settings.max_new_tokens
        limit = chat.max_positions(loaded.model)
        if limit is not None and needed > limit:
            raise ValueError(
                f"the conversation and a new answer take up to {needed} tokens, the model reads "
                f"{limit}: clear the conversation, or ask for fewer new tokens"
            )
        options = generation(settings, loaded.model.device)
        if before is not None:
            seen = before._ids[:-1]
            self.reads_again = before.model is not model or not torch.equal(ids[: len(seen)], seen)
        if before is not None and not self.reads_again:
            # The cache is a copy, so that an error leaves the conversation unchanged.
            options[CACHE] = copy.deepcopy(before.cache)
            # Inputs per picture (dimension 0) are of the new ones: the cache has the earlier ones.
            new = chat.encode(loaded, "", pictures) if pictures else {}
            inputs = {k: x for k, x in inputs.items() if x.shape == (1, len(ids))} | {
                k: x for k, x in new.items() if x.shape != new["input_ids"].shape
            }
        self._steps = _steps(model, {**inputs, **options})

    def step(self) -> bool:
        """Generate one more token; return False if the answer had ended."""
        start = time.perf_counter()
        if result := next(self._steps, None):
            self._ids, self.cache = result
            self._seconds.append(time.perf_counter() - start)
        self.done = result is None
        return not self.done

    def close(self) -> None:
        """Stop generating."""
        self._steps.close()

    def side(self) -> Side:
        """Return the state of the answer."""
        if self.cache is None:
            return Side()
        reply_ids, seconds = self._ids[self._start :], self._seconds
        text: str = self._loaded.processor.decode(reply_ids, skip_special_tokens=True)
        rate = (len(seconds) - 1) / sum(seconds[1:]) if len(seconds) > 1 else None
        used_nbytes = full_nbytes = sum(map(nbytes, self.cache.layers))
        kept, compressed = 1.0, False
        if isinstance(self.cache, CompressedCache):
            report, compressed = self.cache.report(), not self.cache.plan.keeps_all
            full_nbytes, kept = report.full_nbytes, report.prompt_fraction
        text = text.strip().removesuffix("�")
        first = seconds[0]
        return Side(text, len(seconds), first, rate, used_nbytes, full_nbytes, kept, compressed)


def generation(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return options of `generate` for these settings; sampling starts with their seed."""
    options: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "top_k"))
    options |= {"max_new_tokens": settings.max_new_tokens, "do_sample": False}
    if settings.temperature:
        options["logits_processor"] = [_Draw(settings.temperature, settings.seed, device)]
    return options


class _Draw(LogitsProcessor):
    """Leaves only a token sampled at a temperature; both sides use the same random numbers."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V]: 0 for the sampled token, -inf for the others."""
        probabilities = torch.softmax(scores.float() / self.temperature, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


def _steps(model: Any, options: dict[str, Any]) -> Generator[tuple[Tensor, Any]]:
    """Generate; at each token, yield the ids of prompt and answer, int64 [N], and the cache.

    `model.generate` runs in a thread that waits after every token until the next one is requested.
    """
    results: SimpleQueue[Tensor | BaseException | None] = SimpleQueue()
    requested, ended, cache = threading.Semaphore(0), False, None

    def remember(module: Any, args: Any, output: Any) -> None:
        nonlocal cache
        cache = cache_in(output)

    def pause(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not ended:
            results.put(input_ids[0].cpu())  # waits for the device, so that its time is measured
            requested.acquire()
        return torch.full((len(input_ids),), ended, device=input_ids.device)

    def run() -> None:
        try:
            model.generate(**options, stopping_criteria=[pause])
            results.put(None)
        except BaseException as error:
            results.put(error)

    hook = model.register_forward_hook(remember)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while (tokens := results.get()) is not None:
            if isinstance(tokens, BaseException):
                raise tokens
            yield tokens, cache
            requested.release()
    finally:
        ended = True
        requested.release()
        thread.join()
        hook.remove()


@dataclass(frozen=True)
class Word:
    """A token of the prompt, or all `tokens` of a picture, with `text` ""."""

    text: str
    layers: int | None  # number of layers in which a head keeps it; None for a picture
    tokens: int
    kept: float  # share of heads and layers that keep it


@dataclass(frozen=True)
class Kept:
    """What a compressed cache keeps, after the prompt and before the answer."""

    layers: list[int]  # indices of the compressed layers
    sizes: list[float]  # of each layer: tokens that a head keeps, mean over heads
    seen: int  # tokens of the prompt
    words: list[Word]  # the prompt, in order
    patches: list[Shares]  # of each layer [P, rows, cols]: share of heads that keep a patch
    pictures: list[Image.Image]  # as the model sees them; [] if their patches are not known
    problem: str | None  # why the patches are not known

    @property
    def mean(self) -> Shares:
        """Mean of the last picture's `patches` over layers, float32 [rows, cols]."""
        return np.asarray(np.mean(self.patches, axis=0)[-1], dtype=np.float32)


def kept_of(
    loaded: chat.Loaded, prompt: Inputs, cache: Any, pictures: Sequence[Image.Image]
) -> Kept:
    """Return what a compressed cache keeps of a prompt with these pictures, in order."""
    compressed = [i for i, x in enumerate(cache.layers) if isinstance(x, CompressedLayer)]
    seen = prompt["input_ids"].shape[1]
    kept = [cache.shares(i)[0, :, :seen].cpu() for i in compressed]
    image, shares = chat.image_mask(loaded, prompt), torch.stack(kept).mean(dim=1)  # [N], [L, N]
    share, layers = shares.mean(dim=0).tolist(), (shares > 0).sum(dim=0).tolist()
    words: list[Word] = []
    for is_image, run in itertools.groupby(range(seen), image.tolist().__getitem__):
        run_tokens = list(run)
        if is_image:
            words.append(Word("", None, len(run_tokens), fmean(share[i] for i in run_tokens)))
            continue
        texts = loaded.processor.batch_decode(prompt["input_ids"][0, run_tokens, None])
        words += [Word(x, layers[i], 1, share[i]) for x, i in zip(texts, run_tokens, strict=True)]
    patches, problem, shown = list[Shares](), None, list[Image.Image]()
    if pictures:
        try:
            patches = [picture.kept_patches(x, image, len(pictures)) for x in kept]
            shown, pixels = list(pictures), prompt.get("pixel_values")
            if pixels is not None and pixels.ndim == 4 and len(pixels) == len(pictures):
                arrays, processor = pixels.float().cpu().numpy(), loaded.processor.image_processor
                pairs = zip(pictures, arrays, strict=True)
                shown = [picture.as_seen(x, y, processor) for x, y in pairs]
        except ValueError as error:
            problem = str(error)
    sizes = [x.sum(dim=1).mean().item() for x in kept]
    return Kept(compressed, sizes, seen, words, patches, shown, problem)
