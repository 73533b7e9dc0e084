"""SME and its baseline against the algorithm written out with torch.optim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakwatch import LocalTraining, WeightUpdate
from leakwatch.attacks import (
    FirstOrder,
    PixelScale,
    SharedGradient,
    Start,
    SurrogateAttack,
    attack_update,
)
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.matching.selection import UpdatePathName, opened
from leakwatch.attacks.updates import presets
from leakwatch.attacks.updates.surrogate import SurrogateObjective
from leakwatch.derivatives import GradientMap
from leakwatch.quality import align

from ..update_problems import (
    clients,
    cosine_distance,
    gradient,
    small_cnn,
    update_of,
    variation,
)

HOW = LocalTraining(epochs=3, batch_size=2, lr=0.5)
PIXELS = PixelScale([0.4], [0.3])


def problem(count: int = 3, images: int = 4) -> tuple[nn.Module, WeightUpdate]:
    net = small_cnn()
    x, y = clients(count, images)
    return net, update_of(net, PIXELS.to_input(x), y, HOW)


@pytest.mark.parametrize("path", ["layers", "plain"])
def test_gradients_in_images_and_alpha_are_those_of_double_backward(
    path: UpdatePathName,
) -> None:
    net, update = problem()
    gradients = GradientMap(net, dtype=torch.float64)
    torch.manual_seed(0)
    x = torch.randn(3, 4, 1, 6, 6, dtype=torch.float64)
    alpha = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    rows = torch.tensor([2, 0, 1])
    assert update.labels is not None
    with opened(gradients, path) as path_for:
        objective = SurrogateObjective(
            gradients, update, update.labels, path_for, Priors(tv=0.1), every=1
        )
        found = objective(x, alpha, rows, 0)
    assert found.slope is not None
    for i, client in enumerate(rows.tolist()):
        xi, ai = x[i].clone().requires_grad_(), alpha[i].clone().requires_grad_()
        w = ai * update.initial + (1 - ai) * update.final[client]
        g = gradient(net, w, xi, update.labels[client])
        d = cosine_distance(g, update.difference[client])
        total = d + 0.1 * variation(xi)
        image, slope = torch.autograd.grad(total, [xi, ai])
        close = {"rtol": 1e-9, "atol": 1e-13}
        torch.testing.assert_close(found.distance[i], d.detach(), **close)
        torch.testing.assert_close(found.objective[i], total.detach(), **close)
        torch.testing.assert_close(found.gradient[i], image, **close)
        torch.testing.assert_close(found.slope[i], slope, **close)


def written_out(
    net: nn.Module, update: WeightUpdate, client: int, x: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with the published optimiser, box and decay; the last step."""
    assert update.labels is not None
    x = PIXELS.clamp(x).clone().requires_grad_()
    alpha = torch.tensor(0.5, dtype=x.dtype, requires_grad=True)
    adam = torch.optim.Adam(
        [{"params": [x], "lr": 1.0}, {"params": [alpha], "lr": 0.1}]
    )
    decay = torch.optim.lr_scheduler.MultiStepLR(
        adam, [round(steps * k / 8) for k in (3, 5, 7)], gamma=0.1
    )
    for _ in range(steps):
        adam.zero_grad()
        w = alpha * update.initial + (1 - alpha) * update.final[client]
        d = cosine_distance(
            gradient(net, w, x, update.labels[client]), update.difference[client]
        )
        (d + 0.01 * variation(x) / 2).backward()
        adam.step()
        decay.step()
        with torch.no_grad():
            x.copy_(PIXELS.clamp(x))
            alpha.clamp_(0, 1)
    return x.detach(), alpha.detach()


def test_the_algorithm_is_the_published_one() -> None:
    net, update = problem(2)
    torch.manual_seed(0)
    first = torch.randn(2, 2, 4, 1, 6, 6, dtype=torch.float64)
    steps = 16
    found = SurrogateAttack(steps=steps, alpha_lr=0.1, alpha_every=1).run(
        GradientMap(net, dtype=torch.float64),
        update,
        pixels=PIXELS,
        start=Start.normal(),
        restarts=2,
        initial=first,
    )
    for r in range(2):
        for c in range(2):
            x, alpha = written_out(net, update, c, first[r, c], steps)
            # The last step is the best one here, which is what is returned.
            close = {"rtol": 1e-7, "atol": 1e-9}
            torch.testing.assert_close(found.restart_images[r, c], x, **close)
            torch.testing.assert_close(found.restart_alpha[r, c], alpha, **close)
            w = alpha * update.initial + (1 - alpha) * update.final[c]
            assert update.labels is not None
            g = gradient(net, w.requires_grad_(), x, update.labels[c])
            d = cosine_distance(g, update.difference[c]).detach()
            torch.testing.assert_close(found.restart_loss[r, c], d, **close)
    assert float((found.restart_alpha - 0.5).abs().min()) > 0.05


