"""The commands about a finished run or an adapter: ``eval``, ``chat``, ``merge``, ``export``, ``push``, ``compare``."""

import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.arguments import shown
from agilerl.cli.adapter import subject
from agilerl.cli.output import console as new_console
from agilerl.cli.output import one_line, say, shown_samples, tell_line
from agilerl.cli.process_settings import loading_done
from agilerl.cli.serve import base_place
from agilerl.config.named_files import check_allowed
from agilerl.errors import CheckpointError, ConfigError, WriteError
from agilerl.runs import find_adapter, read_run
from agilerl.runs.atomic import MANIFEST, commit_folder, verify_folder
from agilerl.runs.directory import ADAPTER_CONFIG, as_written
from agilerl.runs.strict_json import read_json

if TYPE_CHECKING:
    from agilerl.algorithms import LLMAlgorithm
    from agilerl.rollouts import SamplingSettings
    from agilerl.training.evaluation import Evaluation, Results
    from agilerl.training.probe import Answer

_OFTEN_CUT = 0.05
"""From this share of answers that were cut at the limit on, it is said."""


def _vacant(out: Path) -> None:
    """Raise ConfigError unless a folder can be made here; nothing is replaced."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{shown(str(out))} exists; choose another folder, or delete that one first")


@contextmanager
def _as_a_whole(out: Path) -> Iterator[None]:
    """Remove an empty folder, so that it can be made; report errors of the disk as WriteError."""
    try:
        if out.exists():
            out.rmdir()
        yield
    except OSError as error:
        raise WriteError(f"{shown(str(out))} could not be written: {error.strerror or error}") from error


# -- ``agilerl eval``: the adapter and its base on the same questions --------------------------------------------------


def run_eval(
    path: Path,
    arguments: Sequence[str],
    *,
    samples: int,
    temperature: float,
    full: float,
    with_base: bool,
    worst: int,
    out: Path | None,
    allow_code: bool,
    allow_addresses: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Evaluate and show; see ``agilerl eval --help``."""
    found = subject(path, arguments, examined=True, allow_addresses=allow_addresses)
    if not isfinite(full):
        raise ConfigError(f"--right-from: expected a finite number, found {full}")
    if samples and not temperature:
        raise ConfigError("answers drawn at --temperature 0 are all alike; raise it, or give --samples 0")
    if out is not None:
        _vacant(out)
    if not allow_code:
        check_allowed(found.config)
    console = new_console(quiet=quiet or as_json)
    console.print(f"Evaluating {shown(str(found.folder))}: loading the libraries and the model.", soft_wrap=True)
    from agilerl.cli.running import quieten_libraries

    quieten_libraries()
    from agilerl.training.evaluation import evaluate
    from agilerl.training.setup import build

    session = build(found.config, allow_code=allow_code, all_rows=found.all_rows)
    loading_done()
    try:
        result = evaluate(session, samples=samples, temperature=temperature, full=full, with_base=with_base)
    finally:
        session.task.close()
    asked = found.config.environment.model_dump(mode="json")
    result.settings.update(
        adapter=str(found.folder),
        base=found.base,
        base_path=session.population.runtime.base.source,
        seed=found.config.training.seed,
        samples=samples,
        temperature=temperature,
        full=full,
        max_new_tokens=session.population.eval_max_new_tokens,
        task={key: value for key, value in asked.items() if key in ("task", "params", "env_id", "answer_format")},
    )
    document = result.document()
    if out is not None:
        from agilerl.report.exports import write_evaluation

        with _as_a_whole(out):
            write_evaluation(out, document)
    if as_json:
        print(json.dumps(document, indent=1, allow_nan=False))
    elif not quiet:
        _show_evaluation(result, worst)
        if out is not None:
            console.print(f"written: {out}", soft_wrap=True)


