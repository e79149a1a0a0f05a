"""Privacy accounting of the model that is released: the last iterate.

Declare the run as one `LastIterateDpEvent`, compose it into an accountant, read epsilon:

    >>> import hidden_state_accountants as hsa
    >>> run = hsa.LastIterateDpEvent(
    ...     noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.4143, batch_size=500,
    ...     dataset_size=50_000, num_steps=20_000, batch_order="cyclic",
    ...     loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0), weight_decay=0.1)
    >>> print(f"{hsa.LastIterateAccountant().compose(run).get_epsilon(1e-5):.4f}")
    1.9930
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hidden_state_accountants.accountants import LastIterateAccountant, compose_guarantees
    from hidden_state_accountants.auditing.audit import audit
    from hidden_state_accountants.auditing.report import AuditReport
    from hidden_state_accountants.bounds import BOUNDS, Bound, shifted_gdp_mu
    from hidden_state_accountants.calibration import (
        calibrate_epochs,
        calibrate_noise,
        calibrate_weight_decay,
    )
    from hidden_state_accountants.comparing import Comparison, compare, position_profile
    from hidden_state_accountants.errors import UnsupportedRunError
    from hidden_state_accountants.events.batch_order import BatchOrder
    from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
    from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
    from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
    from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
    from hidden_state_accountants.events.schedule import Schedule
    from hidden_state_accountants.guarantee import Assumption, Guarantee
    from hidden_state_accountants.losses.envelope import envelope_smoothing
    from hidden_state_accountants.paper_accountants import (
        BlockCoordinateAccountant,
        ChienLiAccountant,
        DiceSgdAccountant,
        KongRiberoAccountant,
        LangevinAccountant,
        ShiftedInterpolationAccountant,
    )
    from hidden_state_accountants.process.batch_curvature import CurvatureRelease, release_curvature
    from hidden_state_accountants.process.geometry import clipped_update_lipschitz
    from hidden_state_accountants.recommendation import Candidate, Recommendation, recommend
    from hidden_state_accountants.regulariser import Regulariser
    from hidden_state_accountants.runs.last_iterate import RunRecorder

__version__ = "0.1.0"

__all__ = [
    "BOUNDS",
    "Assumption",
    "AuditReport",
    "BatchOrder",
    "BlockCoordinateAccountant",
    "BlockCoordinateDpEvent",
    "Bound",
    "Candidate",
    "ChienLiAccountant",
    "Comparison",
    "CurvatureRelease",
    "DiceSgdAccountant",
    "DiceSgdDpEvent",
    "Guarantee",
    "KongRiberoAccountant",
    "LangevinAccountant",
    "LastIterateAccountant",
    "LastIterateDpEvent",
    "LossGeometry",
    "LossKind",
    "Recommendation",
    "Regulariser",
    "RunRecorder",
    "Schedule",
    "ShiftedInterpolationAccountant",
    "UnsupportedRunError",
    "audit",
    "calibrate_epochs",
    "calibrate_noise",
    "calibrate_weight_decay",
    "clipped_update_lipschitz",
    "compare",
    "compose_guarantees",
    "envelope_smoothing",
    "position_profile",
    "recommend",
    "release_curvature",
    "shifted_gdp_mu",
]

# A name is imported when it is first used: SciPy and dp-accounting take a second to import, and
# `hsa --help` needs neither.
_MODULES = {
    "Assumption": "guarantee",
    "AuditReport": "auditing.report",
    "BOUNDS": "bounds",
    "BatchOrder": "events.batch_order",
    "BlockCoordinateAccountant": "paper_accountants",
    "BlockCoordinateDpEvent": "events.block_coordinate",
    "Bound": "bounds",
    "Candidate": "recommendation",
    "ChienLiAccountant": "paper_accountants",
    "Comparison": "comparing",
    "CurvatureRelease": "process.batch_curvature",
    "DiceSgdAccountant": "paper_accountants",
    "DiceSgdDpEvent": "events.dice_sgd",
    "Guarantee": "guarantee",
    "KongRiberoAccountant": "paper_accountants",
    "LangevinAccountant": "paper_accountants",
    "LastIterateAccountant": "accountants",
    "LastIterateDpEvent": "events.last_iterate",
    "LossGeometry": "events.loss_geometry",
    "LossKind": "events.loss_geometry",
    "Recommendation": "recommendation",
    "Regulariser": "regulariser",
    "RunRecorder": "runs.last_iterate",
    "Schedule": "events.schedule",
    "ShiftedInterpolationAccountant": "paper_accountants",
    "UnsupportedRunError": "errors",
    "audit": "auditing.audit",
    "calibrate_epochs": "calibration",
    "calibrate_noise": "calibration",
    "calibrate_weight_decay": "calibration",
    "clipped_update_lipschitz": "process.geometry",
    "compare": "comparing",
    "compose_guarantees": "accountants",
    "envelope_smoothing": "losses.envelope",
    "position_profile": "comparing",
    "recommend": "recommendation",
    "release_curvature": "process.batch_curvature",
    "shifted_gdp_mu": "bounds",
}


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package."""
    if name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
