"""The attacks on last-iterate runs against exact laws, and their witnesses against the class."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from grid_oracle import GridOracle
from one_dimensional import OneDimensional, Piece, curvatures, witnesses
from runs import cyclic_run, full_run, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing import LinearLosses, QuadraticLosses
from hidden_state_accountants.auditing.linear_losses import (
    mu_by_position,
    participation_probability,
    released_shifts,
    shift_law,
)
from hidden_state_accountants.auditing.quadratic_losses import quadratic_runs
from hidden_state_accountants.curves.gaussian import delta_from_mu

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
EPSILONS = (0.0, 0.3, 1.0, 2.5)
LINEAR = hsa.LossGeometry.linear(1.0)


def silent(text):
    """Progress that nobody reads."""


def exact_mu(event, position, curvature=0.0, factor=1):
    """By linear algebra; the record's own curvature is 0."""
    hessians = np.full((event.dataset_size, 1, 1), curvature)
    record = position * event.batch_size
    hessians[record] = 0.0
    b, period = event.batch_size, event.batches_per_epoch
    batches = [range(i, min(i + b, event.dataset_size)) for i in range(0, period * b, b)]
    return GaussianOracle(
        hessians,
        [(1.0, [list(batches[t % period]) for t in range(event.num_steps)])],
        learning_rate=event.per_step("learning_rate"),
        noise_std=event.noise_std_on_sum(),
        weight_decay=event.per_step("weight_decay"),
        batch_size=event.batch_size,
        record=record,
        slope_difference=[factor * event.gradient_bound()[0]],
        release_steps=event.release_steps,
    ).mu


# --- linear losses ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_linear_losses_are_exact_at_every_position(seed):
    rng = np.random.default_rng(seed)
    steps, size = int(rng.integers(1, 20)), int(rng.integers(3, 9))  # often a short last batch
    event = cyclic_run(
        dataset_size=size,
        batch_size=min(size, int(rng.integers(1, 4))),
        num_steps=steps,
        noise_multiplier=rng.uniform(0.5, 3, steps),
        learning_rate=rng.uniform(0.1, 1, steps),
        weight_decay=rng.uniform(0, 0.9, steps),
        release_steps=rng.integers(1, steps + 1, 2).tolist(),
        loss=LINEAR,
    )
    for position, mu in enumerate(mu_by_position(event)):
        assert mu == pytest.approx(exact_mu(event, position), rel=1e-10)
    best = max(exact_mu(event, p, factor=2) for p in range(event.batches_per_epoch))
    evidence = LinearLosses().evidence(event, ONE, silent)
    assert evidence.delta(0.7) == pytest.approx(delta_from_mu(best, 0.7), rel=1e-9)


def test_extreme_but_legal_parameters_leave_no_trace_of_overflow():
    event = full_run(
        learning_rate=[1e-74, 1e74, 1e-74], num_steps=3, noise_multiplier=1e-3, weight_decay=0.0
    )
    assert mu_by_position(event)[0] == pytest.approx(1e3, rel=1e-12)
    releases = full_run(
        learning_rate=[1e-74, 1e74, 1e-74],
        num_steps=3,
        noise_multiplier=1.0,
        weight_decay=0.0,
        release_steps=(1, 2),
    )
    assert mu_by_position(releases)[0] == pytest.approx(math.sqrt(3), rel=1e-12)


