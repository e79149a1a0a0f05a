"""DP-MBCD: lists of variables are updated in turn on the same batch, each through a prox."""
