"""The commands about a finished run or an adapter: ``eval``, ``chat``, ``merge``, ``export``, ``push``, ``compare``."""

import json
import math
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from agilerl.checks.arguments import counted, shown
from agilerl.cli.adapter import subject
from agilerl.cli.options import AdapterPath, AllowCode, AsJson, FinishedRun, Quiet, Replacements, Temperature, as_path
from agilerl.cli.output import columns, format_samples, genes_text, one_line, say, tell_apart, tell_line
from agilerl.cli.output import console as new_console
from agilerl.cli.process_settings import is_debugging, loading_done
from agilerl.cli.running import check_new_folder, quieten_libraries, whole_folder
from agilerl.cli.serve import servable_base
from agilerl.config.named_files import check_allowed
from agilerl.errors import CheckpointError, ConfigError, WriteError
from agilerl.report.load import number
from agilerl.runs import find_adapter, read_run
from agilerl.runs.atomic import MANIFEST, commit_folder, verify_folder
from agilerl.runs.directory import ADAPTER_CONFIG, as_written
from agilerl.runs.strict_json import read_json

if TYPE_CHECKING:
    from agilerl.algorithms import LLMAlgorithm
    from agilerl.report.load import RunRecord

_OFTEN_CUT = 0.05
"""The share of answers cut at the limit from which it is shown."""


# -- ``agilerl eval``: the adapter and its base on the same questions --------------------------------------------------


