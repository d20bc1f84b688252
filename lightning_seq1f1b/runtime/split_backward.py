"""Splits the backward of linear layers: the input gradient at once, the weight gradient whenever somebody asks for it.

The weight gradient of a linear layer needs its input and its output gradient, and nothing else of the autograd graph.
These two are kept until then, and the graph is freed by the input gradient's backward as usual. All other gradients,
such as those of norms and embeddings, come with the input gradient: their parameters are few, or need the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seq1f1b.ops.once import refuse_second_derivatives
from lightning_seq1f1b.runtime.linear_layers import LinearLayer
from lightning_seq1f1b.runtime.wide_gradients import LOW


class DeferredGradients:
    """What the weight gradients of one unit on one stage are made of."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        """How many uses of a linear layer have left something."""
        return len(self._kept)

    def keep(self, use: _Use, value: Tensor, gradient: Tensor) -> None:
        """Remember one use of a layer; `value` and `gradient` must not change until `accumulate`."""
        # The gradient itself, no alias of it: autograd hands out no tensor in place that somebody else refers to.
        value = value.detach()
        self._kept.append(_Kept(use, value, value._version, gradient, gradient._version))

    def accumulate(self) -> None:
        """Add all weight and bias gradients to `.grad`, and let go of what they were made of.

        Raises:
            RuntimeError: when an input or an output gradient was changed in place since `keep`.
        """
        with torch.no_grad():
            for kept in self._kept:
                kept.check()
            while self._kept:
                kept = self._kept.pop()
                with torch.autocast(kept.value.device.type, enabled=False):
                    kept.use.accumulate(kept.value, kept.gradient)


class SplitBackward:
    """The linear layers of one stage during one step whose backwards are split.

    A layer takes part when its weight and bias are ordinary parameters that nothing hooks into, and its weight is
    trained. All others, and all layers while they are compiled or are called in an unusual way, run their own forward
    and get their gradients at once.

    Args:
        layers: the candidates.
    """

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        self._now = _Now()
        self._forwards = {layer.module: _Forward(layer, self._now) for layer in layers if _is_deferrable(layer)}

    @contextmanager
    def deferring(self, store: DeferredGradients | None = None) -> Iterator[None]:
        """Run the layers' forwards so that their backwards can be split.

        Forwards and backwards both run inside it: a backward may run forwards again, to recompute activations.

        Args:
            store: where backwards leave what the weight gradients need. Without it they compute them.
        """
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward
        self._now.store = store
        try:
            yield
        finally:
            for module in self._forwards:
                del vars(module)["forward"]
            self._now.store = self._now.cast_input = None


class _Now:
    """What the layers of a stage share during a step.

    Attributes:
        store: of the backward that runs.
        weights: in autocast's dtype; one copy each for all chunks, as autocast's own cache holds.
        cast_input: the last input, and its copy in autocast's dtype, which the layers that follow on it share.
    """

    def __init__(self) -> None:
        self.store: DeferredGradients | None = None
        self.weights: dict[tuple[nn.Parameter, torch.dtype], Tensor] = {}
        self.cast_input: tuple[Tensor, int, Tensor] | None = None

    def input(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """An input as autocast would hand it to the layer."""
        if not _is_cast(value, dtype):
            return value
        if self.cast_input is not None:
            last, version, copy = self.cast_input
            if last is value and version == value._version and copy.dtype == dtype:
                return copy
        copy = value.to(dtype)
        self.cast_input = (value, value._version, copy)
        return copy

    def weight(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """A weight as autocast would hand it to the layer."""
        if not _is_cast(weight, dtype):
            return weight
        if (weight, dtype) not in self.weights:
            self.weights[weight, dtype] = weight.to(dtype)
        return self.weights[weight, dtype]


class _Forward:
    """Takes the place of a linear layer's forward."""

    def __init__(self, layer: LinearLayer, now: _Now) -> None:
        self._module, self._now = layer.module, now
        weight = layer.module.get_parameter("weight")
        self._use = _Use(weight, layer.module._parameters.get("bias"), layer.transposed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._can_defer(args, kwargs):
            return type(self._module).forward(self._module, *args, **kwargs)
        # torch does not annotate `apply`.
        return _InputGradient.apply(args[0], self._use.weight, self._use.bias, self._use, self._now)  # type: ignore[no-untyped-call]

    def _can_defer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            len(args) == 1
            and not kwargs
            and type(args[0]) in (Tensor, nn.Parameter)
            and args[0].is_floating_point()
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            # Not swapped for something else, as sharding and torch.func.functional_call do during a forward.
            and self._module._parameters.get("weight") is self._use.weight
            and self._module._parameters.get("bias") is self._use.bias
        )


