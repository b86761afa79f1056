"""GPUs as their data sheets state them; sources stand beside the numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bullet import door
from bullet.errors import ConfigError, require, short
from bullet.units import GIB, GIGA, MIB, TERA

PEAK_SLACK = 1.02
"""Measured operations a second may exceed the data sheet's by this: cards boost above its clock (RTX 4090: by 0.5 %)."""
BYTES_SLACK = 1.05
"""Likewise bytes a second, what the L2 cache can hold aside."""
FLOOR_S = 20e-6
"""What a kernel may take beyond its roofline however small it is: launch, ramp-up, tail."""
UNIT_FACTOR = 100.0
"""Further from its neighbours, or above its roofline, than this, a value is in another unit."""

CARDS = Path(__file__).parent / "cards"
"""One file a card: its data sheet, and where it stands."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU as its data sheet states it, and the partition rules of its compute capability.

    ``peak_flops``: dense bf16 tensor-core operations per second, no sparsity; ``peak_fp8_flops``, ``peak_int8_flops`` likewise, 0
    where its tensor cores have none. ``bandwidth_knee_sms``: the inflection ``N_d`` of eq. 1, SMs at which memory bandwidth
    saturates; ``None`` where nobody published one. ``mem_bytes``: the sheets' GB of memory are GiB (an 80 GB A100 reports 81,920
    MiB), their GB/s are 10^9. ``link_bytes_per_s``: one way,
    to another GPU of the node (``gpus_per_node``); ``host_link_bytes_per_s``:
    over PCIe. ``like``: the card whose measured efficiencies it takes where it has no fit of its own; empty: the nearest
    measured silicon by compute capability.
    """

    name: str
    num_sms: int
    peak_flops: float
    mem_bytes_per_s: float
    mem_bytes: int
    l2_bytes: int
    compute_capability: tuple[int, int]
    link_bytes_per_s: float
    bandwidth_knee_sms: int | None
    source: str
    peak_fp8_flops: float = 0.0
    peak_int8_flops: float = 0.0
    link: str = ""
    gpus_per_node: int = 8
    host_link_bytes_per_s: float = 32 * GIGA
    like: str = ""
    aliases: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("num_sms", "peak_flops", "mem_bytes_per_s", "mem_bytes", "gpus_per_node", "link_bytes_per_s",
                     "host_link_bytes_per_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"gpu {self.name}: {name}", value, "positive")
        for name in ("l2_bytes", "peak_fp8_flops", "peak_int8_flops"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"gpu {self.name}: {name}", value, "0 or more")
        require(self.bandwidth_knee_sms is None or self.bandwidth_knee_sms > 0, f"gpu {self.name}: bandwidth_knee_sms",
                self.bandwidth_knee_sms, "positive")  # more than the SMs there are: never reached

    @property
    def knee_sms(self) -> int:
        """``N_d``; where unpublished, A100's share of the device (30 of 108, Fig. 8): *assumed*."""
        if self.bandwidth_knee_sms is not None:
            return self.bandwidth_knee_sms
        return max(1, round(self.num_sms * 30 / 108))

    @property
    def silicon(self) -> str:
        """The built-in card whose fit stands in where this one has none: ``like``, else the nearest by compute capability."""
        if self.like:
            return self.like
        major, minor = self.compute_capability
        return "h100" if major in (9, 10, 11) else "a100-80gb" if (major, minor) == (8, 0) or major < 8 else "rtx4090"

    @classmethod
    def from_toml(cls, path: str | Path) -> GpuSpec:
        """A card from a file such as those of :data:`CARDS`; :class:`ConfigError` names the key and what is allowed."""
        path = Path(path)
        return door.typed(door.read_toml(path, ConfigError, "a TOML card"), _Card, path, ConfigError).spec(path)


@dataclass
class _Card:
    """A file's keys, in the units of data sheets; a card without a link of its own speaks to others over PCIe."""

    name: str
    num_sms: int
    peak_bf16_tflops: float
    mem_gb_per_s: float
    mem_gib: float
    compute_capability: tuple[int, int]
    source: str
    peak_fp8_tflops: float = 0.0
    peak_int8_tops: float = 0.0
    l2_mib: float = 0.0
    link: str = ""
    link_gb_per_s: float | None = None
    host_link_gb_per_s: float = 32.0
    gpus_per_node: int = 8
    bandwidth_knee_sms: int | None = None
    like: str = ""
    aliases: tuple[str, ...] = ()

    def spec(self, path: Path) -> GpuSpec:
        """The card; :class:`ConfigError` names the key that is out of range."""
        for key, (least, most) in RANGES.items():
            value = getattr(self, key)
            if value is not None and not (least <= value <= most or (value == 0 and key in MAY_BE_ZERO)):
                raise ConfigError(f"{path}: {key} = {value!r}: must be {least:g} to {most:,g}, in the key's own unit"
                                  + (" (0: it has none)" if key in MAY_BE_ZERO else ""))
        for key in ("peak_fp8_tflops", "peak_int8_tops"):
            value = getattr(self, key)
            if 0 < value < self.peak_bf16_tflops:
                raise ConfigError(f"{path}: {key} = {value!r}: must be peak_bf16_tflops = {self.peak_bf16_tflops!r} or more, "
                                  "or 0 where its tensor cores have none")
        for key, value in vars(self).items():
            if isinstance(value, str) and (not value.isprintable() or len(value) > 1000):
                raise ConfigError(f"{path}: {key} = {short(value)}: must be one line of text")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,99}", self.name):
            raise ConfigError(f"{path}: name = {short(self.name)}: must be letters, digits and . _ + -, as h100-sxm")
        if not self.source:
            raise ConfigError(f"{path}: source = '': must say where the numbers stand, as \"NVIDIA H100 data sheet\"")
        if not (1 <= self.compute_capability[0] <= 20 and 0 <= self.compute_capability[1] < 10):
            raise ConfigError(f"{path}: compute_capability = {self.compute_capability}: must be two whole numbers, as [9, 0]")
        if self.like and self.like not in FITTED:
            raise ConfigError(f"{path}: like = {short(self.like)}: must be one of {', '.join(FITTED)}, which were measured")
        link = self.host_link_gb_per_s if self.link_gb_per_s is None else self.link_gb_per_s
        try:
            return GpuSpec(
                self.name, self.num_sms, self.peak_bf16_tflops * TERA, self.mem_gb_per_s * GIGA, round(self.mem_gib * GIB),
                round(self.l2_mib * MIB), self.compute_capability, link * GIGA, self.bandwidth_knee_sms, self.source,
                self.peak_fp8_tflops * TERA, self.peak_int8_tops * TERA, self.link, self.gpus_per_node,
                self.host_link_gb_per_s * GIGA, self.like, self.aliases)
        except ConfigError as exc:
            raise ConfigError(f"{path}: {exc}") from None