def run_eval(
    path: AdapterPath,
    arguments: Replacements = None,
    *,
    samples: Annotated[
        int, Option(metavar="N", min=0, max=10_000, help="Sampled answers to each question, for pass@k; 0: none.")
    ] = 4,
    temperature: Temperature = 1.0,
    full: Annotated[
        float, Option("--right-from", metavar="SCORE", help="Lowest score of a right answer, for pass@k.")
    ] = 1.0,
    with_base: Annotated[bool, Option("--base/--no-base", help="Ask the base the same questions.")] = True,
    worst: Annotated[int, Option(metavar="N", min=0, help="Questions to list, the worst first.")] = 5,
    allow_code: AllowCode = False,
    allow_addresses: Annotated[
        bool, Option("--allow-addresses", help="Contact the addresses that the run names (judges, servers).")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate an adapter and its base on the same questions: means with intervals, pass@k, the paired difference.

    The questions are those of the run's test, which neither training nor selection has used. Other ones:

    agilerl eval runs/mine training.seed=7

    agilerl eval runs/mine environment.params.max_value=99 --samples 16
    """
    # What is cheap to check
    adapter = subject(path, arguments or [], examined=True, allow_addresses=allow_addresses)
    if not isfinite(full):
        raise ConfigError(f"--right-from: expected a finite number, found {full}")
    if samples and not temperature:
        raise ConfigError("answers drawn at --temperature 0 are all alike; raise it, or give --samples 0")
    if not allow_code:
        check_allowed(adapter.config)
    console = new_console(quiet=quiet or as_json)
    console.print(f"Evaluating {shown(str(adapter.folder))}: loading the libraries and the model.")
    quieten_libraries()
    from agilerl.training.evaluation import evaluate
    from agilerl.training.setup import build

    session = build(adapter.config, allow_code=allow_code, all_rows=adapter.all_rows)
    loading_done()
    try:
        result = evaluate(session, samples=samples, temperature=temperature, full=full, with_base=with_base)
    finally:
        session.task.close()
    # The document of the results
    asked = adapter.config.environment.model_dump(mode="json")
    result.settings.update(
        adapter=str(adapter.folder),
        base=adapter.base,
        base_path=session.population.runtime.base.source,
        seed=adapter.config.training.seed,
        samples=samples,
        temperature=temperature,
        full=full,
        max_new_tokens=session.population.examiner.eval_max_new_tokens,
        task={key: value for key, value in asked.items() if key in ("task", "params", "env_id", "answer_format")},
    )
    document = result.document()
    if as_json:
        print(json.dumps(document, indent=1, allow_nan=False))
    elif not quiet:
        _show_evaluation(document, "questions" if "question" in result.rows[0] else "episodes")
        for symptom in result.hacks:
            tell_line("\n".join([str(symptom), *format_samples(symptom.samples)]))
        _show_worst(document["answers"], result.worst(worst))


def _show_evaluation(document: Mapping[str, Any], kind: str) -> None:
    settings, difference = document["settings"], document["difference"]
    tell_line(
        f"{document['questions']} {kind} of {one_line(document['task'])}, seed {settings['seed']}; greedy answers"
    )
    scores = {who: document[who] for who in ("adapter", "base") if document[who] is not None}
    passed = [name for name in scores["adapter"] if name != "greedy"]
    table = columns("", "mean", "95 % interval", "n", *passed)
    for who, score in scores.items():
        table.add_row(
            who, *_score(score["greedy"]), *(f"{score[name]['mean']:.3f}" for name in passed if name in score)
        )
    if difference is not None:
        both = [[scores[who].get(name) for who in ("adapter", "base")] for name in passed]
        gains = [f"{adapter['mean'] - base['mean']:+.3f}" if base else "-" for adapter, base in both]
        table.add_row("difference", *_score(difference, sign="+"), *gains)
    new_console().print(table)
    if passed:
        drawn = f"{settings['samples']} answers a question, drawn at temperature {settings['temperature']:g}"
        tell_line(f"pass@k: {drawn}; right from a score of {settings['full']:g} on")
    if difference is not None:
        probability = number(difference["probability_better"])
        tell_line(f"P(adapter better than base) = {probability:.3f}, paired over the same {kind}")
    if kind == "questions" and any(document["cut"][who] >= _OFTEN_CUT for who in scores):
        shares = ", ".join(f"{document['cut'][who]:.0%} of the {who}'s" for who in scores)
        tell_line(
            f"Answers that were cut at the limit of {counted(settings['max_new_tokens'], 'token')}: {shares}; "
            "for a longer one algorithm.max_output_tokens=..."
        )


def _score(score: Mapping[str, Any], sign: str = "") -> tuple[str, str, str]:
    mean, low, high = (f"{number(value):{sign}.3f}" for value in (score["mean"], *score["ci95"]))
    return mean, f"{low} to {high}", str(score["n"])


def _show_worst(answers: Sequence[Mapping[str, Any]], worst: Sequence[int]) -> None:
    console = new_console()
    if worst:
        console.print(f"\nWorst of {len(answers)}")
    for index, question in zip(worst, tell_apart([answers[index]["question"] for index in worst])):
        answer = answers[index]
        console.print(f"{index}. {question}")
        if answer["answer"] is not None:
            console.print(f"   expected: {one_line(answer['answer'])}")
        for who in ("adapter", "base"):
            if (replies := answer[who]) is not None:
                scores = [number(sample["score"]) for sample in replies["samples"]]
                mean = f", mean of {len(scores)} samples {sum(scores) / len(scores):.2f}" if scores else ""
                greedy = replies["greedy"]
                console.print(f"   {who}: {one_line(greedy['text'])} (score {number(greedy['score']):g}{mean})")


# -- ``agilerl chat`` --------------------------------------------------------------------------------------------------


def run_chat(
    path: AdapterPath,
    arguments: Replacements = None,
    *,
    temperature: Temperature = 0.7,
    most_tokens: Annotated[int, Option("--max-tokens", metavar="N", min=1, help="Most tokens of an answer.")] = 512,
    beside_base: Annotated[bool, Option("--base", help="Show the answers of the base as well.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Talk to an adapter. The lines of a pipe are the turns of one conversation; an empty line begins another.

    agilerl chat runs/mine --base

    echo "What is 3 + 4?" | agilerl chat runs/mine --temperature 0 --quiet
    """
    adapter = subject(path, arguments or [], examined=False)
    console = new_console(quiet=quiet or as_json)
    console.print(f"Loading {shown(str(adapter.folder))} on {shown(adapter.base)}.")
    quieten_libraries()
    from agilerl.algorithms import texts
    from agilerl.envs.answer_format import AnswerFormat
    from agilerl.training.setup import load_agent

    agent = load_agent(adapter.config)
    loading_done()
    environment = adapter.config.environment
    single = adapter.run is not None and environment.env_type != "multiturn" and environment.agent is None
    each = "; it was trained on single questions, so begin with it before each" * single
    hints = f". /new or an empty line begins a new conversation{each}; /quit leaves" if sys.stdin.isatty() else ""
    console.print(f"Drawn at temperature {temperature:g}{hints}.")
    template, answers = environment.conversation_template or [], AnswerFormat.of(environment)
    # A system message with the question in it is made for one question, not for a conversation.
    system = [dict(m) for m in template if m["role"] == "system" and "{question}" not in m["content"]]
    slots = {"adapter": agent.slot} | ({"base": None} if beside_base else {})
    conversations = {who: list(system) for who in slots}
    for turn, line in enumerate(_lines(quiet=quiet or as_json)):
        # What the user commands
        if line == "/quit":
            return
        if line in ("", "/new"):
            conversations = {who: list(system) for who in slots}
            console.print("(a new conversation)")
            continue
        # What the models answer
        replies = {}
        for who, messages in conversations.items():
            messages.append(answers.ask([*system, {"role": "user", "content": line}])[-1])
            if _forget(agent, messages, len(system), most_tokens):
                say("(the context is full: the beginning of the conversation is forgotten)")
            # Seeded by the turn: a conversation that is repeated gets the same answers.
            context, limit = agent.context_length, most_tokens
            reply = texts.answers(
                agent.runtime, slots[who], messages, context, max_new_tokens=limit, temperature=temperature, seed=turn
            )
            replies[who] = str(reply)
            messages.append({"role": "assistant", "content": replies[who]})
        if as_json:
            print(json.dumps({"user": line, **replies}), flush=True)
        for who, reply in replies.items() if not as_json else ():
            tell_line(f"{who}> {reply}" if beside_base else reply)


def _lines(*, quiet: bool) -> Iterator[str]:
    """Yield what the user types, or the lines of a pipe."""
    if sys.stdin.isatty() and not quiet:
        with suppress(EOFError):
            while True:
                yield input("you: ").strip()
        # Ctrl-D leaves the cursor behind the prompt.
        print()
        return
    # A pipe may hold bytes that are no text in this encoding.
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin:
        yield line.strip()


def _forget(agent: "LLMAlgorithm", messages: list[dict[str, str]], system: int, most_tokens: int) -> bool:
    """Remove the oldest turns of a conversation that leaves the answer too little room; return whether there were any.

    An answer gets the room for its most tokens, or half of the context.
    """
    from agilerl.envs.prompts import PromptTooLongError, render_prompt

    context, before = agent.context_length, len(messages)
    room = max(1, context - min(most_tokens, context // 2))
    while True:
        try:
            render_prompt(agent.runtime.tokenizer, messages, max_tokens=room)
            return len(messages) < before
        except PromptTooLongError:
            if len(messages) <= system + 1:
                raise
            # A question and its answer.
            del messages[system : system + 2]


# -- ``agilerl merge``: base and adapter as one model ------------------------------------------------------------------


def run_merge(
    path: AdapterPath,
    out: Annotated[Path, Argument(metavar="OUT", help="New folder.", parser=as_path)],
    *,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option("--dtype", help="Type of the weights; auto: that of the base's files."),
    ] = "auto",
    quiet: Quiet = False,
) -> None:
    """Merge an adapter into its base, and write one model with its tokenizer, which needs no PEFT.

    agilerl merge runs/mine merged
    """
    adapter = subject(path, examined=False)
    check_new_folder(out)
    console = new_console(quiet=quiet)
    console.print(f"Merging {shown(str(adapter.folder))} into {shown(adapter.base)}.")
    quieten_libraries()
    from agilerl.training.base import check_merged, merged_model

    model, tokenizer = merged_model(adapter.folder, adapter.config, dtype=dtype)
    loading_done()

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
        check_merged(folder, model)

    # DeepSpeed, if it is installed, is imported here, and logs to standard output.
    with whole_folder(out), redirect_stdout(sys.stderr if is_debugging() else StringIO()):
        commit_folder(out, write, manifest=False)
    folder, file = shlex.quote(str(out)), shlex.quote(f"{out.name}.gguf")
    console.print(f"written: {out}\n")
    console.print(f"vLLM         vllm serve {folder} --generation-config vllm")
    console.print(f"llama.cpp    python convert_hf_to_gguf.py {folder} --outfile {file}")


# -- ``agilerl export`` and ``push``: the elite for others -------------------------------------------------------------


def run_export(
    run: FinishedRun,
    out: Annotated[Path, Argument(metavar="OUT", help="New folder for the elite.", parser=as_path)],
    *,
    quiet: Quiet = False,
) -> None:
    """Write the elite as a PEFT folder with its model card.

    agilerl export runs/mine mine-adapter
    """
    check_new_folder(out)
    with whole_folder(out):
        export_elite(run, out)
    console, names = new_console(quiet=quiet), {"FOLDER": str(out)}
    with suppress(ConfigError):  # the base may have moved since
        base = servable_base(subject(run, examined=False, loaded=False).base)
        names |= {"BASE": base} if Path(base).is_dir() else {}
    console.print(f"written: {out.absolute()} ({', '.join(sorted(path.name for path in out.iterdir()))})")
    console.print(f"{'talk to it':<12} agilerl chat {shlex.quote(str(out))}")
    if read_json(out / ADAPTER_CONFIG).get("alora_invocation_tokens"):
        console.print("It is activated (alora_invocation_tokens): load it with PEFT. vLLM does not know such adapters.")
        return
    card = (out / "README.md").read_text(encoding="utf-8").splitlines()
    for program, command in (("vLLM", "vllm serve"), ("llama.cpp", "python convert_lora_to_gguf.py")):
        # The card has these commands for others; here they name this machine's folders.
        line = next(line for line in card if line.startswith(command))
        named = re.sub(r"\b(FOLDER|BASE)\b", lambda word: shlex.quote(names.get(word[0], word[0])), line)
        console.print(f"{program:<12} {named}")


def export_elite(run: Path, out: Path, *, name: str | None = None, licence: str | None = None) -> None:
    """Write the elite of a finished run as a new folder: PEFT adapter, tokenizer, agent.json and model card.

    Of a base in a folder of this machine only the last part is written down if there is a ``name``: that is for others.
    Without one the export is used here, where programs look for the base by its path. Raises
    CheckpointError for a run without an elite, and for one whose elite is not as it was written.
    """
    from agilerl.report.card import CARD, finished_summary, model_card, public_name

    folder, root = find_adapter(run)
    if root is None or folder.resolve() != (root / "elite").resolve():
        raise CheckpointError(f"expected a run, or the elite of one, found the adapter {folder}")
    summary = finished_summary(root)
    _check_adapter(run)
    # Only files that the run wrote, and no links: a stranger's folder must not have others of this machine sent away.
    files = [file for file in verify_folder(folder) if file not in (CARD, MANIFEST) and "/" not in file]
    card = model_card(root, summary, name=name, licence=licence)
    base = str(read_run(root)["config"]["network"]["pretrained_model_name_or_path"])
    # The elite's own files may name the folder that a public base was loaded from.
    base, renamed = public_name(base), name is not None or public_name(base) == base

    def write(target: Path) -> None:
        for file in files:
            shutil.copyfile(folder / file, target / file)
        for file, key in ((ADAPTER_CONFIG, "base_model_name_or_path"), ("agent.json", "base")):
            if file in files and renamed:
                values = read_json(folder / file)
                (target / file).write_text(json.dumps({**values, key: base}, indent=2, sort_keys=True) + "\n")
        (target / CARD).write_text(card, encoding="utf-8")

    commit_folder(out, write, manifest=False)


def _check_adapter(run: Path) -> None:
    """Compare what PEFT computes with what was trained; warn where the base is not on this machine."""
    quieten_libraries()
    from agilerl.training.base import check_exported

    try:
        adapter = subject(run, examined=False)
        check_exported(adapter.folder, adapter.base, adapter.config.network.options)
    except ConfigError as error:
        say(f"not compared with what PEFT computes from it: {error}")


def run_push(
    run: FinishedRun,
    repository: Annotated[str, Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face hub.")],
    *,
    private: Annotated[bool, Option("--private/--public", help="Who can see a new repository.")] = True,
    dry_run: Annotated[bool, Option("--dry-run", help="Only list what would be uploaded.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Upload the elite with its tokenizer and model card to the Hugging Face hub.

    agilerl push runs/mine me/mine --dry-run
    """
    if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", repository) is None:
        raise ConfigError(f"expected a repository as OWNER/NAME, found {shown(repository)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export_elite(run, folder, name=repository.rpartition("/")[2])
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        address = None if dry_run else _upload(folder, repository, private=private)
    if as_json:
        print(json.dumps({"repository": repository, "url": address, "private": private, "files": files}, indent=1))
        return
    console = new_console(quiet=quiet)
    for name, size in files.items():
        console.print(f"{size:>12,}  {name}")
    console.print(f"would be uploaded to {repository}" if address is None else f"uploaded: {address}")


def _upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder and return its address; raises ConfigError without a token, WriteError if the hub refuses."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if get_token() is None:
        raise ConfigError("uploading needs a token of the hub, found none; log in with hf auth login, or set HF_TOKEN")
    disable_progress_bars()
    hub = HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        done = hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload the elite of a run")
    except Exception as error:  # what the client raises depends on its version and on what answers
        raise WriteError(f"the hub did not take {repository}: {type(error).__name__}: {error}") from error
    return str(done.repo_url)


# -- ``agilerl compare``: runs side by side ----------------------------------------------------------------------------


def run_compare(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Two run directories or more.", parser=as_path)],
    *,
    out: Annotated[
        Path | None, Option(parser=as_path, metavar="FILE", help="HTML file; default: report-NAME-NAME.html here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how runs differ in settings and results, and write them side by side as one HTML file."""
    from agilerl.report.load import check_different, find_derived, find_differences, load_run

    if len(runs) < 2:
        raise ConfigError(f"expected two runs or more to compare, found {shown(str(runs[0]))} alone")
    check_different(runs)
    records = [load_run(run) for run in runs]
    differ, results = find_differences(records), []
    follow = find_derived(records, differ)
    for record in records:
        with as_written(record.path):
            results.append(_result(record))
    if as_json:
        document = {"runs": [str(run) for run in runs], "settings": differ, "derived": follow, "results": results}
        print(json.dumps(document, indent=1))
        return
    from agilerl.cli.commands import report_file
    from agilerl.report.page import build_report, distinct_names

    names = distinct_names(runs)
    _show_comparison(names, differ, follow, results)
    for name in (name for name, record in zip(names, records) if not record.is_finished):
        tell_line(f"{one_line(name)} has not finished.")
    if not differ:
        tell_line("No setting differs.")
    if verdict := _verdict(records, differ):
        new_console().print(verdict)
    tell_line(f"report written: {build_report(runs, report_file(runs, out))}")


def _verdict(runs: Sequence["RunRecord"], differ: Mapping[str, Any]) -> str:
    """Return what the tests say about the elites of two runs, or why the scores of runs cannot be compared."""
    from agilerl.hpo.fitness import difference_interval, paired_difference
    from agilerl.report.load import other_questions, why_not_comparable

    if warning := why_not_comparable(differ):
        return warning
    elites = [run.tests["elite"] for run in runs if "elite" in run.tests]
    error = math.hypot(*(elite.score.stderr for elite in elites))
    if len(elites) != 2 or not math.isfinite(error):
        return ""
    first, second = (elite.score for elite in elites)
    gap = second.mean - first.mean
    sized, surely = f"± {error:.3f} (one standard error)", abs(gap) > 2 * error
    asked = "not paired by question, as not both runs have a score of each"
    digests = [elite.questions for elite in elites]
    if digests[0] and digests[0] == digests[1]:
        if first.scores == second.scores:
            return "Both elites have the same score in every question of the test."
        low, high = difference_interval(paired_difference(second, first))
        sized, surely = f"(95 % interval {low:+.3f} to {high:+.3f})", low > 0 or high < 0
        asked = "paired by question"
    elif names := other_questions(runs, differ):
        asked = f"on different questions, as {' and '.join(names)} differ{'s' * (len(names) == 1)}"
    elif all(digests):
        asked = "on different questions"
    verdict = "which is more than chance" if surely else "so the test does not tell them apart"
    return f"Elites, second minus first: {gap:+.3f} {sized}, {verdict}; {asked}."


def _result(run: "RunRecord") -> dict[str, Any]:
    tests = {
        who: {"mean": score.mean, "ci95": list(score.interval), "n": score.n} if score.is_finite else None
        for who, score in ((who, result.score) for who, result in run.tests.items())
    }
    tokens, seconds = run.summary.get("tokens"), run.summary.get("seconds")
    return {
        "finished": run.is_finished,
        "test": tests,
        "tokens": sum(int(number(count)) for count in tokens.values()) if tokens else None,
        "seconds": None if seconds is None else float(seconds),
        "hyperparameters": dict((run.summary.get("elite") or {}).get("hyperparameters") or {}),
    }


def _show_comparison(
    names: Sequence[str],
    differ: Mapping[str, Sequence[Any]],
    follow: Sequence[str],
    results: Sequence[Mapping[str, Any]],
) -> None:
    titles = ["", *map(one_line, names)]
    table = columns(*titles, left=titles, gap=2)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.overflow = "fold"
    for who in ("base", "elite"):
        tests = [result["test"].get(who) for result in results]
        scores = [None if test is None else (test["mean"], *test["ci95"]) for test in tests]
        cells = ("-" if score is None else "{:.3f} ({:.3f} to {:.3f})".format(*score) for score in scores)
        table.add_row(f"test of the {who}", *cells)
    for key, form in (("tokens", ",d"), ("seconds", ".0f")):
        table.add_row(key, *("-" if result[key] is None else f"{result[key]:{form}}" for result in results))
    table.add_row("elite trained with", *(one_line(genes_text(result["hyperparameters"])) or "-" for result in results))
    for setting, values in sorted(differ.items(), key=lambda row: row[0] in follow):
        label = one_line(setting) + " (derived)" * (setting in follow)
        table.add_row(label, *("-" if value is None else one_line(str(value)) for value in values))
    new_console().print(table)
