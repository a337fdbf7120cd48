"""A table of attacks on what reads completions and parameters: each is carried out, and leaves no trace.

A trace is a file that the attack makes, or a marker of a secret file that shows up where it must not. Two walls are
tried each by itself: the screen, which refuses texts, and the process without privileges behind it.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from agilerl.config.manifest import load_manifest
from agilerl.config.named_files import check_unchanged, digests, named_files
from agilerl.config.run import RunConfig
from agilerl.envs.adapters import make_env
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.scorers import IN_THIS_PROCESS, Scorers, encode, is_harmless, pays_for_nothing
from agilerl.envs.upstream import build_dataset, check_params, known_tasks, quiet
from agilerl.errors import CheckpointError, ConfigError, RewardError
from agilerl.rewards import Accuracy, IsolatedGrader

MARKER = "xyzzycanary"


@dataclass(frozen=True)
class Attack:
    """An answer with ``TRACE`` where the path of the file goes that it makes."""

    name: str
    tasks: tuple[str, ...]
    answer: str

    def __str__(self) -> str:
        return self.name


PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
MAKES = "open('TRACE','w').close()"
ANSWERS = [
    Attack("call", PARSED + EVALUATED, MAKES),
    Attack("call in a list", PARSED + EVALUATED, f"[{MAKES}]"),
    Attack("import", PARSED + EVALUATED, "__import__('pathlib').Path('TRACE').touch()"),
    Attack("lambda that sympy rewrites", PARSED, f"lambda {MAKES}: x"),
    Attack("lambda of two", PARSED, f"lambda x, {MAKES}: x"),
    Attack("lambda called", PARSED + EVALUATED, f"(lambda: {MAKES})()"),
    Attack("lambda after a line", PARSED, f"1 + \\\nlambda {MAKES}: x"),
    Attack("text that sympy evaluates again", PARSED, '"' + MAKES + '"'),
    Attack("text inside a function", PARSED, f'sin("{MAKES}")'),
    Attack("text inside a number", PARSED, f'Integer("{MAKES}")'),
    Attack("text in brackets", PARSED, f'(("{MAKES}"))'),
    Attack("text joined", PARSED, f'sin("{MAKES[:8]}" "{MAKES[8:]}")'),
    Attack("bytes", PARSED, f'sin(b"{MAKES}")'),
    Attack("formatted text", PARSED + EVALUATED, f'f"{{{MAKES}}}"'),
    Attack("method", PARSED, f'x.replace(x, "{MAKES}")'),
    Attack("keyword argument", PARSED, f"sin(x, evaluate={MAKES})"),
    Attack("sympify by name", PARSED, f'sympify("{MAKES}")'),
    Attack("decorated name", PARSED, f"Symbol('x').subs('x', '{MAKES}')"),
    Attack("factorial notation", PARSED, f"({MAKES})!"),
    Attack("repeated decimal", PARSED, f"0.2[{MAKES}]"),
    Attack("comprehension", PARSED + EVALUATED, f"[{MAKES} for i in (1,)]"),
    Attack("walrus", PARSED + EVALUATED, f"(y := {MAKES})"),
    Attack("conditional", PARSED + EVALUATED, f"{MAKES} if 1 else 2"),
    Attack("subscript", PARSED + EVALUATED, f"[1][{MAKES} or 0]"),
    Attack("starred", PARSED + EVALUATED, f"[*[{MAKES}]]"),
    Attack("dictionary", PARSED + EVALUATED, f"{{1: {MAKES}}}"),
    Attack("comparison", PARSED + EVALUATED, f"1 < {MAKES}"),
    Attack("wide letters", PARSED + EVALUATED, "ｏｐｅｎ('TRACE','w')"),
    Attack("white space before", PARSED + EVALUATED, f" \t\n\x0c{MAKES}"),
    Attack("line continued at the end", PARSED + EVALUATED, f"{MAKES}\\\n "),
    Attack("carriage return", PARSED + EVALUATED, f"1\r{MAKES}"),
    Attack("comment and line", PARSED, f"(x #\n+ {MAKES})"),
    Attack("semicolon", PARSED + EVALUATED, f"1; {MAKES}"),
    Attack("the problem's own class", PARSED + EVALUATED, f"().__class__.__base__.__subclasses__() or {MAKES}"),
]


@pytest.fixture(scope="module", autouse=True)
def one_worker() -> Iterator[None]:
    """Keep the worker from ending and starting again between tests."""
    holder = Scorers("n_queens", [{}], [])
    holder._share_worker()
    yield
    holder.close()


def made(name: str, params: dict[str, Any] | None = None) -> tuple[ReasoningGymTask, dict[str, Any]]:
    task = ReasoningGymTask(name, params, exam_prompts=1, test_prompts=0)
    return task, task.row("train", 0)


@pytest.mark.parametrize("name", PARSED + EVALUATED)
@pytest.mark.processes
def test_no_answer_runs(name: str, tmp_path: Path) -> None:
    task, row = made(name)
    for attack in (attack for attack in ANSWERS if name in attack.tasks):
        trace = tmp_path / "trace"
        answer = attack.answer.replace("TRACE", str(trace))
        assert not (is_harmless(name, answer) and parses(answer)), attack.name
        assert task.reward(answer, row) == 0.0, attack.name
        assert task.reward(f"<answer>{answer}</answer>", row) == 0.0, attack.name
        assert not trace.exists(), attack.name


@pytest.mark.parametrize("name", PARSED + EVALUATED)
def test_the_screen_stops_them_without_the_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scorer is in this process, so what the screen lets through would leave its trace."""
    monkeypatch.setattr("agilerl.envs.scorers.IN_THIS_PROCESS", IN_THIS_PROCESS | {name})
    task, row = made(name)
    for attack in (attack for attack in ANSWERS if name in attack.tasks):
        trace = tmp_path / "trace"
        assert task.reward(attack.answer.replace("TRACE", str(trace)), row) == 0.0, attack.name
        assert not trace.exists(), attack.name


