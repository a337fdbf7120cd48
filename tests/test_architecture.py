"""The house rules, read off the source with ast; each rule is also shown a source that breaks it.

``ALLOWED`` is the list of exceptions. It only shrinks: an entry that is no longer needed fails the test.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES, POSITIONAL, DEPTH, REEXPORT_LINES = 400, 60, 6, 4, 20

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "streams", "validation"),
    ("functional", "data", "hpo"),
    ("models", "envs", "rewards"),
    ("rollouts", "runs"),
    ("runtime",),
    ("algorithms",),
    ("population",),
    ("training", "distributed", "report"),
    ("cli", "__main__", "llm_envs", "utils", "algorithms.core"),
)
"""A file imports from its own row and the rows above it; ``agilerl/__init__`` only names what the others hold."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "functional": ("agilerl.",),
    "hpo": ("torch", "transformers", "peft"),
    "errors": ("torch", "transformers", "peft"),
    "streams": ("torch", "transformers", "peft"),
    "envs": ("agilerl.models", "torch.nn", "transformers", "peft"),
    "algorithms": (
        "agilerl.rollouts.torch_engine",
        "agilerl.rollouts.vllm_engine",
        "agilerl.rollouts.scripted",
        "agilerl.rollouts.kv_cache",
        "agilerl.rollouts.sampling",
    ),
}
"""What the files of a package never import, beyond the order of the layers."""

OPTIONAL = ("vllm", "deepspeed", "ray", "wandb", "plotly", "tensorboard", "trackio", "bitsandbytes", "liger_kernel")
UNSAFE_IMPORTS = ("pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
UNSAFE_CALLS = ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load")
UNSAFE_KEYWORDS = ("trust_remote_code", "allow_pickle")
TORCH_DRAWS = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "multinomial", "bernoulli", "normal")
INPLACE_DRAWS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "multinomial")
GENERATORS = ("Generator", "Philox", "SeedSequence", "BitGenerator", "Random")
REEXPORTS = ("llm_envs.py", "utils/*.py", "algorithms/core/*.py")

