"""Steps with fused norms, rotary embeddings and activations: equal to rounding, and restored."""

from __future__ import annotations

import functools
import inspect
import textwrap
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import mmkv
from helpers.launches import Launches
from helpers.marks import slow_except
from helpers.models import make_inputs, make_model
from helpers.oracle import short
from helpers.pretend_cuda import install
from helpers.reference import generate
from helpers.zoo import NAMES, inputs_of, make
from mmkv import kernels
from mmkv.attach import fusing, graph
from mmkv.attach.fusing import fused
from mmkv.cache import evict, ragged_rows
from mmkv.kernels import twins

ALL = {"rms_norm", "rotate", "silu_mul"}
# Gemma's norm multiplies by one more than its weight, and its activation is GELU. Phi-3 turns a
# part of each head, and GPT-NeoX and OPT have none of the three.
KINDS = {
    "LlamaForCausalLM": ALL,
    "MistralForCausalLM": ALL,
    "Qwen3ForCausalLM": ALL,
    "LlavaForConditionalGeneration": ALL,
    "Qwen2_5_VLForConditionalGeneration": ALL,
    "GemmaForCausalLM": {"rotate"},
    "Phi3ForCausalLM": {"rms_norm"},
    "OPTForCausalLM": set(),
    "GPTNeoXForCausalLM": set(),
}
TOKENS = torch.tensor([[7, 9, 50]])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The twins stand in for the kernels; which of them ran."""
    found: list[str] = []

    def noting(name: str) -> Any:
        return lambda *args: found.append(name) or getattr(twins, name)(*args)

    stand_in = {name: noting(name) for name in ALL}
    wanted = SimpleNamespace(wanted=lambda *tensors, wide: True, **stand_in)
    monkeypatch.setattr(fusing, "kernels", wanted)
    return found


def forwards(model: nn.Module) -> list[Any]:
    """The forward of each module's own, if any."""
    return [vars(module).get("forward") for module in model.modules()]


def changed(model: nn.Module) -> set[str]:
    """The classes of modules that have a forward of their own."""
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


# --- equal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except(NAMES, *KINDS))
def test_the_same_bits_as_the_model(calls: list[str], name: str) -> None:
    """What is fused is what the twins compute, which round where the model does."""
    model = make(name).bfloat16()
    inputs = inputs_of(model, "one")
    inputs = {k: x.bfloat16() if x.is_floating_point() else x for k, x in inputs.items()}
    before = forwards(model)
    with torch.no_grad():
        plain = model(**inputs).logits
        assert not calls
        with fused(model):
            got = model(**inputs).logits
    torch.testing.assert_close(got, plain, rtol=0, atol=0)
    assert forwards(model) == before
    assert set(calls) == KINDS.get(name, set(calls))


@pytest.mark.parametrize("name", list(KINDS)[:6])
def test_equal_to_rounding_by_the_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if not kernels.available(torch.device("cpu")):
        pytest.skip("Triton's interpreter is off: tests/core/test_gpu.py runs the kernels on a GPU")
    from mmkv.kernels import pointwise

    model, started, launch = make(name), set(), pointwise.launch

    def noting(kernel: Any, grid: Any) -> Any:
        started.add(kernel.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(pointwise, "launch", noting)
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    with torch.no_grad():
        plain = model(input_ids=TOKENS).logits
        with fused(model):
            got = model(input_ids=TOKENS).logits
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)
    assert started == {f"{kind}_kernel" for kind in KINDS[name]}


class Attention(nn.Linear):
    def forward(self, q: torch.Tensor, cos: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return super().forward(scale * apply_rotary_pos_emb(q, q, cos, cos)[0])


def test_a_copy_of_attention_keeps_defaults_and_closure(calls: list[str]) -> None:
    model, q, cos = Attention(8, 8), torch.ones(2, 3, 4, 8), torch.ones(2, 4, 8)
    with torch.no_grad():
        expected = model(q, cos)
        with fused(model):
            torch.testing.assert_close(model(q, cos), expected, rtol=0, atol=0)
    assert calls == ["rotate"]


# --- launches ------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts a kernel's launch where it is started, and runs its twin uncounted."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from mmkv.kernels import pointwise

    mode = Launches()

    def start(kernel: Any, grid: Any) -> Any:
        return lambda *args, **options: mode.names.append(kernel.__name__)

    def counting(name: str) -> Any:
        def run(*args: Any) -> Any:
            getattr(pointwise, name)(*args)  # starts nothing here
            with mode.paused():
                return getattr(twins, name)(*args)

        return run

    monkeypatch.setattr(pointwise, "launch", start)
    stand_in = {name: counting(name) for name in ALL}
    wanted = SimpleNamespace(wanted=lambda *tensors, wide: True, **stand_in)
    monkeypatch.setattr(fusing, "kernels", wanted)
    return mode


@pytest.mark.parametrize(
    ("name", "plain", "fewer"), [("LlamaForCausalLM", 37, 13), ("Qwen3ForCausalLM", 53, 15)]
)
def test_launches_of_a_layer_around_attention(
    monkeypatch: pytest.MonkeyPatch, launches: Launches, name: str, plain: int, fewer: int
) -> None:
    """In 16 bits: 7 linear layers, 2 additions, and norms, rotary embedding and activation."""
    model = make(name).bfloat16()
    sdpa = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def uncounted(*args: Any, **options: Any) -> Any:
        with launches.paused():
            return sdpa(*args, **options)

    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", uncounted)
    counted = []

    def leave(layer: nn.Module, args: Any, out: Any) -> None:
        counted.append(len(launches.names))
        launches.names.clear()

    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda layer, args: launches.names.clear())
        layer.register_forward_hook(leave)
    with torch.no_grad(), launches:
        model(input_ids=TOKENS[:, :1], use_cache=False)
        with fused(model):
            model(input_ids=TOKENS[:, :1], use_cache=False)
    layers = len(model.model.layers)
    assert counted == layers * [plain] + layers * [fewer], launches.names


