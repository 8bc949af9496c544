"""Images on disk as one array of bytes: a directory with a sub-directory per class, or a list of files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedspan.core.errors import DataError, one_line
from fedspan.core.extras import needs
from fedspan.data.columns import UNREADABLE, Array

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def class_files(root: Path) -> tuple[list[Path], list[str]]:
    """The images below a directory, and the sub-directory that each is in: its class."""
    files = [file for file in sorted(root.glob("[!.]*/**/*")) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(
            f"`task.data`: {str(root)!r} has no images; it needs a sub-directory of images for each class"
        )
    return files, [file.relative_to(root).parts[0] for file in files]


def read(files: Sequence[Path], size: int | None = None) -> Array:
    """Images as (n, height, width) where all are gray, else (n, height, width, 3); `size` makes them square."""
    needs("vision", "PIL")
    from PIL import Image

    found: list[Array] = []
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(file)
            with image:
                if image.mode[0] in "IF":  # converting them would clip the pixels to 255
                    raise DataError(
                        f"`task.data`: the image {str(file)!r} has pixels of more than 8 bits (mode {image.mode!r}); "
                        "save it with 8 bits per channel"
                    )
                plain = image.convert("L" if image.mode in ("1", "L") else "RGB")
                found.append(np.asarray(plain if size is None else plain.resize((size, size))))
        except (*UNREADABLE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(
                f"`task.data`: the image {str(file)!r} cannot be read: {one_line(error)}"
            ) from None
        (height, width), first = found[-1].shape[:2], found[0].shape[:2]
        if (height, width) != first:
            raise DataError(
                f"`task.data`: {str(file)!r} is {width} × {height}, but the images before it are {first[1]} × "
                f"{first[0]}; set `image_size`"
            )
    if len({image.ndim for image in found}) > 1:
        found = [image if image.ndim == 3 else np.stack([image] * 3, -1) for image in found]
    return np.stack(found)
