"""Losses whose gradient is bounded and smooth."""

from __future__ import annotations

from mutation import Mutation

GEOMETRY = "events/loss_geometry.py"
SETTINGS = "losses/envelope.py"
SOFTMAX = "losses/softmax.py"
SCALAR = "losses/scalar.py"
_TESTS = "core/test_envelope_losses.py"
_SEARCH = "oracles/test_envelope_search.py"

MUTATIONS = (
    Mutation(
        "smoothing_counts_twice",
        GEOMETRY,
        "return square / (inverse_curvature + smoothing)",
        "return square / (inverse_curvature + 2 * smoothing)",
        _TESTS,
    ),
    Mutation(
        "gradients_of_an_envelope_do_not_grow_with_the_features",
        GEOMETRY,
        "clip_norm * math.sqrt(square)\n",
        "clip_norm\n",
        _TESTS,
    ),
    Mutation(
        "smoothing_for_a_step_without_decay",
        SETTINGS,
        "/ (2 * (1 - rate * decay))",
        "/ 2",
        _TESTS,
    ),
    Mutation(
        "smoothing_for_the_mean_batch",
        SETTINGS,
        "needed = rate * stretch *",
        "needed = rate *",
        _TESTS,
    ),
    Mutation(
        "softmax_envelope_without_smoothing",
        SOFTMAX,
        "return cls(arrays, centred, targets, clip_norm, smoothing)",
        "return cls(arrays, centred, targets, clip_norm, 0.0)",
        _SEARCH,
    ),
    Mutation(
        "ridge_below_the_smoothing",
        SOFTMAX,
        "xp.maximum(0.1 * r - 0.01, m))",
        "xp.maximum(0.1 * r - 0.01, 0.0))",
        _TESTS,
    ),
    Mutation(
        "a_radial_clip_in_place_of_the_envelope",
        SOFTMAX,
        "    for _ in range(NEWTON_STEPS):\n        point, squares",
        "    return point\n    for _ in range(NEWTON_STEPS):\n        point, squares",
        _SEARCH,
    ),
    Mutation(
        "what_is_not_solved_counts_as_solved",
        SOFTMAX,
        "return error <= TOLERANCE * spread",
        "return error <= 1e3 * spread",
        _TESTS,
    ),
    Mutation(
        "the_certificate_forgets_the_ball",
        SOFTMAX,
        "bound = bound + 0.5 * theta * xp.sqrt(squares) * (1.0 + stretch)",
        "bound = bound + 0.0 * theta * xp.sqrt(squares) * (1.0 + stretch)",
        _TESTS,
    ),
    Mutation(
        "logistic_gradients_are_cut_off_on_one_side",
        SCALAR,
        "y = xp.minimum(xp.maximum(y, -clip_norm), clip_norm)",
        "y = xp.minimum(y, clip_norm)",
        _TESTS,
    ),
    Mutation(
        "hinge_gradients_are_not_cut_off",
        SCALAR,
        "min(1.0, clip_norm))",
        "1.0)",
        _TESTS,
    ),
)
