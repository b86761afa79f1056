"""The CUDA driver's calls that partitions need, through cuda-bindings: each checked, each error one line that says what to do.

Source: CUDA driver API reference, "Green Contexts". Not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

from bullet.errors import PartitionError, one_line
from bullet.gpu.splits import SplitRefusedError

_ATTRIBUTE_NUM_SMS = 16
_ATTRIBUTE_CC_MAJOR, _ATTRIBUTE_CC_MINOR = 75, 76
MIN_DRIVER_VERSION = 12050
"""First driver (CUDA 12.5, release 555) with streams of green contexts; the contexts themselves are a release older."""

# Answers that concern this split alone; any other failure concerns the mechanism as a whole.
_SPLIT_REFUSALS = {"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION",
                   "CUDA_ERROR_INVALID_RESOURCE_TYPE"}
_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, "
                            "or use --device cpu or --device simulated",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or driver has no green contexts: driver 555 or newer is needed "
                                "(not under MIG or vGPU), or use --backend none",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's kernel module and library differ: reboot or reinstall the driver",
    "CUDA_ERROR_OUT_OF_MEMORY": "a context needs about 44 MB: free GPU memory or measure fewer splits (--splits)",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process holds the GPU exclusively: end it or choose another GPU",
}


class Driver:
    """The driver's calls through ``cuda.bindings.driver``, each checked; errors say what to do.

    ``module`` is injected by tests: anything with the same functions returning ``(code, *values)``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def load(cls) -> Driver:
        """Import the bindings; :class:`PartitionError` if they are missing."""
        try:
            from cuda.bindings import driver
        except ImportError as exc:
            raise PartitionError(f"cuda-bindings is not installed ({exc}): pip install 'cuda-bindings>=12.8,<14', "
                                 "or use --backend none") from None
        return cls(driver)

    def call(self, name: str, *arguments: Any) -> Any:
        """One driver call: its values (none, one, or a tuple), or :class:`PartitionError` in one line."""
        function = getattr(self._module, name, None)
        if function is None:
            raise PartitionError(f"this cuda-bindings has no {name}: green contexts need cuda-bindings 12.8 or newer, "
                                 "or use --backend none")
        try:
            code, *values = function(*arguments)
        except RuntimeError as exc:
            # Raised where libcuda is absent, and where an old libcuda lacks the symbol.
            if name in ("cuInit", "cuDriverGetVersion"):
                raise PartitionError(f"no NVIDIA driver ({one_line(exc, 200)}): install one, or use --device cpu or "
                                     "--device simulated") from None
            raise PartitionError(f"the driver has no {name} ({one_line(exc, 200)}): driver 555 (CUDA 12.5) or newer is "
                                 "needed, or use --backend none") from None
        label = getattr(code, "name", str(code))
        if int(code) != 0:
            advice = _ADVICE.get(label, "see the CUDA driver API reference, or use --backend none")
            kind = SplitRefusedError if label in _SPLIT_REFUSALS else PartitionError
            raise kind(f"{name} answered {label}: {advice}")
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def version(self) -> int:
        """CUDA version that the driver supports, 1000 x major + 10 x minor."""
        self.call("cuInit", 0)
        return int(self.call("cuDriverGetVersion"))

    def require_green_contexts(self) -> None:
        """:class:`PartitionError` where the driver is older than green contexts."""
        version = self.version()
        if version < MIN_DRIVER_VERSION:
            raise PartitionError(f"driver supports CUDA {version // 1000}.{version % 1000 // 10}: green contexts need "
                                 "12.5 or newer (driver 555); update the driver, or use --backend none")

    def device(self, ordinal: int) -> tuple[Any, int, tuple[int, int]]:
        """The device, its SMs and its compute capability."""
        device = self.call("cuDeviceGet", ordinal)
        sms, major, minor = (int(self.call("cuDeviceGetAttribute", self._enum("CUdevice_attribute", value), device))
                             for value in (_ATTRIBUTE_NUM_SMS, _ATTRIBUTE_CC_MAJOR, _ATTRIBUTE_CC_MINOR))
        return device, sms, (major, minor)

    def sm_resource(self, device: Any) -> Any:
        return self.call("cuDeviceGetDevResource", device, self._enum("CUdevResourceType", 1))

    def green_sms(self, context: Any) -> int:
        """SMs that a green context holds, read back from the driver."""
        return int(self.call("cuGreenCtxGetDevResource", context, self._enum("CUdevResourceType", 1)).sm.smCount)

    def _enum(self, name: str, value: int) -> Any:
        kind = getattr(self._module, name, None)
        if kind is None:
            raise PartitionError(f"this cuda-bindings has no {name}: green contexts need cuda-bindings 12.8 or newer, "
                                 "or use --backend none")
        return kind(value)
