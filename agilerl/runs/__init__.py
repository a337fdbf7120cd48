"""The run directory: journal, checkpoints, completions, lock. Importing it loads neither torch nor pyarrow."""

from agilerl.runs.checkpoints import CheckpointStore, agent_folder, newest_agents
from agilerl.runs.directory import RunDirectory, RunLayout, collect_hardware, collect_versions, find_adapter, read_run
from agilerl.runs.journal import Journal, JsonLines, read_lines

__all__ = [
    "CheckpointStore",
    "Journal",
    "JsonLines",
    "RunDirectory",
    "RunLayout",
    "agent_folder",
    "collect_hardware",
    "collect_versions",
    "find_adapter",
    "newest_agents",
    "read_lines",
    "read_run",
]
