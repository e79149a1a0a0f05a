"""The only place that knows which Keras runs: Keras 2, or Keras 3 on its TensorFlow backend.

Everything else here is about `tf.Variable`s: the log of the steps, copies of the weights, what a
process remembers of a run. A variable of Keras 3 holds one; optimizers, losses, files and the loop
of fit have other names there for what is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

IS_KERAS_3 = str(getattr(tf.keras, "__version__", "")).startswith("3.")

if IS_KERAS_3:
    import keras
    from keras.src.models import functional

    layers, losses, saving = keras.layers, keras.losses, keras.saving
    Functional: Any = functional.Functional
    NO_REDUCTION, DEFAULT_REDUCTION = "none", "sum_over_batch_size"
    BATCH_NORMALIZATIONS: tuple[Any, ...] = (layers.BatchNormalization,)
    ADAPTED_LAYERS: tuple[Any, ...] = (
        layers.Discretization,
        layers.IntegerLookup,
        layers.Normalization,
        layers.StringLookup,
        layers.TextVectorization,
    )
    # One writes the weights of every epoch by itself, one puts averages in their place.
    OTHER_CALLBACKS: tuple[Any, ...] = tuple(
        getattr(keras.callbacks, name)
        for name in ("OrbaxCheckpoint", "SwapEMAWeights")
        if hasattr(keras.callbacks, name)  # the first is new
    )
else:
    layers, losses, saving = tf.keras.layers, tf.keras.losses, tf.keras.saving
    Functional = tf.keras.Sequential.__bases__[0]
    NO_REDUCTION, DEFAULT_REDUCTION = losses.Reduction.NONE, losses.Reduction.AUTO
    BATCH_NORMALIZATIONS = (  # three classes, of which none is a base of another
        layers.BatchNormalization,
        layers.experimental.SyncBatchNormalization,
        tf.compat.v1.keras.layers.BatchNormalization,
    )
    ADAPTED_LAYERS = (layers.experimental.preprocessing.PreprocessingLayer,)
    OTHER_CALLBACKS = ()


def is_of_keras(thing: Any) -> bool:
    """Returns whether Keras wrote the class of it."""
    return type(thing).__module__.startswith(("keras.src.", "tf_keras.src."))


# Tracing

_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_written(function: _Function) -> _Function:
    """Returns a function that AutoGraph leaves as it is, but converts the layers that it calls.

    To convert it takes a quarter of the time of tracing. `do_not_convert` acts on the layers, too,
    where an `if` may be about a tensor.
    """
    function.autograph_info__ = None  # type: ignore[attr-defined]  # as AutoGraph marks its own
    return function


# Variables


def tensor_of(variable: Any) -> Any:
    """Returns the `tf.Variable` that a variable of Keras 3 holds; others as they are."""
    return variable.value if IS_KERAS_3 and isinstance(variable, keras.Variable) else variable


def trained(model: Any) -> list[Any]:
    """Returns the variables of a model or layer that are trained."""
    return [tensor_of(variable) for variable in model.trainable_variables]


def fixed(model: Any) -> list[Any]:
    """Returns all other variables, which only something else than a step can change.

    Of Keras 3 also what it does not count as variables of the model: those of metrics that a layer
    updates, and TensorFlow's own in attributes. The states of its random numbers are apart.
    """
    if not IS_KERAS_3:
        return list(model.non_trainable_variables)
    found = [tensor_of(variable) for variable in model.non_trainable_weights]
    known = {id(variable) for variable in [*found, *trained(model)]}
    for layer in model._flatten_layers():
        metrics = [tensor_of(v) for metric in layer._metrics for v in metric.variables]
        for variable in [*metrics, *_own_variables(list(vars(layer).values()))]:
            if id(variable) not in known:
                known.add(id(variable))
                found.append(variable)
    return found


def _own_variables(value: Any) -> Iterator[Any]:
    """Returns the variables of TensorFlow in an attribute of a layer, or in a container in one."""
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _own_variables(part)
    elif isinstance(value, dict):
        yield from _own_variables(list(value.values()))
    elif isinstance(value, tf.Module) and not isinstance(value, keras.layers.Layer):
        yield from value.variables


def variables(model: Any) -> list[Any]:
    """Returns all variables of a model."""
    return [*trained(model), *fixed(model)] if IS_KERAS_3 else list(model.variables)


# Layers


def layers_of(model: Any, variables: Sequence[Any]) -> list[str]:
    """Returns the names of the layers that have one of `variables` for their own."""
    wanted, found = {id(variable) for variable in variables}, []
    for layer in model._flatten_layers():
        inner = [id(v) for part in layer._flatten_layers(include_self=False) for v in trained(part)]
        if wanted & ({id(variable) for variable in trained(layer)} - set(inner)):
            found.append(str(layer.name))
    return found


def parts_of(model: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Returns the models and layers with one of the variables, and the one that was made private.

    None for all, model or layer itself among them.
    """
    parts = list(model._flatten_layers())
    if variables is not None:
        own = {id(variable) for variable in variables}
        parts = [part for part in parts if own & {id(variable) for variable in trained(part)}]
    given = vars(model).get("made_private_from", lambda: None)()  # may have no variables yet
    return parts if given is None else [*parts, given]


