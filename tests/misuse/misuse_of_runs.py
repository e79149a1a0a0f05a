"""Misuses of the batches, of the data and of several runs; the table is misuse.py."""

import itertools

import pytest
from trial import BATCH, RECORDS, STEPS

from hidden_state_accountants import LastIterateAccountant

# --- the batches ----------------------------------------------------------------------------------


def batch_skipped(trial):
    for index, batch in enumerate(trial.batches()):
        if index != 1:
            trial.step(batch)


def last_batch_skipped(trial):
    for _ in range(2):
        for index, batch in enumerate(trial.batches()):
            if index != STEPS - 1:
                trial.step(batch)
    return {"num_steps": STEPS}  # where the second pass has that batch alone


def pass_left_and_begun_again(trial):
    for batch in itertools.islice(trial.batches(), 1):
        trial.step(batch)
    trial.epoch()
    return {"num_steps": STEPS}  # where a new pass goes on with the next batch


def batch_used_twice(trial):
    for batch in trial.batches():
        trial.step(batch)
        trial.step(batch)


def batch_used_after_the_pass(trial):
    for batch in trial.batches():
        last = batch
        trial.step(batch)
    trial.step(last)


def other_loader(trial):
    for batch in trial.other_batches():
        trial.step(batch)
    trial.epoch()


def batches_fetched_in_advance(trial):
    for batch in list(trial.batches()):
        trial.step(batch)


def one_batch_ahead(trial):
    """As Lightning, accelerate and prefetchers do: the loop knows which batch is the last."""
    batches = trial.batches()
    batch = next(batches)
    for ahead in batches:
        trial.step(batch)
        batch = ahead
    trial.step(batch)
    return {"num_steps": STEPS}


def one_batch_ahead_and_an_older_one_again(trial):
    batches = trial.batches()
    first, ahead = next(batches), next(batches)
    trial.step(first)
    trial.step(first)
    trial.step(ahead)


def one_batch_ahead_and_the_newer_one_used(trial):
    batches = trial.batches()
    next(batches)
    trial.step(next(batches))


def older_pass_goes_on(trial):
    older, newer = trial.batches(), trial.batches()
    trial.step(next(older))
    trial.step(next(newer))
    trial.step(next(older))


def fewer_rows(trial):
    for index, batch in enumerate(trial.batches()):
        trial.step(trial.rows(batch, range(BATCH - 1)) if index == 1 else batch)


def more_rows(trial):
    for index, batch in enumerate(trial.batches()):
        trial.step(trial.rows(batch, [*range(BATCH), 0]) if index == 1 else batch)


def batch_doubled(trial):
    for batch in trial.batches():
        trial.step(trial.rows(batch, [*range(BATCH), *range(BATCH)]))


def no_rows(trial):
    for batch in trial.batches():
        trial.step(trial.rows(batch, []))


def records_written(trial):
    trial.epoch(between=trial.write_records)


def records_mapped(trial):
    """After the first steps, by a number of the batch."""
    for batch in trial.batches():
        trial.step(trial.mapped(batch))


def batch_written(trial):
    for batch in trial.batches():
        trial.write_inputs(batch)
        trial.step(batch)


def targets_written(trial):
    for batch in trial.batches():
        trial.write_targets(batch)
        trial.step(batch)


def a_second_pass(trial):
    """Row i of the gradient then belongs to two records."""
    trial.epoch(before=trial.unused_gradients)
    return {"num_steps": STEPS}


# --- data whose examples are not single ones ------------------------------------------------------


def data_batched(trial):
    trial.take_data(lambda dataset: dataset.batch(RECORDS // BATCH))


def data_batched_to_known_shapes(trial):
    groups = RECORDS // BATCH
    trial.take_data(lambda dataset: dataset.batch(groups, drop_remainder=True).prefetch(1))


def data_repeated(trial):
    trial.take_data(lambda dataset: dataset.shuffle(RECORDS).repeat(2))


def data_going_round(trial):
    def endless(dataset):
        def again():
            while True:
                yield from dataset.as_numpy_iterator()

        spec = dataset.element_spec
        return dataset.from_generator(again, output_signature=spec).take(2 * RECORDS)

    trial.take_data(endless)


# --- weights that a private run left --------------------------------------------------------------


def _second_run(trial, change):
    trial.epoch()
    first = trial.event()
    change()
    trial.begin_anew()
    trial.epoch()
    both = LastIterateAccountant().compose(first).compose(trial.event())
    assert trial.get_epsilon() == pytest.approx(both.get_epsilon(1e-5))
    return {"num_steps": STEPS}


def copied_and_trained_again(trial):
    """A deep copy on another engine: the runs behind it come along."""
    before = trial.get_epsilon()
    trial.copy_to_another_engine()
    trial.epoch()
    first, second = trial.event().events
    both = LastIterateAccountant().compose(first).compose(second)
    assert trial.get_epsilon() == pytest.approx(both.get_epsilon(1e-5))
    assert trial.get_epsilon() > before
    trial.event = lambda: second
    return {"num_steps": 0}


def trained_again(trial):
    return _second_run(trial, lambda: None)


def trained_again_elsewhere(trial):
    return _second_run(trial, trial.copy_model)


def moved_and_trained_again(trial):
    return _second_run(trial, trial.move)


def gone_on_elsewhere(trial):
    trial.epoch()
    trial.go_on_from(trial.save())
    trial.epoch()
    return {"num_steps": 2 * STEPS}


def gone_on_twice(trial):
    trial.epoch()
    saved = trial.save()
    trial.go_on_from(saved)
    trial.epoch()
    trial.go_on_from(saved)
    trial.epoch()


def gone_on_here_and_elsewhere(trial):
    trial.epoch()
    here = trial.stay_here()
    trial.go_on_from(trial.save())
    trial.epoch()
    here.epoch()


def gone_on_with_other_weights(trial):
    trial.epoch()
    state, weights = trial.save()
    trial.go_on_from((state, [w + 1e-6 for w in weights]))
    trial.epoch()


# --- microbatches ---------------------------------------------------------------------------------


def microbatches(trial):
    """Both examples of a batch are one record."""
    trial.group(1)
    trial.epoch()


def microbatches_of_one_example(trial):
    """Which are no microbatches."""
    trial.group(BATCH)
    trial.epoch()
    assert not getattr(trial.event(), "is_microbatched", False)
    return {"num_steps": STEPS}


def more_microbatches_than_examples(trial):
    trial.group(BATCH + 1)
    trial.epoch()


def weights_written_after_an_epoch(trial):
    """The file holds an iterate."""
    trial.epoch()
    trial.write_weights()
    trial.epoch()
    event = trial.event()
    assert getattr(event, "release_steps", (STEPS,)) == (STEPS,)
    return {"num_steps": 2 * STEPS}


def convex_loss_of_two_layers(trial):
    trial.begin_with_a_convex_loss_of_two_layers()
    trial.epoch()


def number_of_records_in_the_divisor(trial):
    trial.begin_under_add_or_remove()
    trial.epoch()


def weights_without_bound(trial):
    """A gradient is as long as its weight says."""
    trial.group(BATCH)
    trial.weigh([1.0, 2.0])
    trial.epoch()


def other_weights_later(trial):
    trial.group(BATCH, weight_bound=2.0)
    trial.weigh([1.0, 2.0])
    trial.epoch()
    trial.weigh([2.0, 1.0])
    trial.epoch()
