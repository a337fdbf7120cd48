"""A custom multi-turn environment: a plain class with reset and step, checked, trained on, evaluated.

A lock has a secret digit. The agent tries digits; each answer says how far off it was, so two tries are enough: the
first measures the distance, the second goes there (or to the other side). Nothing is inherited, nothing registered.
"""

from gymnasium.spaces import Text

from agilerl import (
    GRPO,
    EpisodeTask,
    HyperparameterConfig,
    Mutations,
    Population,
    RLParameter,
    Runtime,
    TournamentSelection,
)
from agilerl.envs.check import check_env
from agilerl.streams import stream


class Lock:
    """Open the lock: 1 for the right digit, a third less for each earlier try."""

    max_turns = 3
    action_space = Text(1, charset="12345")  # optional: what check_env plays with

    def reset(self, *, seed: int = 0) -> tuple[str, dict]:
        self.secret = int(stream(seed, "lock").integers(1, 6))  # a pure function of the seed: groups share a secret
        self.tries = 0
        return "1-5", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.tries += 1
        guess = int(action) if action in "12345" and len(action) == 1 else None
        if guess == self.secret:
            return "=", 1.0 - (self.tries - 1) / 3, True, False, {"success": True}
        told = "?" if guess is None else str(abs(guess - self.secret))
        return told, 0.0, self.tries == self.max_turns, False, {"success": False}

    def close(self) -> None:
        pass


def main() -> None:
    for finding in check_env(Lock):
        print(finding)
    runtime = Runtime.from_pretrained("embedded")
    task = EpisodeTask(Lock, exam_episodes=32, test_episodes=100)
    agents = GRPO.population(
        2,
        runtime=runtime,
        hp_config=HyperparameterConfig(lr=RLParameter(min=5e-4, max=5e-3)),
        lr=2e-3,
        beta=0.0,
        group_size=16,
        batch_size=64,
        max_output_tokens=2,
    )
    population = Population(agents, task, prompts_per_step=4, eval_max_new_tokens=2)
    selection = TournamentSelection(tournament_size=2, elitism=True, population_size=2)
    mutations = Mutations(no_mutation=0.2, architecture=0, new_layer_prob=0, parameters=0, activation=0, rl_hp=0.8)
    before = population.evaluate_base("test")
    for generation in range(3):
        for _ in range(6):
            metrics = population.learn(population.rollout())
        fitness = population.evaluate()
        evolution = population.evolve(fitness, selection, mutations, generation=generation, seed=42)
        best = fitness[evolution.plan.elite].mean
        turns = sum(m["env/turns_mean"] for m in metrics.values()) / len(metrics)
        print(f"generation {generation}: best return {best:.2f}, {turns:.1f} tries an episode")
    elite = population.agent(evolution.plan.elite)
    after = population.evaluate("test", agents=[elite])[elite.index]
    print(f"return on held-out seeds: {before.mean:.2f} -> {after.mean:.2f} ({after.n} episodes); expect 0.2 -> 0.4")
    assert after.mean > before.mean


if __name__ == "__main__":
    main()
