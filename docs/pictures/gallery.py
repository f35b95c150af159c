"""Makes the pictures of the gallery small: `python docs/pictures/gallery.py FOLDER`.

Of each notebook the first picture that it is stored with, or the one of `WHICH`; of the examples
those that they wrote into FOLDER, where they were run.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
GALLERY = Path(__file__).parent / "gallery"
WHICH = {"gradient_surgery": 1, "recompute": 1}  # of the pictures of a notebook
OF_EXAMPLES = {
    "train_digits": "learning_curve.png",
    "word_vectors": "word_vectors.png",
    "gradient_reversal": "gradient_reversal.png",
    "plan_recompute": "recompute_plan.png",
    "through_a_solver": "through_a_solver.png",
    "checkpoint_training": "run/losses.png",
    "train_sharded": "train_sharded.png",
}
SIZE = 480, 320  # pixels, at most


def pictures_of(notebook: Path) -> list[bytes]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return [base64.b64decode("".join(d["image/png"])) for d in data if "image/png" in d]


def write_small(picture: bytes, name: str) -> None:
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail(SIZE)
    image.quantize(64).save(GALLERY / f"{name}.png", optimize=True)


if __name__ == "__main__":
    GALLERY.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        write_small(pictures_of(path)[WHICH.get(path.stem, 0)], path.stem)
    for name, file in OF_EXAMPLES.items():
        write_small((Path(sys.argv[1]) / file).read_bytes(), name)
