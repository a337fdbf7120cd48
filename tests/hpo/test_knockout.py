"""The knockout and its later rounds: who stays, who challenges, who comes back, and the numbers that say why."""

import math

import pytest
from plain_agents import population

from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness, probability_better
from agilerl.hpo.knockout import KnockoutSelection, Pace, PulseSelection
from agilerl.hpo.mutation import Change, Member, Mutation, rescaled
from agilerl.hpo.parameters import Gene
from agilerl.hpo.selection import Best, Birth, Plan, Standing, apply_plan, with_factors


def solved(right: int, of: int = 40, start: int = 0) -> Fitness:
    """An exam with ``right`` prompts solved, from prompt ``start`` on."""
    return Fitness.from_scores([1.0 if start <= place < start + right else 0.0 for place in range(of)])


BROKEN = Fitness(math.nan, n=40)


def test_the_worse_half_leaves_at_every_exam_until_one_is_left() -> None:
    fitness = {i: solved(right) for i, right in enumerate((20, 30, 10, 25))}
    strategy, sizes = KnockoutSelection(4), []
    for generation in range(2):
        plan = strategy.plan(fitness, generation, 0, 4)
        assert plan.births == ()
        fitness = {i: fitness[i] for i in plan.slots}
        sizes.append(len(fitness))
    assert sizes == [2, 1]
    assert list(fitness) == [1]


EIGHT = (20, 38, 10, 21, 5, 19, 20, 8)


@pytest.mark.parametrize(
    ("spent", "floor", "left"),
    [(0.14, 1, (0, 1, 3, 6)), (0.14, 4, (0, 1, 3, 5, 6)), (0.2, 1, (1,)), (0.2, 2, (0, 1)), (0.2, 3, (0, 1, 3))],
)
def test_more_than_four_founders_leave_on_evidence_while_there_is_time(
    spent: float, floor: int, left: tuple[int, ...]
) -> None:
    """They left by their place after one short generation."""
    fitness = {i: solved(right) for i, right in enumerate(EIGHT)}
    plan = KnockoutSelection(8, floor=floor).plan(fitness, 0, 0, 8, Standing(spent))
    assert plan.slots == left
    assert plan.reason == f"knockout: 8 to {len(left)} agents"
    if (spent, floor) == (0.14, 1):
        sure = [probability_better(fitness[3], fitness[i]) for i in (5, 6)]
        assert sure[0] >= 0.8 > sure[1]
        assert plan.verdicts[5] == f"left: agent 3 is better with P = {sure[0]:.3f} >= 0.8"
        assert plan.verdicts[6] == f"kept: P = {sure[1]:.3f} < 0.8 that agent 3 is better"


def test_founders_that_no_exam_tells_apart_stay_until_the_time_for_it_is_spent() -> None:
    alike = {i: solved(10) for i in range(8)}
    assert len(KnockoutSelection(8).plan(alike, 0, 0, 8, Standing(0.1)).slots) == 8
    assert KnockoutSelection(8).plan(alike, 1, 0, 8, Standing(0.22)).slots == (0,)


@pytest.mark.parametrize("founders", [5, 8, 16, 32, 100])
def test_a_knockout_without_any_evidence_costs_about_as_much_at_any_size(founders: int) -> None:
    pace = Pace(steps=400, iteration=1 / 32 / 400, exam=0.0005)
    assert pace.knockout(4)[1] == pytest.approx(0.19, abs=0.01)
    assert 0.18 < pace.knockout(founders)[1] <= 0.3


@pytest.mark.parametrize(("iterations", "steps", "expected"), [(512, 16, [16, 16]), (32, 4, [1, 1]), (15, 2, [1])])
def test_a_small_budget_is_not_spent_on_founders(iterations: int, steps: int, expected: list[int]) -> None:
    """A generation is an eighth of a small budget: the knockout took six of the eight."""
    pace = Pace(steps, 1 / iterations, 0.0)
    assert [pace.founders_steps(agents) for agents in (4, 2)][: len(expected)] == expected
    generations, spent = pace.knockout(4)
    assert generations == len(expected)
    assert spent <= 0.28
    assert Pace(steps, 1 / iterations, 0.0, given=True).founders_steps(4) == steps


