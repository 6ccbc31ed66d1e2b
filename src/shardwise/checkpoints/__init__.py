"""Reading and writing model files: safetensors and GGUF in, Hugging Face folders out.

Not here: what a tensor means to the model (`families`), and training checkpoints.
"""

from shardwise.checkpoints.hf_writer import write_hf_folder
from shardwise.checkpoints.reader import Checkpoint, TensorInfo, TensorReader, open_checkpoint
from shardwise.checkpoints.tokenizer import check_tokenizer_fits, load_tokenizer

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "TensorReader",
    "check_tokenizer_fits",
    "load_tokenizer",
    "open_checkpoint",
    "write_hf_folder",
]
