r"""The law of the last iterate of a one-dimensional run, for any gradients and any batch order.

The batches are enumerated: records with the same gradient are interchangeable, so that a batch is a
tuple of counts, one for each group of records. Records without a gradient are in no group and are
not counted; there may be any number of them. A run is a mixture of Markov chains of batches.
"""

import functools
import itertools
import math

import attrs
import numpy as np
from scipy import special

from hidden_state_accountants.events.batch_order import BINS, BatchOrder

REACH = 16.0
"""Noise beyond this many standard deviations is cut off, and counted as missing mass."""
NEGLIGIBLE = 1e-60
"""Mass that may be cut off at each end of a measure after each step; counted as well."""
LARGEST_EPSILON = 700.0
"""Its exponential fits a double."""

_ROUNDING = 1e-11  # relative, per step: more than the sums of a convolution lose
_MOST_NODES = 500_000
_MOST_BATCHES = 1000
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2  # on [0, 1]


# --- batches --------------------------------------------------------------------------------------


def batch_chains(event, groups):
    """The mixture of chains from which `event` draws its batches, for the group of each record.

    A chain gives, for a step t from 0 and a state, (probability, batch, next state) triples; the
    state is what an epoch has not used yet, or nothing. Every chain begins with the empty state.
    """
    order, b, period = event.batch_order, event.batch_size, event.batches_per_epoch
    sizes = _counts(groups, 1 + max(group for group in groups if group is not None))

    def part(index, left):
        """The next batch of an epoch, of which `left` are in no earlier one."""
        if order in BINS:
            return _coins(left, 1 / (period - index))
        return _subset(left, max(0, len(groups) - index * b) - sum(left), b)

    def fresh(t, state):
        left = state if t % period else sizes
        return [(p, batch, _without(left, batch)) for p, batch in part(t % period, left)]

    if order in (BatchOrder.BALLS_IN_BINS_REDRAWN, BatchOrder.RESHUFFLED):
        return [(1.0, fresh)]
    if order in (BatchOrder.BALLS_IN_BINS, BatchOrder.SHUFFLED_ONCE):
        return [(p, _fixed(batches)) for p, batches in _epochs(part, sizes, period)]
    if order in (BatchOrder.FULL, BatchOrder.CYCLIC):
        return [(1.0, _fixed([_counts(groups[i * b :][:b], len(sizes)) for i in range(period)]))]
    drawn = _coins(sizes, event.sampling_probability)
    if order is BatchOrder.WITHOUT_REPLACEMENT:
        drawn = part(0, sizes)
    return [(1.0, lambda t, state: [(p, batch, ()) for p, batch in drawn])]


def _counts(groups, number):
    return tuple(groups.count(group) for group in range(number))


def _without(sizes, batch):
    return tuple(k - n for k, n in zip(sizes, batch, strict=True))


def _fixed(batches):
    return lambda t, state: [(1.0, batches[t % len(batches)], ())]


def _epochs(part, left, period, index=0):
    """The batches of an epoch that all others repeat."""
    if index == period:
        yield 1.0, []
        return
    for p, batch in part(index, left):
        for q, later in _epochs(part, _without(left, batch), period, index + 1):
            yield p * q, [batch, *later]


def _batches(sizes):
    assert math.prod(k + 1 for k in sizes) <= _MOST_BATCHES, "too many batches to enumerate"
    return itertools.product(*(range(k + 1) for k in sizes))


def _coins(sizes, rate):
    """Every record takes part with a probability of its own."""
    found = []
    for batch in _batches(sizes):
        pairs = zip(sizes, batch, strict=True)
        p = math.prod(math.comb(k, n) * rate**n * (1 - rate) ** (k - n) for k, n in pairs)
        found += [(p, batch)] * (p > 0)
    return found


