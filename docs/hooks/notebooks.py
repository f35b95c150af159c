"""Makes a page of every notebook, with the outputs that it is stored with; nothing is executed.

A notebook becomes Markdown, so that its code is coloured, copied and found as that of any other
page. Pictures become files beside it, and the notebook itself can be downloaded.
"""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = "tutorials"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    notebooks = Path(config.config_file_path).parent / "notebooks"
    for path in sorted(notebooks.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        page, pictures = as_markdown(json.loads(text), path.stem)
        place = f"{FOLDER}/{path.stem}"
        files.append(File.generated(config, f"{place}.md", content=page))
        files.append(File.generated(config, f"{place}.ipynb", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def as_markdown(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """The page of a notebook, and its pictures by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_with_links_to_pages(source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            parts.append(_output(output, name, pictures))
    download = f"[Download this notebook]({name}.ipynb){{ .md-button download }}"
    title, *others = parts
    head, _, rest = title.partition("\n")
    return "\n\n".join([head, download, rest, *others]), pictures


def _with_links_to_pages(text: str) -> str:
    text = re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", text)
    text = re.sub(r"\]\(#(.*?)\)", lambda found: f"](#{found[1].lower()})", text)
    return re.sub(r"\[([^\]]*)\]\(\.\./.*?\)", r"\1", text)  # to files that are not on the site


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        picture = f"{name}_{len(pictures)}.png"
        pictures[picture] = base64.b64decode("".join(data["image/png"]))
        return f"![What the cell above draws]({picture})"
    if "text/html" in data:  # in a frame, where its styles and its script reach nothing else
        page = html.escape("".join(data["text/html"]), quote=True)
        return f'<iframe class="output" title="What the cell above shows" srcdoc="{page}"></iframe>'
    return _text("".join(data["text/plain"]))


def _text(text: str) -> str:
    return "```text\n" + text.rstrip("\n") + "\n```"
