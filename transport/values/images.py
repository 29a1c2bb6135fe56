"""PIL images: pixels, mode, palette and info. Pillow is imported only where an image comes out."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from transport.errors import MissingDependencyError
from transport.runtime.installing import install

# Bytes of a pixel as `tobytes` gives it; "1" has a bit, and rows of whole bytes.
_PIXEL: Final = {
    **dict.fromkeys(("L", "P"), 1),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16L", "I;16B"), 2),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 3),
    **dict.fromkeys(("RGBA", "RGBX", "RGBa", "CMYK", "I", "F"), 4),
}


_WITH_PALETTE: Final = ("P", "PA")
_COLOURS: Final = 256
_MOST_EMPTY: Final = 1 << 16  # of an image without pixels: Pillow has a pointer for each row, whatever its width


def image_class() -> type | None:
    """PIL's Image, where this process has imported it: otherwise no value is one."""
    module = sys.modules.get("PIL.Image")
    return None if module is None else module.Image


def image_parts(image: Any) -> tuple[np.ndarray, str | None, bytes]:
    """(pixels as bytes, the palette's mode or None, the palette). ValueError, OSError: it cannot be sent."""
    mode = image.mode
    if mode != "1" and mode not in _PIXEL:
        raise ValueError(f"its mode is {mode!r}; use one of 1, {', '.join(_PIXEL)}")
    pixels = np.frombuffer(image.tobytes(), np.uint8)
    if pixels.nbytes != image_bytes(mode, *image.size):
        raise ValueError(f"its {pixels.nbytes} bytes are not those of {image.size} in mode {mode!r}")
    palette_mode, palette = None, b""
    if image.palette is not None and mode in _WITH_PALETTE:
        palette_mode, palette = image.palette.mode, bytes(image.getpalette(image.palette.mode))
    check_image(mode, image.size, palette_mode, palette, image.info)
    return pixels, palette_mode, palette


def check_image(mode: str, size: tuple[int, int], palette_mode: Any, palette: Any, info: dict[Any, Any]) -> None:
    """ValueError for parts that Pillow takes as they are, and fails with when the image is used."""
    if 0 in size and max(size) > _MOST_EMPTY:
        raise ValueError(f"it has {size[0]} × {size[1]} pixels; one without any is at most {_MOST_EMPTY} wide or high")
    if palette_mode is not None and (
        mode not in _WITH_PALETTE or type(palette_mode) is not str or type(palette) is not bytes
    ):
        raise ValueError(f"its palette is a {type(palette).__name__} of mode {palette_mode!r:.40} in mode {mode}")
    transparency = info.get("transparency") if mode in _WITH_PALETTE else None
    fits = (
        len(transparency) <= _COLOURS
        if isinstance(transparency, bytes)
        else transparency is None or (type(transparency) is int and 0 <= transparency < _COLOURS)
    )
    if not fits:
        raise ValueError(f"its transparency is {transparency!r:.40}; give a colour's number, or a byte for each colour")


def image_bytes(mode: str, width: int, height: int) -> int:
    """Return the size of such an image in bytes. KeyError for a mode that is not sent."""
    return (width + 7) // 8 * height if mode == "1" else width * height * _PIXEL[mode]


def make_image(mode: str, size: tuple[int, int], pixels: Any, palette_mode: str | None, palette: bytes) -> Any:
    """Return the image of these parts, with memory of its own. MissingDependencyError; ValueError for wrong parts."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(f"this field has an image, and Pillow is missing: {install('images')}") from error
    image = Image.frombytes(mode, size, pixels) if 0 not in size else Image.new(mode, size)
    if palette_mode is not None:
        image.putpalette(palette, palette_mode)
        image.load()  # otherwise a palette that is none is an error when the image is used
    return image