@functools.lru_cache(maxsize=1024)  # binomial coefficients of large data sets have many digits
def _subset(sizes, rest, batch_size):
    """A batch of a fixed size, of these records and `rest` that are in no group."""
    size = min(batch_size, sum(sizes) + rest)
    total = math.comb(sum(sizes) + rest, size)
    return tuple(
        (math.prod(map(math.comb, sizes, batch)) * math.comb(rest, others) / total, batch)
        for batch in _batches(sizes)
        if 0 <= (others := size - sum(batch)) <= rest
    )


# --- measures on a lattice ------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Measure:
    """Mass on the lattice points first, first + 1, ..."""

    first: int
    mass: np.ndarray

    @property
    def index(self):
        """The lattice points."""
        return self.first + np.arange(len(self.mass))

    def blurred(self, kernel):
        """Convolution. Sums of positive terms only: tails keep their relative precision."""
        return Measure(self.first + kernel.first, np.convolve(self.mass, kernel.mass))

    def folded(self, low, high):
        """Projection on [low, high]: the mass outside goes to the ends."""
        index = np.clip(self.index, low, high).astype(np.int64)
        return Measure(int(index[0]), np.bincount(index - index[0], self.mass))

    def trimmed(self, low, high, negligible):
        """Without the ends that hold no mass to speak of, and the mass that may have gone astray.

        That is the mass cut off and, where the measure does not end at `low` or `high`, the mass
        on its last node, which stands for a cell that reaches beyond.
        """
        mass = self.mass
        left = int(np.searchsorted(np.cumsum(mass), negligible))
        right = len(mass) - int(np.searchsorted(np.cumsum(mass[::-1]), negligible))
        if left >= right:
            return Measure(self.first, mass[:1]), float(mass.sum())
        kept = Measure(self.first + left, mass[left:right])
        astray = mass[:left].sum() + mass[right:].sum()
        astray += kept.mass[0] * (kept.first > low) + kept.mass[-1] * (kept.index[-1] < high)
        return kept, float(astray)


def split(position, mass):
    """Splits mass at real positions (in lattice units) onto the two nodes next to each.

    The mean is kept exactly: this is a random rounding whose error has mean zero.
    """
    low, high = math.floor(position.min()), math.floor(position.max()) + 1
    assert high - low < _MOST_NODES, "the run does not fit on the nodes: lower cells_per_std"
    below = np.floor(position)
    above = position - below
    node = below.astype(np.int64) - low
    left = np.bincount(node, mass * (1 - above), minlength=high - low + 1)
    right = np.bincount(node + 1, mass * above, minlength=high - low + 1)
    return Measure(low, left + right)


def node_kernel(std, reach):
    """N(0, std**2), in lattice units, rounded randomly to the nodes without moving the mean."""
    end = math.ceil(reach * std) + 1
    index = np.arange(end + 1)
    mass = np.zeros(end + 1)
    for side in (-1, 1):
        x = index[:, None] + side * _NODES
        mass += np.exp(-0.5 * (x / std) ** 2) @ (_WEIGHTS * (1 - _NODES))
    mass /= std * math.sqrt(2 * math.pi)
    return Measure(-end, np.concatenate([mass[:0:-1], mass]))


def cell_kernel(std, reach):
    """N(0, std**2): the exact mass of the cells [k, k + 1]."""
    end = math.ceil(reach * std)
    half = -np.diff(special.ndtr(-np.arange(end + 1) / std))
    return Measure(-end, np.concatenate([half[::-1], half]))


