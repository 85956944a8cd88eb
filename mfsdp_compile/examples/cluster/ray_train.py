"""Starts the training on a Ray cluster:

    python -m mfsdp_compile.examples.cluster.ray_train --workers 16 --folder /shared/runs/a

Arguments that this program does not have go to :mod:`.train`. After a failure, Ray starts all workers again, and they
go on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from .train import main as train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--workers", type=int, required=True, help="processes, each with a GPU if there are any")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    given, words = parser.parse_known_args()
    trainer = TorchTrainer(
        _train_worker,
        train_loop_config={"words": words},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=not given.cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


def _train_worker(config: dict[str, Any]) -> None:
    train(config["words"])


if __name__ == "__main__":
    main()
