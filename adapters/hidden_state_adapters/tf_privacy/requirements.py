"""Says what has to be installed and set before TensorFlow's part can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import os

_OLDEST = (2, 15)  # and the last one with Keras 2
_FRESH = (
    "Install hidden-state-accountants[tf] into a fresh environment with Python 3.10 or 3.11 "
    "(TensorFlow 2.15, tensorflow-privacy 0.9.0, dp-accounting 0.4.3, numpy below 2). On Python "
    "3.12 and newer install hidden-state-accountants[keras3], for HiddenStateModel and PrivateRun."
)
_LEGACY = (
    "Optimizers with noise need Keras 2: Keras 3 never shows an optimizer the loss of one example. "
    "Use TensorFlow 2.15, or HiddenStateModel, which trains with Keras 3; or set the environment "
    "variable TF_USE_LEGACY_KERAS=1 before the first import of TensorFlow"
)


def check(name: str, *, needs_keras_2: bool) -> None:
    """Raises ImportError, which says what to install or set, unless `name` can be imported."""
    try:
        tensorflow = importlib.import_module("tensorflow")
    except Exception as error:  # an ImportError, AttributeError or TypeError of old binaries
        raise ImportError(f"{name} needs tensorflow, got {error!r}. {_FRESH}") from error
    version = str(getattr(tensorflow, "__version__", "0"))
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if release < _OLDEST:
        raise ImportError(f"{name} needs TensorFlow 2.15, got {version}. {_FRESH}")
    if release == _OLDEST:
        return
    install = f"install tf_keras {'.'.join(version.split('.')[:2])}"
    try:
        keras = tensorflow.keras.layers.Layer.__module__.partition(".")[0]
    except (AttributeError, ImportError) as error:  # TF_USE_LEGACY_KERAS=1 without tf_keras
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        if backend != "tensorflow" and "TF_USE_LEGACY_KERAS" not in os.environ:
            raise _other_backend(name, backend) from error  # one that is not installed
        raise ImportError(
            f"{name}: TensorFlow {version} has no Keras 2 here ({error}). {_LEGACY}, and {install}."
        ) from error
    if keras == "tf_keras":
        return
    if needs_keras_2:
        lacks_it = importlib.util.find_spec("tf_keras") is None
        more = f", and {install}" if lacks_it else ""
        raise ImportError(f"{name}: TensorFlow {version} uses Keras 3. {_LEGACY}{more}.")
    backend = tensorflow.keras.config.backend()
    if backend != "tensorflow":
        raise _other_backend(name, backend)


def _other_backend(name: str, backend: str) -> ImportError:
    return ImportError(
        f"{name} needs Keras 3 on TensorFlow, got KERAS_BACKEND={backend}: variables, gradients "
        "and steps are TensorFlow's. Set the environment variable KERAS_BACKEND=tensorflow before "
        "the first import of Keras, or leave it out."
    )