@attrs.frozen(eq=False, slots=False)
class CellPair:
    """The computed masses of the same cells under two laws, and how far the real ones may differ.

    The mass that was cut off on the way is missing; for kappa of every step see `GridOracle`.
    """

    p: np.ndarray
    q: np.ndarray
    missing_p: float
    missing_q: float
    kappa: np.ndarray

    def reversed(self):
        """The other direction."""
        return CellPair(self.q, self.p, self.missing_q, self.missing_p, self.kappa)

    def at_least(self, p):
        """Lower bounds on real probabilities from computed ones, of the first law.

        The better of Hölder's inequality and the upper bound on the complement.
        """
        orders = np.geomspace(1e-4, 0.9, 40) / (2 * float(self.kappa.max()))
        rounding = _ROUNDING * len(self.kappa)
        p = np.maximum(p - self.missing_p, 0)
        best = 1 - self._inflated(1 - p + rounding)
        for a in orders[orders > 1]:
            log_moment = rounding - 0.5 * float(np.log1p(-2 * a * self.kappa).sum()) / a
            best = np.maximum(best, (p * math.exp(-log_moment)) ** (a / (a - 1)))
        return np.maximum(best, 0)

    def at_most(self, q):
        """Upper bounds on real probabilities from computed ones, of the second law."""
        return np.minimum(self._inflated(q + self.missing_q), 1.0)

    def _inflated(self, mass):
        slack = float(self.kappa.sum()) + _ROUNDING * len(self.kappa)
        return mass * math.exp(min(slack, LARGEST_EPSILON))

    def hockey_stick(self, epsilon):
        """The computed hockey-stick divergence, and at most the real one."""
        factor = math.exp(epsilon)
        # The loss is about 2 * sum(kappa): a set chosen with it in mind loses least.
        certified = 0.0
        for margin in (0.0, 2 * float(self.kappa.sum())):
            inside = self.p > math.exp(min(epsilon + margin, LARGEST_EPSILON)) * self.q
            p, q = self.at_least(self.p[inside].sum()), self.at_most(self.q[inside].sum())
            certified = max(certified, float(p - factor * q))
        return float(np.maximum(self.p - factor * self.q, 0).sum()), certified

    def renyi(self, order):
        """The computed Renyi divergence, and at most the real one."""
        # The tails of p and q are cut off at different places; without these corrections a cell
        # of p could stand against an empty cell of q.
        computed = _renyi(self.p - self.missing_p, self.q + self.missing_q, order)
        return computed, _renyi(*self._certified, order)

    @functools.cached_property
    def _certified(self):
        return self.at_least(self.p), self.at_most(self.q)


def _renyi(p, q, order):
    p, q = p[p > 0], q[p > 0]
    if p.size == 0:
        return 0.0
    exponent = order * np.log(p) + (1 - order) * np.log(q)
    return max(0.0, float(special.logsumexp(exponent)) / (order - 1))


# --- the oracle -----------------------------------------------------------------------------------


@attrs.frozen
class GridEstimate:
    """A divergence computed on a grid.

    Attributes:
        value: The value on the grid. An ESTIMATE; it converges with the square of the cell width.
        error: The change from a grid of twice the cell width; usually about three times
            the error of `value`.
        lower_bound: The CERTIFIED lower bound; see `GridOracle`.
    """

    value: float
    error: float
    lower_bound: float


