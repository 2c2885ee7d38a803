"""Encoding of samples as a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmkv.chat import Loaded, max_positions, on_device, split_inputs
from mmkv.context_texts import adds_special, left_padded

from .samples import Sample, read_image

_LEAST_ROOM = 64  # tokens to which a prompt may be cut


class Encoder:
    """Encoder of samples by a transformers processor, or by a text model's tokenizer. Prompts of
    samples with `truncate` are cut in their middle to fit `max_length` tokens."""

    def __init__(self, processor: Any, max_length: int | None = None) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.max_length = max_length
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the prompts as one left-padded batch of tensors."""
        texts = [self.render(s, self.fit(s)) for s in samples]
        pictures = [x for s in samples for x in s.images]
        images = [read_image(x) if isinstance(x, str | Path) else x for x in pictures]
        if images and self.processor is self.tokenizer:
            raise ValueError(f"sample {samples[0].id}: has pictures, but the model reads none")
        return encode(self.processor, texts, images)

    def apart(self, samples: Sequence[Sample]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return contexts and questions as two left-padded batches. A context is what a prompt and
        the same prompt without its question begin with. Raises ValueError if there is none."""
        empty = [replace(s, prompt=_context_of(self.fit(s), s), truncate=False) for s in samples]
        prompts, bare = self.batch(samples), self.batch(empty)
        by_token = [name for name, x in prompts.items() if x.shape == prompts["input_ids"].shape]

        def row(batch: dict[str, Any], i: int) -> dict[str, Any]:
            mask = batch["attention_mask"][i].bool()
            return {name: batch[name][i : i + 1, mask] for name in by_token}

        splits = [split_inputs(row(prompts, i), row(bare, i)) for i in range(len(samples))]
        pad = self.tokenizer.pad_token_id
        contexts, questions = (left_padded(part, pad) for part in zip(*splits, strict=True))
        return {**prompts, **contexts}, questions

    def render(self, sample: Sample, prompt: str, answer: str | None = None) -> str:
        """Return the prompt as text up to where the reply starts, or with `answer` as the reply."""
        template = getattr(self.processor, "chat_template", None)
        if not (sample.chat and template):
            if sample.turns:
                raise ValueError("the model has no chat template: give it single texts")
            mark = getattr(self.processor, "image_token", "<image>") + "\n"
            text = mark * len(sample.images) + prompt
            if answer is None:
                return text
            return text + ("" if text[-1:].isspace() else " ") + answer

        def content(text: str, images: int = 0) -> Any:
            if self.processor is self.tokenizer:  # templates of text models take plain text
                return text
            return [{"type": "image"}] * images + [{"type": "text", "text": text}]

        messages = [{"role": role, "content": content(text)} for role, text in sample.turns]
        messages.append({"role": "user", "content": content(prompt, len(sample.images))})
        if answer is not None:
            messages.append({"role": "assistant", "content": content(answer)})
        from jinja2 import TemplateError

        try:
            return self.processor.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer is None
            )
        except TemplateError as error:
            raise ValueError(f"prompt {sample.id}: {error}") from None

    def answer(self, sample: Sample) -> list[int]:
        """Return token ids of the first reference answer as they follow the prompt.

        Tokens that the template adds after the answer are left out. [] without an answer.
        """
        if not sample.answers or not sample.answers[0].strip():
            return []
        # Only the prompt's end affects how the answer is split into tokens.
        prompt, answer = sample.prompt[-400:], sample.answers[0].strip()
        before = self.render(sample, prompt)
        whole = self.render(sample, prompt, answer)
        end = whole.rfind(answer)
        if not whole.startswith(before) or end < len(before):
            return self._ids(" " + answer, special=False)
        whole = whole[: end + len(answer)]
        special = adds_special(self.tokenizer, before)
        first, ids = self._ids(before, special), self._ids(whole, special)
        if special and ids[-1:] == [self.tokenizer.eos_token_id] == first[-1:]:
            first, ids = first[:-1], ids[:-1]  # this tokenizer ends every text with it
        if ids[: len(first)] == first:
            return ids[len(first) :]
        return self._ids(whole[len(before) :], special=False)

    def fit(self, sample: Sample) -> str:
        """Return the prompt's text; one that is too long loses its middle, as in LongBench, if the
        sample allows it. Raises ValueError if little would be left."""
        if not sample.truncate or self.max_length is None:
            return sample.prompt
        # The chat template may add up to 32 tokens.
        room = self.max_length - sample.max_new_tokens - 32
        ids = self._ids(sample.prompt, special=False)
        if len(ids) <= room:
            return sample.prompt
        if room < _LEAST_ROOM:
            raise ValueError(
                f"sample {sample.id}: {self.max_length} tokens leave fewer than {_LEAST_ROOM} for "
                f"its prompt, beside {sample.max_new_tokens} of a reply and 32 of a chat template: "
                "give a larger --max-length, or a model of more positions"
            )
        return self.decode(ids[: room // 2]) + self.decode(ids[-(room // 2) :])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _ids(self, text: str, special: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]


def encode(processor: Any, texts: Sequence[str], images: Sequence[Any]) -> dict[str, Any]:
    """Return rendered prompts and all of their pictures as one left-padded batch of tensors."""
    tokenizer = getattr(processor, "tokenizer", processor)
    options: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    options["add_special_tokens"] = adds_special(tokenizer, texts[0])
    encoded = processor(text=texts, **({"images": images} if images else {}), **options)
    return {k: v for k, v in encoded.items() if k != "token_type_ids"}


def _context_of(prompt: str, sample: Sample) -> str:
    """Return a prompt without its question. Raises ValueError if it does not end with one."""
    if not sample.asked:
        raise ValueError(
            f"sample {sample.id}: its prompt is not a context and then a question, so that the "
            "question cannot be hidden"
        )
    if not prompt.endswith(sample.asked):
        raise ValueError(f"sample {sample.id}: its question is longer than half of the prompt")
    return prompt.removesuffix(sample.asked)


def check_positions(model: Any, what: str, n_prompt: int, n_reply: int) -> None:
    """Raise ValueError if a prompt and its reply have more tokens than the model has positions.

    `what` names the prompt in the message.
    """
    positions = max_positions(model)
    if positions is not None and n_prompt + n_reply > positions:
        raise ValueError(
            f"{what} has {n_prompt:,} tokens, and with {n_reply} of a reply more than the model's "
            f"{positions:,} positions: shorten it"
        )


def encode_samples(loaded: Loaded, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the model's inputs of each sample."""
    encoder = Encoder(loaded.processor, max_positions(loaded.model))
    return [on_device(loaded.model, encoder.batch([sample])) for sample in samples]