@pytest.mark.parametrize("name", ["simple_integration", "n_queens"])
def test_what_runs_behind_the_screen_is_confined(name: str, tmp_path: Path) -> None:
    """The screen is left out: the process itself neither writes, nor reads, nor finds anybody."""
    task, row = made(name)
    secret = tmp_path / "secret"
    secret.write_text(MARKER)
    tmp_path.chmod(0o777)
    inside = tmp_path / "trace"
    texts = [
        f"open({str(inside)!r},'w').close()",
        f"__import__('os').mkdir({str(inside)!r})",
        f"__import__('subprocess').run(['touch', {str(inside)!r}])",
        f"__import__('os').rename({str(secret)!r}, {str(inside)!r})",
        f"__import__('os').symlink('/etc/passwd', {str(inside)!r})",
    ]
    for text in texts:
        assert asked(task, text, row) in (0.0, None)
        assert not inside.exists()
    assert secret.read_text() == MARKER


def asked(task: ReasoningGymTask, text: str, row: dict[str, Any]) -> float | None:
    """Score without the screen; None where the scorer failed."""
    try:
        return task._scorers._ask(text, row, 0)
    except RewardError:
        return None


def report(completion: str) -> None:
    """A grader that says what it was able to do, which its error carries out."""
    import socket
    import subprocess

    done = {}
    place, owner = Path(completion.partition("|")[0]), int(completion.partition("|")[2])
    tries = {
        "reads": lambda: place.read_text(),
        "lists": lambda: os.listdir(place.parent),
        "writes": lambda: place.with_name("trace").touch(),
        "starts": lambda: subprocess.run(["true"], check=True),
        "connects": lambda: socket.create_connection(("127.0.0.1", 9), 1),
        "signals": lambda: os.kill(owner, 0),
        "environment": lambda: os.environ["CANARY_KEY"],
        "processes": lambda: Path("/proc/1/environ").read_bytes(),
        "root": lambda: os.setuid(0),
    }
    for name, attempt in tries.items():
        try:
            attempt()
            done[name] = "done"
        except ConnectionRefusedError:
            done[name] = "done"  # nobody listens, but the network is there
        except BaseException as error:
            done[name] = type(error).__name__
    raise RuntimeError(json.dumps(done))


def abilities(*, confined: bool, secret: Path) -> dict[str, str]:
    with IsolatedGrader(f"{__name__}:report", confined=confined, timeout=30) as grader:
        (outcome,) = grader([""], [f"{secret}|{os.getpid()}"])
    text = str(outcome).partition("RuntimeError: ")[2]
    found: dict[str, str] = json.JSONDecoder().raw_decode(text)[0]  # the place in the code follows
    return found


