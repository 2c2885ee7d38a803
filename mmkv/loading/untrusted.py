"""Files from strangers: pictures and JSON, bounded before they are read.

A picture's format is one that Pillow reads by itself (of others it starts programs, as Ghostscript
for EPS), and its header is believed only up to a number of pixels.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

T = TypeVar("T")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MOST_PIXELS = 50_000_000
MOST_BYTES = 64 * 2**20
_DECODING = threading.Lock()  # what is strict while a picture is read is the process's own


class PictureError(ValueError):
    """Why a file is no picture to us; the message does not name the file."""


def read_picture(
    path: str | os.PathLike[str] | bytes,
    read: Callable[[Image.Image], T],
    *,
    formats: tuple[str, ...] = FORMATS,
    most_pixels: int = MOST_PIXELS,
    most_bytes: int = MOST_BYTES,
) -> T:
    """What `read` makes of a picture that is open, but not decoded yet: its first frame.

    Args:
        path: a file, or what would be in one.
        read: gets the open picture; what it raises is a broken picture, a `PictureError`.
        formats: names of Pillow's.
        most_pixels: that a header may state.
        most_bytes: of the file.
    """
    if isinstance(path, bytes):
        source, size = BytesIO(path), len(path)
    else:
        source = Path(path)
        if not source.is_file():
            raise PictureError("not a file" if source.exists() else "no such file")
        size = source.stat().st_size
    if size > most_bytes:
        raise PictureError(f"larger than {most_bytes / 2**20:g} MiB")
    try:
        with _strictly(), Image.open(source, formats=formats) as picture:
            width, height = picture.size
            if width * height > most_pixels:
                millions = most_pixels // 10**6
                raise PictureError(f"{width} x {height} pixels, more than {millions} million")
            return read(picture)
    except UnidentifiedImageError:
        raise PictureError(f"not a picture in a known format ({', '.join(formats)})") from None
    except PictureError:
        raise
    except Exception as error:  # decoders meet broken files with errors of every type
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise PictureError(f"broken: {' '.join(why.split())}") from error


@contextmanager
def _strictly() -> Generator[None]:
    """Pillow refuses decompression bombs (up to twice its limit it only warns) and cut files."""
    with _DECODING, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        lenient = ImageFile.LOAD_TRUNCATED_IMAGES  # other packages turn it on, as lmms-eval
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = lenient


def upright(picture: Image.Image) -> Image.Image:
    """A picture as RGB, turned as its camera was."""
    return ImageOps.exif_transpose(picture).convert("RGB")


def read_json(path: str | os.PathLike[str], most_bytes: int) -> Any:
    """The content of a JSON file in UTF-8; errors do not name the file."""
    try:
        with Path(path).open("rb") as file:  # a device has no size to ask for
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise ValueError(f"has more than {most_bytes} bytes")
        return json.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except OSError as error:
        raise ValueError(str(error)) from error
