"""How much protection noise along kept directions loses while the network moves on.

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/ageing_bases.py
        [--epochs 0] [--after 0 10 50 200 1500] [--budget 0.1] [--samples 2]

``GradientDefense(EigenNoise(…), refresh_every=N)`` lays noise along J u_i/σ_i with u_i
and σ_i of up to N steps ago and J of now. Here these are formed of test digits, pooled
to 14×14, at the weights of a LeNet with sigmoids (trained for ``--epochs``); training
goes on without a defense, SGD with batches of 8; and after some steps the digits'
gradients are shared with noise along directions of now and along those that were kept,
at the same ‖δ‖/‖g‖. Both are attacked as in ``trade_off.py``, by Gauss–Newton from
beside the truth, naive and adaptive; the latter knows the directions that were kept.
Gaussian noise stands beside.

*Overlap*: of the inputs' directions that have noise, with as many of now, ‖UᵀU'‖²/k.
*Stays*: share of the energy of the noise along those v_i of now that noise of now would
be along.

The data are found through ``LEAKWATCH_TEST_DATA``, a folder with ``MNIST/raw``.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from trade_off import Images, begun, images

from leakwatch import trade_off
from leakwatch.attacks import GaussNewton
from leakwatch.cli.trade_training import accuracy_on
from leakwatch.defenses import (
    Basis,
    Budget,
    Coefficients,
    Covariance,
    Defense,
    Deflation,
    EigenNoise,
    GaussianNoise,
    InRange,
    LinearMap,
    Needs,
    Reduction,
    Samples,
    Shared,
    Smallest,
    Waterfill,
)
from leakwatch.defenses.eigen.basis import Directions
from leakwatch.derivatives import GradientMap


@final
@dataclass(frozen=True, eq=False)
class Carried(Covariance):
    """Σ = J A Jᵀ with A = κ U diag(D/σ²) Uᵀ of earlier weights and J of now.

    κ makes tr Σ the Σ D_i that is stated. See :class:`leakwatch.defenses.covariance`.

    Attributes:
        samples: whose J it is.
        roots: A^½, ``(n, d_x, d_x)``.
        total: tr Σ.
    """

    samples: Samples
    roots: Tensor
    total: Tensor

    @classmethod
    def of(cls, noise: InRange) -> Carried:
        """That of noise along directions that were kept."""
        basis = noise.basis
        sigma = torch.where(basis.resolved, basis.eigenvalues, 1.0).sqrt()
        roots = basis.directions * (noise.variance.sqrt() / sigma)[:, None, :]
        at = noise.samples
        spent = torch.stack(
            [
                at.gradients.dense(at.x[i], at.y[i], roots[i].T).square().sum()
                for i in range(len(at))
            ]
        )
        kappa = (noise.total / spent).sqrt()
        return cls(at, roots * kappa[:, None, None], noise.total)

    def __len__(self) -> int:
        return len(self.roots)

    def draw(
        self, generator: torch.Generator, coefficients: Coefficients = "gaussian"
    ) -> Tensor:
        """Not needed here: it was drawn."""
        raise NotImplementedError

    def along(self, basis: Basis) -> Tensor:
        """λ_i u_iᵀAu_i."""
        moved = torch.einsum("nij,nik->njk", basis.directions, self.roots)
        return basis.visible * moved.square().sum(2)

    def best_error(self, basis: Basis, prior_std: float | None = None) -> Tensor:
        """The trace of (A⁻¹ + I/R²)⁻¹ where resolved, R² for each other direction."""
        out = []
        for i in range(len(self)):
            keep = basis.resolved[i]
            root = basis.directions[i][:, keep].T @ self.roots[i]
            a = torch.linalg.svdvals(root).square()
            if prior_std is None:
                out.append(a.sum())
                continue
            r2 = prior_std**2
            out.append((a * r2 / (a + r2)).sum() + r2 * int((~keep).sum()))
        return torch.stack(out)

    def scaled(self, factor: float) -> Carried:
        """Σ times a number."""
        return replace(
            self, roots=self.roots * math.sqrt(factor), total=self.total * factor
        )

    def summed(self, weight: float) -> Carried | None:
        """Known for one message only."""
        return self.scaled(weight**2) if len(self) == 1 else None

    def whitening(self, row: int, least: float) -> tuple[LinearMap, float]:
        """As that of noise along directions of now, in the principal axes of Σ."""
        at = self.samples
        rows = at.gradients.dense(at.x[row], at.y[row], self.roots[row].T)
        _, s, directions = torch.linalg.svd(rows, full_matrices=False)
        used = s > 1e-12 * s[0]
        noise = s[used].square()
        s2 = least**2 * float(noise[0])
        factors = math.sqrt(s2) / (noise + s2).sqrt()
        return Deflation(directions[used], factors), math.sqrt(s2)


@final
@dataclass(frozen=True, eq=False)
class Kept(Defense):
    """Noise along directions of earlier weights; see :class:`Defense`."""

    noise: EigenNoise
    known: Mapping[int, Directions]
    needs: ClassVar[Needs] = "jacobian"

    @property
    def name(self) -> str:
        """Of the noise."""
        return f"{self.noise.name}, kept"

    @property
    def budget(self) -> Budget:
        """Of the noise."""
        return self.noise.budget

    def protect(
        self,
        gradient: Tensor,
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """With J of now."""
        assert samples is not None
        made = self.noise.protect(
            gradient, generator=generator, samples=self.aged(samples)
        )
        noise = made.knowledge.covariance
        assert isinstance(noise, InRange)
        return replace(
            made, knowledge=replace(made.knowledge, covariance=Carried.of(noise))
        )

    def aged(self, samples: Samples) -> Samples:
        """The samples, with the directions that were kept."""
        return Samples(
            samples.gradients,
            samples.x,
            samples.y,
            basis=lambda jacobian: Basis.of(jacobian, earlier=self.known),
        )

    def protect_batch(
        self,
        gradient: Tensor,
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
        reduction: Reduction = "mean",
    ) -> Shared:
        """Not needed here: nothing is trained under it."""
        raise NotImplementedError


def keeping(
    budget: Budget, shape: Smallest | Waterfill, known: Mapping[int, Directions]
) -> Kept:
    """A defense of a budget."""
    return Kept(EigenNoise(budget, shape), known)


def covariance(noise: EigenNoise, samples: Samples) -> InRange:
    """Of the noise on these samples' gradients."""
    made = noise.protect(
        samples.gradient, generator=torch.Generator().manual_seed(0), samples=samples
    )
    found = made.knowledge.covariance
    assert isinstance(found, InRange)
    return found