def computes_otherwise(layer: Any) -> bool:
    """Returns whether a layer of Keras 3 rounds the variables that it trains, or replaces them.

    Keras 2 says so of every single variable (`trained_part.check_variables`).
    """
    if not IS_KERAS_3 or not (layer._trainable_variables and layer.trainable):
        return False
    is_quantized = getattr(layer, "quantization_mode", None) is not None
    return is_quantized or layer.compute_dtype != layer.variable_dtype


def is_plain_dense(layer: Any) -> bool:
    """Returns whether it is a Dense layer that multiplies with the one kernel that it trains."""
    if type(layer) is not layers.Dense or "call" in vars(layer):
        return False
    return not IS_KERAS_3 or not (layer.lora_enabled or layer.quantization_mode)


def is_built(model: Any) -> bool:
    """Returns whether a model has all its variables."""
    if not IS_KERAS_3:
        return bool(model.built)
    return all(layer.built for layer in model._flatten_layers())


def build(model: Any, x: Any) -> None:
    """Lets a model that is not built yet create its variables, as its first step would."""
    if is_built(model):
        return
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec
        x = spec[0] if isinstance(spec, tuple) else spec
    model(tf.nest.map_structure(lambda part: tf.zeros([1, *part.shape[1:]], part.dtype), x))


def has_other_operations(model: Any) -> bool:
    """Returns whether something but layers is in the graph of a model of inputs and outputs.

    Keras 2 makes layers of operations; in Keras 3 they may use the variables of a layer, unseen.
    """
    if not IS_KERAS_3:
        return False
    graphs = [layer for layer in model._flatten_layers() if isinstance(layer, Functional)]
    return not all(isinstance(one, layers.Layer) for graph in graphs for one in graph.operations)


def as_given(model: Any) -> tuple[Any, Any]:
    """Inputs and outputs of a functional model, for another one."""
    return (model.input, model.output) if IS_KERAS_3 else (model.inputs, model.outputs)


