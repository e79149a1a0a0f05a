"""Products of float32 tensors that no setting of a loop rounds as if they were coarser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hidden_state_accountants import UnsupportedRunError


def is_exact() -> bool:
    """Whether float32 products are those of float32: no autocast, no TF32, no bfloat16."""
    return not any_autocast() and matrix_product_precision() == "highest"


@contextlib.contextmanager
def exact_products(device_type: str) -> Iterator[None]:
    """Within it float32 products are those of float32, whatever a loop set.

    Raises:
        UnsupportedRunError: The precision was set for one device by itself.
    """
    if is_exact():
        yield
        return
    before = matrix_product_precision()
    if before not in ("highest", "high", "medium"):
        raise UnsupportedRunError(
            f"Expected one precision of float32 matrix products, got {before!r} (TF32 or "
            'bfloat16). Call torch.set_float32_matmul_precision("highest").'
        )
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def any_autocast() -> bool:
    """Whether autocast is enabled for some type of device."""
    return bool(torch._C._is_any_autocast_enabled())


def matrix_product_precision() -> str:
    """What torch calls the precision of float32 products."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # since torch 2.9, where one device was set by itself
        return "lower on some device"
