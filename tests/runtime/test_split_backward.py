"""The split backward of linear layers against plain autograd, and what it keeps alive between its two halves."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import run_processes
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_seq1f1b.runtime.kv_buffer import KVBuffer
from lightning_seq1f1b.runtime.linear_layers import LinearLayer, linear_layers
from lightning_seq1f1b.runtime.split_backward import DeferredGradients, SplitBackward


class Transposed(nn.Module):
    """A linear layer with a weight of [inputs, outputs], as GPT-2 has."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 5)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        hidden = F.gelu(self.first(x))
        return self.third(self.norm(hidden + self.second(hidden)))


class Conv1d(Plain):
    def __init__(self):
        super().__init__()
        self.second = Transposed(8, 8)


class Tied(Plain):
    """One weight used twice by one layer, and once more by another."""

    def __init__(self):
        super().__init__()
        self.fourth = nn.Linear(8, 8)
        self.fourth.weight = self.second.weight

    def forward(self, x):
        hidden = F.gelu(self.first(x))
        return self.third(self.fourth(self.second(self.second(hidden).tanh()).tanh()))


class TiedToEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        ids = x.detach().mul(10).long().remainder(7)[..., 0]
        return self.head(self.middle(self.embed(ids)).tanh())


class FrozenWeight(Plain):
    """The bias beside a frozen weight is trained, and the other way round."""

    def __init__(self):
        super().__init__()
        self.first.weight.requires_grad_(False)
        self.third.bias.requires_grad_(False)


class LowRank(nn.Module):
    """A frozen layer with a trained pair beside it, as LoRA."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.b(F.dropout(self.a(x), 0.0))


class Buffered(nn.Module):
    """Attention over a KV buffer; one chunk."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        buffer = KVBuffer(x.shape[1])
        keys, values = buffer.append(0, 0, self.key(x)[:, None], self.value(x)[:, None])
        return F.scaled_dot_product_attention(self.query(x)[:, None], keys, values, is_causal=True)[:, 0]


class Hooked(Plain):
    """Hooks on parameters see and change their gradients."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.first.weight.register_hook(lambda gradient: gradient * 2)
        self.second.weight.register_post_accumulate_grad_hook(lambda parameter: self.seen.append(parameter.grad.sum()))
        self.third.bias.register_hook(lambda gradient: gradient * 3)


class ModuleHooked(Plain):
    """Hooks on modules run as ever."""

    def __init__(self):
        super().__init__()
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.second.register_forward_hook(lambda module, args, output: output.tanh())
        self.third.register_full_backward_hook(lambda module, given, got: (given[0] * 5,))


class Unused(Plain):
    def forward(self, x):
        self.third(F.gelu(self.first(x)))
        return self.first(x)


class InPlace(Plain):
    """Activations that overwrite what a linear layer gave."""

    def forward(self, x):
        hidden = F.relu(self.first(x), inplace=True)
        return self.third(self.second(hidden).add_(1))


class Parametrized(Plain):
    """The weight is computed from another parameter at each use."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.second)
        nn.utils.parametrize.register_parametrization(self.third, "bias", nn.Tanh())


class Recomputed(Plain):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Keyword(Plain):
    def forward(self, x):
        return self.third(input=self.second(self.first(x)))


class Functional(Plain):
    """Its parameters are swapped for others during the call."""

    def forward(self, x):
        swapped = {name: parameter * 2 for name, parameter in self.named_parameters()}
        model = Plain.forward
        with torch.nn.utils.stateless._reparametrize_module(self, swapped):
            return model(self, x)


class InnerGradient(Plain):
    """Takes a gradient by its weight inside its forward."""

    def forward(self, x):
        hidden = self.first(x.detach().requires_grad_())
        (step,) = torch.autograd.grad(hidden.square().sum(), self.first.weight)
        return self.third(self.second(F.linear(x, self.first.weight - 0.1 * step, self.first.bias)))


class Expanded(Plain):
    """Its output gradients are expanded scalars; its input is one vector."""

    def forward(self, x):
        return self.first(x[0, 0]).sum() + self.second(self.first(x).transpose(0, 1)).sum()


CASES = [
    Plain,
    Conv1d,
    Tied,
    TiedToEmbedding,
    FrozenWeight,
    LowRank,
    Buffered,
    Hooked,
    ModuleHooked,
    Unused,
    InPlace,
    Parametrized,
    Recomputed,
    Keyword,
    Functional,
    InnerGradient,
    Expanded,
]


