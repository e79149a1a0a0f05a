"""The commented run description that `hsa init` writes."""

TEMPLATE = """\
# A training run, for hsa (hidden-state-accountants). Flags of hsa change single values:
#     hsa epsilon run.toml --noise-multiplier 4

noise_multiplier = 2.0      # noise std on the SUM of gradients over the clip norm
learning_rate = 0.5
# Just above the longest gradient of the loss below, sqrt(2) * feature_norm: clipping never acts.
clip_norm = 1.4143          # "none": not clipped; the loss then needs lipschitz
batch_size = 500
dataset_size = 50_000       # cyclic batches: a multiple of batch_size
epochs = 200                # or num_steps
batch_order = "cyclic"      # full, cyclic, shuffled_once, reshuffled, without_replacement, poisson
weight_decay = 0.1          # decoupled: x <- (1 - learning_rate * weight_decay) x - ...
# prox_strong_convexity = 0.1  # a proximal map after the noise divides by 1 + 0.1 * learning_rate
# domain_diameter = 10.0    # every iterate is projected on a convex set of this diameter
# release_steps = [1000]    # after these steps the model was released, too
# sampling_rate = 0.01      # poisson only: the loader's, if it is not batch_size / dataset_size
# max_batch_size = 650      # poisson only: the cap on a batch
# is_microbatched = true    # a record is a microbatch of several examples; needs replace_one below

# What is known about the loss of ONE record. Without it: ordinary composition.
[loss]
kind = "softmax_cross_entropy"
feature_norm = 1.0          # every record's features have at most this norm
# kind = "logistic"         # feature_norm, bias
# kind = "squared_error"    # feature_norm, bias, scale
# kind = "huber"            # feature_norm, threshold, bias
# The envelope losses of the adapters: feature_norm, clip_norm (of the loss), smoothing, bias.
# kind = "envelope_softmax_cross_entropy"
# kind = "envelope_logistic"
# kind = "envelope_hinge"
# kind = "envelope_squared_error"  # and scale
# kind = "convex"           # smoothness, lipschitz (optional in all that follow)
# kind = "strongly_convex"  # smoothness, strong_convexity
# kind = "weakly_convex"    # smoothness, weak_convexity
# kind = "smooth"           # smoothness
# kind = "hoelder"          # constant, exponent
# kind = "generalized_linear"  # smoothness
# kind = "linear"           # lipschitz (required)

# noise_multiplier, learning_rate, clip_norm and weight_decay may change while training: instead of
# the number above, runs of equal values and how many steps each takes.
# [learning_rate]
# values = [0.5, 0.05]
# lengths = [15_000, 5_000]

[accounting]
delta = 1e-5
# replace_special: a record is replaced by one without gradient. Also replace_one, and (full and
# poisson batches) add_or_remove_one.
neighboring_relation = "replace_special"
# group_size = 1            # how many records one person may have
"""
