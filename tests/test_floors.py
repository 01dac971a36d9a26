"""The floors of the house: who imports whom, how long files and functions are, what says what for.

The import graph is import-linter's, by the contracts in pyproject.toml. That stage 1 runs where
torch cannot be imported at all is tested in test_tokenize_script.py.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
SCRIPTS = ("tokenize_completions.py", "extract_hidden_online.py", "train_dflash_online.py")
MODULE_LINES, SCRIPT_LINES, FUNCTION_LINES = 450, 800, 80


def python_files(*patterns: str) -> dict[str, ast.Module]:
    """The syntax trees of files, by their place in the project."""
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert len(paths) > 1
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_bytes()) for p in paths}


COMMON, DEMO = python_files("common/*.py"), python_files("demo/*.py")
CODE = {**COMMON, **DEMO, **python_files(*SCRIPTS)}
TESTS = python_files("tests/**/*.py")


def contract(kind: str) -> dict[str, list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = [part for part in contracts["contracts"] if part["type"] == kind]
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, anywhere in it, and the names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# ---- who imports whom


def test_every_common_module_stands_on_one_floor():
    modules = {name.removesuffix(".py").replace("/", ".") for name in COMMON}
    assert Counter(contract("layers")["layers"]) == Counter(modules - {"common.__init__"})


def test_the_list_of_modules_in_common_is_whole():
    listed = re.findall(
        r"^  ((?:\w+, )*\w+)  ", ast.get_docstring(COMMON["common/__init__.py"]), re.M
    )
    modules = {name.removesuffix(".py").removeprefix("common/") for name in COMMON}
    names = [name for part in listed for name in part.split(", ")]
    assert Counter(names) == Counter(modules - {"__init__"})


def test_files_import_only_from_above_and_above_the_torch_line_never_torch(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    failed = lint_imports(no_cache=True, no_logo=True)
    assert not failed, capsys.readouterr().out


def test_all_that_stage_1_imports_is_held_above_the_torch_line():
    held, floors = contract("forbidden")["source_modules"], contract("layers")["layers"]
    used = {*floors} & {*imported(CODE["tokenize_completions.py"])}
    assert len(used) > 10 and used <= {*held} <= {*floors}
    assert len(held) == len({*held})


def test_no_file_imports_a_script_and_none_but_the_demo_imports_the_demo():
    scripts = {name.removesuffix(".py") for name in SCRIPTS}
    wrong = {}
    for name, tree in CODE.items():
        closed = scripts | {"tests"} | (set() if name in DEMO else {"demo"})
        wrong[name] = closed & {module.partition(".")[0] for module in imported(tree)}
    assert not {name: found for name, found in wrong.items() if found}


# ---- how long, and what for


def test_no_file_is_too_long():
    lengths = {name: len((ROOT / name).read_bytes().splitlines()) for name in CODE}
    limits = {name: SCRIPT_LINES if name in SCRIPTS else MODULE_LINES for name in CODE}
    assert not {name: lines for name, lines in lengths.items() if lines > limits[name]}


def test_no_function_is_too_long():
    functions = {
        f"{name}: {node.name}": 1 + (node.end_lineno or 0) - node.lineno
        for name, tree in CODE.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(functions) > 500
    assert not {name: lines for name, lines in functions.items() if lines > FUNCTION_LINES}


def test_every_file_opens_with_a_sentence_that_says_what_it_is_for():
    openings = {
        name: (ast.get_docstring(tree) or "").partition("\n\n")[0]
        for name, tree in {**CODE, **TESTS}.items()
    }
    assert not [
        name for name, text in openings.items() if len(text.split()) < 4 or text[-1] not in ".:"
    ]


def test_what_a_common_module_offers_says_what_it_is():
    assert not [
        f"{name}: {node.name}"
        for name, tree in COMMON.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


# ---- flags


def added_flags(tree: ast.AST) -> dict[str, bool]:
    """By a flag's attribute of args, whether it has a help."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            assert isinstance(node.args[0], ast.Constant) and len(node.args) == 1
            keywords = {keyword.arg for keyword in node.keywords}
            assert "dest" not in keywords
            found[node.args[0].value.lstrip("-").replace("-", "_")] = "help" in keywords
    return found


def read_flags(trees: Sequence[ast.AST]) -> set[str]:
    """What files read of something that is called args."""
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and "args" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_a_help_and_is_read(script):
    flags = added_flags(CODE[script])
    assert len(flags) > 10 and all(flags.values())
    # the trainer's flags are what modules get that no other script uses
    readers = [CODE[script], *(COMMON.values() if script.startswith("train") else ())]
    assert not {*flags} - read_flags(readers)


def test_every_flag_that_scripts_share_has_a_help_and_is_read():
    flags = {name: told for tree in COMMON.values() for name, told in added_flags(tree).items()}
    assert len(flags) > 3 and all(flags.values())
    assert not {*flags} - read_flags([*CODE.values()])