ALLOWED: dict[str, tuple[str, ...]] = {
    "positional": (
        # Documented signatures, which users call by position.
        "agilerl.hpo.mutation.Mutations.__init__",
        "agilerl.envs.reasoning.ReasoningGym.__init__",
    ),
    "global_rng": (
        # reasoning_gym draws from the global generators: they are seeded for the draw and put back.
        "agilerl.envs.upstream: random.seed",
        "agilerl.envs.upstream: random.getstate",
        "agilerl.envs.upstream: random.setstate",
        "agilerl.envs.upstream: numpy.random.seed",
        "agilerl.envs.upstream: numpy.random.get_state",
        "agilerl.envs.upstream: numpy.random.set_state",
    ),
}


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    runtime: bool
    """False inside ``if TYPE_CHECKING``."""


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    known: frozenset[str] = frozenset()
    """Names of all modules of the package, which tell ``from package import module`` from other names."""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, runtime=True))

    def _imports(self, node: ast.AST, runtime: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, runtime) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    inner = f"{child.module}.{alias.name}"
                    yield Import(inner if inner in self.known else str(child.module), child.lineno, runtime)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from self._imports(child, runtime and not typing_only)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What a local name stands for: ``np`` is ``numpy``."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return found

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Each call with the full name of what is called; a method of an unknown object begins with a dot."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield self._dotted(node.func), node

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return f"{owner}.{node.attr}"
        return ""

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        yield from self._functions(self.tree, self.name)

    def _functions(self, node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            yield from self._functions(child, name)


# -- the rules: a module in, its violations out -----------------------------------------------------------------------


def part_of(name: str, part: str) -> bool:
    return name == part or name.startswith(part.rstrip(".") + ".")


def layer(name: str) -> int | None:
    """Row of the longest matching entry; None for ``agilerl`` itself."""
    rows = {part: row for row, parts in enumerate(LAYERS) for part in parts}
    inside = name.removeprefix("agilerl").lstrip(".")
    matching = [part for part in rows if part_of(inside, part)]
    return rows[max(matching, key=len)] if matching else None


def layers(module: Module) -> Iterator[str]:
    own = layer(module.name)
    if own is None:
        if module.name != "agilerl":
            yield f"{module.name}: has no place in LAYERS"
        return
    for found in module.imports:
        theirs = layer(found.target)
        if theirs is not None and theirs > own:
            yield f"{module.name}: {found.target} (line {found.line}) lies above it"


def forbidden_imports(module: Module) -> Iterator[str]:
    for part, targets in FORBIDDEN.items():
        if part_of(module.name, f"agilerl.{part}"):
            for found in module.imports:
                inside = found.target == f"agilerl.{part}" or part_of(found.target, f"agilerl.{part}")
                if not inside and any(part_of(found.target, target) for target in targets):
                    yield f"{module.name}: {found.target} (line {found.line})"


def file_length(module: Module) -> Iterator[str]:
    if (count := len(module.source.splitlines())) > FILE_LINES:
        yield f"{module.name}: {count} lines, at most {FILE_LINES}"


def function_length(module: Module) -> Iterator[str]:
    for name, node in module.functions():
        if (count := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES:
            yield f"{name}: {count} lines, at most {FUNCTION_LINES}"


def positional(module: Module) -> Iterator[str]:
    for name, node in module.functions():
        names = [a.arg for a in [*node.args.posonlyargs, *node.args.args]]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        if len(names) > POSITIONAL:
            yield name


def unsafe(module: Module) -> Iterator[str]:
    for found in module.imports:
        if any(part_of(found.target, name) for name in UNSAFE_IMPORTS):
            yield f"{module.name}: imports {found.target} (line {found.line})"
    for name, call in module.calls():
        if name in UNSAFE_CALLS:
            yield f"{module.name}: {name} (line {call.lineno})"
        for keyword in call.keywords:
            if keyword.arg in UNSAFE_KEYWORDS and ast.unparse(keyword.value) != "False":
                yield f"{module.name}: {keyword.arg} (line {call.lineno})"


def global_rng(module: Module) -> Iterator[str]:
    for name, call in module.calls():
        owner, _, last = name.rpartition(".")
        seeded = any(keyword.arg == "generator" for keyword in call.keywords)
        if owner in ("random", "numpy.random") and last not in GENERATORS:
            yield f"{module.name}: {name}"
        elif part_of(owner, "torch") and (last in ("manual_seed", "manual_seed_all", "seed", "initial_seed")):
            yield f"{module.name}: {name}"
        elif (owner == "torch" and last in TORCH_DRAWS) or last in INPLACE_DRAWS or part_of(owner, "torch.nn.init"):
            if not seeded:
                yield f"{module.name}: {name} without generator="


def hidden_machinery(module: Module) -> Iterator[str]:
    """No metaclass, and no attribute lookup in code; the package itself may import lazily."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "metaclass" for keyword in node.keywords):
            yield f"{module.name}: metaclass of {node.name}"
    for name, node in module.functions():
        if node.name in ("__getattr__", "__getattribute__") and name != "agilerl.__getattr__":
            yield name


RULES: dict[str, Callable[[Module], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        layers,
        forbidden_imports,
        file_length,
        function_length,
        positional,
        unsafe,
        global_rng,
        hidden_machinery,
    )
}


def cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules that import one another when they run, functions' own imports included."""
    graph = {m.name: {i.target for i in m.imports if i.runtime and i.target != m.name} & set(modules) for m in modules.values()}

    def reachable(start: str) -> set[str]:
        seen, waiting = set(), list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph[name]
        return seen

    reach = {name: reachable(name) for name in graph}
    return sorted({tuple(sorted(o for o in reach[n] if n in reach[o])) for n in graph if n in reach[n]})  # type: ignore[arg-type, return-value]


def too_deep(modules: Mapping[str, Module]) -> list[str]:
    """Classes with more than DEPTH classes of the package above and including them; names are taken as unique."""
    bases: dict[str, list[str]] = {}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in bases[name] if base in bases and base != name), default=0)

    return [f"{name}: {depth(name)} deep" for name in bases if depth(name) > DEPTH]


