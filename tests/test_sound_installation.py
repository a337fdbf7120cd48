"""Is the installation sound? `make check`: what a user types first, with a run that is stopped in the middle."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = (sys.executable, "-m", "agilerl")
SETTINGS = ("training.max_steps=1536", "training.checkpoint_steps=1", "environment.test_prompts=40")


def test_it_trains_stops_resumes_evaluates_and_exports(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = subprocess.Popen([*COMMAND, "train", *SETTINGS, "--quiet", "--out", str(run)])
    while not list(run.glob("checkpoints/0*")):
        assert training.poll() is None, "ended before its first checkpoint"
        time.sleep(0.05)
    training.send_signal(signal.SIGTERM)
    assert training.wait(60) == 143
    assert not (run / "summary.json").exists()

    def answer(*words: str) -> str:
        return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=True).stdout

    answer("resume", str(run), "--quiet")
    assert (run / "summary.json").exists()
    assert 0 <= json.loads(answer("eval", str(run), "--json"))["adapter"]["greedy"]["mean"] <= 1
    answer("export", str(run), str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
