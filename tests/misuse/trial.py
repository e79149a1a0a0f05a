"""What a misuse of tests/misuse/misuse.py is committed on, whatever the framework."""

from hidden_state_accountants.events.schedule import per_step

RECORDS, BATCH, STEPS = 6, 2, 3  # three steps are an epoch


class Trial:
    """One accounted run: a frozen identity, a buffer and a trained linear head, tiny.

    The misuses call its methods by names that say what is done: `epoch` makes honest steps on all
    batches but for the step with the index `at`, `between` is called before that step, `before`
    before its forward pass, `after` after its forward (and backward) pass, `scale` is a factor of
    its loss. What cannot be done in a framework or with an optimizer has no method there, or one
    that raises NotImplementedError: the case is left out.

    Attributes:
        start: Settings by name, as they are at the start.
        records: The settings that may change during the run, and are recorded as they were used.
        has_bound: Whether a bound on the gradients is declared, which scaled losses exceed.
        is_computed: Whether the trainer computes its steps from what it holds itself.
        is_composed: Whether every step counts, at the trust of the upstream.
        is_trusted: Whether an optimizer is in a loop of somebody else, who is trusted.
    """

    start: dict
    records: frozenset[str] = frozenset()
    has_bound = True
    is_computed = False
    is_composed = False
    is_trusted = False

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(f"{type(self).__name__} has no {name}")

    def move(self, amount=1e-3):
        self.set_weights([w + amount for w in self.weights()])

    def pass_a_generator(self):
        """Goes on with a noise generator of the user's own, where the framework takes one."""

    def tell_the_loss(self):
        """To whoever accounts the run; for those that can do without it."""

    def recorded(self, setting):
        """The values of a setting in the event, one for each step; None if it is not in there."""
        event = self.event()
        value = getattr(event, setting, None)
        return None if value is None else list(per_step(value, event.num_steps))

    def questions(self):
        """What must not be answered after a run has ended."""
        return [self.get_epsilon, self.event, self.release, self.epoch]
