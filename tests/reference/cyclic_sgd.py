"""Noisy clipped projected gradient descent with cyclic batches, in NumPy, by the formula."""

import numpy as np


def cyclic_sgd(x, gradient, records, *, batch_size, num_steps, learning_rate, clip, noise,
               weight_decay=0.0, radius=np.inf):  # fmt: skip
    """The iterates x_1 to x_T of

        x <- P_R((1 - lr w) x - lr/b (sum of clip_C(gradient(x, record)) + noise_t)).

    Batch k is records[k*b : (k+1)*b]; noise[t] is added to the sum in step t; learning_rate is a
    function of the number of steps taken before.
    """
    iterates, period = [], len(records) // batch_size
    for t in range(num_steps):
        start = t % period * batch_size
        total = np.array(noise[t], dtype=np.float64)
        for record in records[start : start + batch_size]:
            g = gradient(x, record)
            total = total + g * min(1.0, clip / max(np.linalg.norm(g), 1e-300))
        rate = learning_rate(t)
        x = (1 - rate * weight_decay) * x - rate / batch_size * total
        x = x * min(1.0, radius / max(np.linalg.norm(x), 1e-300))
        iterates.append(x)
    return np.array(iterates)


def logistic_gradient(x, record):
    """Of the cross-entropy of the logit <features, x[:-1]> + x[-1] and a label in {0, 1}."""
    features, label = record
    extended = np.append(features, 1.0)
    return (1 / (1 + np.exp(-extended @ x)) - label) * extended
