"""Private linear models in scikit-learn's form."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from hidden_state_accountants import Assumption, Guarantee, validate
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.ledger import active_budget
from hidden_state_accountants.runs.statement import privacy_statement
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.public_numbers import warn_of_longest
from hidden_state_adapters.recipe import (
    INTERCEPT_SHARE,
    Recipe,
    Target,
    check_public_features,
    middle_and_half,
    progress,
)
from hidden_state_adapters.sklearn.columns import Columns
from hidden_state_adapters.sklearn.data_checks import (
    Lineage,
    look_at,
    warn_of_balanced,
    warn_of_units,
)
from hidden_state_adapters.sklearn.preprocessing import (
    STEPS,
    WHITEN,
    Statistics,
    release_statistics,
    with_whitening,
)
from hidden_state_adapters.sklearn.record_weights import class_weights, sample_weights
from hidden_state_adapters.sklearn.records import (
    NORMALIZATIONS,
    Records,
    Targets,
    blocks_of,
    gradient_sum,
    row_norms,
)
from hidden_state_adapters.temperature import clipped_losses

_FLOATS = (np.float64, np.float32)
_FROM_LABELS = "from_labels"
_AUTO = "auto"
_NUMBERS = "biuf"  # kinds of dtypes


class PrivateLinearModel(BaseEstimator):
    """Base of classifier and regressor: the constructor only stores, `fit` trains a public run."""

    def __sklearn_clone__(self) -> Any:
        copied, lineage = super().__sklearn_clone__(), self._of_lineage()
        copied._lineage, copied._sent_from = lineage, vars(self).get("_sent_from")
        lineage.copies += 1
        if lineage.copies == 2:  # one copy is what every Pipeline and Voting makes
            name = type(self).__name__
            lineage.warn(f"copy 2 of a {name}, to be fitted again or elsewhere", stacklevel=2)
        return copied

    def _of_lineage(self) -> Lineage:
        if "_lineage" not in vars(self):
            self._lineage = Lineage()
        return self._lineage

    def __getstate__(self) -> Any:
        """State for a worker process: with the ledger of the budget that this process is in."""
        budget = active_budget()
        sent = {} if budget is None else {"_sent_from": budget.ledger}
        return {**super().__getstate__(), **sent}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = True
        return tags

    def _read(self, X: Any, y: Any) -> tuple[Any, Any]:
        return validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=_FLOATS,
            ensure_min_samples=2,
            y_numeric=isinstance(self, RegressorMixin),
        )

    # What is public

    def _target(self) -> Target:
        return Target.of(self.epsilon, self.delta, self.neighboring_relation)

    def _feature_norm(self) -> float:
        return validate.real("feature_norm", self.feature_norm, above=0)

    def _constant(self) -> float:
        """The feature of the intercept."""
        has_intercept = validate.flag("fit_intercept", self.fit_intercept)
        return INTERCEPT_SHARE * self._feature_norm() if has_intercept else 0.0

    def _columns(self, number: int) -> Columns | None:
        """Public knowledge of the columns; None for none."""
        if self.column_bounds is not None:
            names = [self._column_name(index) for index in range(number)]
            return Columns.of(self.column_bounds, self.splines, names)
        if self.splines is not None:
            raise ValueError(
                "Expected column_bounds beside splines, which have their knots between them, got "
                "none. Take them from public knowledge."
            )
        return None

    def _column_name(self, index: int) -> str:
        names = getattr(self, "feature_names_in_", None)
        return f"column {index}" if names is None else f"column {names[index]!r}"

    def _mapped(self, X: Any) -> Any:
        """The records by what is known of their columns."""
        columns = self._columns(X.shape[1])
        return X if columns is None else columns.apply(X)

    def _public_features(self, X: Any) -> np.ndarray | None:
        """Those that the step is computed from, within the bounds; None for the records."""
        if self.public_features is None:
            return None
        public = check_array(self.public_features, dtype=_FLOATS, input_name="public_features")
        is_same = not sparse.issparse(X) and np.array_equal(public, X)
        check_public_features(public.shape, X.shape[1], is_same)
        return self._mapped(public)

    def _chosen_step(self, X: Any) -> str | None:
        """The step of `preprocessing`. "auto" looks at the shape of X alone, which is public.

        It centres unless the noise in the means would be longer than any record, and whitens by
        public features where there are some.
        """
        step, has_public = self.preprocessing, self.public_features is not None
        if step == _AUTO:
            if has_public:
                step = WHITEN
            else:
                pays = not sparse.issparse(X) and self._target().centring_pays(*X.shape)
                step = "center" if pays else None
        if step is None:
            return None
        if step not in STEPS:
            raise ValueError(
                f"Expected preprocessing to be None or one of {_AUTO}, {', '.join(STEPS)}, got "
                f"{step!r}."
            )
        if sparse.issparse(X) and STEPS[step][0]:
            raise ValueError(
                f"Expected dense records for preprocessing={step!r}, got a sparse "
                'matrix, of which nothing would stay sparse. Use "scale", or X.toarray().'
            )
        if step == WHITEN and not has_public and not self._target().whitening_pays(*X.shape):
            raise ValueError(
                'Expected more records, or a larger epsilon, for preprocessing="whiten", got '
                f"{X.shape[0]} of {X.shape[1]} columns: little more than noise would be released. "
                "Pass public_features=, features of public data."
            )
        return step

    # Training and predictions

    def _records(self, X: Any, statistics: Statistics | None) -> Records:
        if statistics is not None:
            X = statistics.apply(X, self._feature_norm(), self.normalization)
        return Records.of(X, self._feature_norm(), self.normalization, self._constant())

    def _train(
        self,
        X: Any,
        y: np.ndarray,
        targets: Targets,
        outputs: int,
        weights_of_records: np.ndarray | None,
        calibrate: bool,
        **options: Any,
    ) -> tuple[Records, OwnGenerator]:
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(
                f"Expected normalization to be one of {', '.join(NORMALIZATIONS)}, got "
                f"{self.normalization!r}."
            )
        public = self._public_features(X)
        given, X = X, self._mapped(X)
        step = self._chosen_step(X)
        recipe = Recipe.of(
            self._target(),
            X.shape,
            self._feature_norm(),
            self._constant(),
            step is not None and public is None,
            calibrate,
            step == WHITEN and public is None,
            **options,
        )
        lineage, in_budget = self._of_lineage(), recipe.spend(vars(self).get("_sent_from"))
        lineage.is_warned |= in_budget is not None
        name = type(self).__name__
        count = look_at(given, y, lineage, name, stacklevel=3)
        self._fits = in_budget or (
            f"{count} that this process knows of, on these records or of this estimator and its "
            "copies; every other fit on the same records spends as well"
        )
        tell = progress(name, recipe.run, self.verbose)
        generator, statistics = OwnGenerator(), None
        if step is not None:
            statistics = self._released(X if public is None else public, step, recipe, generator)
        if statistics is None and self.normalization == "clip":
            warn_of_longest(row_norms(X), self._feature_norm())
        records, run = self._records(X, statistics), recipe.run
        clip_norm = float(run.event.per_step("clip_norm")[0])

        def summed(weights: np.ndarray) -> np.ndarray:
            return gradient_sum(run.loss, clip_norm, records, targets, weights, weights_of_records)

        shape = (records.num_weights, outputs)
        self._weights = recipe.train(summed, shape, generator, tell)
        self._statistics, self._step, self._recipe = statistics, step, recipe
        self.privacy_event_ = recipe.event
        self.n_iter_ = run.event.num_steps
        return records, generator

    def _released(
        self, rows: Any, step: str, recipe: Recipe, generator: OwnGenerator
    ) -> Statistics:
        noise = 0.0 if recipe.statistics is None else recipe.statistics.noise_multiplier
        options = (self._feature_norm(), self.normalization)
        found = release_statistics(rows, step, *options, noise, generator.normal)
        if found.means is not None and self.column_bounds is None:
            means, std = found.means / self._feature_norm(), noise / rows.shape[0]
            warn_of_units(means, std, self._column_name, stacklevel=4)
        if step != WHITEN:
            return found
        return with_whitening(found, rows, *options, recipe.covariance_std, generator.normal)

    def _predictions(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_FLOATS, reset=False)
        parts = []
        for rows in blocks_of(X):  # so that no copy of X is made for centring
            records = self._records(self._mapped(X[rows]), self._statistics)
            parts.append(records.predictions(slice(0, len(records)), self._weights))
        return np.concatenate(parts)

    @property
    def coef_of_columns_(self) -> np.ndarray:
        """Slopes in the units of the columns, of the shape of `coef_`."""
        return self._of_columns()[0]

    @property
    def intercept_of_columns_(self) -> Any:
        """Prediction, by the same map, where all columns are 0; of the kind of `intercept_`.

        Logits of a classifier are those of `decision_function`.
        """
        return self._of_columns()[1]

    def _of_columns(self) -> tuple[np.ndarray, Any]:
        check_is_fitted(self)
        if self.normalization != "clip" or self.splines is not None:
            raise AttributeError(
                "Expected normalization='clip' and splines=None for coefficients in the units of "
                f"the columns, got {self.normalization!r} and {self.splines!r}: no one number says "
                "what a column does. Use coef_, for normalised records."
            )
        slopes, offset, statistics = self.coef_, self.intercept_, self._statistics
        if statistics is not None:
            slopes = slopes if statistics.whitening is None else slopes @ statistics.whitening
            slopes = slopes if statistics.factors is None else slopes * statistics.factors
            offset = offset if statistics.means is None else offset - slopes @ statistics.means
        columns = self._columns(self.n_features_in_)
        if columns is not None:
            slopes = slopes / columns.half
            offset = offset - slopes @ columns.middle
        return slopes, offset

    @property
    def guarantee_(self) -> Guarantee:
        """Guarantee of the fitted model, with its assumptions.

        It is about this one fit: other fits on the same records compose with it.
        """
        check_is_fitted(self)
        recipe = self._recipe
        found = [
            Assumption.declared(
                "the arguments of the constructor do not depend on the records: no search over "
                "them on these records, no bounds or classes read off them",
                Topic.HYPER_PARAMETERS,
            ),
            Assumption.declared(
                "X was not transformed with statistics of these records (means, scales, "
                "principal components, a vocabulary)"
            ),
        ]
        if recipe.statistics is not None:
            what = f"statistics of the columns (preprocessing={self._step!r}) were"
            found.append(recipe.released(what))
        if self.column_bounds is not None:
            found.append(Assumption.public("the bounds of the columns"))
        if self.splines is not None:
            found.append(Assumption.public(f"the numbers of their knots, splines={self.splines!r}"))
        if self.public_features is not None:
            text = f"the features that preprocessing={self._step!r} is computed from: epsilon "
            found.append(Assumption.public(f"{text}protects nobody in them"))
        if self._has_sample_weights:
            found.append(
                Assumption.declared("the weight of every record is a function of it alone")
            )
        return recipe.guarantee(*found, *self._public())

    def _public(self) -> list[Assumption]:
        raise NotImplementedError

    @property
    def report_(self) -> str:
        """A statement to paste: epsilon, relation, theorem, run and assumptions."""
        guarantee, run = self.guarantee_, self._recipe.run
        momentum = f", momentum {run.momentum:g} (on what is released already, so at no cost)"
        text = privacy_statement(
            [run.event],
            guarantee,
            self.delta,
            beside=self._recipe.beside,
            update=f"{run.event.num_steps} steps along the sum of all records' gradients, each cut "
            f"to length {run.event.gradient_bound()[0]:g}, plus Gaussian noise of standard "
            f"deviation {run.event.noise_std_on_sum()[0]:.4g} in every weight, over the number of "
            f"records; learning rate {run.event.learning_rate:g}{momentum}; Gaussian "
            "releases, whose squared mu add up",
        )
        return f"{text}\nfits: {self._fits}"


def _store(self: Any, **arguments: Any) -> None:
    """Makes attributes of the arguments of a constructor, as they are: scikit-learn wants that."""
    vars(self).update(arguments)


class PrivateClassifier(ClassifierMixin, PrivateLinearModel):
    """A linear classifier that is (epsilon, delta)-differentially private: logistic or softmax.

    >>> import numpy as np
    >>> from hidden_state_adapters.sklearn import PrivateClassifier
    >>> y = np.repeat(["a", "b"], 500)
    >>> X = np.repeat(np.eye(2), 500, axis=0) + 0.1 * np.random.default_rng(0).random((1000, 2))
    >>> model = PrivateClassifier(epsilon=1.0, delta=1e-5, classes=["a", "b"]).fit(X, y)
    >>> float(model.score(X, y))
    1.0

    Nothing has to be tuned: `hidden_state_accountants.recommend` chooses the run from the number of
    records, the target and the classes. It is gradient descent on all records, from zero, with
    momentum: the noisy gradients are accounted as if they were released, so that momentum is free.

    Formal guarantees: the fitted attributes are (epsilon, delta)-differentially private under
    `neighboring_relation` if the assumptions in `report_` hold. `classes`, the number of records
    and the other arguments are public. Every fit spends epsilon. The noise cannot be seeded: there
    is no random_state. Predictions on records that were trained on are private only for those who
    see no other function of them.

    Args:
        epsilon, delta: The target.
        classes: All labels that there can be, at least two; a label outside of them is an error
            before training. "from_labels" takes those that occur, and lists as declared that it
            is public which ones do.
        feature_norm: What every record is scaled to. Any value gives the same model, up to
            rounding, with normalization="scale".
        normalization: "scale" brings every record to exactly `feature_norm`, "clip" the longer
            ones only.
        preprocessing: "center", "scale" or "standardize" centres and scales the columns by
            statistics of the records that are released with noise and accounted: a tenth of the
            squared mu of the target. "whiten" centres and releases the covariance, another tenth:
            for features of a network and correlated columns. None for no such step. "auto"
            centres dense records, unless they are so few that the noise in the means would be
            longer than a record, and whitens by public features. The records are normalised
            before and after a step, which makes a copy of X.
        public_features: Records of public data that look like the private ones, of the same
            columns, about as many as columns or more; None for none. The statistics of
            `preprocessing` are theirs, and cost nothing.
        column_bounds: (low, high) of every column from public knowledge, shape (features, 2), or
            of all, shape (2,), or None. Columns are cut there and brought to [-1, 1], so that
            their units do not decide what a normalised record consists of.
        splines: Number of knots in each column, or of every one (0 for columns that stay numbers,
            those of 0 and 1 for example), or None. A column with knots becomes as many hat
            functions, evenly between its `column_bounds`: linear in between, at no cost.
        class_weight: A public number for each label (1 where it is left out); gradients are
            multiplied with them, divided by the largest. "balanced" would count the labels.
        calibrate: True to release one temperature for `predict_proba`, with noise and
            accounted: 3 % of the squared mu of the target. Where records are so few, or epsilon so
            small, that its noise exceeds its use, it is a public number. Labels do not change.
        fit_intercept: True to append a constant of 0.3 times `feature_norm` to every record.
        neighboring_relation: REPLACE_SPECIAL or REPLACE_ONE: the number of records is public.
        verbose: Above 0: how far the training is, on the standard output. Nothing that is computed
            from the records is shown.

    Attributes:
        classes_: The labels, sorted.
        coef_: Shape (1 or classes, features), for records as they are normalised (and centred);
            with splines, of columns without knots, then of hat functions.
        intercept_: Shape (1 or classes,).
        coef_of_columns_, intercept_of_columns_: The same in the units of the columns, for
            normalization="clip" and records that nothing cuts, as for `PrivateRegressor`.
        temperature_: Divisor of the logits for probabilities; 1 without `calibrate`.
        n_features_in_, n_iter_: Numbers of columns and of steps.
        privacy_event_: The run, for an accountant that composes several fits.
        guarantee_, report_: The guarantee, and a statement to paste.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        classes: Any = None,
        feature_norm: float = 1.0,
        normalization: str = "scale",
        preprocessing: str | None = "auto",
        public_features: Any = None,
        column_bounds: Any = None,
        splines: Any = None,
        class_weight: Any = None,
        calibrate: bool = True,
        fit_intercept: bool = True,
        neighboring_relation: Any = "REPLACE_SPECIAL",
        verbose: int = 0,
    ):
        _store(**locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PrivateClassifier:
        """Trains on records X, shape (records, features), with the labels y, shape (records,).

        Args:
            X: The records.
            y: Their labels.
            sample_weight: Weights of the records, in [0, 1], shape (records,): each of them a
                function of its record alone.

        Raises:
            TypeError, ValueError: An argument has an impossible value, or a label is not among the
                classes. Nothing was trained.
            UnsupportedRunError: A gradient was not finite; the fit counts as spent.
        """
        X, y = self._read(X, y)
        check_classification_targets(y)
        classes = self._classes(y)
        codes = _codes(y, classes)
        weights = sample_weights(sample_weight, len(codes))
        of_classes = class_weights(self.class_weight, classes)
        if of_classes is not None:
            weights = of_classes[codes] if weights is None else weights * of_classes[codes]
        if weights is not None:
            warn_of_balanced(codes, weights, stacklevel=2)
        outputs = 1 if len(classes) == 2 else len(classes)
        one_hot, numbers = np.eye(len(classes)), codes[:, None].astype(np.float64)
        records, generator = self._train(
            X,
            y,
            lambda index: one_hot[codes[index]] if outputs > 1 else numbers[index],
            outputs,
            weights,
            self.calibrate,
            classes=len(classes),
        )
        self.temperature_ = 1.0
        if self.calibrate:

            def losses() -> np.ndarray:
                parts = (
                    clipped_losses(
                        records.predictions(block, self._weights),
                        codes[block],
                        None if weights is None else weights[block],
                    )
                    for block in records.blocks()
                )
                return sum(parts, np.zeros(4))

            self.temperature_ = 1 / self._recipe.scale(losses, len(classes), generator)
        self._has_sample_weights = sample_weight is not None
        self.classes_ = classes
        self.coef_ = self._weights[:-1].T.copy()
        self.intercept_ = self._weights[-1] * self._constant()
        return self

    def _classes(self, y: np.ndarray) -> np.ndarray:
        given = self.classes
        if given is None:
            raise ValueError(
                "Expected classes, all labels that there can be, got None: which labels occur is "
                'private. Pass classes=[...], or classes="from_labels" if it is public.'
            )
        is_word = isinstance(given, str)
        if is_word and given != _FROM_LABELS:
            raise ValueError(f'Expected classes to be a list or "{_FROM_LABELS}", got {given!r}.')
        classes = np.unique(y if is_word else np.asarray(list(given)))
        if len(classes) < 2:
            raise ValueError(
                f"Expected at least two classes, got {len(classes)} class: {classes!r}."
            )
        return classes

    def _public(self) -> list[Assumption]:
        public = [Assumption.public(f"the {len(self.classes_)} classes")]
        if isinstance(self.classes, str):
            declared = "it is public which labels occur (classes from_labels)"
            public = [Assumption.declared(declared)]
        if self.class_weight is not None:
            public.append(Assumption.public(f"the weights of the classes, {self.class_weight!r}"))
        return public

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits: shape (records,) for two classes, else (records, classes)."""
        logits = self._predictions(X)
        return logits[:, 0] if logits.shape[1] == 1 else logits

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of every record, shape (records,)."""
        logits = self._predictions(X)
        best = logits[:, 0] > 0 if logits.shape[1] == 1 else logits.argmax(axis=1)
        return self.classes_[np.asarray(best, dtype=np.intp)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities, shape (records, classes), at the released `temperature_`."""
        logits = self._predictions(X) / self.temperature_
        if logits.shape[1] == 1:
            logits = np.hstack([np.zeros_like(logits), logits])
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


def _codes(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Positions of the labels among the sorted classes; a label outside is a ValueError."""
    if (y.dtype.kind in _NUMBERS) != (classes.dtype.kind in _NUMBERS):
        raise ValueError(
            f"Expected labels of the kind of classes = {classes.tolist()!r}, got {y[0]!r}. Convert "
            "one of them: numbers are no texts."
        )
    codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    unknown = y != classes[codes]
    if np.any(unknown):
        raise ValueError(
            f"Expected every label among classes = {classes.tolist()!r}, got "
            f"{y[np.argmax(unknown)]!r}. Add it to classes, which are public, or leave such "
            "records out by a rule that looks at one record at a time."
        )
    return codes


class PrivateRegressor(RegressorMixin, PrivateLinearModel):
    """A linear regression that is (epsilon, delta)-differentially private: Huber's loss or ridge.

    >>> import numpy as np
    >>> from hidden_state_adapters.sklearn import PrivateRegressor
    >>> x = np.linspace(-1, 1, 5000)
    >>> model = PrivateRegressor(epsilon=1.0, delta=1e-5, target_bounds=(-3, 3))
    >>> bool(model.fit(x[:, None], 2 * x).score(x[:, None], 2 * x) > 0.9)
    True

    Targets are cut at `target_bounds` and brought to [-1, 1] by them; the loss is half the squared
    error up to a residual of `threshold` there, and linear beyond (Huber). A threshold of 2 is the
    squared error as long as predictions stay within the bounds, with more noise; with alpha it is
    ridge regression.

    Formal guarantees: as for `PrivateClassifier`.

    Args:
        epsilon, delta: The target.
        target_bounds: (low, high), from public knowledge.
        threshold: Residual from which the loss is linear, in half distances of the bounds.
        alpha: The loss gets alpha/2 times the squared norm of the weights, the intercept included.
        feature_norm: What longer records are cut to. Choose it from public knowledge.
        normalization: "clip" brings longer records to `feature_norm`, "scale" every one.
        preprocessing, public_features, column_bounds, splines: The arguments of
            `PrivateClassifier`.
        calibrate: True to add the mean of the residuals, each at most a quarter of the distance of
            the bounds, to the intercept where its noise is small: it is released with noise and
            accounted, 3 % of the squared mu of the target.
        fit_intercept: True to append a constant of 0.3 times `feature_norm` to every record.
        neighboring_relation, verbose: The arguments of `PrivateClassifier`.

    Attributes:
        coef_: Shape (features,), for records as they are normalised.
        intercept_: A number.
        coef_of_columns_, intercept_of_columns_: The same in the units of the columns, for records
            that nothing cuts: X @ coef_of_columns_ + intercept_of_columns_ is `predict(X)`, for
            normalization="clip" and records no longer than `feature_norm` within the bounds.
        n_features_in_, n_iter_, privacy_event_, guarantee_, report_: The attributes of
            `PrivateClassifier`.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        target_bounds: Any = None,
        threshold: float = 0.1,
        alpha: float = 0.0,
        feature_norm: float = 1.0,
        normalization: str = "clip",
        preprocessing: str | None = "auto",
        public_features: Any = None,
        column_bounds: Any = None,
        splines: Any = None,
        calibrate: bool = True,
        fit_intercept: bool = True,
        neighboring_relation: Any = "REPLACE_SPECIAL",
        verbose: int = 0,
    ):
        _store(**locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PrivateRegressor:
        """Trains on records X, shape (records, features), with the targets y, shape (records,).

        Args:
            X: The records.
            y: Their targets.
            sample_weight: Weights of the records, in [0, 1], each a function of its record alone.

        Raises:
            TypeError, ValueError: An argument has an impossible value; nothing was trained.
            UnsupportedRunError: A gradient was not finite; the fit counts as spent.
        """
        X, y = self._read(X, y)
        weights = sample_weights(sample_weight, X.shape[0])
        middle, half = middle_and_half(self.target_bounds)
        targets = np.clip((np.asarray(y, dtype=np.float64) - middle) / half, -1.0, 1.0)[:, None]
        records, generator = self._train(
            X,
            y,
            lambda index: targets[index],
            1,
            weights,
            self.calibrate and bool(self.fit_intercept),
            loss="squared_error",
            clip_norm=self.threshold,
            weight_decay=self.alpha,
        )

        def residuals() -> np.ndarray:
            parts = [records.predictions(b, self._weights) for b in records.blocks()]
            found = targets - np.concatenate(parts)
            return found if weights is None else found * weights[:, None]

        if self.fit_intercept:
            shift = self._recipe.shift(residuals, generator)
            self._weights[-1] += shift / self._constant()
        self._has_sample_weights = sample_weight is not None
        self._middle, self._half = middle, half
        self.coef_ = half * self._weights[:-1, 0]
        self.intercept_ = float(middle + half * self._constant() * self._weights[-1, 0])
        return self

    def _public(self) -> list[Assumption]:
        return [Assumption.public(f"the bounds of the targets, {self.target_bounds!r}")]

    def predict(self, X: Any) -> np.ndarray:
        """Shape (records,)."""
        scaled = self._predictions(X)[:, 0]
        return self._middle + self._half * scaled
