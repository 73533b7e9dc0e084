"""One pass over the samples that serves every score asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from leakwatch.gram import columns_stored
from leakwatch.jacobian import GradientJacobian
from leakwatch.scores.evidence import Evidence
from leakwatch.scores.registry import Score
from leakwatch.scores.result import OK, Status, Value
from leakwatch.spectrum import Spectrum, exact, lanczos, power

_log = logging.getLogger(__name__)

Solver: TypeAlias = Literal["auto", "exact", "lanczos", "power"]

# Beyond this the eigensolver alone (d_x³) takes minutes per sample on a CPU.
_LARGEST_EXACT = 4096
_TRACE_PROBES = 10
_POWER_ITERATIONS = 50
_NAN = float("nan")


@final
@dataclass(frozen=True)
class Plan:
    """What is measured, and how.

    Attributes:
        solver: ``exact``: one dense Gram matrix per sample serves everything;
            ``lanczos``: products only, the upper end of the spectrum; ``power``: the
            papers' recipe for both ends.
        cosine: whether the cosine Hessian's ends are needed.
        trace: whether Σλ is needed.
        smallest: whether the lower ends are needed.
        eigenvectors: whether some formula needs the basis.
        reason: why this solver.
    """

    solver: Solver
    cosine: bool
    trace: bool
    smallest: bool
    eigenvectors: bool
    reason: str


def check_solver(solver: str) -> Solver:
    """The solver's name, or a ValueError that lists those there are."""
    if solver not in get_args(Solver):
        raise ValueError(f"solver must be one of {get_args(Solver)}, got {solver!r}.")
    return solver  # type: ignore[return-value]


def plan(
    scores: Sequence[Score],
    jacobian: GradientJacobian,
    *,
    solver: Solver,
    max_memory: int,
    eigenvectors: bool,
) -> Plan:
    """The cheapest way to measure what these scores need.

    Args:
        scores: the scores.
        jacobian: of the samples.
        solver: ``"auto"``, or a choice made already.
        max_memory: MiB that the Jacobian of one sample may take.
        eigenvectors: whether a perturbation or a full prior covariance is given.

    Returns:
        The plan. ``auto`` is exact when something needs more than λ_1 and trace, the
        input has at most 4,096 elements and the Jacobian fits ``max_memory``.
    """
    needs = set().union(*(score.needs for score in scores))
    whole = bool(needs & {"spectrum", "lambda_min"})
    reason = "as asked"
    if solver == "auto":
        _, _, d_x = jacobian.shape
        solver, reason = "exact", "one Gram matrix serves all scores"
        if not whole:
            solver, reason = "lanczos", "nothing needs more than λ_1 and the trace"
        elif d_x > _LARGEST_EXACT:
            solver = "lanczos"
            reason = (
                f"{d_x} input elements are more than the {_LARGEST_EXACT} up to which "
                f"the whole spectrum is computed by default; solver='exact' forces it"
            )
        else:
            width = columns_stored(jacobian.gradients, jacobian.x[0], jacobian.y[0])
            mib = d_x * width * jacobian.dtype.itemsize // 2**20
            if mib > max_memory:
                solver = "lanczos"
                reason = (
                    f"the Jacobian of one sample takes {mib} MiB, more than max_memory="
                    f"{max_memory} MiB"
                )
    return Plan(
        solver=solver,
        cosine="cosine" in needs,
        trace="trace" in needs,
        smallest="lambda_min" in needs,
        eigenvectors=eigenvectors and solver == "exact",
        reason=reason,
    )


