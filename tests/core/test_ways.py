"""Ways of generating: at full budget each is the plain model, and evicting is masking in each."""

import copy
import threading
from contextlib import contextmanager

import torch
from transformers.generation.streamers import BaseStreamer

import mmkv
from helpers.marks import cases, older_than
from helpers.masking import fed, generate, recorded, seeing
from helpers.models import IMAGE, make_inputs, make_model, next_turn
from helpers.oracle import READING, depth, options_of, short
from mmkv.cache.layer import KeptKV
from mmkv.calls import cache_in

ROWS = (90, 66, 41)
# Policies and a budget; the last row is shorter than 50 tokens.
SOME = {"prefixkv": 0.4, "adakv": 0.4, "h2o": 50, "xkv": 50}
NEW = 8
# Policies that read a prompt in different ways.
READERS = [x.policy for x in READING if not x.options]


class Collect(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.reshape(-1))

    def end(self):
        self.ended = True


def said(model, inputs, **options):
    """Tokens and logits of one call of `generate`, and the cache it left."""
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    torch.manual_seed(7)
    out = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    return [out.sequences, torch.stack(out.logits)], out.past_key_values


def generating(**options):
    return lambda model, inputs: said(model, inputs, **options)[0]


def streaming(model, inputs):
    inputs, streamer = {k: x[:1] for k, x in inputs.items()}, Collect()
    inputs["pixel_values"] = inputs["pixel_values"].expand(2, -1, -1, -1)
    found = said(model, inputs, streamer=streamer)[0]
    assert streamer.ended
    assert torch.cat(streamer.pieces).tolist() == found[0][0].tolist()
    return found


def own_loop(model, inputs):
    """`generate` with a decoding loop of the caller's."""

    def loop(model, input_ids, *args, **kwargs):
        return model._sample(input_ids, *args, **kwargs)

    return said(model, inputs, custom_generate=loop)[0]


def ending_apart(model, inputs):
    """Rows end at different times and are padded on."""
    free = said(model, inputs)[0][0][:, max(ROWS) :]
    stops = [int(free[0, 2]), int(free[1, 5])]
    return said(model, inputs, eos_token_id=stops)[0]


def forward(grad):
    def way(model, inputs):
        """Plain calls of the model, which find their positions themselves."""
        inputs = {k: x[:1] for k, x in inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].expand(2, -1, -1, -1)
        with torch.set_grad_enabled(grad):
            out = model(**inputs, use_cache=True)
            logits = [out.logits[:, -1]]
            for token in range(10, 10 + NEW):
                cache = out.past_key_values
                out = model(input_ids=torch.tensor([[token]]), past_key_values=cache)
                logits.append(out.logits[:, -1])
        assert all(x.requires_grad == grad for x in logits)
        for layer in getattr(cache, "compressed", ()):
            pairs = layer.keeping().stored.read()
            assert not any(x.requires_grad for kv in pairs for x in kv)
        return [torch.stack(logits).detach()]

    return way


def forward_without_cache(model, inputs):
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    return [logits[inputs["attention_mask"].bool()]]


def turns(model, inputs):
    """A conversation goes on over its cache, with new text and a new picture."""
    first, cache = said(model, inputs, suppress_tokens=[IMAGE])
    more = next_turn(inputs, first[0], image=True)
    return first + said(model, more, past_key_values=cache)[0]


def questions(model, inputs):
    """Several questions over one prompt, each from a copy of its cache."""
    first, cache = said(model, inputs, max_new_tokens=1)
    found = []
    for seed in (1, 2, 1):
        more = next_turn(inputs, first[0], image=False, seed=seed)
        found.append(said(model, more, past_key_values=copy.deepcopy(cache))[0])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert not torch.equal(found[0][1], found[1][1])
    assert cache.get_seq_length() == max(ROWS)
    return first + found[0] + found[1]


