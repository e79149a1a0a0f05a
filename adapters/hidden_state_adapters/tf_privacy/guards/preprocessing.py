"""Preprocessing layers that were fitted to data: they carry what they counted past the noise."""

from __future__ import annotations

from typing import Any

from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.refusals import refusal

_GIVEN = {"input_mean": "mean=..., variance=...", "input_bin_boundaries": "bin_boundaries=..."}


def check_preprocessing(model: Any) -> None:
    """Refuses layers in the model whose statistics or vocabulary are not arguments of theirs.

    Keras does not tell which data `adapt` has seen, so constants are the way to say that they do
    not come from the examples.

    Raises:
        UnsupportedRunError: The text names the layer.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras_api.ADAPTED_LAYERS):
            argument = _fitted(layer)
            if argument:
                raise refusal(
                    f"Expected {type(layer).__name__}({argument}) with constants, got {layer.name} "
                    "as adapt left it: statistics of the examples would be in the model without "
                    "noise. Adapt a layer to public data, and give what it found as constants."
                )


def _fitted(layer: Any) -> str:
    """The argument that would have given what the layer was fitted to; "" if it was given."""
    for attribute, argument in _GIVEN.items():
        if hasattr(layer, attribute):
            return argument if getattr(layer, attribute) is None else ""
    if hasattr(layer, "_has_input_vocabulary"):
        return "" if layer._has_input_vocabulary else "vocabulary=..."
    return "..." if layer.is_adapted else ""
