"""``agilerl watch``: pages about runs on this machine, in a real browser and for requests from elsewhere."""

import hashlib
import http.client
import json
import shutil
import signal
import threading
import time
import urllib.request

import pytest
from small_run import birth, fitness, train, write_run

from agilerl.errors import CheckpointError, ConfigError
from agilerl.report import live
from agilerl.report.live import Watch, runs_below
from agilerl.runs import JsonLines
from agilerl.runs.directory import DirectoryLock
from agilerl.runs.strict_json import dumps
from tests.programs import Program
from tests.report.browser import CHROMIUM, Browser
from tests.training.small_runs import environment


@pytest.fixture
def serve():
    """Serve a folder, and return the server."""
    servers = []

    def start(folder, **options):
        servers.append(Watch(folder, **options))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(server, path="/", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_runs_are_found_below_a_folder_and_not_inside_of_runs_or_behind_links(tmp_path):
    for name in ("a", "of/b", "of/b/inside", "1/2/3/4/5/deep"):
        (tmp_path / "all" / name).mkdir(parents=True)
        (tmp_path / "all" / name / "run.json").touch()
    (tmp_path / "all" / "link").symlink_to(tmp_path / "all" / "a")
    assert set(runs_below(tmp_path / "all")) == {"a", "of/b"}
    assert runs_below(tmp_path / "all" / "a") == {".": tmp_path / "all" / "a"}


def test_a_list_of_runs_leads_to_their_reports(runs, tmp_path, serve):
    shutil.copytree(runs["whole"], tmp_path / "all" / "whole <b>")
    shutil.copytree(runs["unfinished"], tmp_path / "all" / "of" / "unfinished")
    file = tmp_path / "all" / "of" / "unfinished" / "run.json"
    info = json.loads(file.read_text())
    info["config"]["environment"] = {"dataset": [{"path": "/home/me/rows.jsonl"}]}
    file.write_text(dumps({**info, "config_sha256": hashlib.sha256(dumps(info["config"]).encode()).hexdigest()}))
    (tmp_path / "all" / "damaged").mkdir()
    (tmp_path / "all" / "damaged" / "run.json").write_text("{")
    server = serve(tmp_path / "all")
    status, page = get(server)
    assert status == 200
    assert "<b>" not in page
    assert f"<h1>Runs below {tmp_path}/all/</h1>" in page
    assert "whole &lt;b&gt;" in page
    assert "cannot be read" in page
    assert page.count("<td>stopped</td>") == 1
    assert page.count("<td>exam 0.") == 1  # of the unfinished run; the other one has its test
    assert "<td>rows.jsonl</td>" in page
    lock = DirectoryLock(tmp_path / "all" / "of" / "unfinished" / ".lock")
    assert "<td>running</td>" in get(server)[1]
    assert "is still running" in get(server, "/of/unfinished/")[1]
    lock.release()
    end = time.monotonic() + 60
    while "it was stopped" not in get(server, "/of/unfinished/")[1]:  # a process that ends writes nothing more
        assert time.monotonic() < end
        time.sleep(0.1)
    status, report = get(server, "/whole%20%3Cb%3E/")
    assert status == 200
    assert "<h1>Run whole &lt;b&gt;</h1>" in report
    assert "data-reload" not in report.partition("<script")[0]
    assert 'data-reload="10"' in get(server, "/of/unfinished/")[1]
    assert get(server, "/damaged/")[0] == 500


@pytest.mark.parametrize("path", ["/none", "/../whole/", "/%2e%2e/whole/", "/whole/run.json", "//etc/passwd"])
def test_nothing_but_runs_is_served(path, runs, tmp_path, serve):
    shutil.copytree(runs["unfinished"], tmp_path / "all" / "inside")
    shutil.copytree(runs["unfinished"], tmp_path / "whole")
    assert get(serve(tmp_path / "all"), path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_page_of_another_site_that_leads_here_gets_nothing(host, runs, serve):
    server = serve(runs["unfinished"])
    assert get(server, host=host) == (403, "Only http://127.0.0.1 and http://localhost are answered.")
    assert get(server, host=f"localhost:{server.server_port}")[0] == 200


def test_a_report_is_rendered_again_only_for_something_new(tmp_path, serve, monkeypatch):
    run = write_run(tmp_path / "run", lineage=[birth(0, None, 0), fitness(0, 0, 0.125)])
    rendered = []
    monkeypatch.setattr(live, "render", lambda *a, real=live.render: rendered.append(1) or real(*a))
    server = serve(run)
    assert "0.125" in get(server)[1]
    assert get(server)[1] == get(server)[1]
    assert len(rendered) == 1
    with (run / "lineage.jsonl").open("a") as file:
        file.write(dumps(fitness(0, 1, 0.875)) + "\n")
    end = time.monotonic() + 60
    while "0.875" not in get(server)[1]:  # not at once: rendering takes at most a tenth of a core
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(rendered) == 2


def test_what_cannot_be_watched(tmp_path, runs, serve):
    with pytest.raises(CheckpointError, match="found none"):
        Watch(tmp_path / "none")
    with pytest.raises(CheckpointError, match=f"did you mean '?{runs['whole']}"):
        Watch(runs["whole"] / "checkpoints")
    assert "no runs here yet" in get(serve(tmp_path))[1]
    port = serve(runs["whole"]).server_port
    with pytest.raises(ConfigError, match=f"--port {port}"):
        Watch(runs["whole"], port)


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
def test_a_browser_follows_a_run_while_it_trains(tmp_path, monkeypatch, serve):
    monkeypatch.setattr(live, "RELOAD", 1)
    run = write_run(tmp_path / "all" / "mine", lineage=[birth(0, None, 0)], metrics=[train(0, 1, reward=0.5)])
    browser = Browser(tmp_path / "profile")
    try:
        browser.visit(serve(tmp_path / "all").url, charts=False)
        with browser.loading():
            browser.run("document.querySelector('table a').click()")
        browser.drawn()
        points = "document.getElementById('curve0-0').data.at(-1).y"
        assert browser.run(points) == [0.5]
        browser.run("document.querySelector('button[data-axis=tokens]')?.click()")
        with JsonLines(run / "metrics.jsonl") as lines:
            lines.write(train(0, 2, reward=0.75))
        end = time.monotonic() + 60
        while browser.run(f"'drawn' in document.body.dataset && {points}.length") != 2:
            assert time.monotonic() < end, "the page does not follow the run"
            with browser.loading():
                pass
            browser.drawn()
        assert browser.run(points) == [0.5, 0.75]
        assert browser.complaints == []
    finally:
        browser.close()


@pytest.mark.processes
def test_the_command_prints_an_address_and_ends_with_ctrl_c(runs):
    with Program("-m", "agilerl", "watch", str(runs["whole"]), cwd=runs["whole"], env=environment()) as process:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert "Run whole" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