WAYS = {
    "greedy": generating(),
    "sampling": generating(do_sample=True, temperature=0.8, top_p=0.9),
    "several samples": generating(do_sample=True, num_return_sequences=3),
    "beams": generating(num_beams=4),
    "several beams": generating(num_beams=4, num_return_sequences=2),
    "penalties": generating(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "guidance": generating(guidance_scale=1.5),
    "chunks": generating(prefill_chunk_size=None if older_than("5.23") else 16),
    "streaming": streaming,
    "a loop of one's own": own_loop,
    "rows that end apart": ending_apart,
    "forward": forward(grad=False),
    "forward with gradients": forward(grad=True),
    "forward without a cache": forward_without_cache,
    "turns": turns,
    "questions over one prompt": questions,
}


@contextmanager
def entering(model):
    """What each layer held when a pass of a wrapped model began."""
    held: list[dict[int, torch.Tensor]] = []

    def record(module, args, kwargs):
        layers = getattr(cache_in(kwargs), "compressed", [])
        held.append(
            {
                i: x.keeping().kept().clone()
                for i, x in enumerate(layers)
                if isinstance(x.state, KeptKV)
            }
        )

    decoder = model.get_decoder()
    with decoder.register_forward_pre_hook(record, with_kwargs=True, prepend=True):
        yield held


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        if x.is_floating_point():
            torch.testing.assert_close(x, y, atol=2e-4, rtol=0)
        else:
            assert torch.equal(x, y)


OTHERS = "prefixkv", "h2o", "xkv"
TRIED = [(way, policy) for i, way in enumerate(WAYS) for policy in ("adakv", OTHERS[i % 3])]
QUICK = [(way, "adakv") for way in ("greedy", "rows that end apart")]


@cases("way, policy", TRIED, *QUICK)
def test_each_way_of_generating_equals_masking(models, policy, way):
    """Beams and rows move with what they kept; the same seed draws the same tokens."""
    model, inputs, run = models("llava-llama"), make_inputs("llava-llama", ROWS), WAYS[way]
    plain = run(model, inputs)
    if policy == "adakv":
        with mmkv.wrapped(model, policy, 1.0, **short(policy)):
            same(run(model, inputs), plain)
    with mmkv.wrapped(model, policy, SOME[policy], **short(policy)), entering(model) as held:
        found = run(model, inputs)
    with seeing(model, held, chunks=0):
        same(found, run(model, inputs))
    evicts = "without a cache" not in way
    assert evicts == any(bool(x) for x in held)
    assert evicts != all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))


def with_layers_in_memory(model, folder):
    """Weights come to the executing device for the length of each layer."""
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def with_parts_apart(model, folder):
    """The vision tower and two halves of the decoder, each where it was put; inputs are moved."""
    from accelerate import dispatch_model

    place = {"model.vision_tower": "disk", "model.multi_modal_projector": "cpu", "lm_head": "cpu"}
    decoder = "model.language_model"
    place |= {f"{decoder}.{x}": "cpu" for x in ("embed_tokens", "norm", "rotary_emb", "layers.0")}
    place[f"{decoder}.layers.1"] = "disk"
    return dispatch_model(model, place, main_device="cpu", offload_dir=folder, force_hooks=True)


@cases(
    "policy, spread",
    [
        ("prefixkv", with_layers_in_memory),
        ("adakv", with_parts_apart),
        ("h2o", with_parts_apart),
        ("xkv", with_layers_in_memory),
        ("condense", with_parts_apart),
        ("kvzip-plus", with_layers_in_memory),
    ],
    "prefixkv",
)
def test_a_model_spread_by_accelerate(models, policy, spread, tmp_path):
    """Weights that come when a layer runs, and inputs that move: the same in every place."""
    whole, inputs = models("llava-llama"), make_inputs("llava-llama", ROWS)
    model = spread(make_model("llava-llama"), tmp_path)
    assert any(p.device.type == "meta" for p in model.parameters())
    for run in (turns, WAYS["beams"]):
        found = []
        for each in (whole, model):
            with mmkv.wrapped(each, policy, 0.4, **short(policy)):
                found.append(run(each, inputs))
        same(found[1], found[0])