@pytest.mark.parametrize(
    ("iterations", "least", "asked", "expected"),
    [
        (5, 1, 4, 1),
        (5, 2, 4, 2),
        (19, 1, 4, 1),
        (20, 1, 4, 2),
        (32, 2, 4, 3),
        (40, 1, 4, 4),
        (512, 2, 8, 8),
        (5, 2, 1, 1),
    ],
)
def test_a_small_budget_has_fewer_founders(iterations: int, least: int, asked: int, expected: int) -> None:
    assert Pace(1, 1 / iterations, 0.0).founders(least, asked) == expected
    assert Pace(1, 1 / iterations, 0.0, given=True).founders(least, asked) == asked
    assert Pace(1, 0.0, 0.0).founders(least, asked) == asked


def test_one_founder_stays_once_a_fifth_of_the_budget_is_spent() -> None:
    fitness = {i: solved(right) for i, right in enumerate((20, 30, 10, 25))}
    assert KnockoutSelection(4).plan(fitness, 0, 0, 4, Standing(0.19)).slots == (1, 3)
    assert KnockoutSelection(4).plan(fitness, 0, 0, 4, Standing(0.21)).slots == (1,)


def test_in_doubt_the_agent_stays_that_is_trusted_most() -> None:
    alike = {i: solved(20) for i in range(4)}
    strategy = KnockoutSelection(4)
    assert strategy.seeding(1).plan(alike, 0, 0, 4, Standing(0.3)).slots == (1,)
    assert strategy.plan(alike, 0, 0, 4, Standing(0.3)).slots == (0,)
    better = alike | {2: solved(35)}
    assert strategy.seeding(1).plan(better, 0, 0, 4, Standing(0.3)).slots == (2,)
    # A rate that is too high often leads the first exam: the usual one leaves on more evidence.
    two = {0: solved(8, start=17), 1: solved(2)}
    assert 0.95 < probability_better(two[0], two[1]) < 0.99
    assert KnockoutSelection(4).plan({0: two[1], 1: two[0]}, 0, 0, 4, Standing(0.3)).slots == (1,)
    assert strategy.seeding(1).plan(two, 0, 0, 4, Standing(0.3)).slots == (1,)


def test_the_best_of_several_needs_more_evidence_than_one_rival() -> None:
    fitness = {0: solved(12), 1: solved(17, start=4), 2: solved(3), 3: solved(2)}
    sure = probability_better(fitness[1], fitness[0])
    assert 0.8 < sure < 1 - 0.2 / 3
    assert KnockoutSelection(4).plan(fitness, 0, 0, 4, Standing(0.3)).slots == (0,)
    two = {index: fitness[index] for index in (0, 1)}
    assert KnockoutSelection(4).plan(two, 1, 0, 4, Standing(0.3)).slots == (1,)


def test_an_agent_that_can_learn_no_more_gives_way_to_the_best_exam_at_a_fifth_of_its_rate() -> None:
    best = Best(0, solved(3))
    for standing, births in (
        (Standing(0.4, best, frozenset({0})), (Birth(4, 0, 0, 0.2, from_best=True),)),
        (Standing(0.4, best), ()),
        (Standing(0.4, Best(0, solved(0)), frozenset({0})), ()),
        (Standing(0.4, Best(0, solved(1)), frozenset({0})), ()),
    ):
        plan = KnockoutSelection(4).plan({0: solved(0)}, 1, 0, 4, standing)
        assert (plan.births, plan.reason) == (births, "guard" if births else "")
    never = PulseSelection(guard=1.0)
    assert never.plan({0: solved(0)}, 1, 0, 4, Standing(0.4, best, frozenset({0}))).births == ()


@pytest.mark.parametrize("founders", [1, 3])
def test_agents_that_have_all_fallen_before_an_exam_counted_begin_again_as_one(founders: int) -> None:
    untrained, broken = Best(0, Fitness(-math.inf, training=0.1)), dict.fromkeys(range(founders), Fitness(math.nan))
    plan = KnockoutSelection(founders).plan(broken, 0, 0, founders, Standing(0.1, untrained))
    assert plan.births == (Birth(founders, 0, 0, 0.2, from_best=True),)
    assert (plan.slots, plan.reason) == ((founders,), "restart")
    low = KnockoutSelection(1).plan({0: Fitness(0.0)}, 0, 0, 1, Standing(0.1, untrained))
    assert (low.births, low.slots) == ((), (0,))


def test_a_period_leaves_exams_between_the_rounds() -> None:
    fitness = {i: solved(10 + i) for i in range(4)}
    strategy = KnockoutSelection(4, period=2)
    assert strategy.plan(fitness, 0, 0, 4).slots == (0, 1, 2, 3)
    assert len(strategy.plan(fitness, 1, 0, 4).slots) == 2