def measure(
    jacobian: GradientJacobian,
    plan: Plan,
    *,
    losses: Tensor,
    pulled: Tensor | None = None,
    offset: Tensor | None = None,
) -> Iterator[Evidence]:
    """Evidence of each sample in turn.

    Args:
        jacobian: of the samples.
        plan: what to measure.
        losses: of the samples, ``(batch,)``.
        pulled: Jᵀδ, ``(batch, d_x)``, float64, when a perturbation is given.
        offset: x − μ, ``(batch, d_x)``, float64, pixel units.

    Yields:
        One :class:`Evidence` per sample, in order. An error while measuring one sample
        becomes the status of its values; the others are unaffected.
    """
    batch = jacobian.shape[0]
    if plan.solver == "exact":
        ends = (_exact(jacobian, i, plan) for i in range(batch))
    else:
        ends = iter(_iterative(jacobian, plan))
    for i, known in enumerate(ends):
        norm = float(jacobian.norm[i])
        finite = norm == norm and norm != float("inf")
        yield Evidence(
            d_x=jacobian.shape[2],
            loss=_finite(float(losses[i]), "loss"),
            grad_norm=_finite(norm, "gradient"),
            lambda_max=known.lambda_max if finite else _NOT_FINITE,
            lambda_min=known.lambda_min if finite else _NOT_FINITE,
            cos_max=known.cos_max if finite else _NOT_FINITE,
            cos_min=known.cos_min if finite else _NOT_FINITE,
            trace=known.trace if finite else _NOT_FINITE,
            eigenvalues=known.eigenvalues,
            floor=known.floor,
            eigenvectors=known.eigenvectors,
            pulled=None if pulled is None else pulled[i],
            offset=None if offset is None else offset[i],
            why_no_spectrum=(
                f"needs the whole spectrum, but the solver is {plan.solver} "
                f"({plan.reason})"
            ),
        )


@dataclass(frozen=True, eq=False)
class _Ends:
    lambda_max: Value
    lambda_min: Value
    cos_max: Value
    cos_min: Value
    trace: Value
    eigenvalues: Tensor | None = None
    floor: float = 0.0
    eigenvectors: Tensor | None = None


_NOT_ASKED = Value(_NAN, Status("not computed", "no score asked for it"))
_NOT_FINITE = Value(
    _NAN, Status("failed", "the gradient of this sample is not finite")
)
_NO_DIRECTION = Value(
    _NAN, Status("undefined", "the gradient vanishes, so it has no direction")
)


def _finite(number: float, what: str) -> Value:
    if number == number and abs(number) != float("inf"):
        return Value(number)
    return Value(_NAN, Status("failed", f"the {what} of this sample is not finite"))


def _exact(jacobian: GradientJacobian, sample: int, plan: Plan) -> _Ends:
    try:
        return _exact_or_raise(jacobian, sample, plan)
    except Exception as error:
        _log.warning("leakwatch could not score a sample: %s", error)
        value = Value(_NAN, Status("failed", _sentence(error)))
        d_x = jacobian.shape[2]
        lost = torch.full((d_x,), _NAN, dtype=torch.float64, device=jacobian.device)
        return _Ends(value, value, value, value, value, lost)


def _exact_or_raise(jacobian: GradientJacobian, sample: int, plan: Plan) -> _Ends:
    _, d_theta, d_x = jacobian.shape
    gram = jacobian.gram(sample)
    scale = float(jacobian.scale[sample])
    eps = torch.finfo(jacobian.dtype).eps
    # With fewer gradient entries than pixels the rest are zero by dimension.
    rank = min(d_theta, d_x)
    found = exact(gram.h, factor_eps=eps, eigenvectors=plan.eigenvectors)
    lam = found.eigenvalues[0].clone()
    lam[rank:] = 0.0
    lam *= scale**2
    floor = float(found.floor[0]) * scale**2
    cos_max = cos_min = _NOT_ASKED
    if plan.cosine:
        norm = float(jacobian.norm[sample])
        if norm == 0:
            cos_max = cos_min = _NO_DIRECTION
        else:
            factor = (scale / norm) ** 2
            h_cos = gram.h - torch.outer(gram.along, gram.along)
            cos = exact(h_cos, factor_eps=eps)
            cos_floor = max(float(cos.floor[0]), float(found.floor[0])) * factor
            values = cos.eigenvalues[0] * factor
            values[max(0, min(d_theta - 1, d_x)) :] = 0.0
            cos_max = _top(float(values[0]), cos)
            cos_min = _bottom(float(values[-1]), cos_floor, d_theta - 1 < d_x)
    vectors = found.eigenvectors
    return _Ends(
        lambda_max=_top(float(lam[0]), found),
        lambda_min=_bottom(float(lam[-1]), floor, d_theta < d_x),
        cos_max=cos_max,
        cos_min=cos_min,
        trace=Value(float(gram.h.diagonal().sum()) * scale**2),
        eigenvalues=lam,
        floor=floor,
        eigenvectors=None if vectors is None else vectors[0],
    )


def _top(number: float, found: Spectrum) -> Value:
    if number == number:
        return Value(number)
    return Value(_NAN, Status("failed", "the eigensolver gave no finite eigenvalue"))


