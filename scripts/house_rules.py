"""The house rules that no linter knows, read from the source by AST (standard library only).

Each rule yields `path:line: sentence`. `scripts/check` prints them, `tests/house` proves that each one fires.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "sparse_mla"
STOREYS = {
    "errors": 0,
    "_checks": 0,
    "settings": 0,
    "config": 1,
    "cache": 2,
    "metadata": 3,
    "kernels": 4,
    "ops": 5,
    "backends": 5,
    "nn": 6,
    "engine": 7,
    "compat": 7,
    "integrations": 7,
    "cli": 8,
    "testing": 8,
    "__main__": 8,
}
"""Storey of each top-level module. A module imports only from its own storey or a lower one."""
LIBRARIES = {  # library: path prefixes that may import it; every other one is refused
    "torch": ("",),
    "triton": ("kernels/triton/", "kernels/hopper/"),
    "cuda": ("kernels/hopper/",),
    "safetensors": ("nn/", "testing/"),
    "vllm": ("integrations/vllm/",),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "matplotlib": ("cli/",),
    "numpy": ("kernels/reference/", "testing/"),
    "psutil": ("testing/",),
}
FILE_LINES = 600
FUNCTION_LINES = 60
PARAMETERS = 10
RECORD_BYTES = frozenset({584, 576, 528, 288})
RECORDS_FILE = "cache/records.py"
SETTINGS_FILE = "settings.py"
FOREIGN_SIGNATURES = "compat/"
"""Functions below it answer another library's calls: their parameters are not ours to group."""
KERNEL_DECORATORS = ("triton.jit", "gluon.jit", "triton.autotune", "triton.heuristics", "jit")
STANDARD = sys.stdlib_module_names


@dataclass(frozen=True)
class Source:
    """One parsed Python file of the package."""

    path: str  # below the package, with forward slashes
    shown: str  # for messages
    tree: ast.Module
    lines: int


def check_tree(root: Path) -> list[str]:
    """Every breach below the repository `root`."""
    package = root / "src" / PACKAGE
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        shown = str(path.relative_to(root))
        inner = path.relative_to(package).as_posix()
        source = Source(inner, shown, ast.parse(text), text.count("\n"))
        for rule in (layering, libraries, size, functions, record_literals, environment, handlers):
            found += [f"{shown}:{line}: {sentence}" for line, sentence in rule(source)]
        found += [f"{shown}:{line}: {sentence}" for line, sentence in unfinished(text)]
    for path in sorted([*package.rglob("*.cu"), *package.rglob("*.cuh"), *package.rglob("*.h")]):
        text = path.read_text(encoding="utf-8")
        shown = str(path.relative_to(root))
        found += [f"{shown}:{line}: {sentence}" for line, sentence in cuda_literals(text)]
    for path in sorted((root / "tests").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > FILE_LINES:
            found.append(
                f"{path.relative_to(root)}:1: {lines} lines; allowed: {FILE_LINES}; split it"
            )
    return found


Breach = Iterator[tuple[int, str]]


def layering(source: Source) -> Breach:
    """Imports go to the module's own storey or a lower one, wherever the import stands."""
    own = _top(source.path)
    if own == "__init__":
        return
    if own not in STOREYS:
        yield 1, f"{own} has no storey; name one in scripts/house_rules.py"
        return
    for line, module in _imports(source.tree):
        parts = module.split(".")
        if parts[0] != PACKAGE or len(parts) < 2:
            continue
        other = parts[1]
        if other not in STOREYS:
            if other not in ("__version__", "nn"):
                yield line, f"import of {module}: {other} has no storey"
        elif STOREYS[other] > STOREYS[own]:
            yield (
                line,
                (
                    f"import of {module}: storey {STOREYS[other]} from {own}, storey {STOREYS[own]}; "
                    "imports go downwards"
                ),
            )


def libraries(source: Source) -> Breach:
    """A library is imported only where the house keeps it."""
    for line, module in _imports(source.tree):
        top = module.split(".")[0]
        if top in STANDARD or top == PACKAGE:
            continue
        if top not in LIBRARIES:
            yield line, f"import of {top}: not one of this library's dependencies"
        elif not source.path.startswith(LIBRARIES[top]):
            yield line, f"import of {top}: allowed only below {' and '.join(LIBRARIES[top])}"


def size(source: Source) -> Breach:
    """A file stays readable."""
    if source.lines > FILE_LINES:
        yield 1, f"{source.lines} lines; allowed: {FILE_LINES}; split it"


def functions(source: Source) -> Breach:
    """Host functions are short (docstring not counted) and public ones take few parameters."""
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_kernel(node):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines -= (text.end_lineno or text.lineno) - text.lineno + 1
        if lines > FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {lines} lines; allowed: {FUNCTION_LINES}"
        arguments = node.args
        names = [
            arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ]
        count = len([name for name in names if name not in ("self", "cls")])
        foreign = source.path.startswith(FOREIGN_SIGNATURES)
        if not node.name.startswith("_") and count > PARAMETERS and not foreign:
            yield (
                node.lineno,
                (f"{node.name} takes {count} parameters; allowed: {PARAMETERS}; group them"),
            )


def record_literals(source: Source) -> Breach:
    """A record's bytes are named, never spelled."""
    if source.path == RECORDS_FILE:
        return
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Constant)
            and type(node.value) is int
            and node.value in RECORD_BYTES
        ):
            yield node.lineno, f"literal {node.value}: take it from {RECORDS_FILE}"


def cuda_literals(text: str) -> Breach:
    """The same in CUDA sources, comments aside."""
    code = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(code.splitlines(), 1):
        for literal in re.findall(r"(?<![\w.])(584|576|528|288)(?![\w.])", line.split("//")[0]):
            yield number, f"literal {literal}: pass it in from {RECORDS_FILE}"


def environment(source: Source) -> Breach:
    """Only the typed settings read the environment."""
    if source.path == SETTINGS_FILE:
        return
    for node in ast.walk(source.tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in ("environ", "getenv", "putenv") for alias in node.names)
        )
        if attribute or imported:
            yield node.lineno, f"environment variable outside {SETTINGS_FILE}"  # type: ignore[attr-defined]


def handlers(source: Source) -> Breach:
    """No handler catches everything."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            names = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
            for name in names:
                if name is None or (
                    isinstance(name, ast.Name) and name.id in ("Exception", "BaseException")
                ):
                    yield node.lineno, "handler for every exception; name the ones that are meant"


def unfinished(text: str) -> Breach:
    """Nothing is left for later in the source."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield number, "unfinished work marked in the source; file an issue instead"


def _top(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == PACKAGE:
                yield from ((node.lineno, f"{PACKAGE}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list)
    return any(name in KERNEL_DECORATORS for name in names)
