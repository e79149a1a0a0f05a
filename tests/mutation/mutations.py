"""Mistakes that somebody could plausibly make in the engine: the test suite must notice each.

A mutation replaces one passage, which must occur exactly once in its file. It changes what some
run is told: an equivalent change has no place here.
"""

from __future__ import annotations

import of_composition
import of_curvature
import of_curves
import of_envelopes
import of_estimators
import of_groups
import of_keras_models
import of_moves
import of_oracles
import of_overlaps
import of_random_batches
import of_runs
import of_shifts
import of_stretching

MUTATIONS = (
    *of_moves.MUTATIONS,
    *of_stretching.MUTATIONS,
    *of_shifts.MUTATIONS,
    *of_curves.MUTATIONS,
    *of_composition.MUTATIONS,
    *of_oracles.MUTATIONS,
    *of_random_batches.MUTATIONS,
    *of_curvature.MUTATIONS,
    *of_runs.MUTATIONS,
    *of_envelopes.MUTATIONS,
    *of_estimators.MUTATIONS,
    *of_groups.MUTATIONS,
    *of_overlaps.MUTATIONS,
    *of_keras_models.MUTATIONS,
)
