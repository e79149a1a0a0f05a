"""Settings of torch that round the arithmetic of float32 tensors as if they were coarser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.gradients.exact import is_exact, matrix_product_precision

_FULL = ("ieee", "none")


def check_precision(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedRunError unless `tensor` is float32 or float64."""
    if tensor.dtype not in (torch.float32, torch.float64):
        raise UnsupportedRunError(
            f"Expected {name} in float32 or float64, got {tensor.dtype}: coarse rounding makes the "
            "update expand small distances. Train in float32, without autocast."
        )


def check_arithmetic(params: Iterable[nn.Parameter]) -> None:
    """Refuses autocast, and TF32 or bfloat16 in matrix products of float32.

    The clipped sum is a matrix product: rounded in TF32, one record counts for up to 1.001 times
    the clip norm, rounded in bfloat16 for more, whatever the noise was computed for. Gradients are
    then also off by about 1e-3 of their length in EVERY step, which no contraction forgives (one
    record moves a mean over b records by 2/b of it, and in a single step per epoch).

    Args:
        params: The trainable parameters. Those in float64 are never rounded so.

    Raises:
        UnsupportedRunError: The arithmetic is not that of float32.
    """
    if is_exact():
        return  # whatever the parameters are
    params = list(params)
    for device_type in {p.device.type for p in params}:
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            raise UnsupportedRunError(
                f"Expected no autocast, got torch.autocast({device_type!r}): gradients and their "
                "sums are then rounded to 8 or 11 bits, so that a record can count for more than "
                "the clip norm. Train in float32; only a frozen backbone may run under autocast, "
                "inside the model's forward."
            )
    if any(p.dtype == torch.float32 for p in params):
        _check_matrix_products()


def _check_matrix_products() -> None:
    precision = matrix_product_precision()
    if precision != "highest":
        raise UnsupportedRunError(
            f"Expected float32 matrix products of the highest precision, got {precision!r} (TF32 "
            "or bfloat16): the sum of clipped gradients is such a product, so a record can count "
            'for more than the clip norm. Call torch.set_float32_matmul_precision("highest"); only '
            "a frozen backbone may lower it, inside the model's forward, if it sets it back."
        )


def check_convolutions(params: Sequence[nn.Parameter]) -> None:
    """Refuses TF32 and bfloat16 in convolutions and recurrent layers of float32.

    cuDNN uses TF32 unless told otherwise. It cannot touch the clip, which is a matrix product, but
    the gradients are not those of the declared loss.

    Args:
        params: The trainable parameters.

    Raises:
        UnsupportedRunError: They may be rounded so on the device of `params`.
    """
    if all(p.dtype == torch.float64 for p in params):
        return
    for device_type in {p.device.type for p in params}:
        for precision in _convolution_precisions(device_type):
            if precision not in _FULL:
                raise UnsupportedRunError(
                    f"Expected convolutions and recurrent layers in float32 with a declared "
                    f"loss_geometry, got precision {precision!r} on {device_type!r}: the gradients "
                    "are then not those of the declared loss. Set torch.backends.cudnn.allow_tf32 "
                    "= False (on CPU torch.backends.mkldnn.conv.fp32_precision and rnn's = "
                    '"ieee").'
                )


def _convolution_precisions(device_type: str) -> Iterator[str]:
    on_cuda = device_type == "cuda"
    backend = torch.backends.cudnn if on_cuda else torch.backends.mkldnn
    parts = [getattr(backend, name, None) for name in ("conv", "rnn")]
    names = [getattr(part, "fp32_precision", None) for part in parts]
    if None not in names:  # since torch 2.9
        yield from map(str, names)
    elif on_cuda:
        yield "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
