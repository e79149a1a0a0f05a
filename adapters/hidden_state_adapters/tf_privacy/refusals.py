"""Errors that keep their type when they are raised while a graph is traced."""

from hidden_state_accountants import UnsupportedRunError


def refusal(text: str) -> UnsupportedRunError:
    """An UnsupportedRunError for ``raise``, also from code inside tf.function.

    AutoGraph replaces exceptions of types that it does not know by one of its own, unless they
    carry the attribute that is set here.
    """
    error = UnsupportedRunError(text)
    error.ag_pass_through = True  # type: ignore[attr-defined]
    return error
