"""DiceSGD: clipped gradients with clipped error feedback."""
