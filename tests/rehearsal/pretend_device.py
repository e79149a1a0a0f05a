"""A pretend accelerator: `import pretend_device` gives torch a device "sim".

It finds what a machine without an accelerator hides: a tensor on the wrong device, a generator of
another device, one transfer too many. The first import builds it with c++, for a minute or two.
"""

import contextlib
import hashlib
import importlib.util
import pathlib
import subprocess
import sysconfig
import tempfile
import types

import torch
from torch.utils.cpp_extension import include_paths, library_paths

DEVICE, _NAME = "sim", "pretend_device_of_torch"
_ANSWERS = {
    "is_available": True, "is_initialized": True, "current_device": 0, "device_count": 1,
    "_is_in_bad_fork": False, "manual_seed_all": None, "device": contextlib.nullcontext(),
}  # fmt: skip


def _built():
    """Returns the path of the extension, which is built once for a source and a torch."""
    source = pathlib.Path(__file__).with_suffix(".cpp")
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = pathlib.Path(tempfile.gettempdir()) / f"{_NAME}_{key}.so"
    if not made.exists():
        folders = [*include_paths(), sysconfig.get_path("include")]
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        subprocess.run(
            ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{path}" for path in folders),
             f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(source),
             *(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch",
             "-ltorch_python", "-o", f"{made}.part"],
            check=True,
        )  # fmt: skip
        pathlib.Path(f"{made}.part").rename(made)
    return made


def _registered():
    torch.utils.rename_privateuse1_backend(DEVICE)
    answers = {name: (lambda *_, answer=answer: answer) for name, answer in _ANSWERS.items()}
    torch._register_device_module(DEVICE, types.SimpleNamespace(**answers))
    torch.utils.generate_methods_for_privateuse1_backend()
    found = importlib.util.spec_from_file_location(_NAME, _built())
    extension = importlib.util.module_from_spec(found)
    found.loader.exec_module(extension)
    return extension


transfers = _registered().transfers
"""Returns the number of copies to the host so far."""
