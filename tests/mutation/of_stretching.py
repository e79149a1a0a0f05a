"""How much a step stretches distances."""

from __future__ import annotations

from mutation import Mutation

GEOMETRY = "process/geometry.py"
PROCESS = "process/noisy_process.py"
_LAWS = "laws/test_accountants.py"
_GEOMETRY_TESTS = "core/test_geometry.py"
_PROCESS_TESTS = "core/test_process.py"

MUTATIONS = (
    # How much a step stretches distances.
    Mutation(
        "clipped_maps_do_not_expand",
        GEOMETRY,
        "np.sqrt(1 + r * r / inside)",
        "np.ones_like(r)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "clipped_weakly_convex_row_without_e",
        GEOMETRY,
        "1 + eta * small,",
        "1 + 0 * eta * small,",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "unclipped_row_where_the_clip_acts",
        GEOMETRY,
        "return np.where(clip_is_active, clipped, unclipped)",
        "return np.where(clip_is_active & False, clipped, unclipped)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "unclipped_row_where_the_clip_acts_in_some_steps",
        GEOMETRY,
        "or not clip_is_active.any()",
        "or not clip_is_active.all()",
        _PROCESS_TESTS,
    ),
    Mutation(
        "generalized_linear_row_for_all_convex_losses",
        GEOMETRY,
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR)",
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR, LossKind.CONVEX)",
        _LAWS,
    ),
    Mutation(
        "strong_convexity_contracts_inside_the_clip",
        GEOMETRY,
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR)",
        "(LossKind.LINEAR, LossKind.GENERALIZED_LINEAR, LossKind.STRONGLY_CONVEX)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "weak_convexity_is_forgotten",
        GEOMETRY,
        "if loss.kind is LossKind.STRONGLY_CONVEX else -loss.weak_convexity",
        "if loss.kind is LossKind.STRONGLY_CONVEX else 0 * loss.weak_convexity",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "large_steps_do_not_overshoot",
        GEOMETRY,
        "np.abs(decay - eta * smoothness))",
        "0 * np.abs(decay - eta * smoothness))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "large_clipped_steps_do_not_overshoot",
        GEOMETRY,
        "eta * big - 1,",
        "1 - 0 * eta * big,",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "decay_is_clipped_with_the_loss",
        GEOMETRY,
        "result = decay * _clipped(eta / decay, big, small)",
        "result = _clipped(eta, big + float(np.max(w)), small)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "decay_does_not_stretch_the_clipped_step",
        GEOMETRY,
        "result = decay * _clipped(eta / decay, big, small)",
        "result = decay * _clipped(eta, big, small)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "expanding_maps_are_taken_for_nonexpansive",
        GEOMETRY,
        "unclipped = unclipped_update_lipschitz(learning_rate, loss.smoothness, lower, "
        "weight_decay)",
        "unclipped = np.minimum(1, unclipped_update_lipschitz(learning_rate, loss.smoothness, "
        "lower, weight_decay))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "expanding_clipped_maps_are_taken_for_nonexpansive",
        GEOMETRY,
        "return np.where(clip_is_active, clipped, unclipped)",
        "return np.where(clip_is_active, np.minimum(1, clipped), unclipped)",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "clip_counts_as_active_at_the_gradient_bound",
        PROCESS,
        'return limit > event.per_step("clip_norm")',
        'return limit >= event.per_step("clip_norm")',
        _PROCESS_TESTS,
    ),
    Mutation(
        "softmax_is_as_smooth_as_logistic",
        "events/loss_geometry.py",
        "return cls.convex(square / 2, math.sqrt(2 * square))",
        "return cls.convex(square / 4, math.sqrt(2 * square))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "softmax_gradient_is_as_short_as_logistic",
        "events/loss_geometry.py",
        "return cls.convex(square / 2, math.sqrt(2 * square))",
        "return cls.convex(square / 2, math.sqrt(square))",
        _GEOMETRY_TESTS,
    ),
    Mutation(
        "bias_is_not_a_feature",
        "events/loss_geometry.py",
        "return norm * norm + (1.0 if bias else 0.0)",
        "return norm * norm + (0.0 if bias else 0.0)",
        _GEOMETRY_TESTS,
    ),
)
