"""Read untrusted pictures and JSON files; their size is checked before they are read.

Pictures are read only in formats that Pillow decodes by itself: for others it starts programs, such
as Ghostscript for EPS. The number of pixels that a header may state is bounded.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

T = TypeVar("T")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MOST_PIXELS = 50_000_000
MOST_BYTES = 64 * 2**20
_DECODING = threading.Lock()  # Pillow's strictness is a setting of the process


class PictureError(ValueError):
    """Reason why a file is refused as a picture; the message does not name the file."""


def read_picture(
    path: str | os.PathLike[str],
    read: Callable[[Image.Image], T],
    *,
    most_pixels: int = MOST_PIXELS,
    most_bytes: int = MOST_BYTES,
) -> T:
    """Return the result of `read` for a picture's first frame, which is open but not decoded.

    Args:
        path: a file's path.
        read: gets the open picture; its errors are raised as a `PictureError`.
        most_pixels: bound on the pixels that a header states.
        most_bytes: bound on the size of the file.
    """
    source = Path(path)
    if not source.is_file():
        raise PictureError("not a file" if source.exists() else "no such file")
    if source.stat().st_size > most_bytes:
        raise PictureError(f"larger than {most_bytes / 2**20:g} MiB")
    try:
        with _strictly(), Image.open(source, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > most_pixels:
                raise PictureError(f"{width} x {height} pixels: {_too_many(most_pixels)}")
            return read(picture)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise PictureError(_too_many(most_pixels)) from None
    except UnidentifiedImageError:
        raise PictureError(f"not a picture in a known format ({', '.join(FORMATS)})") from None
    except PictureError:
        raise
    except Exception as error:  # decoders raise errors of every type
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise PictureError(f"broken: {' '.join(why.split())}") from error


def _too_many(most_pixels: int) -> str:
    return f"more than {most_pixels // 10**6} million pixels, so scale it down"


def read_named_picture(path: str | os.PathLike[str]) -> Image.Image:
    """Return a picture as RGB, upright; the message of an error names the file."""
    try:
        return read_picture(path, upright)
    except PictureError as error:
        raise ValueError(f"cannot read picture {os.fspath(path)!r}: {error}") from error


@contextmanager
def _strictly() -> Generator[None]:
    """Let Pillow refuse truncated files, and decompression bombs of which it only warns."""
    with _DECODING, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        lenient = ImageFile.LOAD_TRUNCATED_IMAGES  # other packages turn it on, as lmms-eval
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = lenient


def upright(picture: Image.Image) -> Image.Image:
    """Return a picture as RGB, rotated as its EXIF orientation says, on white if transparent."""
    if not picture.has_transparency_data:
        return _eight_bits(picture).convert("RGB")
    found = upright_rgba(picture)
    return Image.alpha_composite(Image.new("RGBA", found.size, "white"), found).convert("RGB")


def upright_rgba(picture: Image.Image) -> Image.Image:
    """Return a picture as RGBA, rotated as its EXIF orientation says."""
    return _eight_bits(picture).convert("RGBA")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Return a picture upright; of 16 bits a pixel its upper 8, as Pillow cuts values off at 255.

    Raises:
        PictureError: it has 32 bits a channel, of which the largest value is not known.
    """
    turned = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        return turned.point(lambda x: x / 256).convert("L")
    if picture.mode in ("I", "F"):
        raise PictureError("32 bits a channel: save it with 8 or 16")
    return turned


def read_json(path: str | os.PathLike[str], most_bytes: int) -> Any:
    """Return the content of a JSON file in UTF-8; errors do not name the file."""
    try:
        with Path(path).open("rb") as file:  # a device has no known size
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise ValueError(f"has more than {most_bytes} bytes")
        return json.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except OSError as error:
        raise ValueError(str(error)) from error
