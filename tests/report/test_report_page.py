import base64
import gzip
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import plotly.graph_objects
import pytest
from small_run import birth, fitness, train, write_run
from synthetic_run import ATTACK

from agilerl.errors import CheckpointError
from agilerl.report import build_report
from agilerl.report.page import script_json
from agilerl.runs import strict_json


class Page(HTMLParser):
    """What a browser would see: elements with attributes, scripts, and text."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.words, self.inside = [], [], [], None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = tag
        if tag == "script":
            self.scripts.append([dict(attributes), ""])

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1][1] += data
        elif self.inside != "style":
            self.words.append(data)

    @property
    def code(self):
        return [text for attributes, text in self.scripts if "type" not in attributes]

    def data(self, **wanted):
        """Return the parsed JSON blocks with these attributes."""
        blocks = [(a, t) for a, t in self.scripts if a.get("type") == "application/json"]
        return [json.loads(text, parse_constant=pytest.fail) for a, text in blocks if wanted.items() <= a.items()]

    @property
    def figures(self):
        return {k: v for block in self.data(**{"class": "figures"}) for k, v in block.items()}


@pytest.fixture(scope="session")
def page(runs, tmp_path_factory):
    pages = {}

    def build(*names):
        if names not in pages:
            out = tmp_path_factory.mktemp("pages") / "report.html"
            assert build_report([runs[name] for name in names], out) == out
            pages[names] = Page(out)
        return pages[names]

    return build


SECTIONS = ["result", "fitness", "family", "hyperparameters", "curves", "completions", "lineage", "throughput"]


@pytest.mark.parametrize("names", [("whole",), ("unfinished",), ("hostile",), ("whole", "other")])
def test_the_file_is_complete_in_itself(page, names):
    found = page(*names)
    for tag, attributes in found.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, attributes)
    style = re.search(r"<style>(.*?)</style>", found.source, re.DOTALL).group(1)
    assert "url(" not in style
    assert "@import" not in style
    assert len(found.code) == 1
    policy = next(a["content"] for t, a in found.elements if t == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    (library,) = (text for attributes, text in found.scripts if attributes.get("id") == "library")
    library = gzip.decompress(base64.b64decode(library)).decode()
    assert "plotly.js" in library[:200]
    for script in (library, *found.code):
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert {a.get("id") for t, a in found.elements if t == "section"} == {*SECTIONS, "configuration"}


@pytest.mark.parametrize("names", [("whole",), ("unfinished",), ("hostile",), ("whole", "other")])
def test_every_figure_is_valid_and_has_its_place(page, names):
    found = page(*names)
    places = [a["id"] for t, a in found.elements if a.get("class") == "chart"]
    assert sorted(places) == sorted(found.figures)
    for key, figure in found.figures.items():
        drawn = plotly.graph_objects.Figure(figure)
        assert any(len(trace.x or ()) for trace in drawn.data), key


def test_the_verdict_stands_at_the_top(page):
    text = page("whole").text
    assert re.search(r"The elite, agent \d+, is better than the base by 53\.2 points ± 2\.8 \(one", text)
    for words in ("36.8 % ± 2.4 points, n 400", "90.0 % ± 1.5 points, n 400", "Charts by iteration", "test accuracy"):
        assert words in text
    assert text.index("36.8 %") < text.index("Fitness Mean reward")


def test_what_a_run_is_about_is_shown(page):
    text = page("whole").text
    for words in ("reasoning_gym:spell_backward", "0:02:51", "agilerl train --seed 0", "pop_size: 4", "torch:"):
        assert words in text
    titles = page("whole").source
    assert '<span class="word">train</span> <span class="word">--seed</span> ' in titles  # no line ends after a hyphen
    for title in ("Reward", "KL to the reference", "Entropy", "Completion length (tokens)"):
        assert f"<h4>{title}</h4>" in titles
    for gene in ("lr", "beta", "clip_coef", "group_size"):
        assert f"<h4>{gene}</h4>" in titles


def test_the_browser_holds_the_best_and_the_worst_of_groups(page):
    (samples,) = page("whole").data(id="samples-0")
    assert {sample["step"] for sample in samples} == {1, 10, 20, 30, 40, 50}
    assert all(sample["best"]["reward"] >= sample["worst"]["reward"] for sample in samples)
    assert all(sample["spread"] == sample["best"]["reward"] - sample["worst"]["reward"] for sample in samples)
    assert {sample["spread"] for sample in samples} == {0.0, 1.0}


def test_a_report_is_of_a_size_that_can_be_sent_by_mail(page):
    assert len(page("whole").source) < 2_450_000


def test_every_chart_says_what_it_shows(page):
    labels = {a["id"]: a["aria-label"] for t, a in page("whole").elements if a.get("role") == "img"}
    assert labels.keys() == page("whole").figures.keys()
    assert labels["hyper0-0"] == "beta, 31 agents, from 0.000201 to 0.0031"
    assert "from" not in labels["tree-0"]


def test_what_is_told_about_an_agent(tmp_path):
    change = {"gene": "lr", "old": 1e-3, "new": 5e-3}
    lineage = [
        birth(0, None, 0, lr=1e-3),
        fitness(0, 0, 0.5),
        birth(1, 0, 0, lr=1e-3),
        {"event": "mutation", "agent": 1, "generation": 0, "changes": [change], "details": {"reason": "selection"}},
        birth(2, None, 0),
        {"event": "verdict", "agent": 1, "generation": 1, "reason": "kept: P = 0.6"},
        {"event": "verdict", "agent": 1, "generation": 2, "reason": "left"},
        {"event": "death", "agent": 1, "generation": 2, "reason": "left: place 4"},
        fitness(1, 1, 0.75),
    ]
    page = Page(build_report([write_run(tmp_path / "run", lineage=lineage)], tmp_path / "report.html"))
    first, second, third = page.data(id="agents-0")[0]
    assert (first["children"], second["parents"], third["children"]) == ([1], [0], [])
    assert second["genes"] == [["lr", "0.005", "0.005"]]  # first trained with: after the mutation at its birth
    assert "lr 0.005" in page.text
    assert second["exams"] == [[1, 20, "0.750 ± 0.100", 20, 1]]  # the first of one
    assert second["events"] == [
        [0, "born of 0"],
        [0, "mutated: lr 0.001 → 0.005 (by selection)"],
        [1, "exam 0.750 ± 0.100"],
        [1, "kept: P = 0.6"],
        [2, "left: place 4"],
    ]


def test_diverged_agents_are_named(page):
    text = page("whole").text
    assert re.search(r"Agent 3: grad_norm, loss not finite at iteration 2, 3; fitness not finite in generation 0", text)
    assert "2 optimizer steps skipped" in text
    labels = [text for trace in page("whole").figures["tree-0"]["data"] for text in trace.get("text", [])]
    assert "<b>not finite</b>" in labels


def test_untrusted_text_stays_text(page):
    found = page("hostile")
    assert not [tag for tag, _ in found.elements if tag in ("img", "iframe", "object", "embed")]
    assert not [a for _, a in found.elements for name in a if name.startswith("on")]
    assert len(found.code) == 1
    assert not any("hacked" in script for script in found.code)
    (samples,) = found.data(id="samples-0")
    assert {sample["best"]["text"] for sample in samples} == {ATTACK}
    # The death reason is in the tree's hover text and in the table; plotly reads tags there, so it is escaped twice.
    hover = json.dumps(found.figures["tree-0"])
    assert "&lt;/script&gt;&lt;script&gt;window.hacked" in hover
    assert "<script" not in hover
    assert "<img" not in hover
    assert "window.hacked=1" in found.text


def test_json_in_a_script_cannot_end_it():
    value = {"text": "</script><!-- & \u2028 é", "<": [None, 1.5]}
    text = script_json(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value
    assert script_json([float("nan"), (float("inf"), 1.0)]) == "[null,[null,1.0]]"


def test_an_unfinished_run_says_so(page):
    text = page("unfinished").text
    assert "This run has not finished" in text
    assert re.search(r"So far agent \d+ leads with a fitness of 0\.\d+ ± 0\.\d+", text)
    assert "fitness-0" in page("unfinished").figures


def test_an_empty_run_still_gives_a_report(tmp_path):
    found = Page(build_report([write_run(tmp_path / "run")], tmp_path / "out" / "report.html"))
    for words in ("no metrics yet", "no agents yet", "No agent has been evaluated yet", "No completions were saved"):
        assert words in found.text
    assert found.figures == {}
    begun = Page(build_report([write_run(tmp_path / "begun", lineage=[birth(0, None, 0)])], tmp_path / "begun.html"))
    assert "No agent has been evaluated yet" in begun.text
    assert begun.text.count("winning lineage") == 1  # no key without data: that of the tree alone


def test_nothing_but_nan_still_gives_a_report(tmp_path):
    nan = float("nan")
    lineage = [birth(0, None, 0, lr=nan), fitness(0, 0, nan, nan)]
    metrics = [train(0, step, reward=nan, loss=float("inf")) for step in (1, 2)]
    test = {who: {"mean": nan, "stderr": nan, "n": 4} for who in ("base", "elite")}
    summary = {"test": test, "elite": {"index": 0}, "seconds": nan}
    root = write_run(tmp_path / "run", lineage=lineage, metrics=metrics, summary=summary)
    found = Page(build_report([root], tmp_path / "report.html"))
    assert "no finite test result" in found.text
    assert "loss, reward not finite at iteration 1, 2; fitness not finite in generation 0" in found.text
    assert "fitness-0" not in found.figures
    assert "tree-0" in found.figures


LARGEST, SMALLEST = sys.float_info.max, 5e-324
EXTREMES = {
    "largest": [LARGEST],
    "both ends": [LARGEST, -LARGEST],
    "near the ends": [1e308, -1e308, 1.0],
    "smallest": [SMALLEST],
    "smallest and largest": [SMALLEST, LARGEST],
    "infinite": [float("inf"), 1.0, float("-inf")],
    "beyond floats": [10**400, -(10**400), 1],
}


def with_numbers(value, numbers):
    """Return what a run wrote with its measurements replaced, one after the other."""
    if isinstance(value, dict):
        return {key: with_numbers(item, numbers) for key, item in value.items()}
    if isinstance(value, list):
        return [with_numbers(item, numbers) for item in value]
    return next(numbers) if isinstance(value, float) or value in ("NaN", "Infinity") else value


@pytest.mark.parametrize("kind", EXTREMES)
def test_numbers_that_no_arithmetic_holds_still_give_a_report(kind, runs, tmp_path):
    roots = []
    for name in ("whole", "unfinished"):
        roots.append(tmp_path / name)
        shutil.copytree(runs[name], roots[-1])
        for file in ("metrics.jsonl", "lineage.jsonl", "summary.json"):
            if not (path := roots[-1] / file).exists():
                continue
            numbers = itertools.cycle(EXTREMES[kind])
            text = path.read_text(encoding="utf-8")
            pieces = [text] if path.suffix == ".json" else text.splitlines()
            written = [with_numbers(strict_json.loads(piece), numbers) for piece in pieces]
            path.write_text("".join(f"{strict_json.dumps(piece)}\n" for piece in written), encoding="utf-8")
    for chosen in (roots[:1], roots[1:], roots):
        found = Page(build_report(chosen, tmp_path / "report.html"))
        assert "tree-0" in found.figures


def test_lines_that_lack_keys_are_left_out_and_counted(tmp_path):
    metrics = [train(0, 1, reward=0.5), {"kind": "train", "reward": 1.0}, {"kind": "eval"}, {"kind": "evolution"}, {}]
    lineage = [{"event": "birth"}, {"event": "fitness", "agent": 0}, birth(0, 0, 0), birth(1, 7, 0), {}]
    root = write_run(tmp_path / "run", metrics=metrics, lineage=lineage)
    found = Page(build_report([root], tmp_path / "report.html"))
    assert "1 train line(s) without agent or step were left out" in found.text


def test_several_runs_stand_side_by_side(page):
    found = page("whole", "other")
    assert "2 runs side by side" in found.text
    assert {"fitness-0", "fitness-1", "tree-0", "tree-1"} <= set(found.figures)
    lines = [trace for trace in found.figures["overlay"]["data"] if "name" in trace]
    assert [(line["name"], line["meta"]["run"]) for line in lines] == [("whole", 0), ("other", 1)]
    assert "overlay" not in page("whole").figures
    assert "training.pop_size 4 6" in found.text
    assert "algorithm.name" not in found.text
    assert found.source.count("Plotly.newPlot") == page("whole").source.count("Plotly.newPlot")


def test_two_runs_of_one_name_can_be_told_apart(tmp_path):
    roots = [write_run(tmp_path / name / "run") for name in ("a", "b")]
    found = Page(build_report(roots, tmp_path / "report.html"))
    assert f"{tmp_path}/a/run" in found.text
    assert f"{tmp_path}/b/run" in found.text


def test_a_damaged_completions_file_is_noted(runs, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(runs["unfinished"], root)
    (root / "completions" / "step_000010.parquet").write_bytes(b"PAR1")
    found = Page(build_report([root], tmp_path / "report.html"))
    assert "step_000010.parquet, found none" in found.text
    assert {sample["step"] for sample in found.data(id="samples-0")[0]} == {1}


def test_a_torn_last_line_does_not_matter_but_a_damaged_one_is_named(runs, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(runs["unfinished"], root)
    with open(root / "metrics.jsonl", "a") as file:
        file.write('{"kind":"train","ag')
    build_report([root], tmp_path / "report.html")
    with open(root / "metrics.jsonl", "a") as file:
        file.write("\n{}\n")
    with pytest.raises(CheckpointError, match=r"line \d+ of .*metrics\.jsonl"):
        build_report([root], tmp_path / "report.html")


def test_what_is_no_run_is_a_clear_error(tmp_path):
    out = tmp_path / "report.html"
    with pytest.raises(CheckpointError, match="found nothing"):
        build_report([tmp_path / "none"], out)
    with pytest.raises(CheckpointError, match=r"no run\.json"):
        build_report([tmp_path], out)
    with pytest.raises(CheckpointError, match="at least one"):
        build_report([], out)
    assert not out.exists()
    root = write_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="could not be written"):
        build_report([root], root / "run.json" / "report.html")


@pytest.mark.processes
def test_the_run_directory_is_only_read_and_torch_is_not_needed(runs, tmp_path):
    root = runs["whole"]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    code = (
        "import sys\nfrom agilerl.report import build_report\nbuild_report([sys.argv[1]], sys.argv[2])\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    out = subprocess.check_output([sys.executable, "-c", code, str(root), str(tmp_path / "r.html")], text=True)
    assert out == "[]\n"
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_what_may_keep_agents_from_learning_is_on_the_page(tmp_path):
    cut = {"completions/clipped_ratio": 0.9, "completions/max_length": 16.0}
    lines = [train(agent, step, **(cut if agent == 0 else {})) for step in range(1, 9) for agent in (0, 1)]
    run = write_run(tmp_path / "run", lineage=[birth(0, None, 0), birth(1, None, 0)], metrics=lines)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert "agent 0: 90% of the completions were cut at the limit of 16 tokens" in page.text
    assert "agent 1:" not in page.text


def test_runs_that_were_graded_by_other_code_are_told_apart(tmp_path):
    roots = []
    for digest in ("a" * 64, "b" * 64):
        roots.append(write_run(tmp_path / digest[0]))
        document = json.loads((roots[-1] / "run.json").read_text())
        document["files"] = {"code": {"/somewhere/my_reward.py": digest}, "data": {"/somewhere/rows.jsonl": "c" * 64}}
        (roots[-1] / "run.json").write_text(json.dumps(document))
    found = Page(build_report(roots, tmp_path / "report.html"))
    assert "The runs differ in 'my_reward.py': they were asked or graded differently" in found.text
    assert "sha256 of my_reward.py aaaaaaaaaaaa bbbbbbbbbbbb" in found.text
    assert "rows.jsonl" not in found.text.partition("Configuration")[0]
