"""How CUDA's flash kernels are called. No GPU is needed: their published signatures stand in for them."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from support.attention_cases import inputs, with_gradients
from torch import Tensor

from lightning_seq1f1b.ops import flash, plain
from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.kernel_attention import kernel_attention
from lightning_seq1f1b.ops.kernels import FLASH_ATTN_2, FLASH_ATTN_3, TORCH_FLASH, Kernel
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility


def heads_outside(*tensors: Tensor) -> list[Tensor]:
    """[rows, tokens, heads, size], as those kernels take it, to the layout of ours."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors)
    return [tensor.transpose(1, 2) for tensor in tensors]


def scores(scale: float, causal: bool, left: int, right: int, softcap: float = 0.0) -> Options:
    """What their arguments mean: bottom-right aligned, and a window counts the keys at the left of a query's own."""
    assert causal
    assert right == 0
    return Options(scale, softcap or None, Visibility(None if left < 0 else left + 1))


def computed_forward(q: Tensor, k: Tensor, v: Tensor, meaning: Options) -> tuple[Tensor, Tensor]:
    output, lse = plain.forward(*heads_outside(q, k, v), meaning)
    return output.transpose(1, 2), lse


def computed_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, meaning: Options):
    dout, q, k, v, out = heads_outside(dout, q, k, v, out)
    key_gradient, value_gradient = torch.zeros_like(k), torch.zeros_like(v)
    query_gradient = plain.backward(dout, Attended(q, k, v, out, lse), key_gradient, value_gradient, meaning)
    return [tensor.transpose(1, 2) for tensor in (query_gradient, key_gradient, value_gradient)]


def flash_attn_2() -> SimpleNamespace:
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        meaning = scores(softmax_scale, causal, window_size_left, window_size_right, softcap)
        return *computed_forward(q, k, v, meaning), torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, deterministic) == (0.0, None, False)
        meaning = scores(softmax_scale, causal, window_size_left, window_size_right, softcap)
        gradients = computed_backward(dout, q, k, v, out, softmax_lse, meaning)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            assert target.is_contiguous()
            target.copy_(gradient)
        return torch.empty(0)

    return SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


def flash_attn_3() -> SimpleNamespace:
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):  # fmt: skip
        meaning = scores(softmax_scale, causal, window_size_left, window_size_right, softcap)
        return *computed_forward(q, k, v, meaning), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        meaning = scores(softmax_scale, is_causal, window_size_left, window_size_right, softcap)
        gradients = computed_backward(dout, q, k, v, out, softmax_lse, meaning)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)
        return torch.empty(0)

    return SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


def torch_flash() -> SimpleNamespace:
    forward_schema = torch.ops.aten._flash_attention_forward.default._schema
    backward_schema = torch.ops.aten._flash_attention_backward.default._schema

    def named(schema: torch.FunctionSchema, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        parameters = [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in schema.arguments
        ]
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def meaning(given: dict[str, object]) -> Options:
        left, right = given["window_size_left"], given["window_size_right"]
        assert given["dropout_p"] == 0.0
        assert (given["max_q"], given["max_k"]) == (given["query"].shape[1], given["key"].shape[1])
        return scores(given["scale"], given["is_causal"], -1 if left is None else left, 0 if right is None else right)

    def forward(*args, **kwargs):
        given = named(forward_schema, args, kwargs)
        assert not given["return_debug_mask"]
        output, lse = computed_forward(given["query"], given["key"], given["value"], meaning(given))
        return output, lse, *(torch.empty(0) for _ in range(3))

    def backward(*args, **kwargs):
        given = named(backward_schema, args, kwargs)
        inputs = [given[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
        return computed_backward(*inputs, meaning(given))

    return SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)


KERNELS = [FLASH_ATTN_2, FLASH_ATTN_3, TORCH_FLASH]


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(flash, "flash_attn_2", flash_attn_2)
    monkeypatch.setattr(flash, "flash_attn_3", flash_attn_3)
    monkeypatch.setattr(flash, "_aten", torch_flash())
    return request.param


OPTIONS = [{}, {"window": 4}, {"window": 1}, {"softcap": 0.9}, {"sinks": True}]


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (kernel, options)
        for kernel in KERNELS
        for options in OPTIONS
        if kernel is not TORCH_FLASH or "softcap" not in options
    ],
    indirect=["kernel"],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_it_is_the_twin(kernel: Kernel, options: dict[str, object]) -> None:
    query, key, value = inputs(7, 12)
    softcap, visible = options.get("softcap"), Visibility(options.get("window"))
    sinks = torch.linspace(-2, 3, 4, dtype=torch.float64) if "sinks" in options else None
    tensors = (query, key, value)
    given = Options(0.3, softcap, visible)
    got = with_gradients(lambda: kernel_attention(*tensors, sinks, kernel, given, None), *tensors)
    expected = with_gradients(
        lambda: reference_attention(*tensors, scale=0.3, softcap=softcap, visible=visible, sinks=sinks), *tensors
    )
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_torch_takes_the_call() -> None:
    """On meta tensors torch checks the arguments of its own kernels, and tells the shapes they give."""
    query, key, value = (tensor.detach().bfloat16().to("meta") for tensor in inputs(7, 12))
    given = Options(0.3, visible=Visibility(4))
    output, lse = flash.torch_forward(query, key, value, given)
    assert (output.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
    gradients = [torch.zeros(tensor.shape, device="meta") for tensor in (key, value)]
    got = flash.torch_backward(output, Attended(query, key, value, output, lse), *gradients, given)
    assert got.shape == query.shape


def test_only_generations_whose_arguments_are_known_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def today(dq, window_size_left, window_size_right, softcap, causal): ...
    def yesterday(dq, window_size, softcap, causal): ...

    made = torch.library.custom_op("lightning_seq1f1b_test::backward", mutates_args=("dq",))

    @made
    def as_an_op(dq: Tensor, window_size_left: int, softcap: float, causal: bool) -> None: ...

    for function, known in ((today, True), (yesterday, False), (as_an_op, True)):
        module = SimpleNamespace(_flash_attn_backward=function)
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_interface=module))
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
        flash.flash_attn_2.cache_clear()
        assert (flash.flash_attn_2() is module) == known
    flash.flash_attn_2.cache_clear()