@pytest.mark.processes
def test_a_confined_process_can_do_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel gives namespaces and Landlock, as here; the same grader with trust can do most of it."""
    monkeypatch.setenv("CANARY_KEY", MARKER)
    (tmp_path / "secret").write_text(MARKER)
    confined = abilities(confined=True, secret=tmp_path / "secret")
    assert [name for name, how in confined.items() if how == "done"] == []
    assert not (tmp_path / "trace").exists()


BEHIND = {
    "ends the process": "__import__('os')._exit(0)",
    "kills the process": "__import__('os').kill(__import__('os').getpid(), 9)",
    "crashes": "__import__('ctypes').string_at(0)",
    "takes the reply's place": "[__import__('os').write(n, b'{\"score\": 1.0}\\n') for n in range(3, 5)]",
    "writes without end": "[__import__('os').write(3, b'x' * 10**6) for _ in range(10)]",
    "replies with nonsense": "[__import__('os').write(3, b'[' * 10**4 + b'\\n')]",
}


@pytest.mark.parametrize("how", BEHIND)
@pytest.mark.processes
def test_what_brings_the_worker_down_costs_one_answer(how: str) -> None:
    """Behind the screen, again: the answer is worth nothing, and the next is scored as if nothing had been."""
    task, row = made("n_queens")
    right = row["metadata"]["valid_answers"][0]
    assert asked(task, BEHIND[how], row) in (0.0, None)
    assert task.reward(right, row) == 1.0
    assert task.reward("[1]", row) == 0.0


BOMBS = [
    ("rubiks_cube", "R99999999 " * 40),
    ("rush_hour", "F+999999999 " * 9),
    ("propositional_logic", "¬" * 400 + "(P ∧ " * 200),
    ("coin_flip", "1e999999999"),
    ("countdown", "9**9**9**9"),
    ("simple_integration", "(9**64)**64**64"),
    ("simple_integration", "(x+1)**64*(x+2)**64*(x+3)**64"),
    ("binary_matrix", "[0]*10**12"),
    ("n_queens", "[" * 10**5),
    ("number_sorting", "[" * 10**5),
]


@pytest.mark.processes
def test_time_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one worker, which has a second for an answer instead of five; some use it up."""
    monkeypatch.setattr("agilerl.envs.scorers.CPU_SECONDS", 1.0)
    monkeypatch.setattr("agilerl.envs.scorers._SHARED", type(_shared())())
    holder = Scorers("n_queens", [{}], [])
    holder._share_worker()
    for name, answer in BOMBS:
        task, row = made(name)
        mine = psutil.Process().memory_info().rss
        start, since = time.process_time(), time.monotonic()
        assert task.reward(answer, row) == 0.0, (name, answer[:20])
        assert time.process_time() - start < 5, (name, answer[:20])
        assert time.monotonic() - since < 60, (name, answer[:20])
        assert psutil.Process().memory_info().rss - mine < 2**28, (name, answer[:20])
    holder.close()


@pytest.mark.parametrize("bomb", ["9**9**9**9", "__import__('time').sleep(10**6)"])
@pytest.mark.processes
def test_out_of_time_is_worth_nothing_and_the_worker_is_replaced(bomb: str) -> None:
    grader = IsolatedGrader("agilerl.envs.scorers:scorer", timeout=3, cpu_seconds=1, confined=True, memory_bytes=2**31)
    row = {"question": "", "answer": "Q", "metadata": {"valid_answers": ["Q"]}}
    columns = {"dataset": ["n_queens"], "params": [encode({})], "entry": [encode(row)]}
    with grader:
        (outcome,) = grader([""], [bomb], **columns)
        assert isinstance(outcome, RewardError)
        assert grader([""], ["Q"], **columns) == [1.0]


@pytest.mark.processes
def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agilerl.envs.scorers.MEMORY", 2**20)
    monkeypatch.setattr("agilerl.envs.scorers._SHARED", {})
    task, row = made("n_queens")
    with pytest.raises(RewardError, match="cannot load"):
        task.reward("[1]", row)


# -- processes ---------------------------------------------------------------------------------------------------------


def workers() -> list[int]:
    """Return the processes below this one that end workers; one for each worker."""
    return [p.pid for p in psutil.Process().children() if "sandbox_child" in " ".join(p.cmdline())]


