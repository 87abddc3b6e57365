"""Data parallelism whose exchanges hide behind backward and forward of neighbouring layers."""

from .apply import apply, data_parallel

__all__ = ["apply", "data_parallel"]
