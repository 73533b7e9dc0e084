from __future__ import annotations

from collections import OrderedDict, deque

import pytest
import torch
from torch import Tensor, nn

from leakwatch.derivatives.runtime.restore import Snapshot


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.nested: dict[str, list[int]] = {"calls": [1]}
        self.recent: deque[int] = deque([1], maxlen=1)
        self.ordered = OrderedDict(a=1, b=2)
        self.pairs = ([1], {2})
        self.plain = torch.zeros(2)
        self.count = 1000

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


WRITES = {
    "nested": lambda net: net.nested["calls"].append(2),
    "recent": lambda net: net.recent.append(2),
    "order": lambda net: net.ordered.move_to_end("a"),
    "in a tuple": lambda net: net.pairs[0].clear(),
    "new": lambda net: setattr(net, "more", 1),
    "gone": lambda net: delattr(net, "count"),
    "number": lambda net: setattr(net, "count", 1001),
    "mode": lambda net: net.norm.eval(),
    "child": lambda net: setattr(net, "norm", nn.Identity()),
    "hook": lambda net: net.register_forward_hook(lambda *_: None),
    "buffer": lambda net: net.norm.running_mean.add_(1),
    "attribute": lambda net: net.plain.add_(1),
    "new tensor": lambda net: setattr(net, "plain", net.plain + 1),
}
TENSORS = ("buffer", "attribute")


def contents(net: Holder) -> list[object]:
    tensors = [t.tolist() for t in (*net.buffers(), net.plain)]
    modes = [m.training for m in net.modules()]
    kept = net.nested["calls"], list(net.recent), list(net.ordered), net.pairs
    return [*tensors, modes, repr(kept), net.count, sorted(vars(net)), repr(net)]


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("what", WRITES)
def test_every_write_is_seen_and_undone(what: str, tensors: bool) -> None:
    net = Holder()
    before, was = Snapshot(net, tensors=tensors), contents(net)
    assert before.holds()
    WRITES[what](net)
    seen = tensors or what not in TENSORS
    assert before.holds() is not seen
    before.restore()
    assert (contents(net) == was) is seen
    assert not net._forward_hooks


def test_an_equal_number_is_the_same() -> None:
    net = Holder()
    before = Snapshot(net)
    net.count = int("1000")
    assert before.holds()
    net.count = 1000.0  # type: ignore[assignment]
    assert not before.holds()


def test_putting_numbers_back_does_not_count_as_a_change_of_weights() -> None:
    net = Holder()
    versions = [t._version for t in (*net.parameters(), *net.buffers())]
    Snapshot(net).restore()
    assert [t._version for t in (*net.parameters(), *net.buffers())] == versions
