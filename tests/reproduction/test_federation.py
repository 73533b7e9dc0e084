"""Networks that a federation has trained."""

from __future__ import annotations

import torch

from leakwatch.datamodules.splits import stratified_first
from leakwatch.federated import FederatedAveraging, LocalTraining, dirichlet_split
from leakwatch.reproduction.data import open_data
from leakwatch.reproduction.federation import federate, trainer
from leakwatch.reproduction.networks import Network, train


def test_rounds_are_those_of_federated_averaging() -> None:
    data = open_data("mnist_sample", "nowhere").module
    network = Network(
        "linear", optimizer="fedavg", lr=0.1, batch_size=50, images=500, epochs=4,
        keep=(0, 2),
    )  # fmt: skip
    assert trainer(network) is federate
    assert trainer(Network("linear")) is train
    found = federate(network, data, 3)
    assert set(found.states) == {0, 2, 4}
    begun = train(Network("linear"), data, 3)
    for name, value in begun.states[0].items():
        assert torch.equal(found.states[0][name], value)
    images = data.train_dataset
    assert images is not None
    chosen = stratified_first(images.targets, 500)
    x = torch.stack([images[i][0] for i in chosen.tolist()])
    y = images.targets[chosen]
    parts = dirichlet_split(y, 5, alpha=0.5, least=10, seed=3)
    server = FederatedAveraging(
        network.build(data, begun.states[0]),
        [(x[p], y[p]) for p in parts],
        LocalTraining(10, 50, 0.1),
        share=0.1,
        answering="chance",
        seed=3,
    )
    list(server.run(4))
    for name, value in server.module.state_dict().items():
        assert torch.equal(found.states[4][name], value)
    assert found.accuracy[4] > found.accuracy[0]
