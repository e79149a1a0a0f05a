"""Private linear models for scikit-learn; no training framework is needed.

model = PrivateClassifier(epsilon=1.0, delta=1e-5, classes=[0, 1]).fit(X, y)
print(model.score(X_test, y_test))
print(model.report_)
"""

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