@pytest.mark.processes
def test_tasks_share_a_process_which_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agilerl.envs.scorers._SHARED", type(_shared())())
    before = workers()
    (first, row), (second, other) = made("n_queens"), made("spiral_matrix")
    assert workers() == before  # none before it is needed
    assert (first.reward("[1]", row), second.reward("[1]", other)) == (0.0, 0.0)
    assert len(workers()) == len(before) + 1
    first.close()
    assert second.reward(other["answer"], other) == 1.0
    second.close()
    assert workers() == before
    assert first.reward(row["metadata"]["valid_answers"][0], row) == 1.0  # it is opened again when it is needed
    first.close()
    assert workers() == before


def _shared() -> Any:
    from agilerl.envs import scorers

    return scorers._SHARED


@pytest.mark.processes
def test_a_forked_process_has_its_own(tmp_path: Path) -> None:
    task, row = made("n_queens")
    right = row["metadata"]["valid_answers"][0]
    assert task.reward(right, row) == 1.0
    mine = workers()
    child = os.fork()
    if child == 0:
        try:
            good = task.reward(right, row) == 1.0 and task.reward("[1]", row) == 0.0
            (tmp_path / "found").write_text(f"{good} {' '.join(map(str, workers()))}")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    good, theirs = (tmp_path / "found").read_text().split()
    assert good == "True"
    assert int(theirs) not in mine
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(theirs)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(theirs))
    assert workers() == mine
    assert task.reward(right, row) == 1.0


def test_threads_take_turns() -> None:
    task, row = made("n_queens")
    right, found = row["metadata"]["valid_answers"][0], list[tuple[float | None, float | None]]()

    def both() -> None:
        found.append((task.reward(right, row), task.reward("[1]", row)))

    threads = [threading.Thread(target=both) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(1.0, 0.0)] * 8


# -- the same scores ---------------------------------------------------------------------------------------------------

ISOLATED = sorted(set(known_tasks()) - IN_THIS_PROCESS - {"composite"})
WRONG = ("", "?", "1", "no idea", "x + 1 =", "1/2", "Q", "[]", "R U R'", "x**2/2 + C", "1 + 2")


@pytest.mark.parametrize("name", ISOLATED)
def test_scores_are_those_of_the_scorer_itself(name: str) -> None:
    task = ReasoningGymTask(name, exam_prompts=1, test_prompts=0, reward="score")
    rows = [task.row("train", place) for place in range(4)]
    dataset = build_dataset(name, {}, seed=1, size=4)
    for row in rows:
        own = row["answer"] or row["metadata"].get("example_correct_answer", "")
        for answer in (own, *(other["answer"] or "" for other in rows), *WRONG):
            try:
                with quiet():  # what it takes for right and is not (another test) is worth what no answer is
                    given = "" if answer != own and pays_for_nothing(name, answer, row) else answer
                    expected = float(dataset.score_answer(given, json_like(row)))
            except Exception:
                expected = 0.0
            # What the screen refuses was worth nothing before, too: names and texts among the numbers of a game.
            refused = answer != own and not is_harmless(name, answer) and parses(answer)
            assert task.reward(answer, row) == (0.0 if refused else expected)


def json_like(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "metadata": dict(row["metadata"])}


def parses(answer: str) -> bool:
    try:
        compile(answer.strip(), "", "eval")
    except SyntaxError:
        return False
    return True


def test_a_composite_scores_with_the_parameters_of_each_part() -> None:
    parts = [{"name": "puzzle24", "config": {"max_value": 6}}, {"name": "chain_sum"}, {"name": "n_queens"}]
    task = ReasoningGymTask("composite", {"datasets": parts}, exam_prompts=1, test_prompts=0)
    for place in range(12):
        row = task.row("train", place)
        assert task.reward(row["answer"], row) == 1.0
        assert task.reward("nothing", row) == 0.0


# -- other places that read completions --------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_accuracy_grader_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    texts = [attack.answer.replace("TRACE", str(trace)) for attack in ANSWERS]
    texts += [f"${text}$" for text in texts] + [f"\\boxed{{{text}}}" for text in texts[:8]]
    with Accuracy(timeout=10) as grader:
        assert 1.0 not in grader([""] * len(texts), texts, answer=["7"] * len(texts))
        assert grader(["", ""], ["$\\frac{1}{2}$", "0.5"], answer=["0.5", "1/2"]) == [1.0, 1.0]
    assert not trace.exists()
    assert grader.confined


