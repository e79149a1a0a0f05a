"""Hidden-state accounting for TensorFlow Privacy: Keras 2, and for its model Keras 3 as well.

    data = cyclic_dataset(x, y, batch_size=100)
    model.compile(
        CyclicDPKerasSGDOptimizer(1.5, 2.0, learning_rate=0.5, weight_decay=0.01,
                                  loss_geometry=LossGeometry.softmax_cross_entropy(1.0)),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"))
    record = HiddenStateCallback(data=data)
    model.fit(data, epochs=20, callbacks=record.with_others())
    print(record.report(delta=1e-5))

TensorFlow is imported when a name that needs it is first used, so import this package before you
load a model that was saved with one of its optimizers, and name the optimizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hidden_state_adapters.tf_privacy import requirements

if TYPE_CHECKING:
    from hidden_state_adapters.tf_privacy.blocks import (
        BlockCoordinateUpdate,
    )
    from hidden_state_adapters.tf_privacy.callback import HiddenStateCallback
    from hidden_state_adapters.tf_privacy.data import cyclic_dataset
    from hidden_state_adapters.tf_privacy.dice import DiceUpdate
    from hidden_state_adapters.tf_privacy.losses import (
        EnvelopeBinaryCrossentropy,
        EnvelopeCategoricalCrossentropy,
        EnvelopeHinge,
        EnvelopeSparseCategoricalCrossentropy,
        EnvelopeSquaredError,
    )
    from hidden_state_adapters.tf_privacy.model import (
        HiddenStateModel,
        HiddenStateSequential,
        make_private,
    )
    from hidden_state_adapters.tf_privacy.optimizers import (
        BlockCoordinateKerasOptimizer,
        CyclicDPKerasSGDOptimizer,
        DiceKerasAdamOptimizer,
        DiceKerasSGDOptimizer,
    )
    from hidden_state_adapters.tf_privacy.run import PrivateRun
    from hidden_state_adapters.tf_privacy.statement import compute_last_iterate_privacy_statement

_MODULES = {
    "BlockCoordinateKerasOptimizer": "optimizers",
    "BlockCoordinateUpdate": "blocks",
    "CyclicDPKerasSGDOptimizer": "optimizers",
    "DiceKerasAdamOptimizer": "optimizers",
    "DiceKerasSGDOptimizer": "optimizers",
    "DiceUpdate": "dice",
    "EnvelopeBinaryCrossentropy": "losses",
    "EnvelopeCategoricalCrossentropy": "losses",
    "EnvelopeHinge": "losses",
    "EnvelopeSparseCategoricalCrossentropy": "losses",
    "EnvelopeSquaredError": "losses",
    "HiddenStateCallback": "callback",
    "HiddenStateModel": "model",
    "HiddenStateSequential": "model",
    "PrivateRun": "run",
    "compute_last_iterate_privacy_statement": "statement",
    "cyclic_dataset": "data",
    "make_private": "model",
}
_OF_KERAS_2 = ("HiddenStateCallback",)  # and the optimizers that it records
__all__ = [
    "BlockCoordinateKerasOptimizer",
    "BlockCoordinateUpdate",
    "CyclicDPKerasSGDOptimizer",
    "DiceKerasAdamOptimizer",
    "DiceKerasSGDOptimizer",
    "DiceUpdate",
    "EnvelopeBinaryCrossentropy",
    "EnvelopeCategoricalCrossentropy",
    "EnvelopeHinge",
    "EnvelopeSparseCategoricalCrossentropy",
    "EnvelopeSquaredError",
    "HiddenStateCallback",
    "HiddenStateModel",
    "HiddenStateSequential",
    "PrivateRun",
    "compute_last_iterate_privacy_statement",
    "cyclic_dataset",
    "make_private",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] != "statement":  # which needs no TensorFlow
        needs_keras_2 = name in _OF_KERAS_2 or name.endswith("Optimizer")
        requirements.check(name, needs_keras_2=needs_keras_2)
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
