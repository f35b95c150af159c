"""Links types in signatures, and names in docstrings, to where they are described.

What pages link to in the repository, where they are read too, becomes the page that is made of it.
No inventory is read while the site is built: the addresses are written down here.
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

JAX = "https://docs.jax.dev/en/latest/"
SUMMARIES = JAX + "_autosummary/{0}.html#{0}"
PYTHON = "https://docs.python.org/3/library/"

OF_JAX = """
    jax.Array jax.ShapeDtypeStruct jax.checkpoint jax.clear_caches jax.custom_jvp
    jax.custom_vjp jax.grad jax.hessian jax.jacrev jax.jacfwd jax.jacobian jax.jit jax.jvp
    jax.linearize jax.make_jaxpr jax.named_scope jax.pure_callback jax.shard_map
    jax.value_and_grad jax.vjp jax.vmap jax.debug.print jax.experimental.io_callback
    jax.lax.cond jax.lax.scan jax.lax.stop_gradient jax.lax.while_loop jax.nn.relu
    jax.nn.gelu jax.nn.softmax jax.numpy.asarray jax.numpy.round jax.numpy.take
    jax.random.key jax.tree.map jax.numpy.ones_like jax.ensure_compile_time_eval
""".split()  # noqa: SIM905
OTHERS = {
    "jax.numpy": JAX + "jax.numpy.html",
    "jax.checkpoint_policies": JAX + "gradient-checkpointing.html",
    "jax.export.symbolic_shape": JAX + "jax.export.html#jax.export.symbolic_shape",
    "jax.export.export": JAX + "jax.export.html#jax.export.export",
    "jax.stages.Lowered": JAX + "jax.stages.html#jax.stages.Lowered",
    "jax.stages.Traced": JAX + "jax.stages.html",
    "typing.Any": PYTHON + "typing.html#typing.Any",
    "collections.abc.Callable": PYTHON + "collections.abc.html#collections.abc.Callable",
    "collections.abc.Iterable": PYTHON + "collections.abc.html#collections.abc.Iterable",
    "collections.abc.Iterator": PYTHON + "collections.abc.html#collections.abc.Iterator",
    "collections.abc.Mapping": PYTHON + "collections.abc.html#collections.abc.Mapping",
    "collections.abc.Sequence": PYTHON + "collections.abc.html#collections.abc.Sequence",
    "pathlib.Path": PYTHON + "pathlib.html#pathlib.Path",
    "os.PathLike": PYTHON + "os.html#os.PathLike",
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html",
}
ADDRESSES = {name: SUMMARIES.format(name) for name in OF_JAX} | OTHERS


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name, address in ADDRESSES.items():
        config.plugins["autorefs"].register_url(name, address)  # type: ignore[attr-defined]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = re.sub(r"\]\(\.\./((?:\.\./)*)benchmarks/README\.md", r"](\1benchmarks.md", markdown)
    return re.sub(r"\]\(\.\./((?:\.\./)*)notebooks/(\w+)\.ipynb", r"](\1tutorials/\2.md", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`jax.jit` and `tracegrad.trace` in the text of docstrings become links, where known."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    names = re.compile(r"(<a [^>]*>)?<code>((?:jax|tracegrad)\.[\w.]+)</code>")
    return names.sub(_linked, html)


def _linked(found: re.Match[str]) -> str:
    if found[1]:  # it is a link
        return found[0]
    code = f"<code>{found[2]}</code>"
    if found[2] in ADDRESSES:
        return f'<a href="{ADDRESSES[found[2]]}">{code}</a>'
    return f'<autoref identifier="{found[2]}" optional>{code}</autoref>'
