"""lm_eval's tasks on compressed caches: a model named `mmkv` for the evaluation harness.

    python -m mmkv.eval.harness.lm_eval --model mmkv --tasks NAME \\
        --model_args pretrained=PATH_OR_ID,policy=xkv,budget=0.2,window=8

takes the options of `lm_eval`; `import mmkv.eval.harness.lm_eval` registers the model for its
Python functions too. Replies are generated from the compressed cache. To score a continuation, the
context is prefilled and compressed, and the continuation is fed token by token by
`mmkv.forcing.score_answers`: a plain forward pass over both would compress nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from mmkv.context_texts import left_padded
from mmkv.eval.harness.arguments import check_batch_size, harness_arguments
from mmkv.forcing import score_answers
from mmkv.loading import models
from mmkv.wrapping import wrap

# The metaclass of HFLM hides its attributes from a type checker.
_Base: Any = HFLM
Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("mmkv")
class MMKV(_Base):
    """A causal model of transformers with a compressed cache.

    Args:
        pretrained: the name of a model that reads text only, as for `mmkv.chat.load`, or a model.
        policy, budget, profile: as for `mmkv.wrap`, which may raise ValueError.
        batch_size: a number; "auto" is not supported.
        kwargs: `memory`, the policy's options, what lm_eval's `hf` takes, and `plugin`: a Python
            file with policies or parts of your own.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str = "condense",
        budget: float | int | None = None,
        profile: str | None = None,
        batch_size: int | str = 1,
        **kwargs: Any,
    ) -> None:
        size, policy_options, hf_args = harness_arguments(policy, budget, kwargs)
        check_batch_size(batch_size)
        if isinstance(pretrained, str):
            source = models.find(pretrained)
            pretrained, hf_args = source.path, {"dtype": source.dtype, **source.options, **hf_args}
        super().__init__(pretrained, batch_size=int(batch_size), **hf_args)
        wrap(self.model, policy, size, profile=profile, **policy_options)

    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood after its context, and whether it is greedy."""
        longest = max((len(continuation) for *_, continuation in requests), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"a continuation has {longest:,} tokens, more than the model's {self.max_length:,} "
                "positions: give a larger max_length if the model allows it, or leave the task out"
            )
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # Sorted by length there is little padding, and the largest batch comes first.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]))
        batch_size = override_bs or int(self.batch_size)
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        for indices in tqdm(batches, disable=disable_tqdm or self.rank != 0):
            rows: list[dict[str, Any]] = []
            for i in indices:  # a context that is too long is cut at its start
                # The last token of a continuation is not fed.
                max_context = max(1, self.max_length + 1 - len(requests[i][2]))
                ids = torch.tensor([requests[i][1][-max_context:]], device=self.device)
                rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            inputs = left_padded(rows, self.tokenizer.pad_token_id or 0)
            scored = score_answers(self.model, inputs, [requests[i][2] for i in indices])
            for i, nll, greedy in zip(indices, scored.nll, scored.greedy, strict=True):
                results[i] = (-nll, greedy)
                if (text := requests[i][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", text, results[i])
        return results


def main() -> None:
    """Run lm_eval's own command line, with the model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
