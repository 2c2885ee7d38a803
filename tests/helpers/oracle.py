"""The policies and options that the oracles run, and generation that says what was held."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import mmkv
from helpers import masking
from helpers.masking import recorded
from helpers.models import ragged_turn
from mmkv.cache.forward_pass import Reading
from mmkv.policy import Policy

NEW = 9
ROWS = {"one": (96,), "padded": (90, 41, 66)}


@dataclass(frozen=True)
class Variant:
    """A policy with options that make its parts show on a short prompt."""

    policy: str
    options: tuple[tuple[str, Any], ...] = ()
    budget: float | int | None = 0.3

    def __str__(self) -> str:
        text = "-".join([self.policy, *(f"{k}={v}" for k, v in self.options)])
        return text if self.budget == 0.3 else f"{text}-budget={self.budget}"


def short(policy: str) -> dict[str, Any]:
    """Options that let a prompt of some tens of tokens be evicted: small windows, no `least`."""
    made = mmkv.get_policy(policy)
    wanted = {"window": 6, "kernel_size": 3} if made.window_size else {}
    wanted |= {"least": 0} if made.least else {}
    return {name: value for name, value in wanted.items() if name in made.flat()}


def depth(policy: str) -> int | None:
    """Layers of a model whose layers a policy can size, if more than a tiny model has.

    SqueezeAttention sorts layers into three groups, and of fewer layers all are of one size.
    """
    return 3 if mmkv.get_policy(policy).layers.name == "squeeze" else None


COMPOSED = [
    Variant("xkv", (("heads", "adaptive"),)),
    Variant("xkv", (("allocation", "one-pass"),)),
    Variant("xkv", (("retention", 0.6),), None),
    Variant("prefixkv", (("merge", "position"),)),
    Variant("prefixkv", (("merge", "feature"), ("distance", 4))),
    Variant("prefixkv", (("allocation", "mini-prefill"), ("distance", 3)), 0.5),
    Variant("prefixkv", (("average_heads", False), ("heads", "adaptive"), ("distance", 2))),
    Variant("elastic", (("distance", 4),), 0.6),
    Variant("squeeze", (("base", "local"),)),
    Variant("squeeze", (("base", "streaming"),)),
    Variant("h2o", (("heads", "adaptive"),)),
    Variant("h2o", (("sinks", 3), ("recent", 0.2))),
    Variant("h2o", (("decode", "ratio"), ("distance", 5))),
    Variant("local", (), 30),
    Variant("h2o", (), 44),
    Variant("snapkv", (), 44),
    Variant("streaming", (("merge", "position"),)),
    Variant("snapkv", (("sinks", 4), ("average_heads", True))),
    Variant("snapkv", (("heads", "global"), ("decode", "rounds"), ("every", 4), ("latest", 3)), 44),
    Variant("elastic", (("heads", "global"), ("average_heads", False), ("distance", 4))),
    Variant("kvzip", (("repeated", 17), ("instruction", "7 8 9"))),
    Variant("kvzip", (("heads", "adaptive"), ("layers", "prefix"), ("sinks", 0))),
    Variant("condense", (("heads", "global"), ("chunk", 13), ("sinks", 2))),
    Variant("snapkv", (("merge", "groups"),)),
    Variant("h2o", (("merge", "groups"), ("recent", 0.2))),
    Variant("local", (("merge", "groups"),)),
    Variant("prefixkv", (("merge", "groups"), ("distance", 3))),
    Variant("prefixkv", (("score", "observers"), ("distance", 4))),
    Variant("condense", (("chunk", 13), ("sinks", 2), ("heads", "adaptive"))),
    Variant("condense", (("exact", 0.0), ("newest", 0)), 21),
    Variant("condense", (("decode", "rounds"), ("every", 4), ("latest", 3))),
    Variant("adakv", (("decode", "rounds"), ("every", 3), ("latest", 0))),
    Variant("prefixkv", (("decode", "rounds"), ("every", 2), ("latest", 2)), 24),
    Variant("lagkv", (("lag", 9), ("heads", "adaptive"))),
    Variant("adakv", (("value", "critical"),)),
    Variant("prefixkv", (("value", "residual"), ("average_heads", False), ("distance", 4))),
    # A floor that some rows are above, and some are not.
    Variant("xkv", (("least", 60), ("heads", "adaptive")), 0.2),
    Variant("kvzip", (("least", 60),), 0.2),
    Variant("condense", (("least", 60), ("decode", "rounds"), ("every", 4), ("latest", 3)), 0.2),
]
VARIANTS = [Variant(name) for name in mmkv.list_policies()] + COMPOSED
# Rounds of generated tokens are scored on the host's word: their steps are not replayed.
REPLAYED = [v for v in VARIANTS if ("decode", "rounds") not in v.options]


def options_of(variant: Variant) -> dict:
    return {**short(variant.policy), **dict(variant.options)}


def _reading(policy: Policy) -> set[Any]:
    """How a prompt is scored, sized and evicted: which parts, not which options."""
    parts = policy.score, policy.layers, policy.heads, policy.merge, policy.decode
    mini_prefill = policy.layers.needs == "mini-prefill"
    apart = mini_prefill, policy.score.average_heads, policy.keeps_all
    return {*map(type, parts), *enumerate(apart)}


def _decoding(policy: Policy) -> Any:
    """What a decode step does: slots, head sizes, bias and positions."""
    grouped = policy.merge is not None and policy.merge.name == "groups"
    weighed = policy.decode.name == "fixed" and policy.score.turn_reduction == "sum"
    slots = type(policy.decode), weighed, bool(policy.sinks)
    return *slots, not policy.heads.scope, grouped


def _reading_once() -> list[Variant]:
    """The usual policies, and the variants with a part or a way to read that none before has."""
    found, seen = [], set[Any]()
    for variant in (*map(Variant, FIRST), *VARIANTS):
        ways = _reading(mmkv.get_policy(variant.policy, **options_of(variant)))
        if ways - seen:
            found.append(variant)
        seen |= ways
    return found


def _decoding_once() -> list[Variant]:
    """The first of those that decode in one way."""
    found: dict[Any, Variant] = {}
    for variant in REPLAYED:
        policy = mmkv.get_policy(variant.policy, **options_of(variant))
        found.setdefault((_decoding(policy), type(variant.budget)), variant)
    return list(found.values())


# For what takes long: each way of reading a prompt and of decoding once, whatever the options.
FIRST = ("snapkv", "streaming", "prefixkv", "condense", "adakv", "h2o", "elastic", "xkv")
READING, DECODING = _reading_once(), _decoding_once()
EITHER = READING + [x for x in DECODING if x not in READING]
# Every variant in a padded batch, and some with a single row.
ONE = dict.fromkeys([Variant("streaming"), *DECODING[::4]])
IN_ROWS = [(x, "padded") for x in VARIANTS] + [(x, "one") for x in ONE]
# Policies that decode in different ways.
DECODERS = [v.policy for v in DECODING if not v.options and v.budget == 0.3]
# For `make test`: these, and one of each way to size layers and heads.
USUAL = sorted({*DECODERS, "adakv", "prefixkv", "snapkv", "squeeze", "vlcache", "xkv"})


def generate(model, inputs, new=NEW, **kwargs):
    """Greedy, with what each layer held after the prefill and after each step."""
    with recorded(model) if mmkv.is_wrapped(model) else nullcontext([]) as held:
        found = masking.generate(model, inputs, new=new, **kwargs)
    return *found, [list(layers.values()) for layers in held]


@dataclass
class Talk:
    """A conversation: logits [B, V] of each pass, what was held after it, and tokens and mask.

    `feeds` are the inputs of each pass, as `masked_logits` takes them.
    """

    logits: list[torch.Tensor]
    held: list[list[torch.Tensor]]
    words: list[torch.Tensor]
    feeds: list[dict[str, torch.Tensor]]
    mask: torch.Tensor
    cache: Any


def ragged_talk(model, inputs, turns, rows=None, new=4, pictures=(), **options) -> Talk:
    """Turns of `turns` [T][B] new tokens behind a prompt, left-padded, each answered by `new`.

    `rows` are the rows of the batch that talk, all by default; a single one has no padding. In the
    first later turn the rows `pictures` show one more each.
    """
    rows = range(len(inputs["input_ids"])) if rows is None else rows
    talk = Talk([], [], [], [], inputs["attention_mask"], None)
    for i in range(len(turns) + 1):
        if i:
            shown = pictures if i == 1 else ()
            more: Any = {"seed": 10 + i, "rows": rows, "pictures": shown}
            inputs = ragged_turn(inputs, talk.words[-1], turns[i - 1], **more)
        seen = 0 if talk.cache is None else talk.cache.get_seq_length()
        pixels = {k: v for k, v in inputs.items() if k == "pixel_values"}
        names = "input_ids", "attention_mask"
        talk.feeds.append({**{k: inputs[k][:, seen:] for k in names}, **pixels})
        logits, words, talk.cache, held = generate(
            model, inputs, new=new, past_key_values=talk.cache, **options
        )
        talk.feeds += [{"input_ids": words[:, t : t + 1]} for t in range(new - 1)]
        talk.logits += list(logits)
        talk.held += held
        talk.words.append(words)
        talk.mask = inputs["attention_mask"]
    return talk


def same_as_alone(together: Talk, alone: Talk, b: int, atol: float = 1e-4) -> None:
    """Row `b` of a batch says, and holds after each pass, what it does alone."""
    for mine, single in zip(together.words, alone.words, strict=True):
        assert torch.equal(mine[b : b + 1], single)
    for mine, single in zip(together.logits, alone.logits, strict=True):
        torch.testing.assert_close(mine[b : b + 1], single, atol=atol, rtol=0)
    n_new = together.words[-1].shape[1]
    valid = torch.nn.functional.pad(together.mask[b].bool(), (0, n_new), value=True)
    places = valid.nonzero()[:, 0]
    assert len(together.held) == len(alone.held)
    for passes in zip(together.held, alone.held, strict=True):
        for mine, single in zip(*passes, strict=True):
            for h, head in enumerate(single[0]):
                expected = places[head[head >= 0]]
                assert torch.equal(mine[b, h][mine[b, h] >= 0], expected)


def prefilled(model, inputs, policy, budget=None, **options):
    """The cache of a wrapped model that has read a prompt."""
    with mmkv.wrapped(model, policy, budget, **options), torch.no_grad():
        return model(**inputs, use_cache=True).past_key_values


@contextmanager
def measured_similarity():
    """What SqueezeAttention measures of the next prompt: by layer, similarity [B]."""
    found: dict[int, torch.Tensor] = {}
    compare = Reading.compare

    def record(self, layer_idx, similarity, tokens):
        found[layer_idx] = similarity
        compare(self, layer_idx, similarity, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "compare", record)
        yield found


def naive_attention(query, key, *, scale, softcap=None, mask=None, log_weights=None):
    """Attention `[Q, N]` of one head's last `Q` tokens, in float64, one query after the other.

    A query sees itself and what is before it, or what `mask` `[Q, N]` says; `log_weights` is `[N]`.
    """
    Q, N = len(query), len(key)
    attention = torch.zeros(Q, N, dtype=torch.float64)
    for i in range(Q):
        seen = [j for j in range(N) if (j <= N - Q + i if mask is None else mask[i, j])]
        logits = [scale * float(key[j].double() @ query[i].double()) for j in seen]
        if softcap is not None:
            logits = [softcap * math.tanh(x / softcap) for x in logits]
        if log_weights is not None:
            logits = [x + float(log_weights[j]) for x, j in zip(logits, seen, strict=True)]
        total = sum(math.exp(x) for x in logits)
        for j, x in zip(seen, logits, strict=True):
            attention[i, j] = math.exp(x) / total
    return attention


def pool(values: list[float], kernel_size: int, pooling: str | None) -> list[float]:
    if pooling is None:
        return values
    half, pooled = kernel_size // 2, list[float]()
    for j in range(len(values)):
        inside = values[max(0, j - half) : j + half + 1]
        pooled.append(sum(inside) / kernel_size if pooling == "avg" else max(inside))
    return pooled


def window_scores(attention, window, kernel, pooling, recent=False) -> list[float]:
    """SnapKV's scores of the tokens before the window, by one head's group [G, N, N]."""
    shares = torch.arange(1.0, window + 1) if recent else torch.ones(window)
    seen = shares.to(attention.dtype) @ attention[:, -window:, :-window] / shares.sum()
    rows = [pool(row, kernel, pooling) for row in seen.tolist()]
    return [sum(x) / len(rows) for x in zip(*rows, strict=True)]


def top(scores: list[float], n: int) -> set[int]:
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return set(order[:n])
