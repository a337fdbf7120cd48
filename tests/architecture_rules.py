"""The house rules, read off source text with ast: a module in, its violations out."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

POSITIONAL, DEPTH = 6, 4

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("errors", "sizes", "streams", "deferred", "gone", "hooks", "processes"),
        *("checks", "safety", "text"),
    ),
    ("functional", "data", "hpo", "planning"),
    ("config",),
    ("models", "envs", "rewards"),
    ("rollouts", "runs"),
    ("runtime",),
    ("compat",),
    ("algorithms",),
    ("population",),
    ("training", "report"),
    ("cli", "__main__", "run", "llm_envs", "utils"),
)
"""A file imports from its own row and the rows above it; ``agilerl/__init__`` only names what the others hold."""

DOCUMENTED = (
    *("compat", "utils", "llm_envs", "algorithms.agent"),
    *("training.loops", "training.local_trainer", "training.llm", "training.train_llm", "training.trainer"),
)
"""What may import ``compat`` and what stands on it: agents inherit a class of it, the others AgileRL documents."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "functional": ("agilerl.",),
    "hpo": ("torch", "transformers", "peft"),
    "planning": ("torch", "transformers", "peft", "agilerl.functional", "agilerl.data"),
    "sizes": ("agilerl.", "torch"),
    "errors": ("torch", "transformers", "peft"),
    "streams": ("torch", "transformers", "peft"),
    "config": ("torch", "transformers", "peft"),
    "envs": ("agilerl.models", "torch.nn", "transformers", "peft"),
    "algorithms": (
        "agilerl.rollouts.torch_engine",
        "agilerl.rollouts.vllm",
        "agilerl.rollouts.scripted",
        "agilerl.rollouts.kv_cache",
    ),
}
"""What the files of a package never import, beyond the order of the layers."""
GROUND = "agilerl.sizes"
"""Sizes that the code computes with and forecasts count with: every package may import them, also ``functional``."""

OPTIONAL = (
    *("verifiers", "vllm", "deepspeed", "ray", "wandb", "tensorboard", "trackio", "bitsandbytes", "liger_kernel"),
    *("gem", "textarena", "openenv", "math_verify", "hypothesis", "optuna", "trl", "reasoning_gym"),
    *("pycosat", "cellpylib", "IPython", "openai", "httpx", "uvicorn", "starlette"),
)
UNSAFE_IMPORTS = (
    *("pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "jsonpickle", "runpy", "code"),
    *("torch.hub", "torch.package", "multiprocessing.connection"),
)
UNSAFE_NAMES = (
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"),
    *("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
)
"""What runs code that it is given, or may; also where it is not called but handed on."""
UNSAFE_KEYWORDS = {"trust_remote_code": "False", "allow_pickle": "False", "shell": "False", "weights_only": "True"}
"""Arguments that have one safe value."""
DYNAMIC_IMPORTS = ("import_module", "exec_module", "load_module", "source_to_code", "run_module", "run_path")
TORCH_DRAWS = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "multinomial", "bernoulli", "normal")
INPLACE_DRAWS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")
VAGUE = ("found", "place", "own", "said", "told", "made", "known", "given", "one", "most", "kept")
GENERATORS = ("Generator", "Philox", "SeedSequence", "BitGenerator", "Random")


@dataclass(frozen=True)
class Import:
    target: str
    line: int


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    known: frozenset[str] = frozenset()
    """Names of all modules of the package, which tell ``from package import module`` from other names."""

    @cached_property
    def tree(self) -> ast.Module:
        return parsed(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree))

    def _imports(self, node: ast.AST) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    inner = f"{child.module}.{alias.name}"
                    yield Import(inner if inner in self.known else str(child.module), child.lineno)
            yield from self._imports(child)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What a local name stands for: ``np`` is ``numpy``."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for a in node.names:
                    found |= {a.asname: a.name} if a.asname else {a.name.partition(".")[0]: a.name.partition(".")[0]}
            elif isinstance(node, ast.ImportFrom):
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return found

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """Each call with the full name of what is called; a method of an unknown object begins with a dot."""
        return [(self.dotted(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]

    def dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}"
        return ""

    @cached_property
    def functions(self) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        return list(self._functions(self.tree, self.name))

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


ROWS = {part: row for row, parts in enumerate(LAYERS) for part in parts}


def package_of(name: str) -> str:
    """The package, or the file beside the packages, that a module is part of; empty for ``agilerl`` itself."""
    return name.removeprefix("agilerl").lstrip(".").partition(".")[0]


def layer(name: str) -> int | None:
    """Row of a module's package; None for ``agilerl`` itself."""
    return ROWS.get(package_of(name))


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
                inside = found.target == GROUND or part_of(found.target, f"agilerl.{part}")
                if not inside and any(part_of(found.target, target) for target in targets):
                    yield f"{module.name}: {found.target} (line {found.line})"


def documented_apart(module: Module) -> Iterator[str]:
    """No part of the core but :data:`DOCUMENTED` imports what only AgileRL's programs need."""
    if module.name != "agilerl" and not any(part_of(module.name, f"agilerl.{part}") for part in DOCUMENTED):
        for found in module.imports:
            if any(part_of(found.target, f"agilerl.{part}") for part in DOCUMENTED if part != "algorithms.agent"):
                yield f"{module.name}: {found.target} (line {found.line})"


def positional(module: Module) -> Iterator[str]:
    for name, node in module.functions:
        names = [a.arg for a in [*node.args.posonlyargs, *node.args.args]]
        implied = names[:1] in (["self"], ["cls"], ["ctx"])  # ctx: torch.autograd.Function
        if len(names) - implied > POSITIONAL:
            yield name


def unsafe(module: Module) -> Iterator[str]:
    for found in module.imports:
        if any(part_of(found.target, name) for name in UNSAFE_IMPORTS):
            yield f"{module.name}: imports {found.target} (line {found.line})"
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute) and module.dotted(node) in UNSAFE_NAMES:
            yield f"{module.name}: {module.dotted(node)} (line {node.lineno})"
    for _, call in module.calls:
        for keyword in call.keywords:
            safe = UNSAFE_KEYWORDS.get(keyword.arg or "")
            if safe is not None and ast.unparse(keyword.value) != safe:
                yield f"{module.name}: {keyword.arg} (line {call.lineno})"
    for node in module.nodes:
        if isinstance(node, ast.Dict):  # for f(**{...})
            for key, value in zip(node.keys, node.values):
                name = key.value if isinstance(key, ast.Constant) else None
                if str(name) in UNSAFE_KEYWORDS and ast.unparse(value) != UNSAFE_KEYWORDS[str(name)]:
                    yield f"{module.name}: {name} (line {node.lineno})"


