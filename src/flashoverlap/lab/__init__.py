"""A network lab on one Linux machine: ranks in network namespaces of their own, behind rate-limited links."""

from flashoverlap.lab.error import LabError
from flashoverlap.lab.lab import Lab, LabResult, lab_unavailable, run_command
from flashoverlap.lab.link import Link

__all__ = ["Lab", "LabError", "LabResult", "Link", "lab_unavailable", "run_command"]
