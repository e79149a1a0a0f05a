"""Every accountant on the same run, side by side.

>>> import hidden_state_accountants as hsa
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.4143, batch_size=500,
...     dataset_size=50_000, num_steps=20_000, batch_order="cyclic",
...     loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0), weight_decay=0.1)
>>> table = hsa.compare(run, delta=1e-5)
>>> best = table.best()
>>> print(best.accountant, round(best.epsilon, 4))
shifted_interpolation 1.993
"""

from hidden_state_accountants.comparing.comparison import Comparison, compare, position_profile
from hidden_state_accountants.comparing.methods import Row

__all__ = ["Comparison", "Row", "compare", "position_profile"]
