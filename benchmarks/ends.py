"""Matrix-free scores: against the exact spectrum, and where there is no other way.

    python benchmarks/ends.py --small            # LeNet 28×28, ResNet8 14×14: exactness
    python benchmarks/ends.py --large            # ResNet18, ShuffleNetV2 at 3×224×224
    python benchmarks/ends.py --large --sums     # and the Bayesian score there

Networks are untrained and images uniform noise, so nothing has to be downloaded. One
product is one with J and one with Jᵀ. Times are those of the processor, so that what
else runs on the machine counts little.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from leakwatch import GradientJacobian
from leakwatch.derivatives import GradientMap
from leakwatch.models import build_model, initialize
from leakwatch.scores import score
from leakwatch.spectrum import as_factor, damped, ends, exact, quadrature


def small() -> None:
    """Ends, sums and damped inverses of small networks against the whole spectrum."""
    for name, options in (
        ("lenet", {"activation": "sigmoid"}),
        ("lenet", {"activation": "relu"}),
        ("resnet8", {"activation": "relu"}),
    ):
        size = 28 if name == "lenet" else 14
        net = _network(name, 1, size, options)
        x = torch.rand(1, 1, size, size, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float64, torch.float32):
            j = GradientJacobian(GradientMap(net, dtype=dtype), x, torch.tensor([3]))
            if dtype == torch.float64:
                truth = exact(j.gram(0).h, eigenvectors=True)
            _compare(f"{name} {options['activation']} {dtype}", j, truth)


def _compare(title: str, j: GradientJacobian, truth: object) -> None:
    lam, vectors = truth.eigenvalues[0], truth.eigenvectors[0]  # type: ignore[attr-defined]
    n = len(lam)
    # J̃ as the library forms it in this arithmetic, once: what the products would use.
    factor = as_factor(j.dense(0) / j.scale[0].to(j.dtype))
    print(f"\n{title}: d_x {n}, condition {float(lam[0] / lam[-1]):.1e}")
    for products in (50, 200, 1000):
        found = ends(factor, max_matvecs=products)
        inside = bool(found.lower <= lam[-1]) and bool(lam[-1] <= found.upper)
        low, high = (float(end / lam[-1]) for end in (found.lower, found.upper))
        print(
            f"  ends, at most {products:4} products: used {int(found.matvecs):4}; λ_1 "
            f"off by {float(found.lambda_max / lam[0] - 1):+.1e}, residual "
            f"{float(found.residual / lam[0]):.1e}; λ_min in [{low:.4f}, {high:.4f}] "
            f"of itself, {'inside' if inside else 'OUTSIDE'}, "
            f"{found.status(0).split(':')[0]}"
        )
    measure = quadrature(factor, known=found.leading, lower=found.lower)[0]
    for shift in (1e-1, 1e-3):
        eps = shift * float(lam[0])
        for what, moment, f in (
            ("Σ ε/(λ+ε)", 0, lambda t, eps=eps: eps / (t + eps)),
            ("Σ λ/(λ+ε)²", 1, lambda t, eps=eps: 1 / (t + eps) ** 2),
        ):
            got = measure.estimate(f, moment=moment)
            want = float((f(lam) * (lam if moment else 1)).sum())
            print(
                f"  {what:11} ε = {shift:.0e} λ_1: off by {got.value / want - 1:+.1e}, "
                f"standard error {got.error / want:.1e}, quadrature within "
                f"{(got.high - got.low) / 2 / want:.1e} ({measure.products} products)"
            )
    got = measure.trace()
    want = float(lam.sum())
    print(
        f"  Σλ{'':22}: off by {got.value / want - 1:+.1e}, standard error "
        f"{got.error / want:.1e}"
    )
    delta = torch.randn(1, j.shape[1], generator=torch.Generator().manual_seed(1))
    pulled = j.normalized_rmatvec(delta)[0].double()
    steps = torch.logspace(-1, -5, 9, dtype=torch.float64) * float(lam[0])
    found = damped(factor, delta, epsilons=tuple(steps.tolist()), max_matvecs=n)[0]
    off, bound = 0.0, 0.0
    for eps in steps.tolist():
        want = float(((vectors.T @ pulled) / (lam + eps)).norm())
        got = found.at(eps)
        off, bound = max(off, abs(got.value / want - 1)), max(bound, got.error / want)
    print(
        f"  I²F for a given δ at nine ε from one space of {found.products} products: "
        f"off by at most {off:.1e}, bound {bound:.1e}"
    )


def large(sums: bool, seconds: float) -> None:
    """λ_1 at ImageNet size, and on request the Bayesian score."""
    for name in ("shufflenet_v2", "resnet18"):
        net = _network(name, 3, 224, {})
        x = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        y = torch.tensor([3])
        started = time.process_time()
        j = GradientJacobian(GradientMap(net), x, y)
        factor = j.normal()
        v = torch.rand(1, factor.size)
        factor.matvec(v)
        ready = time.process_time()
        found = ends(factor, smallest=False, tol=1e-4, max_matvecs=20)
        took = time.process_time() - ready
        used = int(found.matvecs)
        print(
            f"{name} 3×224×224 (d_x {j.shape[2]}, d_θ {j.shape[1]}): λ_1 = "
            f"{float(found.lambda_max * j.scale**2):.6g}, residual "
            f"{float(found.residual / found.lambda_max):.1e} of it after {used} "
            f"products, {took / (used + 0.5):.2f} CPU s a product, {took:.0f} s; "
            f"examination and first product {ready - started:.0f} s",
            flush=True,
        )
        if sums:
            _sums(net, x, y, seconds)


def _sums(net: nn.Module, x: Tensor, y: Tensor, noise: float) -> None:
    names = ["i2f_bayes", "i2f_bayes_psnr", "leaked_bits", "jacobian_norm"]
    started = time.process_time()
    found = score(net, x, y, names, noise_std=noise, solver="lanczos", products=50)
    for name in names:
        status = found.status[name][0]
        print(f"    {name:15} {float(found[name]):10.4g}  {status}")
    print(f"    {time.process_time() - started:.0f} CPU s", flush=True)


def _network(name: str, channels: int, size: int, options: dict[str, str]) -> nn.Module:
    torch.manual_seed(0)
    net = build_model(
        name,
        in_channels=channels,
        num_classes=10 if size < 100 else 1000,
        image_size=size,
        model_args=options,
    )
    if options.get("activation") == "sigmoid":
        initialize(net, "uniform", seed=0)
    return net.eval()


def main() -> None:
    """Prints the tables of docs/measurements/speed.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--sums", action="store_true", help="needs --large")
    parser.add_argument("--noise", type=float, default=1e-2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.small:
        small()
    if args.large:
        large(args.sums, args.noise)


if __name__ == "__main__":
    main()
