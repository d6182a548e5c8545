"""Which cell, or which import, touched the device first: in a real kernel, with a fake device, since none is here."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_kernel import IT_HUNG, RealKernel

SETUP = """
import importlib, sys, threading, time
import torch, nbstate
from nbstate.launch import witness

class FakeCuda:
    touched = False

torch.cuda.is_initialized = lambda: FakeCuda.touched
torch.touch_fake_cuda = lambda: setattr(FakeCuda, "touched", True)
def work(): return 1
"""

PACKAGE = {
    "stublib/__init__.py": "import stublib.quiet\nimport stublib.device\nimport stublib.late\n",
    "stublib/quiet.py": "",
    "stublib/device.py": "import stublib.deeper\nimport torch\ntorch.touch_fake_cuda()\n",
    "stublib/deeper.py": "",
    "stublib/late.py": "",
    "stubalone.py": "import torch\nimport stublib_quiet\ntorch.touch_fake_cuda()\nimport stublib_other\n",
    "stublib_quiet.py": "",
    "stublib_other.py": "",
    "stubfails.py": "import torch\ntorch.touch_fake_cuda()\nraise RuntimeError('no licence')\n",
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    """A kernel with the extension and modules that touch the device when they are imported."""
    place = tmp_path_factory.mktemp("modules")
    for name, text in PACKAGE.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    with RealKernel() as kernel:
        kernel.good(f"{SETUP}\nsys.path.insert(0, {str(place)!r})")
        kernel.good("nbstate.notebook_launcher(work, num_processes=1, dashboard=False)")  # the fork server is up
        yield kernel


@pytest.fixture
def notebook(watched: RealKernel) -> Iterator[RealKernel]:
    """The kernel, with a device that nobody has touched, and modules that nobody has imported."""
    watched.good(
        "FakeCuda.touched = False\n"
        "for name in [n for n in sys.modules if n.startswith('stub')]: del sys.modules[name]\n"
        "%load_ext nbstate"
    )
    yield watched
    watched.good("%unload_ext nbstate\nFakeCuda.touched = False")


def origin(kernel: RealKernel) -> str:
    """Who touched it first, as the texts for people say it."""
    return str(ast.literal_eval(kernel.good("str(witness.origin('cuda'))").result))


def test_nobody_touched_it(notebook: RealKernel) -> None:
    notebook.good("import stublib_quiet")
    assert origin(notebook) == "None"
    assert notebook.good("nbstate.preflight().may_fork").result == "True"


def test_the_import_that_did_it_is_named_everywhere(notebook: RealKernel) -> None:  # C23
    number = notebook.good("import stublib").number
    by = f"by the import of stublib.device, through stublib in In[{number}]"
    assert origin(notebook) == by
    refused = notebook.run("nbstate.notebook_launcher(work, num_processes=2, start_method='fork', dashboard=False)")
    assert refused.error.startswith("ForkUnsafeError: start_method='fork' would not be safe: cuda was already used in")
    assert by in refused.error
    notebook.good("lock = threading.Lock()\ndef locks():\n    with lock: return 1")
    refused = notebook.run("nbstate.notebook_launcher(locks, num_processes=2, dashboard=False)")
    assert refused.error.startswith("ShippingError: the global 'lock' that locks() uses")
    assert by in refused.error
    launched = notebook.good(
        "nbstate.notebook_launcher(work, num_processes=2, dashboard=False), nbstate.last_launch().start_method"
    )
    assert launched.result == "([1, 1], 'forkserver')"
    report = notebook.good("nbstate.preflight()").displays[-1]
    for text in (report["text/plain"], report["text/html"]):
        assert "this kernel must not fork" in text
        assert by in text
        assert "restart the kernel and move the import of stublib into the launched function" in text


def test_the_import_leaves_no_trace(notebook: RealKernel) -> None:
    notebook.good("import stublib, importlib.machinery")
    kinds = "{type(sys.modules[n].__spec__) for n in sys.modules if n.startswith('stub')}"
    assert notebook.good(f"{kinds} == {{importlib.machinery.ModuleSpec}}").result == "True"
    assert notebook.good("stublib.__spec__._initializing, importlib.reload(stublib) is stublib").result == (
        "(False, True)"
    )


def test_a_module_that_goes_on_after_its_own_imports(notebook: RealKernel) -> None:
    number = notebook.good("def late():\n    return importlib.import_module('stubalone')\nlate()").number
    assert origin(notebook) == f"by the import of stubalone in In[{number}]"


def test_an_import_that_fails_shows_no_frame_of_ours(notebook: RealKernel) -> None:
    reply = notebook.run("import stubfails")
    assert reply.error == "RuntimeError: no licence"
    assert "nbstate" not in reply.traceback
    assert "importlib" not in reply.traceback
    assert origin(notebook) == f"by the import of stubfails in In[{reply.number}]"
    assert "No module named 'stubnowhere'" in notebook.run("import stubnowhere").error


@pytest.mark.parametrize(
    "body", ["import stublib_quiet\ntorch.touch_fake_cuda()", "torch.touch_fake_cuda()\nimport stublib_quiet"]
)
def test_the_cells_own_code_is_not_blamed_on_its_imports(notebook: RealKernel, body: str) -> None:
    number = notebook.good(body).number
    assert origin(notebook) == f"in In[{number}]"
    assert f"move what In[{number}] does with the device" in notebook.good("nbstate.preflight()").result


def test_a_cell_that_fails_is_blamed_too(notebook: RealKernel) -> None:
    number = notebook.run("torch.touch_fake_cuda(); 1 / 0").number
    notebook.good("torch.touch_fake_cuda()  # a later one is not")
    assert origin(notebook) == f"in In[{number}]"


def test_what_happens_between_cells(notebook: RealKernel, tmp_path: Path) -> None:
    sign = tmp_path / "touched"
    number = notebook.good(
        "def touch():\n"
        "    torch.touch_fake_cuda()\n"
        f"    open({str(sign)!r}, 'w').close()\n"
        "threading.Timer(1.0, touch).start()"
    ).number
    deadline = time.monotonic() + IT_HUNG
    while not sign.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert origin(notebook) == f"between two cells, after In[{number}]"


def test_what_happened_before_the_extension_came(watched: RealKernel) -> None:
    watched.good("FakeCuda.touched = True")
    report = watched.good("nbstate.preflight()").result
    assert "cuda was already used in this process, and no fork" in report
    assert "%load_ext nbstate, then the guilty cell or import can be named" in report
    watched.good("%load_ext nbstate")
    assert origin(watched).startswith("before nbstate's extension was loaded")
    watched.good("%unload_ext nbstate\nFakeCuda.touched = False")
    assert origin(watched) == "None"
    assert watched.good("[f for f in sys.meta_path if 'nbstate' in type(f).__module__]").result == "[]"


def test_a_busy_thread_is_shown_with_its_cell(notebook: RealKernel) -> None:
    cell = notebook.good(
        "go_on = True\n"
        "def compute():\n"
        "    while go_on: sum(range(100))\n"
        "threading.Thread(target=compute, name='busy').start()"
    )
    lock = notebook.good("held = threading.Lock(); held.acquire()\nthreading.Thread(target=held.acquire).start()")
    threads = notebook.good("'; '.join(nbstate.preflight().threads)").result
    notebook.good("go_on = False; held.release()")
    assert f"thread 'busy' (now at In[{cell.number}], line 3)" in threads
    assert f"(started in In[{lock.number}])" in threads


def test_a_library_that_is_known_for_it_is_named_with_the_reason(notebook: RealKernel, tmp_path: Path) -> None:
    (tmp_path / "bitsandbytes.py").write_text("")  # a stub of it
    notebook.good(f"sys.path.insert(0, {str(tmp_path)!r})\nimport bitsandbytes")
    report = notebook.good("nbstate.preflight()").result
    notebook.good(f"sys.path.remove({str(tmp_path)!r}); del sys.modules['bitsandbytes']")
    assert "bitsandbytes asks each CUDA device for its capability at import" in report
    assert "this kernel may fork" in report
    assert "Before you ask for fork, run nbstate.preflight(canary=True)" in report
