"""Linear layers of a step by oneDNN: the same to rounding, only where they fit, and restored."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import linear as by_torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import mmkv
from helpers.marks import slow_except
from helpers.models import make_inputs, make_model
from helpers.zoo import NAMES, inputs_of, make
from mmkv.attach import products

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every float32 weight counts as large; how many rows each product of oneDNN had."""
    found: list[int] = []
    real = products._by_onednn

    def noting(x: Any, weight: Any, bias: Any) -> Any:
        found.append(x.numel() // x.shape[-1])
        return real(x, weight, bias)

    monkeypatch.setattr(products, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(products, "_by_onednn", noting)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 48), (4, 8, 48), (32, 1, 48)], ids=str)
def test_products_equal_to_rounding(rows, shape, bias):
    torch.manual_seed(0)
    module, x = nn.Linear(48, 80, bias=bias), torch.randn(shape)
    with torch.no_grad():
        assert_close(products.linear(module, x), module(x))
        apart = torch.randn(*shape, 2)[..., 0]
        assert_close(products.linear(module, apart), module(apart))
    assert rows == [x.numel() // 48] * 2


@pytest.mark.parametrize(
    "case", ["rows", "none", "gradients", "autocast", "small", "float64", "bfloat16", "subclass"]
)
def test_anything_else_is_left_to_torch(rows, monkeypatch, case):
    class Marked(torch.Tensor):
        pass

    module, x = nn.Linear(48, 80), torch.randn(1, 48)
    if case in ("rows", "none"):
        x = torch.randn(33 if case == "rows" else 0, 48)
    elif case == "small":
        monkeypatch.setattr(products, "LEAST_NUMBERS", 48 * 80 + 1)
    elif case in ("float64", "bfloat16"):
        module, x = module.to(getattr(torch, case)), x.to(getattr(torch, case))
    elif case == "subclass":
        x = x.as_subclass(Marked)
    with (
        torch.set_grad_enabled(case == "gradients"),
        torch.autocast("cpu", enabled=case == "autocast"),
    ):
        found, wanted = products.linear(module, x), module(x)
    assert not rows
    assert type(found) is type(wanted)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert found.requires_grad == (case == "gradients")


@pytest.mark.parametrize("name", slow_except(NAMES, "LlamaForCausalLM", "OPTForCausalLM"))
def test_models_say_the_same(rows, monkeypatch, name):
    """A prompt and three steps of a wrapped model, with products by oneDNN and by torch."""
    model = make(name)
    inputs = inputs_of(model, "one")
    token = torch.tensor([[7]])

    def logits() -> torch.Tensor:
        with mmkv.wrapped(model, "snapkv", 0.5), torch.no_grad():
            out = model(**inputs, use_cache=True)
            found = [out.logits[:, -1:]]
            for _ in range(3):
                out = model(input_ids=token, past_key_values=out.past_key_values)
                found.append(out.logits)
        return torch.cat(found, 1)

    with_onednn = logits()
    assert rows.count(1) >= 3
    monkeypatch.setattr(products, "LEAST_NUMBERS", 10**9)
    assert_close(with_onednn, logits(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["strided", "expanded", "one", "double"])
def test_other_biases_are_left_to_torch(rows, case):
    """oneDNN would read what lies beside them."""
    module, x = nn.Linear(48, 80), torch.randn(1, 48)
    bias = {
        "strided": torch.randn(160)[::2],
        "expanded": torch.randn(1).expand(80),
        "one": torch.randn(1),
        "double": torch.randn(80).double(),
    }[case]
    module.bias = nn.Parameter(bias, requires_grad=False)
    with torch.no_grad():
        if case == "double":
            with pytest.raises(RuntimeError, match="same dtype"):
                products.linear(module, x)
        else:
            assert torch.equal(products.linear(module, x), module(x))
    assert not rows


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_are_left_to_torch(rows):
    module, x = nn.Linear(48, 80), torch.randn(1, 48)
    with torch.no_grad():
        assert_close(products.linear(module, x.to_sparse()), module(x))
        module.weight = nn.Parameter(module.weight.to_sparse_csr(), requires_grad=False)
        assert_close(products.linear(module, x), module(x))
    assert not rows
    assert not list(products.large_linears(module))


def test_modules_of_a_changed_class_are_left_to_it(rows):
    class Doubled(nn.Linear):
        def forward(self, input: Any) -> Any:
            return 2 * super().forward(input)

    module, x = nn.Linear(48, 80), torch.randn(1, 48)
    with torch.no_grad():
        wanted = 2 * module(x)
        module.__class__ = Doubled
        assert torch.equal(products.linear(module, x), wanted)


def test_the_input_may_be_named(rows):
    module, x = nn.Linear(48, 80), torch.randn(1, 48)
    with torch.no_grad():
        assert_close(products.linear(module, input=x), module(input=x))
    assert rows


class TestWhatWatches:
    """Whatever differentiates, counts, records or switches off products finds torch's own."""

    def test_forward_derivatives(self, rows):
        module, x = nn.Linear(48, 80), torch.randn(1, 48)
        with torch.no_grad():
            found = torch.func.jvp(partial(products.linear, module), (x,), (x,))[1]
            assert_close(found, x @ module.weight.T)
            with forward_ad.dual_level():
                out = products.linear(module, forward_ad.make_dual(x, x))
                assert_close(forward_ad.unpack_dual(out).tangent, x @ module.weight.T)
        assert not rows

    def test_counted_operations(self, rows):
        module, x = nn.Linear(48, 80), torch.randn(1, 48)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            products.linear(module, x)
        assert counter.get_total_flops() == 2 * 48 * 80

    @pytest.mark.filterwarnings("ignore")
    def test_traces(self, rows):
        module, x = nn.Linear(48, 80), torch.randn(1, 48)
        with torch.no_grad():
            wanted = module(x)
            module.forward = partial(products.linear, module)
            assert_close(torch.jit.trace(module, x)(x), wanted)

    @pytest.mark.filterwarnings("ignore:TF32")
    def test_onednn_switched_off(self, rows):
        module, x = nn.Linear(48, 80), torch.randn(1, 48)
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
            products.linear(module, x)
        assert not rows


def test_compiled_code_is_left_to_its_compiler(rows):
    module, x = nn.Linear(48, 80), torch.randn(1, 48)
    compiled = torch.compile(lambda x: products.linear(module, x), backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), by_torch(x, module.weight, module.bias))
    assert not rows


class TestWrapping:
    def test_it_is_undone(self, rows):
        model, inputs = make_model("llama"), make_inputs("llama", (20,))
        before = {name: vars(x).get("forward") for name, x in model.named_modules()}
        with mmkv.wrapped(model, "snapkv", 0.5), torch.no_grad():
            cache = model(**inputs).past_key_values
            rows.clear()
            model(input_ids=torch.tensor([[7]]), past_key_values=cache)
        large = [x for x in model.modules() if type(x) is nn.Linear]
        assert rows == [1] * len(large)
        assert {name: vars(x).get("forward") for name, x in model.named_modules()} == before

    def test_copies_compute_with_their_own_weights(self, rows):
        model = mmkv.wrap(make_model("llama"), "snapkv", 0.5)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                copied.lm_head.weight.zero_()
                assert not copied(**make_inputs("llama", (20,))).logits.any()
                assert model(**make_inputs("llama", (20,))).logits.any()
        assert rows

    def test_small_weights_and_modules_with_hooks_are_left_alone(self, rows, monkeypatch):
        model = make_model("llama")
        add_hook_to_module(model.lm_head, ModelHook())
        assert model.lm_head not in list(products.large_linears(model))
        monkeypatch.undo()
        assert not list(products.large_linears(model))

    def test_what_was_set_since_stays(self, rows):
        """Offloading that came after `wrap` goes on after `unwrap`, and a user's forward too."""
        model, inputs = make_model("llama"), make_inputs("llama", (20,))
        with torch.no_grad():
            wanted = model(**inputs).logits
            mmkv.wrap(model, "full")
            cpu_offload(model, execution_device=torch.device("cpu"))
            layer = model.lm_head
            own = layer.forward = partial(layer.forward)
            mmkv.unwrap(model)
            rows.clear()
            assert_close(model(**inputs).logits, wanted)
            assert layer.forward is own
            remove_hook_from_submodules(model)
            assert_close(model(**inputs).logits, wanted)
        assert not rows
