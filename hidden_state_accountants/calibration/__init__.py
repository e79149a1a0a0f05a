"""The parameter of a run that just meets a privacy target.

>>> import hidden_state_accountants as hsa
>>> run = hsa.LastIterateDpEvent(
...     noise_multiplier=1.0, learning_rate=0.5, clip_norm=1.4143, batch_size=500,
...     dataset_size=50_000, num_steps=20_000, batch_order="cyclic",
...     loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0), weight_decay=0.1)
>>> print(f"{hsa.calibrate_noise(1.0, 1e-5, run):.4f}")
3.7304
"""

from hidden_state_accountants.calibration.decay import calibrate_weight_decay
from hidden_state_accountants.calibration.epochs import calibrate_epochs
from hidden_state_accountants.calibration.noise import calibrate_noise

__all__ = ["calibrate_epochs", "calibrate_noise", "calibrate_weight_decay"]
