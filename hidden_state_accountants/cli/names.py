"""The names that the help lists, so that it needs none of what they name; a test compares them."""

BOUNDS = (
    "composition",
    "shifted_interpolation",
    "overlapping_laws",
    "hoelder",
    "langevin",
    "block_coordinate",
    "block_coordinate_published",
    "shuffled_once",
    "reshuffled",
    "subsampling",
    "dice_sgd",
    "dice_sgd_published",
    "chien_li",
    "chien_li_published",
    "kong_ribero",
    "kong_ribero_published",
    "amplification_by_iteration",
    "altschuler_talwar",
    "ye_shokri",
)
"""Of `hidden_state_accountants.bounds.BOUNDS`."""

LOSSES = (
    "convex",
    "envelope_hinge",
    "envelope_logistic",
    "envelope_softmax_cross_entropy",
    "envelope_squared_error",
    "generalized_linear",
    "hoelder",
    "huber",
    "linear",
    "logistic",
    "smooth",
    "softmax_cross_entropy",
    "squared_error",
    "strongly_convex",
    "weakly_convex",
)
"""The class methods of `LossGeometry`."""

RECOMMENDED_LOSSES = ("softmax_cross_entropy", "logistic", "squared_error")
"""Those that `hsa.recommend` knows."""

ORDERS = ("full", "cyclic", "shuffled_once", "reshuffled", "without_replacement", "poisson")
"""The values of `BatchOrder`."""

RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")
"""Of `NeighboringRelation`, in lower case."""
