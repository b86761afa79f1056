"""The Triton kernels, compiled without a GPU; the one without inline assembly is also interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bullet.kernels import probe  # noqa: E402


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("name", sorted(probe.COMPILED))
@pytest.mark.parametrize("integers", ["i32", "i64"])
def test_kernels_compile(name, capability, integers):
    compiled = probe.compile_for(name, capability, integers)
    ptx = compiled.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert len(compiled.asm["cubin"]) > 0
    # Volatile reads inside the loop, not one hoisted out of it: the spin would never end.
    timer = ptx.count("%globaltimer")
    assert timer == {"memory_stream": 0, "l2_stream": 0, "clock": 3}.get(name, 2)
    assert ("%smid" in ptx) == (name == "sm_probe")


def test_alu_spin_keeps_its_arithmetic():
    ptx = probe.compile_for("alu_spin", 90).asm["ptx"]
    assert ptx.count("fma.rn.f32") >= 8
    assert "ld.global" not in ptx


def test_memory_stream_copies_every_element():
    """Interpreted, in its own process: triton decides at import."""
    code = textwrap.dedent("""
        import torch
        from bullet.kernels import probe
        for size, sms in ((1, 1), (4096, 1), (3 * 4096 + 7, 2)):
            source, target = torch.rand(size), torch.full((size,), float("nan"))
            expected = torch.empty_like(target)
            probe.memory_stream_reference(source, expected)
            probe.launch_memory_stream(source, target, sms)
            assert torch.equal(target, expected), size
    """)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, text=True,
                          capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_wrappers_check_their_arguments():
    buffer = torch.zeros(10)
    with pytest.raises(ValueError, match="copies float32 buffers of one size"):
        probe.launch_memory_stream(buffer, torch.zeros(11), 4)
    with pytest.raises(ValueError, match="contiguous"):
        probe.launch_memory_stream(torch.zeros(4, 4).t(), torch.zeros(4, 4), 4)
    with pytest.raises(ValueError, match="alu_spin on 4 SMs needs"):
        probe.launch_alu_spin(buffer, 4, 1000)
    with pytest.raises(ValueError, match="spin_ns = 0"):
        probe.launch_probe(probe.ProbeBuffers(4, torch.device("cpu")), 0)


def test_poisoned_buffers_show_blocks_that_never_ran():
    buffers = probe.ProbeBuffers(3, torch.device("cpu"))
    buffers.smid.fill_(5)
    buffers.poison()
    assert buffers.smid.tolist() == [-1, -1, -1]


def test_tensor_spin_keeps_its_products_and_moves_nothing():
    ptx = probe.compile_for("tensor_spin", 90).asm["ptx"]
    assert "wgmma" in ptx
    assert "ld.global" not in ptx
    assert "mma.sync" in probe.compile_for("tensor_spin", 80).asm["ptx"]


def test_the_l2_stream_goes_past_l1():
    ptx = probe.compile_for("l2_stream", 90).asm["ptx"]
    assert ".cg" in ptx
    assert "ld.global.v4" not in ptx.replace(".cg", "")


def test_the_clock_reads_cycles_twice():
    assert probe.compile_for("clock", 90).asm["ptx"].count("%clock64") == 2