def made(case, dtype=torch.float64):
    torch.manual_seed(0)
    model = case().to(dtype)
    inputs = [torch.randn(2, 3, 6).to(dtype) for _ in range(2)]
    return model, inputs


def layers(model):
    return linear_layers(model, (Transposed,))


def fused(model, inputs, autocast=False):
    for x in inputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        torch.manual_seed(1)
        output.backward(torch.randn(output.shape).to(output.dtype))


def split(model, inputs, autocast=False):
    """Both inputs' input gradients first, then both weight gradients. Returns how many uses each has deferred."""
    step, stores = SplitBackward(layers(model)), []
    for x in inputs:
        with step.deferring(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        torch.manual_seed(1)
        stores.append(DeferredGradients())
        with step.deferring(stores[-1]):
            output.backward(torch.randn(output.shape).to(output.dtype))
    counts = [len(store) for store in stores]
    for store in stores:
        store.accumulate()
        assert len(store) == 0
    return counts


def gradients(model, inputs):
    named = [*model.named_parameters(), *((f"input {index}", x) for index, x in enumerate(inputs))]
    return {name: tensor.grad for name, tensor in named}


DEFERRED = {
    Tied: 5,
    TiedToEmbedding: 2,
    FrozenWeight: 2,
    LowRank: 2,
    Hooked: 0,
    Unused: 1,
    Parametrized: 1,
    Keyword: 2,
    Functional: 0,
    InnerGradient: 2,
}


@pytest.mark.parametrize("input_trains", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_equals_plain_autograd(case, input_trains):
    expected, wanted_inputs = made(case)
    model, inputs = made(case)
    for x in (*inputs, *wanted_inputs):
        x.requires_grad_(input_trains)
    fused(expected, wanted_inputs)
    counts = split(model, inputs)
    assert counts == [DEFERRED.get(case, 3)] * 2
    wanted = gradients(expected, wanted_inputs)
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )
    if case is Hooked:
        assert model.seen == expected.seen
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("case", [Plain, Conv1d, Tied, TiedToEmbedding, LowRank, Recomputed, Buffered])
def test_equals_autocast_within_its_rounding(case):
    exact, exact_inputs = made(case)
    expected, wanted_inputs = made(case, torch.float32)
    model, inputs = made(case, torch.float32)
    for x in (*inputs, *wanted_inputs, *exact_inputs):
        x.requires_grad_()
    fused(exact, exact_inputs)
    fused(expected, wanted_inputs, autocast=True)
    assert split(model, inputs, autocast=True) == [DEFERRED.get(case, 3)] * 2
    true, wanted, got = (flat(*pair) for pair in ((exact, exact_inputs), (expected, wanted_inputs), (model, inputs)))
    assert got.dtype == torch.float32
    rounding = (wanted - true).norm() / true.norm()
    assert 0 < rounding < 0.02
    assert (got - true).norm() / true.norm() < 1.2 * rounding


def flat(model, inputs):
    return torch.cat([gradient.flatten() for gradient in gradients(model, inputs).values() if gradient is not None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_of_low_precision_models_are_kept(dtype):
    model, inputs = made(Conv1d, dtype)
    split(model, inputs)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}


def test_gradients_are_added_in_place_where_there_are_some():
    model, inputs = made(Plain)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    split(model, inputs)
    expected, inputs = made(Plain)
    fused(expected, inputs)
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        torch.testing.assert_close(parameter.grad, 1 + expected.get_parameter(name).grad)


class Token:
    """Lives as long as the node of the autograd graph that holds it."""


class Watched(torch.autograd.Function):
    """The identity, which remembers what passes it in both directions, and its node in the graph."""

    @staticmethod
    def forward(ctx, x, name, seen):
        ctx.name, ctx.seen, ctx.token = name, seen, Token()
        seen["nodes"].append(weakref.ref(ctx.token))
        y = x.clone()
        seen[name] = weakref.ref(y.untyped_storage()), y.nbytes
        return y

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        ctx.seen[f"d {ctx.name}"] = weakref.ref(gradient.untyped_storage()), gradient.nbytes
        return gradient, None, None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_only_inputs_and_output_gradients_of_linear_layers_outlive_the_input_gradient(recompute, autocast):
    query, key, out = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(4, 4)
    seen = {"nodes": []}

    def watch(x, name):
        return Watched.apply(x, name, seen)

    def run(x):
        shared = watch(x * 2, "shared")
        q, k = watch(query(shared), "q"), watch(key(shared), "k")
        mixed = watch(q * k[..., :4].sigmoid(), "mixed")
        return watch(out(mixed), "out")

    step = SplitBackward(linear_layers(nn.ModuleList([query, key, out])))
    store = DeferredGradients()
    x = torch.randn(2, 3, 4, requires_grad=True)
    gc.disable()
    try:
        with step.deferring(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
        with step.deferring(store):
            output.backward(torch.ones_like(output))
        del output
        nodes = seen.pop("nodes")
        assert len(nodes) >= 5
        assert all(node() is None for node in nodes)
        alive = {name for name, (storage, _) in seen.items() if storage() is not None}
        # Under autocast the shared input lives on as one copy in the lower precision.
        inputs = {"mixed"} if autocast else {"shared", "mixed"}
        assert alive == {*inputs, "d q", "d k", "d out"}
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for kept in store._kept
            for tensor in (kept.value, kept.gradient)
        }
        size = 2 if autocast else 4
        assert sum(storages.values()) == 2 * 3 * size * (4 + 4 + 4 + 6 + 4)
        store.accumulate()
        assert all(storage() is None for storage, _ in seen.values())
    finally:
        gc.enable()


def test_nothing_is_kept_of_frozen_layers():
    layer, step_layers = nn.Linear(4, 4), []
    layer.requires_grad_(False)
    step_layers.append(LinearLayer(layer))
    step, store = SplitBackward(step_layers), DeferredGradients()
    x = torch.randn(2, 4, requires_grad=True)
    with step.deferring(store):
        layer(x).sum().backward()
    assert len(store) == 0
    assert layer.weight.grad is None


def test_complex_layers_get_their_gradients_at_once():
    """Their products would need conjugates."""
    layer = nn.Linear(3, 3, dtype=torch.complex128)
    value = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)
    truth = torch.autograd.grad(layer(value).abs().sum(), [value, layer.weight])
    store = DeferredGradients()
    split = SplitBackward(linear_layers(layer))
    with split.deferring():
        output = layer(value)
    with split.deferring(store):
        output.abs().sum().backward()
    assert len(store) == 0
    torch.testing.assert_close([value.grad, layer.weight.grad], list(truth))


def test_a_failing_forward_leaves_no_patch_behind():
    layer = nn.Linear(4, 4)
    step = SplitBackward([LinearLayer(layer)])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), step.deferring():
        layer(torch.randn(2, 5))
    assert "forward" not in vars(layer)


