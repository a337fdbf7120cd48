"""Progress and result of a run on the terminal: a live table where there is one, plain lines elsewhere."""

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from agilerl.hpo.fitness import Fitness
from agilerl.training.events import Event, Evolved, ExamDone, IterationDone, PhaseStarted, RunFinished, RunStarted
from agilerl.training.setup import Session

__all__ = ["watch"]


def watch(events: Iterator[Event], session: Session, console: Console) -> dict[str, Any]:
    """Follow a run to its end, showing it; returns its summary."""
    view = _View(session, console)
    summary: dict[str, Any] = {}
    with view:
        for event in events:
            view.show(event)
            if isinstance(event, RunFinished):
                summary = dict(event.summary)
    _print_result(summary, view.out, console)
    return summary


class _View:
    """One row an agent, a bar for the run and one for the phase."""

    def __init__(self, session: Session, console: Console) -> None:
        self.session, self.console = session, console
        self.metrics: Mapping[int, Mapping[str, float]] = {}
        self.fitness: Mapping[int, Fitness] = {}
        self.mutations: Mapping[int, str] = {}
        self.elite: int | None = None
        self.out: Any = None
        self.started = perf_counter()
        columns = (TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self.bars = Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)
        self.run = self.bars.add_task("run", total=1.0)
        self.phase = self.bars.add_task("start", total=None)
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> "_View":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, RunStarted):
            self.out = event.out
        elif isinstance(event, PhaseStarted):
            total = self.session.config.training.evo_steps if event.name == "train" else None
            self.bars.reset(self.phase, description=event.name, total=total)
        elif isinstance(event, IterationDone):
            self.metrics = event.metrics
            self.bars.update(self.run, completed=event.progress)
            self.bars.advance(self.phase)
            self._line(self._iteration_line(event))
        elif isinstance(event, ExamDone):
            self.fitness = event.fitness
            self._line(f"generation {event.generation}: exam " + ", ".join(_scores(event.fitness)))
        elif isinstance(event, Evolved):
            self.mutations, self.elite = event.mutations, event.plan.elite
            births = ", ".join(f"{b.parent} -> {b.child}" for b in event.plan.births) or "nobody"
            changes = ", ".join(f"{i}: {m}" for i, m in event.mutations.items() if m != "None") or "nothing"
            self._line(f"generation {event.generation}: elite {event.plan.elite}; born {births}; mutated {changes}")
        if self.live is not None:
            self.live.update(Group(self._table(), self.bars))

    def _line(self, text: str) -> None:
        if self.live is None:
            self.console.print(text, highlight=False, soft_wrap=True)

    def _iteration_line(self, event: IterationDone) -> str:
        rewards = ", ".join(f"{i}: {m['reward']:.3f}" for i, m in event.metrics.items() if "reward" in m)
        spent = perf_counter() - self.started
        left = spent / event.progress - spent if event.progress > 0 else 0.0
        return f"iteration {event.iteration} ({event.progress:.0%}, about {left:.0f} s left): reward {rewards}"

    def _table(self) -> Table:
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for name, justify in (("agent", "right"), ("parent", "right"), ("genes", "left"), ("last mutation", "left")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for name in ("reward", "fitness", "KL", "entropy", "tokens/s"):
            table.add_column(name, justify="right")
        for agent in self.session.population.agents:
            m, fitness = self.metrics.get(agent.index, {}), self.fitness.get(agent.index)
            genes = ", ".join(f"{k}={v:.2g}" if isinstance(v, float) else f"{k}={v}" for k, v in agent.hyperparameters.items())
            table.add_row(
                f"{agent.index}{'*' if agent.index == self.elite else ''}",
                "-" if agent.parent is None else str(agent.parent),
                genes or "-",
                "-" if agent.mut == "None" else agent.mut,
                _cell(m.get("reward"), "{:.3f}"),
                "-" if fitness is None else _score(fitness),
                _cell(m.get("kl"), "{:.4f}"),
                _cell(m.get("entropy"), "{:.3f}"),
                _cell(m.get("tokens_per_second"), "{:,.0f}"),
            )
        return table


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _score(fitness: Fitness) -> str:
    return f"{fitness.mean:.3f} ± {fitness.stderr:.3f}" if fitness.is_finite else "not finite"


def _scores(fitness: Mapping[int, Fitness]) -> list[str]:
    return [f"{index}: {_score(f)}" for index, f in fitness.items()]


def _print_result(summary: Mapping[str, Any], out: Any, console: Console) -> None:
    table = Table(title="Held-out test (greedy)", title_justify="left", box=None, padding=(0, 3, 0, 0))
    for name in ("", "mean", "stderr", "n"):
        table.add_column(name, justify="left" if not name else "right")
    elite = summary["elite"]
    rows = {"base": "base model", "median_first_generation": "median agent of generation 0", "elite": "elite"}
    for key, label in rows.items():
        result = summary["test"].get(key)
        if result is not None:
            who = f"{label} (agent {result['index']})" if "index" in result else label
            table.add_row(who, *(_cell(result[k], "{:.3f}") for k in ("mean", "stderr")), str(result["n"]))
    console.print(table)
    if elite is None:
        console.print("No agent had a finite fitness, so there is no elite.")
    else:
        steps = [
            f"{a['agent']} ({', '.join(f'{k}={v:.3g}' if isinstance(v, float) else f'{k}={v}' for k, v in a['hyperparameters'].items())})"
            for a in summary["lineage"]
        ]
        console.print(f"\nWinning lineage  {' -> '.join(steps)}", highlight=False)
        console.print(f"Elite adapter    {out / 'elite'}", highlight=False, soft_wrap=True)
    console.print(f"Report           {out / 'report.html'}", highlight=False, soft_wrap=True)
    total = sum(summary["tokens"].values())
    console.print(f"{summary['generations']} generations, {total:,} tokens, {summary['seconds']:.0f} s", highlight=False)
