from .memory_records import MemoryRecords

__all__ = ["MemoryRecords"]
