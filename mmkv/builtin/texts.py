"""Long texts with records (`key value`) among filler, with look-up questions and answers.

Everything is deterministic in the seed. All texts are held out, by a checksum of their records:
the built-in model was trained on none of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mmkv.builtin.scenes import Question, belongs

_KEYS = (
    "amber ash bark bay bell birch bolt brass briar brook camp cape cave cedar chalk clay cliff "
    "clover coal coast copper coral cove crane creek crest crow dawn deer delta dove drift dune "
    "dusk eagle elm ember falcon fern field finch fjord flint fog forge fox frost gale garnet gate "
    "glen grove gull harbor hawk hazel heron hill holly iris iron ivory ivy jade jasper juniper "
    "kelp lake lark laurel leaf lily lime linen lotus lynx maple marble marsh meadow mint mist "
    "moon moss nest oak oasis ocean olive onyx opal orchid otter owl pearl pebble pine plum pond "
    "poppy quail quartz rain raven reed ridge robin rose ruby sage sand shore silver slate spring "
    "spruce swan thorn tide topaz trail tulip valley violet willow wren"
)
_VALUES = (
    "anchor apple apron arrow badge bag ball barn basket bean bench bike blanket boat book boot "
    "bottle bowl box bread brick bridge broom brush bucket butter button cabin cake camera candle "
    "cap card carpet cart castle chain chair cheese church clock cloth coat coin comb cookie cup "
    "curtain desk dish door dress drum fan fence fiddle flag flour flute fork frame glass glove "
    "guitar hammer hat helmet honey hook horn hose house jacket jam jar key kite knife ladder lamp "
    "letter lid lock map mask mat milk mirror mug nail needle novel oar oven paddle page pan paper "
    "pasta peach pear pen pepper phone piano pie pillow pipe plate pocket pot purse radio rake "
    "ribbon rice ring rope ruler salt scarf school shelf ship shirt shoe shovel soap sock sofa "
    "spoon stamp stool stove sugar table tent ticket towel tower toy train tray truck vase violin "
    "wagon wallet watch wheel whistle window wool"
)
_SUBJECTS = "wind sun road city river people garden night water sky town day street"
_STATES = "calm old warm cold quiet long bright dark clean small large green slow new"
KEYS, VALUES = tuple(_KEYS.split()), tuple(_VALUES.split())
_TAILS = ("", "", " today", " this year", " in the morning", " at night", " for now", " again")


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A text with records, the records in order, and one question on each."""

    text: str
    records: tuple[tuple[str, str], ...]
    questions: tuple[Question, ...]


def filler(rng: random.Random) -> str:
    """Return one sentence without a record."""
    subjects, states = _SUBJECTS.split(), _STATES.split()
    subject, state = rng.choice(subjects), rng.choice(states)
    kind = rng.randrange(3)
    if kind == 0:
        return f"The {subject} is {state}{rng.choice(_TAILS)}."
    if kind == 1:
        return f"The {subject} and the {rng.choice(subjects)} are {state}{rng.choice(_TAILS)}."
    return f"It is {state} and {rng.choice(states)} by the {subject}{rng.choice(_TAILS)}."


def phrase(key: str, rng: random.Random) -> str:
    """Return one phrasing of the question for the value of `key`."""
    value_phrases = f"What is the value of {key}?", f"Find the value of {key}."
    word_phrases = f"Which word follows {key}?", f"Look up {key}.", f"What comes after {key}?"
    return rng.choice((*value_phrases, *word_phrases))


def answer(key: str, value: str) -> str:
    """Return the right answer: the record itself, the key before the value."""
    return f"{key} {value}."


def make_lookup(seed: int, tokens: int, records: int | None = None) -> Lookup:
    """Return held-out text number `seed`, by default with one record for every 16 tokens.

    Sentences are added until `estimate`, which is exact for these words under the built-in
    tokenizer, would exceed `tokens`.
    """
    if tokens < 32:
        raise ValueError(f"tokens must be at least 32, got {tokens}")
    n_records = max(2, tokens // 16) if records is None else records
    if not 1 <= n_records <= len(KEYS):
        raise ValueError(f"records must be 1 to {len(KEYS)}, got {n_records}")
    rng = random.Random(f"text:heldout:{seed}:{tokens}:{records}")
    pairs: tuple[tuple[str, str], ...] = ()
    while not (pairs and belongs(repr(pairs), "heldout")):
        pairs = tuple((key, rng.choice(VALUES)) for key in rng.sample(KEYS, n_records))
    text = _compose([answer(*pair) for pair in pairs], tokens, rng)
    questions = tuple(Question(text=phrase(k, rng), answer=answer(k, v)) for k, v in pairs)
    return Lookup(text=text, records=pairs, questions=questions)


def estimate(text: str) -> int:
    """Count words and full stops: the tokens of a text made of known words."""
    return len(text.split()) + text.count(".")


def _compose(sentences: list[str], tokens: int, rng: random.Random) -> str:
    left = tokens - sum(map(estimate, sentences))
    merged: list[str] = []
    while True:
        extra = filler(rng)
        left -= estimate(extra)
        if left < 0:
            break
        merged.append(extra)
    # Records keep their order; filler falls between them at random.
    slots = sorted(rng.sample(range(len(sentences) + len(merged)), len(sentences)))
    for slot, sentence in zip(slots, sentences, strict=True):
        merged.insert(slot, sentence)
    return " ".join(merged)


def score_answer(text: str, question: Question) -> bool:
    """Return whether `text` has the right value: the last word of the right answer."""
    value = question.answer.rstrip(".").split()[-1]
    words = text.strip().rstrip(".").split()
    return bool(words) and words[min(1, len(words) - 1)].rstrip(".") == value