RANGES: Mapping[str, tuple[float, float]] = {
    "num_sms": (1, 4096), "peak_bf16_tflops": (1, 1e5), "peak_fp8_tflops": (1, 1e6), "peak_int8_tops": (1, 1e6),
    "mem_gb_per_s": (10, 1e5), "mem_gib": (1, 4096), "l2_mib": (0.1, 8192), "link_gb_per_s": (0.1, 1e5),
    "host_link_gb_per_s": (0.1, 1e4), "gpus_per_node": (1, 1024), "bandwidth_knee_sms": (1, 4096)}
"""Wider than any card that there is: what lies outside is in another unit (TB/s, MiB, operations without the tera)."""
MAY_BE_ZERO = ("peak_fp8_tflops", "peak_int8_tops", "l2_mib")

FITTED = ("a100-80gb", "h100", "rtx4090")
"""Cards with a measured profile of their own among the shipped ones."""


class _Catalog(Mapping[str, GpuSpec]):
    """The built-in cards by name, each read when it is asked for."""

    def __init__(self) -> None:
        self._read: dict[str, GpuSpec] = {}
        self._names = tuple(sorted(path.stem for path in CARDS.glob("*.toml")))

    def __getitem__(self, name: str) -> GpuSpec:
        if name not in self._read:
            if name not in self._names:
                raise KeyError(name)
            self._read[name] = GpuSpec.from_toml(CARDS / f"{name}.toml")
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


GPUS: Mapping[str, GpuSpec] = _Catalog()


NOISE = r"\b(nvidia|tesla|geforce|gpu|graphics|hbm[0-9]e?|blackwell|(server|workstation) edition)\b"
"""What makers and drivers add to a name."""


def plain(name: str) -> str:
    """A name without what people write differently: case, makers, spaces and dashes."""
    text = re.sub(r"\bsxm[0-9]\b", "sxm", re.sub(r"[-_ ]+", " ", name.lower()))
    return re.sub(r"[^a-z0-9]", "", re.sub(NOISE, "", text))


def get_gpu(name: str) -> GpuSpec:
    """A built-in GPU by name (``H100``, ``h100-sxm`` and ``NVIDIA H100 80GB HBM3`` are one), or the path of a card's TOML."""
    if name in GPUS:
        return GPUS[name]
    if name.lower().endswith(".toml"):
        card = GpuSpec.from_toml(name)
        if card.name in GPUS and card != GPUS[card.name]:  # whose fit it would be given
            raise ConfigError(f"{name}: name = {card.name!r}: is a built-in card's, whose numbers are others: "
                              "give it another name")
        return card
    wanted = plain(name)
    known = {plain(said): gpu for gpu in GPUS.values() for said in (gpu.name, *gpu.aliases)}
    # A size of memory may stand anywhere, if it is the card's.
    size = re.search(r"\b([0-9]+) ?(gb|gib)\b", re.sub(r"[-_]", " ", name.lower()))
    for said in (wanted, wanted.replace(size[1] + size[2], "") if size else ""):
        gpu = known.get(said)
        if gpu is not None and (said == wanted or (size and round(gpu.mem_bytes / GIB) == int(size[1]))):
            return gpu
    import difflib

    close = dict.fromkeys(known[said].name for said in difflib.get_close_matches(wanted, known, 3, 0.6)) if wanted else ()
    near = f"did you mean {' or '.join(close)}? " if close else ""
    raise ConfigError(f"unknown gpu {name!r}: {near}choose one of {', '.join(GPUS)}, or give a card's data sheet as a .toml file")


def canonical(name: str) -> str:
    """The built-in name of what ``name`` means; a card's path, and what is unknown, stay as they are."""
    if name in GPUS or name.lower().endswith(".toml"):
        return name
    try:
        return get_gpu(name).name
    except ConfigError:
        return name
