"""Envelopes of losses, against bisection, minimisation and their definition."""

import functools
import itertools
import math

import envelopes as envelope
import numpy as np
import pytest
from envelopes import batch, bisected_gradient
from scipy.optimize import minimize, minimize_scalar

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry
from hidden_state_accountants.losses import scalar
from hidden_state_accountants.losses import softmax as solver
from hidden_state_accountants.losses.arrays import NUMPY
from hidden_state_accountants.process.noisy_process import update_lipschitz

SETTINGS = list(itertools.product([0.03, 0.3, 1.0, 1.35, 5.0], [0.0, 0.5, 20.0]))


def huber(v, clip_norm, smoothing):
    norm = np.linalg.norm(v)
    if norm <= smoothing * clip_norm:
        return norm**2 / (2 * smoothing) if norm else 0.0
    return clip_norm * norm - smoothing * clip_norm**2 / 2


# --- softmax cross-entropy ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "scale", "records", "soft"),
    [(2, 3.0, 8, False), (5, 0.0, 2, True), (5, 0.3, 8, False), (5, 3.0, 8, True),
     (5, 30.0, 8, False), (100, 3.0, 2, True), (1000, 10.0, 1, False), (2, 1e4, 4, True),
     (10, 1e4, 4, False)],
)  # fmt: skip
def test_gradients_are_those_of_bisection(classes, scale, records, soft):
    logits, targets = batch(records, classes, scale, classes, soft=soft)
    settings = SETTINGS if classes < 1000 else SETTINGS[::4]
    each = np.repeat(np.array(settings), records, axis=0)
    everywhere = [np.tile(a, (len(settings), 1)) for a in (logits, targets)]
    expected = bisected_gradient(*everywhere, each[:, 0], each[:, 1])
    for number, (clip_norm, smoothing) in enumerate(settings):
        found = envelope.softmax_cross_entropy(
            logits, targets, clip_norm=clip_norm, smoothing=smoothing
        )
        part = expected[number * records : (number + 1) * records]
        np.testing.assert_allclose(found.gradient, part, rtol=0, atol=1e-12 * (10 + scale))


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 10, 100, 1000])
def test_no_gradient_is_longer_than_the_clip_norm(classes, soft):
    for scale, (clip_norm, smoothing) in itertools.product([0.3, 10.0, 1e4], SETTINGS):
        logits, targets = batch(100 if classes < 1000 else 10, classes, scale, 2, soft=soft)
        gradient = envelope.softmax_cross_entropy(
            logits, targets, clip_norm=clip_norm, smoothing=smoothing
        ).gradient
        assert np.linalg.norm(gradient, axis=1).max() <= clip_norm * (1 + 1e-15)
        np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-13)


@pytest.mark.parametrize("soft", [False, True])
def test_values_are_the_infimal_convolution(soft):
    """Minimised over u, without anything that the package computes."""
    for number, (clip_norm, smoothing) in enumerate(SETTINGS):
        if smoothing == 0:
            continue
        logits, targets = batch(2, 4, 3.0, number, soft=soft)
        values = envelope.softmax_cross_entropy(
            logits, targets, clip_norm=clip_norm, smoothing=smoothing
        ).value
        for z, t, value in zip(logits, targets, values, strict=True):

            def primal(u, z=z, t=t, c=clip_norm, m=smoothing):
                return np.logaddexp.reduce(u) - u @ t + huber(z - u, c, m)

            best = min(minimize(primal, start, tol=1e-12).fun for start in (z, np.zeros(4)))
            assert value == pytest.approx(best, rel=1e-9, abs=1e-9)
            assert value <= best + 1e-12


def test_without_clip_and_smoothing_it_is_the_loss_itself():
    logits, targets = batch(200, 7, 5.0, 4, soft=True)
    found = envelope.softmax_cross_entropy(logits, targets, clip_norm=1.5)
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    np.testing.assert_allclose(found.value, -(targets * log_p).sum(axis=1), rtol=1e-13)
    np.testing.assert_allclose(found.gradient, np.exp(log_p) - targets, atol=1e-15)


@pytest.mark.parametrize("soft", [False, True])
def test_the_error_bound_holds(soft):
    """Points that are off, in the logarithms or in the ridge, against bisection."""
    random = np.random.default_rng(7)
    largest = 0.0
    for clip_norm, smoothing in [(0.05, 0.0), (0.3, 0.0), (0.3, 4.0), (1.0, 0.0), (1.3, 20.0)]:
        logits, targets = batch(100, 4, 4.0, 8, soft=soft)
        columns = logits.T.copy(), targets.T.copy()
        made = solver.SoftmaxEnvelope.of(NUMPY, *columns, clip_norm, smoothing)
        exact = bisected_gradient(logits, targets, clip_norm, smoothing)
        point = solver.solve(made)
        for size in (1e-7, 1e-4, 1e-2):
            log_p = point.log_p + size * random.normal(size=point.log_p.shape)
            log_p = log_p - np.logaddexp.reduce(log_p, axis=0)
            ridge = point.ridge * (1 + size * random.normal(size=len(logits)))
            ridge = np.where(point.ridge > smoothing, np.maximum(ridge, smoothing), smoothing)
            moved = solver.Point(log_p, np.exp(log_p), ridge)
            error = made.error(moved)
            share = np.linalg.norm(made.gradient(moved).T - exact, axis=1) / error
            assert (share <= 1).all()
            largest = max(largest, share[np.isfinite(error)].max())
    assert largest > 0.5  # the bound is no trivial one


