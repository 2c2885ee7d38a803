"""Compare few sizes of heads, as vLLM has them, with sizes of each head's own (docs/serving.md).

`python docs/head_classes.py MODEL BUDGET [PROMPTS]`: both keep as many pairs of each prompt of
the documents suite, those that the plugin's classes give in blocks of 32. Prints the divergence
from the full cache's next-token distributions, nats a token, and the share of equal first choices.
"""

import sys

import mmkv
from mmkv import chat, forcing
from mmkv.eval.arguments import token_counter
from mmkv.eval.prompts import encode_samples
from mmkv.eval.suites.registry import load_suite
from mmkv.profiles import Profile
from mmkv.sizes.profiled import RetrievalHeads, by_copying, proportional
from mmkv.vllm.classes import classes_of
from mmkv.vllm.settings import Sizes

BLOCK = 32


def main(name: str, budget: float, prompts: int = 16) -> None:
    """Measure that many prompts; each line sums up those so far."""
    loaded = chat.load(name, "cpu", "float32")
    model = loaded.model
    scores = mmkv.probe(model).retrieval
    assert scores is not None
    places = [(i, h) for i, layer in enumerate(scores) for h in range(len(layer))]
    own, layers = mmkv.get_policy("condense", least=0), tuple(range(len(scores)))
    if (table := by_copying(own, scores, layers)) is None:
        raise SystemExit(f"{name} has no heads that copy, so all are of one class")
    weights = [weight for layer in table.weights(budget) for weight in layer]
    targets = proportional(weights, budget * len(places), 1.0)
    classes = classes_of(dict(zip(places, targets, strict=True)), budget)
    shares = {place: x.share for x in classes for place in x.heads}
    of_classes = mmkv.get_policy("condense", least=0, heads=RetrievalHeads(floor=1e-9))

    def profile(sizes: list[float]) -> Profile:
        H = len(scores[0])
        rows = tuple(tuple(sizes[i * H : (i + 1) * H]) for i in range(len(scores)))
        return Profile(policy="condense", samples=1, retrieval=rows)

    samples = load_suite("documents", "novels", limit=prompts, count=token_counter(name))
    totals = {"own sizes": [0.0, 0, 0], "classes": [0.0, 0, 0]}
    kept = list[float]()
    print("classes:", [(round(x.share, 3), len(x.heads)) for x in classes])
    for inputs in encode_samples(loaded, samples):
        N = inputs["input_ids"].shape[1]
        sizes = list[float]()
        for place in places:
            share = shares[place]
            rule = Sizes(share, max(1, round(64 / budget * share)), 2)
            sizes.append(N if share == 1 else N - int(rule.dropped(N, BLOCK)) * BLOCK)
        kept.append(sum(sizes) / len(sizes) / N)
        answers = forcing.replies(model, inputs, 64)
        full = forcing.log_probabilities(model, inputs, answers)
        # The first token is pinned, and comes on top of what is in proportion to the scores.
        in_classes = profile([(x - 1) / N for x in sizes])
        for how, policy, scored in (
            ("own sizes", own, Profile(policy="condense", samples=1, retrieval=scores)),
            ("classes", of_classes, in_classes),
        ):
            with mmkv.wrapped(model, policy, kept[-1], profile=scored):
                found = forcing.score_answers(model, inputs, answers, full=full)
            total = totals[how]
            total[0] += sum(found.divergence)
            total[1] += found.same[0]
            total[2] += found.compared[0]
        figures = [
            f"{how} {nats / n:.4f} nats a token, {100 * same / n:.1f} % same"
            for how, (nats, same, n) in totals.items()
        ]
        share = 100 * sum(kept) / len(kept)
        print(f"{len(kept)} prompts, kept {share:.1f} %: {'; '.join(figures)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:]))
