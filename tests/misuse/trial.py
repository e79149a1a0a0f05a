"""What a misuse of tests/misuse/misuse.py is committed on, whatever the framework."""

from hidden_state_accountants.events.schedule import per_step

RECORDS, BATCH, STEPS = 6, 2, 3  # three steps are an epoch


class Trial:
    """One accounted run: a frozen identity, a buffer and a trained linear head, tiny.

    What cannot be done in a framework or with an optimizer raises NotImplementedError, as here, and
    the case is left out.

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

    # The loop

    def epoch(self, *, at=1, between=None, before=None, after=None, scale=1.0):
        """Honest steps on all batches but for the step with the index `at`.

        Args:
            at: Within the epoch.
            between: Called before that step.
            before: Called before the forward pass of that step.
            after: Called after its forward (and backward) pass, before the update.
            scale: A factor of the loss of that step.
        """
        raise NotImplementedError

    def batches(self):
        """The batches of a pass, as the framework hands them out."""
        raise NotImplementedError("has no loop of one's own")

    def other_batches(self):
        """The same records from a loader that nobody knows."""
        raise NotImplementedError("has no loop of one's own")

    def step(self, batch):
        raise NotImplementedError("has no loop of one's own")

    def rows(self, batch, index):
        """The rows of a batch with these indices."""
        raise NotImplementedError("has no loop of one's own")

    def mapped(self, batch):
        """A batch whose records were divided by a number that depends on all of them."""
        raise NotImplementedError("has no loop of one's own")

    def write_inputs(self, batch):
        """Changes what the model is going to get, in place."""
        raise NotImplementedError("has no loop of one's own")

    def write_targets(self, batch):
        """Changes the targets of a batch, in place."""
        raise NotImplementedError("has no loop of one's own")

    def evaluate(self):
        """A forward pass that trains nothing."""
        raise NotImplementedError

    def write_records(self):
        """Changes the records in place."""
        raise NotImplementedError("the records are copies")

    # The model

    def weights(self):
        """Copies of what is trained."""
        raise NotImplementedError

    def set_weights(self, weights):
        raise NotImplementedError

    def move(self, amount=1e-3):
        self.set_weights([w + amount for w in self.weights()])

    def write_weights(self):
        """To a file."""
        raise NotImplementedError("has checkpoints of its own")

    def pass_with_other_weights(self):
        """A context in which the model is called with weights that it does not hold."""
        raise NotImplementedError

    def hook_the_head(self):
        """What goes into the head depends on the whole batch from now on."""
        raise NotImplementedError("layers have no hooks")

    def frozen(self):
        """A copy of the frozen matrix."""
        raise NotImplementedError

    def write_frozen(self, value):
        raise NotImplementedError

    def write_frozen_unseen(self, value):
        """Past what counts the writes to a tensor."""
        raise NotImplementedError("nothing counts writes")

    def write_buffer(self):
        raise NotImplementedError

    def freeze(self):
        """Trains the bias no more."""
        raise NotImplementedError

    def unfreeze(self):
        """Trains the frozen matrix as well."""
        raise NotImplementedError

    def halve_the_precision(self):
        """Of the parameters."""
        raise NotImplementedError("parameters keep their precision")

    def coarse_arithmetic(self):
        """A context in which products are rounded."""
        raise NotImplementedError("the precision is set at construction")

    # The optimizer

    def set(self, name, value):
        """Sets a setting."""
        raise NotImplementedError

    def get(self, name):
        raise NotImplementedError

    def pass_a_generator(self):
        """Goes on with a noise generator of the user's own, where the framework takes one."""

    def reseed(self):
        """The noise generator, always with the same seed."""
        raise NotImplementedError

    def seed_the_program(self):
        """The framework's random numbers, always with the same seed."""
        raise NotImplementedError

    def copy(self):
        """Copies the optimizer and trains with the copy."""
        raise NotImplementedError

    def pickle(self):
        """Pickles the optimizer and trains with the copy."""
        raise NotImplementedError

    def unused_gradients(self):
        """Computes gradients of a batch, and does not use them."""
        raise NotImplementedError

    def change_update(self):
        """For `after`: the noisy update becomes another one."""
        raise NotImplementedError("the update is made inside the step")

    def apply_again(self):
        """Applies the last update once more."""
        raise NotImplementedError

    def hook_on_the_update(self):
        raise NotImplementedError

    def add_a_parameter(self):
        """Trains something besides the model."""
        raise NotImplementedError

    def replace_inner_optimizer(self):
        raise NotImplementedError("has no inner optimizer")

    def train_without_noise(self):
        """One step of another optimizer."""
        raise NotImplementedError

    def tell_the_loss(self):
        """To whoever accounts the run; for those that can do without it."""

    def broadcast_targets(self):
        """For `before`: targets that are not of the shape of the outputs of that step."""
        raise NotImplementedError("shapes are compared by the loss")

    def interrupted_update(self):
        """A context in which an update is interrupted by the user."""
        raise NotImplementedError("an update cannot be interrupted")

    def account_again(self):
        """Another engine, callback or recorder on the model and its optimizer."""
        raise NotImplementedError

    def begin_anew(self):
        """With a fresh optimizer and a fresh account, on the model as it is."""
        raise NotImplementedError("an engine composes its runs")

    def begin_under_add_or_remove(self):
        """Poisson batches, whose rate and divisor follow from the number of records."""
        raise NotImplementedError("rate and divisor are declared")

    def begin_with_a_convex_loss_of_two_layers(self):
        """Anew, with a declared geometry that no loss of two trained layers has."""
        raise NotImplementedError("convexity is of no use")

    def copy_to_another_engine(self):
        """Goes on with a deep copy of the model on a fresh engine."""
        raise NotImplementedError("weights are copied by value")

    def copy_model(self):
        """Goes on with another model of the same layers."""
        raise NotImplementedError

    def save(self):
        """The state of the run, and the weights."""
        raise NotImplementedError("has checkpoints of its own")

    def stay_here(self):
        """Another trial with the same model, optimizer and account."""
        raise NotImplementedError("has checkpoints of its own")

    def go_on_from(self, saved):
        """Goes on with another model and optimizer from what `save` returned."""
        raise NotImplementedError("has checkpoints of its own")

    def start_another_run(self):
        """On the same model and engine; the old optimizer and loader are kept."""
        raise NotImplementedError("has no engine")

    def take_data(self, change):
        """Takes the data of the run from a Dataset of single examples that was changed."""
        raise NotImplementedError("has no Dataset")

    def group(self, number, *, batch=BATCH, **settings):
        """Begins anew, with batches of several microbatches.

        Args:
            number: Of a batch.
            batch: Its size.
            **settings: Others.
        """
        raise NotImplementedError("microbatches are those of an optimizer")

    def deal(self, batch_size):
        """Batches of another size from here on."""
        raise NotImplementedError("the data set has them")

    def weigh(self, weights):
        """Trains on with weights of the examples, which repeat."""
        raise NotImplementedError("weights are refused")

    def take_arrays(self, change):
        """Trains on with what `change` makes of the arrays of examples and targets."""
        raise NotImplementedError("has no arrays")

    # The account

    def get_epsilon(self):
        raise NotImplementedError

    def event(self):
        raise NotImplementedError

    def release(self):
        raise NotImplementedError

    def recorded(self, setting):
        """The values of a setting in the event, one for each step; None if it is not in there."""
        event = self.event()
        value = getattr(event, setting, None)
        return None if value is None else list(per_step(value, event.num_steps))

    def questions(self):
        """What must not be answered after a run has ended."""
        return [self.get_epsilon, self.event, self.release, self.epoch]
