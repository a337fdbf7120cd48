"""How many iterations a generation has and how many questions its exam, by what is known before training."""

from dataclasses import dataclass
from typing import Self

from agilerl.config.training import TrainingConfig
from agilerl.population import Population
from agilerl.training.resolved import COMPLETION
from agilerl.training.tasks import LEAST_PANEL

GENERATIONS = 32
"""Generations that one agent alone would have in the whole budget, in searches that go by the budget."""
LEAST_GENERATIONS = 8
"""Generations below which an exam has fewer questions, rather than a run fewer generations."""
EXAM = 0.1
"""About the most that an agent's exam may cost, as a share of what it does between two of them."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of an agent's iterations and exams. Lengths are in tokens."""

    training: TrainingConfig
    prompts: int
    """Of an iteration."""
    group: int
    """Completions of each prompt: those that the run began with, so that a resumed run gets the same."""
    questions: int
    """Of the whole exam."""
    prompt: float
    """Mean length of a prompt."""
    longest: int | None
    """Most tokens of a completion, as far as that is limited."""
    turns: int = 1
    learns_from_data: bool = False

    @classmethod
    def of(cls, training: TrainingConfig, population: Population, group: int) -> Self:
        """Return the scale of a population whose task is there and whose run began with groups of this size."""
        lengths = population.examiner.lengths("exam")
        return cls(
            training=training,
            prompts=population.prompts_per_step,
            group=group,
            questions=len(lengths.prompts),
            prompt=sum(lengths.prompts) / max(len(lengths.prompts), 1),
            longest=population.examiner.eval_max_new_tokens,
            turns=lengths.turns,
            learns_from_data=population.learns_from_data,
        )

    @property
    def completion(self) -> int:
        """What a completion counts as: as much as it may have, but ``COMPLETION`` at most."""
        return self.turns * min(self.longest or COMPLETION, COMPLETION)

    def lone_agent(self) -> tuple[float, float]:
        """Return the iterations that one agent alone would have in the budget, and how many of them an exam costs.

        Completions count in full, so a budget in tokens gives no fewer iterations.
        """
        rows, t = self.prompts * self.group, self.training
        # Sampled, then trained on.
        row = self.prompt + self.completion * (1 if self.learns_from_data else 2)
        iterations = t.max_steps / rows
        if t.max_tokens is not None:
            iterations = min(iterations, t.max_tokens / (rows * row))
        # The KL takes two forward passes over prompt and completion.
        examined = self.completion
        return iterations, self.questions * t.eval_samples * examined / (rows * row)

    @property
    def ends_by_tokens(self) -> bool:
        """Whether, by that count, ``max_tokens`` ends the run before ``max_steps`` does."""
        return self.lone_agent()[0] < self.training.max_steps / (self.prompts * self.group)

    def question_cost(self) -> float:
        """Return what a question of the exam costs, in iterations of one agent.

        Counted are tokens that pass the model forwards, backwards as two; a prompt once for its completions, of which
        each counts as half of what it may have.
        """
        completion, samples = self.completion / 2, self.training.eval_samples
        # A token of an update counts 3, once forwards and twice backwards; sampling it is one more pass.
        trained = self.prompts * (self.prompt + self.group * completion) * (3 if self.learns_from_data else 4)
        return (self.prompt + samples * completion) / trained

    def generation(self, *, given: bool) -> tuple[int, int | None]:
        """Return the iterations of a generation and the questions of its exam, None for all, also if it is ``given``.

        One agent spends a 32nd of the budget in a generation, and an exam costs about a tenth of it. So small budgets
        have fewer generations, because after one iteration exams tell nothing and cost much; and if the size of the
        exam is not given, they have fewer questions rather than less than 8 generations.
        """
        t = self.training
        iterations, question = self.lone_agent()[0], self.question_cost()
        # Iterations of which the whole exam is the share EXAM.
        affordable = self.questions * question / EXAM
        if not given:
            affordable = min(affordable, iterations / LEAST_GENERATIONS)
        steps = t.evo_steps or max(1, round(iterations / GENERATIONS), round(affordable))
        # Exams may come more often than generations end.
        between = min(steps, t.evaluation_interval or steps)
        return steps, None if given else min(self.questions, max(LEAST_PANEL, int(EXAM * between / question)))