def config_of(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a model, with its graph, which Keras 3 leaves out."""
    if not IS_KERAS_3 or not isinstance(model, Functional):
        return config
    return {**Functional(*as_given(model), name=model.name).get_config(), **config}


def stack_of(model: Any) -> list[Any]:
    """Returns the layers of a Sequential model, for another one."""
    return list(model._layers if IS_KERAS_3 else model.layers)


# Losses


def without_reduction(loss: Any) -> Any:
    """Returns a loss object of Keras that gives the losses of single examples."""
    plain = object.__new__(type(loss))  # Keras 3 copies through a file
    vars(plain).update(vars(loss))
    plain.reduction = NO_REDUCTION
    return plain


def options_of(loss: Any) -> dict[str, Any]:
    """Returns the arguments of a loss object of Keras; in Keras 3 configurations lack some."""
    return {**loss.get_config(), **getattr(loss, "_fn_kwargs", {})}


# Optimizers


def is_legacy(optimizer: Any) -> bool:
    """Returns whether it is an optimizer of before Keras 2.11."""
    return not IS_KERAS_3 and isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)


def is_optimizer(optimizer: Any) -> bool:
    """Returns whether it is an optimizer of Keras."""
    return isinstance(optimizer, tf.keras.optimizers.Optimizer) or is_legacy(optimizer)


def is_sgd(optimizer: Any) -> bool:
    """Returns whether it is Keras' SGD and no class of somebody else."""
    own = (tf.keras.optimizers.SGD,)
    return type(optimizer) in (own if IS_KERAS_3 else (*own, tf.keras.optimizers.legacy.SGD))


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes the variables of an optimizer of Keras, in the current scope; nothing of others."""
    if is_legacy(optimizer):
        optimizer._create_all_weights(list(variables))
    elif is_optimizer(optimizer) and not (IS_KERAS_3 and optimizer.built):
        optimizer.build(list(variables))


def update_options(optimizer: Any) -> dict[str, Any]:
    """Returns the options of an optimizer beside a step along the gradient; falsy if neutral."""
    if is_legacy(optimizer):
        hyper = optimizer._hyper
        return {
            "decay": float(optimizer._initial_decay),
            "momentum": float(optimizer._get_hyper("momentum")) if "momentum" in hyper else 0.0,
            "gradient_transformers": len(optimizer.gradient_transformers),
        }
    excluded = [*(getattr(optimizer, "_exclude_from_weight_decay", None) or ())]
    if IS_KERAS_3:
        by_name = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
        excluded += [by_name.pattern] if by_name else []
    else:
        excluded += getattr(optimizer, "_exclude_from_weight_decay_names", None) or []
    options: dict[str, Any] = {"exclude_from_weight_decay": tuple(sorted(map(str, excluded)))}
    if IS_KERAS_3:
        options["gradient_accumulation_steps"] = optimizer.gradient_accumulation_steps
    return options


def given_rate(optimizer: Any) -> Any:
    """Returns the learning rate as it was given: a number, a schedule, or a function."""
    if is_legacy(optimizer):
        return optimizer._hyper["learning_rate"]
    return tensor_of(optimizer._learning_rate)


def iterations_of(optimizer: Any) -> Any:
    """Returns the variable that counts the updates."""
    return tensor_of(optimizer._iterations) if IS_KERAS_3 else optimizer.iterations


def rate_of(optimizer: Any) -> tf.Tensor:
    """Returns the learning rate of the next update."""
    if is_legacy(optimizer):
        return optimizer._decayed_lr(tf.float32)
    rate = given_rate(optimizer)
    if isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        rate = rate(iterations_of(optimizer))
    elif IS_KERAS_3 and callable(rate):
        rate = rate()
    return tf.convert_to_tensor(rate)


def apply_gradients(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Lets an optimizer update variables; those of Keras 3 may ask for more than a tensor knows."""
    if IS_KERAS_3:
        own = {id(tensor_of(variable)): variable for variable in optimizer._trainable_variables}
        variables = [own.get(id(variable), variable) for variable in variables]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


def note_update(optimizer: Any) -> None:
    """Lets whoever reads the learning rate of a schedule see it after an update made by hand."""
    if not IS_KERAS_3 and not is_legacy(optimizer):
        optimizer._compute_current_learning_rate()


def state_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer but count and learning rate: moments, averages."""
    own = optimizer.variables
    own = [tensor_of(variable) for variable in (own() if callable(own) else own)]
    apart = (iterations_of(optimizer), given_rate(optimizer) if not is_legacy(optimizer) else None)
    return [variable for variable in own if not any(variable is other for other in apart)]


# The loop of fit


def build_metrics(model: Any, batch: Any) -> None:
    """Makes the metrics of a model in a strategy, which Keras 3 cannot within a step."""
    if IS_KERAS_3:
        model._symbolic_build(data_batch=batch)


def waits_for_batches(callback: Any) -> bool:
    """Returns whether a callback does something before or after every batch of training."""
    if hasattr(callback, "_implements_train_batch_hooks"):
        return bool(callback._implements_train_batch_hooks())
    hooks = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    return not all(getattr(getattr(callback, hook), "_is_default", False) for hook in hooks)
