"""Islands and vLLM servers as actors of a Ray cluster. The one file that imports ray.

Ray sends its messages with pickle: anyone who can reach a Ray cluster can run code on it, even without agilerl.
"""

import os
import queue
import secrets
import socket
import subprocess
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import reason
from agilerl.config.distributed import DistributedConfig
from agilerl.config.run import RunConfig
from agilerl.config.vllm import API_KEY, lora_capacity
from agilerl.errors import AgileRLError, ConfigError, EngineError, WriteError, how_to_install
from agilerl.runs.stopping import Interrupted, StopRequest
from agilerl.safety.addresses import ALLOWED

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_PLACEMENT_SECONDS = 120.0
_SERVER_SECONDS = 900.0

Work = Callable[[StopRequest, Callable[[str], None], str | None], None]
"""What one process does. The first argument asks it to stop, the second prints lines, and the third is the address of
its vLLM server, if there is one. It must be importable by name on every machine."""


@dataclass(frozen=True)
class Ending:
    """How the work of one process ended."""

    kind: str
    """``done``, ``error`` (a sentence), ``interrupted`` (a sentence and an exit code), ``crashed`` (a traceback)."""
    text: str = ""
    code: int = 0


@dataclass(frozen=True)
class _Cluster:
    """Ray, and the resources reserved on it."""

    ray: Any
    """The ray module."""
    group: Any
    """A placement group: one bundle per island, then one per vLLM server."""
    config: DistributedConfig
    host: str | None
    """Where vLLM servers listen: this machine alone, or, if None, at the address that their node has in the cluster."""
    key: str
    """What they ask for: whoever reaches one could have it load adapters, that is files, of his choice."""

    def bundle(self, number: int) -> Any:
        """Return the strategy that places an actor in a bundle."""
        strategies = self.ray.util.scheduling_strategies
        return strategies.PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)


def launch(
    config: DistributedConfig,
    works: Sequence[Work],
    say: Callable[[str], None],
    stop: Callable[[], Any],
    serve: Sequence[str] = (),
) -> Ending:
    """Start the islands on Ray, restart from the last checkpoint if one is lost, and return how the run ended.

    ``works[k]`` is the work of attempt k; the last one is used for all further attempts. ``stop`` gives a context in
    which signals ask the run to stop. ``serve`` is the command line of a vLLM server. Raises ConfigError if Ray is not
    installed, EngineError if the cluster has no room or too many processes were lost.
    """
    ray = _ray()
    with _connected(ray, config) as cluster, stop() as request:
        servers = [_server(cluster, number, serve) for number in range(config.vllm_servers)]
        urls = [url for _, url in servers]
        for attempt in range(config.max_restarts + 1):
            work = works[min(attempt, len(works) - 1)]
            endings, loss = _attempt(cluster, work, urls, say, request)
            if not loss:  # the first process knows every reported error
                worst = ("crashed", "error", "interrupted", "done")
                return min(endings, key=lambda ending: worst.index(ending.kind))
            if request.signal is not None:
                return Ending("interrupted", "stopped while a process was lost", request.code)
            if attempt < config.max_restarts:
                say(f"{loss}; resuming from the last checkpoint ({attempt + 1} of {config.max_restarts})")
        raise EngineError(
            f"{loss}, after distributed.max_restarts={config.max_restarts} restarts; the run can be resumed "
            "with the same command and --resume auto"
        )


def serving(config: RunConfig) -> list[str]:
    """Return the command that serves the base of a run with vLLM, its adapters loaded while it runs."""
    if not config.distributed.vllm_servers:
        return []
    from agilerl.models.base import resolve_model
    from agilerl.models.gguf import base_folder

    name = config.network.pretrained_model_name_or_path
    file, dtype = Path(name).expanduser(), config.training.dtype
    model = str(base_folder(file, "float32" if dtype == "auto" else dtype)) if file.is_file() else resolve_model(name)
    rank = lora_capacity(config.largest_rank)
    size = ["--max-loras", str(config.training.pop_size + 1), "--max-lora-rank", str(rank)]
    # Log-probs after the temperature, as the trainer computes those that they are compared with.
    return ["vllm", "serve", model, "--enable-lora", *size, "--logprobs-mode", "processed_logprobs"]


