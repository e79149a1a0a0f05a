"""Hidden-state accounting for Opacus.

    engine = HiddenStatePrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.0,
        max_grad_norm="auto", criterion=criterion, feature_norm=1.0)
    ...
    print(engine.report(delta=1e-5))

Importing this package also makes ``opacus.PrivacyEngine(accountant="hidden_state")`` work.
"""

try:
    from opacus.accountants import register_accountant
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("opacus", "torch"):
        raise
    raise ImportError(
        f"hidden_state_adapters.opacus needs Opacus 1.6 and PyTorch, and {error.name} is missing. "
        "Install them: pip install 'hidden-state-accountants[opacus]'"
    ) from error

from hidden_state_adapters.opacus.accountant import MECHANISM, HiddenStateAccountant
from hidden_state_adapters.opacus.block_coordinate import (
    BlockCoordinate,
    BlockCoordinateOptimizer,
)
from hidden_state_adapters.opacus.dice import (
    DiceAdamOptimizer,
    DiceSGD,
    DiceSGDOptimizer,
)
from hidden_state_adapters.opacus.engine import HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.epsilon_log import log_epsilon
from hidden_state_adapters.opacus.fit_head import fit_head
from hidden_state_adapters.opacus.losses import (
    EnvelopeBCEWithLogitsLoss,
    EnvelopeCrossEntropyLoss,
    EnvelopeHingeLoss,
    EnvelopeSquaredErrorLoss,
    recommended_criterion,
)
from hidden_state_adapters.opacus.order import Batches
from hidden_state_adapters.opacus.step_maps import (
    BallProjection,
    BoxProjection,
    ParameterBallsProjection,
)

register_accountant(MECHANISM, HiddenStateAccountant, force=True)

__all__ = [
    "BallProjection",
    "Batches",
    "BlockCoordinate",
    "BlockCoordinateOptimizer",
    "BoxProjection",
    "DiceAdamOptimizer",
    "DiceSGD",
    "DiceSGDOptimizer",
    "EnvelopeBCEWithLogitsLoss",
    "EnvelopeCrossEntropyLoss",
    "EnvelopeHingeLoss",
    "EnvelopeSquaredErrorLoss",
    "HiddenStateAccountant",
    "HiddenStatePrivacyEngine",
    "ParameterBallsProjection",
    "fit_head",
    "log_epsilon",
    "recommended_criterion",
]
