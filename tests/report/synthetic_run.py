"""A made-up run directory in the formats of a real one: 4 agents, a diverged one, births, deaths and mutations."""

import math

import numpy as np

from agilerl.runs import JsonLines, RunDirectory
from agilerl.runs.completions import CompletionRecord, write_completions

ATTACK = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028<!--<script>"


class SyntheticRun:
    """Plays the training loop: agents learn at a pace their learning rate decides, and evolve."""

    def __init__(self, root, *, agents=4, generations=10, steps=5, seed=0, finished=True, hostile=False, cut=None):
        self.rng = np.random.default_rng(seed)
        self.size, self.generations, self.steps, self.cut = agents, generations, steps, cut
        self.hostile = hostile
        config = {
            "algorithm": {"name": "GRPO", "group_size": 8, "lr": 1e-4, "beta": 0.0},
            "environment": {"task": "reasoning_gym:spell_backward", "params": {"min_word_len": 3, "max_word_len": 6}},
            "network": {"pretrained_model_name_or_path": ATTACK if hostile else "agilerl/tiny"},
            "training": {"pop_size": agents, "eval_prompts": 200, "test_prompts": 400},
        }
        self.run = RunDirectory.create(root, config, seed, command=["agilerl", "train", "--seed", str(seed)])
        self.metrics, self.lineage = JsonLines(self.run.metrics), JsonLines(self.run.lineage)
        self.skill, self.genes, self.tokens, self.lost = {}, {}, {}, {}
        self.next_index = 0
        self.play(finished)
        self.metrics.close()
        self.lineage.close()
        self.run.close()

    def play(self, finished):
        alive = []
        for rate in np.geomspace(1e-5, 2e-2, self.size):
            alive.append(self.birth(None, 0, 0, {"lr": float(rate), "beta": 0.001, "clip_coef": 0.2, "group_size": 8}))
        for generation in range(self.generations):
            step = generation * self.steps
            for step in range(generation * self.steps + 1, (generation + 1) * self.steps + 1):
                for agent in alive:
                    self.train(agent, generation, step)
                if step % 10 == 0 or step == 1:
                    self.sample(alive, generation, step)
            fitness = {agent: self.exam(agent, generation, step) for agent in alive}
            elite = max(fitness, key=lambda a: (math.isfinite(fitness[a]), fitness[a]))
            self.lineage.write({"event": "elite", "agent": elite, "generation": generation})
            if generation < self.generations - 1:
                alive = self.evolve(alive, fitness, elite, generation, step)
            self.report_evolution(alive, fitness, generation, step)
        if finished:
            self.finish(elite, fitness)

    def birth(self, parent, generation, step, genes):
        index = self.next_index
        self.next_index += 1
        self.skill[index] = 0.37 if parent is None else self.skill[parent]
        self.genes[index], self.tokens[index], self.lost[index] = genes, self.tokens.get(parent, 0), 0
        record = {"event": "birth", "agent": index, "parent": parent, "generation": generation, "step": step}
        self.lineage.write({**record, "hyperparameters": genes})
        return index

    def train(self, agent, generation, step):
        rate = self.genes[agent]["lr"]
        diverged = rate > 8e-3
        if diverged:
            self.skill[agent] *= 0.6
            self.lost[agent] += step % 5 in (2, 3)
        else:
            pace = min(rate / 1e-3, 1.0) ** 0.7
            self.skill[agent] += 0.06 * pace * (0.93 - self.skill[agent])
        noise = self.rng.normal(0, 0.03)
        length = 5.5 + self.rng.normal(0, 0.2) + 4 * diverged
        self.tokens[agent] += int(256 * length)
        line = {"kind": "train", "generation": generation, "step": step, "agent": agent}
        seconds = 0.9 + 0.1 * self.rng.random()
        self.metrics.write(
            line
            | {
                "reward": float(np.clip(self.skill[agent] * 0.9 + noise, 0, 1)),
                "reward_std": 0.4,
                "loss": math.nan if diverged and step % 5 in (2, 3) else float(self.rng.normal(0, 0.02)),
                "kl": float(rate * 30 * step**0.5),
                "entropy": float(0.9 - 0.6 * self.skill[agent] + self.rng.normal(0, 0.01)),
                "learning_rate": rate,
                "grad_norm": math.inf if diverged and step % 5 == 3 else float(abs(self.rng.normal(0.3, 0.1))),
                "completions/mean_length": float(length),
                "completions/min_length": 3,
                "completions/max_length": 10,
                "completions/clipped_ratio": 0.4 if diverged else 0.01,
                "frac_reward_zero_std": float(self.skill[agent] ** 4),
                "clip_ratio/region_mean": float(min(0.5, rate * 60)),
                "num_tokens": self.tokens[agent],
                "skipped_steps": self.lost[agent],
                "time/rollout": 0.24 * seconds,
                "time/reward": 0.02 * seconds,
                "time/update": 0.7 * seconds,
                "step_time": seconds,
                "tokens_per_second": 5600 / seconds,
                "memory/peak": 900_000_000 + agent,
            }
        )

    def exam(self, agent, generation, step):
        diverged = self.genes[agent]["lr"] > 8e-3
        mean = math.nan if diverged else float(np.clip(self.skill[agent] + self.rng.normal(0, 0.015), 0, 1))
        stderr = math.nan if diverged else math.sqrt(mean * (1 - mean) / 200)
        fitness = {"event": "fitness", "agent": agent, "generation": generation, "step": step, "mean": mean}
        tokens = {"generated": self.tokens[agent] * 2, "trained": self.tokens[agent], "evaluated": 1100 * generation}
        self.lineage.write({**fitness, "stderr": stderr, "n": 200, "tokens": tokens})
        line = {"kind": "eval", "generation": generation, "step": step, "agent": agent}
        self.metrics.write({**line, "eval/reward_mean": mean, "eval/stderr": stderr, "eval/n": 200, "time/eval": 0.5})
        return mean

    def evolve(self, alive, fitness, elite, generation, step):
        finite = [agent for agent in alive if math.isfinite(fitness[agent])]
        parents = [max(self.rng.choice(finite, 2), key=fitness.get) for _ in range(self.size - 1)]
        children = [elite]
        for parent in map(int, parents):
            genes = dict(self.genes[parent])
            changes, kind = [], ["none", "hyperparameters", "hyperparameters", "rank"][self.rng.integers(4)]
            if kind == "hyperparameters":
                for gene in self.rng.choice(["lr", "beta", "clip_coef", "group_size"], self.rng.integers(1, 3), False):
                    factor = float(np.exp(self.rng.normal(0, 1)))
                    new = max(2, int(genes[gene] * factor) + 1) if gene == "group_size" else genes[gene] * factor
                    changes.append({"gene": str(gene), "old": genes[gene], "new": new})
            child = self.birth(parent, generation, step, genes)
            self.genes[child] |= {change["gene"]: change["new"] for change in changes}
            record = {"event": "mutation", "agent": child, "generation": generation, "kind": kind}
            self.lineage.write({**record, "changes": changes})
            children.append(child)
        for agent in alive:
            if agent != elite:
                reason = "not selected" if math.isfinite(fitness[agent]) else "fitness is not finite"
                reason = ATTACK if self.hostile else reason
                self.lineage.write({"event": "death", "agent": agent, "generation": generation, "reason": reason})
        return children

    def report_evolution(self, alive, fitness, generation, step):
        finite = [f for f in fitness.values() if math.isfinite(f)]
        line = {"kind": "evolution", "generation": generation, "step": step, "evo/fitness/best": max(finite)}
        line |= {"evo/fitness/mean": float(np.mean(finite)), "evo/fitness/std": float(np.std(finite))}
        line |= {"evo/replacements": self.size - 1, "evo/diversity": 0.5, "time/evolve": 0.1}
        line |= {f"evo/hp/{name}/{agent}": v for agent in fitness for name, v in self.genes[agent].items()}
        self.metrics.write(line)

    def sample(self, alive, generation, step):
        rows = []
        for agent in alive:
            for group in range(3):
                word = "".join(self.rng.choice(list("abcdefgh"), 5))
                for sample in range(4):
                    right = self.rng.random() < self.skill[agent]
                    text = word[::-1] if right else word[::-1][:-1]
                    prompt = f"Spell this word backward (example: sun -> nus): {word}"
                    row = (generation, step, agent, group, sample, prompt, ATTACK if self.hostile else text)
                    rows.append(CompletionRecord(*row, word[::-1], float(right), len(text) + 1, "stop"))
        write_completions(self.run.completions, step, rows)

    def finish(self, elite, fitness):
        tests = {}
        for who, agent, mean in (("base", None, 0.3675), ("median_first_generation", 1, 0.5525), ("elite", elite, 0.9)):
            mean = round(400 * mean) / 400
            stderr = math.sqrt(mean * (1 - mean) / 400)
            line = {"kind": "test", "who": who, "agent": agent, "eval/reward_mean": mean, "eval/stderr": stderr}
            self.metrics.write({**line, "eval/n": 400})
            tests[who] = {"mean": mean, "stderr": stderr, "n": 400}
        trained = sum(self.tokens.values())
        self.run.elite.mkdir()
        (self.run.elite / "adapter_model.safetensors").touch()
        self.run.finish(
            {
                "generations": self.generations,
                "agents": self.size,
                "tokens": {"generated": 2 * trained, "trained": trained, "evaluated": 40_000},
                "seconds": 171.4,
                "test": tests,
                "fitness": {str(agent): {"mean": f, "stderr": 0.02, "n": 200} for agent, f in fitness.items()},
                "elite": {"index": elite, "adapter": "elite", "hyperparameters": self.genes[elite]},
            }
        )


def make_run(root, **settings):
    """Write a run directory and return its path."""
    SyntheticRun(root, **settings)
    return root
