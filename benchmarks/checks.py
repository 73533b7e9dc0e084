"""What each safety check costs, as a share of the call that it guards.

    LEAKWATCH_TEST_DATA=… python benchmarks/checks.py [--repeats 3]

CPU seconds of one thread, first test digits of MNIST, the LeNet of I²F. Each check is
a function of the package, timed where the public call runs it; what a check runs inside
of another one counts for the outer one. Checks of a network and its weights run once:
their rows say so, and give the share of the first call.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from spectrum import digits

import leakwatch
from leakwatch.attacks.matching import objective
from leakwatch.derivatives import network
from leakwatch.derivatives.gram import gram
from leakwatch.derivatives.graph_products.batch_products import BatchProducts
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.models import LeNet, initialize
from leakwatch.scores import resolve
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.pixel_range import PixelRange

# Owner, its function, what it checks.
CHECKS: tuple[tuple[Any, str, str], ...] = (
    (network, "examine", "once: derivatives of the network, examined"),
    (ScoreInputs, "rounding", "rounding of J, in two precisions"),
    (GradientJacobian, "doubts", "a difference, zeros that are claims"),
    (gram, "disagreeing", "layers that come apart, first sample"),
    (gram._Job, "straight", "whether the network bends"),
    (gram, "_same_norm", "‖g‖ from the layers"),
    (BatchProducts, "_compare_gradients", "gradients from the graph"),
    (BatchProducts, "_compare", "first products of each sample"),
    (PixelRange, "steady", "rounding of H at little noise"),
    (objective, "choose", "once: ways of an attack's step, compared and timed"),
)


class Watch:
    """Adds up the seconds of each check, the outermost only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = False

    def over(self, owner: Any, name: str, what: str) -> None:
        """Times a function, or a cached property, from now on."""
        held = vars(owner)[name]
        call = held.func if isinstance(held, functools.cached_property) else held

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, start = True, time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[what] += time.process_time() - start
                self._inside = False

        if isinstance(held, functools.cached_property):
            again = functools.cached_property(timed)
            again.__set_name__(owner, name)
            setattr(owner, name, again)
        else:
            setattr(owner, name, timed)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, y = digits(32)
    plain = [
        s for s in resolve(["lavp", "i2f", "bayes", "norms"]) if "range" not in s.needs
    ]
    watch = Watch()
    for owner, name, what in CHECKS:
        watch.over(owner, name, what)

    def measured(title: str, call: Callable[[], object], per_call: bool) -> None:
        """One row for each check of a call; the first round makes what is once."""
        shares: dict[str, list[float]] = {}
        totals = []
        for repeat in range(args.repeats + 1):
            watch.seconds.clear()
            start = time.process_time()
            call()
            total = time.process_time() - start
            if per_call == bool(repeat):
                totals.append(total)
                for what, seconds in watch.seconds.items():
                    if what.startswith("once") != per_call:
                        shares.setdefault(what, []).append(seconds / total)
        print(f"{title}: {statistics.median(totals):.3f} s", flush=True)
        for what, found in sorted(shares.items()):
            print(f"    {what:52}{100 * statistics.median(found):6.1f} %", flush=True)

    for activation in ("sigmoid", "relu"):
        net = LeNet(activation=activation)
        initialize(net, "uniform", seed=0)

        def exact(n: int, net: torch.nn.Module = net) -> object:
            return leakwatch.score(net, x[:n], y[:n], plain, noise_std=1e-2)

        def largest(n: int, net: torch.nn.Module = net) -> object:
            return leakwatch.score(net, x[:n], y[:n], ["lavp_l2_max"])

        name = f"LeNet, {activation}"
        measured(f"{name}, exact scores of 4, first", lambda: exact(4), False)
        measured(f"{name}, exact scores of 4", lambda: exact(4), True)
        for n in (1, 8, 32):
            measured(f"{name}, λ_1 of {n}", functools.partial(largest, n), True)

        def attacked(net: torch.nn.Module = net) -> object:
            return leakwatch.attack(
                net, x[:4], y[:4], "inverting-gradients", steps=300, restarts=2
            )

        measured(f"{name}, 8 attacks of 300 steps, first", attacked, False)
        measured(
            f"{name}, headline of 2 at little noise",
            lambda net=net: leakwatch.score(  # type: ignore[misc]
                net, x[:2], y[:2], ["i2f_range_psnr"], noise_std=1e-7
            ),
            True,
        )


if __name__ == "__main__":
    main()