@pytest.mark.parametrize("env_id", ["gem:math:GSM8K", "gem:code:CodeContest", "gem:rg:simple_integration"])
def test_environments_that_run_completions_are_refused_by_name(env_id: str) -> None:
    pytest.importorskip("gem", reason="gem is not installed; make setup installs it")
    with pytest.raises(ConfigError, match="evaluates completions"):
        make_env(env_id)


# -- parameters --------------------------------------------------------------------------------------------------------

RUNS = "open('TRACE','w').close()"
PARAMS: dict[str, dict[str, Any]] = {
    "symbols": {"simple_integration": {"symbols": [RUNS]}, "intermediate_integration": {"symbols": [RUNS]}},
    "variables": {"polynomial_multiplication": {"variables": [RUNS]}},
    "range of symbols": {"polynomial_multiplication": {"variables": ["x:999999999"]}},
    "operators": {name: {"operators": ["+", RUNS]} for name in ("basic_arithmetic", "countdown", "puzzle24")},
    "text for a list": {"simple_integration": {"symbols": RUNS}},
    "keyword": {"simple_integration": {"symbols": ["lambda"]}},
}


@pytest.mark.parametrize("kind", PARAMS)
def test_no_parameter_is_evaluated(kind: str, tmp_path: Path) -> None:
    for name, params in PARAMS[kind].items():
        given = json.loads(json.dumps(params).replace("TRACE", str(tmp_path / "trace")))
        inner = [{"name": name, "config": given}]
        for task, its in ((name, given), ("composite", {"datasets": inner})):
            with pytest.raises(ConfigError):
                check_params(task, its)
    assert not (tmp_path / "trace").exists()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a manifest, beside which there is nothing; a secret is in another."""
    for name in ("given", "here", "private"):
        (tmp_path / name).mkdir()
    (tmp_path / "private" / "secret.txt").write_text(f"{MARKER}\n" * 200)
    (tmp_path / "given" / "words.txt").write_text("alpha\nbeta\ngamma\ndelta\nepsilon\n" * 50)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


PATHS = {
    "absolute": "{secret}",
    "climbing": "../private/secret.txt",
    "climbing from the package": "../../../../../../../../../../../../../..{secret}",
    "link": "link.txt",
    "folder that is a link": "linked/secret.txt",
    "home": "~/secret.txt",
    "device": "/proc/self/environ",
}
CARRIERS = {
    "dataset": lambda path: {"task": "reasoning_gym:spell_backward", "params": {"data_file": path}},
    "dataset by default": lambda path: {"params": {"data_file": path}},
    "composite": lambda path: {
        "task": "reasoning_gym:composite",
        "params": {"datasets": [{"name": "gcd"}, {"name": "spell_backward", "config": {"data_file": path}}]},
    },
    "curriculum": lambda path: {"params": {"data_file": path}, "curriculum": {"max_level": 1}},
    "environment": lambda path: {
        "env_type": "multiturn",
        "env_id": "agilerl/GuessTheNumber-v0",
        "params": {"task": "spell_backward", "params": {"data_file": path}},
    },
    "composite in an environment": lambda path: {
        "env_type": "multiturn",
        "env_id": "agilerl/GuessTheNumber-v0",
        "params": {
            "task": "composite",
            "params": {"datasets": [{"name": "spell_backward", "config": {"data_file": path}}]},
        },
    },
    "another package": lambda path: {
        "env_type": "multiturn",
        "env_id": "textarena:TwentyQuestions-v0",
        "params": {"words_path": path},
    },
    "a list in another package": lambda path: {
        "env_type": "multiturn",
        "env_id": "gem:qa:HotpotQA",
        "params": {"files": [path]},
    },
}


def written(place: Path, environment: dict[str, Any]) -> Path:
    path = place / "given" / "it.yaml"
    path.write_text(yaml.safe_dump({"environment": environment}))
    return path


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("kind", PATHS)
def test_a_manifest_names_no_file_outside(kind: str, carrier: str, place: Path, monkeypatch: Any) -> None:
    secret = place / "private" / "secret.txt"
    monkeypatch.setenv("HOME", str(secret.parent))
    (place / "given" / "link.txt").symlink_to(secret)
    (place / "given" / "linked").symlink_to(secret.parent)
    manifest = written(place, CARRIERS[carrier](PATHS[kind].format(secret=secret)))
    with pytest.raises(ConfigError, match="leads out of"):
        load_manifest(manifest)


SCHEMES = ["file://{secret}", "file:{secret}", "simplecache::file://{secret}", "{folder}/*.txt", "{folder}/**"]


@pytest.mark.parametrize("text", SCHEMES)
def test_other_packages_get_no_address_of_a_file(text: str, place: Path) -> None:
    secret = place / "private" / "secret.txt"
    environment = CARRIERS["another package"](text.format(secret=secret, folder=secret.parent))
    with pytest.raises(ConfigError, match="leads out of"):
        load_manifest(written(place, environment))


@pytest.mark.parametrize(
    "text", ["/", ".", "and/or", "/no_think", "https://example.org/a", "a" * 5000, "x\0y", "~", ""]
)
def test_texts_that_are_no_files_stay_as_they_are(text: str, place: Path) -> None:
    if text == "~":
        text = "~nobody-of-this-name"
    environment = {"env_type": "multiturn", "env_id": "agilerl/GuessTheNumber-v0", "params": {"system_prompt": text}}
    config = RunConfig.from_dict({"environment": environment})
    assert digests(named_files(config))["data"] == {}
    if "\0" not in text:
        assert load_manifest(written(place, environment)).environment.params == {"system_prompt": text}


@pytest.mark.parametrize("carrier", [name for name in CARRIERS if "package" not in name])
def test_a_file_beside_the_manifest_is_read_and_recorded(carrier: str, place: Path) -> None:
    config = load_manifest(written(place, CARRIERS[carrier]("words.txt")))
    words = place / "given" / "words.txt"
    assert str(words) in json.dumps(config.environment.params)
    assert list(digests(named_files(config))["data"]) == [str(words)]
    recorded = digests(named_files(config))
    check_unchanged(named_files(config), recorded, place)
    words.write_text("another\n" * 50)
    with pytest.raises(CheckpointError, match="has changed"):
        check_unchanged(named_files(config), recorded, place)


def test_the_file_is_what_the_task_reads(place: Path) -> None:
    config = load_manifest(written(place, CARRIERS["dataset"]("words.txt")))
    task = ReasoningGymTask("spell_backward", config.environment.params, exam_prompts=1, test_prompts=0, holdout="any")
    words = (place / "given" / "words.txt").read_text().split()
    assert {task.row("train", n)["metadata"]["word"] for n in range(9)} <= set(words)


def test_files_of_reasoning_gym_keep_their_names(place: Path) -> None:
    config = load_manifest(written(place, {"params": {"data_file": "words3to10.txt"}}))
    assert config.environment.params == {"data_file": "words3to10.txt"}
    assert digests(named_files(config))["data"] == {}


def test_the_command_line_may_name_any_file(place: Path) -> None:
    words = place / "private" / "secret.txt"
    config = load_manifest(None, [f"environment.params.data_file={words}"])
    assert list(digests(named_files(config))["data"]) == [str(words)]
    relative = load_manifest(None, ["environment.params.data_file=../private/secret.txt"])
    assert Path(relative.environment.params["data_file"]).samefile(words)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    "recorded", [{}, {"data": {}}, {"data": {"{secret}": "0" * 64}}], ids=["none", "empty", "wrong"]
)
def test_a_strangers_run_names_no_file_whose_content_they_do_not_know(
    recorded: dict[str, Any], carrier: str, place: Path
) -> None:
    secret = place / "private" / "secret.txt"
    config = RunConfig.from_dict({"environment": CARRIERS[carrier](str(secret))})
    files = json.loads(json.dumps(recorded).replace("{secret}", str(secret)))
    with pytest.raises(CheckpointError):
        check_unchanged(named_files(config), files, place)


def test_a_folder_outside_is_never_recorded(place: Path) -> None:
    config = RunConfig.from_dict({"environment": CARRIERS["another package"](str(place / "private"))})
    assert digests(named_files(config))["data"] == {}
    with pytest.raises(CheckpointError):
        check_unchanged(named_files(config), digests(named_files(config)), place)


@pytest.mark.parametrize("kind", ["pipe", "folder", "large", "missing"])
def test_a_file_is_a_plain_one_of_a_sensible_size(kind: str, place: Path) -> None:
    path = place / "here" / "odd.txt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(30 * 2**30)
    with pytest.raises(ConfigError):
        check_params("spell_backward", {"data_file": str(path)})
