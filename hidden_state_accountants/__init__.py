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
from typing import Any

__version__ = "0.1.0"

# A name is imported when it is first used (SPEC 1): SciPy and dp-accounting take a second to
# import, and `hsa --help` needs neither. Type checkers read the same names in `__init__.pyi`.
_NAMES = {
    "accountants": "BlockCoordinateAccountant ChienLiAccountant DiceSgdAccountant "
    "KongRiberoAccountant LangevinAccountant LastIterateAccountant ShiftedInterpolationAccountant "
    "compose_guarantees",
    "auditing.audit": "AuditReport audit",
    "bounds": "BOUNDS Bound shifted_gdp_mu",
    "calibration": "calibrate_epochs calibrate_noise",
    "comparing": "Comparison compare position_profile",
    "errors": "UnsupportedRunError",
    "events.batch_order": "BatchOrder",
    "events.block_coordinate": "BlockCoordinateDpEvent",
    "events.dice_sgd": "DiceSgdDpEvent",
    "events.last_iterate": "LastIterateDpEvent",
    "events.loss_geometry": "LossGeometry LossKind",
    "events.schedule": "Schedule",
    "gain": "Gain would_gain",
    "guarantee": "Assumption Guarantee",
    "ledger": "Budget BudgetExceededError budget",
    "losses.envelope": "envelope_smoothing",
    "process.noisy_process": "clipped_update_lipschitz",
    "recommendation": "Candidate Recommendation recommend",
    "regulariser": "Regulariser",
    "runs.run": "RunRecorder",
}
_MODULES = {
    name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package."""
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
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
