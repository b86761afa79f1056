"""A stand-in for the python of a GPU machine: ``on_fakes.py -m MODULE ARGUMENTS`` runs the module in a process in which
torch.cuda, the driver and the card are faked, and so do the processes that it starts, by the command named in ``FAKES_PYTHON``.

``FAKES_FAIL_AT=N``: the N-th launch of a process loses the device, in the first process only that comes so far (the file named by
``FAKES_LOST`` is then there); with ``FAKES_CRASH`` the process dies of SIGSEGV there. The fake takes no time: what a plan had to
cut is left out here.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]


def install() -> None:
    """Fakes for this process."""
    import torch
    from fake_cuda import FakeCuda, FakeKernels, FakeShop
    from stub_driver import StubDriver

    from bullet.gpu.driver import Driver
    from bullet.profiler import bench_engine, card
    from bullet.profiler import plan as planning

    driver = StubDriver()
    fail_at, lost = int(os.environ.get("FAKES_FAIL_AT", "0")), Path(os.environ.get("FAKES_LOST", "/nowhere"))
    failing = {fail_at: "CUDA error: an illegal memory access was encountered"} if fail_at and not lost.exists() else {}
    cuda = FakeCuda(driver, fail_at=failing, sticky=True)
    launch = cuda.launch

    def noted(seconds: float, effect: object = None, name: str = "kernel") -> None:
        if failing and cuda.launches + 1 == fail_at:
            lost.touch()
            if os.environ.get("FAKES_CRASH"):
                os.kill(os.getpid(), signal.SIGSEGV)
        launch(seconds, effect, name)

    cuda.launch = noted
    for name in ("Event", "Stream", "ExternalStream", "CUDAGraph", "stream", "synchronize", "empty_cache", "graph_pool_handle",
                 "current_blas_handle", "_sleep"):
        setattr(torch.cuda, name, getattr(cuda, name))
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0, L2_cache_size=60 << 20,
                                 total_memory=141 << 30)
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: False
    torch.cuda.init = lambda: None
    torch.cuda.get_device_properties = lambda device: properties
    torch.cuda.mem_get_info = lambda: (100 << 30, 141 << 30)
    zeros, rand, empty = torch.zeros, torch.rand, torch.empty
    torch.zeros, torch.rand, torch.empty = (
        lambda *shape, device=None, make=make, **rest: make(*shape, **rest) for make in (zeros, rand, empty))
    rates = planning.Rates(132, 6e14, 3e12)
    bench_engine.EngineWorkloads = lambda model, device, dtype, **sizes: FakeShop(cuda, model, rates)
    sys.modules["bullet.kernels.probe"] = FakeKernels(cuda)
    Driver.load = classmethod(lambda cls: Driver(driver))
    reader = card.CardReader(command=lambda a: "" if "apps" in a[3] else "580.1" if "driver" in a[3] else "1980, 3201, 41, 300\n")
    card.CardReader.open = classmethod(lambda cls: reader)
    make_plan = planning.make_plan
    planning.make_plan = lambda *args, **kwargs: dataclasses.replace(make_plan(*args, **kwargs), spare=())


if __name__ == "__main__":
    assert sys.argv[1] == "-m", "on_fakes.py -m MODULE ARGUMENTS"
    if sys.argv[2] == "bullet.cli.run":  # the engine has tests of its own: here it leaves a folder and a word
        folder = Path(sys.argv[sys.argv.index("--out") + 1])
        folder.mkdir()
        (folder / "steps.json").write_text("[]")
        sys.stdout.write("an engine ran\n")
        sys.exit(0)
    install()
    sys.executable = os.environ["FAKES_PYTHON"]
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
