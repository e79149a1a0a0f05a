"""The one exception of the package that is not a plain ValueError or TypeError."""

from dp_accounting import privacy_accountant


class UnsupportedRunError(privacy_accountant.UnsupportedEventError, ValueError):
    """A run that no theorem of this package covers, or that is not the run that was declared.

    It is both an `UnsupportedEventError` (so that code written for dp-accounting catches it) and a
    `ValueError`. The text names the condition, the value that violates it and the remedy.
    """

    ag_pass_through = True  # AutoGraph raises it as it is, also where TensorFlow traces a function