def test_replayed_steps_are_fused(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """The step that warms up and the one captured, not the prompt; they equal unfused steps."""
    started = []  # of each pass through the model
    model, inputs = make_model("llama"), make_inputs("llama", (60, 37))
    with mmkv.wrapped(model, "snapkv", 0.5, graph=False, **short("snapkv")):
        expected, tokens, _ = generate(model, inputs, new=20)

    monkeypatch.setattr(graph, "_capturable", lambda device: True)
    graphs = install(monkeypatch, torch.device("cpu")).graphs
    monkeypatch.setattr(ragged_rows, "kernels", twins)
    monkeypatch.setattr(evict, "kernels", SimpleNamespace(wanted=lambda *tensors: True))
    model.register_forward_pre_hook(lambda module, args: launches.names.clear())
    model.register_forward_hook(lambda module, args, out: started.append(len(launches.names)))
    with mmkv.wrapped(model, "snapkv", 0.5, **short("snapkv")):
        got, words, _ = generate(model, inputs, new=20)
    assert len(graphs) == 1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert torch.equal(words, tokens)
    layer = 2 + 1 + 1  # norms, rotary embedding, activation
    every = layer * model.config.num_hidden_layers + 1
    assert started == [0, every, every]


# --- left as it is -------------------------------------------------------------------------------


def test_nothing_changes_on_the_cpu() -> None:
    model = make_model("llama")
    with fused(model):
        assert not changed(model)


def test_gradients_are_as_ever(calls: list[str]) -> None:
    model = make_model("llama")
    with fused(model):
        model(input_ids=TOKENS).logits.sum().backward()
    assert not calls
    assert all(x.grad is not None for x in model.parameters())


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 8), torch.full((8,), 3.0).bfloat16()),
        (torch.ones(2, 8).double(), torch.full((8,), 3.0).double()),
        (torch.ones(2, 8), torch.full((8,), 3.0).as_subclass(Subclass)),
        (torch.ones(2, 8), torch.full((2, 8), 3.0)),
    ],
    ids=["dtypes", "float64", "subclass", "shape"],
)
def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, x: Any, weight: Any) -> None:
    monkeypatch.setattr(kernels, "DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "available", lambda device: True)
    monkeypatch.setattr(kernels, "rms_norm", None, raising=False)  # calling it is an error
    norm = modeling_llama.LlamaRMSNorm(8)
    norm.other = nn.Parameter(torch.ones(8))  # fits
    norm.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        expected = norm(x)
        with fused(norm):
            assert changed(norm)
            got = norm(x)
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


Q, TURNS = torch.ones(2, 3, 4, 8), torch.ones(2, 4, 8)


@pytest.mark.parametrize(
    ("q", "k", "turns", "options"),
    [
        (torch.ones(2, 4, 4, 8), torch.ones(2, 4, 4, 8), TURNS, {"unsqueeze_dim": 2}),
        (Q, Q[:1], TURNS, {}),
        (Q, Q[:, 0], TURNS[:1], {}),
        (Q, Q, TURNS[..., :1], {}),
    ],
    ids=["unsqueeze_dim", "batch", "dimensions", "broadcast"],
)
def test_rotary_arguments_that_do_not_fit(
    calls: list[str], q: Any, k: Any, turns: Any, options: Any
) -> None:
    own = modeling_llama.apply_rotary_pos_emb
    with torch.no_grad():
        got = fusing._rotary(own, q, k, turns, turns, **options)
        assert not calls
        assert [x.shape for x in got] == [x.shape for x in own(q, k, turns, turns, **options)]
        fusing._rotary(own, Q, Q[:, :1], TURNS[:1], TURNS[:1])
    assert calls == ["rotate"]


def test_hooks_of_accelerate_are_left_alone(calls: list[str]) -> None:
    model = make_model("llama")
    add_hook_to_module(model.model.norm, ModelHook())
    own = model.model.norm.forward
    with fused(model):
        assert model.model.norm.forward is own
    assert model.model.norm.forward is own


def test_an_activation_with_a_hook_is_left_alone(calls: list[str]) -> None:
    model = make_model("llama")
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, args, out: 2 * out)
    with fused(model):
        assert "forward" not in vars(model.model.layers[0].mlp)
        assert "forward" in vars(model.model.layers[1].mlp)