def test_what_newton_does_not_solve_is_rescued(monkeypatch):
    for scale, soft in itertools.product([0.3, 30.0, 1e4], [False, True]):
        for clip_norm, smoothing in SETTINGS:
            logits, targets = batch(30, 6, scale, 9, soft=soft)
            solve = functools.partial(
                envelope.softmax_cross_entropy,
                logits,
                targets,
                clip_norm=clip_norm,
                smoothing=smoothing,
            )
            expected = solve()
            with monkeypatch.context() as patch:
                patch.setattr(solver, "NEWTON_STEPS", 1)
                found = solve()
            np.testing.assert_allclose(found.gradient, expected.gradient, atol=1e-10)
            np.testing.assert_allclose(found.value, expected.value, rtol=1e-9, atol=1e-9)


def test_what_is_not_solved_is_not_a_number(monkeypatch):
    """Only the records that it is about."""
    logits, targets = batch(40, 6, 5.0, 11)
    logits[3, 2] = math.nan
    found = envelope.softmax_cross_entropy(logits, targets, clip_norm=0.3)
    assert np.flatnonzero(np.isnan(found.gradient).any(axis=1)).tolist() == [3]
    assert np.flatnonzero(np.isnan(found.value)).tolist() == [3]
    monkeypatch.setattr(solver, "NEWTON_STEPS", 1)
    monkeypatch.setattr(solver, "RESCUE_STEPS", 1)
    assert np.isnan(envelope.softmax_cross_entropy(logits, targets, clip_norm=0.3).gradient).any()
    monkeypatch.setattr(scalar, "_NEWTON_STEPS", 1)
    found = envelope.logistic([0.3, -2.0], [0.0, 1.0], clip_norm=0.9, smoothing=50.0)
    assert np.isnan(found.gradient).any()


@pytest.mark.parametrize("clip_norm", [1.4105, 1.4142])
def test_a_clip_norm_just_below_the_longest_gradient_is_rounded_down(clip_norm):
    """What it cuts off is too little for double precision to certify where."""
    logits, targets = batch(200, 3, 30.0, 12)
    almost = envelope.softmax_cross_entropy(logits, targets, clip_norm=clip_norm)
    rounded = envelope.softmax_cross_entropy(logits, targets, clip_norm=1.41)
    np.testing.assert_array_equal(almost.gradient, rounded.gradient)


# --- losses of one prediction ---------------------------------------------------------------------