def _show_evaluation(found: "Evaluation", worst: int) -> None:
    from rich.table import Table

    console = new_console()
    count, settings = len(found.rows), found.settings
    kind = "episodes" if "question" not in found.rows[0] else "questions"
    console.print(f"{count} {kind} of {one_line(found.task)}, seed {settings['seed']}; greedy answers", soft_wrap=True)
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    passed = {name: one.passed(found.full) for name, one in (("adapter", found.adapter), ("base", found.base)) if one}
    table.add_column("")
    for name in ("mean", "95 % interval", "n", *(f"pass@{k}" for k in passed["adapter"])):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Results | None]] = [("adapter", found.adapter), ("base", found.base)]
    for name, results in rows:
        if results is not None:
            values = [f"{value.mean:.3f}" for value in passed[name].values()]
            table.add_row(name, *_score(results.fitness), str(results.fitness.n), *values)
    difference = found.difference
    if difference is not None:
        both = [
            f"{passed['adapter'][k].mean - passed['base'][k].mean:+.3f}" if k in passed["base"] else "-"
            for k in passed["adapter"]
        ]
        table.add_row("difference", *_score(difference, signed=True), str(difference.n), *both)
    console.print(table)
    if passed["adapter"]:
        drawn = f"{settings['samples']} answers a question, drawn at temperature {settings['temperature']:g}"
        console.print(f"pass@k: {drawn}; right from a score of {found.full:g} on", soft_wrap=True)
    if difference is not None:
        console.print(
            f"P(adapter better than base) = {found.probability_better:.3f}, paired over the same {kind}", soft_wrap=True
        )
    if kind == "questions" and any(results is not None and results.cut >= _OFTEN_CUT for _, results in rows):
        shares = ", ".join(f"{results.cut:.0%} of the {name}'s" for name, results in rows if results is not None)
        console.print(
            f"Answers that were cut at the limit of {settings['max_new_tokens']} tokens: {shares}; for a longer one "
            "algorithm.max_output_tokens=...",
            soft_wrap=True,
        )
    for symptom in found.hacks:
        console.print("\n".join([str(symptom), *shown_samples(symptom.samples)]), soft_wrap=True)
    _show_worst(found, found.worst(worst))


def _score(fitness: Any, *, signed: bool = False) -> tuple[str, str]:
    form = "+.3f" if signed else ".3f"
    low, high = fitness.interval
    return f"{fitness.mean:{form}}", f"{low:{form}} to {high:{form}}"


def _show_worst(found: "Evaluation", places: Sequence[int]) -> None:
    if not places:
        return
    console = new_console()
    console.print(f"\nWorst of {len(found.rows)}")
    for place in places:
        row = found.rows[place]
        expected = "" if row.get("answer") is None else f"; expected {one_line(str(row['answer']))}"
        console.print(
            f"{place}. {one_line(str(row.get('question', 'seed ' + str(row.get('seed')))))}{expected}", soft_wrap=True
        )
        for name, results in (("adapter", found.adapter), ("base", found.base)):
            if results is not None:
                console.print(f"   {name}: {_said(results.greedy[place], results.samples[place])}", soft_wrap=True)


def _said(greedy: "Answer", samples: Sequence["Answer"]) -> str:
    mean = f", mean of {len(samples)} samples {sum(a.score for a in samples) / len(samples):.2f}" if samples else ""
    return f"{one_line(greedy.text)} (score {greedy.score:g}{mean})"


# -- ``agilerl chat`` --------------------------------------------------------------------------------------------------