def scattered(modules: Mapping[str, Module]) -> list[str]:
    """Optional packages that more than one file imports."""
    found = []
    for package in OPTIONAL:
        users = sorted(m.name for m in modules.values() if any(part_of(i.target, package) for i in m.imports))
        if len(users) > 1:
            found.append(f"{package}: {', '.join(users)}")
    return found


# -- the package ------------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def package() -> dict[str, Module]:
    paths = sorted((ROOT / "agilerl").rglob("*.py"))
    names = frozenset(map(module_name, paths))
    return {module_name(p): Module(module_name(p), p.read_text(encoding="utf-8"), names) for p in paths}


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_the_rule(rule: str) -> None:
    found = [violation for module in package().values() for violation in RULES[rule](module)]
    assert sorted(set(found) - set(ALLOWED.get(rule, ()))) == []


@pytest.mark.parametrize("rule", ALLOWED)
def test_no_exception_outlives_its_reason(rule: str) -> None:
    found = {violation for module in package().values() for violation in RULES[rule](module)}
    assert set(ALLOWED[rule]) <= found


@pytest.mark.parametrize("folder", ["tests", "docs"])
def test_files_around_the_package_stay_short(folder: str) -> None:
    modules = [Module(module_name(p), p.read_text(encoding="utf-8")) for p in sorted((ROOT / folder).rglob("*.py"))]
    assert [v for m in modules for rule in (file_length, function_length) for v in rule(m)] == []


def test_no_import_cycles() -> None:
    assert cycles(package()) == []


def test_inheritance_is_shallow() -> None:
    assert too_deep(package()) == []


def test_optional_packages_are_imported_in_one_file_each() -> None:
    assert scattered(package()) == []


def test_reexport_files_hold_nothing_else() -> None:
    paths = sorted(path for pattern in REEXPORTS for path in (ROOT / "agilerl").glob(pattern))
    assert len(paths) >= 5
    for path in paths:
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= REEXPORT_LINES, path
        kinds = {type(node) for node in ast.parse(source).body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, path


def test_light_imports_stay_light() -> None:
    light = ["agilerl", "agilerl.errors", "agilerl.streams", "agilerl.cli.app", "agilerl.training.config"]
    light += sorted(name for name in package() if part_of(name, "agilerl.hpo"))
    code = f"import sys; import {', '.join(light)}; print(sorted({{'torch', 'transformers', 'peft'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- each rule catches what it is for ---------------------------------------------------------------------------------

BROKEN = [
    ("layers", "agilerl.hpo.x", "from agilerl.models import slots"),
    ("layers", "agilerl.models.x", "def f():\n    import agilerl.training.loop"),
    ("layers", "agilerl.data.x", "if TYPE_CHECKING:\n    from agilerl.runtime import Runtime"),
    ("layers", "agilerl.algorithms.x", "from agilerl.algorithms.core import registry"),
    ("layers", "agilerl.helpers", ""),
    ("forbidden_imports", "agilerl.hpo.x", "import torch"),
    ("forbidden_imports", "agilerl.functional.x", "from agilerl.errors import ConfigError"),
    ("forbidden_imports", "agilerl.envs.x", "from agilerl.models.base import load_base"),
    ("forbidden_imports", "agilerl.envs.x", "def f():\n    from transformers import AutoModelForCausalLM"),
    ("forbidden_imports", "agilerl.algorithms.x", "from agilerl.rollouts.torch_engine import TorchEngine"),
    ("file_length", "agilerl.x", "x = 1\n" * (FILE_LINES + 1)),
    ("function_length", "agilerl.x", "class A:\n    def f(self):\n" + "        x = 1\n" * FUNCTION_LINES),
    ("positional", "agilerl.x", "def f(a, b, c, d, e, f, g): ..."),
    ("positional", "agilerl.x", "class A:\n    def f(self, a, b, c, /, d, e, f, g=1): ..."),
    ("unsafe", "agilerl.x", "import pickle"),
    ("unsafe", "agilerl.x", "def f():\n    from dill import loads"),
    ("unsafe", "agilerl.x", "eval('1')"),
    ("unsafe", "agilerl.x", "exec('1')"),
    ("unsafe", "agilerl.x", "import torch as t\nt.load('a')"),
    ("unsafe", "agilerl.x", "from torch import load\nload('a')"),
    ("unsafe", "agilerl.x", "import yaml\nyaml.load(text)"),
    ("unsafe", "agilerl.x", "AutoModel.from_pretrained(name, trust_remote_code=True)"),
    ("global_rng", "agilerl.x", "import torch\ntorch.manual_seed(1)"),
    ("global_rng", "agilerl.x", "import torch\ntorch.cuda.manual_seed_all(1)"),
    ("global_rng", "agilerl.x", "import numpy as np\nnp.random.rand()"),
    ("global_rng", "agilerl.x", "import numpy as np\nnp.random.default_rng()"),
    ("global_rng", "agilerl.x", "from numpy.random import shuffle as mix\nmix(x)"),
    ("global_rng", "agilerl.x", "import random\nrandom.choice(x)"),
    ("global_rng", "agilerl.x", "from random import choice\nchoice(x)"),
    ("global_rng", "agilerl.x", "import torch\ntorch.randn(3)"),
    ("global_rng", "agilerl.x", "weight.normal_()"),
    ("global_rng", "agilerl.x", "from torch import nn\nnn.init.zeros_(w)"),
    ("hidden_machinery", "agilerl.x", "class A(metaclass=M): ..."),
    ("hidden_machinery", "agilerl.x", "class A:\n    def __getattr__(self, name): ..."),
]

KEPT = [
    ("layers", "agilerl.runs.x", "from agilerl.errors import ConfigError\nfrom agilerl.runs.atomic import commit_folder"),
    ("forbidden_imports", "agilerl.functional.x", "from agilerl.functional.masks import fill_masked\nimport torch"),
    ("forbidden_imports", "agilerl.algorithms.x", "from agilerl.rollouts import GenerationRequest"),
    ("function_length", "agilerl.x", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1)),
    ("positional", "agilerl.x", "class A:\n    def f(self, a, b, c, d, e, f, *, g, h): ..."),
    ("unsafe", "agilerl.x", "import yaml\nyaml.safe_load(text)\nmodel.eval()\nf(trust_remote_code=False)"),
    ("global_rng", "agilerl.x", "import numpy as np, torch\nnp.random.Generator(b)\ntorch.randn(3, generator=g)"),
    ("global_rng", "agilerl.x", "from random import Random\nRandom(1).choice(x)\nrng.random()"),
]


