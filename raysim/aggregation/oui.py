"""OUI, the overfitting-underfitting indicator from which FedOUI computes weights, measured on any torch module.

FedOUI, arXiv 2605.11571. On a probe batch of B images, for each of d units of the penultimate PRE-activation (the input
of the last activation before the classifier; each element of a convolutional map is a unit):
    s_j = number of images with pre-activation > 0;  u_j = min(s_j, B - s_j);  OUI = mean_j u_j / floor(B / 2)
1: every unit splits the batch in half; 0: no unit tells any two images apart.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raysim.core.errors import UserError

__all__ = ["Site", "find_activation", "hookable_layer", "measure_oui", "measure_oui_by_layer"]

_aten = torch.ops.aten
# Every spelling of an activation (module, functional, method, in place) ends in one of these operators.
_NAMES = [
    *("relu", "gelu", "silu", "mish", "elu", "celu", "leaky_relu", "softplus", "hardswish", "hardsigmoid", "hardtanh"),
    *("tanh", "sigmoid", "log_sigmoid_forward", "threshold", "rrelu_with_noise", "_prelu_kernel"),
    *("softshrink", "hardshrink"),
]
_ACTIVATIONS = {getattr(_aten, n) for name in _NAMES for n in (name, f"{name}_") if hasattr(_aten, n)}
_CLAMPS = {_aten.clamp, _aten.clamp_, _aten.clamp_min, _aten.clamp_min_}  # an activation where the minimum is 0
_AFFINE = {_aten.addmm, _aten.mm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.convolution, _aten._trilinear}
_SCALES = (nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d)  # they act on several units together: no activations
_MODULES = tuple(
    kind
    for kind in vars(nn.modules.activation).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind not in (nn.Module, nn.MultiheadAttention)
)
_NORMS = tuple(kind for kind in vars(nn).values() if isinstance(kind, type) and "Norm" in kind.__name__)
_MAXIMA = {_aten.maximum, _aten.fmax}  # an activation where one side is 0
_LINEAR = {
    getattr(_aten, n)
    for name in ("add", "sub", "rsub", "neg", "clone", "copy", "_to_copy", "lerp", "dropout", "native_dropout", "alias")
    for n in (name, f"{name}_")
    if hasattr(_aten, n)
}
_SCALINGS = {_aten.mul, _aten.mul_, _aten.div, _aten.div_}  # linear where only one side depends on the images


@dataclass(frozen=True)
class Site:
    """A place in a model where OUI is measured.

    layer: name of the module.  op: the activation whose input is measured, or `output`: the output of the module.
    units: how many it has, d.
    """

    layer: str
    op: str
    units: int


@dataclass(frozen=True)
class _Signs:
    """Which units are positive for which images, recorded before an in-place activation overwrites the values."""

    site: Site
    positive: Tensor
    lowest: Tensor
    highest: Tensor


def find_activation(model: nn.Module, example: Tensor, layers: list[str] | None = None) -> list[Site]:
    """Find where OUI is measured: at the input of the last activation before the classifier, or at the named layers.

    example: one image or more, B x channels x height x width.  layers: module names; the input of an activation module
    is measured, and the output of any other; if a module runs more than once, its last run counts.
    Raises UserError for a model without hidden activation and for a name that does not exist or does not run.
    """
    return [signs.site for signs in _observe(model, example, layers)]


def hookable_layer(model: nn.Module, example: Tensor) -> str:
    """The name of the activation module at which `measure_oui` measures, if naming it gives the same result; else "".

    With the name, the other activations need not be watched, which saves a third of the time of a probe.  Raises the
    errors of `find_activation`.
    """
    (found,) = _observe(model, example, None)
    layer = found.site.layer
    if not isinstance(dict(model.named_modules()).get(layer), _MODULES):
        return ""
    (named,) = _observe(model, example, [layer])  # of a module that runs more than once, this sees the last run
    return layer if torch.equal(named.positive, found.positive) else ""


def measure_oui(model: nn.Module, probe_B: Tensor, layers: list[str] | None = None) -> float:
    """Measure the OUI of `model` on a probe batch, in [0, 1]; with several layers, their mean.

    probe_B: B x channels x height x width, as the model gets images in training, on its device.  The model, its
    training flags and torch's random state are not changed.  Raises UserError for B < 2 and those of `find_activation`,
    ValueError where a pre-activation is not finite.
    """
    oui = measure_oui_by_layer(model, probe_B, layers)
    return sum(oui.values()) / len(oui)


def measure_oui_by_layer(model: nn.Module, probe_B: Tensor, layers: list[str] | None = None) -> dict[str, float]:
    """Measure the OUI of each layer on a probe batch, by name; arguments and errors are those of `measure_oui`."""
    if len(probe_B) < 2:
        raise UserError(f"aggregation.probe_size: OUI compares images, {len(probe_B)} is too few; use 2 or more")
    return {signs.site.layer: _oui(signs) for signs in _observe(model, probe_B, layers)}


def _oui(signs: _Signs) -> float:
    if not (torch.isfinite(signs.lowest) and torch.isfinite(signs.highest)):
        raise ValueError(f"the pre-activations of layer {signs.site.layer!r} are not finite")
    batch = len(signs.positive)
    s = signs.positive.flatten(1).sum(0)
    u = torch.minimum(s, batch - s)
    return int(u.sum()) / (len(u) * (batch // 2))  # one division of integers: exact up to its rounding


def _observe(model: nn.Module, images: Tensor, layers: list[str] | None) -> list[_Signs]:
    """Run one forward pass that changes nothing, and record the signs at each place."""
    watch = _watch_last(model, images) if layers is None else _watch_named(model, images, layers)
    with _untouched(model, images), watch as seen:
        model(images)
    if layers is None and not seen:
        raise UserError(
            "model.name: this model has no hidden activation that raysim knows, so it has no OUI; choose a model with "
            f"one, name a layer in aggregation.layers ({_candidates(model)}) or use another aggregation rule"
        )
    missing = [name for name in layers or [] if name not in seen]
    if missing:
        raise UserError(
            f"aggregation.layers: {missing[0]!r} takes no part in a forward pass, or its output is no tensor; "
            f"choose from {_candidates(model)}"
        )
    return [seen[name] for name in layers] if layers else list(seen.values())


@contextmanager
def _untouched(model: nn.Module, images: Tensor) -> Iterator[None]:
    """A context with evaluation mode and without gradients; training flags and random state are restored at its end."""
    flags = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    devices = [images.device] if images.device.type == "cuda" else []
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # a fused transformer layer would hide its activation
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in flags:
            module.training = training


class _LastActivation(TorchDispatchMode):
    """Records the input of each activation; the last one that is followed by a matrix product or convolution counts.

    Activation modules are recognised by their class, functions by their operator.  unknown: a non-linear operation that
    is no known activation, between the last hidden layer and the classifier. Where no known activation is there, too,
    this operation must be the activation of that layer, and what was recorded belongs to an earlier layer.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.batch = batch
        self.running: list[tuple[str, nn.Module]] = []
        self.seen: dict[str, _Signs] = {}
        self.unknown = ""
        self._latest: _Signs | None = None
        self._fresh = False  # whether `_latest` comes after the last matrix product or convolution
        self._bent = ""
        self._inside = 0  # how many activation modules are running

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first use, which takes 1.5 s in every worker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's signature
        kwargs = kwargs or {}
        op = func.overloadpacket
        if op in _AFFINE:
            self._enter_layer()
        elif not self._inside:
            pre = self._pre_activation(op, args, kwargs)
            if pre is not None:
                self.note(str(op).removeprefix("aten.").strip("_"), pre)
            elif not self._fresh and self._bends(func, op, args):
                self._bent = self._bent or str(op).removeprefix("aten.").strip("_")
        return func(*args, **kwargs)

    def note(self, op: str, pre: Tensor) -> None:
        """Record the input of an activation.  op: its name.  pre: the input, if it has a row for each image."""
        if pre.dim() > 1 and len(pre) == self.batch:
            self._latest = _signs(self.running[-1][0] or "model", op, pre)
            self._fresh = True

    def _enter_layer(self) -> None:
        """Note a matrix product or convolution: it is the classifier, unless another one follows."""
        if self._latest is not None:
            self.seen.clear()
            self.seen[self._latest.site.layer] = self._latest
        self.unknown = "" if self._fresh else self._bent
        self._fresh = False
        self._bent = ""

    def _pre_activation(self, op: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The input of a known activation; None for any other operation."""
        if op in _ACTIVATIONS or (op in _CLAMPS and (kwargs.get("min", args[1] if len(args) > 1 else None) == 0)):
            pre: Tensor = args[0]
            return pre
        if op in _MAXIMA:
            for pre, other in (args, args[::-1]):
                if not other.any():
                    return pre
        return None

    def _depends(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 1 and len(value) == self.batch

    def _bends(self, func: Any, op: Any, args: Any) -> bool:
        """Whether an operation applies a non-linear function to each feature of the images by itself."""
        if torch.Tag.pointwise not in func.tags or op in _LINEAR or not any(map(self._depends, args)):
            return False
        if op in _SCALINGS and not all(map(self._depends, args[:2])):
            return op not in (_aten.mul, _aten.mul_) and self._depends(args[1])  # a constant over features: non-linear
        return not any(isinstance(module, _NORMS) for _, module in self.running)


def _activates(module: nn.Module) -> bool:
    return isinstance(module, _MODULES) and not isinstance(module, _SCALES)


@contextmanager
def _watch_last(model: nn.Module, images: Tensor) -> Iterator[dict[str, _Signs]]:
    mode = _LastActivation(len(images))

    def enter(name: str) -> Callable[..., None]:
        def entered(module: nn.Module, inputs: Any) -> None:
            mode.running.append((name, module))
            if _activates(module):
                if not mode._inside and inputs and isinstance(inputs[0], Tensor):
                    mode.note(type(module).__name__.lower(), inputs[0])
                mode._inside += 1

        return entered

    def leave(*_: Any) -> None:
        if _activates(mode.running.pop()[1]):
            mode._inside -= 1

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter(name)).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        with mode:
            yield mode.seen
    if mode.unknown and mode.seen:
        known = next(iter(mode.seen))
        raise UserError(
            f"model.name: what follows the last hidden layer ({mode.unknown}) is no activation that raysim knows, and "
            f"the last known one is at {known!r}, before that layer; name the layer to measure in aggregation.layers "
            f"({_candidates(model)})"
        )


@contextmanager
def _watch_named(model: nn.Module, images: Tensor, layers: list[str]) -> Iterator[dict[str, _Signs]]:
    modules = dict(model.named_modules())
    for name in layers:
        if not name or name not in modules:
            raise UserError(
                f"aggregation.layers: the model has no module {name!r}; choose from {_candidates(model, name)}"
            )
    seen: dict[str, _Signs] = {}

    def note(name: str, op: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() > 1 and len(value) == len(images):
            seen[name] = _signs(name, op, value)

    def before(name: str) -> Callable[..., None]:
        return lambda module, inputs: note(name, type(module).__name__, inputs[0])

    def after(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: note(name, "output", output)

    with ExitStack() as hooks:
        for name in layers:
            module = modules[name]
            if isinstance(module, _MODULES):
                hooks.callback(module.register_forward_pre_hook(before(name)).remove)
            else:
                hooks.callback(module.register_forward_hook(after(name)).remove)
        yield seen


def _signs(layer: str, op: str, pre: Tensor) -> _Signs:
    lowest, highest = torch.aminmax(pre)  # of NaN and anything: NaN
    return _Signs(Site(layer, op, pre[0].numel()), pre > 0, lowest, highest)


def _candidates(model: nn.Module, wanted: str = "") -> str:
    """Module names to choose from, the nearest to `wanted` first, modules that hold no others before the rest."""
    modules = [(name, module) for name, module in model.named_modules() if name]
    names = [name for name, _ in sorted(modules, key=lambda entry: any(True for _ in entry[1].children()))]
    ordered = list(dict.fromkeys([*get_close_matches(wanted, names, n=3, cutoff=0.5), *names]))
    return ", ".join(ordered[:20]) + (f", ... ({len(ordered)} in all)" if len(ordered) > 20 else "")
