"""The processes of a run as workers of Ray Train, which restarts them if one is lost. The one file that imports ray.

Ray sends its messages with pickle: anyone who can reach a Ray cluster can run code on it, even without agilerl.
"""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agilerl.checks.arguments import reason
from agilerl.cli.output import say
from agilerl.config.distributed import DistributedConfig
from agilerl.errors import AgileRLError, ConfigError, EngineError, LostProcessError, WriteError, how_to_install

_ANSWER_SECONDS = 5.0


def launch(d: DistributedConfig, root: Path, part: Callable[[Any], None], settings: Any) -> None:
    """Let Ray Train start processes that each call ``part(settings)``, and wait for the end of the run in ``root``.

    Raises the error that ended the run, ConfigError if Ray is not installed or no cluster can be reached, and
    EngineError if too many processes were lost.
    """
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",  # Ray would report its use to a server of its makers
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a warning to CPU processes on machines with GPUs
        "RAY_DEDUP_LOGS": "0",  # lines that look alike are not the same
    }.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import train
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise ConfigError(f"distributed.backend=ray needs Ray Train: {how_to_install('ray')}") from error
    _connect(ray, d.address, d.workers * d.cpus_per_worker)
    resources = {"CPU": d.cpus_per_worker} | ({"GPU": d.gpus_per_worker} if d.gpus_per_worker else {})
    # Checkpoints are the run's own, so Ray Train has nothing to store.
    with TemporaryDirectory() as nothing:
        trainer = TorchTrainer(
            work,
            train_loop_config={"part": part, "settings": settings, "folder": os.getcwd()},
            torch_config=TorchConfig(
                backend="cpu:gloo,cuda:nccl" if d.gpus_per_worker else "gloo", timeout_s=max(1, int(d.timeout_seconds))
            ),
            scaling_config=train.ScalingConfig(
                num_workers=d.workers, use_gpu=d.gpus_per_worker > 0, resources_per_worker=resources
            ),
            run_config=train.RunConfig(
                storage_path=nothing,
                failure_config=train.FailureConfig(max_failures=d.max_restarts),
                logging_config=train.LoggingConfig("ERROR"),
            ),
        )
        try:
            ended = trainer.fit().return_value
        except train.TrainingFailedError as error:
            raise EngineError(
                f"Ray Train gave up after distributed.max_restarts={d.max_restarts} restarts ({reason(error)}); the "
                "run can be resumed with the same command and --resume auto"
            ) from error
        except (KeyboardInterrupt, SystemExit):  # the second is how Ray Train leaves on Ctrl-C
            say(f"interrupted; resume from the last checkpoint with: agilerl resume {root}")
            sys.exit(130)
        finally:
            ray.shutdown()
    if ended is not None:
        # The error itself stayed in its process.
        raise (WriteError if ended["writing"] else AgileRLError)(ended["error"])


def work(config: dict[str, Any]) -> dict[str, Any] | None:
    """Do the part of one process; return the error that ended all of them.

    An error that is raised, as the loss of another process is, makes Ray Train start all of them again.
    """
    if Path(config["folder"]).is_dir():
        os.chdir(config["folder"])  # paths in a manifest may be relative to it
    try:
        config["part"](config["settings"])
    except LostProcessError:
        raise
    except AgileRLError as error:
        return {"error": str(error), "writing": isinstance(error, WriteError)}
    return None


def _connect(ray: Any, address: str | None, cpus: float) -> None:
    """Connect to the cluster, or start one on this machine."""
    where = address or os.environ.get("RAY_ADDRESS")
    host, _, port = (where or "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():
            # Ray itself would retry for minutes, or exit.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
        # On this machine with more CPUs than it has, if the processes are to share them.
        local: dict[str, Any] = (
            {} if where else {"num_cpus": max(os.cpu_count() or 1, -(-cpus // 1)), "include_dashboard": False}
        )
        quiet = ray.LoggingConfig(log_level="ERROR")
        ray.init(where or "local", logging_level="error", logging_config=quiet, **local)
    except (ConnectionError, OSError, OverflowError, RuntimeError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster could be reached or started at {where or 'this machine'}: {reason(error)}; start Ray "
            "there (ray start --head), or check distributed.address or RAY_ADDRESS"
        ) from error
