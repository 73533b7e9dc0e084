from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CLASSES, dense_jacobian, relative
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import leakwatch
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.safe_ops.substitutes import Substitutes

_C = torch._C._nn
GENERATOR = torch.Generator().manual_seed(0)
H = 4 * torch.randn(2, 4, 3, 3, generator=GENERATOR, dtype=torch.float64)
MEAN, VAR, W, B = torch.rand(4, 4, generator=GENERATOR, dtype=torch.float64) + 0.5

Operation = Callable[[Tensor], Tensor]
OPERATIONS: dict[str, Operation] = {
    "hardsigmoid": F.hardsigmoid,
    "hardsigmoid-module": nn.Hardsigmoid(),
    "hardsigmoid-in-place": lambda h: F.hardsigmoid(h.clone(), inplace=True),
    "hardsigmoid-builtin": lambda h: _C.hardsigmoid(h),
    "hardsigmoid_-builtin": lambda h: _C.hardsigmoid_(h.clone()),
    "cdist": lambda h: torch.cdist(h.flatten(2), h.flatten(2)),
    "cdist-1": lambda h: torch.cdist(h[:, 0], h[:, 1], p=1),
    "cdist-3": lambda h: torch.cdist(h[:, 0], h[:, 0], p=3.0),
    "cdist-max": lambda h: torch.cdist(h[:, 0], h[:, 1], p=float("inf")),
    "pdist": lambda h: F.pdist(h[0].flatten(1)),
    "pdist-3": lambda h: torch.pdist(h[0].flatten(1), 3),
    "batch_norm": lambda h: F.batch_norm(h, MEAN, VAR, W, B),
    "batch_norm-plain": lambda h: F.batch_norm(h, MEAN, VAR, eps=0.1),
    "batch_norm-1d": lambda h: F.batch_norm(h[..., 0, 0], MEAN, VAR, W),
    "batch_norm-of-the-batch": lambda h: F.batch_norm(h, None, None, training=True),
    "layer_norm": lambda h: F.layer_norm(h, (3, 3), W[:3, None] * B[:3], eps=0.1),
    "layer_norm-plain": lambda h: F.layer_norm(h, (4, 3, 3)),
    "layer_norm-module": nn.LayerNorm(3).double(),
    "layer_norm-builtin": lambda h: torch.layer_norm(h, (3,), W[:3], B[:3]),
    "batch_norm-builtin": lambda h: torch.batch_norm(
        h, W, B, MEAN, VAR, False, 0.1, 1e-5, False
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    operation = OPERATIONS[name]
    results = []
    for mode in (Substitutes(), torch.enable_grad()):
        h = H.clone().requires_grad_()
        with mode:
            out = operation(h)
        (slope,) = torch.autograd.grad(out.cos().sum(), h)
        results.append((out.detach(), slope))
    for ours, theirs in zip(*results, strict=True):
        # Torch's hardsigmoid takes a sixth in float32.
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["hardsigmoid", "cdist-1", "cdist-3", "pdist", "layer_norm"]
)
def test_second_derivatives_are_right(name: str) -> None:
    def sines(h: Tensor) -> Tensor:
        with Substitutes():
            return OPERATIONS[name](h).sin()

    torch.autograd.gradgradcheck(sines, H[:1].clone().requires_grad_())


def test_writing_in_place_is_seen_by_others() -> None:
    h = H.clone()
    with Substitutes():
        out = F.hardsigmoid(h, inplace=True)
    assert out is h
    torch.testing.assert_close(h, F.hardsigmoid(H))


class Net(nn.Module):
    def __init__(self, middle: Operation) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(1, 4, 3, stride=2, dtype=torch.float64)
        self.b = nn.Linear(4, CLASSES, dtype=torch.float64)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


def _affine(h: Tensor) -> Tensor:
    scale = W / (VAR + 1e-5).sqrt()
    return (h - MEAN[:, None, None]) * scale[:, None, None] + B[:, None, None]


def _root(h: Tensor) -> Tensor:
    gaps = h.flatten(2)[:, :, None] - h.flatten(2)[:, None]
    return (gaps.square().sum(-1) + torch.eye(4)).sqrt() - torch.eye(4)


def _tokens(h: Tensor) -> Tensor:
    return h.flatten(2).transpose(1, 2).mean(1)


@pytest.mark.parametrize("path", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("middle", "equal"),
    [
        (
            lambda h: F.hardsigmoid(h).mean((2, 3)),
            lambda h: (F.relu6(h + 3) / 6).mean((2, 3)),
        ),
        # Each point's distance to itself is among them.
        (
            lambda h: torch.cdist(h.flatten(2), h.flatten(2)).tanh().sum(2),
            lambda h: _root(h).tanh().sum(2),
        ),
        # The order of dimensions in which Torch's own gradient is wrong.
        (
            lambda h: _tokens(F.batch_norm(h, MEAN, VAR, W, B)),
            lambda h: _tokens(_affine(h)),
        ),
    ],
    ids=["hardsigmoid", "distances", "batch-norm-of-tokens"],
)
def test_networks_that_use_them(middle: Operation, equal: Operation, path: str) -> None:
    x = H[:2, :1, :, :].repeat(1, 1, 2, 2)[:, :, :5, :5] / 4
    y = torch.tensor([0, 2])
    gradients = GradientMap(Net(middle), dtype=torch.float64)
    if path == "loop":
        gradients = GradientMap(Net(middle), dtype=torch.float64, path="loop")
    v = torch.ones(2, 25, dtype=torch.float64).cumsum(1).sin()
    image, g = gradients.jvp(x, y, v), gradients(x, y)
    assert gradients.path == path
    assert gradients.notes == ()
    for i in range(2):
        exact, jacobian = dense_jacobian(Net(equal), x[i], y[i])
        assert relative(g[i], exact) < 1e-12
        assert relative(image[i], jacobian @ v[i]) < 1e-12


@pytest.mark.parametrize("check", ["default", "none"])
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_computed_again_has_the_substitutes_too(norm: bool, check: str) -> None:
    def network(checkpointed: bool) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.a, self.b = nn.Linear(9, 8), nn.Linear(8, CLASSES)
                self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

            def block(self, h: Tensor) -> Tensor:
                return F.hardsigmoid(self.norm(self.a(h)))

            def forward(self, x: Tensor) -> Tensor:
                x = x.flatten(1)
                if not checkpointed:
                    return self.b(self.block(x))  # type: ignore[no-any-return]
                h = checkpoint(
                    self.block, x, use_reentrant=False, determinism_check=check
                )
                return self.b(h)  # type: ignore[no-any-return]

        return Net().eval()

    x = torch.rand(2, 1, 3, 3, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 1])
    at = [GradientMap(network(on), dtype=torch.float64) for on in (True, False)]
    for i in range(2):
        ours, right = (one.dense(x[i].double(), y[i], torch.eye(9)) for one in at)
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-14)
    assert [one.doubt.word for one in at] == ["ok", "ok"]


class Embedded(nn.Module):
    """Adds what it looks up, in both ways, to the pixels."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = sparse
        self.one = nn.Embedding(3, 6, sparse=sparse)
        self.raw = nn.Parameter(torch.rand(3, 6))
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(2).repeat(len(x), 1)
        looked = self.one(at[:, 0]) + torch.embedding(
            self.raw, at[:, 1], -1, False, self.sparse
        )
        out: Tensor = self.fc((x * looked).sigmoid())
        return out


def test_a_sparse_embedding_counts_as_a_dense_one() -> None:
    x, y = torch.rand(2, 6), torch.tensor([0, 1])
    sparse, dense = (
        leakwatch.score(Embedded(s), x, y, ["lavp", "grad_norm"]) for s in (True, False)
    )
    assert {s.word for found in sparse.status.values() for s in found} <= {"ok"}
    for name in dense:
        torch.testing.assert_close(sparse[name], dense[name], rtol=0, atol=0)