def dynamic_imports(module: Module) -> Iterator[str]:
    """Modules by a name that is not in the source; each place is an exception with a reason."""
    for name, _ in module.calls:
        if name.rpartition(".")[2] in DYNAMIC_IMPORTS:
            yield f"{module.name}: {name.rpartition('.')[2]}"


def global_rng(module: Module) -> Iterator[str]:
    for name, call in module.calls:
        owner, _, last = name.rpartition(".")
        of_torch = part_of(owner, "torch")
        seeds = of_torch and last in ("manual_seed", "manual_seed_all", "seed")
        draws = (owner == "torch" and last in TORCH_DRAWS) or last in INPLACE_DRAWS or part_of(owner, "torch.nn.init")
        if seeds or (owner in ("random", "numpy.random") and last not in GENERATORS):
            yield f"{module.name}: {name}"
        elif draws and all(keyword.arg != "generator" for keyword in call.keywords):
            yield f"{module.name}: {name} without generator="


def hidden_machinery(module: Module) -> Iterator[str]:
    """No metaclass, and no attribute lookup in code; the package itself may import lazily."""
    for node in module.nodes:
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "metaclass" for keyword in node.keywords):
            yield f"{module.name}: metaclass of {node.name}"
    for name, node in module.functions:
        if node.name in ("__getattr__", "__getattribute__") and name != "agilerl.__getattr__":
            yield name


def vague_names(module: Module) -> Iterator[str]:
    """Names of variables and arguments say what the thing is, not that it was found or is one's own."""
    for _, function in module.functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                yield f"{module.name}: {node.id}"
            elif isinstance(node, ast.arg) and node.arg in VAGUE:
                yield f"{module.name}: {node.arg}"


RULES: dict[str, Callable[[Module], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        layers,
        forbidden_imports,
        documented_apart,
        positional,
        unsafe,
        dynamic_imports,
        global_rng,
        hidden_machinery,
        vague_names,
    )
}


def cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules that import one another, in functions and for types included."""
    graph = {
        name: {i.target for i in module.imports if i.target != name} & set(modules) for name, module in modules.items()
    }

    def reachable(start: str) -> set[str]:
        seen, waiting = set(), list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph[name]
        return seen

    reach = {name: reachable(name) for name in graph}
    return sorted(map(list, {tuple(sorted(o for o in reach[n] if n in reach[o])) for n in graph if n in reach[n]}))


def two_way(modules: Mapping[str, Module]) -> list[str]:
    """Packages that import each other: in functions, for types and by documented import paths included."""
    arrows: dict[tuple[str, str], str] = {}
    for name, module in modules.items():
        for found in module.imports:
            ends = package_of(name), package_of(found.target)
            if found.target in modules and all(ends) and ends[0] != ends[1]:
                arrows.setdefault(ends, f"{name} -> {found.target}")
    return sorted(f"{arrows[a, b]}, {arrows[b, a]}" for a, b in arrows if a < b and (b, a) in arrows)


def too_deep(modules: Mapping[str, Module]) -> list[str]:
    """Classes with more than DEPTH classes of the package from the root of their inheritance to themselves."""
    bases: dict[str, list[str]] = {}
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                names = [module.dotted(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases]
                bases[f"{module.name}.{node.name}"] = [n if "." in n else f"{module.name}.{n}" for n in names]

    def home(name: str) -> str:
        """Follow a re-export to the class itself."""
        owner, _, last = name.rpartition(".")
        origin = modules[owner].aliases.get(last) if owner in modules and name not in bases else None
        return name if origin is None else home(origin)

    def depth(name: str) -> int:
        return 1 + max((depth(home(base)) for base in bases[name] if home(base) in bases), default=0)

    return [f"{name}: {depth(name)} deep" for name in bases if depth(name) > DEPTH]


def shared_types(modules: Mapping[str, Module]) -> list[str]:
    """Public classes and type aliases whose name stands for something else in another module."""
    names = Counter(
        name
        for module in modules.values()
        for node in module.tree.body
        for name in (
            [node.name]
            if isinstance(node, ast.ClassDef)
            else [t.id for t in node.targets if isinstance(t, ast.Name)]
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
            else []
        )
        if re.fullmatch("[A-Z]+[a-z]\\w*", name)
    )
    return sorted(name for name, count in names.items() if count > 1)


def scattered(modules: Mapping[str, Module]) -> list[str]:
    """Optional packages that more than one file imports."""
    found = []
    for package in OPTIONAL:
        users = sorted(m.name for m in modules.values() if any(part_of(i.target, package) for i in m.imports))
        if len(users) > 1:
            found.append(f"{package}: {', '.join(users)}")
    return found
