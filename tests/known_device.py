"""Operations of a sweep as a device of known coefficients times them: what a fit of such a sweep must find again."""

import dataclasses

import numpy as np

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.coefficients import DeviceCoefficients, analytic_coefficients
from bullet.devices.fitted import DeviceModel
from bullet.profiler.shapes import Shape, kernels_of
from bullet.profiles import forms as fit
from bullet.profiles import sm_axis as fit_sms
from bullet.profiles.rows import ENGINE_OPS
from bullet.work import prefill_attention


def made_up(gpu: GpuSpec, **changed: object) -> DeviceCoefficients:
    """Coefficients that no table has."""
    rowwise = {"norm": 0.6, "rope": 0.5, "act": 0.7, "embedding": 0.4, "qk_norm": 0.6}
    base = {"gemm_tiles": ((128, 256, 0.8), (128, 128, 0.7), (64, 128, 0.65), (64, 64, 0.6)), "gemm_bandwidth": 0.75,
            "gemm_overhead_s": 4e-6, "gemm_block_overhead_s": 2e-6, "prefill_attention_efficiency": 0.6,
            "prefill_attention_extra_keys": 200.0, "prefill_attention_overhead_s": 1e-5, "decode_attention_bandwidth": 0.7,
            "decode_attention_overhead_s": 1.5e-5, "decode_attention_seq_s": 3e-7, "rowwise_bandwidth": rowwise,
            "rowwise_overhead_s": 2e-6, "rate_slope": 0.4, "rate_cap": 1.25, "bandwidth_knee": 0.4, "bandwidth_sharpness": 3.0}
    return dataclasses.replace(analytic_coefficients(gpu), **(base | changed))  # type: ignore[arg-type]


def seconds_of(device: DeviceModel, shape: Shape, sms: int) -> float:
    """One repetition alone on ``sms`` SMs; the embedding's share of a layer included, as the device has it."""
    model, c, gpu = device.model, device.coefficients, device.gpu
    op = ENGINE_OPS.get(shape.op, shape.op)
    inverse = 1 / device.bandwidth_share(sms)
    if op == "decode_layer":
        work = device.hybrid_work((), shape.batch, shape.batch * shape.context_tokens, logits_seqs=0, layers=1)
        return device.solo_seconds(work, sms)
    if op == "prefill_layer":
        work = device.prefill_work([(shape.tokens // shape.batch, shape.context_tokens)] * shape.batch, 1, logits_seqs=0)
        return device.solo_seconds(work, sms)
    (kernel,) = kernels_of(model, shape)
    if op.startswith("gemm"):
        (tiles, moved_s), overhead_s = fit_sms._terms(
            "gemm", (kernel.rows, kernel.columns, kernel.k), device)
    elif op == "decode_attention":
        (tiles, moved_s), overhead_s = fit_sms._terms(op, (shape.batch, shape.context_tokens), device)
    elif op == "prefill_attention":
        new = shape.tokens // shape.batch
        moved = prefill_attention(model, [(new, shape.context_tokens)] * shape.batch).bytes
        attention = np.array([c.prefill_attention_efficiency, c.prefill_attention_extra_keys, 0.0])
        whole_s = float(fit.prefill_attention_seconds(
            np.array([float(shape.batch)]), np.array([float(new)]), model.num_heads, model.head_dim, attention, gpu,
            np.array([float(shape.context_tokens)]))[0])
        blocks = -(-new // 128) * model.num_heads * shape.batch
        tiles = ((whole_s / -(-blocks // gpu.num_sms), blocks),)
        moved_s = moved / (gpu.mem_bytes_per_s * c.peak_bandwidth)
        overhead_s = c.prefill_attention_overhead_s
    else:  # row by row; a copy as fast as the best of them
        share = c.rowwise_bandwidth.get(op, max(c.rowwise_bandwidth.values()))
        return kernel.bytes / (gpu.mem_bytes_per_s * share) * inverse + c.rowwise_overhead_s

    def computed_s(block_s: float, blocks: int) -> float:
        waves = -(-blocks // sms)
        busy = min(gpu.num_sms, -(-blocks // (waves - 1)) - 1) if waves > 1 else gpu.num_sms
        return waves * block_s / min(c.rate_cap, 1 + c.rate_slope * (1 - busy / gpu.num_sms))

    return max(min(computed_s(*tile) for tile in tiles), moved_s * inverse) + overhead_s


class KnownRates:
    """``seconds`` as :class:`bullet.profiler.plan.Rates` gives them: the project's own operations of one device, torch's of
    another."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, engine: DeviceCoefficients, torchs: DeviceCoefficients) -> None:
        self.engine, self.torchs = DeviceModel(model, gpu, engine), DeviceModel(model, gpu, torchs)

    def device(self, op: str) -> DeviceModel:
        """Whose operation it is; the engine's GEMMs are torch's, hence alike in both."""
        return self.engine if op in ENGINE_OPS else self.torchs

    def seconds(self, model: ModelSpec, shape: Shape, sms: int) -> float:
        """One repetition on so many SMs."""
        shape = shape._replace(op=shape.op.removeprefix("cudnn_"))
        return seconds_of(self.device(shape.op), shape, sms)
