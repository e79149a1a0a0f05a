"""Every guarantee lists what docs/threat_model.md says that you declare."""

import numpy as np
import pytest
import torch
from declared_lines import CHOICES, FIXED_RECORDS, FUNCTIONS, GEOMETRY, OF_EVERY_RUN, listed
from opacus_stock import SOFTMAX
from opacus_stock_loops import stock_loop

from hidden_state_adapters.opacus import DiceSGD, fit_head

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, (FIXED_RECORDS, GEOMETRY)),
        ({"criterion": None, "loss_geometry": SOFTMAX}, (FIXED_RECORDS, GEOMETRY)),
        ({"criterion": None, "loss_geometry": None}, ()),
        ({"criterion": None, "loss_geometry": None, "mechanism": DiceSGD(0.5)}, ()),
    ],
    ids=["head", "declared", "composition", "dice"],
)
def test_a_private_engine(make_run, options, more):
    run = make_run(**options)
    for _ in range(3):  # before, composition is as good
        run.epoch()
    guarantee, every = run.engine.guarantee, (*OF_EVERY_RUN, FIXED_RECORDS, GEOMETRY)
    assert listed(guarantee, every) == [*OF_EVERY_RUN, *more]
    assert listed(run.engine.accountant.guarantee, every) == [*OF_EVERY_RUN, *more]


@pytest.mark.parametrize("declared", [None, {"loss_geometry": SOFTMAX}])
def test_a_stock_engine(declared):
    loop = stock_loop(declared=declared, **({} if declared else {"poisson_sampling": True}))
    for _ in range(3):
        loop.epoch()
    more = (FIXED_RECORDS, GEOMETRY) if declared else ()
    guarantee = loop.accountant.guarantee
    assert listed(guarantee, (*OF_EVERY_RUN, FIXED_RECORDS, GEOMETRY)) == [*OF_EVERY_RUN, *more]


def test_a_head_in_one_call():
    features = torch.tensor(np.eye(4)[np.arange(40) % 4])
    _, guarantee = fit_head(features, torch.arange(40) % 2, epsilon=3.0, delta=1e-5, classes=2)
    theirs = [line for line in OF_EVERY_RUN if line not in (FUNCTIONS, CHOICES)]
    told = ["the arguments do not depend on the records", "the features of a record are a function"]
    assert listed(guarantee, (*theirs, *told)) == [*theirs, *told]
