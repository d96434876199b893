"""Pictures from what a user gives: what they look like in RGB, and what is said of those that cannot be read."""

import base64
import http.server
import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoinfer.errors import ConfigError, RequestError
from nanoinfer.images import sources
from nanoinfer.images.sources import MediaRules, as_rules, find_picture
from tests.images.processors import picture

Image = pytest.importorskip("PIL.Image")

ANYWHERE = MediaRules()
RED = (255, 0, 0)


def png(image: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def pixels(source: Any, rules: MediaRules = ANYWHERE) -> np.ndarray:
    image = find_picture(source, rules).load()
    assert image.mode == "RGB"
    return np.asarray(image)


def complaint(source: Any, rules: MediaRules = ANYWHERE) -> str:
    with pytest.raises(RequestError) as error:
        find_picture(source, rules).load()
    assert error.value.kind == "invalid_image"
    return str(error.value)


def test_all_forms_of_a_picture_give_the_same_pixels(tmp_path: Path) -> None:
    image = picture(5, 4)
    content, meant = png(image), np.asarray(image)
    path = tmp_path / "a picture.png"
    path.write_bytes(content)
    in_base64 = base64.b64encode(content).decode()
    forms = [image, content, bytearray(content), path, str(path), path.as_uri(), meant, torch.from_numpy(meant.copy())]
    forms += [f"data:image/png;base64,{in_base64}", f"data:;base64,{in_base64.rstrip('=')}"]
    forms += [meant.transpose(2, 0, 1), meant.astype(np.float64) / 255, meant.astype(np.uint16) * 257]
    for form in forms:
        assert (pixels(form) == meant).all(), type(form)


def test_one_image_of_the_user_is_read_by_several_threads(tmp_path: Path) -> None:
    picture(300, 300).save(tmp_path / "a.png")
    meant = pixels(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image, ThreadPoolExecutor(8) as threads:
        assert all((found == meant).all() for found in threads.map(pixels, [image] * 16))


def test_a_picture_of_the_user_is_left_as_it_is() -> None:
    image = Image.new("RGBA", (2, 2), (*RED, 128))
    find_picture(image, ANYWHERE).load()
    assert image.mode == "RGBA"
    assert image.getpixel((0, 0)) == (*RED, 128)


@pytest.mark.parametrize(
    ("image", "meant"),
    [
        (Image.new("RGBA", (1, 1), (*RED, 0)), (255, 255, 255)),
        (Image.new("RGBA", (1, 1), (*RED, 255)), RED),
        (Image.new("RGBA", (1, 1), (0, 0, 0, 51)), (204, 204, 204)),
        (Image.new("LA", (1, 1), (0, 0)), (255, 255, 255)),
        (Image.new("L", (1, 1), 7), (7, 7, 7)),
        (Image.new("1", (1, 1), 1), (255, 255, 255)),
        (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), RED),
        (Image.new("I;16", (1, 1), 257 * 9), (9, 9, 9)),
        (Image.new("I", (1, 1), 65535), (255, 255, 255)),
    ],
)
def test_modes_look_in_rgb_as_on_a_white_page(image: Any, meant: tuple[int, int, int]) -> None:
    assert tuple(pixels(image)[0, 0]) == meant


def test_a_palette_has_its_colours_and_its_transparent_one_is_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, 0, 255, 0])
    image.putpixel((1, 0), 1)
    assert pixels(png(image)).tolist() == [[[*RED], [0, 255, 0]]]
    assert pixels(png(image, transparency=1)).tolist() == [[[*RED], [255, 255, 255]]]


def test_grey_of_16_bits_in_a_file_is_scaled() -> None:
    grey = np.array([[0, 257 * 100, 65535]], np.uint16)
    assert pixels(png(Image.fromarray(grey)))[0, :, 0].tolist() == [0, 100, 255]


def test_a_picture_is_turned_as_its_exif_data_say() -> None:
    image = Image.new("RGB", (3, 2))
    exif = image.getexif()
    exif[sources.EXIF_ORIENTATION] = 6
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    assert pixels(file.getvalue()).shape == (3, 2, 3)


def test_what_a_table_of_datasets_has_is_a_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(picture(3, 2)))
    for source in (
        {"bytes": png(picture(3, 2)), "path": "elsewhere.png"},
        {"bytes": None, "path": str(tmp_path / "a.png")},
        io.BytesIO(png(picture(3, 2))),
    ):
        assert (pixels(source) == np.asarray(picture(3, 2))).all()


def test_a_long_text_that_is_no_path_is_not_shown_whole() -> None:
    said = complaint("iVBORw0KGgo" * 99)
    assert said.endswith(
        "cannot be read (File name too long); check the path, or give base64 as 'data:image/png;base64,...', say"
    )
    assert len(said) < 500