def test_a_change_in_place_between_the_halves_is_refused():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    step, store = SplitBackward([LinearLayer(layer)]), DeferredGradients()
    with step.deferring(store):
        layer(x).sum().backward()
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        store.accumulate()


def test_second_derivatives_are_refused():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with SplitBackward([LinearLayer(layer)]).deferring(DeferredGradients()):
        output = layer(x).square().sum()
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(output, x, create_graph=True)


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class SameForward(nn.Linear):
    pass


def test_layers_are_found_once_and_only_where_their_forward_is_known():
    shared = nn.Linear(2, 2)
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled.compile(backend="eager")
    root = nn.ModuleList([
        shared, nn.Sequential(shared), OwnForward(2, 2), SameForward(2, 2), Transposed(2, 2), patched, compiled,
        torch.compile(nn.Linear(2, 2), backend="eager"), nn.Bilinear(2, 2, 2),
    ])  # fmt: skip
    assert [layer.module for layer in linear_layers(root)] == [shared, root[3], patched]
    found = linear_layers(root, (Transposed,))
    assert [(layer.module, layer.transposed) for layer in found][2] == (root[4], True)
    # A forward that somebody has put on the instance stays.
    with SplitBackward(found).deferring():
        assert [module for module in root[:7] if "forward" in vars(module)] == [shared, root[3], root[4], patched]
        assert patched(1) == 1


def test_compiled_callers_get_their_gradients_at_once():
    model, inputs = made(Plain)
    expected, wanted_inputs = made(Plain)
    fused(expected, wanted_inputs)
    inner = model.forward
    model.forward = torch.compile(inner, backend="eager")
    assert split(model, inputs) == [0, 0]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get_parameter(name).grad)


def sharded(rank):
    """How many layers take part once the model is sharded, and its gradients."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=rank, world_size=1)
    model, inputs = made(Plain)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return split(model, inputs), [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_sharded_layers_get_their_gradients_at_once():
    ((counts, got),) = run_processes(sharded, 1, timeout_s=60)
    expected, inputs = made(Plain)
    fused(expected, inputs)
    assert counts == [0, 0]
    for gradient, parameter in zip(got, expected.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
