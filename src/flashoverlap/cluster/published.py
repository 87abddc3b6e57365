"""Devices and links as their vendors publish them, and what is assumed where no data sheet says it.

A published figure is a ceiling, and what software reaches of it is an assumption: it stands in :class:`Assumed` and
nowhere else, and whoever prints an estimate prints it. A calibrated machine needs none of them.

All bandwidths are bytes a second in one direction. Vendors mostly print both directions together: NVLink 4 as 900 GB/s,
PCIe Gen4 x16 as 64 GB/s. Arithmetic is dense, in matrix units, accumulated in float32; vendors mostly print it with
sparsity, which is twice as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_T, _G = 1e12, 1e9
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Assumed:
    """What no data sheet says.

    Args:
        matmul: share of the published arithmetic that large matrix multiplications reach, and fused attention too.
        memory: share of the published memory bandwidth that element-wise kernels reach.
        wire: share of a link's bandwidth that one point-to-point transfer reaches, and the backend's collectives too.
        latency_s: from posting a transfer inside a node until its first byte is there, software included.
        uplink_latency_s: the same between nodes.
        kernel_s: what a kernel takes besides its work, to start and to drain.
        issue_s: what issuing an operation costs the program, where the device waits for it: little where the host runs
            ahead of the device.
        contention: share by which kernels slow down while the wire is busy.
    """

    matmul: float = 0.7
    memory: float = 0.8
    wire: float = 0.8
    latency_s: float = 8e-6
    uplink_latency_s: float = 15e-6
    kernel_s: float = 3e-6
    issue_s: float = 1e-6
    contention: float = 0.05


@dataclass(frozen=True)
class Published:
    """One rank of a usual machine.

    Args:
        name: as ``--machine`` takes it.
        source: the vendor's documents that the figures are from.
        flops_per_s: peak by dtype.
        memory_bytes: of one rank.
        memory_bytes_per_s: peak.
        link_bytes_per_s: to one other rank of the same node.
        links: transfers of a rank that may run at once, each at ``link_bytes_per_s``: 1 behind a switch, one for each
            neighbour in a full mesh.
        node_ranks: ranks of a node.
        uplink_bytes_per_s: a rank's share of what leaves the node.
    """

    name: str
    source: str
    flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    node_ranks: int
    uplink_bytes_per_s: float
    links: int = 1
    assumed: Assumed = field(default_factory=Assumed)


_H100 = Published(
    "h100-nvlink",
    "NVIDIA H100 Tensor Core GPU data sheet (SXM: 1,979 TFLOPS bfloat16 with sparsity, 80 GB, 3.35 TB/s, NVLink"
    " 900 GB/s); NVIDIA DGX H100 data sheet (8 GPUs, a 400 Gb/s ConnectX-7 port for each)",
    {"bfloat16": 989.5 * _T, "float16": 989.5 * _T, "float32": 67 * _T},
    80 * _G,
    3.35 * _T,
    450 * _G,
    8,
    400 * _GBIT,
)
_H200 = replace(
    _H100,
    name="h200-nvlink",
    source="NVIDIA H200 Tensor Core GPU data sheet (SXM: arithmetic of the H100, 141 GB, 4.8 TB/s, NVLink 900 GB/s);"
    " NVIDIA DGX H200 data sheet (8 GPUs, a 400 Gb/s ConnectX-7 port for each)",
    memory_bytes=141 * _G,
    memory_bytes_per_s=4.8 * _T,
)
_A100 = Published(
    "a100-nvlink",
    "NVIDIA A100 Tensor Core GPU data sheet (80GB SXM: 312 TFLOPS bfloat16, 19.5 TFLOPS float32, 2,039 GB/s, NVLink"
    " 600 GB/s); NVIDIA DGX A100 data sheet (8 GPUs, a 200 Gb/s ConnectX-6 port for each)",
    {"bfloat16": 312 * _T, "float16": 312 * _T, "float32": 19.5 * _T},
    80 * _G,
    2.039 * _T,
    300 * _G,
    8,
    200 * _GBIT,
    assumed=Assumed(matmul=0.8),
)
_A100_PCIE = replace(
    _A100,
    name="a100-pcie",
    source="NVIDIA A100 Tensor Core GPU data sheet (80GB PCIe: 312 TFLOPS bfloat16, 1,935 GB/s, PCIe Gen4 64 GB/s);"
    " assumed: 8 in a box with one 200 Gb/s port",
    memory_bytes_per_s=1.935 * _T,
    link_bytes_per_s=32 * _G,
    uplink_bytes_per_s=200 * _GBIT / 8,
    assumed=Assumed(matmul=0.7, wire=0.7, latency_s=12e-6),
)
_MI300X = Published(
    "mi300x",
    "AMD Instinct MI300X data sheet (1,307.4 TFLOPS bfloat16, 163.4 TFLOPS float32, 192 GB, 5.3 TB/s) and MI300X"
    " platform data sheet (8 in a full mesh of 7 Infinity Fabric links, 128 GB/s each in both directions);"
    " assumed: a 400 Gb/s port for each",
    {"bfloat16": 1307.4 * _T, "float16": 1307.4 * _T, "float32": 163.4 * _T},
    192 * _G,
    5.3 * _T,
    64 * _G,
    8,
    400 * _GBIT,
    links=7,
    assumed=Assumed(matmul=0.5, wire=0.75, latency_s=10e-6),
)
_ASCEND = Published(
    "ascend-910b",
    "Huawei Atlas 800T A2 training server, technical specifications (8 NPUs, 2.5 PFLOPS float16 together, 64 GB HBM"
    " each, a 200 GE port for each) and its user guide (a full mesh of HCCS links, 56 GB/s each in both directions);"
    " memory bandwidth of 1.6 TB/s as commonly reported",
    {"bfloat16": 312.5 * _T, "float16": 312.5 * _T},
    64 * _G,
    1.6 * _T,
    28 * _G,
    8,
    200 * _GBIT,
    links=7,
    assumed=Assumed(latency_s=15e-6, uplink_latency_s=25e-6, issue_s=6e-6, contention=0.0),
)
_L40S = Published(
    "l40s-pcie",
    "NVIDIA L40S data sheet (362.05 TFLOPS bfloat16, 91.6 TFLOPS float32, 48 GB, 864 GB/s, PCIe Gen4 x16 64 GB/s);"
    " assumed: 8 in a box with one 200 Gb/s port",
    {"bfloat16": 362.05 * _T, "float16": 362.05 * _T, "float32": 91.6 * _T},
    48 * _G,
    0.864 * _T,
    32 * _G,
    8,
    200 * _GBIT / 8,
    assumed=Assumed(matmul=0.6, wire=0.7, latency_s=12e-6),
)
_RTX_4090 = Published(
    "rtx4090-pcie",
    "NVIDIA Ada GPU architecture white paper (GeForce RTX 4090: 165.2 TFLOPS bfloat16 accumulated in float32,"
    " 82.6 TFLOPS float32, 24 GB, 1,008 GB/s, PCIe Gen4 x16, no peer-to-peer); assumed: 8 in a box, one 100 Gb/s port",
    {"bfloat16": 165.2 * _T, "float16": 165.2 * _T, "float32": 82.6 * _T},
    24 * _G,
    1.008 * _T,
    32 * _G,
    8,
    100 * _GBIT / 8,
    assumed=Assumed(matmul=0.85, wire=0.4, latency_s=20e-6),  # every transfer goes through the host's memory
)
# 56 cores a socket at the base clock of 2.0 GHz: AMX does 1,024 bfloat16 operations a cycle, AVX-512 64 in float32
_XEON = Published(
    "cpu-100gbe",
    "Intel Xeon Platinum 8480+ product specifications (2 sockets of 56 cores, 2.0 GHz, 8 channels of DDR5-4800 each)"
    " and Intel Architecture Optimization Reference Manual (AMX, AVX-512); assumed: a rank is a box of 512 GB",
    {"bfloat16": 2 * 56 * 2.0e9 * 1024, "float32": 2 * 56 * 2.0e9 * 64},
    512 * _G,
    2 * 0.3072 * _T,
    100 * _GBIT,
    1,
    100 * _GBIT,
    assumed=Assumed(matmul=0.5, wire=0.9, latency_s=50e-6, uplink_latency_s=50e-6, issue_s=10e-6, contention=0.1),
)


def _over_ethernet(gbit: int) -> Published:
    rate = gbit * _GBIT
    return replace(_XEON, name=f"cpu-{gbit}gbe", link_bytes_per_s=rate, uplink_bytes_per_s=rate)


def _over_infiniband(published: Published, name: str) -> Published:
    """One rank a node, so that all that moves takes the InfiniBand port."""
    return replace(published, name=name, node_ranks=1, source=f"{published.source}; one GPU of each node")


PUBLISHED: Mapping[str, Published] = {
    entry.name: entry
    for entry in (
        _H100,
        _over_infiniband(_H100, "h100-ib"),
        _H200,
        _over_infiniband(_H200, "h200-ib"),
        _A100,
        _A100_PCIE,
        _MI300X,
        _ASCEND,
        _L40S,
        _RTX_4090,
        *map(_over_ethernet, (10, 25, 100, 400)),
    )
}
