"""What the per-example gradients at hand must look like, and the sums made from them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure
from hidden_state_adapters.opacus.gradients.norms import OPACUS_CLIP_OFFSET, ROUNDING
from hidden_state_adapters.opacus.gradients.sums import were_used
from hidden_state_adapters.opacus.guards.base import Guard, Piece
from hidden_state_adapters.opacus.guards.precision import check_arithmetic, check_precision


def gradient_rows(params: Sequence[nn.Parameter]) -> int:
    """The number of per-example gradients of the batch that `params` hold.

    Raises:
        UnsupportedRunError: There are none, several batches were accumulated, the parameters
            disagree, they are clipped by a second backward pass, or torch is set to sum them in
            less than float32.
    """
    check_arithmetic(params)
    rows = set()
    for param in params:
        refuse_second_pass(param)
        sample = getattr(param, "grad_sample", None)
        if isinstance(sample, list):
            if len(sample) != 1:
                raise UnsupportedRunError(
                    f"got the gradients of {len(sample)} batches, expected 1: gradient "
                    "accumulation (several backward() before one step()) is not accounted: a "
                    "record may be in several of the batches, and counts once for each. Call "
                    "optimizer.zero_grad() after every step and backward() once per batch. For "
                    "batches that do not fit into memory raise the batch_size of the DataLoader "
                    "and let opacus.utils.batch_memory_manager.BatchMemoryManager split them."
                )
            sample = sample[0]
        if sample is None:
            raise UnsupportedRunError(
                "got no per-example gradients for a trainable parameter. Call the private model in "
                "train() mode and backward() before step(), and let every parameter take part. (If "
                "that is so: a second pass without backward(), for an accuracy or a log, makes "
                "Opacus wait for its gradients: look at outputs under torch.no_grad(). Layers that "
                "are run again by activation checkpointing have none: save memory with "
                "BatchMemoryManager instead.)"
            )
        check_precision("per-example gradients", sample)
        rows.add(len(sample))
    if len(rows) != 1:
        raise UnsupportedRunError(
            f"got {sorted(rows)} rows of per-example gradients in different parameters, expected "
            "the same number in all."
        )
    return rows.pop()


def refuse_second_pass(param: Any) -> None:
    """Raises UnsupportedRunError if the model clips as Opacus does in its ghost mode."""
    if hasattr(param, "_norm_sample"):
        raise UnsupportedRunError(
            "Expected GradSampleModule or GhostGradSampleModule, got Opacus' ghost clipping: its "
            "second backward pass leaves only a sum, clipped with min(1, C / (norm + 1e-6)), in "
            "which there is more than its norms know. Wrap the model in "
            "hidden_state_adapters.opacus.GhostGradSampleModule and use the plain criterion."
        )


class SumsGuard(Guard):
    """Notices a sum of clipped gradients that does not come from the pieces of the batch.

    Those of a finished step, which nobody touched, are dropped: a loop that calls model.zero_grad()
    in place of optimizer.zero_grad() leaves them.

    Args:
        params: All trainable parameters.
    """

    def __init__(self, params: Sequence[nn.Parameter]):
        self._params = params
        self._versions: list[tuple[torch.Tensor, int] | None] = [None] * len(params)
        self._finished: list[tuple[weakref.ReferenceType[torch.Tensor], int] | None] = []

    def _now(self) -> list[tuple[torch.Tensor, int] | None]:
        sums = (p.summed_grad for p in self._params)  # type: ignore[attr-defined]
        return [None if total is None else (total, total._version) for total in sums]

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if somebody else wrote the sums, or used the gradients."""
        self._drop_finished(piece)
        for now, then in zip(self._now(), self._versions, strict=True):
            if not _is_same_sum(now, then):
                raise UnsupportedRunError(
                    f"step {piece.step} starts with a sum of clipped gradients that does not come "
                    "from the pieces of its batch. Call optimizer.zero_grad() after every step, "
                    "and leave summed_grad alone."
                )

    def _drop_finished(self, piece: Piece) -> None:
        finished, self._finished = self._finished, []
        pairs = zip(self._now(), finished, strict=False)
        is_left = finished and all(
            then is not None and _is_same_sum(now, (then[0](), then[1])) for now, then in pairs
        )
        if is_left and not were_used(piece.params):
            for param in self._params:
                param.summed_grad = None  # type: ignore[attr-defined]

    def used(self, piece: Piece) -> None:
        """Remembers what the piece left."""
        self._versions = self._now()

    def after(self, step: int) -> None:
        """The next batch starts without sums."""
        self._finished = [v and (weakref.ref(v[0]), v[1]) for v in self._versions]
        self._versions = [None] * len(self._params)

    def resume(self, steps: int) -> None:
        """Pieces from before the checkpoint was loaded belong to no batch of the run."""
        self._finished, self._versions = [], [None] * len(self._params)

    @property
    def is_between_batches(self) -> bool:
        """Whether no piece of a batch waits for the others."""
        return not any(self._versions)


