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


def image_class() -> type | None:
    """PIL's Image, where somebody has imported it: otherwise no value is one."""
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
    if image.palette is None or mode not in ("P", "PA"):
        return pixels, None, b""
    return pixels, image.palette.mode, bytes(image.getpalette(image.palette.mode))


def image_bytes(mode: str, width: int, height: int) -> int:
    """How many bytes such an image has. KeyError for a mode that is not sent."""
    return (width + 7) // 8 * height if mode == "1" else width * height * _PIXEL[mode]


def make_image(mode: str, size: tuple[int, int], pixels: Any, palette_mode: str | None, palette: bytes) -> Any:
    """The image of these parts, with memory of its own. MissingDependencyError; ValueError for wrong parts."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(f"this field has an image, and Pillow is missing: {install('images')}") from error
    image = Image.frombytes(mode, size, pixels) if 0 not in size else Image.new(mode, size)
    if palette_mode is not None:
        image.putpalette(palette, palette_mode)
    return image
