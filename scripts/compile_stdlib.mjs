// node scripts/compile_stdlib.mjs PYODIDE_FOLDER OUT.zip: what scripts/vendor puts in the place of Pyodide's
// python_stdlib.zip. That holds the whole library as source, and compiling what a start imports takes seconds in a
// browser; here are the modules that memlab.page imports, of the same library, compiled by the same Python.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, out] = process.argv.slice(2).map((name) => path.resolve(name));
const root = path.dirname(import.meta.dirname);
const { loadPyodide } = await import(pathToFileURL(path.join(folder, "pyodide.mjs")));
const pyodide = await loadPyodide({ indexURL: folder + "/" });
pyodide.FS.mkdirTree("/repo");
pyodide.FS.mount(pyodide.FS.filesystems.NODEFS, { root }, "/repo");
pyodide.FS.writeFile("/stdlib.zip", fs.readFileSync(path.join(folder, "python_stdlib.zip")));
pyodide.runPython(`
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, "/repo/labs")
import json
from pathlib import Path

from memlab import page
from memlab.configs import LAB_CONFIGS

for log in Path("/repo/tests/data").glob("*/*.log"):
    page.call("diagnose", json.dumps({"log": str(log), "command": "vllm serve m --max-model-len 8192"}))
for config in LAB_CONFIGS.values():
    page.call("plan", json.dumps({"config": config, "card": "3090", "served": "--max-model-len 8192"}))
needed = set(sys.modules) | {"encodings.latin_1", "encodings.ascii"}

import importlib.util
import marshal
import zipfile

with zipfile.ZipFile("/stdlib.zip") as library, zipfile.ZipFile("/out.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
    for name in sorted(library.namelist()):
        if name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") not in needed or not name.endswith(".py"):
            continue
        source = library.read(name)
        code = compile(source, f"/lib/python{sys.version_info[0]}{sys.version_info[1]}.zip/{name}", "exec", dont_inherit=True, optimize=2)
        unchecked = (1).to_bytes(4, "little") + importlib.util.source_hash(source)
        entry = zipfile.ZipInfo(f"{name}c", (1980, 1, 1, 0, 0, 0))
        entry.compress_type = zipfile.ZIP_DEFLATED
        out.writestr(entry, importlib.util.MAGIC_NUMBER + unchecked + marshal.dumps(code))
`);
fs.writeFileSync(out, pyodide.FS.readFile("/out.zip"));
