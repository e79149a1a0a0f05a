"""The loss of a recommended run, as a module."""

from __future__ import annotations

from torch import nn

from hidden_state_accountants import Candidate
from hidden_state_adapters.opacus.losses import (
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeSquaredErrorLoss,
)

_PLAIN = {
    "softmax_cross_entropy": nn.CrossEntropyLoss,
    "logistic": nn.BCEWithLogitsLoss,
    "squared_error": lambda: nn.HuberLoss(delta=1e6),  # half the square
}
_ENVELOPES = {
    "softmax_cross_entropy": EnvelopeCrossEntropyLoss,
    "logistic": EnvelopeBCEWithLogitsLoss,
    "squared_error": EnvelopeSquaredErrorLoss,
}


def recommended_criterion(candidate: Candidate) -> nn.Module:
    """The loss to train a run of `hidden_state_accountants.recommend` with.

    Its plain form where the optimizer clips (composition), its envelope where nothing may expand.
    With `candidate.make_private_arguments()` and the batch size and learning rate of its event that
    is the whole run.
    """
    if candidate.smoothing is None:
        return _PLAIN[candidate.loss]()
    return _ENVELOPES[candidate.loss](clip_norm=candidate.clip_norm, smoothing=candidate.smoothing)
