"""The cheapest way to measure what a list of scores needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from leakwatch.derivatives.gram.gram import columns_stored
from leakwatch.names import meant
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.memory import bytes_of_products
from leakwatch.scores.settings import Settings

#: What a score may need to be measured.
Need: TypeAlias = Literal[
    "lambda_max", "lambda_min", "cosine", "trace", "spectrum", "range", "noise"
]
Solver: TypeAlias = Literal["auto", "exact", "lanczos", "power"]
#: How much is looked at: the leading components of a prior, or everything.
PrecisionName: TypeAlias = Literal["dashboard", "exact"]

#: Products with J and Jᵀ that ``lanczos`` may take for each of its tasks.
DEFAULT_PRODUCTS = 100

#: Directions that components take at least, with draws of the others.
FEWEST_COMPONENTS = 80

#: Input elements up to which all of H costs no more than its leading components.
SMALLEST_DASHBOARD = 256

# Products that λ_1 takes there, about.
_FEW_PRODUCTS = 8

# Times max_memory up to which nothing is said.
_SLACK = 1.2

# MiB for tangents, of max_memory, where products leave less: tangents would be formed
# over and over.
_TANGENTS = 128.0

#: Input elements beyond which the eigensolver alone (d_x³) takes minutes on a CPU.
LARGEST_EXACT = 4096


@final
@dataclass(frozen=True)
class Plan:
    """What is measured, and how.

    Attributes:
        solver: ``exact``: one dense Gram matrix per sample serves everything;
            ``lanczos``: products only, both ends of the spectrum with their errors and
            sums over it from random starts; ``power``: the papers' recipe for both
            ends; ``components``: J along the leading components of the prior.
        largest: whether λ_1 is needed.
        smallest: whether the lower ends are needed.
        cosine: whether the cosine Hessian's ends are needed.
        trace: whether Σλ is needed.
        eigenvectors: whether some formula needs the basis.
        reason: why this solver.
        spectrum: whether sums over all eigenvalues are needed.
        any_noise: whether such a sum is needed at a noise level that isn't stated.
        range: whether H and draws of the noise are needed.
        matrix: whether H itself is needed.
        products: most products with J and Jᵀ that ``lanczos`` takes for each task.
        max_memory: MiB that ``exact`` keeps of the Jacobian of one sample at a time,
            and ``lanczos`` of tangents along components of a prior.
        group: samples that are measured together at most.
        held: bytes that graphs of their products may keep.
    """

    solver: Solver | Literal["components"]
    largest: bool
    smallest: bool
    cosine: bool
    trace: bool
    eigenvectors: bool
    reason: str
    spectrum: bool = False
    any_noise: bool = False
    range: bool = False
    matrix: bool = False
    products: int = DEFAULT_PRODUCTS
    max_memory: float | None = None
    group: int = 2**31
    held: int = 2**62

    def directions(self, size: int) -> int:
        """Along about how many directions each sample is differentiated.

        Args:
            size: d_x.
        """
        if self.solver == "exact":
            return size
        if self.solver == "components":
            return min(size, FEWEST_COMPONENTS)
        tasks = self.largest + self.cosine + self.spectrum
        return 2 * self.products * max(tasks, 1)


def check_solver(solver: object) -> Solver:
    """The solver's name.

    Raises:
        ValueError: for another name; lists those there are.
    """
    for name in get_args(Solver):
        if isinstance(solver, str) and solver == name:
            valid: Solver = name
            return valid
    names = get_args(Solver)
    near = meant(solver, names)
    raise ValueError(f"solver must be one of {names}, {near}got {solver!r}.")


def plan(
    needs: Sequence[frozenset[Need]],
    inputs: ScoreInputs,
    settings: Settings,
    *,
    solver: Solver,
    max_memory: float,
    products: int = DEFAULT_PRODUCTS,
    precision: PrecisionName = "exact",
) -> Plan:
    """The cheapest way to measure what some scores need.

    Args:
        needs: of each score.
        inputs: the samples, of which the first counts.
        settings: the prior. A full covariance needs H itself.
        solver: ``"auto"``, or a choice made already.
        max_memory: MiB that the Jacobian of one sample may take.
        products: most products for each task of ``lanczos``.
        precision: ``"dashboard"``: where ``auto`` would look at the whole spectrum of
            more than 256 input elements, it looks at the leading components of the
            prior, if there is one and no perturbation is given.

    Returns:
        The plan. ``auto`` is exact when something needs more than λ_1 and trace, the
        input has at most 4,096 elements and the Jacobian fits ``max_memory``.
    """
    every: frozenset[Need] = frozenset().union(*needs)
    reason = "as asked"
    if solver == "auto":
        solver, reason = _choose(every, inputs, max_memory)
    exact = solver == "exact"
    group, held = Plan.group, int(max_memory * 2**19)
    way: Solver | Literal["components"] = solver
    if reason != "as asked" and precision == "dashboard":
        known = settings.prior is not None and inputs.delta is None
        large = inputs.x[0].numel() > SMALLEST_DASHBOARD
        if known and large and every & {"spectrum", "lambda_min"}:
            way, exact = "components", False
            reason = "precision='dashboard'; precision='exact' looks at everything"
    if solver == "lanczos" and way == "lanczos":
        max_memory, group = _shared_out(inputs, max_memory, products)
    elif way == "components":
        # Tangents come before the few products, and are gone then.
        _, group = _shared_out(inputs, max_memory, _FEW_PRODUCTS)
    return Plan(
        solver=way,
        largest=bool(every & {"lambda_max", "lambda_min", "cosine"}),
        smallest="lambda_min" in every,
        cosine="cosine" in every,
        trace="trace" in every,
        eigenvectors=exact and inputs.delta is not None and "spectrum" in every,
        reason=reason,
        spectrum="spectrum" in every,
        any_noise=any("spectrum" in one and "noise" not in one for one in needs),
        range="range" in every and exact,
        matrix=exact and settings.prior is not None and "spectrum" in every,
        products=products,
        max_memory=max_memory,
        group=group,
        held=held,
    )


def _shared_out(
    inputs: ScoreInputs, max_memory: float, products: int
) -> tuple[float, int]:
    """What is left for tangents beside the rest, MiB, and how many samples go together.

    Says beforehand where not even one sample fits.
    """
    gradients, x, y = inputs.gradients, inputs.x[0], inputs.y[0]
    # Krylov vectors in float64, and half of them again while there come more.
    basis = 12 * x.numel() * (min(products, x.numel()) + 1)
    fixed, most = bytes_of_products(gradients, x, y), max_memory * 2**20
    if fixed + basis > _SLACK * most:
        gradients.note(
            f"one sample takes about {(fixed + basis) / 2**20:.3g} MiB, more than "
            f"max_memory={max_memory:g}: {fixed / 2**20:.3g} for products with its "
            f"Jacobian, the rest for the vectors of products={products}"
        )
    left = max(most - fixed, 0.0)
    # First products, and gradients, of a group take as much for each of its samples.
    group = max(1, int(min(left // basis, most // max(fixed, 1))))
    rest = (left - min(group, len(inputs)) * basis) / 2**20
    return max(rest, min(_TANGENTS, max_memory)), group


def _choose(
    needs: frozenset[Need], inputs: ScoreInputs, max_memory: float
) -> tuple[Solver, str]:
    if not needs - {"noise"}:
        return "lanczos", "no score needs the Jacobian"
    if not needs & {"spectrum", "lambda_min"}:
        return "lanczos", "nothing needs more than λ_1 and the trace"
    gradients, x, y = inputs.gradients, inputs.x[0], inputs.y[0]
    d_x = x.numel()
    if d_x > LARGEST_EXACT:
        return "lanczos", (
            f"{d_x} input elements are more than the {LARGEST_EXACT} up to which the "
            f"whole spectrum is computed by default; solver='exact' forces it"
        )
    try:
        width = columns_stored(gradients, x, y)
    except Exception:  # a bad first sample is dealt with when it is measured
        width = gradients.size
    mib = d_x * width * gradients.dtype.itemsize / 2**20
    if mib > max_memory:
        return "lanczos", (
            f"the Jacobian of one sample takes {mib:.3g} MiB, more than max_memory="
            f"{max_memory:g} MiB; raise it, or force solver='exact'"
        )
    return "exact", "one Gram matrix serves all scores"
