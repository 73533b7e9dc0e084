"""Label inference on networks whose last layer's gradient is known in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakwatch.attacks import SharedGradient, infer_labels
from leakwatch.attacks.labels.counts import count_labels, present_classes
from leakwatch.attacks.labels.infer import label_accuracy
from leakwatch.attacks.labels.last_layer import find_head
from leakwatch.derivatives import GradientMap, UnsupportedModuleError

CLASSES = 6


def network(
    bias: bool = True, activation: type[nn.Module] = nn.Sigmoid, gain: float = 1.0
) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16, 20),
            activation(),
            nn.Linear(20, CLASSES, bias=bias),
        )
    with torch.no_grad():
        net[3].weight *= gain
    return net


def samples(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 4, 4, generator=generator)


def shared_of(
    net: nn.Module, y: Tensor, images: int, **options: float
) -> tuple[GradientMap, SharedGradient]:
    gradients = GradientMap(net, dtype=torch.float64)
    shared = SharedGradient.of(
        gradients,
        samples(len(y)).double(),
        y,
        images=images,
        generator=torch.Generator().manual_seed(1),
        **options,
    )
    return gradients, shared.without_labels()


def test_head_reads_the_layer_out_of_the_flat_gradient() -> None:
    net = network(activation=nn.ReLU)
    y = torch.tensor([4, 1, 1])
    gradients, shared = shared_of(net, y, 3)
    head = find_head(gradients, shared.sample_shape)
    g = head.read(shared.gradient[0])
    x = samples(3).double()
    twin = network(activation=nn.ReLU).double()
    features = twin[:3](x)
    error = twin(x).softmax(1) - nn.functional.one_hot(y, CLASSES)
    torch.testing.assert_close(g.bias, error.mean(0).detach(), rtol=1e-10, atol=1e-14)
    weight = (error.T @ features / 3).detach()
    torch.testing.assert_close(g.weight, weight, rtol=1e-10, atol=1e-14)
    assert (head.name, head.classes, head.has_bias, head.nonnegative) == (
        "3",
        CLASSES,
        True,
        True,
    )
    torch.testing.assert_close(
        head.weight, twin[3].weight.detach(), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("gain", [0.1, 1.0, 20.0])
def test_sign_rule_finds_every_label(
    bias: bool, activation: type[nn.Module], gain: float
) -> None:
    y = torch.arange(24) % CLASSES
    gradients, shared = shared_of(network(bias, activation, gain), y, 1)
    found = infer_labels(shared, gradients)
    assert found.method == "sign"
    torch.testing.assert_close(found.labels[:, 0], y)
    assert {s.word for s in found.status} == {"ok"}


def test_sign_rule_of_two_classes_without_bias_needs_features_of_one_sign() -> None:
    def two(activation: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Flatten(), nn.Linear(16, 9), activation, nn.Linear(9, 2, bias=False)
            )

    y = torch.arange(10) % 2
    gradients, shared = shared_of(two(nn.ReLU()), y, 1)
    found = infer_labels(shared, gradients)
    torch.testing.assert_close(found.labels[:, 0], y)
    assert {s.word for s in found.status} == {"ok"}
    gradients, shared = shared_of(two(nn.Tanh()), y, 1)
    assert {s.word for s in infer_labels(shared, gradients).status} == {"estimated"}


def test_sign_rule_says_when_it_sees_more_than_one_sample() -> None:
    gradients, mixed = shared_of(network(), torch.tensor([0, 3]), 2)
    single = SharedGradient(mixed.gradient, None, mixed.sample_shape)
    found = infer_labels(single, gradients)
    assert found.labels.item() in (0, 3)
    assert found.status[0].word == "estimated"
    assert "2 classes have a negative gradient" in found.status[0].reason


@pytest.mark.parametrize("gain", [0.3, 5.0])
def test_minimum_rule_finds_labels_that_do_not_repeat(gain: float) -> None:
    y = torch.tensor([0, 3, 5, 1, 2, 4, 5, 0, 1])
    gradients, shared = shared_of(network(gain=gain), y, 3)
    found = infer_labels(shared, gradients, "minimum")
    torch.testing.assert_close(found.labels, y.view(3, 3).sort(1).values)
    assert {s.word for s in found.status} == {"ok"}


def test_minimum_rule_is_not_sure_of_repeats() -> None:
    gradients, shared = shared_of(network(), torch.tensor([2, 2, 5]), 3)
    found = infer_labels(shared, gradients, "minimum")
    assert {2, 5} <= set(found.labels[0].tolist())
    assert found.status[0].word == "estimated"
    assert "2 of 3 labels are certain" in found.status[0].reason


@pytest.mark.parametrize("bias", [True, False])
def test_counting_is_exact_where_the_softmax_hardly_varies(bias: bool) -> None:
    y = torch.tensor([2, 2, 2, 5, 0, 0, 1, 1, 1, 1, 4, 3, 3, 3, 3, 3])
    gradients, shared = shared_of(network(bias, gain=0.02), y, 8)
    found = infer_labels(shared, gradients)
    assert found.method == "count"
    torch.testing.assert_close(found.labels, y.view(2, 8).sort(1).values)
    assert {s.word for s in found.status} == {"ok" if bias else "estimated"}


class Classes(nn.Module):
    """Features that are the same for all samples of a class, read off the input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(CLASSES, CLASSES)
        with torch.no_grad():
            self.fc.weight.copy_(2 * torch.eye(CLASSES) + 0.1)
            self.fc.bias.copy_(torch.linspace(-0.5, 0.5, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.relu())
        return logits


@pytest.mark.parametrize(
    "counts", [[3, 0, 1, 0, 2, 0], [0, 0, 0, 6, 0, 0], [1, 1, 1, 1, 1, 1]]
)
def test_counting_is_exact_where_samples_of_a_class_are_alike(
    counts: list[int],
) -> None:
    net = Classes()
    y = torch.arange(CLASSES).repeat_interleave(torch.tensor(counts))
    x = torch.eye(CLASSES, dtype=torch.float64)[y] + 0.05
    gradients = GradientMap(net, dtype=torch.float64)
    shared = SharedGradient.of(gradients, x, y, images=6).without_labels()
    head = find_head(gradients, (CLASSES,))
    assert head.softmax_std > 0.1
    found, status = count_labels(head, head.read(shared.gradient[0]), 6)
    assert found.tolist() == counts
    assert status.word == ("ok" if max(counts) == 1 else "estimated")
    assert infer_labels(shared, gradients).labels[0].tolist() == y.tolist()


@pytest.mark.parametrize("gain", [1.0, 30.0])
def test_certain_classes_are_in_the_batch(gain: float) -> None:
    y = torch.randint(CLASSES, (60,), generator=torch.Generator().manual_seed(0))
    gradients, shared = shared_of(network(gain=gain), y, 3)
    head = find_head(gradients, shared.sample_shape)
    for gradient, labels in zip(shared.gradient, y.view(-1, 3), strict=True):
        certain = present_classes(head, head.read(gradient))
        assert set(certain.nonzero().flatten().tolist()) <= set(labels.tolist())
        assert certain.any()


def test_noise_makes_no_class_certain() -> None:
    y = torch.tensor([1, 1, 4])
    gradients, shared = shared_of(network(), y, 3, noise_std=0.2)
    head = find_head(gradients, shared.sample_shape)
    g = head.read(shared.gradient[0])
    assert not present_classes(head, g, noise_std=0.2).any()
    # Its size is seen in the gradient, whose entries add up to 0 without it.
    assert g.noise == pytest.approx(0.2, rel=0.5)
    assert not present_classes(head, g).any()
    found = infer_labels(shared, gradients)
    assert found.labels.shape == (1, 3)


@pytest.mark.parametrize("told", [True, False])
def test_sign_rule_says_when_noise_may_have_hidden_the_label(told: bool) -> None:
    y = torch.arange(12) % CLASSES
    for noise_std, word in ((1e-3, "ok"), (1.0, "estimated")):
        gradients, shared = shared_of(network(), y, 1, noise_std=noise_std)
        if not told:
            shared = SharedGradient(shared.gradient, None, shared.sample_shape)
        found = infer_labels(shared, gradients)
        words = [s.word for s in found.status]
        assert words.count(word) >= 11, words
        if word == "ok":
            torch.testing.assert_close(found.labels[:, 0], y)


def test_counts_add_up_and_labels_ascend() -> None:
    y = torch.randint(CLASSES, (60,), generator=torch.Generator().manual_seed(3))
    gradients, shared = shared_of(network(gain=30.0), y, 12)
    found = infer_labels(shared, gradients)
    assert found.labels.shape == (5, 12)
    torch.testing.assert_close(found.labels, found.labels.sort(1).values)
    accuracy = label_accuracy(found.labels, y.view(5, 12))
    # Guessing the most frequent class finds a third of 12 labels from 6 classes.
    assert accuracy.mean() > 0.6


def test_results_are_reproducible_and_move_no_random_stream() -> None:
    gradients, shared = shared_of(network(gain=5.0), torch.arange(12) % CLASSES, 4)
    gradients(samples(2).double(), torch.tensor([0, 1]))
    before = torch.get_rng_state()
    first, again = (infer_labels(shared, gradients) for _ in range(2))
    torch.testing.assert_close(first.labels, again.labels)
    torch.testing.assert_close(torch.get_rng_state(), before)


def test_inferring_leaves_the_module_as_it_was() -> None:
    net = network().train()
    gradients, shared = shared_of(net, torch.tensor([1]), 1)
    infer_labels(shared, gradients)
    assert all(m.training for m in net.modules())
    assert not any(m._forward_hooks for m in net.modules())


def test_zero_gradients_fail() -> None:
    gradients, shared = shared_of(network(), torch.tensor([1]), 1)
    nothing = SharedGradient(shared.gradient * 0, None, shared.sample_shape)
    assert infer_labels(nothing, gradients).status[0].word == "failed"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x.flatten(1)).relu())
        return out


def frozen() -> nn.Module:
    net = network()
    net[3].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (nn.Sequential(network(), nn.Softmax(1)), "no softmax after it"),
        (nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), "none of them"),
        (frozen(), "is frozen or shared under another name"),
        (Tied(), "pass the labels"),
    ],
)
def test_networks_without_such_a_layer_are_refused(net: nn.Module, why: str) -> None:
    gradients, shared = shared_of(net, torch.tensor([1]), 1)
    with pytest.raises(UnsupportedModuleError, match=why):
        infer_labels(shared, gradients)


def test_arguments_are_checked() -> None:
    gradients, shared = shared_of(network(), torch.arange(14) % CLASSES, 7)
    with pytest.raises(ValueError, match="choose from auto, sign, minimum, count"):
        infer_labels(shared, gradients, "argmin")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sign rule is for one image"):
        infer_labels(shared, gradients, "sign")
    with pytest.raises(ValueError, match="7 images and 6 classes"):
        infer_labels(shared, gradients, "minimum")


def test_accuracy_counts_repeats() -> None:
    true = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3]])
    inferred = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]])
    assert label_accuracy(inferred, true).tolist() == [0.75, 0.25]
