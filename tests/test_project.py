"""The project as a whole: imports run one way, packages are ours, a wheel holds what it must."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "model", "data", "training", "analysis", "serving", "configs")

# What each package may import of ours. train.py and sample.py stand above all of them.
ALLOWED = {
    "kernels": {"kernels"},
    "data": {"data"},
    "model": {"model", "kernels"},
    "analysis": {"analysis", "model", "data", "kernels"},
    "training": {"training", "analysis", "model", "data", "kernels"},
    "serving": {"serving", "training", "analysis", "model", "data", "kernels"},
    "configs": set(),
}

# Who may import what is heavy or optional, and whether only inside a function.
RESTRICTED = {
    "hydra": {"train.py"},
    "wandb": {"training/tracking.py"},
    "triton": {"kernels/"},
    "datasets": {"data/"},
    "tokenizers": {"data/"},
    "matplotlib": {"analysis/"},
    "plotly": {"analysis/"},
    "fastapi": {"serving/"},
    "starlette": {"serving/"},
    "uvicorn": {"serving/"},
    "transformers": set(),
}
LAZY = {
    "wandb",
    "datasets",
    "tokenizers",
    "matplotlib",
    "plotly",
    "fastapi",
    "starlette",
    "uvicorn",
}


def source_files() -> list[Path]:
    inside = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [ROOT / "train.py", ROOT / "sample.py", *inside]


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module of a file, and whether the import runs with the file itself."""
    found = []

    def visit(node: ast.AST, at_import: bool) -> None:
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                module = child.module or ""
                names = [module, *(f"{module}.{alias.name}" for alias in child.names)]
            found.extend((name, at_import) for name in names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            visit(child, at_import and not inside and not typing_only)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way_and_heavy_ones_are_lazy(path):
    place = path.relative_to(ROOT)
    package = place.parts[0]
    for module, at_import in imports(path):
        name = module.partition(".")[0]
        if name in PACKAGES and package in ALLOWED:
            assert name in ALLOWED[package], f"{place} imports {name}"
        assert name not in ("train", "sample"), f"{place} imports {name}"
        if name in RESTRICTED:
            homes = RESTRICTED[name]
            assert any(str(place).startswith(home) for home in homes), f"{place} imports {name}"
            assert not (at_import and name in LAZY), f"{place} imports {name} when it is imported"


def test_triton_is_loaded_only_by_kernels_that_are_asked_for():
    """A kernel needs Triton to be defined at all, so its module is what is imported lazily."""
    loaded_by = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): {
            module for module, at_import in imports(path) if at_import
        }
        for path in source_files()
    }
    loading = {"triton"}
    while more := {name for name, modules in loaded_by.items() if modules & loading} - loading:
        loading |= more
    assert all(name.startswith(("triton", "kernels.flash_", "kernels.triton_")) for name in loading)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_files_do_no_work(package):
    body = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr), "only a docstring"


def test_the_packages_are_ours_even_where_others_have_the_name():
    code = "import kernels, model, data; print(kernels.__file__, model.__file__, data.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(Path(path).is_relative_to(ROOT) for path in done.stdout.split())


def tracked_files() -> list[str]:
    command = ["git", "ls-files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that building leaves nothing behind in the project.
    source = folder / "source"
    for name in tracked_files():
        if not name.startswith(("tests/", ".ci/")) and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(source)], capture_output=True, text=True, check=True)
    (built,) = folder.glob("glassgpt-*.whl")
    return built


def test_the_wheel_holds_code_and_configs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = next(n for n in names if n.endswith("entry_points.txt"))
        commands = archive.read(entry).decode()
    for name in tracked_files():
        if name.startswith((*(f"{package}/" for package in PACKAGES), "train.py", "sample.py")):
            assert name in names
    roots = {name.partition("/")[0] for name in names}
    assert {r for r in roots if ".dist-info" not in r} == {*PACKAGES, "train.py", "sample.py"}
    assert "glassgpt-train = train:main" in commands
    assert "glassgpt-sample = sample:main" in commands


def test_an_installed_wheel_trains_and_samples_far_from_the_source(wheel, tmp_path):
    """The wheel's files alone, with the commands called as their entry points call them."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "text.txt").write_text("To be, or not to be.\n" * 200, encoding="utf-8")

    def call(module: str, *arguments: str) -> str:
        code = (
            f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv[0] = 'glassgpt'; "
            f"import {module}; assert {module}.__file__.startswith({str(site)!r}); {module}.main()"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            cwd=tmp_path / "work",
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = ["model.n_layer=1", "model.n_embd=16", "model.context_length=16", "tracker=none"]
    short = ["train.max_steps=2", "train.batch_size=2", "optim=adamw", "optim.warmup_steps=0"]
    call("train", "data.path=text.txt", *small, *short, "train.samples=0")
    assert call("sample", "--prompt", "To be", "--max-new-tokens", "5").startswith("To be")