def _bottom(number: float, floor: float, zero_by_dimension: bool) -> Value:
    if zero_by_dimension:
        return Value(0.0)
    if number != number:
        return Value(_NAN, Status("failed", "the eigensolver gave no eigenvalue"))
    if number <= floor:
        return Value(
            _NAN,
            Status(
                "unresolved",
                f"below {floor:.1e}, which this arithmetic can't tell from zero; use "
                f"dtype=torch.float64",
            ),
        )
    return Value(number)


def _iterative(jacobian: GradientJacobian, plan: Plan) -> list[_Ends]:
    batch, d_theta, d_x = jacobian.shape
    try:
        plain = _largest(jacobian, plan, cosine=False)
        cosine = _largest(jacobian, plan, cosine=True) if plan.cosine else None
        trace = _trace(jacobian) if plan.trace else [_NOT_ASKED] * batch
    except Exception as error:
        _log.warning("leakwatch could not score a batch: %s", error)
        value = Value(_NAN, Status("failed", _sentence(error)))
        return [_Ends(value, value, value, value, value)] * batch
    ends = []
    for i in range(batch):
        scale2 = float(jacobian.scale[i]) ** 2
        norm2 = float(jacobian.norm[i]) ** 2
        cos_max = cos_min = _NOT_ASKED
        if cosine is not None and norm2 == 0:
            cos_max = cos_min = _NO_DIRECTION
        elif cosine is not None:
            cos_max = _times(cosine[0][i], scale2 / norm2)
            cos_min = _times(cosine[1][i], scale2 / norm2)
            cos_min = Value(0.0) if d_theta - 1 < d_x else cos_min
        ends.append(
            _Ends(
                lambda_max=_times(plain[0][i], scale2),
                lambda_min=(
                    Value(0.0) if d_theta < d_x else _times(plain[1][i], scale2)
                ),
                cos_max=cos_max,
                cos_min=cos_min,
                trace=trace[i],
            )
        )
    return ends


def _largest(
    jacobian: GradientJacobian, plan: Plan, *, cosine: bool
) -> tuple[list[Value], list[Value]]:
    """λ_1 and, by the papers' recipe, λ_min of H̃ or of the cosine Hessian."""
    operator = jacobian.normal(cosine=cosine)
    if plan.solver == "power":
        found = power(operator, iterations=_POWER_ITERATIONS, smallest=plan.smallest)
        smallest = found.smallest
    else:
        found = lanczos(operator, k=1)
        smallest = None
    top, bottom = [], []
    for i in range(jacobian.shape[0]):
        number, residual = float(found.eigenvalues[i, 0]), float(found.residuals[i, 0])
        status = OK
        if number != number:
            status = Status("failed", "a product with the Jacobian was not finite")
        elif not bool(found.converged[i, 0]):
            status = Status(
                "not converged",
                f"residual {residual:.1e} after {int(found.matvecs[i])} products; a "
                f"lower bound",
            )
        top.append(Value(number, status))
        if smallest is None:
            why = f"{plan.solver} gives only the upper end ({plan.reason})"
            bottom.append(Value(_NAN, Status("not computed", why)))
        else:
            bottom.append(
                Value(
                    float(smallest[i]),
                    Status(
                        "not converged",
                        "shifted power iteration gives an upper bound of λ_min, "
                        "usually 20 to 100 times too large; use solver='exact'",
                    ),
                )
            )
    return top, bottom


def _trace(jacobian: GradientJacobian) -> list[Value]:
    """tr H by Hutchinson: the mean of ‖Jz‖² over random signs z."""
    batch, _, d_x = jacobian.shape
    generator = torch.Generator().manual_seed(0)
    # The same signs for every sample: results don't depend on how samples are grouped.
    signs = torch.randint(0, 2, (_TRACE_PROBES, d_x), generator=generator) * 2.0 - 1.0
    draws = torch.stack(
        [
            jacobian.matvec(z.to(jacobian.device).expand(batch, -1))
            .double()
            .square()
            .sum(1)
            for z in signs
        ]
    )
    mean, error = draws.mean(0), draws.std(0) / _TRACE_PROBES**0.5
    return [
        Value(
            float(m),
            Status(
                "estimated",
                f"from {_TRACE_PROBES} random directions, standard error "
                f"{100 * float(e) / max(float(m), 1e-300):.1f} %",
            ),
        )
        for m, e in zip(mean, error, strict=True)
    ]


def _times(value: Value, factor: float) -> Value:
    return Value(value.number * factor, value.status)


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"