def enumerated(event, here, there, others):
    """The mixture over all batch sequences, exactly, for constant gradients."""
    n, b, steps = event.dataset_size, event.batch_size, event.num_steps
    order = event.batch_order
    if order is hsa.BatchOrder.POISSON:  # the record alone: the others have no gradient
        q = b / n
        orders = [
            (math.prod(q if i else 1 - q for i in joins), [(0,) * i for i in joins])
            for joins in itertools.product((0, 1), repeat=steps)
        ]
        slopes = [[here]]
    else:
        if order is hsa.BatchOrder.WITHOUT_REPLACEMENT:
            sequences = list(itertools.product(itertools.combinations(range(n), b), repeat=steps))
        else:
            epochs = -(-steps // event.batches_per_epoch)
            once = order is hsa.BatchOrder.SHUFFLED_ONCE
            sequences = []
            for shuffles in itertools.product(
                itertools.permutations(range(n)), repeat=1 if once else epochs
            ):
                batches = [s[i : i + b] for s in shuffles for i in range(0, n, b)]
                sequences.append((batches * epochs)[:steps])
        orders = [(1 / len(sequences), sequence) for sequence in sequences]
        slopes = [[here]] + [[others]] * (n - 1)
    return GaussianOracle(
        np.zeros((len(slopes), 1, 1)),
        orders,
        learning_rate=event.per_step("learning_rate"),
        noise_std=event.noise_std_on_sum(),
        weight_decay=event.per_step("weight_decay"),
        batch_size=b,
        record=0,
        slope_difference=[there - here],
        slopes=slopes,
    )


RANDOM_ORDERS = [
    ("poisson", 6, 2, 5),
    ("without_replacement", 4, 2, 3),
    ("shuffled_once", 4, 2, 5),
    ("shuffled_once", 3, 2, 4),  # a short last batch
    ("reshuffled", 3, 1, 5),  # a partial last epoch
    ("reshuffled", 3, 2, 4),
]


@pytest.mark.parametrize(
    ("case", "relation", "scheduled"),
    zip(RANDOM_ORDERS, [SPECIAL, ONE] * 3, [True, True, False] * 2, strict=True),
)
def test_random_orders_against_enumeration(case, relation, scheduled):
    order, size, batch, steps = case
    event = cyclic_run(
        batch_order=order,
        dataset_size=size,
        batch_size=batch,
        num_steps=steps,
        noise_multiplier=0.9,
        weight_decay=0.4 if scheduled else 0.0,
        learning_rate=np.linspace(1.0, 0.3, steps) if scheduled else 0.5,
        loss=LINEAR,
    )
    there = 0.0 if relation is SPECIAL else -1.0
    oracles = [enumerated(event, 1.0, there, others) for others in (0.0, -1.0)]
    evidence = LinearLosses().evidence(event, relation, silent)
    for epsilon in EPSILONS:
        exact = max(max(oracle.delta(epsilon)) for oracle in oracles)
        assert evidence.delta(epsilon) <= exact * (1 + 1e-9) + 1e-15
        assert evidence.delta(epsilon) >= 0.99 * exact - 1e-6


def test_releases_of_a_random_order_show_more_and_no_more_than_composition():
    arguments = {"batch_order": "poisson", "weight_decay": 0.3, "num_steps": 6, "loss": LINEAR}
    hidden = LinearLosses().evidence(cyclic_run(**arguments), SPECIAL, silent)
    event = cyclic_run(release_steps=range(1, 6), **arguments)
    released = LinearLosses().evidence(event, SPECIAL, silent)
    composed = hsa.LastIterateAccountant().compose(event)
    for epsilon in (0.0, 0.2, 1.0):
        assert hidden.delta(epsilon) < released.delta(epsilon) <= composed.get_delta(epsilon)


def test_a_cap_keeps_a_record_out_of_full_batches():
    event = cyclic_run(batch_order="poisson", max_batch_size=2)
    rng = np.random.default_rng(0)
    joins = rng.random((200_000, 20)) < 5 / 20
    rank = rng.random(joins.shape)
    rank[~joins] = 2.0
    kept = joins[:, 0] & ((rank < rank[:, :1]).sum(axis=1) < 2)
    assert participation_probability(event) == pytest.approx(kept.mean(), abs=4e-3)
    assert participation_probability(event) < 5 / 20


@pytest.mark.parametrize("order", ["poisson", "reshuffled"])
def test_rounded_shifts_bracket_the_mean(order):
    event = cyclic_run(batch_order=order, num_steps=12)
    down, up = shift_law(event), shift_law(event, up=True)
    assert down.mass.sum() == pytest.approx(1.0) == up.mass.sum() + up.beyond
    low, high = down.points @ down.mass, up.points @ up.mass
    exact = released_shifts(event)[0].sum() * event.batch_size / event.dataset_size
    assert exact * 0.998 < low < exact < high < exact * 1.002


# --- quadratic losses ---------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(4))
def test_quadratic_runs_are_exact_where_they_stay(position):
    event = cyclic_run(num_steps=19, release_steps=(4, 11))
    for curvature in (-0.2, 0.0, 1.0):
        h = np.array([curvature])
        mu = quadratic_runs(event, position, (1, -1), h, h)[0][0]
        exact = exact_mu(event, position, curvature, factor=2)
        assert mu == pytest.approx(exact, rel=1e-8)
        assert mu < exact


@pytest.mark.parametrize("domain", [math.inf, 3.0])
def test_the_chance_to_leave_is_not_underestimated(domain):
    event = full_run(
        batch_size=4, dataset_size=4, num_steps=10, noise_multiplier=2.0, domain_diameter=domain
    )
    h = np.array([0.7])
    _, (leaves,), (neighbour_leaves,) = quadratic_runs(event, 0, (1, 0), h, h)
    rng = np.random.default_rng(1)
    for record, bound in ((1.0, leaves), (0.0, neighbour_leaves)):
        x, left = np.zeros(200_000), np.zeros(200_000, dtype=bool)
        for _ in range(10):
            left |= 0.7 * np.abs(x) > 1.0
            x = 0.9 * x - 0.5 / 4 * (3 * 0.7 * x + record + 2.0 * rng.normal(size=x.shape))
            left |= np.abs(x) > domain / 2
        assert 0 < left.mean() <= bound * 1.05
        assert bound < 12 * left.mean()


@pytest.mark.parametrize("relation", [SPECIAL, ONE])
def test_quadratic_evidence_is_below_the_truth_of_the_huber_run(relation):
    """The run in the class, where gradients are cut, on the grid."""
    event = full_run(batch_size=4, dataset_size=4, num_steps=6, noise_multiplier=1.0)
    evidence = QuadraticLosses().evidence(event, relation, silent)
    grids = [
        GridOracle(
            event,
            [Piece(0.0, 0.0, 1.0)] + [Piece(h, 0.0, 1.0)] * 3,
            Piece(0.0, 0.0, -1.0) if relation is ONE else None,
            cells_per_std=32,
        )
        for h in (1e-9, 0.5, 0.9, 1.0)
    ]
    for epsilon in (0.0, 0.5, 1.5):
        truth = max(v.value + v.error for grid in grids for v in grid.delta(epsilon))
        assert 0.5 * truth < evidence.delta(epsilon) <= truth


def test_curvature_erases_noise_and_undoes_decay():
    probe = probe_run(num_steps=2000)
    assert QuadraticLosses().evidence(probe, SPECIAL, silent).epsilon(
        1e-5
    ) > 2 * LinearLosses().evidence(probe, SPECIAL, silent).epsilon(1e-5)
    anything = full_run(
        batch_size=100, dataset_size=100, loss=hsa.LossGeometry.smooth(0.5), weight_decay=0.1
    )
    composition = math.sqrt(24) / 2
    found = QuadraticLosses().evidence(anything, SPECIAL, silent).delta(1.0)
    assert found == pytest.approx(delta_from_mu(composition, 1.0), rel=1e-3)


# --- one dimension ------------------------------------------------------------------------------

CLASSES = [
    hsa.LossGeometry.convex(2.0, lipschitz=0.7),
    hsa.LossGeometry.generalized_linear(1.0),
    hsa.LossGeometry.weakly_convex(1.0, 0.3),
    hsa.LossGeometry.smooth(0.5),
    hsa.LossGeometry.hoelder(0.5, 1.0),
    hsa.LossGeometry.hoelder(0.5, 0.5),
    hsa.LossGeometry.strongly_convex(1.0, 0.3),
    hsa.LossGeometry.strongly_convex(1.0, 0.3, lipschitz=0.9),
    LINEAR,
]


@pytest.mark.parametrize("domain", [math.inf, 1.5])
@pytest.mark.parametrize("loss", CLASSES, ids=repr)
def test_witnesses_are_in_the_class(loss, domain):
    event = cyclic_run(loss=loss, domain_diameter=domain)
    if curvatures(event) is None:
        assert domain == math.inf
        assert loss.strong_convexity
        assert OneDimensional().check(event, ONE)
        return
    x = np.linspace(-min(3.0, domain / 2), min(3.0, domain / 2), 501)
    clipped_far_away = loss.strong_convexity and loss.lipschitz is None
    low = loss.strong_convexity - loss.weak_convexity
    if loss.kind is hsa.LossKind.HOELDER:
        low = -loss.smoothness
    found = list(witnesses(event, ONE, 0.3))
    assert found
    for witness in found:
        assert abs(witness.start) <= domain / 2
        for piece in {witness.record, witness.neighbour, *witness.others} - {None}:
            g = piece(x)
            assert np.abs(g).max() <= event.gradient_bound()[0] + 1e-12
            slopes = np.diff(g) / np.diff(x)
            assert slopes.max() <= loss.smoothness + 1e-9
            if clipped_far_away:
                assert np.abs(g).min() == 1.0  # the clip norm
            else:
                assert slopes.min() >= low - 1e-9
    assert max(w.record(np.zeros(1))[0] - w.neighbour(np.zeros(1))[0] for w in found) > 0.9


@pytest.mark.parametrize("order", ["full", "cyclic", "poisson", "shuffled_once", "reshuffled"])
def test_records_without_a_gradient_need_not_be_counted(order):
    event = cyclic_run(
        batch_order=order,
        dataset_size=6,
        batch_size=6 if order == "full" else 2,
        num_steps=5,
        loss=hsa.LossGeometry.generalized_linear(1.0),
    )
    curved, flat = Piece(1.0, 0.1, 1.0), Piece(0.0, 0.0, 0.0)
    counted = [Piece(0.0, 0.0, 1.0), curved, flat, flat, curved, flat]
    dropped = [None if piece is flat else piece for piece in counted]
    expected = GridOracle(event, counted, None, cells_per_std=16).delta(0.3)
    found = GridOracle(event, dropped, None, cells_per_std=16).delta(0.3)
    for a, b in zip(expected, found, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-11)


def test_a_domain_hides_something_but_not_all():
    arguments = {"num_steps": 8, "batch_size": 2, "dataset_size": 2}
    free = LinearLosses().evidence(full_run(**arguments), SPECIAL, silent).epsilon(1e-5)
    event = full_run(domain_diameter=2.0, **arguments)
    found = OneDimensional().evidence(event, SPECIAL, silent).epsilon(1e-5)
    claimed = hsa.LastIterateAccountant(SPECIAL).compose(event).get_epsilon(1e-5)
    assert 0.3 * claimed < found <= claimed
    assert found < free


# --- where they do not apply --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "event", "relation", "text"),
    [
        (LinearLosses(), cyclic_run(), NeighboringRelation.ADD_OR_REMOVE_ONE, "fixed size"),
        (LinearLosses(), cyclic_run(domain_diameter=1.0), SPECIAL, "no projection"),
        (LinearLosses(), cyclic_run(loss=CLASSES[7]), SPECIAL, "not strongly convex"),
        (
            LinearLosses(),
            cyclic_run(batch_order="poisson", noise_multiplier=0.0),
            SPECIAL,
            "noise_multiplier > 0",
        ),
        (QuadraticLosses(), cyclic_run(batch_order="poisson"), SPECIAL, "FULL or CYCLIC"),
        (QuadraticLosses(), cyclic_run(loss=LINEAR), SPECIAL, "curvature"),
        (QuadraticLosses(), cyclic_run(loss=CLASSES[7]), SPECIAL, "no strong convexity"),
        (QuadraticLosses(), cyclic_run(noise_multiplier=0.0), SPECIAL, "noise_multiplier > 0"),
    ],
)
def test_reasons(attack, event, relation, text):
    assert text in "; ".join(map(str, attack.check(event, relation)))


@pytest.mark.parametrize("attack", [LinearLosses(), QuadraticLosses()])
def test_no_noise_is_no_privacy_or_declined(attack):
    event = full_run(noise_multiplier=0.0)
    if not attack.check(event, SPECIAL):
        assert attack.evidence(event, SPECIAL, silent).epsilon(1e-5) == math.inf
