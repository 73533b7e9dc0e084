"""The help of ``leakwatch fit``: on one screen, before anything heavy is imported.

All options, which only Lightning and the classes of a config know, are shown by
``leakwatch fit --help-all``.
"""

from __future__ import annotations

from typing import Final

_HELP: Final = """\
usage: leakwatch fit --config CONFIG [--config CONFIG ...] [--KEY=VALUE ...]

Train the model that one or more configs describe, and watch what its gradients give
away. Later configs, and options, override earlier ones.

  --config CONFIG     a YAML file, or one of the package: leakwatch:quickstart
                      (`leakwatch configs` lists them, `leakwatch configs quickstart`
                      prints one to start from)
  --ckpt_path PATH    resume from a checkpoint
  --seed_everything N
  --print_config      print the config that all this makes, and exit
  --help-all          every option of trainer, model and data

training
  --trainer.max_epochs N  --trainer.accelerator cpu  --trainer.devices N
  --trainer.precision 16-mixed  --trainer.logger ...  --trainer.callbacks ...

model and data: keys of their classes
  --model.init_args.model lenet  --model.init_args.lr 0.005
  --model.init_args.initialization uniform  --data.init_args.batch_size 32

the monitor, where it is the last callback of the config
  --trainer.callbacks.KEY VALUE, with the KEY:
    what and when   probes, scores, every_n_epochs, at_start, layers, seed
    assumptions     noise_std, epsilon, prior, prior_std, target_psnr, data_range, mean,
                    std, parameters, criterion, prepare
    how             precision, budget, solver, dtype, max_memory, products
    what becomes    directory, name, report, live, log, log_images, log_ledger,
    of it           verbose
  `python -c "from leakwatch.callbacks import *; help(LeakageMonitor)"` explains them.

examples
  leakwatch fit --config leakwatch:quickstart
  leakwatch fit --config leakwatch:quickstart --trainer.callbacks.noise_std=0.05
  leakwatch fit --config leakwatch:quickstart --config leakwatch:model/mlp
  leakwatch fit --config leakwatch:quickstart --config leakwatch:attack/lavp_cosine
"""


def fit_help() -> str:
    """Return the help text."""
    return _HELP