def _is_same_sum(
    now: tuple[torch.Tensor, int] | None, then: tuple[torch.Tensor | None, int] | None
) -> bool:
    if now is None or then is None:
        return now is then
    return now[0] is then[0] and now[1] == then[1]


class GradientGuard(Guard):
    """Notices gradients that are not finite, or longer than declared.

    Args:
        bound: What was declared about the norm of every per-example gradient, or None.
        name: Of the declaration.
        remedy: What to do about a longer one.
        slack: Rounding of a norm that is exactly at its bound, relative to it.
    """

    def __init__(
        self, bound: float | None = None, *, name: str = "", remedy: str = "", slack: float = 0.0
    ):
        self._bound, self._name, self._remedy, self._slack = bound, name, remedy, slack

    @classmethod
    def of_lipschitz(cls, lipschitz: float | None) -> GradientGuard:
        """For a declared Lipschitz constant of the loss of one record."""
        return cls(
            lipschitz,
            name="lipschitz",
            remedy="The loss is not the declared one (sum instead of mean? class weights? a scaled "
            "loss?) or the features are longer than declared. The step was not taken. Correct "
            "loss_geometry, criterion or feature_norm.",
            slack=ROUNDING + torch.finfo(torch.float32).eps,
        )

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What is verified at every step."""
        if self._bound is not None:
            yield Assumption.checked(f"per-example gradient norms at most {self._bound:g}")

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """The largest norm of the piece."""
        return {"gradient": piece.largest_norm}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if it is not what was declared, or not a number."""
        self.check(piece.step, values["gradient"])

    def check(self, step: int, largest: float) -> None:
        """As `judge`, of a norm that is known."""
        if self._bound is not None and not largest <= self._bound * (1 + self._slack):
            raise UnsupportedRunError(
                f"step {step} has a per-example gradient of norm {largest:.8g}, expected at most "
                f"the declared {self._name} = {self._bound:.8g}. {self._remedy}"
            )
        if not math.isfinite(largest):
            raise UnsupportedRunError(
                f"step {step} has a per-example gradient whose norm is not finite (or a square "
                "overflows): no clip bounds it. The step was not taken. Look for a division by 0, "
                "or scale the loss down."
            )


def check_clip_margin(clip_norm: float, lipschitz: float | None) -> None:
    """Refuses a clip norm so close above `lipschitz` that Opacus' clip still acts.

    Opacus multiplies with min(1, C / (norm + 1e-6)), so gradients that are as long as the bound are
    left alone only if C exceeds it by that much.
    """
    if lipschitz is None or clip_norm < lipschitz:
        return
    needed = lipschitz * (1 + 2 * ROUNDING) + OPACUS_CLIP_OFFSET
    if clip_norm < needed:
        raise UnsupportedRunError(
            f"Expected max_grad_norm >= {needed:.9g} or below lipschitz = {lipschitz:.9g}, got "
            f"{clip_norm:.9g}: Opacus clips with min(1, C / (norm + 1e-6)), which still shortens "
            "gradients that are as long as the bound. Raise max_grad_norm a little: "
            f"{needed * (1 + 1e-5):.6g} will do."
        )
