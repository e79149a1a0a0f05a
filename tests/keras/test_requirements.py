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


def test_only_optimizers_and_their_callback_need_keras_2(install, monkeypatch):
    install(tensorflow("2.17.0", Keras3))
    asked = {}
    for name in adapter.__all__:
        monkeypatch.delitem(vars(adapter), name, raising=False)
    monkeypatch.setattr(
        requirements, "check", lambda name, needs_keras_2: asked.update({name: needs_keras_2})
    )
    monkeypatch.setattr(adapter, "import_module", lambda name: types.SimpleNamespace())
    for name in adapter.__all__:
        with contextlib.suppress(AttributeError):
            getattr(adapter, name)
    assert {name for name in asked if asked[name]} == {
        "BlockCoordinateKerasOptimizer",
        "CyclicDPKerasSGDOptimizer",
        "DiceKerasAdamOptimizer",
        "DiceKerasSGDOptimizer",
        "HiddenStateCallback",
    }


def test_a_backend_that_is_not_installed(install, monkeypatch):
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    install(tensorflow("2.21.0", kind=Broken))
    with pytest.raises(ImportError, match="needs Keras 3 on TensorFlow, got KERAS_BACKEND=jax"):
        requirements.check("HiddenStateModel", needs_keras_2=False)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends_of_keras_3(install, backend):
    install(tensorflow("2.21.0", keras("keras", backend)))
    text = f"HiddenStateModel needs Keras 3 on TensorFlow, got KERAS_BACKEND={backend}: "
    with pytest.raises(ImportError, match=text):
        requirements.check("HiddenStateModel", needs_keras_2=False)
    with pytest.raises(ImportError, match="HiddenStateModel, which trains with Keras 3"):
        requirements.check("HiddenStateCallback", needs_keras_2=True)


def test_every_name_is_checked_before_it_is_imported(install, monkeypatch):
    install(None)
    for name in adapter.__all__:
        monkeypatch.delitem(vars(adapter), name, raising=False)
        if name == "compute_last_iterate_privacy_statement":
            assert getattr(adapter, name)
            continue
        with pytest.raises(ImportError, match=f"{name} needs tensorflow"):
            getattr(adapter, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        adapter.nothing  # noqa: B018
