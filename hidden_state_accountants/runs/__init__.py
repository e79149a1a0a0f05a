"""What an adapter saw of a run, step by step, and what is said about it."""

# Each module registers its kind of run: whoever imports one of them knows all.
from hidden_state_accountants.runs import block_coordinate, dice_sgd, last_iterate

__all__ = ["block_coordinate", "dice_sgd", "last_iterate"]