def run_chat(
    path: Path,
    arguments: Sequence[str],
    *,
    temperature: float,
    most_tokens: int,
    beside_base: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Talk to an adapter; see ``agilerl chat --help``."""
    found = subject(path, arguments, examined=False)
    console = new_console(quiet=quiet or as_json)
    console.print(f"Loading {shown(str(found.folder))} on {shown(found.base)}.", soft_wrap=True)
    from agilerl.cli.running import quieten_libraries

    quieten_libraries()
    from agilerl.envs.answer_format import AnswerFormat
    from agilerl.rollouts import SamplingSettings
    from agilerl.training.setup import load_agent

    agent = load_agent(found.config)
    loading_done()
    console.print("An empty line or /new begins a new conversation, /quit or the end of the input leaves.")
    environment = found.config.environment
    template, answers = environment.conversation_template or [], AnswerFormat.of(environment)
    system = [dict(m) for m in template if m["role"] == "system" and "{question}" not in m["content"]]
    said: dict[str, list[dict[str, str]]] = {"adapter": list(system)} | ({"base": list(system)} if beside_base else {})
    for turn, line in enumerate(_lines(quiet=quiet or as_json)):
        if line in ("", "/new"):
            said = {name: list(system) for name in said}
            console.print("(a new conversation)")
            continue
        if line == "/quit":
            return
        replies = {}
        for name, messages in said.items():
            messages.append(answers.ask([*system, {"role": "user", "content": line}])[-1])
            forgotten = len(messages)
            sampling = SamplingSettings(max_new_tokens=most_tokens, temperature=temperature)
            slot = None if name == "base" else agent.slot
            reply = _reply(agent, messages, len(system), sampling=sampling, slot=slot, turn=turn)
            if len(messages) < forgotten:
                say("(the context is full: the beginning of the conversation is forgotten)")
            messages.append({"role": "assistant", "content": reply})
            replies[name] = reply
        if as_json:
            print(json.dumps({"user": line, **replies}), flush=True)
            continue
        for name, reply in replies.items():
            tell_line(f"{name}> {reply}" if beside_base else reply)


def _lines(*, quiet: bool) -> Iterator[str]:
    """Yield what the user types, or the lines of a pipe."""
    from rich.prompt import Prompt

    if sys.stdin.isatty() and not quiet:
        console = new_console()
        while True:
            try:
                yield Prompt.ask("you", console=console, default="", show_default=False).strip()
            except EOFError:
                console.print()
                return
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin:
        yield line.strip()


def _reply(
    agent: "LLMAlgorithm",
    messages: list[dict[str, str]],
    system: int,
    *,
    sampling: "SamplingSettings",
    slot: int | None,
    turn: int,
) -> str:
    """Return the answer to a conversation, whose oldest turns are removed if it has become too long."""
    from agilerl.envs.prompts import PromptTooLongError, decode_completions, render_prompt
    from agilerl.rollouts import GenerationRequest

    runtime, most_tokens, room = agent.runtime, sampling.max_new_tokens, agent.context_length
    while True:
        try:
            ids = render_prompt(runtime.tokenizer, messages, max_tokens=max(1, room - min(most_tokens, room // 2)))
            break
        except PromptTooLongError:
            if len(messages) <= system + 1:
                messages.pop()
                raise
            del messages[system : system + 2]
    sampling = replace(sampling, max_new_tokens=max(1, min(most_tokens, room - len(ids))))
    request = GenerationRequest(slot, ids, 1, sampling, "chat", (turn,))
    ((completion,),) = runtime.complete([request])
    return decode_completions(runtime.tokenizer, [completion.token_ids])[0]


# -- ``agilerl merge``: base and adapter as one model ------------------------------------------------------------------


def run_merge(path: Path, out: Path, *, dtype: str, quiet: bool) -> None:
    """Merge an adapter into its base; see ``agilerl merge --help``."""
    found = subject(path, examined=False)
    _vacant(out)
    console = new_console(quiet=quiet)
    console.print(f"Merging {shown(str(found.folder))} into {shown(found.base)}.", soft_wrap=True)
    from agilerl.cli.running import quieten_libraries

    quieten_libraries()
    from agilerl.training.setup import merged_model

    model, tokenizer = merged_model(found.folder, found.config, dtype=dtype)
    loading_done()

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))

    # DeepSpeed, if it is installed, is imported here, and logs to standard output.
    with _as_a_whole(out), redirect_stdout(sys.stderr if not quiet else StringIO()):
        commit_folder(out, write, manifest=False)
    console.print(f"written: {out}\n", soft_wrap=True)
    place, file = shlex.quote(str(out)), shlex.quote(f"{out.name}.gguf")
    console.print(f"vLLM         vllm serve {place} --generation-config vllm", soft_wrap=True)
    console.print(f"llama.cpp    python convert_hf_to_gguf.py {place} --outfile {file}", soft_wrap=True)


# -- ``agilerl export`` and ``push``: the elite for others -------------------------------------------------------------


def run_export(run: Path, out: Path, *, quiet: bool) -> None:
    """Write the elite as a PEFT folder with its model card; see ``agilerl export --help``."""
    _vacant(out)
    with _as_a_whole(out):
        export_elite(run, out)
    console, places = new_console(quiet=quiet), {"FOLDER": str(out)}
    with suppress(ConfigError):  # the base may have moved since
        base = base_place(subject(run, examined=False, loaded=False).base)
        places |= {"BASE": base, "BASE_FOLDER": base} if Path(base).is_dir() else {}
    console.print(f"written: {out} ({', '.join(sorted(path.name for path in out.iterdir()))})", soft_wrap=True)
    text = (out / "README.md").read_text(encoding="utf-8")
    if read_json(out / ADAPTER_CONFIG).get("alora_invocation_tokens"):
        console.print("It is activated (alora_invocation_tokens): load it with PEFT. vLLM does not know such adapters.")
        return
    for name, what in (("vllm serve", "vLLM"), ("python convert_lora_to_gguf.py", "llama.cpp")):
        command = next(line for line in text.splitlines() if line.startswith(name))
        placed = re.sub(
            r"\b(FOLDER|BASE_FOLDER|BASE)\b", lambda word: shlex.quote(places.get(word[0], word[0])), command
        )
        console.print(f"{what:<12} {placed}", soft_wrap=True)


def export_elite(run: Path, out: Path, *, name: str | None = None, licence: str | None = None) -> None:
    """Write the elite of a finished run as a new folder: PEFT adapter, tokenizer, agent.json and model card.

    With a ``name``, for others: of a base in a folder of this machine only the last part is written down. Raises
    CheckpointError for a run without an elite, and for one whose elite is not as it was written.
    """
    from agilerl.report.card import CARD, finished_summary, model_card, public_name

    folder, root = find_adapter(run)
    if root is None or folder.resolve() != (root / "elite").resolve():
        raise CheckpointError(f"expected a run, or the elite of one, found the adapter {folder}")
    summary = finished_summary(root)
    # Only files that the run wrote, and no links: a stranger's folder must not have others of this machine sent away.
    files = [file for file in verify_folder(folder) if file not in (CARD, MANIFEST) and "/" not in file]
    card = model_card(root, summary, name=name, licence=licence)
    base = public_name(str(read_run(root)["config"]["network"]["pretrained_model_name_or_path"]))

    def write(place: Path) -> None:
        for file in files:
            shutil.copyfile(folder / file, place / file)
        for file, key in ((ADAPTER_CONFIG, "base_model_name_or_path"), ("agent.json", "base")):
            if file in files and name is not None:
                values = read_json(folder / file)
                (place / file).write_text(json.dumps({**values, key: base}, indent=2, sort_keys=True) + "\n")
        (place / CARD).write_text(card, encoding="utf-8")

    commit_folder(out, write, manifest=False)


def run_push(run: Path, repository: str, *, private: bool, dry_run: bool, quiet: bool, as_json: bool) -> None:
    """Upload the elite to the hub; see ``agilerl push --help``."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", repository) is None:
        raise ConfigError(f"expected a repository as OWNER/NAME, found {shown(repository)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export_elite(run, folder, name=repository.rpartition("/")[2])
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        address = None if dry_run else _uploaded(folder, repository, private=private)
    if as_json:
        print(json.dumps({"repository": repository, "url": address, "private": private, "files": files}, indent=1))
        return
    console = new_console(quiet=quiet)
    what = "would be uploaded" if dry_run else "uploaded"
    for name, size in files.items():
        console.print(f"{size:>12,}  {name}")
    console.print(f"{what} to {repository}" if address is None else f"{what}: {address}", soft_wrap=True)


def _uploaded(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder and return its address; raises ConfigError without a token, WriteError if the hub refuses."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if get_token() is None:
        raise ConfigError("uploading needs a token of the hub, found none; log in with hf auth login, or set HF_TOKEN")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    disable_progress_bars()
    hub = HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        done = hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload the elite of a run")
    except Exception as error:  # what the client raises depends on its version and on what answers
        raise WriteError(f"the hub did not take {repository}: {type(error).__name__}: {error}") from error
    return str(done.repo_url if hasattr(done, "repo_url") else f"{hub.endpoint}/{repository}")


# -- ``agilerl compare``: runs side by side ----------------------------------------------------------------------------


def run_compare(runs: Sequence[Path], out: Path | None, *, as_json: bool) -> None:
    """Show what differs between runs and what came of them; see ``agilerl compare --help``."""
    from agilerl.report.load import check_different, load_run

    if len(runs) < 2:
        raise ConfigError(f"expected two runs or more to compare, found {shown(str(runs[0]))} alone")
    check_different(runs)
    found = [load_run(path) for path in runs]
    settings = [dict(_flat(run.info["config"])) | _fingerprints(run.info) for run in found]
    names = list(dict.fromkeys(name for one in settings for name in one))
    for one in settings:
        if one.get("algorithm.seed") == one.get("training.seed"):
            one.pop("algorithm.seed", None)  # not a second difference: it is the run's seed unless it is set
    differ = {
        n: [one.get(n) for one in settings] for n in names if len({json.dumps(one.get(n)) for one in settings}) > 1
    }
    results = []
    for run in found:
        with as_written(run.path):
            results.append(_result(run))
    changed = [name.removeprefix("sha256 of ") for name in differ if name.startswith("sha256 of ")]
    if as_json:
        document = {"runs": [str(path) for path in runs], "settings": differ, "results": results}
        print(json.dumps(document, indent=1))
        return
    from agilerl.cli.commands import run_report

    _show_comparison([run.name for run in found], differ, results)
    if changed:
        new_console().print(
            f"The runs read different {', '.join(map(shown, changed))}: what they were graded by or asked differs, so "
            "their scores cannot be compared.",
            soft_wrap=True,
        )
    run_report(runs, out)


def _fingerprints(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the beginning of the sha256 of each file of code or rows that a run read."""
    files = info.get("files") or {}
    return {f"sha256 of {Path(name).name}": sha[:12] for kind in files.values() for name, sha in kind.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _result(run: Any) -> dict[str, Any]:
    from agilerl.report.load import number

    tests = {}
    for who, (_, score) in run.tests.items():
        from agilerl.hpo.fitness import interval

        ends = interval(score.mean, score.stderr, score.n)
        finite = score.mean == score.mean
        tests[who] = {"mean": score.mean, "ci95": list(ends), "n": score.n} if finite else None
    tokens = run.summary.get("tokens") or {}
    spent = sum(int(number(value)) for value in tokens.values()) if tokens else None
    seconds = run.summary.get("seconds")
    seconds = None if seconds is None else float(seconds)
    return {"finished": run.is_finished, "test": tests, "tokens": spent, "seconds": seconds}


def _show_comparison(
    names: Sequence[str], differ: Mapping[str, Sequence[Any]], results: Sequence[Mapping[str, Any]]
) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(one_line(name), overflow="fold")
    for setting, values in differ.items():
        table.add_row(one_line(setting), *("-" if v is None else one_line(str(v)) for v in values))
    for who, said in (("base", "test of the base"), ("elite", "test of the elite")):
        tests = [result["test"].get(who) for result in results]
        table.add_row(
            said, *("-" if t is None else f"{t['mean']:.3f} ({t['ci95'][0]:.3f} to {t['ci95'][1]:.3f})" for t in tests)
        )
    table.add_row("tokens", *("-" if r["tokens"] is None else f"{r['tokens']:,}" for r in results))
    table.add_row("seconds", *("-" if r["seconds"] is None else f"{float(r['seconds']):.0f}" for r in results))
    new_console().print(table)
