"""The gradient of a chain of linear layers and ReLUs, computed without autograd.

For small networks, autograd's bookkeeping takes most of the time of a step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

_aten = torch.ops.aten  # the operators that autograd runs, called in the same order, give the gradient the same bits


class DenseGradient:
    """Mean cross-entropy of a fully connected network on a batch, and its gradient: autograd's, bit for bit.

    layers: `nn.Linear` and `nn.ReLU` in the order in which they run; every parameter has its `grad`.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.linear: list[nn.Linear] = []
        self.after_relu: list[bool] = []  # whether the input of a linear layer comes from a ReLU
        relu = False
        for layer in layers:
            if isinstance(layer, nn.Linear):
                self.linear.append(layer)
                self.after_relu.append(relu)
            relu = isinstance(layer, nn.ReLU)

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> "DenseGradient | None":
        """The gradient of these layers, if they are such a chain, end in a linear layer and are trained; else None."""
        known = [m for m in layers if type(m) not in (nn.Flatten, nn.Identity)]
        if not known or type(known[-1]) is not nn.Linear or any(type(m) not in (nn.Linear, nn.ReLU) for m in known):
            return None
        if any(p.grad is None for m in known for p in m.parameters()):
            return None
        if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in layers):
            return None
        return cls(known)

    def agrees(self, rows: int) -> bool:
        """Whether loss and gradient have autograd's bits for batches of so many samples, tested on this machine.

        The test uses two batches of random numbers and the present parameters.  False, too, where this torch lacks an
        operator.  Parameters and random state are not changed, gradients are.
        """
        draw = torch.Generator().manual_seed(rows)
        first = self.linear[0]
        last = self.linear[-1]
        parameters = [p for layer in self.linear for p in layer.parameters()]
        device = first.weight.device
        for _ in range(2):
            x = torch.randn(rows, first.in_features, generator=draw).to(device)
            y_B = torch.randint(last.out_features, (rows,), generator=draw).to(device)
            with torch.enable_grad():
                h = x
                for layer, relu in zip(self.linear, self.after_relu, strict=True):
                    h = layer(functional.relu(h) if relu else h)
                expected = functional.cross_entropy(h, y_B)
                gradients = torch.autograd.grad(expected, parameters)
            try:
                loss = self(x, y_B)
            except (AttributeError, RuntimeError, TypeError):  # private operators change with torch's versions
                return False
            if not torch.equal(loss, expected.detach()):
                return False
            pairs = zip(parameters, gradients, strict=True)
            if not all(p.grad is not None and torch.equal(p.grad, gradient) for p, gradient in pairs):
                return False
        return True

    @torch.no_grad()
    def __call__(self, x: Tensor, y_B: Tensor) -> Tensor:
        """Compute the loss of images x with labels y_B, and replace the content of each parameter's `grad`.

        With p = softmax(z) of logits z and one-hot labels t: g = dL/dz = (p - t) / B, and then dL/dW = g^T h, dL/db =
        sum g and dL/dh = g W for each layer z = h W^T + b, times (h > 0) through a ReLU.
        """
        seen: list[Tensor] = []
        h = x.flatten(1)
        for i, layer in enumerate(self.linear):
            if self.after_relu[i]:
                h = h.relu_()
            seen.append(h)
            h = functional.linear(h, layer.weight, layer.bias)
        log_p = functional.log_softmax(h, 1)
        loss, count = _aten.nll_loss_forward(log_p, y_B, None, 1, -100)
        g = _aten.nll_loss_backward(torch.ones_like(loss), log_p, y_B, None, 1, -100, count)
        g = _aten._log_softmax_backward_data(g, log_p, 1, log_p.dtype)
        for i in range(len(self.linear) - 1, -1, -1):
            layer = self.linear[i]
            # Not straight into `grad`: a product's last bits may depend on how the memory it goes to is aligned.
            _put(layer.weight, g.t().mm(seen[i]))
            if layer.bias is not None:
                _put(layer.bias, g.sum(0))
            if i:
                g = g @ layer.weight
                if self.after_relu[i]:
                    g = _aten.threshold_backward(g, seen[i], 0)
        result: Tensor = loss
        return result


def _put(parameter: Tensor, gradient: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.copy_(gradient)
