"""Rounding of float32: never coarse in a step, nor in the pass of a declared loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError

_AS_IT_IS = contextlib.nullcontext()
_REMEDY = (
    "the gradients are then off by 1e-3 of their length or more. Train in float32; only a frozen "
    "backbone may be coarser, inside the model's forward, if it sets back what it sets."
)


def is_half(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor is in half precision, in which no sum of gradients is made."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def check_precision(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedRunError unless `tensor` is float32 or float64."""
    if tensor.dtype not in (torch.float32, torch.float64):
        raise UnsupportedRunError(
            f"Expected {name} in float32 or float64, got {tensor.dtype}: coarse rounding makes the "
            "update expand small distances. Train in float32, without autocast."
        )


def is_exact() -> bool:
    """Tells whether float32 products are those of float32: no autocast, no TF32, no bfloat16."""
    return not torch._C._is_any_autocast_enabled() and _product_precision() == "highest"


def exact_products(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Within it float32 products are those of float32, whatever a loop set.

    Rounded in TF32, one record would count for up to 1.001 times the clip norm in a sum of clipped
    gradients, rounded in bfloat16 for more.
    """
    return _AS_IT_IS if is_exact() else _highest(device_type)


@contextlib.contextmanager
def _highest(device_type: str) -> Iterator[None]:
    before = _product_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product_precision() -> str:
    """Returns what torch calls the precision of float32 products."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # since torch 2.9
        raise UnsupportedRunError(
            "Expected one precision of float32 matrix products, got one of a device by itself "
            '(TF32 or bfloat16). Call torch.set_float32_matmul_precision("highest").'
        ) from None


def check_arithmetic(params: Sequence[nn.Parameter]) -> None:
    """Refuses a training pass of a declared loss under autocast, or with coarse matrix products.

    No contraction forgives gradients that are off in EVERY step: one record moves a mean over b
    records by 2/b of their length, and in a single step per epoch. Parameters in float64 are never
    rounded so.
    """
    if is_exact():
        return  # whatever the parameters are
    for device_type in {p.device.type for p in params}:
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            raise UnsupportedRunError(
                f"Expected no autocast, got torch.autocast({device_type!r}): {_REMEDY}"
            )
    precision = _product_precision()
    if precision != "highest" and any(p.dtype == torch.float32 for p in params):
        raise UnsupportedRunError(
            f"Expected float32 matrix products of the highest precision, got {precision!r} (TF32 "
            f'or bfloat16; torch.set_float32_matmul_precision("highest") sets it): {_REMEDY}'
        )


def check_convolutions(params: Sequence[nn.Parameter]) -> None:
    """Refuses TF32 and bfloat16 in convolutions and recurrent layers, as cuDNN has by default."""
    if all(p.dtype == torch.float64 for p in params):
        return
    for device_type in {p.device.type for p in params}:
        on_cuda = device_type == "cuda"
        backend = torch.backends.cudnn if on_cuda else torch.backends.mkldnn
        parts = [getattr(backend, name, None) for name in ("conv", "rnn")]
        precisions = [getattr(part, "fp32_precision", None) for part in parts]
        if None in precisions:  # before torch 2.9
            precisions = ["tf32" if on_cuda and torch.backends.cudnn.allow_tf32 else "ieee"]
        if not {"ieee", "none"}.issuperset(precisions):
            raise UnsupportedRunError(
                f"Expected convolutions and recurrent layers in float32 with a declared "
                f"loss_geometry, got {precisions} on {device_type!r} "
                "(torch.backends.cudnn.allow_tf32 = False, on a CPU "
                f'torch.backends.mkldnn.conv.fp32_precision = "ieee", sets it): {_REMEDY}'
            )
