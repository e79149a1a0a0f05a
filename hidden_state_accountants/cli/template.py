"""The commented description of a run that `hsa init` writes; a test holds it against the event."""

from __future__ import annotations

from hidden_state_accountants.cli.run_file import LOSSES, loss_arguments

_RUN = """\
# A training run, for hsa (hidden-state-accountants). Flags change single values:
#     hsa epsilon run.toml --noise-multiplier 4

noise_multiplier = 2.0  # noise std on the SUM of gradients over the clip norm
learning_rate = 0.5  # step size eta
clip_norm = 1.4143  # per-example clip norm C, or "none" (the loss then needs lipschitz)
batch_size = 500  # b: what sums are divided by
dataset_size = 50_000  # n: records that take part; cyclic batches: a multiple of b
epochs = 200  # or num_steps
batch_order = "cyclic"  # full, cyclic, shuffled_once, reshuffled, without_replacement, poisson,
# balls_in_bins or balls_in_bins_redrawn
weight_decay = 0.1  # decoupled
# prox_strong_convexity = 0.1  # of the regulariser of a prox after the noise
# domain_diameter = 10.0  # diameter (2 x radius) of the set projected on
# release_steps = [1000]  # after which the model is released too; as a flag 100,200
# sampling_rate = 0.01  # poisson: the rate of the loader; default: batch size / data set size
# max_batch_size = 650  # cap on poisson batches
# is_microbatched = true  # a record is a microbatch of several examples (needs replace_one)

# What is known about the loss of ONE record. Without it: ordinary composition.
# The clip norm above is just above the longest gradient of this loss, sqrt(2) * feature_norm:
# clipping never acts. As flags: --loss logistic --feature-norm 1, and --loss-clip-norm for the
# clip_norm of an envelope.
[loss]
kind = "softmax_cross_entropy"
feature_norm = 1.0  # every record's features have at most this norm
"""
_REST = """
# noise_multiplier, learning_rate, clip_norm and weight_decay may change while training: instead of
# the number runs of equal values, and their numbers of steps.
# [learning_rate]
# values = [0.5, 0.05]
# lengths = [15_000, 5_000]

[accounting]
delta = 1e-5  # default 1e-5
neighboring_relation = "replace_special"  # or add_or_remove_one, replace_one
"""


def template() -> str:
    """Returns the text, with the arguments of every loss."""
    losses = [f'# kind = "{kind}"  # {loss_arguments(kind)}\n' for kind in LOSSES]
    return "".join([_RUN, *losses, _REST])
