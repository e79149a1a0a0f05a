"""Declaration of a DiceSGD run: clipped gradients with clipped error feedback.

>>> import hidden_state_accountants as hsa
>>> event = hsa.DiceSgdDpEvent(
...     noise_std=0.02, clip_norm=1.0, error_clip_norm=1.0, batch_size=1000,
...     dataset_size=50_000, num_steps=150, gradient_bound=5.0)
>>> event.sampling_probability
0.02
"""

from __future__ import annotations

import math

import attrs

from hidden_state_accountants import validate
from hidden_state_accountants.events.batch_order import (
    BatchOrder,
    DealtEvent,
    parse_batch_order,
)


@attrs.frozen(kw_only=True, repr=False)
class DiceSgdDpEvent(DealtEvent):
    r"""A run of DiceSGD that releases every iterate and keeps the error hidden.

    .. math::
        v_t = \frac1B \sum_{i \in B_t} \mathrm{clip}(g_i, C_1) + \mathrm{clip}(e_t, C_2), \quad
        x_{t+1} = x_t - \eta_t (v_t + \mathcal{N}(0, \sigma_1^2 I)), \quad
        e_{t+1} = e_t + \frac1B \sum_{i \in B_t} g_i - v_t, \quad e_0 = 0

    with :math:`\mathrm{clip}(v, C) = \min(1, C/|v|)\, v`; in the automatic variant
    :math:`C v/|v|`, and 0 at 0. Any update that is computed from the noisy :math:`v_t` alone (Adam)
    is covered as well: it is post-processing.

    Formal guarantees of the mechanism that the event stands for:
      - Released: all iterates, or all noisy :math:`v_t`. The error :math:`e_t`, a function of the
        data without noise, never is (nor saved, logged, or used by anything but clip).
      - Batches do not depend on the data; the divisor B, T and all hyper-parameters are public,
        fixed in advance and the same for neighbouring data sets.
      - One record is one row and is clipped on its own.
      - x_0 does not depend on the data and e_0 = 0. The error survives from step to step: a run is
        ONE event with all its steps, never several composed ones that keep the error (a resumed
        run, an event per step or epoch).

    Attributes:
        noise_std: sigma_1 >= 0, standard deviation of the noise on the MEAN update v: the noise
            multiplier times clip_norm / batch_size. 0 gives epsilon = infinity.
        clip_norm: C_1 > 0, of each gradient.
        error_clip_norm: C_2 > 0, of the error e, which is in units of the mean update as well. (The
            constant C >= B C_2 of the paper's Theorem 3.7 is in units of the sum.)
        batch_size: B, the public constant that sums are divided by.
        dataset_size: N.
        num_steps: T.
        batch_order: A `BatchOrder` or its value.
        gradient_bound: G > 0, a bound on the norm of every per-example gradient before clipping,
            for all records and iterates; inf if none is known.
        sampling_rate: POISSON only: the probability with which every record joins every batch; None
            is batch_size / dataset_size.
        automatic: True if both clips normalise (the paper's Algorithm 4).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No run can have these values.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2, 3 and 4.
    """

    noise_std: float = attrs.field(validator=validate.MAGNITUDE)
    clip_norm: float = attrs.field(validator=validate.POSITIVE)
    error_clip_norm: float = attrs.field(validator=validate.POSITIVE)
    batch_size: int = attrs.field(validator=validate.COUNT)
    dataset_size: int = attrs.field(validator=validate.COUNT)
    num_steps: int = attrs.field(validator=validate.COUNT)
    batch_order: BatchOrder = attrs.field(default=BatchOrder.POISSON, converter=parse_batch_order)
    gradient_bound: float = attrs.field(
        default=math.inf,
        validator=validate.checked(validate.magnitude, positive=True, allow_inf=True),
    )
    automatic: bool = attrs.field(default=False, validator=validate.FLAG)
    sampling_rate: float | None = None

    def __attrs_post_init__(self) -> None:
        self._check_dealing()
