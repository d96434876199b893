"""Reads the pictures that a user gives: files, bytes, URLs, arrays and PIL's images. Each becomes PIL's image in RGB.

A picture is read as a viewer would show it on a white page: turned as its EXIF data say, transparency laid on white, 16
bits of grey scaled to 8, the first frame of several. A picture that cannot be read raises a RequestError of kind
"invalid_image".
"""

import base64
import binascii
import io
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib import request
from urllib.parse import SplitResult, unquote_to_bytes, urljoin, urlsplit

import numpy as np

from nanoinfer.errors import ConfigError, RequestError
from nanoinfer.outputs import shown

# The formats that Pillow decodes itself. Others would start programs, such as Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "MPO", "PPM", "TGA", "ICO")
EXIF_ORIENTATION = 0x0112
TURNED_UP = 1  # what EXIF says of a picture that is not turned
SOCKET_SECONDS = 10.0  # how long a host may send nothing
DOWNLOAD_SECONDS = 60.0
MAX_DOWNLOAD = 100 * 2**20  # bytes
MAX_REDIRECTS = 5
CHUNK = 2**16  # bytes
LONGEST_PATH = 4096  # characters
FOR_BASE64 = "give base64 as 'data:image/png;base64,...', say"
_loading = threading.Lock()  # held while PIL reads the file of a user's own image


class FoundPicture(NamedTuple):
    """Holds the bytes by which equal pictures are recognised, and decodes a file only when the picture is needed.

    load: returns PIL's image in RGB whenever it is called, or raises RequestError. content: the bytes of the file, or
    of the pixels of a picture in memory. size: (width, height) of a picture in memory; None for a file.
    """

    load: Callable[[], Any]
    content: bytes
    size: tuple[int, int] | None = None


class MediaRules(NamedTuple):
    """Says where pictures may come from. domains: hosts. folder: where files must lie; None for any place."""

    domains: tuple[str, ...] = ()
    folder: str | None = None


