"""A step of a stack of clients is each client's own step, bit for bit."""

import pytest
import torch
from torch import nn

from raysim.local.batched.dense_stack import DenseStack
from raysim.local.contract import Job
from raysim.local.dense_gradient import DenseGradient
from raysim.local.sgd import sgd
from raysim.models import architectures
from raysim.models.architectures import Classifier
from raysim.models.flat_model import FlatModel


def without_bias() -> nn.Module:
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 33, bias=False), nn.ReLU())
    return Classifier(body, 33, 10, None)


NETWORKS = {
    "linear": lambda: architectures.linear(1, (8, 8), 10),
    "mlp": lambda: architectures.mlp(1, (8, 8), 10, hidden=[48, 33]),
    "mlp with a projection head": lambda: architectures.mlp(1, (8, 8), 10, hidden=[20], projection=64),
    "without bias": without_bias,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "local", [sgd(), sgd(momentum=0.9, weight_decay=0.01), sgd(momentum=0.5, nesterov=True)],
    ids=["plain", "momentum and decay", "nesterov"],
)
def test_two_steps_of_some_are_their_own_and_leave_the_others_alone(name: str, local: sgd):
    """Clients 1 to 3 of five, 12 samples each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = FlatModel(NETWORKS[name]())
    start_P, dense = model.params_P.detach().clone(), DenseGradient.of(model.module.chain())
    assert dense is not None
    x, labels = torch.randn(2, 3, 12, 64), torch.randint(10, (2, 3, 12))
    with torch.no_grad():
        stack = DenseStack(dense, start_P, 5, local)
        log_p = [stack.step(1, x[step], labels[step], 0.3) for step in range(2)]
    for k in range(3):
        model.params_P.detach().copy_(start_P)
        job = Job(model, start_P, 0.3, 1, k, 12)
        for step in range(2):
            loss = dense(x[step, k], labels[step, k])
            assert float(-log_p[step][k].gather(1, labels[step, k][:, None]).mean()) == pytest.approx(float(loss))
            local.step(job)
        assert torch.equal(stack.params_GP[1 + k], model.params_P)
        assert not torch.equal(model.params_P, start_P)
    assert torch.equal(stack.params_GP[0], start_P)
    assert torch.equal(stack.params_GP[4], start_P)
    torch.set_num_threads(threads)
