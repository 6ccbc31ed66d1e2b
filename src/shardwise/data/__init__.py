"""From text files to training batches: read, tokenize, pack, load.

Importing this needs only NumPy; Grain is imported when a loader starts.
"""

from shardwise.data.loader import BatchLoader, RowDataset, num_steps_for
from shardwise.data.packing import PackedDataset
from shardwise.data.text import ReadResult, SkippedLine, read_documents
from shardwise.data.tokens import TokenStore, tokenize_documents

__all__ = [
    "BatchLoader",
    "PackedDataset",
    "ReadResult",
    "RowDataset",
    "SkippedLine",
    "TokenStore",
    "num_steps_for",
    "read_documents",
    "tokenize_documents",
]
