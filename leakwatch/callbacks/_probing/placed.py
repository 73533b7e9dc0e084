"""A callback's place: in a Trainer of `lightning`, and under a name of its own."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["Placed"]


class Placed(Callback):
    """Base of callbacks that have a name and keep a state.

    Attributes:
        name: the place of its state in checkpoints.
    """

    name: str
    _set_up = False

    @property
    def saved_as(self) -> str:
        """The place of its state in a checkpoint."""
        return self._generate_state_key(name=self.name)

    @property
    def state_key(self) -> str:
        """The same; two of one name differ until `setup` can say what is wrong."""
        return self.saved_as if self._set_up else f"{self.saved_as}@{id(self):x}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a place where the callback would work by halves.

        Raises:
            TypeError: for a Trainer of the package `pytorch_lightning`.
            RuntimeError: for another callback of the same name.
        """
        own = type(self).__name__
        other_package = type(trainer).__module__.startswith("pytorch_lightning")
        if other_package and not isinstance(trainer, Trainer):
            raise TypeError(
                f"{own} works with the package lightning, and this Trainer is of "
                f"pytorch_lightning, whose classes are others; import "
                f"lightning.pytorch instead of pytorch_lightning for Trainer, module, "
                f"callbacks and loggers."
            )
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        for other in callbacks:
            named = isinstance(other, Placed) and other.name == self.name
            if named and other is not self:
                raise RuntimeError(
                    f"two callbacks are called {self.name!r} and would log under the "
                    f"same keys; give one of them another name, for instance "
                    f"{own}(name='{self.name}-test')."
                )
        self._set_up = True
