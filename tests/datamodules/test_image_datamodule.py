from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from leakwatch.datamodules import ImageArrays, ImageDataModule, Splits

DEFAULTS: dict[str, Any] = {
    "class_names": ("a", "b", "c"),
    "image_shape": (2, 4, 4),
    "mean": (0.1, 0.2),
    "std": (0.5, 0.25),
    "batch_size": 8,
    "num_workers": 0,
    "seed": 0,
    "val_fraction": 0.2,
    "subset": None,
    "normalize": True,
    "augment": False,
}


def arrays(n: int, start: int = 0) -> ImageArrays:
    """Image i is constant i, so that a sample tells where it came from."""
    index = torch.arange(start, start + n)
    images = index.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 2, 4, 4)
    return ImageArrays(images.contiguous(), index % 3)


class Toy(ImageDataModule):
    def __init__(self, own_val: bool = False, own_test: bool = True, **kwargs: Any):
        super().__init__(**{**DEFAULTS, **kwargs})
        self.own_val, self.own_test = own_val, own_test
        self.loads = 0

    def load(self) -> Splits:
        self.loads += 1
        return Splits(
            arrays(60),
            arrays(9, 60) if self.own_val else None,
            arrays(12, 100) if self.own_test else None,
        )


def ready(**kwargs: Any) -> Toy:
    toy = Toy(**kwargs)
    toy.setup()
    return toy


def ids(dataset: Any) -> list[int]:
    return dataset.images[:, 0, 0, 0].tolist()


def test_known_before_setup() -> None:
    toy = Toy()
    assert (toy.num_classes, toy.class_names) == (3, ("a", "b", "c"))
    assert (toy.image_shape, toy.mean, toy.std) == ((2, 4, 4), (0.1, 0.2), (0.5, 0.25))


def test_split_from_the_training_data() -> None:
    toy = ready()
    assert sorted(ids(toy.train_dataset) + ids(toy.val_dataset)) == list(range(60))
    assert toy.val_dataset.targets.bincount().tolist() == [4, 4, 4]
    assert ids(toy.test_dataset) == list(range(100, 112))


def test_split_follows_seed_not_the_global_generator() -> None:
    first = ids(ready().val_dataset)
    torch.manual_seed(99)
    assert ids(ready().val_dataset) == first
    assert ids(ready(seed=1).val_dataset) != first


def test_own_validation_images_are_used() -> None:
    toy = ready(own_val=True)
    assert ids(toy.train_dataset) == list(range(60))
    assert ids(toy.val_dataset) == list(range(60, 69))


def test_setup_loads_once() -> None:
    toy = ready()
    toy.setup("test")
    assert toy.loads == 1


def test_normalisation() -> None:
    toy = ready(own_val=True)
    x, y = toy.train_dataset[51]
    torch.testing.assert_close(
        x[:, 0, 0], torch.tensor([(0.2 - 0.1) / 0.5, 0.0]), rtol=1e-6, atol=1e-7
    )
    assert y == 0


def test_without_normalisation_mean_and_std_say_so() -> None:
    toy = ready(own_val=True, normalize=False)
    assert (toy.mean, toy.std) == ((0.0, 0.0), (1.0, 1.0))
    x, _ = toy.train_dataset[51]
    torch.testing.assert_close(x, torch.full((2, 4, 4), 0.2), rtol=1e-6, atol=0.0)


def test_subset_limits_every_split_evenly() -> None:
    toy = ready(own_val=True, subset=6)
    assert ids(toy.train_dataset) == [0, 1, 2, 3, 4, 5]
    assert ids(toy.val_dataset) == [60, 61, 62, 63, 64, 65]
    assert toy.test_dataset.targets.bincount().tolist() == [2, 2, 2]


def test_augmentation_touches_training_only() -> None:
    plain, augmented = ready(), ready(augment=True)
    assert plain.probe_dataset is plain.train_dataset
    assert ids(augmented.probe_dataset) == ids(augmented.train_dataset)
    torch.manual_seed(0)
    index = len(augmented.train_dataset) - 1
    probe = plain.train_dataset[index][0]
    assert torch.equal(augmented.probe_dataset[index][0], probe)
    assert torch.equal(augmented.val_dataset[0][0], plain.val_dataset[0][0])
    drawn = [augmented.train_dataset[index][0] for _ in range(10)]
    assert any(not torch.equal(x, probe) for x in drawn)


def test_loaders() -> None:
    toy = ready()
    torch.manual_seed(0)
    y = torch.cat([batch[1] for batch in toy.train_dataloader()])
    assert len(y) == 48
    assert y.tolist() != toy.train_dataset.targets.tolist()
    y = torch.cat([batch[1] for batch in toy.val_dataloader()])
    assert y.tolist() == toy.val_dataset.targets.tolist()
    x, _ = next(iter(toy.test_dataloader()))
    assert x.shape == (8, 2, 4, 4)


def test_workers_persist_only_when_there_are_any() -> None:
    assert not ready().train_dataloader().persistent_workers
    loader = ready(num_workers=1).train_dataloader()
    assert (loader.num_workers, loader.persistent_workers) == (1, True)


def test_loaders_before_setup() -> None:
    with pytest.raises(RuntimeError, match="Toy is not set up: call prepare_data"):
        Toy().train_dataloader()


def test_no_test_images() -> None:
    with pytest.raises(RuntimeError, match="Toy has no test images"):
        ready(own_test=False).test_dataloader()


@pytest.mark.filterwarnings(
    # Lightning's own use of a PyTorch class that newer releases deprecate
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
    # workers cost more than they save here
    "ignore:The '.*_dataloader' does not have many workers",
)
def test_in_a_trainer() -> None:
    class Count(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.shapes: list[tuple[int, ...]] = []
            self.seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.shapes.append(tuple(batch[0].shape))
            return self.weight * batch[0].mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen += len(batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    count = Count()
    L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(count, datamodule=Toy())
    assert count.shapes == [(8, 2, 4, 4)] * 2
    assert count.seen == 12


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 8.0}, TypeError, "batch_size must be an integer"),
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
        ({"seed": True}, TypeError, "seed must be an integer"),
        ({"subset": 0}, ValueError, "subset must be at least 1"),
        ({"val_fraction": 0.0}, ValueError, "got 0.0; for instance val_fraction=0.1"),
        ({"val_fraction": 1}, ValueError, "got 1; for instance val_fraction=0.1"),
    ],
)
def test_bad_arguments(
    kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Toy(**kwargs)
