"""Weights of a reward as genes: evolution finds out which part of a reward misleads. About 20 seconds on one core.

Tutorial 08 rewards length, and gets answers with a tail of junk. Who writes a reward seldom knows which of its parts
helps. So let every agent have its own weight for that part, and compare all of them by what is really wanted: the exam
counts exact answers and nothing else, so agents cannot win by weighting what is easy.
"""

from agilerl import (
    GRPO,
    HyperparameterConfig,
    Mutations,
    Population,
    ReasoningGymTask,
    RLParameter,
    Runtime,
    TournamentSelection,
)
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.rewards import CombinedGrader

words = ReasoningGymTask("spell_backward", {"min_word_len": 3, "max_word_len": 6}, exam_prompts=100, test_prompts=200)


def longer(completion: str) -> float:
    """The bonus in question: a tenth for each character. Right answers have three to six."""
    return 0.1 * len(completion)


grader = CombinedGrader({"exact": TaskGrader(words), "longer": longer})
task = GradedTask(words, grader, fitness_grader=TaskGrader(words))

# Four agents, whose weights of the bonus are spread from 0 to 2. Training sees them, exams do not.
agents = GRPO.population(
    4,
    runtime=Runtime.from_pretrained("embedded"),
    hp_config=HyperparameterConfig(**{"reward_weights.longer": RLParameter(min=0.0, max=2.0)}),
    reward_weights={"longer": 2.0},
    lr=2e-3,
    beta=0.0,
    group_size=8,
    batch_size=128,
    max_output_tokens=12,
)
population = Population(agents, task, prompts_per_step=16, eval_max_new_tokens=12)
selection = TournamentSelection(tournament_size=2, elitism=True, population_size=4)
mutations = Mutations(no_mutation=0.2, architecture=0, new_layer_prob=0, parameters=0, activation=0, rl_hp=0.8)


def weight(agent: GRPO) -> float:
    return agent.hyperparameters["reward_weights.longer"]


founders = {agent.index: weight(agent) for agent in population.agents}
print("weights of the bonus:", ", ".join(f"agent {index}: {value:.2f}" for index, value in founders.items()))
for generation in range(3):
    for _ in range(4):
        metrics = population.learn(population.rollout())
    fitness = population.evaluate()
    for agent in population.agents:
        print(
            f"  agent {agent.index}: weight {weight(agent):.2f}, own reward {metrics[agent.index]['reward']:.2f}, "
            f"right {fitness[agent.index].mean:.2f}"
        )
    evolution = population.evolve(fitness, selection, mutations, generation=generation, seed=42)
    elite = population.agent(evolution.plan.elite)
    print(f"generation {generation}: elite {elite.index}, weight {weight(elite):.2f}")

before = population.evaluate_base("test")
after = population.evaluate("test", agents=[elite])[elite.index]
left = [weight(agent) for agent in population.agents]
print(f"weights left: {', '.join(f'{value:.2f}' for value in left)}; expect the heaviest, 2.00 and 1.66, to be gone")
print(f"exactly right on the test: {before.mean:.2f} -> {after.mean:.2f}; expect 0.4 -> 0.9")
assert weight(elite) < max(founders.values())
assert after.mean > before.mean
