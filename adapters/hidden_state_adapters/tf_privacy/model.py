"""Keras models that own their private run: data order, clip, noise, update and account."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import attrs
import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.algorithm import (
    UpdateRule,
    plain_rule,
    rule_and_settings,
    rule_of,
)
from hidden_state_adapters.tf_privacy.data import GivenWeights
from hidden_state_adapters.tf_privacy.fit import Fit
from hidden_state_adapters.tf_privacy.lineage import (
    Continued,
    RunState,
    behind_model,
    hang_loaded,
    past_runs,
)
from hidden_state_adapters.tf_privacy.other_callbacks import refuse_moved_rates
from hidden_state_adapters.tf_privacy.report import PrivacyReport
from hidden_state_adapters.tf_privacy.run import Given, PrivateRun
from hidden_state_adapters.tf_privacy.settings import Settings

_NAMES = tuple(field.name for field in attrs.fields(Settings))
# In a configuration
_CONFIG, _RULE, _RUNS = "hidden_state", "update_rule", "runs_behind_the_weights"
_OWN = ("fit", "train_step", "compute_loss", "train_on_batch")


class PrivateTraining(tf.keras.Model, PrivacyReport):
    """Base of `HiddenStateModel` and `HiddenStateSequential`; the arguments are described there."""

    _how_to_begin = "Call fit."
    _run: PrivateRun | None = None
    _uses_xla = False
    _given_pace: int | None = None  # steps_per_execution
    _rule: UpdateRule | None = None
    _loaded_rule: Mapping[str, Any] = {}  # of the file that the model comes from
    _continued: Continued | None = None  # what the next fit goes on with

    def __init__(self, *args: Any, **kwargs: Any):
        settings = Settings(**{name: kwargs.pop(name) for name in _NAMES if name in kwargs})
        super().__init__(*args, **kwargs)
        self._given = self._settings = settings  # those that it trains with
        self._target_delta = settings.target_delta

    # Keras' seams

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool | None = None,
        steps_per_execution: Any = None,
        jit_compile: bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures training, as Keras' compile; whoever trains next begins another run.

        A run that was begun before is composed with the next one, which starts from its weights.

        Args:
            optimizer: Plain `SGD` (with weight_decay) where a `loss_geometry` hides the iterates;
                any optimizer of Keras otherwise; a `DiceUpdate` or `BlockCoordinateUpdate`; or an
                optimizer with noise of this package, whose arguments are the model's then.
            loss: Name, function or object of Keras with one loss for each example; its reduction
                over the batch does not matter.
            metrics: Metrics, as in Keras. What they show of the training data has no guarantee.
            loss_weights: None.
            weighted_metrics: None.
            run_eagerly: True if the rest is eager; the gradients of a batch are made in a graph.
            steps_per_execution: Number of steps between two looks of the callbacks; None for as
                many as take a moment, where no callback waits for every batch.
            jit_compile: True if XLA compiles clip, noise and update; "auto" is False.
            **kwargs: Other arguments of Keras.

        Raises:
            UnsupportedRunError: Losses are weighted; optimizer and model say something else; or
                both would add noise.
            TypeError, ValueError: steps_per_execution is not a positive number, or neither
                optimizer nor model says l2_norm_clip.
        """
        given = {"loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
        for name, weights in given.items():
            if weights is not None:
                raise UnsupportedRunError(
                    f"Expected {name} = None, got {weights!r}: weights are factors of the loss of "
                    "an example, of which there is one. Leave it out."
                )
        if (pace := steps_per_execution) is not None:
            pace = validate.integer("steps_per_execution", pace, minimum=1)
        if kwargs.get("from_serialized"):  # Keras reads an .h5 or a SavedModel
            optimizer = rule_of(self._loaded_rule, optimizer)
        rule, settings = rule_and_settings(optimizer, self._given)
        super().compile(
            optimizer=rule.optimizer,
            loss=loss,
            metrics=metrics,
            jit_compile=False,  # of the rest of the step
            run_eagerly=bool(run_eagerly),
            steps_per_execution=pace or 1,
            **kwargs,
        )
        self._rule, self._settings = rule, settings
        self._uses_xla = jit_compile not in (None, False, "auto")
        self._given_pace = pace
        self._run = None

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        *,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
    ) -> Any:
        """Trains on batches that the model deals itself, by its `batch_order`; else as Keras' fit.

        Several calls are one run, on the same examples.

        Args:
            x: Examples as an array, or a structure of arrays, of which a copy is kept; or a Dataset
                of pairs, or triples with the sample weight, a keras.utils.Sequence, or a generator
                of steps_per_epoch batches, which are read once. One record is one example. Under
                a hidden state they must not depend on the model.
            y: Targets, likewise; None if x has them.
            batch_size: Batch size b; None for that of a Dataset of batches, else 32. Of Poisson
                batches of n examples, ceil(n/b) are an epoch, and every example joins each with
                probability 1/ceil(n/b).
            epochs: Passes over the data, fixed in advance.
            verbose: Mode of the progress bar.
            callbacks: Callbacks. Those that choose by metrics or restore weights are refused.
            validation_split: 0.
            validation_data: Data that metrics are computed on after an epoch.
            shuffle: True; `batch_order` says in which order batches are dealt.
            class_weight: Factors of the losses, by class: public numbers.
            sample_weight: Factors of the losses, shape (examples,), each of its example only. Where
                the loss is known they need a `weight_bound`. None if they come with x.
            initial_epoch: Number of the first epoch.
            steps_per_epoch: Number of steps, any of Poisson batches and of those without
                replacement; of a generator its batches.
            validation_steps: Number of batches of a validation.
            validation_batch_size: Batch size of a validation.
            validation_freq: Epochs between two validations, or a list of epochs.
            target_epsilon: Epsilon that the smallest noise is found for, after the epochs of this
                call, the first one of a run, with its releases and the runs before it; the model
                was made without noise_multiplier.
            target_delta: Delta of `target_epsilon`, in (0, 1); None for the model's.

        Returns:
            Keras' History. Its losses and metrics of the training data have no guarantee.

        Raises:
            UnsupportedRunError: The run is not one that can be accounted. After the first step
                there is no figure for it any more.
            TypeError, ValueError: An argument has an impossible value.
        """
        if self._rule is None:
            raise ValueError("Expected a compiled model, got one that is not. Call compile.")
        self._check_own_step()
        if validation_split:
            raise UnsupportedRunError(
                f"Expected validation_split = 0, got {validation_split!r}. Split the data before, "
                "and pass validation_data."
            )
        if shuffle is not True:
            raise UnsupportedRunError(
                f"Expected shuffle = True, got {shuffle!r}: the model deals its batches by "
                'batch_order. For a fixed order say batch_order="cyclic".'
            )
        weights = GivenWeights(class_weight, sample_weight, self._settings.weight_bound)
        given = Given(x, y, batch_size, steps_per_epoch, weights)
        run = self._run
        if run is not None and run.record.has_begun:
            run.go_on(given)
        else:
            run = PrivateRun.of_compiled(
                self, self._rule, self._settings, given,
                uses_xla=self._uses_xla, continued=self._continued,
            )  # fmt: skip
        target = run.target(target_epsilon, target_delta)
        callbacks = getattr(callbacks, "callbacks", callbacks)  # of a CallbackList
        others = list(tf.nest.flatten(callbacks)) if callbacks is not None else []
        has_validation = validation_data is not None
        call = Fit(run, self, others, self._given_pace, has_validation=has_validation)
        if call.chooses or target is not None:
            refuse_moved_rates(others)
        run.prepare(epochs - initial_epoch, call.releases, target, may_stop=call.chooses)
        run.fits(call)
        self._run, self._continued = run, None

        def validation(epoch: int, callbacks: Any) -> dict[str, Any]:
            if validation_data is None or not _is_due(epoch, validation_freq):
                return {}
            x, y, weights = tf.keras.utils.unpack_x_y_sample_weight(validation_data)
            found = self.evaluate(
                x, y, validation_batch_size or batch_size, sample_weight=weights,
                steps=validation_steps, callbacks=callbacks, return_dict=True,
            )  # fmt: skip
            return {f"val_{name}": value for name, value in found.items()}

        try:
            with run.whole_or_none():
                return call.train(
                    initial_epoch, epochs, 1 if verbose == "auto" else verbose, validation
                )
        finally:
            self.reset_metrics()

    @property
    def noise_multiplier(self) -> float | None:
        """Noise multiplier that was given, or that fit found; None before."""
        return (self._run or self._settings).noise_multiplier

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported, and neither is `train_on_batch`.

        Raises:
            UnsupportedRunError: Always: the model deals its batches itself.
        """
        raise UnsupportedRunError(
            "Expected fit, got train_step or train_on_batch: the model deals its batches itself. "
            "For a loop of your own ask PrivateRun for the steps."
        )

    train_on_batch = train_step

    def _check_own_step(self) -> None:
        for name in _OWN:
            own = getattr(PrivateTraining, name)
            if getattr(type(self), name) is not own or name in vars(self):
                raise UnsupportedRunError(
                    f"Expected the {name} of {PrivateTraining.__name__}, got another one: what it "
                    "trains is not known. Override call, or ask PrivateRun for the steps."
                )

    # What is told

    def _told_by(self) -> PrivacyReport:
        return self if self._run is None else self._run

    # How it goes on elsewhere

    def resume(self, state: Mapping[str, Any], *, discard_later_steps: bool = False) -> None:
        """Lets the next `fit` go on with the run of another process (or of this one), as one run.

            model = tf.keras.models.load_model(path)  # saved together with the state
            model.resume(json.loads(text))
            model.fit(x, y, batch_size=batch_size, epochs=the_rest)

        Formal guarantees: those of one run with all its steps; noise and random batches are new.
        Checked by fit: batches, geometry, update rule, relation and weights are those of before,
        and in this process nobody else goes on with the run. Declared by you, and listed: that the
        examples are those of before, in their order, and that no other process goes on with it.

        Args:
            state: Dictionary that `state()` returned.
            discard_later_steps: Declares that nothing that was computed after the state was ever
                seen by anybody, nor made you go back.

        Raises:
            TypeError, ValueError: The state is damaged. From fit, UnsupportedRunError: it is of
                another run, or not its newest one.
            UnsupportedRunError: The model has a run already.
        """
        read = RunState.of_plain(state)
        if self._run is not None and self._run.record.has_begun:
            raise UnsupportedRunError(
                "Expected a model without steps of its own, got one with a run. Load the model "
                "that was saved together with the state, or compile again."
            )
        self._continued = Continued(read, discard_later_steps)

    # Files

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Saves the model as Keras does; UnsupportedRunError if Keras 3 would read it wrong."""
        is_h5 = str(filepath).endswith((".h5", ".hdf5"))
        if keras_api.IS_KERAS_3 and is_h5 and type(self._rule) not in (type(None), UpdateRule):
            raise UnsupportedRunError(
                f"Expected a .keras file with {type(self._rule).__name__}, got {filepath}: Keras 3 "
                "loads .h5 with its optimizer alone, which is another algorithm. Save as .keras."
            )
        return super().save(filepath, *args, **kwargs)

    def get_compile_config(self) -> Any:
        """Returns the arguments of compile; see Keras."""
        config = super().get_compile_config()
        return config and {**config, "jit_compile": self._uses_xla}

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compiles a loaded model; Keras leaves out one whose `compile` is not its own."""
        arguments = keras_api.saving.deserialize_keras_object(dict(config))
        self.compile(
            **{**arguments, "optimizer": rule_of(self._loaded_rule, arguments["optimizer"])}
        )
        if self.built and hasattr(self.optimizer, "build"):
            self.optimizer.build(self.trainable_variables)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of Keras, the private settings, the update rule and past runs.

        Raises:
            UnsupportedRunError: Blocks are not those of the model as it is.
        """
        runs = [attrs.asdict(past) for past in behind_model(self)]
        rule = plain_rule(self._rule, self) if self._rule else {}
        return {
            **keras_api.config_of(self, super().get_config()),
            _CONFIG: {**self._settings.to_plain(), "noise_multiplier": self.noise_multiplier},
            **({_RULE: rule} if rule else {}),
            **({_RUNS: runs} if runs else {}),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        """Inverse of `get_config`; see Keras."""
        plain = dict(config)
        settings, runs, rule = plain.pop(_CONFIG), plain.pop(_RUNS, ()), plain.pop(_RULE, {})
        model = cls._of_config(plain, custom_objects, settings)
        model.__dict__["_loaded_rule"] = rule  # past Keras' bookkeeping
        return hang_loaded(model, past_runs(runs))

    @classmethod
    def _of_config(cls, config: dict[str, Any], custom_objects: Any, settings: Any) -> Any:
        return cls(**config, **settings)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class HiddenStateModel(PrivateTraining):
    r"""A Keras model whose `fit` is private and accounted: it deals, clips, adds noise and updates.

        model = HiddenStateModel(inputs, outputs, l2_norm_clip=1.0, noise_multiplier=2.0)
        model.compile(tf.keras.optimizers.SGD(0.5), loss="sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=100, epochs=10)
        print(model.report(1e-5))

    One step with the examples :math:`B_t` that are dealt for it, b of them on average, makes

    .. math::
        \tilde g_t = \frac{1}{b} \Big(\sum_{i \in B_t} \mathrm{clip}_C(\nabla f_i(x_t)) +
        \mathcal{N}(0, (z C)^2 I)\Big)

    with C = `l2_norm_clip`, z = `noise_multiplier`, and hands it to the compiled optimizer. Plain
    SGD with rate :math:`\eta` and decay w moves to
    :math:`\Pi_R\,\mathrm{prox}_{\eta h}((1 - \eta w) x_t - \eta \tilde g_t)` with h = `prox`.

    `report`, `get_epsilon`, `privacy_event` and `guarantee` are those of the run.

    Formal guarantees:
      - Relation: `neighboring_relation`. Released: the last iterate, with a `loss_geometry` and
        plain SGD; without one every iterate is accounted (composition), for any optimizer.
        Checkpoints count.
      - Random batches come from the operating system, the noise from a generator that it seeded
        (TensorFlow's generators are not cryptographic).
      - With a `feature_norm` and a known loss it is a head run: the features of all examples are
        made once, measured and held, and gradients come from them in closed form. Else every
        example is differentiated alone.
      - Batches, learning rates, clip norm and noise are those that the run itself deals and makes.
        Checked in every step: variables and moments bit by bit, and finite gradients no longer than
        the geometry says. A step that fails ends the run.
      - Declared by you, and listed by `assumptions`: the rest. Losses and metrics of the training
        data (History, progress bar) have no privacy guarantee and must stay private.

    Args:
        *args: Inputs and outputs, or none in a subclass that overrides `call`.
        l2_norm_clip: Clip norm C of the gradient of one example, in all variables together; "auto"
            for just above the longest gradient of a known loss; None if the optimizer says it.
        noise_multiplier: Standard deviation z of the noise on the sum of gradients over C; None if
            `fit` is to find it for a target_epsilon, or the optimizer says it.
        num_microbatches: None, or the batch size: one example each.
        num_steps: Steps of the whole run, declared before the first one; fit takes no more. None
            for those of the one call of fit.
        batch_order: `BatchOrder` or its value, such as "cyclic" or "reshuffled"; None for
            "poisson".
        max_batch_size: Cap of Poisson batches and balls in bins: beyond it examples are left out,
            uniformly, which is accounted.
        sampling_rate: Constant probability with which an example joins a Poisson batch, for
            ADD_OR_REMOVE_ONE; an epoch then has 1/sampling_rate steps, each of which divides by the
            batch_size of fit. None computes it from the number of examples.
        drop_remainder: True to leave out the last examples that do not fill a batch.
        prox: Regulariser, whose proximal map with the step's learning rate follows every step of
            plain SGD, or None.
        projection_radius: Radius R of the ball around 0 that all trainable variables together are
            projected on, or None.
        loss_geometry: Geometry of the loss of one example, before clipping, declared by you. None
            reads it off the compiled loss and a `Dense` head where there is a `feature_norm`, else
            every step counts; ``"auto"`` refuses what cannot be read off.
        feature_norm: Bound B on the L2 norm of every example's features at the linear layer. All
            examples are measured before the first step.
        weight_bound: Largest `sample_weight` that an example could have, a public number, for runs
            whose loss is known; its constants are multiplied by it. None for no such weights.
        neighboring_relation: REPLACE_SPECIAL (an example is replaced by one with zero gradient),
            REPLACE_ONE, or for composition of Poisson batches with a `sampling_rate`
            ADD_OR_REMOVE_ONE.
        target_delta: Delta of the epsilon that is shown after every epoch, in the logs as
            "epsilon_if_released_now"; None for none.
        checkpoints_stay_private: Declares that nobody sees the files that ModelCheckpoint, save,
            save_weights and export write before the last step. Otherwise each is a release.
        metrics_stay_private: Declares that nobody sees what CSVLogger, TensorBoard and
            RemoteMonitor write. Otherwise they are refused.
        validation_data_is_public: Declares that validation_data are not private, so that
            EarlyStopping and save_best_only may look at a val_ metric: all epochs that fit was
            asked for then count as trained and released.
        **kwargs: Arguments of tf.keras.Model.

    Raises:
        UnsupportedRunError: From fit, when the run is not one that can be accounted.
        TypeError, ValueError: An argument has an impossible value.

    Source: DP-SGD (Abadi et al. 2016, arXiv:1607.00133v2, algorithm 1).
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a functional model as one of a class of its own, as Keras does."""
        is_functional = len(args) == 2 or "inputs" in kwargs or "outputs" in kwargs
        if cls is HiddenStateModel and is_functional:
            cls = _HiddenStateFunctional
        return super().__new__(cls, *args, **kwargs)


_Functional: Any = keras_api.Functional


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class _HiddenStateFunctional(HiddenStateModel, _Functional):  # type: ignore[misc]
    """A `HiddenStateModel` of inputs and outputs."""

    def __init__(
        self, inputs: Any, outputs: Any, name: Any = None, trainable: bool = True, **kwargs: Any
    ):
        # Keras writes down the graph of a model with just these arguments.
        super().__init__(inputs, outputs, name=name, trainable=trainable, **kwargs)

    @classmethod
    def _of_config(cls, config: dict[str, Any], custom_objects: Any, settings: Any) -> Any:
        return make_private(tf.keras.Model.from_config(config, custom_objects), **settings)


@tf.keras.utils.register_keras_serializable("hidden_state_adapters")
class HiddenStateSequential(PrivateTraining, tf.keras.Sequential):
    """A Sequential model whose `fit` is private and accounted; see `HiddenStateModel`.

        model = HiddenStateSequential(
            [tf.keras.layers.Dense(10)], l2_norm_clip=1.5, noise_multiplier=6.0,
            feature_norm=1.0,
        )

    Args:
        layers: Layers, as for tf.keras.Sequential.
        **kwargs: `name`, and the arguments of `HiddenStateModel` by name.

    Formal guarantees: those of `HiddenStateModel`.
    """

    @classmethod
    def _of_config(cls, config: dict[str, Any], custom_objects: Any, settings: Any) -> Any:
        return make_private(tf.keras.Sequential.from_config(config, custom_objects), **settings)


# An .h5 has their names without the package.
tf.keras.utils.get_custom_objects().update(
    {own.__name__: own for own in (HiddenStateModel, _HiddenStateFunctional, HiddenStateSequential)}
)


def make_private(model: Any, **settings: Any) -> PrivateTraining:
    """Returns the same layers, with their weights, in a model whose `fit` is private and accounted.

    Args:
        model: A tf.keras.Sequential, or a model of inputs and outputs.
        **settings: The arguments of `HiddenStateModel` by name.

    Returns:
        A `HiddenStateSequential` or `HiddenStateModel`, which is to be compiled.

    Raises:
        TypeError: It is neither; subclass `HiddenStateModel` instead of tf.keras.Model then.
    """
    if type(model) is tf.keras.Sequential:
        private: Any = HiddenStateSequential(keras_api.stack_of(model), name=model.name, **settings)
        if model.built:
            private.build(model.input_shape)
    elif type(model) is _Functional:
        inputs, outputs = keras_api.as_given(model)
        private = HiddenStateModel(inputs=inputs, outputs=outputs, name=model.name, **settings)
    else:
        raise TypeError(
            f"Expected a tf.keras.Sequential or a model of inputs and outputs, got "
            f"{type(model).__name__}. Let your class inherit from HiddenStateModel instead of "
            "tf.keras.Model."
        )
    # Its files are files of the same weights.
    vars(private)["made_private_from"] = weakref.ref(model)
    return private


def _is_due(epoch: int, frequency: Any) -> bool:
    """Returns whether Keras would validate after this epoch."""
    if isinstance(frequency, int):
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency
