"""DiceSGD: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632)."""