def check_pillow() -> None:
    """Raise ConfigError where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            "limit_mm_per_prompt lets prompts have images, which Pillow reads, and it is not installed; "
            "use pip install 'nanoinfer[images]'"
        ) from None


def find_picture(source: Any, rules: MediaRules) -> FoundPicture:
    """Return a picture; a file is not decoded yet. Raises RequestError if it may not be read, or is no picture.

    source: a path, a URL (data:, file:, http:, https:), the bytes of a file, an array of pixels, or PIL's image; or
    {"bytes": ..., "path": ...}, of which one is None, as `datasets` has images in its files.
    """
    from PIL import Image

    if isinstance(source, Mapping) and {*source} == {"bytes", "path"}:
        source = source["path"] if source["bytes"] is None else source["bytes"]
    if isinstance(source, io.BytesIO):
        source = source.getvalue()
    if isinstance(source, Image.Image):
        return _in_memory(_checked(lambda: _as_rgb(_loaded(source)), "the image"))
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _found(io.BytesIO(source), f"the image of {len(source)} bytes")
    if isinstance(source, str) and not source:
        raise _invalid("the image is an empty text; give a path, or a URL")
    if isinstance(source, str) and "://" not in source[:10] and not source.startswith(("data:", "file:")):
        if len(source) > LONGEST_PATH:
            raise _invalid(f"the image is a text of {len(source)} characters, too long for a path; {FOR_BASE64}")
        source = Path(source)
    if isinstance(source, os.PathLike):
        return _read_file(Path(source), rules)
    if isinstance(source, str):
        return _read_url(source, rules)
    if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
        return _in_memory(_from_array(source))
    raise _invalid(
        f"the image is of type {type(source).__name__}; give a path, a URL, the bytes of a file, an array or PIL's"
    )


def _in_memory(image: Any) -> FoundPicture:
    return FoundPicture(lambda: image, image.tobytes(), image.size)


def _invalid(message: str) -> RequestError:
    return RequestError(message, "invalid_image")


def _read_file(path: Path, rules: MediaRules) -> FoundPicture:
    what = f"the image file {str(path)!r:.300}"
    try:
        real = path.resolve()
        if rules.folder is not None and not real.is_relative_to(Path(rules.folder).resolve()):
            raise _invalid(f"{what} is not in allowed_local_media_path={rules.folder!r}; move it there")
        if not stat.S_ISREG(real.stat().st_mode):
            raise _invalid(f"{what} is a folder or a device; name a file")
        with real.open("rb") as file:
            return _found(file, what)
    except FileNotFoundError:
        raise _invalid(f"{what} is not there; check the path") from None
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte; RuntimeError: links in a circle
        if isinstance(error, RequestError):
            raise
        reason = getattr(error, "strerror", None) or error  # a system's own message has the whole path
        raise _invalid(f"{what} cannot be read ({reason}); check the path, or {FOR_BASE64}") from error


def _read_url(url: str, rules: MediaRules) -> FoundPicture:
    what = f"the image URL {shown(url)}"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _invalid(f"{what} is no URL ({error}); check it") from None
    scheme = parts.scheme.lower()
    if scheme == "data":
        return _found(io.BytesIO(_data_of(url, what)), what)
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise _invalid(f"{what} is a file of another host; give file:///path, or a path")
        return _read_file(Path(request.url2pathname(parts.path)), rules)
    if scheme in ("http", "https"):
        return _found(io.BytesIO(_download(url, rules, what)), what)
    raise _invalid(f"{what} begins with {scheme}:; give data:, file:, http: or https:, or a path")


def _data_of(url: str, what: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise _invalid(f"{what} has no comma before its data; give data:image/png;base64,...")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return decode_base64(data)
    except ValueError as error:
        raise _invalid(f"{what} has data that are no base64 ({error}); encode the bytes of the file") from None


def decode_base64(text: str) -> bytes:
    """Return the bytes of a text in base64, of either alphabet, with or without padding. Raises ValueError."""
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _download(url: str, rules: MediaRules, what: str) -> bytes:
    """Return the bytes at a URL. Its host, and every host that it redirects to, must be an allowed one."""
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        _check_host(urlsplit(url), rules, what)
        try:
            with _opener().open(
                request.Request(url, headers={"User-Agent": "nanoinfer"}), timeout=SOCKET_SECONDS
            ) as response:
                location = response.headers.get("Location")
                if response.status in (301, 302, 303, 307, 308) and location:
                    url = urljoin(url, location)
                    continue
                if response.status != 200:
                    raise _invalid(f"{what} is answered by status {response.status} {response.reason}; check it")
                return _read_within(response, deadline, what)
        except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
            if isinstance(error, RequestError):
                raise
            raise _invalid(f"{what} cannot be downloaded ({error}); check it, or download it beforehand") from error
    raise _invalid(f"{what} is redirected more than {MAX_REDIRECTS} times; give the last URL")


def _read_within(response: Any, deadline: float, what: str) -> bytes:
    """Read an answer, with bounds of time and of size."""
    content = bytearray()
    while chunk := response.read1(CHUNK):
        content += chunk
        if len(content) > MAX_DOWNLOAD:
            raise _invalid(f"{what} has more than {MAX_DOWNLOAD // 2**20} MiB; give a smaller picture")
        if time.monotonic() > deadline:
            raise _invalid(f"{what} takes more than {DOWNLOAD_SECONDS:.0f} s; download it beforehand")
    return bytes(content)


def _check_host(parts: SplitResult, rules: MediaRules, what: str) -> None:
    host = (parts.hostname or "").lower()
    if parts.scheme not in ("http", "https"):
        raise _invalid(f"{what} leads to a {parts.scheme}: URL; give http: or https:")
    if host not in rules.domains:
        raise _invalid(
            f"{what} is on {host!r}, a host that allowed_media_domains={[*rules.domains]!r} does not name; add it to "
            "that option of LLM, or download the image beforehand"
        )


class _AnyStatus(request.HTTPErrorProcessor):
    """Hands over every answer: `_download` follows redirects itself, and looks at each host."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _opener() -> request.OpenerDirector:
    opener = request.OpenerDirector()  # not build_opener, whose result opens file: and ftp: too
    for handler in (request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, _AnyStatus):
        opener.add_handler(handler())
    return opener


def _found(file: BinaryIO, what: str) -> FoundPicture:
    """Return the picture in an open file. The head is checked before the rest is read, which may be large."""
    with _opened(file, what):
        pass
    file.seek(0)
    content = file.read()
    return FoundPicture(partial(_decode, content, what), content)