@cases("policy", ["kvzip", "kvzip-plus", "squeeze", "expected", "xkv"], "squeeze")
def test_another_thread_runs_in_the_middle_of_each_pass(models, policy):
    """What a pass remembers of the layers lies with the pass, not with their modules."""
    model, here = models("llama", depth(policy)), threading.get_ident()
    mine, other = (make_inputs("llama", (n,), seed=n) for n in (60, 45))
    few, found = {"max_new_tokens": 4}, []

    def interrupt(*args):
        if threading.get_ident() == here:
            thread = threading.Thread(target=lambda: found.append(said(model, other, **few)[0]))
            thread.start()
            thread.join()

    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        wanted, others = said(model, mine, **few)[0], said(model, other, **few)[0]
        with model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(interrupt):
            same(said(model, mine, **few)[0], wanted)
    assert len(found) >= 4
    for words in found:
        same(words, others)


@cases("policy", READERS[::2], "adakv")
def test_policy_under_autocast_equals_masking(models, policy):
    """Scores are float32 there; of logits up to 5, held in steps of 1/32, evicting is masking."""
    model, inputs = models("llava-llama"), make_inputs("llava-llama", ROWS)
    chunk = None if older_than("5.23") else 33

    def talk(**options):
        words, cache = said(model, inputs, suppress_tokens=[IMAGE], **options)
        more = next_turn(inputs, words[0], image=False)
        second, cache = said(model, more, past_key_values=cache, suppress_tokens=[IMAGE])
        assert second[1].isfinite().all()
        return torch.tensor([x.kept for x in cache.report().layers]).sum((0, 2)).tolist()

    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        plain = talk(prefill_chunk_size=chunk)
        with torch.autocast("cpu", torch.bfloat16), recorded(model) as held:
            logits, tokens, _ = generate(model, inputs)
        with torch.autocast("cpu", torch.bfloat16):
            found = talk(prefill_chunk_size=chunk)
    assert found == plain
    if mmkv.get_policy(policy).merge is None:  # merged pairs are not what a mask leaves
        with torch.autocast("cpu", torch.bfloat16), seeing(model, held):
            expected = fed(model, inputs, tokens)[0]
        torch.testing.assert_close(logits, expected, atol=0.2, rtol=0)


@cases("policy", ["snapkv", "condense"], "snapkv")
def test_embeddings_are_read_as_their_tokens(models, policy):
    model, inputs = models("llama"), make_inputs("llama", (40, 23))
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        (ids, logits), _ = said(model, inputs)
        given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
        (new, others), _ = said(model, given)
    assert torch.equal(new, ids[:, 40:])
    torch.testing.assert_close(others, logits)


@cases(
    "variant, dtype",
    [(x, (torch.bfloat16, torch.float64)[i % 2]) for i, x in enumerate(READING[::3])],
    "expected",
    ids=str,
)
def test_wrapped_model_may_be_cast(variant, dtype):
    found = []
    for first in ("wrap", "cast"):
        model = make_model("llama") if first == "wrap" else make_model("llama").to(dtype)
        options = options_of(variant)
        with mmkv.wrapped(model, variant.policy, variant.budget, **options):
            logits = generate(model.to(dtype), make_inputs("llama", (300, 90)), new=4)[0]
        found.append(logits)
    assert torch.equal(*found)


def test_arguments_may_be_given_by_position(models):
    model, inputs = models("llama"), make_inputs("llama", (40, 10))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    decoder = model.get_decoder()
    with torch.no_grad():
        plain = decoder(ids, mask, positions).last_hidden_state[:, -1]
        with mmkv.wrapped(model, "snapkv", 1.0):
            wrapped = decoder(ids, mask, positions).last_hidden_state[:, -1]
    torch.testing.assert_close(wrapped, plain)