def test_alpha_stays_in_its_range() -> None:
    net, update = problem(2)
    found = SurrogateAttack(steps=6, alpha_lr=10.0, schedule="constant").run(
        GradientMap(net, dtype=torch.float64),
        update,
        pixels=PIXELS,
        start=Start.normal(),
    )
    assert set(found.alpha.tolist()) <= {0.0, 0.5, 1.0}


def test_alpha_may_move_less_often_and_farther() -> None:
    net, update = problem(1)
    given = {"pixels": PIXELS, "start": Start.normal()}
    attack = SurrogateAttack(steps=9, schedule="constant", lr=1e-9, tv=0.0)
    moved = {}
    for every in (1, 3):
        found = attack.changed(alpha_every=every).run(
            GradientMap(net, dtype=torch.float64),
            update,
            **given,  # type: ignore[arg-type]
        )
        moved[every] = float(found.alpha) - 0.5
    # The slope hardly changes, so Adam moves by its step size: 9 · 0.001 = 3 · 0.003.
    assert abs(moved[1]) == pytest.approx(0.009, rel=1e-2)
    assert moved[3] == pytest.approx(moved[1], rel=1e-2)


def test_alpha_held_at_one_is_inverting_gradients_on_the_update() -> None:
    net, update = problem()
    gradients = GradientMap(net, dtype=torch.float64)
    given = {"pixels": PIXELS, "start": Start.normal(), "seed": 3, "restarts": 2}
    preset = presets.get("ig-update").attack.changed(steps=12)
    baseline = preset.run(gradients, update, **given)  # type: ignore[arg-type]
    held = SurrogateAttack(steps=12, alpha=1.0, alpha_lr=0.0)
    for other in (held, held.changed(path="plain")):
        found = other.run(gradients, update, **given)  # type: ignore[arg-type]
        close = {"rtol": 1e-8, "atol": 1e-10}
        torch.testing.assert_close(found.images, baseline.images, **close)
    # The same by the engine for gradients, which knows nothing of updates.
    shared = SharedGradient(update.difference, update.labels, (1, 6, 6), 4)
    engine = FirstOrder(lr=1.0, steps=12, priors=Priors(tv=0.005))
    plain = engine.run(gradients, shared, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(baseline.images, plain.images, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(baseline.loss, plain.loss, rtol=1e-8, atol=1e-12)
    assert baseline.alpha.tolist() == [1.0] * 3


def test_a_client_does_not_feel_the_others() -> None:
    net, update = problem(4)
    together = attack_update(
        net, update, steps=10, restarts=2, mean=[0.4], std=[0.3], dtype=torch.float64
    )
    assert update.labels is not None
    for c in (0, 3):
        alone = replace(
            update, final=update.final[c : c + 1], labels=update.labels[c : c + 1]
        )
        found = attack_update(
            net,
            replace(alone, index=(c,)),
            steps=10,
            restarts=2,
            mean=[0.4],
            std=[0.3],
            dtype=torch.float64,
        )
        close = {"rtol": 1e-8, "atol": 1e-10}
        torch.testing.assert_close(found.images[0], together.images[c], **close)
        torch.testing.assert_close(found.alpha[0], together.alpha[c], **close)
        torch.testing.assert_close(found.loss[0], together.loss[c], **close)


def test_pieces_change_nothing() -> None:
    net, update = problem(3)
    gradients = GradientMap(net, dtype=torch.float64)
    given = {"pixels": PIXELS, "start": Start.normal(), "restarts": 2}
    whole = SurrogateAttack(steps=5).run(gradients, update, **given)  # type: ignore[arg-type]
    pieces = SurrogateAttack(steps=5, chunk_size=4).run(gradients, update, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(pieces.images, whole.images, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["ig-update", "sme", "dlfa"])
def test_one_sample_of_a_linear_model_is_recovered_exactly(name: str) -> None:
    # Every local step moves weights and bias by a multiple of (1, −1)(x, 1)ᵀ, so the
    # update names x whatever the number of steps.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).double()
    x, y = clients(2, 1, (1, 4, 4), classes=2)
    update = update_of(net, x, y, LocalTraining(epochs=5, batch_size=1, lr=0.1))
    more = {"every_epoch": False, "decay": 0.9} if name == "dlfa" else {}
    found = attack_update(
        net,
        update,
        name,
        steps=400,
        lr=0.1,
        tv=0.0,
        data_range=1.0,
        dtype=torch.float64,
        **more,  # type: ignore[arg-type]
    )
    error = (found.images - x).abs().amax()
    assert float(error) < 1e-3
    assert float(found.loss.max()) < 1e-8


def test_the_surrogate_matches_updates_that_one_gradient_does_not() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 3))
    x, y = clients(3, 2)
    how = LocalTraining(epochs=20, batch_size=2, lr=0.1)
    update = update_of(net.double(), x, y, how)
    loss, error = {}, {}
    for name in ("ig-update", "sme"):
        found = attack_update(
            net, update, name, steps=150, lr=0.1, data_range=1.0, dtype=torch.float64
        )
        loss[name] = found.loss
        error[name] = (align(found.images, x) - x).square().mean()
    # Measured: 30 to 50 times less loss, 11 times less squared error.
    assert bool((loss["sme"] < loss["ig-update"] / 10).all())
    assert float(error["sme"]) < float(error["ig-update"]) / 4


def test_statuses_say_what_was_not_matched() -> None:
    net, update = problem(2)
    found = attack_update(net, update, "ig-update", steps=1, data_range=1.0)
    for status in found.status:
        assert status.word == "not converged"
        assert "of the update was not matched" in status.reason
        assert "sme looks for a better place" in status.reason
        assert "gradient was" not in status.reason


def test_time_is_kept_and_progress_told() -> None:
    net, update = problem(2)
    seen: list[tuple[int, int, float]] = []
    found = attack_update(
        net,
        update,
        steps=10_000,
        time_limit=0.3,
        data_range=1.0,
        progress=lambda *told: seen.append(told),
    )
    assert 0 < found.iterations < 10_000
    assert seen[0][:2] == (0, 10_000)
    assert "when time was over" in found.status[0].reason


def test_labels_may_stand_in_any_order() -> None:
    net, update = problem(2)
    assert update.labels is not None
    turned = replace(update, labels=update.labels.flip(1))
    first = torch.rand(1, 2, 4, 1, 6, 6, dtype=torch.float64)
    attack, maps = SurrogateAttack(steps=5), GradientMap(net, dtype=torch.float64)
    run = {"pixels": PIXELS, "start": Start.normal()}
    a = attack.run(maps, update, initial=first, **run)  # type: ignore[arg-type]
    b = attack.run(maps, turned, initial=first.flip(2), **run)  # type: ignore[arg-type]
    torch.testing.assert_close(b.images, a.images.flip(1), rtol=1e-9, atol=1e-11)


def test_unknown_labels_are_counted_in_the_update() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, 5))
    net = net.double()
    x, y = clients(3, 6, classes=5)
    update = update_of(net, x, y, LocalTraining(epochs=5, batch_size=3, lr=0.02))
    found = attack_update(
        net, replace(update, labels=None), steps=2, data_range=1.0, dtype=torch.float64
    )
    assert found.labels.tolist() == y.sort().values.tolist()
    assert "labels were counted" in found.status[0].reason


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"training": None}, r"give labels=\(clients, N\), in any order"),
        (
            {"training": LocalTraining(3, 2, 0.5, weight_decay=0.1)},
            "can't be counted under weight_decay=0.1",
        ),
    ],
)
def test_labels_that_can_not_be_counted_are_asked_for(
    change: dict[str, LocalTraining | None], match: str
) -> None:
    net, update = problem(1)
    with pytest.raises(ValueError, match=match):
        attack_update(net, replace(update, labels=None, **change))  # type: ignore[arg-type]