@pytest.mark.parametrize(("rule", "name", "source"), BROKEN)
def test_rule_catches(rule: str, name: str, source: str) -> None:
    known = frozenset({*package(), name})
    assert list(RULES[rule](Module(name, source, known)))


@pytest.mark.parametrize(("rule", "name", "source"), KEPT)
def test_rule_lets_pass(rule: str, name: str, source: str) -> None:
    assert list(RULES[rule](Module(name, source, frozenset(package())))) == []


def made(**sources: str) -> dict[str, Module]:
    names = frozenset(f"agilerl.{name}" for name in sources)
    return {f"agilerl.{name}": Module(f"agilerl.{name}", source, names) for name, source in sources.items()}


def test_cycles_are_found_but_not_for_types() -> None:
    assert cycles(made(a="from agilerl import b", b="def f():\n    import agilerl.a"))
    assert cycles(made(a="import agilerl.b", b="from agilerl.c import x", c="from agilerl.a import y"))
    assert not cycles(made(a="import agilerl.b", b="if TYPE_CHECKING:\n    import agilerl.a"))
    assert not cycles(made(a="import agilerl.b\nimport agilerl.c", b="import agilerl.c", c=""))


def test_deep_inheritance_is_found() -> None:
    chain = "class A(BaseModel): ...\nclass B(A): ...\nclass C(m.B): ...\nclass D(C[int]): ...\n"
    assert not too_deep(made(a=chain))
    assert too_deep(made(a=chain, b="class E(D): ...")) == ["E: 5 deep"]


def test_scattered_optional_packages_are_found() -> None:
    assert not scattered(made(a="import plotly.graph_objects", b="import wandb"))
    assert scattered(made(a="import plotly.graph_objects", b="from plotly import io")) == ["plotly: agilerl.a, agilerl.b"]
