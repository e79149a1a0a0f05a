"""The contractive noisy process that an event stands for, and the moduli of its steps."""
