"""Pictures from strangers: broken, bombs, programs and devices are refused by name."""

import io
import os
import pickle
import random
import re
import struct
import subprocess
import urllib.error
import urllib.request
import warnings
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from helpers.marks import cases
from helpers.memory import bounded
from mmkv.eval import samples
from mmkv.loading import untrusted


def chunk(kind: bytes, data: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + crc


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def saved(kind: str, **options) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((24, 16), 50).convert("RGB").save(file, kind, **options)
    return file.getvalue()


def text_bomb() -> bytes:
    packed = zlib.compress(bytes(64 * 2**20), 9)
    return png(4, 4, chunk(b"zTXt", b"k\0\0" + packed), chunk(b"IDAT", zlib.compress(bytes(52))))


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><script>x</script></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ran) (w) file closefile showpage\n%%EOF\n"
PICTURES = {
    "wide.png": png(30_000, 30_000, chunk(b"IDAT", zlib.compress(b"\0"))),
    "huge.png": png(2**31 - 1, 2**31 - 1),
    "wide.bmp": saved("BMP")[:18] + struct.pack("<ii", 30_000, 30_000) + saved("BMP")[26:],
    "wide.gif": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\x80\0\0" + bytes(20),
    "text.png": text_bomb(),
    "cut.png": saved("PNG")[:-40],
    "cut.jpg": saved("JPEG")[:200],
    "cut.webp": saved("WEBP")[:60],
    "empty.png": b"",
    "drawn.svg": SVG,
    "drawn.png": SVG,
    "program.eps": EPS,
    "program.png": EPS,
    "weights.png": pickle.dumps({"a": 1}),
}


def upload(path):
    pytest.importorskip("rouge_score")
    from mmkv.demo.conversation import read_upload

    return read_upload(path)


READERS = {"chat": untrusted.read_named_picture, "eval": samples.read_image, "demo": upload}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", PICTURES)
def test_invalid_picture_raises(tmp_path, monkeypatch, name, reader):
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)  # no other program sees it
    path = tmp_path / name
    path.write_bytes(PICTURES[name])
    with bounded(), pytest.raises(ValueError, match=re.escape(name)) as caught:
        READERS[reader](path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("reader", READERS)
def test_cut_picture_raises_despite_lenient_pillow(tmp_path, monkeypatch, reader):
    """lmms-eval turns Pillow's switch on for its whole process: it stays on, but not for ours."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = tmp_path / "cut.png"
    path.write_bytes(PICTURES["cut.png"])
    with pytest.raises(ValueError, match=r"cut\.png"):
        READERS[reader](path)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


@cases("reader", READERS, next(iter(READERS)))
def test_pictures_with_flipped_bytes(tmp_path, reader):
    """Broken anywhere, a file is a picture or a ValueError."""
    rng, refused = random.Random(0), 0
    info = PngImagePlugin.PngInfo()
    info.add_text("k", "text")
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "text"
    whole = [
        saved("PNG", pnginfo=info, exif=exif),
        *(saved(kind, exif=exif) for kind in ("JPEG", "WEBP", "TIFF")),
        saved("GIF", save_all=True, append_images=[Image.new("RGB", (24, 16), "red")] * 3),
        saved("BMP"),
    ]
    for _ in range(50):
        for raw in whole:
            data = bytearray(raw)
            for _ in range(rng.randrange(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path = tmp_path / "flipped.png"
            path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
            with suppress(ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                refused += 1
                assert READERS[reader](path).mode == "RGB"
                refused -= 1
    assert 30 < refused < 300


@pytest.mark.parametrize("reader", READERS)
def test_animation_decodes_one_frame(tmp_path, reader):
    frames = [Image.new("P", (64, 64), i % 256) for i in range(500)]
    frames[0].save(tmp_path / "long.gif", save_all=True, append_images=frames[1:], duration=1)
    with bounded():
        assert READERS[reader](tmp_path / "long.gif").size == (64, 64)


@pytest.mark.parametrize("reader", READERS)
def test_picture_of_16_bits_keeps_its_shades(tmp_path, reader):
    shades = np.arange(64 * 64).reshape(64, 64) % 251
    Image.fromarray((shades * 257).astype(np.uint16)).save(tmp_path / "deep.png")
    read = np.asarray(READERS[reader](tmp_path / "deep.png"))
    assert np.array_equal(read, np.repeat(shades[..., None], 3, axis=2))
    Image.fromarray(shades.astype(np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(ValueError, match="32 bits a channel: save it with 8 or 16"):
        READERS[reader](tmp_path / "float.tiff")


@pytest.mark.parametrize("reader", READERS)
def test_picture_is_upright_and_opaque(tmp_path, reader):
    """Its left half is transparent, and lies at the bottom once it is turned as EXIF says."""
    picture, exif = Image.new("RGBA", (20, 10)), Image.Exif()
    picture.paste((0, 0, 0, 255), (10, 0, 20, 10))
    exif[0x0112] = 8
    picture.save(tmp_path / "half.png", exif=exif)
    read = READERS[reader](tmp_path / "half.png")
    assert read.size == (10, 20)
    assert read.getpixel((5, 2)) == (0, 0, 0)
    ground = (180, 180, 180) if reader == "demo" else (255, 255, 255)
    assert read.getpixel((5, 17)) == ground


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("side", [8_000, 11_000, 20_000])  # Pillow warns of one, and refuses one
def test_picture_of_too_many_pixels_is_refused_with_the_bound(tmp_path, reader, side):
    Image.new("1", (side, side)).save(tmp_path / "huge.png")
    bound = "40" if reader == "demo" else "50"
    with pytest.raises(ValueError, match=f"more than {bound} million pixels, so scale it down"):
        READERS[reader](tmp_path / "huge.png")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/proc/self/mem", "missing.png"])
def test_path_without_file_raises(reader, path):
    with bounded(), pytest.raises(ValueError, match=re.escape(Path(path).name)):
        READERS[reader](path)


def test_oversized_upload_raises(tmp_path):
    """More than 20 MiB: refused by its size, before it is opened."""
    pytest.importorskip("rouge_score")
    from mmkv.demo import conversation

    path = tmp_path / "large.bmp"
    Image.new("RGB", (2700, 2600)).save(path)
    assert 20 * 2**20 < path.stat().st_size < 21 * 2**20
    with pytest.raises(ValueError, match=r"'large\.bmp'.*larger than 20 MiB"):
        conversation.read_upload(path)
    Image.new("RGB", (2600, 2600)).save(path)  # 19.3 MiB
    assert conversation.read_upload(path).size == (1024, 1024)


@pytest.mark.slow
def test_server_refuses_oversized_upload():
    """It stops reading there: nothing of it reaches the page or stays on the disk."""
    pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'mmkv[demo]'")
    from mmkv.demo.server import serving

    def posted(size: int) -> int:
        start = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        body = start + bytes(size) + b"\r\n--x--\r\n"
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        request = urllib.request.Request(address + "gradio_api/upload", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    with serving(port=None, device="cpu") as address:
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        assert posted(19 * 2**20) == 200
        there = sorted(folder.rglob("a.png"))
        assert len(there) == 1
        assert posted(21 * 2**20) == 413
        assert sorted(folder.rglob("a.png")) == there
    assert not folder.exists()
