"""The environment that DeepSpeed reads. It must be set before deepspeed is imported. Imports nothing heavy."""

from __future__ import annotations

import os

from learner.config import LearnerConfig

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def single_rank_environment(config: LearnerConfig) -> dict[str, str]:
    """Variables of a learner that is one process: a Ray actor gets them from its runtime environment, a script from
    `os.environ.update(single_rank_environment(config))`.

    All five rendezvous variables: with one missing, DeepSpeed looks for MPI. Port 0 lets the store of the single rank
    choose a free one, so that learners on the same machine do not collide.
    """
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": str(config.num_threads),
    }
    return environment if config.num_gpus else environment | {"DS_ACCELERATOR": "cpu"}


def check_environment() -> None:
    """Refuses an environment in which DeepSpeed would look for MPI, or several ranks.

    Raises:
        ValueError: naming the variables.
    """
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise ValueError(
            f"environment: expected {', '.join(_RENDEZVOUS)} (see learner.environment.single_rank_environment), "
            f"missing {', '.join(missing)}"
        )
    if os.environ["WORLD_SIZE"] != "1":
        raise ValueError(f"environment: WORLD_SIZE: expected 1 (one learner rank), got {os.environ['WORLD_SIZE']}")