def _decode(content: bytes, what: str) -> Any:
    with _opened(io.BytesIO(content), what) as image:
        return _checked(lambda: _as_rgb(image), what)


@contextmanager
def _opened(file: BinaryIO, what: str) -> Iterator[Any]:
    """Yield PIL's image of a file, not decoded. Raises RequestError if it is broken, too large, or no picture."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    too_large = (
        f"{what} has more than PIL.Image.MAX_IMAGE_PIXELS={Image.MAX_IMAGE_PIXELS} pixels; give a smaller picture, or "
        "raise that number"
    )
    try:
        with Image.open(file, formats=formats) as image:
            if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise _invalid(f"{too_large} (it is {image.width} x {image.height})")
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _invalid(f"{too_large} ({error})") from None
    except UnidentifiedImageError:
        raise _invalid(f"{what} is no picture in a known format; known are {', '.join(formats)}") from None
    except RequestError:
        raise
    except Exception as error:
        raise _invalid(f"{what} is broken ({error}); make it anew") from error


def _checked(load: Any, what: str) -> Any:
    """Return what `load` returns, with Pillow's errors as ours."""
    try:
        image = load()
    except RequestError:
        raise
    except Exception as error:  # of all kinds, from decoders of many formats
        raise _invalid(f"{what} is broken ({error}); make it anew") from error
    if not (image.width and image.height):
        raise _invalid(f"{what} is {image.width} x {image.height} pixels; give at least 1 x 1")
    return image


def _loaded(image: Any) -> Any:
    """Have PIL read the file of an image, which a user may have given for several prompts and so to several threads."""
    with _loading:
        image.load()
        image.getexif()
    return image


def _as_rgb(image: Any) -> Any:
    """Return a picture in RGB as a viewer would show it on white."""
    from PIL import Image, ImageOps

    if image.getexif().get(EXIF_ORIENTATION, TURNED_UP) != TURNED_UP:
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        return Image.fromarray(_to_8_bits(np.asarray(image).astype(np.int64))).convert("RGB")
    if image.mode == "F":
        raise _invalid("the image is of floats, whose range is not known; give an array of floats from 0 to 1")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        on_white = Image.new("RGB", image.size, (255, 255, 255))
        on_white.paste(image, mask=image.getchannel("A"))
        return on_white
    return image.convert("RGB")


def _to_8_bits(values: Any) -> Any:
    """Scale whole numbers of 16 bits to 8. Raises RequestError for larger ones."""
    if values.size and (values.min() < 0 or values.max() > 0xFFFF):
        raise _invalid(f"the image has values from {values.min()} to {values.max()}; give 8 or 16 bits")
    return ((values + 128) // 257).astype(np.uint8)


def _from_array(source: Any) -> Any:
    """Return the picture of an array: (height, width), or with 1, 3 or 4 channels first or last."""
    from PIL import Image

    if hasattr(source, "detach"):  # a tensor of PyTorch
        source = source.detach().cpu()
    try:
        pixels = np.asarray(source)
    except Exception as error:
        raise _invalid(f"the image is an array that NumPy cannot read ({error}); give one of NumPy") from error
    shape = pixels.shape
    if pixels.ndim == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))) or 0 in shape:
        raise _invalid(f"the image is an array of shape {shape}; give (height, width, 3), say")
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * 255
    elif np.issubdtype(pixels.dtype, np.floating):
        lowest, highest = pixels.min(), pixels.max()
        if not (lowest >= 0 and highest <= 1):
            raise _invalid(f"the image is of floats from {lowest} to {highest}; give floats from 0 to 1, or uint8")
        pixels = np.rint(pixels.astype(np.float32) * 255).astype(np.uint8)
    elif pixels.dtype == np.uint16:
        pixels = _to_8_bits(pixels.astype(np.int64))
    elif pixels.dtype != np.uint8:
        raise _invalid(f"the image is an array of {pixels.dtype}; give uint8, uint16, or floats from 0 to 1")
    pixels = np.ascontiguousarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    return _as_rgb(Image.fromarray(pixels))


def as_rules(domains: Sequence[str] | None, folder: str | None) -> MediaRules:
    """Return the rules that options of LLM give. Raises ConfigError if there is no such folder."""
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"allowed_local_media_path={folder!r} is no folder; name one that exists")
    return MediaRules(tuple(domains or ()), folder)