def test_the_seeded_agent_loses_only_to_evidence() -> None:
    # 3 prompts more out of 40 are no evidence, 12 are.
    close = {0: solved(20), 1: solved(23), 2: solved(24), 3: solved(10)}
    sure = probability_better(close[1], close[0])
    assert 0.5 < sure < 0.96
    plan = KnockoutSelection(4, confidence=0.97).plan(close, 0, 0, 4)
    assert plan.slots == (0, 2)
    assert plan.verdicts[0] == f"kept: P = {sure:.3f} < 0.97 that agent 1 is better"
    compared = "left: place 2 of 4, but not surely better than the protected agent 0, 0.575 against 0.500"
    assert plan.verdicts[1] == f"{compared}, P = {sure:.3f} < 0.97"
    assert plan.elite == 2

    # The user's configuration leaves by place if another agent is protected, and is told so.
    usual = KnockoutSelection(2).seeding(1).plan({0: solved(20), 1: solved(21)}, 0, 0, 2)
    assert usual.verdicts[0] == (
        "left: place 2 of 2, 0.500; agent 1 is protected, as it has the usual rate of this base"
    )

    far = {0: solved(8), 1: solved(20), 2: solved(24), 3: solved(10)}
    plan = KnockoutSelection(4).plan(far, 0, 0, 4)
    assert plan.slots == (1, 2)
    assert plan.verdicts[0].startswith("left: agent 1 is better with P = ")


def test_a_tie_is_no_evidence_at_any_confidence() -> None:
    alike = {0: solved(10), 1: solved(10), 2: solved(10), 3: solved(10)}
    assert 0 in KnockoutSelection(4, confidence=0.5).plan(alike, 0, 0, 4).slots


def test_broken_agents_leave_at_once_and_the_seed_is_no_exception() -> None:
    fitness = {0: BROKEN, 1: solved(3), 2: BROKEN, 3: solved(4)}
    assert KnockoutSelection(4, period=2).plan(fitness, 0, 0, 4).slots == (1, 3)


def test_a_floor_keeps_its_agents_as_they_are() -> None:
    fitness = {0: solved(20), 1: solved(5)}
    plan = KnockoutSelection(4, floor=2).plan(fitness, 7, 0, 4)
    assert plan.slots == (0, 1)
    assert plan.births == ()


def test_later_rounds_are_planned_by_the_strategy_given() -> None:
    plan = KnockoutSelection(4, pulses=PulseSelection(factors=(), guard=1.0)).plan({2: solved(20)}, 2, 0, 4)
    assert plan == Plan(2, 2, (2,))


def test_a_pulse_forks_the_agent_into_challengers() -> None:
    plan = KnockoutSelection(4).plan({2: solved(20)}, 2, 0, 4, Standing(0.3))
    assert plan.slots == (2, 4)
    assert plan.births == (Birth(4, 2, factor=3.0),)
    assert plan.deaths == plan.mutants == ()
    assert KnockoutSelection(4).plan({2: solved(20)}, 3, 0, 4, Standing(0.3)).births == ()
    assert KnockoutSelection(4).plan({2: solved(20)}, 2, 0, 4, Standing(0.45)).births == ()


def test_the_better_challenger_takes_over_and_the_rest_leave() -> None:
    strategy = PulseSelection(factors=(3.0, 0.4))
    won = strategy.plan({2: solved(20), 4: solved(33), 5: solved(1)}, 3, 0, 6, Standing(0.5))
    assert (won.slots, won.deaths) == ((4,), (2, 5))
    assert "P = 0.9" in won.verdicts[4] or "P = 1.0" in won.verdicts[4]
    assert won.births == ()
    kept = strategy.plan({2: solved(20), 4: solved(21), 5: solved(1)}, 3, 0, 6, Standing(0.3))
    assert (kept.slots, kept.deaths) == ((2,), (4, 5))
    assert kept.births == ()
    assert kept.verdicts[2].startswith("kept: P = ")
    numbers = kept.verdicts[2].removeprefix("kept: ").removesuffix(" that agent 4 is better")
    assert kept.verdicts[4] == f"left: not surely better than agent 2, 0.525 against 0.500, {numbers}"
    assert kept.verdicts[5] == "left: place 3 of 3, 0.025"
    worse = strategy.plan({2: solved(20), 4: solved(1), 5: solved(1)}, 3, 0, 6, Standing(0.3))
    assert worse.verdicts[4].startswith("left: not better than agent 2, 0.025 against 0.500, P = 0.0")


