"""lmms-eval's tasks on compressed caches: a model named `mmkv`, found through an entry point.

    lmms-eval --model mmkv --tasks NAME \\
        --model_args pretrained=PATH_OR_ID,policy=prefixkv,budget=0.2

It is lmms-eval's generic `huggingface` model, wrapped. The entry point (group `lmms_eval.models`)
is `manifest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .variants import plugin_arguments

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest


def manifest() -> ModelManifest:
    """What lmms-eval registers; the class itself is made when it is asked for."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="mmkv", chat_class_path=f"{__name__}.MMKV")


def make_class(base: type) -> type:
    """A model class of lmms-eval whose `model` is wrapped.

    Args:
        base: loads a model, which is then its `model`.
    """

    class MMKV(base):  # type: ignore[misc, valid-type]
        """A model of transformers with a compressed cache.

        Args:
            policy: as for `mmkv.wrap`.
            budget: as for `mmkv.wrap`.
            profile: as for `mmkv.wrap`.
            kwargs: the policy's options, and what the base takes.
        """

        def __init__(
            self,
            policy: str = "prefixkv",
            budget: float | int | str | None = 0.5,
            profile: str | None = None,
            **kwargs: Any,
        ) -> None:
            from mmkv.wrapping import wrap

            size, mine, rest = plugin_arguments(policy, budget, profile, kwargs)
            if rest.get("pretrained") == "builtin":
                from mmkv.builtin import WEIGHTS

                rest["pretrained"] = str(WEIGHTS)
            super().__init__(**rest)
            tokenizer = getattr(self, "_tokenizer", None)
            for owner in (tokenizer, getattr(getattr(self, "processor", None), "tokenizer", None)):
                if owner is not None:
                    owner.padding_side = "left"  # batches end where generation starts
            wrap(self.model, policy, size, profile=profile, **mine)

    MMKV.__module__, MMKV.__qualname__ = __name__, "MMKV"
    return MMKV


def __getattr__(name: str) -> Any:
    if name != "MMKV":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmms_eval.models.chat.huggingface import Huggingface

    made = make_class(Huggingface)
    globals()[name] = made
    return made
