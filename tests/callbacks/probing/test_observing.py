from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakwatch.callbacks import observing


class Busy(nn.Module):
    """Writes in forward whatever a forward pass can write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)
        self.last.bias.requires_grad_(False)
        self.tied = self.first
        self.hidden = [nn.BatchNorm1d(4)]
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("average", torch.zeros(4), persistent=False)
        self.register_buffer("optional", None)
        self.alias = self.norm.running_mean
        self.total = torch.zeros(2)
        self.outputs: list[Tensor] = []
        self.history: dict[str, list[int]] = {"calls": [1]}
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.kinds: set[int] = {0}
        self.calls = 3
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[0] += 1
        self.total += 2
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        h = self.drop(self.first(self.hidden[0](self.norm(x))).tanh())
        self.state = h
        self.outputs.append(h)
        self.history["calls"].append(self.calls)
        self.history["more"] = []
        self.recent.append(self.calls)
        self.kinds.add(self.calls)
        self.fresh = "new attribute"
        return self.last(h)


def busy() -> Busy:
    """A net in the middle of training: mixed modes, gradients half accumulated."""
    torch.manual_seed(0)
    net = Busy()
    net.train()
    net.norm.eval()
    net(torch.randn(5, 4)).square().sum().backward()
    net.first.bias.grad = None
    net.eval()
    net.drop.train()
    return net


def modules_of(net: Busy) -> list[nn.Module]:
    return [*net.modules(), *net.hidden]


def tensors_of(net: Busy) -> dict[str, Tensor]:
    found = {"alias": net.alias, "total": net.total, "output": net.outputs[-1]}
    for i, module in enumerate(modules_of(net)):
        for name, value in [*module.named_parameters(recurse=False)]:
            found[f"{i}.{name}"] = value
            if value.grad is not None:
                found[f"{i}.{name}.grad"] = value.grad
        for name, value in module.named_buffers(recurse=False):
            found[f"{i}.{name}"] = value
    return found


def photograph(net: Busy) -> dict[str, Any]:
    """Everything about the net: objects by identity, tensors by their bits too."""
    tensors = tensors_of(net)
    return {
        "tensors": {k: id(t) for k, t in tensors.items()},
        "storage": {k: (t.data_ptr(), t.dtype) for k, t in tensors.items()},
        "bits": {k: t.detach().numpy().tobytes() for k, t in tensors.items()},
        "requires_grad": {k: t.requires_grad for k, t in tensors.items()},
        "modes": [m.training for m in modules_of(net)],
        "attributes": [[(k, id(v)) for k, v in vars(m).items()] for m in net.modules()],
        "registered": [
            [(k, id(v)) for k, v in (vars(m)[kind]).items()]
            for m in modules_of(net)
            for kind in ("_parameters", "_buffers", "_modules", "_forward_hooks")
        ],
        "contents": copy.deepcopy(
            (net.history, list(net.recent), net.recent.maxlen, net.kinds, net.calls)
        ),
        "lists": (id(net.outputs), [id(h) for h in net.outputs]),
        "streams": (
            random.getstate(),
            repr(np.random.get_state()),
            torch.get_rng_state().tolist(),
        ),
        "flags": (
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
            torch.backends.mha.get_fastpath_enabled(),
        ),
    }


def forward(net: Busy) -> None:
    net(torch.randn(5, 4))
    random.random(), np.random.rand()


def backward(net: Busy) -> None:
    net.train()
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    net(torch.randn(5, 4)).sum().backward()
    assert net.first.bias.grad is not None


def freeze(net: Busy) -> None:
    net.eval().requires_grad_(False)


def rewire(net: Busy) -> None:
    net.first = nn.Linear(4, 6)
    net.last.weight = nn.Parameter(torch.zeros(3, 6))
    net.register_forward_hook(lambda *_: None)
    net.extra = nn.Linear(1, 1)
    net.register_buffer("another", torch.zeros(1))
    del net.norm, net.seen, net.calls


def convert(net: Busy) -> None:
    net.double()
    net.hidden[0].double()
    net(torch.randn(5, 4, dtype=torch.float64))


def empty(net: Busy) -> None:
    net.zero_grad(set_to_none=False)
    net.zero_grad()
    del net.outputs[:-1], net.outputs[0]
    net.outputs.append(torch.zeros(1))
    net.history.clear()


def switches(net: Busy) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(5)


ACTIONS = [forward, backward, freeze, rewire, convert, empty, switches]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("act", ACTIONS)
def test_everything_is_as_it_was(act: Callable[[Busy], None], fails: bool) -> None:
    net = busy()
    before = photograph(net)
    try:
        with observing(net):
            act(net)
            during = photograph(net) if act is not rewire else None
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert during != before
    after = photograph(net)
    for part in before:
        assert after[part] == before[part], part


def test_gradients_are_out_of_reach_inside_and_accumulate_on_afterwards() -> None:
    x, y = torch.randn(2, 5, 4)
    watched, plain = busy(), busy()
    for net in (watched, plain):
        net.zero_grad()
        torch.manual_seed(1)
        net(x).sum().backward()
    with observing(watched):
        assert all(p.grad is None for p in watched.parameters())
        watched(x).sum().backward()
    torch.manual_seed(2)
    watched(y).sum().backward()
    torch.manual_seed(2)
    plain(y).sum().backward()
    grads = [[p.grad for p in net.parameters()] for net in (watched, plain)]
    assert sum(grad is None for grad in grads[0]) == 1
    for a, b in zip(*grads, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_pending_backward_pass_survives() -> None:
    net = busy()
    loss = net(torch.randn(5, 4)).sum() + (net.norm.running_mean * net.total[0]).sum()
    with observing(net):
        net.norm.train()
        net.norm(torch.randn(5, 4))
    loss.backward()
    assert net.first.weight.grad is not None


def test_inside_is_differentiable_whatever_surrounds_it() -> None:
    net = busy()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        with observing(net):
            out = net(torch.ones(5, 4))
            assert out.dtype == torch.float32
            (grad,) = torch.autograd.grad(out.sum(), net.last.weight)
            assert not grad.is_inference()
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")


def test_training_with_an_observer_is_bit_identical() -> None:
    def train(observed: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
        )
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(6):
            x = torch.randn(8, 4)
            for half in x.chunk(2):
                net(half).square().mean().backward()
                if observed:
                    with observing(net):
                        net(torch.randn(3, 4)).sum().backward()
                        net.eval()
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    plain, observed = train(False), train(True)
    for name, value in plain.items():
        assert torch.equal(observed[name], value), name


def test_expanded_sparse_and_inference_tensors_are_left_alone() -> None:
    net = nn.Linear(2, 2)
    net.wide = torch.zeros(1).expand(4)
    net.sparse = torch.eye(2).to_sparse()
    with torch.inference_mode():
        net.made = torch.zeros(2)
    kept = net.wide, net.sparse, net.made
    with observing(net):
        net.wide = net.sparse = net.made = None
    assert (net.wide, net.sparse, net.made) == kept


def test_scripted_modules(recwarn: pytest.WarningsRecorder) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    net = torch.jit.trace(Counter(), torch.ones(1), check_trace=False)
    count = net.count.clone()
    with observing(net):
        net.eval()
        net(torch.ones(1))
        assert not torch.equal(net.count, count)
    assert torch.equal(net.count, count)
    assert net.training


def test_other_objects_are_refused() -> None:
    with (
        pytest.raises(TypeError, match=r"got function; expected a torch\.nn\.Module"),
        observing(lambda x: x),  # type: ignore[arg-type]
    ):
        pass


def test_lazy_modules_are_refused() -> None:
    net = nn.Sequential(nn.LazyLinear(2))
    with (
        pytest.raises(ValueError, match=r"'0\.weight' has no shape yet.*one forward"),
        observing(net),
    ):
        pass