def compared(kept: Kept, samples: Samples) -> tuple[list[int], float, float]:
    """How many directions noise of now has; overlap and what stays, mean of samples."""
    now = covariance(kept.noise, samples)
    then = covariance(kept.noise, kept.aged(samples))
    along = Carried.of(then).along(samples.basis)
    chosen, overlap, stays = [], 0.0, 0.0
    for i in range(len(samples)):
        here, there = now.variance[i] > 0, then.variance[i] > 0
        u = samples.basis.directions[i][:, here]
        v = then.basis.directions[i][:, there]
        k = min(u.shape[1], v.shape[1])
        overlap += float((u.T @ v).square().sum()) / k / len(samples)
        stays += float(along[i, here].sum() / then.total[i]) / len(samples)
        chosen.append(int(here.sum()))
    return chosen, overlap, stays


def go_on(net: nn.Module, data: Images, steps: int, lr: float) -> None:
    """Some steps of SGD on the batches that follow."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    x, y = data.scaled(data.x), data.y
    for _ in range(steps):
        part = torch.randint(len(x), (data.batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[part]), y[part]).backward()
        optimizer.step()


def main() -> None:
    """Measures, prints a table for each age."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--after", nargs="+", type=int, default=[0, 10, 50, 200, 1500])
    parser.add_argument("--budget", type=float, default=0.1)
    kinds = ["gaussian", "smallest", "waterfill"]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="before the directions are formed")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--directions", type=int, default=50)
    parser.add_argument("--test", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    data = Images("MNIST", 12_000, args.batch, args.test)
    lit = begun("MNIST", data, args.epochs)
    accuracy = accuracy_on(data, "test")
    u, v = images("MNIST", train=False)
    u, v = u[args.test :], v[args.test :]
    chosen = [int((v == c).nonzero()[0]) for c in range(args.samples)]
    x, y = data.scaled(u[chosen]), v[chosen]

    def at_now() -> Samples:
        return Samples(GradientMap(lit, dtype=torch.float64), x.double(), y)

    first = at_now().basis
    known = {i: first.of_sample(i) for i in range(len(x))}
    weights = nn.utils.parameters_to_vector(lit.parameters()).detach()
    shapes = {
        "smallest": Smallest(args.directions),
        "waterfill": Waterfill(data.prior_std / data.std),
    }
    shapes = {name: shape for name, shape in shapes.items() if name in args.only}
    done = 0
    torch.manual_seed(1)
    for after in args.after:
        go_on(lit, data, after - done, args.lr)
        done = after
        now = nn.utils.parameters_to_vector(lit.parameters()).detach()
        moved = float((now - weights).norm() / weights.norm())
        print(
            f"\n{after} steps: accuracy {accuracy(lit):.3f}, weights moved by "
            f"{moved:.3f} of their norm",
            flush=True,
        )
        makes: dict[str, Callable[[Budget], Defense]] = {}
        if "gaussian" in args.only:
            makes["gaussian"] = GaussianNoise
        for name, shape in shapes.items():
            makes[f"{name}, of now"] = partial(EigenNoise, allocation=shape)
            if after > 0:
                makes[f"{name}, kept"] = partial(keeping, shape=shape, known=known)
            kept = Kept(EigenNoise(Budget(args.budget), shape), known)
            count, overlap, stays = compared(kept, at_now())
            print(
                f"{name}: {count} of {x[0].numel()} directions, overlap {overlap:.3f}, "
                f"stays {stays:.3f}",
                flush=True,
            )
        began = time.process_time()
        found = trade_off(
            lit,
            x,
            y,
            lambda *_: None,
            accuracy,
            defenses=makes,
            budgets=[args.budget],
            attack=GaussNewton(patience=8),
            steps=args.steps,
            start="near",
            radius=0.1 / data.std,
            mean=[data.mean],
            std=[data.std],
            prior_std=data.prior_std,
            prior_mean=data.x.mean(0),
        )
        print(found.table())
        print(f"({time.process_time() - began:.0f} CPU s)", flush=True)


if __name__ == "__main__":
    main()
