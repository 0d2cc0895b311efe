"""The packages are layers: a module imports from its own layer and those below it, and never from one above."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import folb

HOME = Path(folb.__file__).parent
LAYERS = (
    ("errors", "typing", "atomic", "npz", "pace", "measures", "metric_functions"),
    ("core",),
    ("models",),
    ("data",),
    ("results",),
    ("store",),
    ("simulation",),
    ("report",),
    ("experiments",),
    ("flower",),
    ("deploy",),
    ("cli",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# a device runs neither the simulator nor jax; a server runs neither the simulator nor the datasets
DEVICE = {"errors", "typing", "core", "flower"}
FORBIDDEN = {"flower": {"models", "data", "simulation", "experiments"}}  # also inside functions
SERVER = DEVICE | {"atomic", "npz", "measures", "results", "store", "report"}


def imported(source: str) -> set[str]:
    """The modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "folb":  # as in folb.simulate
            names.add(f"folb.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {named.value for named in node.args if isinstance(named, ast.Constant)}
    return names


def complaints(module: str, source: str) -> list[str]:
    """What is wrong with the imports of the module `module`, such as "core.rules"."""
    layer, wrong = module.partition(".")[0], []
    for name in sorted(imported(source)):
        top, _, rest = name.partition(".")
        other = ({**folb._NAMES, **folb._MODULES}.get(rest) or rest).partition(".")[0]
        if top == "folb" and RANK.get(other, -1) > RANK[layer]:
            wrong.append(f"{module} imports {name}, of a layer above its own")
        if top == "folb" and other in FORBIDDEN.get(layer, ()):
            wrong.append(f"{module} imports {name}, which no Flower server or device may load")
        if top == "folb_studies":
            wrong.append(f"{module} imports {name}, of another distribution")
        if top == "rich" and layer != "cli":
            wrong.append(f"{module} imports rich, which is for the command line alone")
    return wrong


def sources() -> dict[str, str]:
    paths = [path for path in HOME.rglob("*.py") if not {"demo_app", "starters"} & set(path.parts)]
    modules = {".".join(path.relative_to(HOME).with_suffix("").parts): path.read_text() for path in paths}
    return {name: text for name, text in modules.items() if name not in ("__init__", "__main__")}


def test_every_module_is_in_a_layer():
    assert {name.partition(".")[0] for name in sources()} == set(RANK)


@pytest.mark.parametrize("module", sources())
def test_imports_point_downwards(module):
    assert complaints(module, sources()[module]) == []


def test_a_wrong_import_is_found():
    assert complaints("core.rules", "from folb.simulation import play")
    assert complaints("store.directory", "def f():\n    from folb.cli.main import main")
    assert complaints("report.figures", "from rich.table import Table")
    assert complaints("core.rules", "from folb import simulate")
    assert complaints("core.rules", "import folb\ndef f():\n    return folb.simulate()")
    assert complaints("core.rules", "def f():\n    import_module('folb.simulation.play')")
    assert complaints("flower.strategy", "def f():\n    from folb.simulation.play import play")
    assert complaints("flower.device", "def f():\n    from folb.data import load")
    assert complaints("cli.main", "def f():\n    from folb_studies.arena import entries")
    assert not complaints("deploy.demo", "from folb.data import load")
    assert not complaints("cli.main", "from rich.table import Table\nfrom folb.core import rules")


def test_no_two_modules_have_one_name():
    names = [name.rpartition(".")[2] for name in sources() if not name.endswith("__init__")]
    assert sorted(names) == sorted(set(names))


def loaded(statement: str) -> set[str]:
    """The packages of folb, and others of weight, that a statement loads in a new process."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    own = {name.split(".")[1] for name in names if name.startswith("folb.")}
    return own | ({"jax", "matplotlib"} & set(names))


def test_a_device_loads_neither_the_simulator_nor_jax():
    assert loaded("import folb.flower.device") <= DEVICE


def test_a_server_loads_neither_the_simulator_nor_the_datasets():
    assert loaded("import folb.flower.strategy, folb.flower.two_phase, folb.core.algorithms") <= SERVER | {"jax"}


SPOKEN = {
    *("print", "input", "exit", "quit", "SystemExit"),
    *("sys.stdout", "sys.stderr", "sys.exit", "os._exit", "os.abort", "os.kill"),
    *("traceback.print_exc", "traceback.print_exception"),
}
ALLOWED = {
    "pace": {"sys.stderr"},  # progress, for a Python user who asked for it (progress=True)
    "experiments.settings": {"SystemExit"},  # a user's file that raises it is an error of that file
    "deploy.superlink": {"os.kill"},  # of processes that it started
    "deploy.warden": {"os.kill"},  # it is a process of its own
}


def spoken(source: str) -> set[str]:
    """What a file uses to print, to ask, or to end a process."""
    calls = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            calls.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            calls |= {f"{node.module}.{alias.name}" for alias in node.names}
    return calls & SPOKEN


@pytest.mark.parametrize("module", [name for name in sources() if not name.startswith("cli.")])
def test_the_command_line_alone_prints_and_exits(module):
    assert spoken(sources()[module]) == ALLOWED.get(module, set())


def test_what_prints_or_exits_is_found():
    assert spoken("def f():\n    print(1)\n    os._exit(2)") == {"print", "os._exit"}
    assert spoken("def f():\n    sys.stderr.buffer.write(b'')\n    raise SystemExit") == {"sys.stderr", "SystemExit"}
    assert spoken("from sys import stdout") == {"sys.stdout"}


def test_the_command_line_loads_nothing_of_weight():
    assert loaded("import folb.cli.main") == {"cli", "errors", "pace"}
    code = "import folb.cli.main as m, sys; m.parser(); print({'rich', 'numpy', 'jax'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_commands_of_other_distributions_are_looked_for_only_if_the_command_is_none_of_ours():
    code = "import folb.cli.main as m, sys; m.parser(False, *sys.argv[1:]); print('importlib.metadata' in sys.modules)"
    for words, looked in (["compare"], "False"), (["arena"], "True"), ([], "True"):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert done.stdout == f"{looked}\n", words


def test_a_command_loads_its_own_module_alone():
    from folb.cli.main import OWN, parser

    everything = parser()._subparsers._group_actions[0].choices
    assert list(everything)[: sum(map(len, OWN.values()))] == [word for words in OWN.values() for word in words]
    for words in OWN.values():
        for word in words:
            assert tuple(parser(word=word)._subparsers._group_actions[0].choices) == words


MOST_METHODS = 20
# classes with more methods, and the reason


def methods(source: str) -> dict[str, int]:
    """The classes of a file, and how many functions each defines."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    function = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name: sum(isinstance(part, function) for part in node.body) for node in classes}


def test_the_strategy_is_a_carrier():
    """It configures, collects and closes a round; what else a round needs is in the modules that it calls."""
    assert len(sources()["flower.strategy"].splitlines()) < 350


def test_no_class_does_everything():
    counted = {f"{module}.{name}": n for module, text in sources().items() for name, n in methods(text).items()}
    assert not {name for name, count in counted.items() if count > MOST_METHODS}
    assert methods("class A:\n    def f(self): ...\n    async def g(self): ...") == {"A": 2}