def _ray() -> Any:
    # Ray would report its use to a server of its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise CPU processes on a machine with GPUs get a warning that does not concern them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"distributed.backend=ray needs Ray: {how_to_install('ray')}") from error
    return ray


@contextmanager
def _connected(ray: Any, config: DistributedConfig) -> Iterator[_Cluster]:
    """Connect to the cluster, or start one, and reserve resources for the islands and servers."""
    size = config.processes_per_island or 1
    island = {"CPU": config.cpus_per_island * size, "GPU": config.gpus_per_island * size}
    bundles = [island] * config.islands + [{"CPU": 1.0, "GPU": config.gpus_per_server}] * config.vllm_servers
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
    _check_answers(config.address or os.environ.get("RAY_ADDRESS", ""))
    is_new = config.address is None and "RAY_ADDRESS" not in os.environ
    try:
        if is_new:
            # Rounded up from whole thousandths, since a sum of floats may end just above a whole number.
            cpus = max(os.cpu_count() or 1, -(-int(sum(bundle["CPU"] for bundle in bundles) * 1000) // 1000))
            ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="error")
        else:
            ray.init(config.address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = config.address or os.environ.get("RAY_ADDRESS", "this machine")
        raise ConfigError(
            f"no Ray cluster could be reached or started at {where}: {reason(error)}; check distributed.address"
        ) from error
    try:
        group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=min(_PLACEMENT_SECONDS, config.timeout_seconds))
        except ray.exceptions.GetTimeoutError as error:
            there = ray.cluster_resources()
            raise EngineError(
                f"the Ray cluster has no room for {bundles}: it has {there.get('CPU', 0):g} CPUs and "
                f"{there.get('GPU', 0):g} GPUs; lower distributed.islands, cpus_per_island, gpus_per_island or "
                "vllm_servers, or add machines"
            ) from error
        yield _Cluster(ray, group, config, "127.0.0.1" if is_new else None, secrets.token_urlsafe(32))
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise ConfigError if nothing listens at ``host:port``; Ray itself would retry for minutes, or exit."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"nothing answers at the address of the Ray cluster, {address}: {reason(error)}; start Ray there (ray "
            "start --head), or check distributed.address or RAY_ADDRESS"
        ) from error


def _attempt(
    cluster: _Cluster, work: Work, urls: Sequence[str], say: Callable[[str], None], request: StopRequest
) -> tuple[list[Ending], str]:
    """Start every process once; return how they ended, by rank, or Ray's message about the first that was lost."""
    ray, config = cluster.ray, cluster.config
    size = config.processes_per_island or 1
    actors = [
        ray.remote(Island)
        .options(
            num_cpus=config.cpus_per_island,
            num_gpus=config.gpus_per_island,
            # An island that Ray restarted would begin alone; an attempt restarts all of them.
            max_restarts=0,
            # So that ask_to_stop runs while work does.
            max_concurrency=2,
            scheduling_strategy=cluster.bundle(rank // size),
        )
        .remote()
        for rank in range(config.islands * size)
    ]
    try:
        addresses = ray.get([actor.address.remote() for actor in actors])
        streams = {}
        for rank, variables in enumerate(_variables(addresses, {API_KEY: cluster.key} if urls else {})):
            url = urls[(rank // size) % len(urls)] if urls else None
            streams[rank] = actors[rank].work.options(num_returns="streaming").remote(work, variables, url)
        return _endings(ray, actors, streams, say, request), ""
    except ray.exceptions.RayError as error:
        # Only Ray's own errors: those of the work arrive as an Ending.
        return [], f"a process of the run was lost ({reason(error)})"
    finally:
        # After a loss the others live on, and wait for the lost one.
        for actor in actors:
            ray.kill(actor)


def _variables(addresses: Sequence[tuple[str, int]], more: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables that torchrun would set in each process, and ``more``; all connect to the first one."""
    hosts = [host for host, _ in addresses]
    (first, port), size = addresses[0], len(addresses)
    common = {**more, "WORLD_SIZE": f"{size}", "MASTER_ADDR": first, "MASTER_PORT": f"{port}", "LOCAL_RANK": "0"}
    # Ray shows each actor only its own GPUs, so each is local rank 0; but they share the machine's memory.
    return [
        {**common, "RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{hosts.count(host)}"} for rank, host in enumerate(hosts)
    ]


def _endings(
    ray: Any, actors: Sequence[Any], streams: dict[int, Any], say: Callable[[str], None], request: StopRequest
) -> list[Ending]:
    """Forward the processes' output until all have ended; raises Ray's error if one is lost."""
    endings: dict[int, Ending] = {}
    stopping = False
    while len(endings) < len(streams):
        if request.signal is not None and not stopping:
            stopping = True
            for actor in actors:
                actor.ask_to_stop.remote(request.signal)
        waiting = {stream: rank for rank, stream in streams.items() if rank not in endings}
        # With a timeout, because signals are only looked at between two waits.
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
        for stream in ready:
            word = ray.get(next(stream))
            if isinstance(word, Ending):
                endings[waiting[stream]] = word
            else:
                say(word)
    return [endings[rank] for rank in sorted(endings)]


class Island:
    """A process of the run, as a Ray actor."""

    def __init__(self) -> None:
        self._stop = StopRequest()

    def address(self) -> tuple[str, int]:
        """Return an address where the processes can connect: this machine, and a free port."""
        import ray

        return ray.util.get_node_ip_address(), _free_port()

    def ask_to_stop(self, number: int) -> None:
        """Ask the work to stop as the signal of this number would."""
        self._stop.signal = number

    def work(self, work: Work, variables: Mapping[str, str], url: str | None) -> Iterator[str | Ending]:
        """Work as the process that these environment variables describe; yields lines to print, then the outcome."""
        os.environ.update(variables)
        if url is not None:
            os.environ[ALLOWED] = f"{os.environ.get(ALLOWED, '')} {url}"  # the key is that server's own
        words: queue.SimpleQueue[str | Ending] = queue.SimpleQueue()

        def perform() -> None:
            try:
                work(self._stop, words.put, url)
            except Interrupted as interrupted:
                words.put(Ending("interrupted", str(interrupted), interrupted.code))
            except AgileRLError as error:
                words.put(Ending("error", str(error), 1 if isinstance(error, WriteError) else 2))
            except BaseException:  # the driver must learn of any failure
                words.put(Ending("crashed", traceback.format_exc(), 1))
            else:
                words.put(Ending("done"))

        # In a thread of its own, so that lines are yielded while it works.
        threading.Thread(target=perform, daemon=True).start()
        word: str | Ending = ""
        while not isinstance(word, Ending):
            word = words.get()
            yield word


class Server:
    """``vllm serve`` as a child of an actor; it ends with the actor."""

    def __init__(self, command: Sequence[str], key: str, host: str | None = None) -> None:
        import ray

        self.host, self.port = host or ray.util.get_node_ip_address(), _free_port()
        environment = {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", API_KEY: key}
        try:
            self.process = subprocess.Popen([*command, "--host", self.host, "--port", str(self.port)], env=environment)
        except OSError as error:
            raise EngineError(
                f"{command[0]!r} could not be started: {error}; install vLLM: {how_to_install('vllm')}"
            ) from error

    def url(self, seconds: float) -> str:
        """Return the address of the server once it answers."""
        address = f"http://{self.host}:{self.port}"
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise EngineError(f"the vLLM server ended with exit code {self.process.returncode} before it was ready")
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    return address
            except OSError:
                time.sleep(1)
        raise EngineError(f"the vLLM server at {address} did not answer within {seconds:g} s")


def _server(cluster: _Cluster, number: int, command: Sequence[str]) -> tuple[Any, str]:
    """Start a vLLM server; returns its actor, which lives as long as it is referenced, and its address."""
    ray, config = cluster.ray, cluster.config
    actor = (
        ray.remote(Server)
        .options(
            num_cpus=1, num_gpus=config.gpus_per_server, scheduling_strategy=cluster.bundle(config.islands + number)
        )
        .remote(list(command), cluster.key, cluster.host)
    )
    try:
        return actor, ray.get(actor.url.remote(_SERVER_SECONDS))
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"vLLM server {number} did not start: {reason(getattr(error, 'cause', None) or error)}"
        ) from error


def _free_port() -> int:
    with socket.socket() as listening:
        # Free now: nothing reserves it until whoever asked for it listens there.
        listening.bind(("", 0))
        return int(listening.getsockname()[1])
