"""The public names for type checkers; `__init__.py` imports the same ones lazily."""

from hidden_state_accountants.accountants import (
    BlockCoordinateAccountant as BlockCoordinateAccountant,
    ChienLiAccountant as ChienLiAccountant,
    DiceSgdAccountant as DiceSgdAccountant,
    KongRiberoAccountant as KongRiberoAccountant,
    LangevinAccountant as LangevinAccountant,
    LastIterateAccountant as LastIterateAccountant,
    ShiftedInterpolationAccountant as ShiftedInterpolationAccountant,
    compose_guarantees as compose_guarantees,
)
from hidden_state_accountants.auditing.audit import AuditReport as AuditReport, audit as audit
from hidden_state_accountants.bounds import (
    BOUNDS as BOUNDS,
    Bound as Bound,
    shifted_gdp_mu as shifted_gdp_mu,
)
from hidden_state_accountants.calibration import (
    calibrate_epochs as calibrate_epochs,
    calibrate_noise as calibrate_noise,
)
from hidden_state_accountants.comparing import (
    Comparison as Comparison,
    compare as compare,
    position_profile as position_profile,
)
from hidden_state_accountants.errors import UnsupportedRunError as UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder as BatchOrder
from hidden_state_accountants.events.block_coordinate import (
    BlockCoordinateDpEvent as BlockCoordinateDpEvent,
)
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent as DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent as LastIterateDpEvent
from hidden_state_accountants.events.loss_geometry import (
    LossGeometry as LossGeometry,
    LossKind as LossKind,
)
from hidden_state_accountants.events.schedule import Schedule as Schedule
from hidden_state_accountants.gain import Gain as Gain, would_gain as would_gain
from hidden_state_accountants.guarantee import Assumption as Assumption, Guarantee as Guarantee
from hidden_state_accountants.ledger import (
    Budget as Budget,
    BudgetExceededError as BudgetExceededError,
    budget as budget,
)
from hidden_state_accountants.losses.envelope import envelope_smoothing as envelope_smoothing
from hidden_state_accountants.process.noisy_process import (
    clipped_update_lipschitz as clipped_update_lipschitz,
)
from hidden_state_accountants.recommendation import (
    Candidate as Candidate,
    Recommendation as Recommendation,
    recommend as recommend,
)
from hidden_state_accountants.regulariser import Regulariser as Regulariser
from hidden_state_accountants.runs.run import RunRecorder as RunRecorder

__version__: str
