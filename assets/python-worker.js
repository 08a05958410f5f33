// The other side of python.js: Pyodide with the modules of memlab, as they are. Everything comes by message, since a page
// from disk may not fetch; so the worker has no network, and what it reads stays in it.
const streams = {};

function stream(name) {
  if (!streams[name]) {
    const { readable, writable } = new TransformStream();
    streams[name] = { writer: writable.getWriter(), readable: readable.pipeThrough(new DecompressionStream("gzip")) };
  }
  return streams[name];
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return bytes;
}

self.fetch = async (address) => {
  const name = String(address).split("/").pop();
  const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
  return new Response(stream(name).readable, { headers: { "Content-Type": type } });
};

async function module(name) {
  const text = await new Response(stream(name).readable).text();
  return import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
}

async function start({ modules, python, abi, version }) {
  const [{ loadPyodide }, { default: createPyodideModule }] = await Promise.all([
    module("pyodide.mjs"),
    module("pyodide.asm.mjs"),
  ]);
  const info = { arch: "wasm32", platform: "emscripten", abi_version: abi, version, python };
  const pyodide = await loadPyodide({
    indexURL: "memlab:/",
    createPyodideModule,
    lockFileContents: { info, packages: {} },
  });
  pyodide.FS.mkdirTree("/book/memlab");
  for (const [name, text] of Object.entries(modules)) pyodide.FS.writeFile(`/book/memlab/${name}.py`, text);
  pyodide.runPython("import sys; sys.dont_write_bytecode = True; sys.path.insert(0, '/book')");
  return { pyodide, call: pyodide.pyimport("memlab.page").call };
}

let started;

// A Blob among the arguments is read in place, as the file whose path Python gets.
async function answer({ id, name, given }) {
  const { pyodide, call } = await started;
  const { FS } = pyodide;
  const mounted = [];
  try {
    const plain = {};
    let told;
    for (const [key, value] of Object.entries(given)) {
      plain[key] = value;
      if (!(value instanceof Blob)) continue;
      const folder = `/given-${key}`;
      FS.mkdirTree(folder);
      FS.mount(FS.filesystems.WORKERFS, { blobs: [{ name: "file", data: value }] }, folder);
      mounted.push(folder);
      plain[key] = `${folder}/file`;
      told = (read) => postMessage({ id, read, of: value.size });
    }
    const found = JSON.parse(told ? call(name, JSON.stringify(plain), told) : call(name, JSON.stringify(plain)));
    postMessage({ id, ...found });
  } finally {
    for (const folder of mounted) FS.unmount(folder);
  }
}

self.onmessage = ({ data }) => {
  if (data.begin) {
    started = start(data.begin);
    started.then(
      () => postMessage({ ready: true }),
      (error) => postMessage({ failed: String(error?.message ?? error) }),
    );
  } else if (data.part) {
    const { writer } = stream(data.part.name);
    writer.write(bytesOf(data.part.base64));
    if (data.part.last) writer.close();
  } else {
    answer(data).catch((error) => postMessage({ id: data.id, broken: String(error?.message ?? error) }));
  }
};