def test_one_that_takes_over_is_challenged_again_at_once() -> None:
    fitness = {2: solved(20), 4: solved(33)}
    plan = PulseSelection().plan(fitness, 3, 0, 5, Standing(0.3))
    assert (plan.slots, plan.births, plan.deaths) == ((4, 5), (Birth(5, 4, factor=3.0),), (2,))
    assert PulseSelection().plan(fitness, 3, 0, 5, Standing(0.45)).births == ()


def test_the_guard_brings_the_best_exam_back() -> None:
    best = Best(0, solved(35))
    plan = PulseSelection().plan({7: solved(10)}, 4, 0, 8, Standing(0.8, best))
    assert plan.births == (Birth(8, 0, hyperparameters_from=7, factor=0.4, from_best=True),)
    assert (plan.slots, plan.deaths) == ((8,), (7,))
    assert "0.250 in the exam is below the best one, agent 0's 0.875" in plan.verdicts[7]
    # 3 prompts below is what exams do; and a broken agent has fallen below anything.
    assert PulseSelection().plan({7: solved(32)}, 4, 0, 8, Standing(0.8, best)).births == ()
    assert PulseSelection().plan({7: BROKEN}, 4, 0, 8, Standing(0.8, best)).slots == (8,)
    assert PulseSelection(guard=1.0).plan({7: solved(10)}, 4, 0, 8, Standing(0.8, best)).births == ()


def test_the_guard_wants_more_evidence_the_more_exams_there_were() -> None:
    # The best of many exams is better than the next one by chance; one prompt in 40 more or less is noise.
    best = Best(0, Fitness.from_scores([1.0] * 30 + [0.0] * 10))
    present = Fitness.from_scores([1.0] * 23 + [0.0] * 17)
    sure = probability_better(best.fitness, present)
    assert 0.99 < sure < 1 - 0.01 / 40
    assert PulseSelection().plan({7: present}, 0, 0, 8, Standing(0.8, best)).reason == "guard"
    late = PulseSelection().plan({7: present}, 39, 0, 8, Standing(0.8, best))
    assert (late.slots, late.births) == ((7,), ())


def test_a_plan_with_everything_survives_json() -> None:
    plan = PulseSelection().plan({7: solved(10)}, 4, 0, 8, Standing(0.8, Best(0, solved(35))))
    assert Plan.from_dict(plan.to_dict()) == plan
    # What only these strategies use stands nowhere else, so that the files of other runs keep their bytes.
    plain = Plan(0, 0, (0, 2), (Birth(2, 0),), (1,)).to_dict()
    assert plain["births"] == [{"child": 2, "parent": 0, "hyperparameters_from": None}]
    assert "verdicts" not in plain


def test_a_child_gets_other_learning_rates_and_a_fallen_agent_is_revived() -> None:
    pop = population(0.2)
    copy = pop[0].clone(0)
    copy.weights = [7.0]
    plan = PulseSelection().plan({0: solved(10)}, 4, 0, 1, Standing(0.8, Best(0, solved(35))))
    _, after = apply_plan(plan, pop, copy.clone)
    assert [(agent.index, agent.weights) for agent in after] == [(1, [7.0])]
    planned = with_factors(plan, [Member.of(agent) for agent in after], [Mutation(1)])
    assert planned[0].changes == (Change("lr", 1e-6, pytest.approx(4e-7)),)
    with pytest.raises(ConfigError, match="no copy"):
        apply_plan(plan, pop)


def test_rescaled_rates_stay_in_their_range_and_other_genes_where_they_are() -> None:
    genes = {"lr": Gene("lr", "float", min=1e-6, max=1e-3), "group_size": Gene("group_size", "int", min=2, max=8)}

    def moved(lr: float, factor: float) -> float | None:
        changes = rescaled(Member(0, {"lr": lr, "group_size": 4}, genes), factor).changes
        assert all(change.gene == "lr" for change in changes)
        return float(changes[0].new) if changes else None

    assert moved(1e-4, 3.0) == pytest.approx(3e-4)
    assert moved(9e-4, 3.0) == 1e-3
    assert moved(1e-3, 3.0) is None
    assert moved(5e-3, 3.0) is None
    assert moved(5e-3, 0.4) == pytest.approx(2e-3)
    assert "no learning rate evolves" in rescaled(Member(0, {}, {}), 3.0).details["reason"]
