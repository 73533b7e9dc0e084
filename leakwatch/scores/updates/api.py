r"""How much of each of a client's samples its weight update gives away.

A client that has trained from w_0 to w_T knows its samples X, so it can foresee what an
attacker would find. The attacker of SME (Zhu et al., ICML 2023) takes w_0 − w_T for the
mean gradient g_ŵ(X) = (1/N) Σ ∇ℓ(ŵ; x_i) at ŵ = αw_0 + (1−α)w_T, up to a factor. Around
the true samples that gradient moves by J = ∂g_ŵ/∂X, with a block J_i/N for each sample,
and the shared vector s(w_0 − w_T) differs from g_ŵ(X) by the *mismatch*
δ = s(w_0 − w_T) − g_ŵ(X): what I²F calls the perturbation of the gradient, here made by
the local steps themselves. So with α at its best, to lowest order:

- LAVP (Hong et al., AAAI 2024) of a block: ends of the spectra of H_i = J_iᵀJ_i/N² and,
  for attackers who match directions, (H_i − (J_iᵀĝ/N)(J_iᵀĝ/N)ᵀ)/‖g_ŵ(X)‖² with
  ĝ = g_ŵ(X)/‖g_ŵ(X)‖; of all samples: the same with J. The true Hessians of the
  distances at X have further terms, of the order of δ.
- I²F (Zhang et al., NeurIPS 2023): ‖(H_i + εI)⁻¹(J_i/N)ᵀδ‖, and its Bayesian form for
  this δ, ‖(H_i + s²/R²)⁻¹((J_i/N)ᵀδ − s²/R² (x_i − μ))‖, the error in x_i of the most
  probable image when the other samples are known. s is δ's energy per coordinate,
  √(‖δ‖²/d_θ), unless ``noise_std`` says otherwise.
- The joint Bayesian form: the same with J and H = JᵀJ, and of its error the part in
  x_i. Others unknown, x_i is harder to recover: on average over δ the error of the
  block is a lower bound.

δ is no Gaussian noise: it comes from the samples and lies partly in the range of J.
Like all of I²F the prediction holds for an attacker who comes near X; whether an attack
gets there is another question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.checks import check_function, check_number, check_samples
from leakwatch.derivatives import Criterion, Prepare
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.normalization import Channels, check_normalization
from leakwatch.scores.api import (
    DEFAULT_MAX_MEMORY,
    Scoring,
    input_scale_of,
    offset_of,
)
from leakwatch.scores.registry import Score, resolve
from leakwatch.scores.updates.client import Effort
from leakwatch.scores.updates.evaluate import check_clients, evaluate_update
from leakwatch.scores.updates.result import UpdateScores
from leakwatch.weight_update import WeightUpdate

__all__ = ["score_update", "scores_of_updates"]


def scores_of_updates(names: str | Score | Iterable[str | Score]) -> tuple[Score, ...]:
    """Scores to compute of an update.

    Those that need the range of pixels, which is not counted here, are left out where
    only a group among others asks for them.

    Args:
        names: as for :func:`leakwatch.scores.registry.resolve`.

    Raises:
        ValueError: for an unknown name or an empty list.

    Example:
        >>> "i2f_range_psnr" in [s.name for s in scores_of_updates("i2f")]
        False
        >>> [s.name for s in scores_of_updates(["loss", "i2f_range_psnr"])]
        ['loss', 'i2f_range_psnr']
    """
    asked = [names] if isinstance(names, str | Score) else list(names)
    every = resolve(asked)
    counted = [s for s in every if "range" not in s.needs or {s, s.name} & {*asked}]
    return tuple(counted) or every


def score_update(
    module: nn.Module,
    x: Float[Tensor, "clients N ..."],
    y: Int[Tensor, "clients N"],
    update: WeightUpdate,
    scores: str | Score | Sequence[str | Score] = ("lavp", "i2f"),
    *,
    alpha: float | None = None,
    noise_std: float | None = None,
    epsilon: float = 0.0,
    prior_std: float | None = None,
    prior_mean: Float[Tensor, "*sample"] | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float = 1.0,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    parameters: ParameterFilter | None = None,
    dtype: torch.dtype = torch.float32,
    blocks: bool = True,
    joint: bool = True,
    max_memory: float = DEFAULT_MAX_MEMORY,
    products: int = 150,
) -> UpdateScores:
    """Leakage scores of each sample behind weight updates, without attacking.

    The mathematics is in :mod:`leakwatch.scores.updates.api`. A client that knows its
    own samples calls this before it shares anything.

    Args:
        module: the network that the clients trained; its weights don't count, they
            come from ``update``, but its buffers and frozen weights do. Left as it was.
        x: the clients' samples, network inputs, or what ``prepare`` takes.
        y: their labels.
        update: w_0 and each client's w_T.
        scores: names or groups of scores, as for :func:`leakwatch.score`.
        alpha: α of the surrogate αw_0 + (1−α)w_T in [0, 1], the same for all clients.
            Default: for each client the one at which its mean gradient is most similar
            to its update.
        noise_std: s of the Bayesian scores, units of the gradient at the surrogate.
            Default: the mismatch's energy per coordinate, of each client.
        epsilon: damping of I²F, in units of the eigenvalues of H_i = J_iᵀJ_i/N².
        prior_std: R, as for :func:`leakwatch.score`, like all that follow.
        prior_mean: μ in pixel units.
        mean: per channel, of the normalisation.
        std: per channel, of the normalisation.
        data_range: peak of the PSNR in pixel units.
        criterion: one loss per sample; a client's loss is their mean.
        prepare: what became of a batch of inputs before the network got it, a
            differentiable function; scores are of what goes into it.
        parameters: which of them the update holds, if not all that are trained.
        dtype: float32 or float64, of scores and Jacobian, whatever the module's own;
            α and the mismatch are found in float64.
        blocks: whether to score each sample as if the others were known, one Gram
            matrix each.
        joint: whether to score a client's samples together, by products, and dense
            where N·d_x is at most 4,096 and J fits ``max_memory``.
        max_memory: MiB that may be kept of a Jacobian.
        products: most products with J and Jᵀ for each matrix-free task.

    Returns:
        The scores, each with a status for every sample of every client, and what the
        surrogate was.

    Raises:
        TypeError: if ``update`` is no :class:`WeightUpdate`, ``x`` or ``y`` no tensor,
            ``alpha`` no number, ``prepare`` no function.
        ValueError: for bad arguments; if samples and update don't go together. What is
            wrong with a sample is said with its client.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(6, 3))
        >>> w = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        >>> update = WeightUpdate(w, (w + 0.1 * torch.randn(2, 51)), None, (4,), 5)
        >>> x, y = torch.rand(2, 5, 4), torch.randint(0, 3, (2, 5))
        >>> result = score_update(net, x, y, update)
        >>> result["i2f_bayes_psnr"].shape, result.alpha.shape
        (torch.Size([2, 5]), torch.Size([2]))
    """
    if not isinstance(update, WeightUpdate):
        raise TypeError(
            f"update must be a leakwatch.weight_update.WeightUpdate, got a "
            f"{type(update).__name__}."
        )
    check_samples(x, y)
    check_function("prepare", prepare, "prepare(x) → network inputs")
    check_number("data_range", data_range, example=1.0)
    flat = x.flatten(0, 1) if x.ndim > 1 else x
    mean, std = check_normalization(mean, std, flat, data_range)
    scoring = Scoring(
        scores_of_updates(scores),
        noise_std=noise_std,
        epsilon=epsilon,
        prior_std=prior_std,
        data_range=data_range,
        criterion=criterion,
        prepare=prepare,
        parameters=parameters,
        dtype=dtype,
        max_memory=max_memory,
        products=products,
    )
    gradients = scoring.gradient_map(module)
    device = next(gradients.module.parameters()).device
    x, y = x.detach().to(device), y.to(device)
    check_clients(gradients, x, y, update)
    pixels = offset_of(x.flatten(0, 1), mean, std, prior_mean, data_range)
    return evaluate_update(
        gradients,
        x,
        y,
        update,
        scoring.scores,
        scoring.settings(tuple(x.shape[2:])),
        alpha=alpha,
        offset=pixels.view(*x.shape[:2], -1),
        input_scale=input_scale_of(x.flatten(0, 1), std),
        effort=Effort(blocks, joint, max_memory, products),
    )