class GridOracle:
    r"""Divergences of the last iterates of two runs in one dimension.

    The laws of :math:`X_t` and :math:`X'_t` are propagated on a grid. Between two steps the iterate
    is rounded to one of the two nodes next to it, at random and without moving its mean; noise and
    projection are exact, and so are the masses of the cells of the last iterate.

    `lower_bound` is at most the exact divergence of the run in which every per-example gradient,
    clipped, is replaced by its piecewise linear INTERPOLANT on the grid. It has the same bound,
    monotonicity, Lipschitz and Hölder constants and lower curvature: that run belongs to every
    class (`LossGeometry`, clip norm) that the given run belongs to, except that strong convexity is
    lost in a cell where clipping sets in, and that under a schedule of clip norms the loss may
    differ between steps. Floating-point rounding is not bounded rigorously: a slack of 1e-11 per
    step is taken off for it.

    Proof. Let h be the cell width and g_t the largest difference of the update at two neighbouring
    nodes. Given the past, the computed run adds to the mean of the real step an error U of mean
    zero, the sum of two rounding errors on intervals of lengths g_t and h (the interpolated update
    is linear in a cell). With w the noise in standard deviations and
    :math:`\kappa_t = (g_t^2 + h^2)/(8 \sigma_t^2)` the ratio of the computed to the real density
    is at least :math:`e^{-\kappa_t}` (Jensen's inequality) and at most :math:`e^{\kappa_t w^2}`
    (Hoeffding's lemma). Over all steps, for every event S of the last iterate,

    .. math::
        P(S) \le e^{\sum \kappa_t} \hat P(S), \qquad
        P(S) \ge \Big(\hat P(S) \prod_t (1 - 2 a \kappa_t)^{1/(2a)}\Big)^{a/(a-1)},
        \quad 1 < a < 1/(2 \max \kappa_t),

    the second by Hölder's inequality (or from the first for the complement of S). Mass cut off in
    the tails counts against both. The bound evaluates the divergence on events:
    :math:`P(S) - e^\varepsilon P'(S)` for the best S found, and the Renyi divergence of the cells
    (data processing). It loses about :math:`\sum 2 \kappa_t`, relative, on both probabilities; for
    equal noise and no expansion that is T / (2 cells_per_std**2).

    Args:
        event: A run without releases, a cap on Poisson batches, a proximal map or steps without
            noise. Whether the gradients have the geometry of its `loss` is up to the caller.
        gradients: One callable for each record, from an array of iterates to the gradients at them,
            neither clipped nor averaged; None for no gradient. Equal callables are taken together.
        neighbour: Gradient of the record that replaces `record`, None for none.
        record: Index of the record that differs. CYCLIC: batch j holds the records from
            j * batch_size on.
        start: x_0.
        domain: Interval on which every iterate is projected, no longer than event.domain_diameter.
        cells_per_std: Cells in a standard deviation of the noise on the iterate, at its smallest.
        reach: Standard deviations beyond which noise is cut off, and counted as missing. A small
            one is faster, and misses the tails.

    Source: this project.
    """

    def __init__(
        self,
        event,
        gradients,
        neighbour,
        *,
        record=0,
        start=0.0,
        domain=None,
        cells_per_std=32,
        reach=REACH,
    ):
        assert not event.release_steps
        assert event.max_batch_size is None
        assert event.prox_strong_convexity == 0
        assert (event.per_step("learning_rate") * event.noise_std_on_sum() > 0).all()
        assert len(gradients) == event.dataset_size
        width = math.inf if domain is None else domain[1] - domain[0]
        assert width <= event.domain_diameter
        assert (domain is None) == (event.domain_diameter == math.inf)
        number = {None: None}
        for i, gradient in enumerate(gradients):
            if i != record and gradient is not None:
                number.setdefault(gradient, len(number))
        groups = [0 if i == record else number[g] for i, g in enumerate(gradients)]
        chains = batch_chains(event, groups)
        others = [gradient for gradient in number if gradient is not None]
        sides = [gradients[record], *others], [neighbour, *others]
        self._fine, self._coarse = (
            _cell_pair(_Grid(event, start, domain, per_std, reach), chains, *sides)
            for per_std in (cells_per_std, cells_per_std / 2)
        )

    def delta(self, epsilon):
        r"""Hockey-stick divergences :math:`\int \max(p - e^\varepsilon q, 0)`, epsilon in [0, 700].

        Of the data set from its neighbour, and of the neighbour from the data set.
        """
        return self._estimates(lambda pair: pair.hockey_stick(epsilon))

    def renyi(self, order):
        """Renyi divergences (in nats) of an order > 1; directions as in `delta`.

        Noise beyond 16 standard deviations is cut off: where order * mu is beyond about 10, `value`
        falls short.
        """
        return self._estimates(lambda pair: pair.renyi(order))

    def _estimates(self, divergence):
        fine, coarse = self._fine, self._coarse
        found = []
        for a, b in ((fine, coarse), (fine.reversed(), coarse.reversed())):
            value, lower_bound = divergence(a)
            found.append(GridEstimate(value, abs(value - divergence(b)[0]), lower_bound))
        return tuple(found)


