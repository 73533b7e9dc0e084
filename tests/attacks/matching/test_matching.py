from __future__ import annotations

import itertools
import logging

import pytest
import torch
from cases import CASES, CLASSES, Case
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.problems import plain_gradient, plain_objective
from leakwatch.attacks import SharedGradient
from leakwatch.attacks.matching.objective import MatchingProblem, PathName
from leakwatch.attacks.matching.priors import total_variation
from leakwatch.derivatives import GradientMap, UnsupportedModuleError

BY_NAME = {case.name: case for case in CASES}
DISTANCES = ("l2", "cosine", "l1")
LAYERWISE = ("lenet", "mlp", "mlp-relu", "batchnorm", "groupnorm", "one-dimensional")


def problem_of(
    case: Case, images: int, distance: str, path: PathName = "auto", targets: int = 2
) -> tuple[MatchingProblem, Tensor, Tensor]:
    """Targets from the case's samples, and the samples grouped by target."""
    x, y = case.data(targets * images)
    gradients = GradientMap(case.module(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y, images=images)
    problem = MatchingProblem(gradients, shared, distance, path=path)
    assert shared.labels is not None
    return problem, x.view(targets, images, *case.shape), shared.labels


def guesses(x: Tensor, attacks: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(attacks, *x.shape[1:], generator=generator, dtype=x.dtype)


@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_every_network_gives_the_values_of_a_sequential_attack(
    case: Case,
) -> None:
    problem, truth, labels = problem_of(case, 1, "l2")
    x, targets = guesses(truth, 3), torch.tensor([0, 1, 0])
    with problem.opened() as matcher:
        found = matcher.evaluate(x, labels[targets], targets)
        again = matcher.evaluate(x, labels[targets], targets)
    torch.testing.assert_close(again.distance, found.distance, rtol=1e-12, atol=1e-14)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            for i, t in enumerate(targets):
                target = problem.shared.gradient[t]
                value, slope = plain_objective(
                    case.reference(), "l2", x[i], labels[t], target
                )
                torch.testing.assert_close(
                    found.distance[i], value, rtol=1e-9, atol=1e-12
                )
                torch.testing.assert_close(
                    found.gradient[i], slope, rtol=1e-9, atol=1e-10
                )
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@pytest.mark.parametrize("path", ["layerwise", "vmap", "loop"])
@pytest.mark.parametrize("name", LAYERWISE)
def test_all_paths_distances_and_batch_sizes_agree_with_the_sequential_attack(
    name: str, path: PathName
) -> None:
    case, targets = BY_NAME[name], torch.tensor([1, 0, 1])
    for images, distance in itertools.product((1, 3), DISTANCES):
        problem, truth, labels = problem_of(case, images, distance, path)
        x = guesses(truth, 3)
        with problem.opened() as matcher:
            found = matcher.evaluate(x, labels[targets], targets)
            assert matcher.path.startswith(path)
        for i, t in enumerate(targets):
            value, slope = plain_objective(
                case.reference(), distance, x[i], labels[t], problem.shared.gradient[t]
            )
            torch.testing.assert_close(found.distance[i], value, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(found.gradient[i], slope, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", ["lenet", "mlp-relu", "batchnorm", "lstm"])
def test_at_the_true_input_the_loss_is_zero_to_rounding(
    name: str, distance: str, images: int
) -> None:
    problem, truth, labels = problem_of(BY_NAME[name], images, distance)
    with problem.opened() as matcher:
        found = matcher.evaluate(truth, labels, torch.arange(2))
        g = matcher.gradient(truth, labels)
    size = problem.shared.gradient.norm(dim=1)
    floor = {"l2": 1e-28 * size**2, "cosine": torch.full((2,), 1e-28)}
    atol = floor.get(distance, 1e-13 * problem.shared.gradient.abs().sum(1))
    assert bool((found.distance <= atol).all())
    torch.testing.assert_close(g, problem.shared.gradient, rtol=1e-12, atol=1e-14)
    assert bool(torch.isfinite(found.gradient).all())


@pytest.mark.parametrize("distance", DISTANCES)
def test_confident_samples_keep_their_digits_in_float32(distance: str) -> None:
    net = BY_NAME["lenet"].module()
    with torch.no_grad():
        net[-1].bias[0] += 40.0  # a loss of about 1e-17 for class 0
    x, _ = BY_NAME["lenet"].data(2)
    y = torch.zeros(2, dtype=torch.long)
    values, slopes = [], []
    for dtype in (torch.float32, torch.float64):
        gradients = GradientMap(net, dtype=dtype)
        shared = SharedGradient.of(gradients, x.to(dtype), y)
        problem = MatchingProblem(gradients, shared, distance, relative=True)
        with problem.opened() as matcher:
            found = matcher.evaluate((x + 0.3).to(dtype)[:, None], y[:, None], y + 0)
        values.append(found.objective.double())
        slopes.append(found.gradient.double())
    assert bool((values[1] > 1e-6).all())
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=0.0)
    torch.testing.assert_close(
        slopes[0], slopes[1], rtol=1e-2, atol=1e-3 * float(slopes[1].abs().max())
    )


def test_attacks_on_transformers_run_together() -> None:
    """Layer normalisation under vmap, of which Torch's second derivative is wrong."""
    path, found = evaluate_once(problem_of(BY_NAME["transformer"], 1, "l2", "vmap"))
    _, expected = evaluate_once(problem_of(BY_NAME["transformer"], 1, "l2", "loop"))
    assert path == "vmap"
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_networks_that_mix_their_batch_are_not_run_as_one() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x - x.mean(0) + x)

    case = Case("centred", Centred, shape=(5,))
    with pytest.raises(UnsupportedModuleError, match="differ from the loop's"):
        evaluate_once(problem_of(case, 1, "l2", "layerwise"))
    path, found = evaluate_once(problem_of(case, 1, "l2", "auto"))
    assert path == "vmap"
    _, expected = evaluate_once(problem_of(case, 1, "l2", "loop"))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Branching(nn.Module):
    """Goes another way for bright images."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h.sin() if float(x.mean()) > 0.5 else h)


def test_images_may_take_different_ways_through_a_network() -> None:
    """Neither what else is attacked nor where it was tried may choose the way."""
    torch.manual_seed(0)
    x, y = torch.rand(4, 5).double() / 2, torch.arange(4) % CLASSES
    x[2] += 0.5
    net = Branching().double()
    shared = SharedGradient.of(GradientMap(net, dtype=torch.float64), x, y)
    problem = MatchingProblem(GradientMap(net, dtype=torch.float64), shared, "l2")
    with problem.opened() as matcher:
        found = matcher.evaluate(x[:, None], y[:, None], torch.arange(4))
    assert matcher.path == "loop"
    assert float(found.objective.abs().max()) < 1e-28


def evaluate_once(made: tuple[MatchingProblem, Tensor, Tensor]) -> tuple[str, Tensor]:
    problem, truth, labels = made
    with problem.opened() as matcher:
        found = matcher.evaluate(guesses(truth, 2), labels, torch.arange(2))
        return matcher.path, found.gradient


def test_modules_that_only_the_loop_can_take_say_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "leakwatch"):
        path, _ = evaluate_once(problem_of(BY_NAME["lstm"], 1, "l2"))
    assert path == "loop"
    assert caplog.text.count("sample by sample") <= 2  # the gradient map says it too


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("path", ["layerwise", "vmap"])
def test_layer_weights_weigh_the_parts_of_the_distance(
    path: PathName, distance: str
) -> None:
    case = BY_NAME["lenet"]
    module = case.module()
    names = [name for name, _ in module.named_parameters()]
    numbers = [0.5, 0.0, 2.0, 1.0, 1.0, 3.0]
    gradients = GradientMap(module, dtype=torch.float64)
    x, y = case.data(2)
    shared = SharedGradient.of(gradients, x, y)
    guess = guesses(x[:, None], 2)
    found = []
    for given in (numbers, dict(zip(names, numbers, strict=True))):
        problem = MatchingProblem(
            gradients, shared, distance, layer_weights=given, path=path
        )
        with problem.opened() as matcher:
            found.append(matcher.evaluate(guess, y[:, None], torch.arange(2)))
    torch.testing.assert_close(
        found[0].gradient, found[1].gradient, rtol=1e-9, atol=1e-15
    )
    power = 1.0 if distance == "l1" else 0.5
    weight = torch.cat(
        [
            torch.full((p.numel(),), n, dtype=torch.float64)
            for n, p in zip(numbers, module.parameters(), strict=True)
        ]
    )
    root = weight**power
    for i in range(2):
        leaf = guess[i].clone().requires_grad_()
        g = plain_gradient(case.reference(), leaf, y[i : i + 1]) * root
        target = shared.gradient[i] * root
        if distance == "l2":
            value = 0.5 * (g - target).square().sum()
        elif distance == "l1":
            value = (g - target).abs().sum()
        else:
            value = 0.5 * (g / g.norm() - target / target.norm()).square().sum()
        torch.testing.assert_close(found[0].distance[i], value.detach())
        slope = torch.autograd.grad(value, leaf)[0]
        torch.testing.assert_close(found[0].gradient[i], slope, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("path", ["layerwise", "vmap", "loop"])
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("granted", [False, True])
def test_the_batchnorm_prior_adds_what_plain_autograd_adds(
    path: PathName, images: int, granted: bool
) -> None:
    case = BY_NAME["batchnorm"]
    x, y = case.data(2 * images)
    gradients = GradientMap(case.module(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y, images=images)
    own = [(torch.rand(2, 3).double(), torch.rand(2, 3).double()) for _ in range(2)]
    problem = MatchingProblem(
        gradients,
        shared,
        "cosine",
        batch_norm=0.3,
        first_layer=10.0,
        statistics=own if granted else None,
        path=path,
    )
    guess = guesses(x.view(2, images, *case.shape), 2)
    assert shared.labels is not None
    with problem.opened() as matcher:
        found = matcher.evaluate(guess, shared.labels, torch.arange(2))
    for i in range(2):
        module = case.reference()
        seen: list[Tensor] = []
        layers = [module.bn1, module.bn2]

        def note(_: object, args: tuple[Tensor], into: list[Tensor] = seen) -> None:
            into.append(args[0])

        for layer in layers:
            layer.register_forward_pre_hook(note)
        leaf = guess[i].clone().requires_grad_()
        module(leaf.clone())
        term = torch.zeros((), dtype=torch.float64)
        for k, (layer, a) in enumerate(zip(layers, seen, strict=True)):
            mean = own[k][0][i] if granted else layer.running_mean
            var = own[k][1][i] if granted else layer.running_var
            here = (a.mean((0, 2, 3)) - mean).norm()
            here = here + (a.var((0, 2, 3), unbiased=False) - var).norm()
            term = term + (10.0 if k == 0 else 1.0) * here
        value, slope = plain_objective(
            case.reference(), "cosine", guess[i], shared.labels[i], shared.gradient[i]
        )
        both = slope + 0.3 * torch.autograd.grad(term, leaf)[0]
        torch.testing.assert_close(
            found.objective[i], value + 0.3 * term.detach(), rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(found.distance[i], value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.gradient[i], both, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", ["layerwise", "vmap", "loop"])
def test_soft_targets_are_differentiated_too(path: PathName) -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(2)
    gradients = GradientMap(case.module(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y)
    problem = MatchingProblem(gradients, shared, "l2", soft_targets=True, path=path)
    guess = guesses(x[:, None], 2)
    p = torch.rand(2, 1, CLASSES, dtype=torch.float64).softmax(-1)
    with problem.opened() as matcher:
        found = matcher.evaluate(guess, p, torch.arange(2))
        assert matcher.classes(x[0]) == CLASSES
    assert found.target_gradient is not None
    for i in range(2):
        leaf, target = guess[i].clone().requires_grad_(), p[i].clone().requires_grad_()
        g = plain_gradient(case.reference(), leaf, target)
        value = 0.5 * (g - shared.gradient[i]).square().sum()
        by_x, by_y = torch.autograd.grad(value, (leaf, target))
        torch.testing.assert_close(found.distance[i], value.detach())
        torch.testing.assert_close(found.gradient[i], by_x, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(
            found.target_gradient[i], by_y, rtol=1e-9, atol=1e-13
        )


def test_chunks_change_nothing() -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(5)
    gradients = GradientMap(case.module(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y)
    guess = guesses(x[:, None], 5)
    found = []
    for size in (5, 2, 1):
        problem = MatchingProblem(gradients, shared, "cosine", chunk_size=size)
        with problem.opened() as matcher:
            found.append(matcher.evaluate(guess, y[:, None], torch.arange(5)))
    for other in found[1:]:
        torch.testing.assert_close(
            other.gradient, found[0].gradient, rtol=1e-10, atol=1e-14
        )


def test_a_zero_gradient_is_no_trouble() -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(2)
    gradients = GradientMap(case.module(), dtype=torch.float64)
    shared = SharedGradient(
        torch.zeros(2, gradients.size, dtype=torch.float64), y[:, None], case.shape
    )
    for distance in DISTANCES:
        problem = MatchingProblem(gradients, shared, distance, relative=True)
        with problem.opened() as matcher:
            found = matcher.evaluate(x[:, None], y[:, None], torch.arange(2))
        assert bool(torch.isfinite(found.objective).all())
        assert bool(torch.isfinite(found.gradient).all())


def test_bad_arguments_are_refused() -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(2)
    gradients = GradientMap(case.module(), dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y)
    with pytest.raises(ValueError, match="unknown distance 'l3'"):
        MatchingProblem(gradients, shared, "l3")
    with pytest.raises(ValueError, match="path must be"):
        MatchingProblem(gradients, shared, path="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another model"):
        MatchingProblem(GradientMap(nn.Linear(3, 2)), shared)
    own = GradientMap(nn.Linear(3, 2), lambda m, x, y: m(x).square().sum(1))
    with pytest.raises(ValueError, match="default criterion"):
        MatchingProblem(
            own,
            SharedGradient(torch.ones(1, 8), None, (3,)),
            soft_targets=True,
        )
    guess, targets = x[:, None], torch.arange(2)
    for weights in ({"nonsense": 1.0}, [1.0, 2.0], [-1.0] * 6):
        problem = MatchingProblem(gradients, shared, layer_weights=weights)
        with (
            pytest.raises(ValueError, match="layer_weights"),
            problem.opened() as matcher,
        ):
            matcher.evaluate(guess, y[:, None], targets)
    problem = MatchingProblem(gradients, shared, batch_norm=1.0)
    with pytest.raises(ValueError, match="BatchNorm layers"), problem.opened() as m:
        m.evaluate(guess, y[:, None], targets)


@pytest.mark.parametrize("shape", [(3, 2, 1, 4, 5), (2, 1, 3, 6, 1)])
def test_total_variation_and_its_derivative(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.manual_seed(0))
    leaf = x.clone().requires_grad_()
    expected = torch.zeros(len(x), dtype=torch.float64)
    for dim in (-1, -2):
        if leaf.shape[dim] > 1:
            expected = expected + leaf.diff(dim=dim).abs().flatten(1).mean(1)
    gradient = torch.ones_like(x)
    value = total_variation(x, gradient, factor=0.7)
    torch.testing.assert_close(value, expected.detach())
    slope = torch.autograd.grad(expected.sum(), leaf)[0]
    torch.testing.assert_close(gradient, 1 + 0.7 * slope)


def test_total_variation_needs_images() -> None:
    with pytest.raises(ValueError, match="tv=0"):
        total_variation(torch.rand(2, 1, 5))
