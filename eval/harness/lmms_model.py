"""The model that `mmkv.eval.harness.lmms_eval` registers; only lmms-eval imports this file."""

# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from mmkv.chat import load, max_positions, on_device
from mmkv.eval.harness.arguments import check_batch_size, harness_arguments
from mmkv.eval.prompts import encode
from mmkv.loading.names import DEFAULT_MODEL
from mmkv.wrapping import wrap

_DEFAULTS = {"max_new_tokens": 1024, "num_beams": 1}
_PASSED = ("max_new_tokens", "num_beams", "temperature", "top_p")


class MMKV(lmms):
    """A model of transformers with a compressed cache.

    Args:
        pretrained, device, dtype, device_map: as for `mmkv.chat.load`.
        policy, budget, profile: as for `mmkv.wrap`.
        batch_size: requests at once.
        options: `memory`, the policy's, and `plugin`: a Python file with policies or parts of
            your own.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        policy: str = "condense",
        budget: float | int | str | None = None,
        profile: str | None = None,
        batch_size: int | str = 1,
        device: str | None = "auto",
        dtype: str = "auto",
        device_map: str | None = None,
        **options: Any,
    ) -> None:
        size, policy_options, unknown = harness_arguments(policy, budget, options)
        if unknown:
            raise ValueError(f"unknown arguments: {', '.join(unknown)}")
        check_batch_size(batch_size)
        super().__init__()
        self.accelerator = Accelerator()
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        device_name = str(self.accelerator.device) if self._world_size > 1 else device or "auto"
        loaded = load(pretrained, device_name, dtype, device_map)
        self.model, self.processor = loaded.model, loaded.processor
        self.tokenizer, self.max_length = loaded.tokenizer, max_positions(self.model) or 2048
        self.device, self.batch_size = self.model.device, int(batch_size)
        wrap(self.model, policy, size, profile=profile, **policy_options)

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return a reply to each request."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[2].items())), []).append(i)
        replies, size = [""] * len(requests), self.batch_size
        chunks = [x[at : at + size] for x in groups.values() for at in range(0, len(x), size)]
        for chunk in tqdm(chunks, disable=self.rank != 0, desc="batches of replies"):
            texts = self._reply([requests[i].args for i in chunk])
            for i, text in zip(chunk, texts, strict=True):
                replies[i] = text
                context, _, options = requests[i].args[:3]
                self.cache_hook.add_partial("generate_until", (context, options), text)
        return replies

    def _reply(self, requests: list[tuple[Any, ...]]) -> list[str]:
        """Return the replies to a batch of requests with the same options."""
        options, texts, pictures = requests[0][2], list[str](), list[Any]()
        template: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        for _, to_messages, _, doc_id, task, split in requests:
            chat = ChatMessages(messages=to_messages(self.task_dict[task][split][doc_id]))
            images, videos, audios = chat.extract_media()
            if videos or audios:
                raise ValueError(f"task {task!r} has videos or sounds: only pictures are read")
            pictures += images
            texts.append(self.processor.apply_chat_template(chat.to_hf_messages(), **template))
        inputs = encode(self.processor, texts, pictures)
        config = _DEFAULTS | {k: options[k] for k in _PASSED if options.get(k) is not None}
        config["do_sample"] = config.get("temperature", 0) > 0
        if not config["do_sample"]:
            config |= {"temperature": None, "top_p": None}
        ids = self.model.generate(**on_device(self.model, inputs), **config)
        new = ids[:, inputs["input_ids"].shape[1] :]
        decoded = self.processor.batch_decode(new, skip_special_tokens=True)
        return [cut(text, options.get("until") or ()) for text in decoded]

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Raise NotImplementedError."""
        raise NotImplementedError("mmkv: only tasks that generate are supported")

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        """Raise NotImplementedError."""
        raise NotImplementedError("mmkv: conversations of several rounds are not supported")


def cut(text: str, stops: str | Iterable[str]) -> str:
    """Return the text before the first stop string, stripped."""
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop)[0] if stop else text
    return text.strip()
