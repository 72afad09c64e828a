"""What of CUDA can be checked without a GPU: that it imports, and that the libraries fit it.

mypy checks tierd against the stubs in typings/; here the stubs are checked against the libraries.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tierd.device.api import CannotOpenError
from tierd.device.cuda import CudaDevice, visible

TYPINGS = Path(__file__).parents[2] / "typings"
STUBS = {
    "cuda.bindings.driver": TYPINGS / "cuda/bindings/driver.pyi",
    "cuda.bindings.nvrtc": TYPINGS / "cuda/bindings/nvrtc.pyi",
    "cupy.cuda.runtime": TYPINGS / "cupy/cuda/runtime.pyi",
}


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


without_driver = pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")


def stub(name: str) -> ast.Module:
    return ast.parse(STUBS[name].read_text())


def functions(name: str) -> Iterator[ast.FunctionDef]:
    return (node for node in stub(name).body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("name", STUBS)
def test_every_name_of_the_stubs_exists(name):
    """A renamed function of a library would break a GPU node, but no test without a GPU."""
    module = importlib.import_module(name)
    for node in stub(name).body:
        if isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            assert isinstance(getattr(module, node.target.id), int)
        elif isinstance(node, ast.FunctionDef):
            assert callable(getattr(module, node.name))
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            check_class(getattr(module, node.name), node)


def check_class(real: type, node: ast.ClassDef) -> None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            assert hasattr(real, item.name), f"{node.name}.{item.name}"
        elif isinstance(item, ast.AnnAssign) and node.name != "CUDARuntimeError":
            assert isinstance(item.target, ast.Name)
            assert hasattr(real, item.target.id), f"{node.name}.{item.target.id}"
        elif isinstance(item, ast.Assign):
            assert isinstance(item.targets[0], ast.Name)
            assert isinstance(item.value, ast.Constant)
            member = getattr(real, item.targets[0].id)
            assert int(member) == item.value.value, f"{node.name}.{item.targets[0].id}"


@pytest.mark.parametrize("name", STUBS)
def test_functions_take_as_many_arguments_as_the_stubs_say(name):
    """A surplus argument would not be found before the first call on a GPU."""
    module = importlib.import_module(name)
    for function in functions(name):
        signature = (getattr(module, function.name).__doc__ or "").splitlines()[0]
        given = signature.partition("(")[2].rpartition(")")[0]
        # Optional ones that tierd leaves away are at the end.
        assert count(given) >= len(function.args.args), signature
        if "=" not in given:
            assert count(given) == len(function.args.args), signature


def count(parameters: str) -> int:
    """Parameters of a signature; commas within brackets do not separate them."""
    depth, commas = 0, 0
    for character in parameters:
        depth += (character in "[(") - (character in "])")
        commas += character == "," and not depth
    return commas + 1 if parameters else 0


def argument(module: ModuleType, annotation: ast.expr) -> object:
    """A value of the type that a stub asks for."""
    if isinstance(annotation, ast.Subscript):
        return [argument(module, annotation.slice)]
    assert isinstance(annotation, ast.Name)
    if annotation.id in ("int", "bytes"):
        return {"int": 1, "bytes": b"x"}[annotation.id]
    kind = getattr(module, annotation.id)
    return next(iter(kind)) if hasattr(kind, "__members__") else kind()


@without_driver
def test_the_driver_bindings_take_what_the_stubs_say():
    """Arguments are converted before the driver is looked for: a wrong type is reported as such."""
    module = importlib.import_module("cuda.bindings.driver")
    for function in functions("cuda.bindings.driver"):
        types = [parameter.annotation for parameter in function.args.args]
        arguments = [argument(module, annotation) for annotation in types if annotation is not None]
        with pytest.raises(RuntimeError, match="NVIDIA driver library"):
            getattr(module, function.name)(*arguments)


@without_driver
def test_the_runtime_takes_what_the_stubs_say():
    """As for the driver; every call answers that there is none, by the error that tierd maps."""
    module = importlib.import_module("cupy.cuda.runtime")
    for function in functions("cupy.cuda.runtime"):
        types = [parameter.annotation for parameter in function.args.args]
        arguments = [
            bytes(64) if isinstance(value, bytes) else value
            for value in (argument(module, each) for each in types if each is not None)
        ]
        if function.name in ("eventQuery", "streamQuery"):
            assert getattr(module, function.name)(*arguments) == 35
            continue
        with pytest.raises(module.CUDARuntimeError) as failure:
            getattr(module, function.name)(*arguments)
        assert failure.value.status == 35, function.name


@without_driver
def test_daemon_reports_a_missing_driver():
    """A node without a GPU would end in a stack trace instead of a reason."""
    with pytest.raises(CannotOpenError, match="no NVIDIA driver here"):
        visible()
    with pytest.raises(CannotOpenError, match="no NVIDIA driver here") as refusal:
        CudaDevice.find(bytes(range(16)))
    assert not refusal.value.sticky


ENGINE = """
from tierd.device.api import CannotOpenError
from tierd.device.engine_cuda import Counters, Events, Exports, MemorySpan, device_uuid
for make in (lambda: device_uuid(0), lambda: Exports(0, [MemorySpan(1, 1)]), lambda: Events(0),
             lambda: Counters(0)):
    try:
        make()
    except CannotOpenError as error:
        print(error)
"""

BLOCKED = "import sys; sys.modules.update(dict.fromkeys(['cuda.bindings', 'cupy']))"


@without_driver
def test_engine_reports_a_missing_driver():
    """An engine on CPUs that asks for a GPU would end in a stack trace."""
    lines = run(ENGINE)
    assert len(lines) == 4
    assert all("no NVIDIA driver here" in line for line in lines)


@pytest.mark.slow
def test_both_sides_name_missing_libraries():
    """`import tierd.device.cuda` would fail on every node that has not installed the extra."""
    lines = run(f"{BLOCKED}{ENGINE}")
    assert len(lines) == 4
    assert all("pip install cuda-bindings" in line for line in lines)
    lines = run(
        f"{BLOCKED}\n"
        "from tierd.device.api import CannotOpenError\n"
        "from tierd.device.cuda import CudaDevice\n"
        "try: CudaDevice.find(bytes(16))\n"
        "except CannotOpenError as error: print(error)\n"
    )
    assert len(lines) == 1
    assert "pip install 'tierd[cuda]'" in lines[0]


@pytest.mark.slow
def test_client_does_not_import_cupy_or_torch():
    """An engine would pay for the daemon's libraries, or take a second CUDA runtime."""
    (line,) = run(
        "import sys, tierd.device.engine_cuda\n"
        "heavy = ('cupy', 'torch', 'cuda.bindings.runtime')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert line == "[]"


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()
