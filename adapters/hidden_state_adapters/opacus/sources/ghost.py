"""Opacus' criterion of ghost clipping, for losses of which every record has one."""

from __future__ import annotations

from typing import Any

from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)

from hidden_state_accountants import UnsupportedRunError


class RowLosses(DPLossFastGradientClipping):
    """As Opacus' criterion, which multiplies the losses of the records with their clip factors.

    Losses of shape (records, 1) would be broadcast to all pairs of records, and nothing be clipped.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> DPTensorFastGradientClipping:
        """The losses of a batch; `backward()` makes both passes.

        Raises:
            UnsupportedRunError: There is not one loss for each record.
        """
        made = super().__call__(*args, **kwargs)
        shape = tuple(made.loss_per_sample.shape)
        if len(shape) != 1:
            raise UnsupportedRunError(
                f"Expected one loss for each record, shape (records,), got {shape}: the clip "
                "factors of all records would multiply each of them. Flatten outputs and targets "
                '(outputs.squeeze(1)), or use grad_sample_mode="hooks".'
            )
        return made
