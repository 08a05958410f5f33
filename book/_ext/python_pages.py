"""Python in the page: Pyodide from assets/vendor and the modules of memlab, unmodified, as scripts of the book.

A page has it where its front matter says ``python: script.js``: it loads ``assets/python.js``, then that script.

They are scripts, since a page from disk may not fetch data: ``_static/python/index.js`` has the worker and the modules,
``part-N.js`` each a piece of Pyodide, packed. ``assets/python.js`` loads them when a reader first asks for Python.
"""

import ast
import base64
import gzip
import hashlib
import json
import shutil
from pathlib import Path

import memlab

ROOT = Path(__file__).resolve().parent.parent.parent
VENDOR = ROOT / "assets" / "vendor" / "pyodide"
WORKER = ROOT / "assets" / "python-worker.js"
ENTRY = "page"
# In the order in which the start needs them.
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
PART = 600_000  # bytes
OUT = "_static/python"


def modules(entry: str = ENTRY) -> dict[str, str]:
    """The text of the modules of memlab that ``entry`` needs, also within functions, by name."""
    folder = Path(memlab.__file__).parent
    found, todo = {"__init__": (folder / "__init__.py").read_text(encoding="utf-8")}, [entry]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = (folder / f"{name}.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.ImportFrom) and node.module == "memlab":
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memlab."):
                todo.append(node.module.split(".")[1])
    return dict(sorted(found.items()))


def pin() -> dict:
    pins = json.loads((VENDOR.parent / "pins.json").read_text(encoding="utf-8"))
    return next(pin for pin in pins if pin["name"] == "pyodide")


def parts() -> list[str]:
    """The scripts that carry Pyodide."""
    scripts = []
    for name in FILES:
        packed = gzip.compress((VENDOR / name).read_bytes(), 9, mtime=0)
        for start in range(0, len(packed), PART):
            part = {"name": name, "last": start + PART >= len(packed)}
            part["base64"] = base64.b64encode(packed[start : start + PART]).decode()
            scripts.append(f"memlabPython.receive({json.dumps(part)});\n")
    return scripts


def write(app, env) -> None:
    """The parts are kept from one build to the next while Pyodide stays."""
    if app.builder.format != "html":
        return
    folder = Path(app.outdir) / OUT
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(b"".join((VENDOR / name).read_bytes() for name in FILES) + str(PART).encode()).hexdigest()
    stamp = folder / f"{key}.txt"
    if not stamp.exists():
        for stale in folder.iterdir():
            stale.unlink()
        for number, script in enumerate(parts()):
            (folder / f"part-{number}.js").write_text(script, encoding="utf-8")
        shutil.copy(VENDOR / "LICENSE", folder / "LICENSE.txt")
        stamp.write_text("Pyodide of these parts\n", encoding="utf-8")
    pyodide = pin()
    begin = {
        "source": WORKER.read_text(encoding="utf-8"),
        "parts": len(list(folder.glob("part-*.js"))),
        "modules": modules(),
        "version": pyodide["version"],
        **pyodide["runs"],
    }
    index = f"memlabPython.receive({json.dumps(begin)});\n"
    (folder / "index.js").write_text(index, encoding="utf-8")
    app.memlab_python_build = hashlib.sha256((key + index).encode()).hexdigest()[:12]


def add_scripts(app, pagename, templatename, context, doctree) -> None:
    """Only a page that asks for Python loads what starts it."""
    script = (context.get("meta") or {}).get("python")
    if script:
        app.add_js_file("python.js", **{"data-build": app.memlab_python_build})
        app.add_js_file(script)


def setup(app):
    app.setup_extension("record_pages")  # finds memlab
    app.connect("env-updated", write)
    app.connect("html-page-context", add_scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
