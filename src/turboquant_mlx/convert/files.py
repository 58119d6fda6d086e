"""Everything of a converted folder besides its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..checkpoint.card import model_card
from ..checkpoint.schema import MODEL_FILE
from ..checkpoint.source import Folder
from ..checkpoint.stock import MODEL_FILE_TEXT
from ..errors import CheckpointError
from .options import ConvertOptions

if TYPE_CHECKING:
    from ..checkpoint.writer import FolderWriter
    from .report import ConvertReport

_COPY_BYTES = 16 * 2**20

MTP_FILE = "mtp.safetensors"
"""Not named model*.safetensors, so that no loader takes the head for a part of the model."""

# Taken over as they are. Processor settings of vision models stay behind with their weights.
_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*",
    "chat_template*",
    "generation_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)


def created_by() -> str:
    """Name and version of this package, as the manifest records it."""
    return f"turboquant-mlx-kit {__version__}"


def side_files(folder: Path) -> list[Path]:
    """Tokenizer, chat template, generation defaults, code and licence of the source."""
    found = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name != MODEL_FILE)


def write_side_files(
    writer: FolderWriter, folder: Folder, report: ConvertReport, options: ConvertOptions
) -> None:
    """Copy the source's small files; write the stock loaders' hook and the model card."""
    for path in side_files(folder.path):
        writer.add_copy(path)
    writer.add_bytes(MODEL_FILE, MODEL_FILE_TEXT.encode())
    card_file = folder.path / "README.md"
    source_card = card_file.read_text(errors="replace") if card_file.is_file() else None
    card = model_card(report=report.to_dict(), options=options.to_dict(), source_card=source_card)
    writer.add_bytes("README.md", card.encode(errors="replace"))


def declare_mtp(writer: FolderWriter, folder: Folder, names: list[str]) -> None:
    """Announce the tensors of a multi-token-prediction head, in a file of their own."""
    for name in names:
        info = folder.tensors[name]
        writer.declare(name, info.dtype, info.shape, file=MTP_FILE)


def copy_mtp(writer: FolderWriter, folder: Folder, names: list[str]) -> None:
    """Copy those tensors byte for byte."""
    for name in names:
        info, file = folder.tensors[name], folder.file_of[name]
        with file.open("rb") as source:
            source.seek(folder.headers[file].data_offset + info.start)
            left = info.nbytes
            while left:
                piece = source.read(min(left, _COPY_BYTES))
                if not piece:
                    raise CheckpointError(f"{file} ends within tensor {name}")
                writer.add_part(name, piece)
                left -= len(piece)
