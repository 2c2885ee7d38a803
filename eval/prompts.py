"""From samples and a user's own prompts to what a model reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.chat import Loaded, adds_special, encode_messages, on_device, split_inputs
from mmkv.loading.models import load_tokenizer

from .samples import DataError, Sample, open_images
from .suites import files

if TYPE_CHECKING:
    from torch import Tensor

Prompt = list[dict[str, Any]]
_SUMMARY = "Summarize the text above in three sentences."
# Topics of the documentation that Python itself holds (PSF licence), and what is asked about each.
_SHIPPED = {
    "objects": _SUMMARY,
    "with": 'When is the "__exit__()" method called? Answer in two sentences.',
    "import": _SUMMARY,
    "naming": "Which exception is raised when a name is not found? Answer in one sentence.",
    "types": "Name the types that the text above describes.",
    "debugger": "How do you break into the debugger at a certain line? Answer in one sentence.",
}
_MOST_LETTERS = 3600  # of a document


class Encoder:
    """Encodes samples by a transformers processor, or a tokenizer for a text model; prompts of
    those with `truncate` are cut in their middle to fit `max_length` tokens."""

    def __init__(self, processor: Any, max_length: int | None = None) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.max_length = max_length
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The prompts as one left-padded batch of tensors."""
        texts = [self.render(s, self.fit(s)) for s in samples]
        images = [image for s in samples for image in open_images(s)]
        if images and self.processor is self.tokenizer:
            raise ValueError(f"sample {samples[0].id}: has pictures, but the model reads none")
        return encode(self.processor, texts, images)

    def apart(self, samples: Sequence[Sample]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Contexts and questions, each left-padded: a context is what a prompt has in common with
        one that asks nothing, pictures included. Raises ValueError where there is none."""
        empty = [replace(s, prompt=_before(self.fit(s), s), truncate=False) for s in samples]
        whole, rest = self.batch(samples), self.batch(empty)
        by_token = [name for name, x in whole.items() if x.shape == whole["input_ids"].shape]

        def row(found: dict[str, Any], i: int) -> dict[str, Any]:
            kept = found["attention_mask"][i].bool()
            return {name: found[name][i : i + 1, kept] for name in by_token}

        pairs = [split_inputs(row(whole, i), row(rest, i)) for i in range(len(samples))]
        pad = self.tokenizer.pad_token_id
        before, behind = (left_padded(part, pad) for part in zip(*pairs, strict=True))
        return {**whole, **before}, behind

    def render(self, sample: Sample, prompt: str, answer: str | None = None) -> str:
        """The prompt as text, up to where the reply starts; with `answer`, also the reply."""
        template = getattr(self.processor, "chat_template", None)
        if not (sample.chat and template):
            mark = getattr(self.processor, "image_token", "<image>") + "\n"
            text = mark * len(sample.images) + prompt
            if answer is None:
                return text
            return text + ("" if text[-1:].isspace() else " ") + answer

        def content(text: str, images: int = 0) -> Any:
            if self.processor is self.tokenizer:  # a text model's template reads plain text
                return text
            return [{"type": "image"}] * images + [{"type": "text", "text": text}]

        messages = [{"role": "user", "content": content(prompt, len(sample.images))}]
        if answer is not None:
            messages.append({"role": "assistant", "content": content(answer)})
        return self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer is None
        )

    def answer(self, sample: Sample) -> list[int]:
        """Token ids of the first reference answer, as they would follow the prompt.

        The template's own tokens behind the answer do not count. [] without an answer.
        """
        if not sample.answers or not sample.answers[0].strip():
            return []
        # Pictures and cut texts are far from the reply: a short stand-in tokenises the same.
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
            first, ids = first[:-1], ids[:-1]  # a tokenizer that closes every text
        if ids[: len(first)] == first:
            return ids[len(first) :]
        return self._ids(whole[len(before) :], special=False)

    def fit(self, sample: Sample) -> str:
        """The prompt's text; of one that is too long its first and last halves, as LongBench cuts
        it, where the sample allows it."""
        if not sample.truncate or self.max_length is None:
            return sample.prompt
        # 32 tokens are left for what the chat template adds.
        room = max(2, self.max_length - sample.max_new_tokens - 32)
        ids = self._ids(sample.prompt, special=False)
        if len(ids) <= room:
            return sample.prompt
        return self.decode(ids[: room // 2]) + self.decode(ids[-(room // 2) :])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special ones left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _ids(self, text: str, special: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]


def encode(processor: Any, texts: Sequence[str], images: Sequence[Any]) -> dict[str, Any]:
    """Rendered prompts and all of their pictures as one left-padded batch of tensors."""
    tokenizer = getattr(processor, "tokenizer", processor)
    how: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    how["add_special_tokens"] = adds_special(tokenizer, texts[0])
    found = processor(text=texts, **({"images": images} if images else {}), **how)
    return {k: v for k, v in found.items() if k != "token_type_ids"}


def left_padded(rows: Sequence[Mapping[str, Tensor]], pad: int) -> dict[str, Tensor]:
    """Rows of one token sequence each, [1, n], as one batch; masks are 0 where there is padding."""
    from torch.nn.utils.rnn import pad_sequence

    fill = dict.fromkeys(rows[0], 0) | {"input_ids": pad}
    return {
        name: pad_sequence([row[name][0] for row in rows], True, fill[name], padding_side="left")
        for name in rows[0]
    }


def _before(prompt: str, sample: Sample) -> str:
    """A prompt without its question, which a cut in its middle leaves whole."""
    if not sample.asked:
        raise ValueError(
            f"sample {sample.id}: its prompt is not a context and then a question, so that the "
            "question cannot be hidden"
        )
    if not prompt.endswith(sample.asked):
        raise ValueError(f"sample {sample.id}: its question is longer than half of the prompt")
    return prompt.removesuffix(sample.asked)


def longest(model: Any) -> int | None:
    """The longest sequence a model was made for, from its text config."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def token_counter(name: str) -> Callable[[str], int]:
    """How many tokens a text has for a model, by its tokenizer alone, which the first one loads."""

    @cache
    def tokenizer() -> Any:
        found = load_tokenizer(name)
        found.model_max_length = 10**9  # no warning: nothing is run on these texts
        return found

    return lambda text: len(tokenizer()(text, add_special_tokens=False)["input_ids"])


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, as conversations. Raises DataError.

    A `.txt` file has one a line, or between lines of three dashes alone. A `.jsonl` file has
    {"prompt": text} a line, or {"messages": [{"role": ..., "content": text}, ...]}.
    """
    if path.suffix == ".jsonl":
        return [_conversation(entry) for entry in files.read_lines(path)]
    if path.suffix != ".txt":
        raise DataError(f"{path}: expected a .txt file, a prompt a line, or .jsonl")
    text = files.read_text(path)
    blocks = re.split(r"(?m)^[ \t]*---[ \t]*$", text)
    if len(blocks) == 1:
        blocks = text.splitlines()
    found = [_said(block.strip()) for block in blocks if block.strip()]
    if not found:
        raise DataError(f"{path}: has no prompts: write one a line")
    return found


def shipped_prompts() -> list[Prompt]:
    """Requests about documents that Python itself holds. Raises DataError."""
    topics, found = files.documentation(), list[Prompt]()
    for name, asked in _SHIPPED.items():
        text = topics[name].strip()
        if len(text) > _MOST_LETTERS:  # whole paragraphs
            text = text[:_MOST_LETTERS].rpartition("\n\n")[0]
        found.append(_said(f"{text}\n\n{asked}"))
    return found


def encode_prompts(
    loaded: Loaded, prompts: Sequence[Prompt] | None, limit: int | None, *, drawn: bool = False
) -> list[dict[str, Any]]:
    """What the model takes for each prompt, as its chat template writes it; by default of the
    shipped ones, or, with `drawn`, about drawn pictures. Raises ValueError if it refuses one."""
    from jinja2 import TemplateError

    from .suites.registry import load_suite

    if prompts is None and drawn:
        return encode_samples(loaded, load_suite("description", limit=limit or len(_SHIPPED)))
    found = list[dict[str, Any]]()
    for i, prompt in enumerate((prompts or shipped_prompts())[:limit], start=1):
        if loaded.places_pictures:
            prompt = [x | {"content": [{"type": "text", "text": x["content"]}]} for x in prompt]
        try:
            found.append(encode_messages(loaded, prompt))
        except (ValueError, TemplateError) as error:
            raise ValueError(f"prompt {i}: {error}") from None
    return found


def encode_samples(loaded: Loaded, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What the model takes for each sample of a suite."""
    encoder = Encoder(loaded.processor, longest(loaded.model))
    return [on_device(loaded.model, encoder.batch([sample])) for sample in samples]


def _said(text: str) -> Prompt:
    return [{"role": "user", "content": text}]


def _conversation(entry: files.Entry) -> Prompt:
    """A line's messages, of text alone."""
    if "messages" not in entry.fields:
        return _said(entry.text("prompt"))
    messages = entry.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise entry.error("messages", "expected a list of messages")
    for message in messages:
        turn = message if isinstance(message, dict) else {}
        if not all(isinstance(turn.get(name), str) for name in ("role", "content")):
            wanted = 'expected {"role": a text, "content": a text} each; leave pictures out'
            raise entry.error("messages", wanted)
    return messages
