"""A server on this machine whose pages follow runs: the report of each, and a list of those below a folder."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote, unquote

from agilerl.checks.arguments import shown
from agilerl.errors import AgileRLError, CheckpointError, ConfigError
from agilerl.report.card import public_name
from agilerl.report.load import load_run, number, score_of, task_of
from agilerl.report.page import compiled, render, resource
from agilerl.runs import RunLayout, read_lines, read_run
from agilerl.runs.directory import as_written
from agilerl.runs.strict_json import read_json

RELOAD = 10
"""Seconds after which an open page reloads itself."""
_DEEPEST = 4
"""Folders below the one that is watched in which runs are looked for."""


def runs_below(folder: Path) -> dict[str, Path]:
    """Return the run directories in a folder by their paths from there, the newest first; a run itself is ``.``.

    Links are not followed, and nothing is looked for inside a run.
    """
    runs: dict[str, Path] = {}
    for root, folders, files in os.walk(folder):
        path = Path(root)
        if "run.json" in files:
            runs[path.relative_to(folder).as_posix()] = path
        if "run.json" in files or len(path.relative_to(folder).parts) >= _DEEPEST:
            # os.walk goes into what is left in this list, so it must be emptied and not replaced.
            folders.clear()
    return dict(sorted(runs.items(), key=lambda item: -_changed(item[1])))


def _changed(run: Path) -> float:
    """Return when a run last wrote something, in seconds since 1970; 0 if it was deleted meanwhile."""
    layout = RunLayout(run)
    files = (layout.run_json, layout.metrics, layout.lineage, layout.summary)
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _rows(runs: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield what the list of runs says about each."""
    for name, path in runs.items():
        row: dict[str, Any] = dict.fromkeys(("status", "base", "elite", "task", "model", "algorithm"), "")
        row |= {"name": name, "link": quote(name), "seconds": max(0, round(time.time() - _changed(path)))}
        try:
            with as_written(path):
                config, layout = read_run(path)["config"], RunLayout(path)
                summary = read_json(layout.summary) if layout.summary.exists() else {}
                lines = read_lines(layout.lineage) if not summary and layout.lineage.exists() else ()
                exams = [number(line["mean"]) for line in lines if line["event"] == "fitness"]
                best = max(filter(math.isfinite, exams), default=None)
                row |= {
                    "task": public_name(task_of(config)),
                    "model": config["network"]["pretrained_model_name_or_path"],
                    "algorithm": config["algorithm"]["name"],
                    "status": layout.status,
                    "elite": "" if best is None else f"exam {best:.3f}",
                    **{who: f"{score_of(score).mean:.3f}" for who, score in (summary.get("test") or {}).items()},
                }
        except AgileRLError as error:
            row["status"] = f"cannot be read: {error}"
        yield row


class Watch(ThreadingHTTPServer):
    """Serves pages about a run or about the runs below a folder, on 127.0.0.1, until ``shutdown``.

    ``port`` 0 takes any that is free; the folder may still be empty. Raises CheckpointError if there is no such folder
    or it is a part of a run, ConfigError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, price: float | None = None) -> None:
        self.folder, self._price, self._lock = folder, price, Lock()
        self._pages: dict[Path, tuple[tuple[float, str], float, str]] = {}
        """By run: when it last wrote and its status on the page, when that may be rendered again, the page."""
        if not folder.is_dir():
            raise CheckpointError(f"expected a run directory or a folder for runs, found none at {shown(str(folder))}")
        run = next((above for above in folder.absolute().parents if (above / "run.json").is_file()), None)
        if run is not None and not (folder / "run.json").is_file():
            raise CheckpointError(f"{shown(str(folder))} is a part of a run; did you mean {shown(str(run))}?")
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used: {error.strerror}; leave it out to take a free one"
            ) from error

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def page(self, run: Path) -> str:
        """Return the report of a run, rendered again only for something new, in at most a tenth of a core's time."""
        with self._lock:  # browsers ask for pages at the same time
            with as_written(run):
                state, now = (_changed(run), RunLayout(run).status), time.monotonic()
            shown_state, again, page = self._pages.get(run, (None, 0.0, ""))
            if state != shown_state and now >= again:
                # The lock is held meanwhile: of two browsers that ask at once, the second gets the page of the first.
                record = load_run(run, self._price)
                page = render([record], None if record.is_finished else RELOAD)
                self._pages[run] = state, now + 9 * (time.monotonic() - now), page
            return page

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, but not that a browser has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    timeout = 30
    """Seconds that a connection may take to send its request."""

    def do_GET(self) -> None:
        """Answer with a page."""
        # A page of another site can have its own name lead to this machine; its requests then name that host.
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self._answer(403, "Only http://127.0.0.1 and http://localhost are answered.")
            return
        runs = runs_below(self.server.folder)
        name = unquote(self.path.partition("?")[0]).strip("/") or "."
        try:
            # A name is one of those that were found, so no path leads out of the folder.
            if name in runs:
                self._answer(200, self.server.page(runs[name]), "text/html")
            elif name == ".":
                page = compiled("runs.html.jinja").render(
                    folder=self.server.folder, rows=list(_rows(runs)), style=resource("style.css.jinja"), reload=RELOAD
                )
                self._answer(200, page, "text/html")
            else:
                self._answer(404, f"There is no run {name}; the list of runs is at {self.server.url}")
        except AgileRLError as error:
            self._answer(500, str(error))

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")  # a page that reloads itself must not get the old one
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: a line for each reload would bury the address."""