@pytest.mark.parametrize(
    ("function", "old", "new", "same"),
    [
        (modeling_llama.LlamaRMSNorm.forward, "", "", True),
        (modeling_llama.apply_rotary_pos_emb, "Applies", "Computes", True),
        (modeling_llama.apply_rotary_pos_emb, "unsqueeze_dim=1", "unsqueeze_dim=2", False),
        (modeling_llama.apply_rotary_pos_emb, "(q, k,", "(k, q,", False),
        (modeling_llama.LlamaRMSNorm.forward, "pow(2)", "pow(4)", False),
        (modeling_llama.LlamaRMSNorm.forward, "rsqrt", "exp", False),
        (modeling_llama.LlamaRMSNorm.forward, "weight *", "weight +", False),
    ],
)
def test_what_is_llamas_code(function: Any, old: str, new: str, same: bool) -> None:
    source = textwrap.dedent(inspect.getsource(function))
    source = "import torch\n" + source[source.index("def ") :]  # calls of a module compile apart
    assert old in source
    scope = {**function.__globals__}
    exec(source.replace(old, new), scope)
    assert fusing._same(scope[function.__name__], function) == same


def test_llamas_own_code_replaced(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """By another package, whose classes need not compute the same."""

    class Norm(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Plain(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    for norm in (Norm, Plain):
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", norm)
        model = make_model("llama")
        with fused(model):
            assert changed(model) == {"LlamaAttention", "LlamaMLP"}


def test_wrapped_functions_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """Two functions in the same wrapper have one code, whatever they do."""

    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any) -> Any:
            function(*args)
            return function(*args)

        return wrapped

    model = make_model("llama")
    norm = modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(norm, "forward", twice(norm.forward))
    monkeypatch.setattr(modeling_llama, "rotate_half", twice(modeling_llama.rotate_half))
    with fused(model):
        assert changed(model) == {"LlamaMLP"}


def test_functions_that_are_modules_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """As with the package `kernels`, which may later run another function instead."""

    class Function(nn.Module):
        def forward(self, *args: Any) -> Any:
            return rotary(*args)

    rotary = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", Function())
    model = make_model("llama")
    with fused(model):
        assert changed(model) == {"LlamaRMSNorm", "LlamaMLP"}


# --- restored, and nothing shared ----------------------------------------------------------------


def test_restored_after_an_error(calls: list[str]) -> None:
    model = make_model("llava-llama")
    before, rotary = forwards(model), modeling_llama.apply_rotary_pos_emb

    def fails(module: nn.Module, args: Any) -> None:
        raise RuntimeError("out of memory")

    model.model.language_model.layers[1].mlp.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"), torch.no_grad(), fused(model):
        model(input_ids=TOKENS)
    assert set(calls) == ALL
    assert forwards(model) == before
    assert modeling_llama.apply_rotary_pos_emb is rotary


def test_another_model_meanwhile_in_another_thread(calls: list[str]) -> None:
    model, other = make_model("llama"), make_model("llama")
    ran: list[torch.Tensor] = []

    def runs() -> None:
        with torch.no_grad():
            ran.append(other(input_ids=TOKENS).logits)

    runs()
    with fused(model):
        thread = threading.Thread(target=runs)
        thread.start()
        thread.join()
    assert not calls
    assert torch.equal(*ran)


def test_one_model_in_two_threads(calls: list[str]) -> None:
    """The one that came second may stay longer, and then computes as ever."""
    model = make_model("llama")
    before = forwards(model)
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
        first, second = fused(model), fused(model)
        first.__enter__()
        second.__enter__()
        assert changed(model) == {"LlamaAttention", "LlamaMLP", "LlamaRMSNorm"}
        first.__exit__(None, None, None)
        assert forwards(model) == before
        torch.testing.assert_close(model(input_ids=TOKENS).logits, expected, rtol=0, atol=0)
        second.__exit__(None, None, None)
    assert forwards(model) == before
    assert not calls


def test_the_second_of_two_leaves_first(calls: list[str]) -> None:
    model = make_model("llama")
    with fused(model):
        inside = forwards(model)
        with fused(model):
            assert forwards(model) == inside
        assert forwards(model) == inside
    assert not changed(model)


def test_what_is_set_meanwhile_stays(calls: list[str]) -> None:
    model = make_model("llama")
    with fused(model):
        other = model.model.norm.forward = modeling_llama.LlamaRMSNorm(64).forward
    assert [x for x in forwards(model) if x is not None] == [other]