def test_wrong_arguments_are_refused() -> None:
    net, update = problem(1)
    with pytest.raises(ValueError, match="choose from ig-update, sme"):
        attack_update(net, update, "dlg")
    with pytest.raises(ValueError, match="unknown setting beta of attack 'sme'"):
        attack_update(net, update, beta=1)
    with pytest.raises(TypeError, match=r"must be a leakwatch\.weight_update"):
        attack_update(net, update.difference)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"steps must be an integer of at least 1, got 1\.5"
    ):
        attack_update(net, update, steps=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be at least 0"):
        attack_update(net, update, seed=-1)
    with pytest.raises(ValueError, match="restarts must be at least 1"):
        attack_update(net, update, restarts=0)
    with pytest.raises(ValueError, match="time_limit must be positive"):
        attack_update(net, update, time_limit=0)
    with pytest.raises(ValueError, match="was another model"):
        attack_update(nn.Linear(2, 2), update)
    with pytest.raises(TypeError, match="an attack with a run method, got a int"):
        attack_update(net, update, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="initial must be finite images"):
        SurrogateAttack().run(
            GradientMap(net),
            update,
            pixels=PIXELS,
            start=Start.normal(),
            initial=torch.zeros(1, 1, 3, 1, 6, 6),
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"alpha": 1.5}, r"alpha must lie in \[0, 1\], got 1.5"),
        ({"alpha_lr": -1.0}, "alpha_lr must be at least 0 and finite"),
        ({"alpha_every": 0}, "alpha_every must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"tv": -1.0}, "the weight tv of a prior"),
        ({"path": "fast"}, "path must be one of 'auto', 'layers', 'plain'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SurrogateAttack(**change)  # type: ignore[arg-type]


def test_presets_are_registered_once() -> None:
    assert {"ig-update", "sme"} <= set(presets.available())
    with pytest.raises(ValueError, match="is registered already"):
        presets.register(presets.SME)
