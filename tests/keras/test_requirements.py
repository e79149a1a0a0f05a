"""Where the optimizers cannot be imported, the error says what to install or to set."""

import contextlib
import importlib
import sys
import types

import pytest

import hidden_state_adapters.tf_privacy as adapter
from hidden_state_adapters.tf_privacy import requirements


def keras(package, backend=None):
    layer = type("Layer", (), {"__module__": f"{package}.src.engine.base_layer"})
    config = types.SimpleNamespace(backend=lambda: backend)
    return types.SimpleNamespace(layers=types.SimpleNamespace(Layer=layer), config=config)


Keras3 = keras("keras", "tensorflow")


class Broken(types.ModuleType):
    """Like TensorFlow with TF_USE_LEGACY_KERAS=1 and without tf_keras."""

    @property
    def keras(self):
        raise ImportError("Keras cannot be imported. Check that it is installed.")


@pytest.fixture
def install(monkeypatch):
    """Puts modules in place of the real ones; None is a module that is not installed."""

    def install(tensorflow, *, tf_keras=True):
        monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
        monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)  # nothing needs it
        found = object() if tf_keras else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)

    return install


def tensorflow(version, keras=None, kind=types.ModuleType):
    module = kind("tensorflow")
    module.__version__ = version
    if keras is not None:
        module.keras = keras
    return module


FRESH = "Install hidden-state-accountants[tf] into a fresh environment with Python 3.10 or 3.11"
LEGACY = "TF_USE_LEGACY_KERAS=1 before the first import of TensorFlow"
JAX = "HiddenStateModel needs Keras 3 on TensorFlow, got KERAS_BACKEND=jax"


@pytest.mark.parametrize(
    ("module", "tf_keras", "texts"),
    [
        (None, True, ["needs tensorflow, got ModuleNotFoundError", FRESH]),
        (tensorflow("2.14.0"), True, ["needs TensorFlow 2.15, got 2.14.0", FRESH]),
        (
            tensorflow("2.16.1", Keras3),
            False,
            ["TensorFlow 2.16.1 uses Keras 3.", LEGACY, "and install tf_keras 2.16."],
        ),
        (tensorflow("2.21.0", Keras3), True, ["TensorFlow 2.21.0 uses Keras 3.", LEGACY + "."]),
        (
            tensorflow("2.21.0", keras("keras", "jax")),
            True,
            ["HiddenStateModel, which trains with Keras 3"],
        ),
        (
            tensorflow("2.16.1", kind=Broken),
            False,
            ["has no Keras 2 here", LEGACY, "install tf_keras 2.16"],
        ),
    ],
)
def test_the_error_names_the_remedy(install, module, tf_keras, texts):
    install(module, tf_keras=tf_keras)
    with pytest.raises(ImportError) as caught:
        requirements.check("CyclicDPKerasSGDOptimizer", needs_keras_2=True)
    assert str(caught.value).startswith("CyclicDPKerasSGDOptimizer")
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "module", [tensorflow("2.21.0", kind=Broken), tensorflow("2.21.0", keras("keras", "jax"))]
)
def test_other_backends_of_keras_3(install, module, monkeypatch):
    """One that is not installed, and one that is."""
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    install(module)
    with pytest.raises(ImportError, match=JAX):
        requirements.check("HiddenStateModel", needs_keras_2=False)


def test_every_name_is_checked_before_it_is_imported(install, monkeypatch):
    """Only optimizers and their callback need Keras 2."""
    install(None)
    asked, check = {}, requirements.check

    def noted(name, needs_keras_2):
        asked[name] = needs_keras_2
        check(name, needs_keras_2=needs_keras_2)

    monkeypatch.setattr(requirements, "check", noted)
    for name in adapter.__all__:
        monkeypatch.delitem(vars(adapter), name, raising=False)
        is_free = name == "compute_last_iterate_privacy_statement"
        found = contextlib.nullcontext() if is_free else pytest.raises(ImportError, match=name)
        with found:
            getattr(adapter, name)
    assert {name for name in asked if asked[name]} == {
        "BlockCoordinateKerasOptimizer",
        "CyclicDPKerasSGDOptimizer",
        "DiceKerasAdamOptimizer",
        "DiceKerasSGDOptimizer",
        "HiddenStateCallback",
    }
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        adapter.nothing  # noqa: B018
