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
    from hidden_state_accountants.accountants import (
        BlockCoordinateAccountant as BlockCoordinateAccountant,
    )
    from hidden_state_accountants.accountants import ChienLiAccountant as ChienLiAccountant
    from hidden_state_accountants.accountants import DiceSgdAccountant as DiceSgdAccountant
    from hidden_state_accountants.accountants import (
        KongRiberoAccountant as KongRiberoAccountant,
    )
    from hidden_state_accountants.accountants import LangevinAccountant as LangevinAccountant
    from hidden_state_accountants.accountants import LastIterateAccountant as LastIterateAccountant
    from hidden_state_accountants.accountants import (
        ShiftedInterpolationAccountant as ShiftedInterpolationAccountant,
    )
    from hidden_state_accountants.accountants import compose_guarantees as compose_guarantees
    from hidden_state_accountants.auditing.audit import AuditReport as AuditReport
    from hidden_state_accountants.auditing.audit import audit as audit
    from hidden_state_accountants.bounds import BOUNDS as BOUNDS
    from hidden_state_accountants.bounds import Bound as Bound
    from hidden_state_accountants.bounds import shifted_gdp_mu as shifted_gdp_mu
    from hidden_state_accountants.calibration import calibrate_epochs as calibrate_epochs
    from hidden_state_accountants.calibration import calibrate_noise as calibrate_noise
    from hidden_state_accountants.calibration import (
        calibrate_weight_decay as calibrate_weight_decay,
    )
    from hidden_state_accountants.comparing import Comparison as Comparison
    from hidden_state_accountants.comparing import compare as compare
    from hidden_state_accountants.comparing import position_profile as position_profile
    from hidden_state_accountants.errors import UnsupportedRunError as UnsupportedRunError
    from hidden_state_accountants.events.batch_order import BatchOrder as BatchOrder
    from hidden_state_accountants.events.block_coordinate import (
        BlockCoordinateDpEvent as BlockCoordinateDpEvent,
    )
    from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent as DiceSgdDpEvent
    from hidden_state_accountants.events.last_iterate import (
        LastIterateDpEvent as LastIterateDpEvent,
    )
    from hidden_state_accountants.events.loss_geometry import LossGeometry as LossGeometry
    from hidden_state_accountants.events.loss_geometry import LossKind as LossKind
    from hidden_state_accountants.events.schedule import Schedule as Schedule
    from hidden_state_accountants.guarantee import Assumption as Assumption
    from hidden_state_accountants.guarantee import Guarantee as Guarantee
    from hidden_state_accountants.losses.envelope import envelope_smoothing as envelope_smoothing
    from hidden_state_accountants.process.batch_curvature import (
        CurvatureRelease as CurvatureRelease,
    )
    from hidden_state_accountants.process.batch_curvature import (
        release_curvature as release_curvature,
    )
    from hidden_state_accountants.process.geometry import (
        clipped_update_lipschitz as clipped_update_lipschitz,
    )
    from hidden_state_accountants.recommendation import Candidate as Candidate
    from hidden_state_accountants.recommendation import Recommendation as Recommendation
    from hidden_state_accountants.recommendation import recommend as recommend
    from hidden_state_accountants.regulariser import Regulariser as Regulariser
    from hidden_state_accountants.runs.last_iterate import RunRecorder as RunRecorder

__version__ = "0.1.0"

# A name is imported when it is first used: SciPy and dp-accounting take a second to import, and
# `hsa --help` needs neither.
_NAMES = {
    "accountants": "BlockCoordinateAccountant ChienLiAccountant DiceSgdAccountant "
    "KongRiberoAccountant LangevinAccountant LastIterateAccountant ShiftedInterpolationAccountant "
    "compose_guarantees",
    "auditing.audit": "AuditReport audit",
    "bounds": "BOUNDS Bound shifted_gdp_mu",
    "calibration": "calibrate_epochs calibrate_noise calibrate_weight_decay",
    "comparing": "Comparison compare position_profile",
    "errors": "UnsupportedRunError",
    "events.batch_order": "BatchOrder",
    "events.block_coordinate": "BlockCoordinateDpEvent",
    "events.dice_sgd": "DiceSgdDpEvent",
    "events.last_iterate": "LastIterateDpEvent",
    "events.loss_geometry": "LossGeometry LossKind",
    "events.schedule": "Schedule",
    "guarantee": "Assumption Guarantee",
    "losses.envelope": "envelope_smoothing",
    "process.batch_curvature": "CurvatureRelease release_curvature",
    "process.geometry": "clipped_update_lipschitz",
    "recommendation": "Candidate Recommendation recommend",
    "regulariser": "Regulariser",
    "runs.last_iterate": "RunRecorder",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


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