class _Grid:
    """The run in lattice units: node k is the iterate anchor + k * width."""

    def __init__(self, event, start, domain, cells_per_std, reach):
        self.reach = reach
        self.negligible = NEGLIGIBLE if reach == REACH else float(special.ndtr(-reach))
        self.eta = event.per_step("learning_rate") / event.batch_size
        self.decay = 1 - event.per_step("learning_rate") * event.per_step("weight_decay")
        self.clip = None if event.clip_norm is None else event.per_step("clip_norm")
        std = self.eta * event.noise_std_on_sum()
        self.width = float(std.min()) / cells_per_std
        self.anchor, self.start = start, start
        self.low, self.high = -math.inf, math.inf
        if domain is not None:
            cells = 2 * math.ceil((domain[1] - domain[0]) / (2 * self.width))
            self.width = (domain[1] - domain[0]) / cells
            self.anchor, self.low, self.high = domain[0], 0, cells
        self.std = std / self.width

    def updates(self, t, iterate, gradients):
        """The update without its noise, in lattice units, as a function of the batch."""
        raw = [np.zeros_like(iterate) if g is None else g(iterate) for g in gradients]
        values = [
            value if self.clip is None else np.clip(value, -self.clip[t], self.clip[t])
            for value in raw
        ]

        def update(batch):
            total = sum(n * value for n, value in zip(batch, values, strict=True) if n)
            return (self.decay[t] * iterate - self.eta[t] * total - self.anchor) / self.width

        return update

    def propagate(self, chain, gradients):
        """The law of the last iterate on the cells, kappa of every step, and the missing mass."""
        steps = len(self.eta)
        kappa, missing = np.zeros(steps), 0.0
        laws = {(): (np.array([self.start]), np.array([1.0]))}
        for t in range(steps):
            last = t == steps - 1
            parts, gap = {}, 0.0
            for state, (iterate, mass) in laws.items():
                update = self.updates(t, iterate, gradients)
                for probability, batch, after in chain(t, state):
                    target = update(batch)
                    gap = max(gap, float(np.abs(np.diff(target)).max(initial=0.0)))
                    parts.setdefault(() if last else after, []).append((target, probability * mass))
            kappa[t] = (gap**2 + 1) / (8 * self.std[t] ** 2)
            kernel = (cell_kernel if last else node_kernel)(self.std[t], self.reach)
            missing += 2 * float(special.ndtr(-self.reach))
            laws = {}
            for after, pieces in parts.items():
                law = split(*map(np.concatenate, zip(*pieces, strict=True))).blurred(kernel)
                if last:
                    # Cell k is [k, k + 1]; the cells next to the domain hold the atoms at its ends.
                    return law.folded(self.low - 1, self.high), kappa, missing
                law = law.folded(self.low, self.high)
                law, astray = law.trimmed(self.low, self.high, self.negligible)
                missing += astray
                laws[after] = (self.anchor + self.width * law.index, law.mass)
        raise AssertionError("an event has at least one step")


def _cell_pair(grid, chains, first, second):
    """The laws of the last iterate on both data sets, on the same cells."""
    sides = [
        [(w, *grid.propagate(chain, gradients)) for w, chain in chains]
        for gradients in (first, second)
    ]
    runs = [run for side in sides for run in side]
    low = min(law.first for _, law, _, _ in runs)
    high = max(law.first + len(law.mass) for _, law, _, _ in runs)
    masses = np.zeros((2, high - low))
    for total, side in zip(masses, sides, strict=True):
        for w, law, _, _ in side:
            total[law.first - low :][: len(law.mass)] += w * law.mass
    missing = [sum(w * lost for w, _, _, lost in side) for side in sides]
    return CellPair(*masses, *missing, np.max([kappa for _, _, kappa, _ in runs], axis=0))