@dataclass(frozen=True, eq=False)
class _Use:
    """The parameters of a linear layer, and how its gradients are made of its input and its output gradient."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool

    def factors(self, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the weight's gradient, from [..., inputs] and [..., outputs]."""
        value, gradient = value.reshape(-1, value.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        return (value.t(), gradient) if self.transposed else (gradient.t(), value)

    def bias_gradient(self, gradient: Tensor) -> Tensor | None:
        """The bias's gradient, from [..., outputs]; None where there is no bias to train."""
        if self.bias is None or not self.bias.requires_grad:
            return None
        return gradient.reshape(-1, gradient.shape[-1]).sum(0, dtype=_gradient_dtype(self.bias))

    def accumulate(self, value: Tensor, gradient: Tensor) -> None:
        """Add both to `.grad`."""
        _add_product(self.weight, *self.factors(value, gradient))
        total = self.bias_gradient(gradient)
        if total is not None:
            assert self.bias is not None
            self.bias.grad = total if self.bias.grad is None else self.bias.grad.add_(total)


@dataclass(frozen=True, eq=False)
class _Kept:
    """Input and output gradient of one use, with the versions that autograd counts in-place changes by."""

    use: _Use
    value: Tensor
    value_version: int
    gradient: Tensor
    gradient_version: int

    def check(self) -> None:
        if (self.value._version, self.gradient._version) != (self.value_version, self.gradient_version):
            raise RuntimeError(
                f"the input or output gradient of a linear layer with a weight of {list(self.use.weight.shape)} was "
                "changed in place before the weight's gradient was computed; choose a schedule that does not split "
                "the backward, such as seq1f1b or interleaved_seq1f1b"
            )


class _InputGradient(torch.autograd.Function):
    """x W + b, whose backward gives the gradient of x alone and keeps what those of W and b need."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, use: _Use, now: _Now
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.now, ctx.dtype = use, now, value.dtype
        low: Tensor = value
        low_weight: Tensor = weight
        low_bias: Tensor | None = bias
        device = value.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            low, low_weight = now.input(value, dtype), now.weight(weight, dtype)
            low_bias = bias.to(dtype) if bias is not None and _is_cast(bias, dtype) else bias
        ctx.save_for_backward(low, low_weight)
        matrix = low_weight.t() if use.transposed else low_weight
        output = F.linear(low.reshape(-1, low.shape[-1]), matrix, low_bias)
        # A view, even of a tensor nobody else has, would not let the caller change it in place. (torch.ops is untyped.)
        return torch.ops.aten._unsafe_view(output, [*low.shape[:-1], output.shape[-1]])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("a linear layer whose backward is split")
        if gradient is None:
            return None, None, None, None, None
        low, low_weight = ctx.saved_tensors
        own = weight = bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                own = gradient.matmul(low_weight.t() if ctx.use.transposed else low_weight).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                if ctx.now.store is not None:
                    ctx.now.store.keep(ctx.use, low, gradient)
                else:
                    weight = _product(ctx.use.factors(low, gradient), _gradient_dtype(ctx.use.weight))
                    bias = ctx.use.bias_gradient(gradient)
        return own, weight, bias, None, None


def _is_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast makes a copy of a tensor; it leaves double precision alone."""
    return tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)


def _is_deferrable(layer: LinearLayer) -> bool:
    module = layer.module
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    return (
        "forward" not in vars(module)
        and _is_plain(weight)
        and weight.is_floating_point()  # complex products would need conjugates
        and weight.requires_grad
        and weight.ndim == 2
        # A bias that is no parameter may be computed from others, as parametrizations do.
        and (_is_plain(bias) if bias is not None else getattr(module, "bias", None) is None)
    )


def _is_plain(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Whether nothing but its gradient's value depends on when a parameter gets its gradient."""
    return (
        type(parameter) is nn.Parameter and not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
    )


def _add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `.grad`, without a temporary of the parameter's size where the dtypes allow it."""
    total, dtype = parameter.grad, _gradient_dtype(parameter)
    if total is None and dtype == left.dtype:
        parameter.grad = torch.mm(left, right, out=torch.empty_like(parameter))
    elif total is None:
        parameter.grad = _product((left, right), dtype)
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _can_widen(left, total.dtype):
        torch.addmm(total, left, right, total.dtype, out=total)
    else:
        total.add_(torch.mm(left, right))


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """What a gradient is summed in: the parameter's dtype, if nobody has chosen another one."""
    return parameter.grad_dtype or parameter.dtype


def _product(factors: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    if _can_widen(factors[0], dtype):
        return torch.mm(*factors, dtype)
    return torch.mm(*factors).to(dtype)


def _can_widen(factor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product of such factors can be had in a wider dtype without being rounded to theirs first."""
    return factor.is_cuda and dtype == torch.float32 and factor.dtype in LOW