def test_of_several_frames_the_first_counts() -> None:
    file = io.BytesIO()
    Image.new("RGB", (1, 1), RED).save(file, "GIF", save_all=True, append_images=[Image.new("RGB", (1, 1))])
    assert tuple(pixels(file.getvalue())[0, 0]) == RED


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"hello", "the image of 5 bytes is no picture in a known format; known are JPEG, PNG"),
        (png(picture(20, 20))[:200], "the image of 200 bytes is broken (image file is truncated"),
        ("", "the image is an empty text; give a path, or a URL"),
        ("/no/such.png", "the image file '/no/such.png' is not there; check the path"),
        (Path("/"), "the image file '/' is a folder or a device; name a file"),
        ("a\0b", "the image file 'a\\x00b' cannot be read (embedded null byte"),
        ("iVBORw0KGgo" * 99, "the image file 'iVBORw0KGgoiVBOR"),
        (
            "iVBORw0KGgo" * 999,
            "the image is a text of 10989 characters, too long for a path; give base64 as 'data:image/",
        ),
        ({"bytes": None, "path": "/no.png"}, "the image file '/no.png' is not there"),
        ({"bytes": None, "path": None}, "the image is of type NoneType"),
        ({"url": "a.png"}, "the image is of type dict; give a path"),
        ("data:nothing", "the image URL 'data:nothing' has no comma before its data"),
        ("data:;base64,!", "the image URL 'data:;base64,!' has data that are no base64"),
        ("ftp://a.org/b", "the image URL 'ftp://a.org/b' begins with ftp:; give data:, file:, http: or https:"),
        ("file://a.org/b", "the image URL 'file://a.org/b' is a file of another host"),
        ("https://a.org/b", "the image URL 'https://a.org/b' is on 'a.org', a host that allowed_media_domains=[] does"),
        (7, "the image is of type int; give a path, a URL, the bytes of a file, an array or PIL's"),
        (np.zeros((2, 2, 2), np.uint8), "the image is an array of shape (2, 2, 2); give (height, width, 3)"),
        (np.zeros((2, 2), np.int64), "the image is an array of int64; give uint8, uint16, or floats from 0 to 1"),
        (np.full((2, 2), 7.0), "the image is of floats from 7.0 to 7.0; give floats from 0 to 1"),
        (np.full((2, 2), np.nan), "the image is of floats from nan to nan; give floats from 0 to 1"),
        (np.zeros((0, 2), np.uint8), "the image is an array of shape (0, 2)"),
        (Image.new("F", (1, 1)), "the image is of floats, whose range is not known"),
        (Image.new("RGB", (0, 3)), "the image is 0 x 3 pixels; give at least 1 x 1"),
    ],
)
def test_what_is_no_picture_is_an_error_that_says_why(source: Any, said: str) -> None:
    assert complaint(source).startswith(said)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(4, 3), (5, 5)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # 5 x 5 is more than twice as many, which Pillow refuses itself
    assert "more than PIL.Image.MAX_IMAGE_PIXELS=10 pixels; give a smaller picture" in complaint(png(picture(*size)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert pixels(png(picture(*size))).shape[1::-1] == size


def test_files_lie_in_the_allowed_folder_also_behind_links(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside.png"
    inside.mkdir()
    for path in (inside / "a.png", outside):
        path.write_bytes(png(picture(2, 2)))
    (inside / "link.png").symlink_to(outside)
    rules = as_rules(None, str(inside))
    assert pixels(inside / "a.png", rules).shape == (2, 2, 3)
    for path in (outside, inside / "link.png", inside / ".." / "outside.png", f"file://{outside}"):
        assert "is not in allowed_local_media_path=" in complaint(path, rules)
    with pytest.raises(ConfigError, match="allowed_local_media_path='/no/folder' is no folder"):
        as_rules(None, "/no/folder")


class Answers(http.server.BaseHTTPRequestHandler):
    """Serves a picture, redirections to all kinds of places, a page that is missing, and bytes that do not end."""

    def do_GET(self) -> None:
        places = {"/here": "/picture", "/there": "http://other.test/", "/file": "file:///etc/passwd", "/loop": "/loop"}
        if self.path in places:
            self.send_response(302)
            self.send_header("Location", places[self.path])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        if self.path == "/picture":
            self.wfile.write(png(picture(2, 2)))
        while self.path == "/endless":
            try:
                self.wfile.write(b"x" * 100)
            except OSError:
                return
            time.sleep(0.01)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pictures_are_downloaded_from_allowed_hosts_alone(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    allowed = as_rules(("127.0.0.1",), None)
    assert (pixels(f"{host}/picture", allowed) == np.asarray(picture(2, 2))).all()
    assert pixels(f"{host}/here", allowed).shape == (2, 2, 3)
    assert "is on '127.0.0.1', a host that allowed_media_domains=['a.org'] does not name" in complaint(
        f"{host}/picture", as_rules(("a.org",), None)
    )
    assert "is on 'other.test', a host that" in complaint(f"{host}/there", allowed)
    assert "leads to a file: URL" in complaint(f"{host}/file", allowed)
    assert "is redirected more than 5 times" in complaint(f"{host}/loop", allowed)
    assert "is answered by status 404" in complaint(f"{host}/missing", allowed)


def test_a_download_is_bounded_in_time_and_in_bytes(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    allowed = as_rules(("127.0.0.1",), None)
    monkeypatch.setattr(sources, "DOWNLOAD_SECONDS", 0.1)
    assert "takes more than 0 s; download it beforehand" in complaint(f"{host}/endless", allowed)
    monkeypatch.setattr(sources, "MAX_DOWNLOAD", 2000)
    monkeypatch.setattr(sources, "DOWNLOAD_SECONDS", 10.0)
    assert "has more than 0 MiB" in complaint(f"{host}/endless", allowed)
