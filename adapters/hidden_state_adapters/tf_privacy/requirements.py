"""What has to be installed and set before the optimizers can be imported, in words."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from typing import Any

_TESTED = (2, 15)
_FRESH = (
    "Install hidden-state-accountants[tf] into a fresh environment with Python 3.10 or 3.11 "
    "(TensorFlow 2.15, tensorflow-privacy 0.9.0, dp-accounting 0.4.3, numpy below 2). On Python "
    "3.12 and newer install hidden-state-accountants[keras3], for HiddenStateModel and PrivateRun."
)
_LEGACY = (
    "TensorFlow Privacy's optimizers, and those here, need Keras 2: Keras 3 never shows an "
    "optimizer the loss of one example. Use TensorFlow 2.15, or HiddenStateModel, which trains "
    "with Keras 3; or set the environment variable TF_USE_LEGACY_KERAS=1 before the first import "
    "of TensorFlow"
)
_BACKEND = (
    "variables, gradients and steps are TensorFlow's. Set the environment variable "
    "KERAS_BACKEND=tensorflow before the first import of Keras, or leave it out"
)
_SKIP = (
    "tensorflow-privacy imports Estimators, which TensorFlow {} has not. Use TensorFlow 2.15, or, "
    "before its first import: import sys; sys.skip_tf_privacy_import = True (its own switch, which "
    "leaves the names of its top level undefined)."
)


def check(name: str, *, needs_privacy: bool = True) -> None:
    """Makes sure that TensorFlow Privacy's Keras optimizers, or only a Keras, are there for `name`.

    Nothing is set: both switches of newer versions of TensorFlow act on the whole process.

    Args:
        name: What is imported.
        needs_privacy: Whether it needs TensorFlow Privacy.

    Raises:
        ImportError: They are not; the text says what to install or to set.
    """
    tensorflow = _imported(name, "tensorflow")
    version = str(getattr(tensorflow, "__version__", "0"))
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if release < _TESTED:
        raise ImportError(f"{name} needs TensorFlow 2.15, got {version}. {_FRESH}")
    if release > _TESTED:
        _check_keras(name, version, tensorflow, needs_privacy=needs_privacy)
    if not needs_privacy:
        return
    if release > _TESTED and not hasattr(sys, "skip_tf_privacy_import"):
        raise ImportError(f"{name}: {_SKIP.format(version)}")
    _imported(name, "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras")


def _check_keras(name: str, version: str, tensorflow: Any, *, needs_privacy: bool) -> None:
    try:
        keras = tensorflow.keras.layers.Layer.__module__.partition(".")[0]
    except (AttributeError, ImportError) as error:  # TF_USE_LEGACY_KERAS=1 without tf_keras
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        if backend != "tensorflow" and "TF_USE_LEGACY_KERAS" not in os.environ:
            raise _other_backend(name, backend) from error  # one that is not installed
        raise ImportError(
            f"{name}: TensorFlow {version} has no Keras 2 here ({error}). {_LEGACY}, and install "
            f"{_tf_keras(version)}."
        ) from error
    if keras == "tf_keras":
        return
    if needs_privacy:
        has_it = importlib.util.find_spec("tf_keras") is not None
        install = "" if has_it else f", and install {_tf_keras(version)}"
        raise ImportError(f"{name}: TensorFlow {version} uses Keras 3. {_LEGACY}{install}.")
    backend = tensorflow.keras.config.backend()
    if backend != "tensorflow":
        raise _other_backend(name, backend)


def _other_backend(name: str, backend: str) -> ImportError:
    return ImportError(
        f"{name} needs Keras 3 on TensorFlow, got KERAS_BACKEND={backend}: {_BACKEND}."
    )


def _tf_keras(version: str) -> str:
    return f"tf_keras {'.'.join(version.split('.')[:2])}"


def _imported(name: str, module: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == package:
            raise ImportError(f"{name} needs {package}, which is missing. {_FRESH}") from error
        raise _broken(name, package, error) from error
    except Exception as error:  # an ImportError, AttributeError or TypeError of old binaries
        raise _broken(name, package, error) from error


def _broken(name: str, package: str, error: Exception) -> ImportError:
    installed = ", ".join(
        f"{package} {_version(package)}"
        for package in ("tensorflow", "tensorflow-privacy", "dp-accounting", "numpy")
    )
    return ImportError(
        f"{name} needs {package}, whose import failed with {error!r}. Installed: {installed}. "
        f"{_FRESH}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
