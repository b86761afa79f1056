"""The real cuda-bindings, driven through a compiled stand-in for libcuda: argument order, integer flags, read-back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")


def compiled(folder):
    subprocess.run([COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1",
                    HERE / "libcuda_stub.c", "-ldl"], check=True)


@pytest.mark.skipif(COMPILER is None or not sys.platform.startswith("linux"), reason="no C compiler, or not Linux")
def test_nodes_of_a_graph_through_cuda_bindings(tmp_path):
    """Handles as torch gives them, plain integers; counts, names and structures as the bindings return them."""
    pytest.importorskip("cuda.bindings.driver")
    compiled(tmp_path)
    code = textwrap.dedent("""
        from bullet.gpu.driver import Driver
        from bullet.profiler.evidence import nodes_of
        driver = Driver.load()
        print(nodes_of(driver, 0x4000))
        print(int(driver.call("cuCtxFromGreenCtx", 0x4000)))
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env={
        **os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(HERE.parents[1])})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[{'kind': 'kernel', 'name': 'gemm_kernel', 'grid': [112, 1, 1], 'block': [128, 1, 1], 'context': 16384}, "
        "{'kind': 'memcpy'}]", "16384"]


@pytest.mark.skipif(COMPILER is None or not sys.platform.startswith("linux"), reason="no C compiler, or not Linux")
def test_a_partition_table_through_cuda_bindings(tmp_path):
    pytest.importorskip("cuda.bindings.driver")
    compiled(tmp_path)
    code = textwrap.dedent("""
        import sys
        from bullet.errors import PartitionError
        from bullet.gpu.partition import green_context_table
        from bullet.gpu.splits import Split
        with green_context_table([Split(112, 20), Split(100, 32)]) as table:
            print([str(pair.granted) for pair in table.pairs], hex(table.pairs[1].decode.handle))
            with table.current(table.pairs[0].decode):
                print("inside", file=sys.stderr)
        with green_context_table([Split(122, 10)], flags=1, priorities=(0, -1)) as table:
            print(table.pairs[0].granted)
        try:
            green_context_table([Split(124, 8)], ordinal=0, flags=0, wrap_stream=lambda handle: 1 / 0)
        except ZeroDivisionError:
            print("cleaned up")
    """)
    root = HERE.parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env={
        **os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['112+20', '100+32'] 0x1004020", "122+10", "cleaned up"]
    assert done.stderr.splitlines() == [
        # 112 is the group and 20 what is left; contexts 0x1070 (112 SMs), 0x2014 (20), 0x3064 (100), 0x4020 (32).
        "split groups=1 of=132 flags=0 least=112",
        "create 0x1070 flags=1", "stream 0x1001070 of=0x1070 flags=1 priority=0",
        "create 0x2014 flags=1", "stream 0x1002014 of=0x2014 flags=1 priority=0",
        "split groups=1 of=132 flags=0 least=32",
        "create 0x3064 flags=1", "stream 0x1003064 of=0x3064 flags=1 priority=0",
        "create 0x4020 flags=1", "stream 0x1004020 of=0x4020 flags=1 priority=0",
        "push 0x2014", "inside", "pop",
        *(f"destroy stream 0x100{c}" for c in ("4020", "3064", "2014", "1070")),
        *(f"destroy context 0x{c}" for c in ("4020", "3064", "2014", "1070")),
        # Without co-scheduling 122 is a multiple of 2; decode's stream has its priority.
        "split groups=1 of=132 flags=1 least=122",
        "create 0x507a flags=1", "stream 0x100507a of=0x507a flags=1 priority=0",
        "create 0x600a flags=1", "stream 0x100600a of=0x600a flags=1 priority=-1",
        "destroy stream 0x100600a", "destroy stream 0x100507a", "destroy context 0x600a", "destroy context 0x507a",
        # Interrupted: 8 is the group, prefill the rest (124 = 0x7c).
        "split groups=1 of=132 flags=0 least=8",
        "create 0x707c flags=1", "stream 0x100707c of=0x707c flags=1 priority=0",
        "destroy stream 0x100707c", "destroy context 0x707c"]
