"""Private linear models for scikit-learn; no training framework is needed.

model = PrivateClassifier(epsilon=1.0, delta=1e-5, classes=[0, 1]).fit(X, y)
print(model.score(X_test, y_test))
print(model.report_)
"""

try:
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "sklearn":
        raise
    raise ImportError(
        "hidden_state_adapters.sklearn needs scikit-learn, which is missing. "
        "Install it: pip install 'hidden-state-accountants[sklearn]'"
    ) from error

from hidden_state_adapters.sklearn.data_checks import (
    PrivacyBudgetWarning,
    UnaccountedStepWarning,
)
from hidden_state_adapters.sklearn.estimators import PrivateClassifier, PrivateRegressor

__all__ = [
    "PrivacyBudgetWarning",
    "PrivateClassifier",
    "PrivateRegressor",
    "UnaccountedStepWarning",
]
