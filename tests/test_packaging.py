"""The package that users install is the one that was tested, in every way there is to run it.

Guards: a wheel without `kernels` or `weights_scripts`; `python -m minihisparse` in a checkout,
where minihisparse/ is found before any installed one; a top-level `kernels` that is taken for the
library of that name (`import transformers` probes for it); a dependency that only the author has.

Python runs with -S, and with site-packages on the path as a plain folder, wherever an editable
install of this environment could help: then no .pth file is read. Nothing here needs a network.
"""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import minihisparse

ROOT = Path(__file__).parents[1]
PLACES = {  # folder of the checkout -> its place in the package
    "minihisparse": "minihisparse",
    "kernels": "minihisparse/kernels",
    "weights_scripts": "minihisparse/weights_scripts",
}
FILES = ["pyproject.toml", "README.md", "LICENSE"]
# What a dependency cannot do without, so that it need not be named again: module -> who brings it.
COMES_WITH = {"llvmlite": "numba", "_numba_cuda_redirector": "numba-cuda", "cuda": "numba-cuda"}
WHERE = "import minihisparse.kernels.resolve as module; print(module.__file__)"


def run(
    *args: str | Path, cwd: Path, path: Iterable[Path] = (), site: bool = False
) -> subprocess.CompletedProcess:
    """Runs Python in `cwd` with `path` before everything but the current folder."""
    folders = [*path]
    if not site:
        installed = sysconfig.get_paths()
        folders += [installed["purelib"], installed["platlib"], Path(torch.__file__).parents[1]]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys(folders))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, *([] if site else ["-S"]), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def output_of(*args: str | Path, **options) -> str:
    done = run(*args, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what a clone has, so that a build leaves nothing in the real one."""
    folder = tmp_path_factory.mktemp("clone") / "mini hisparse"
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in PLACES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def dist(checkout, tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that is built from the sdist."""
    for name in ("build", "setuptools"):
        pytest.importorskip(name, reason=f"`pip install {name}` to build the wheel")
    folder = tmp_path_factory.mktemp("dist")
    args = ("-m", "build", "--no-isolation", "--outdir", folder)
    output_of(*args, cwd=checkout, site=True)
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Path:
    """The folder that the wheel is installed in."""
    return pip_install(next(dist.glob("*.whl")), tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def editable(checkout, dist, tmp_path_factory) -> Path:
    """The folder of an editable install, with its .pth file."""
    made = tmp_path_factory.mktemp("editable_wheel")
    code = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    output_of("-c", code, made, cwd=checkout, site=True)
    return pip_install(next(made.glob("*.whl")), tmp_path_factory.mktemp("editable"))


def pip_install(wheel: Path, folder: Path) -> Path:
    args = ("-m", "pip", "install", "--no-deps", "--no-compile", "--target", folder, wheel)
    output_of(*args, cwd=folder, site=True)
    return folder


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    return tmp_path


# ---- what is in the wheel ----


def test_contents(dist):
    """Every module and add-on at its place, and nothing more: no tests, no top-level kernels."""
    expected = {
        f"{place}/{file.name}"
        for folder, place in PLACES.items()
        for file in (ROOT / folder).glob("*.py")
    }
    addons = (ROOT / "weights_scripts" / "addons").iterdir()
    expected |= {f"minihisparse/weights_scripts/addons/{file.name}" for file in addons}
    assert {"minihisparse/kernels/resolve.py", "minihisparse/engine.py"} < expected
    assert "minihisparse/weights_scripts/get_smollm2.py" in expected
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == expected
        for folder, place in PLACES.items():
            for file in (ROOT / folder).glob("*.py"):
                assert wheel.read(f"{place}/{file.name}") == file.read_bytes()


@pytest.mark.parametrize("folder", ["kernels", "weights_scripts"])
def test_the_mapped_folders_are_no_packages(folder):
    """With an __init__.py, `import kernels` in a checkout would find a package of another name."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_metadata(dist):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == minihisparse.__version__
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        info = f"minihisparse-{minihisparse.__version__}.dist-info"
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        assert metadata["Version"] == minihisparse.__version__
        assert metadata["License-Expression"] == "Apache-2.0"
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        assert metadata.get_payload().strip() == readme.strip()
        assert "minihisparse = minihisparse.cli:main" in wheel.read(
            f"{info}/entry_points.txt"
        ).decode().split("\n")
        assert wheel.read(f"{info}/top_level.txt").decode().split() == ["minihisparse"]


def test_every_import_is_declared():
    """Imported with the module: a dependency. Imported where used: an extra, at least."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = names_of(project["dependencies"])
    needed |= {name for name, owner in COMES_WITH.items() if owner in needed}
    extras = names_of(sum(project["optional-dependencies"].values(), []))
    known = {*sys.stdlib_module_names, "minihisparse", "__future__"}
    for folder in PLACES:
        for file in (ROOT / folder).glob("*.py"):
            at_once, where_used = imports_of(ast.parse(file.read_text(encoding="utf-8")))
            assert at_once - known <= needed, file
            assert where_used - known <= needed | extras, file


def names_of(requirements: Iterable[str]) -> set[str]:
    """ "torch>=2.11,<2.14" -> torch."""
    return {
        "".join(c if c.isalnum() or c in "_-" else " " for c in r).split()[0] for r in requirements
    }


def imports_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The top-level names that a module imports when it is imported, and all others."""
    later = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.FunctionDef) or is_type_checking(branch)
        for node in ast.walk(branch)
    }
    names: tuple[set[str], set[str]] = (set(), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module]
        else:
            continue
        names[node in later].update(name.split(".")[0] for name in found)
    return names


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


# ---- every way to run it ----


def test_installed(installed, elsewhere):
    found = output_of("-c", WHERE, cwd=elsewhere, path=[installed])
    assert Path(found) == installed / "minihisparse" / "kernels" / "resolve.py"
    check_help(run("-m", "minihisparse", "--help", cwd=elsewhere, path=[installed]))
    args = ("-m", "minihisparse.weights_scripts.get_smollm2", "--help")
    assert "usage:" in output_of(*args, cwd=elsewhere, path=[installed])


def test_the_console_script(installed, elsewhere):
    script = next((installed / "bin").glob("minihisparse*"))
    env = {**os.environ, "PYTHONPATH": str(installed)}
    check_help(
        subprocess.run([script, "--help"], cwd=elsewhere, env=env, capture_output=True, text=True)
    )


def test_installed_and_run_in_the_checkout(installed, checkout):
    """The current folder's minihisparse/ wins, which has no kernels/ inside: the __path__ shim."""
    found = output_of("-c", WHERE, cwd=checkout, path=[installed])
    assert Path(found) == checkout / "kernels" / "resolve.py"
    check_help(run("-m", "minihisparse", "--help", cwd=checkout, path=[installed]))


def test_not_installed(checkout):
    found = output_of("-c", WHERE, cwd=checkout)
    assert Path(found) == checkout / "kernels" / "resolve.py"
    check_help(run("-m", "minihisparse", "--help", cwd=checkout))
    args = ("-m", "minihisparse.weights_scripts.get_smollm2", "--help")
    assert "usage:" in output_of(*args, cwd=checkout)


def test_editable(editable, checkout, elsewhere):
    as_site = f"import site, sys; site.addsitedir({str(editable)!r}); "
    found = output_of("-c", as_site + WHERE, cwd=elsewhere, path=[editable])
    assert Path(found) == checkout / "kernels" / "resolve.py"
    code = "sys.argv[1:] = ['--help']; from minihisparse.cli import main; main()"
    check_help(run("-c", as_site + code, cwd=elsewhere, path=[editable]))


def check_help(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: minihisparse")
    for command in ("demo", "generate", "chat", "verify", "step", "bench"):
        assert command in done.stdout


def test_no_second_copy_of_the_kernels(checkout):
    """`kernels.resolve` and `minihisparse.kernels.resolve` would be two modules."""
    code = (
        "import sys, minihisparse.engine, minihisparse.verify; "
        "print(*(m for m in sys.modules if m.split('.')[0] in ('kernels', 'weights_scripts')))"
    )
    assert output_of("-c", code, cwd=checkout) == ""


def test_transformers_in_the_checkout(checkout):
    """It probes for a library called kernels, which our folder is not."""
    pytest.importorskip("transformers")
    code = (
        "import transformers.integrations.hub_kernels; "
        "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    )
    there = any(d.name == "kernels" for d in importlib.metadata.distributions())
    assert output_of("-c", code, cwd=checkout) == str(there)


def test_importing_the_package_is_free(checkout):
    """No work at import, and none of the heavy libraries, until a module needs them."""
    code = "import sys, minihisparse; print('torch' in sys.modules, 'numba' in sys.modules)"
    assert output_of("-c", code, cwd=checkout) == "False False"


def test_usage_errors(checkout):
    """Exit code 2, the reason on stderr, and nothing on stdout that could be taken for a result."""
    done = run("-m", "minihisparse", cwd=checkout)
    assert done.returncode == 2 and done.stdout == ""
    assert "usage:" in done.stderr and "COMMAND" in done.stderr
