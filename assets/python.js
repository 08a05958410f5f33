// Python in the page, for the pages that need it. Nothing is loaded before it is asked for.
//
//   memlabPython.start()                       loads and starts it; a page calls this when a control is first touched
//   memlabPython.call("plan", {config, card: "3090", served: "--max-model-len 8192"})
//                                              a promise of what memlab.page.plan returns, as plain data; it starts Python
//                                              where that is not done yet, and calls are answered in order
//   memlabPython.call("diagnose", {log: blob}) a Blob or File is read by Python as a file, without a copy
//   memlabPython.stop()                        ends it, also in the middle of a call; the next call starts it anew
//   memlabPython.addEventListener("progress", ({detail}) => ...)
//                                              {state: "loading", share}: of the download; {state: "starting"};
//                                              {state: "ready"}; {state: "reading", share}: of a Blob;
//                                              {state: "failed", message}; {state: "stopped"}
//
// What Python refuses (a flag that vLLM does not know) rejects with a memlabPython.Refused, whose message says what to do;
// what breaks rejects with another Error. A page gets this script from book/_ext/python_pages.py.
window.memlabPython = (() => {
  class Refused extends Error {}
  const place = new URL("python/", document.currentScript.src);
  const build = document.currentScript.dataset.build;
  const events = new EventTarget();
  const calls = new Map();
  let worker = null;
  let receive = null;
  let last = 0;

  const tell = (detail) => events.dispatchEvent(new CustomEvent("progress", { detail }));

  function load(name) {
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${new URL(name, place)}?v=${build}`;
      script.async = false; // in parallel, run in order
      const failed = () => reject(new Error(`${name} of Python could not be loaded: check the connection and try again`));
      script.onload = () => (script.remove(), script.received ? resolve() : failed());
      script.onerror = failed;
      document.head.append(script);
    });
  }

  function end(error) {
    worker?.terminate();
    worker = null;
    for (const { reject } of calls.values()) reject(error);
    calls.clear();
  }

  function fail(message) {
    end(new Error(message));
    tell({ state: "failed", message });
  }

  function heard({ data }) {
    if (data.ready) return tell({ state: "ready" });
    if (data.failed) return fail(`Python did not start: ${data.failed}`);
    if ("read" in data) return tell({ state: "reading", share: Math.min(1, data.read / data.of) });
    const { resolve, reject } = calls.get(data.id);
    calls.delete(data.id);
    if ("answer" in data) resolve(data.answer);
    else reject("error" in data ? new Refused(data.error) : new Error(data.broken));
  }

  async function start() {
    if (worker) return;
    let begun;
    receive = ({ source, parts, ...begin }) => (begun = { source, parts, begin });
    const mine = (worker = { terminate() {}, postMessage: (message) => waiting.push(message) });
    const waiting = [];
    tell({ state: "loading", share: 0 });
    try {
      await load("index.js");
      if (worker !== mine) return;
      // Of the addresses that a worker can have, only this one is also allowed to a page from disk.
      const address = `data:text/javascript,${encodeURIComponent(begun.source)}`;
      const real = (worker = new Worker(address, { type: "module" }));
      real.onmessage = heard;
      real.onerror = (event) => fail(`Python did not start: ${event.message}`);
      real.postMessage({ begin: begun.begin });
      for (const message of waiting) real.postMessage(message);
      let arrived = 0;
      receive = (part) => worker === real && real.postMessage({ part });
      const all = Array.from({ length: begun.parts }, async (_, number) => {
        await load(`part-${number}.js`);
        if (worker === real) tell({ state: "loading", share: ++arrived / begun.parts });
      });
      await Promise.all(all);
      if (worker === real) tell({ state: "starting" });
    } catch (error) {
      fail(error.message);
    }
  }

  return Object.assign(events, {
    Refused,
    start,
    call: (name, given) =>
      new Promise((resolve, reject) => {
        start();
        const id = ++last;
        calls.set(id, { resolve, reject });
        worker.postMessage({ id, name, given });
      }),
    stop() {
      end(new Error("Python was stopped"));
      tell({ state: "stopped" });
    },
    // By the scripts that this one loads; one that came damaged does not get here.
    receive(data) {
      document.currentScript.received = true;
      receive(data);
    },
  });
})();
