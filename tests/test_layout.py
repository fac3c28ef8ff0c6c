"""Where things lie and who may import whom, read from the files without importing them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MIXERS = sorted(p.parent.name for p in ROOT.glob("megatron_ext/mixers/*/__init__.py"))
OPS = sorted(p.parent.name for p in ROOT.glob("kernels/*/__init__.py"))
FORBIDDEN = {
    "kernels": (
        "megatron",
        "deepspeed",
        "torch.distributed",
        "mixtron.megatron_ext",
        "mixtron.launch",
        "mixtron.data_prep",
    ),
    "data_prep": (
        "torch",
        "triton",
        "megatron",
        "mixtron.kernels",
        "mixtron.megatron_ext",
        "mixtron.launch",
    ),
    "megatron_ext": ("mixtron.launch", "mixtron.data_prep"),
}
TEXT_FOLDERS = [*FORBIDDEN, "launch", "configs", "slurm", "tests", ".ci"]
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".j2", ".txt", ""}
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(work|tmp|root|home)/\w")


def python_files(folder: str) -> list[Path]:
    return sorted(ROOT.glob(f"{folder}/**/*.py"))


def imported_names(source: str) -> set[str]:
    """Every module and `module.name` that a file imports, at whatever depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: its target cannot be read off the line"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def reaches(name: str, forbidden: str) -> bool:
    return name == forbidden or name.startswith(f"{forbidden}.")


def text_files() -> list[Path]:
    inside = [path for folder in TEXT_FOLDERS for path in ROOT.glob(f"{folder}/**/*")]
    return sorted(
        path
        for path in [*ROOT.iterdir(), *inside]
        if path.is_file() and path.suffix in TEXT_SUFFIXES
    )


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_go_one_way(folder):
    files = python_files(folder)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imported_names(path.read_text()))
        if any(reaches(name, forbidden) for forbidden in FORBIDDEN[folder])
    ]
    assert not wrong, "\n".join(wrong)


def test_an_import_is_seen_wherever_it_stands():
    source = "def f():\n    from torch import distributed as d\n    import megatron.core\n"
    names = imported_names(source)
    assert any(reaches(name, "torch.distributed") for name in names)
    assert any(reaches(name, "megatron") for name in names)
    assert not reaches("megatron_ext", "megatron")


def test_kernels_is_no_package_of_its_own():
    """An `__init__.py` would shadow Hugging Face's `kernels` wherever the root is on the path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_mixer_has_its_four_places(mixer):
    folder = ROOT / "megatron_ext" / "mixers" / mixer
    assert (folder / "config.py").exists()
    assert (folder / "module.py").exists()
    assert (ROOT / "configs" / f"debug_{mixer}.yaml").exists()
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"`{mixer}`" in row for row in rows), f"README.md has no table row for `{mixer}`"


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_mixers_config_needs_no_torch(mixer):
    names = imported_names((ROOT / f"megatron_ext/mixers/{mixer}/config.py").read_text())
    assert not {n for n in names if reaches(n, "torch") or reaches(n, "megatron")}


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_maths_reference_and_test(op):
    assert (ROOT / "kernels" / op / "README.md").exists()
    assert (ROOT / "kernels" / op / "reference.py").exists()
    assert (ROOT / "tests" / "kernels" / f"test_{op}.py").exists()


def test_no_file_names_a_path_of_one_machine():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("top", ["work", "tmp", "root", "home"])
def test_such_a_path_is_seen(top):
    assert MACHINE_PATH.search(f'open("/{top}/x")')
    assert not MACHINE_PATH.search(f"https://host/{top}/x")


def test_code_files_stay_small():
    """A file over 450 lines has more than one subject."""
    folders = [*FORBIDDEN, "launch"]
    long = [p for f in folders for p in python_files(f) if len(p.read_text().splitlines()) > 450]
    assert not long, f"over 450 lines: {', '.join(str(p.relative_to(ROOT)) for p in long)}"


def test_kernels_have_names_of_their_own():
    """A profile of a step knows a kernel by its name alone."""
    found: dict[str, list[str]] = {}
    for path in python_files("kernels"):
        functions = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        for node in functions:
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            jitted = "triton.jit" in decorators or "gluon.jit" in decorators
            if jitted and node.name.endswith("_kernel"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(found) > 50
    clashes = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not clashes, clashes
