"""A run directory out of the lines a test wants in it."""

from agilerl.runs import JsonLines, RunDirectory


def write_run(root, *, lineage=(), metrics=(), summary=None, config=None):
    with RunDirectory.create(root, config or {}, 0, command=["agilerl"]) as run:
        for path, records in ((run.lineage, lineage), (run.metrics, metrics)):
            with JsonLines(path) as lines:
                for record in records:
                    lines.write(record)
        if summary is not None:
            run.finish(summary)
    return root


def birth(agent, parent, generation, **genes):
    return {"event": "birth", "agent": agent, "parent": parent, "generation": generation, "hyperparameters": genes}


def fitness(agent, generation, mean, stderr=0.1, n=20):
    line = {"event": "fitness", "agent": agent, "generation": generation, "step": 10 * (generation + 1), "mean": mean}
    return {**line, "stderr": stderr, "n": n}


def train(agent, step, generation=0, **values):
    return {"kind": "train", "agent": agent, "step": step, "generation": generation, **values}