SCALARS = {
    "logistic": (
        lambda u, t: np.logaddexp(0, u) - t * u,
        envelope.logistic,
        [0.0, 0.3, 1.0],
        0.25,
    ),
    "hinge": (lambda u, t: max(0.0, 1 - t * u), envelope.hinge, [-1.0, 1.0], math.inf),
    "squared": (
        lambda u, t: 0.5 * 3.0 * (u - t) ** 2,
        functools.partial(envelope.squared_error, scale=3.0),
        [-2.0, 0.5],
        3.0,
    ),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize(("smoothing", "clip_norm"), [(0.05, 5.0), (1.0, 0.7), (30.0, 0.1)])
def test_scalar_values_are_the_infimal_convolution(name, smoothing, clip_norm):
    plain, loss, targets, _ = SCALARS[name]
    for z, t in itertools.product([-30.0, -3.0, -0.4, 0.0, 0.8, 1.0, 2.5, 40.0], targets):

        def primal(u, z=z, t=t):
            return plain(u, t) + huber(z - u, clip_norm, smoothing)

        reach = 2 * smoothing * clip_norm + 50
        starts = np.linspace(z - reach, z + reach, 2001)
        near = starts[np.argmin([primal(u) for u in starts])]
        best = minimize_scalar(
            primal, bounds=(near - reach / 500, near + reach / 500), options={"xatol": 1e-10}
        )
        value = loss([z], [t], clip_norm=clip_norm, smoothing=smoothing).value[0]
        assert value == pytest.approx(best.fun, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(
    ("name", "smoothing"),
    [*itertools.product(SCALARS, [0.05, 1.0, 30.0, 1e6]), ("logistic", 0.0), ("squared", 0.0)],
)
@pytest.mark.parametrize("clip_norm", [0.1, 0.7, 5.0])
def test_scalar_gradients(name, smoothing, clip_norm):
    """Slopes of the values, no longer than C, nondecreasing, with slopes of at most M'."""
    _, loss, targets, curvature = SCALARS[name]
    z = np.sort(np.concatenate([np.linspace(-8, 8, 801), [-1e4, -200.0, 200.0, 1e4, 1e7]]))
    for t in targets:
        found = loss(z, np.full_like(z, t), clip_norm=clip_norm, smoothing=smoothing)
        limit = min(clip_norm, 1.0) if name != "squared" else clip_norm
        assert np.abs(found.gradient).max() <= limit * (1 + 1e-15)
        rises = np.diff(found.gradient)
        rounding = 1e-15 * (1 + limit)
        assert (rises >= -rounding).all()
        assert (rises <= np.diff(z) / (1 / curvature + smoothing) * (1 + 1e-12) + rounding).all()
        middle = loss(
            (z[1:] + z[:-1]) / 2, np.full(len(z) - 1, t), clip_norm=clip_norm, smoothing=smoothing
        )
        assert (found.value >= 0).all()
        # The trapezium and the midpoint rule enclose the integral of a monotone function.
        steps, change = np.diff(z), np.diff(found.value)
        slack = 1e-12 * (1 + np.abs(found.value[1:]) + np.abs(found.value[:-1]))
        assert (change <= found.gradient[1:] * steps + slack).all()
        assert (change >= found.gradient[:-1] * steps - slack).all()
        assert (np.abs(change - middle.gradient * steps) <= rises * steps + slack).all()


def test_the_squared_error_of_several_outputs_is_clipped_along_its_gradient():
    z, t = np.random.default_rng(14).normal(size=(2, 50, 3)) * 3
    found = envelope.squared_error(z, t, clip_norm=0.8, smoothing=0.7, scale=2.0)
    plain = (z - t) / (1 / 2.0 + 0.7)
    norms = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(found.gradient, plain * np.minimum(1, 0.8 / norms), rtol=1e-14)
    one = envelope.squared_error(
        np.linalg.norm(z - t, axis=1), np.zeros(50), clip_norm=0.8, smoothing=0.7, scale=2.0
    )
    np.testing.assert_allclose(found.value, one.value, rtol=1e-12)


# --- constants and arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 3.0])
def test_geometries(bias, smoothing):
    square = 1.5**2 + bias
    norm = math.sqrt(square)

    def geometry(name, plus=0.0, clip_norm=0.3, **kwargs):
        make = getattr(LossGeometry, f"envelope_{name}")
        return make(1.5, bias, clip_norm=clip_norm, smoothing=smoothing + plus, **kwargs)

    for found, kind, flatness in (
        (geometry("softmax_cross_entropy"), LossGeometry.convex, 2),
        (geometry("logistic"), LossGeometry.generalized_linear, 4),
        (geometry("squared_error", scale=2.0), LossGeometry.convex, 0.5),
        (geometry("hinge", plus=1), LossGeometry.generalized_linear, 1),
    ):
        assert found == kind(square / (flatness + smoothing), 0.3 * norm)
    # A clip that never acts.
    longest = geometry("softmax_cross_entropy", clip_norm=9.0).lipschitz
    assert longest == pytest.approx(LossGeometry.softmax_cross_entropy(1.5, bias).lipschitz)
    assert geometry("logistic", clip_norm=9.0).lipschitz == norm
    assert geometry("hinge", plus=1, clip_norm=9.0).lipschitz == norm


@pytest.mark.parametrize("curvature", [0.25, 3.0, math.inf])
@pytest.mark.parametrize("rate", [0.1, 1.0, 200.0])
@pytest.mark.parametrize(("decay", "stretch"), [(0.0, 1.4), (0.004, 1.0), (0.004, 1.4)])
def test_the_smoothing_makes_the_step_contract_as_decay_does(curvature, rate, decay, stretch):
    """c = 1 - lr * decay at this rate and at smaller ones, and at no smaller smoothing."""
    features = {"feature_norm": 1.5, "bias": True, "batch_stretch": stretch}
    smoothing = hsa.envelope_smoothing(rate, curvature=curvature, weight_decay=decay, **features)

    def modulus(smoothing, rate=rate):
        loss = LossGeometry.convex((1.5**2 + 1) / (1 / curvature + smoothing))
        (c,) = update_lipschitz(
            loss, np.array([rate * stretch]), np.array([decay / stretch]), np.array([False])
        )
        return c

    for share in (1.0, 0.7, 0.1):
        contraction = 1 - share * rate * decay
        assert modulus(smoothing, share * rate) == pytest.approx(contraction, rel=1e-14)
    if smoothing:
        assert modulus(smoothing * 0.999 - 1e-3) > 1 - rate * decay


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"weight_decay": 2.0}, ValueError, "learning_rate \\* weight_decay < 1, got 1"),
        ({"curvature": 0.0}, ValueError, "curvature > 0"),
        ({"batch_stretch": 0.9}, ValueError, "batch_stretch >= 1"),
        ({"bias": 1}, TypeError, "bias to be True or False"),
    ],
)
def test_bad_arguments_of_the_smoothing(changes, error, text):
    arguments = {"learning_rate": 0.5, "curvature": 0.5, "feature_norm": 1.0, **changes}
    with pytest.raises(error, match=text):
        hsa.envelope_smoothing(**arguments)
