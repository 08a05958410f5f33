// "The doctor": a log, pasted or opened, goes to memlab.page.diagnose under Pyodide, and what it finds is shown. The log
// stays in this tab. Nothing is loaded until the box is first touched.
document.addEventListener("DOMContentLoaded", () => {
  const SETTLED_MS = 500; // without a key: then what was typed is read
  const SHOWN_CHARACTERS = 2_000_000; // a longer text is read, but not put into the box, which it would freeze
  const LARGEST_MIB = 512;
  // How a file begins that gzip, zip, zstd or xz packed.
  const PACKED = [[0x1f, 0x8b], [0x50, 0x4b, 3, 4], [0x28, 0xb5, 0x2f, 0xfd], [0xfd, 0x37, 0x7a, 0x58]];
  const python = window.memlabPython;
  const root = document.querySelector(".memlab-doctor");
  if (!root || !python) return; // without Python what the page says to who has no scripts stays
  const example = JSON.parse(root.querySelector("script").textContent);
  const command = root.dataset.command;
  root.replaceChildren();

  function make(parent, tag, attributes = {}, text = "") {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    found.textContent = text;
    parent.append(found);
    return found;
  }

  // ---- the controls ----

  const form = make(root, "form", { novalidate: "" });
  make(form, "label", { for: "memlab-log" }, "The log, from the first line to the last");
  const box = make(form, "textarea", {
    id: "memlab-log",
    rows: "12",
    spellcheck: "false",
    autocomplete: "off",
    autocapitalize: "off",
    wrap: "off",
    "aria-describedby": "memlab-held",
  });
  const held = make(form, "p", { id: "memlab-held" }, "Paste it here, or drop a file. It stays in this tab.");
  make(form, "label", { for: "memlab-file" }, "Or open a file");
  const opener = make(form, "input", { id: "memlab-file", type: "file" });
  make(form, "label", { for: "memlab-command" }, "The command that started vLLM, if the log does not show it");
  const served = make(form, "input", {
    id: "memlab-command",
    type: "text",
    spellcheck: "false",
    autocomplete: "off",
    placeholder: "vllm serve MODEL --max-model-len 16384",
    "aria-describedby": "memlab-refused",
  });
  const refused = make(form, "p", { id: "memlab-refused", class: "memlab-refused", role: "alert" });
  const buttons = make(form, "div", { class: "memlab-buttons" });
  make(buttons, "button", { type: "submit" }, "Diagnose");
  const tryIt = make(buttons, "button", { type: "button" }, "Try an example");
  const clear = make(buttons, "button", { type: "button" }, "Clear");
  const stop = make(buttons, "button", { type: "button", hidden: "" }, "Stop");
  const bar = make(root, "progress", { max: "1", "aria-label": "Progress", hidden: "" });
  const status = make(root, "p", { class: "memlab-status", role: "status" });
  const shown = make(root, "section", { "aria-label": "What the doctor finds", hidden: "" });

  // ---- the log: the box, or a file beside it ----

  let file = null; // a Blob that is read in place of the box
  let newest = 0;
  let settling = 0;

  const mib = (size) => `${(size / 2 ** 20).toFixed(1)} MiB`;

  function hold(blob, name) {
    file = blob;
    box.value = "";
    held.textContent = `${name}, ${mib(blob.size)}, is read beside the box. It stays in this tab.`;
    diagnose();
  }

  function letGo() {
    if (!file) return;
    file = null;
    opener.value = "";
    held.textContent = "Paste it here, or drop a file. It stays in this tab.";
  }

  // ---- what is found ----

  const states = {
    loading: "Loading Python, once for this tab …",
    starting: "Starting Python …",
    reading: "Reading the log …",
    ready: "Python is ready.",
    stopped: "Stopped.",
  };

  function say(text) {
    if (status.textContent !== text) status.textContent = text;
  }

  function busy(on) {
    stop.hidden = !on;
    if (!on) bar.hidden = true;
    root.setAttribute("aria-busy", String(on));
  }

  let running = 0; // diagnoses that are not answered
  python.addEventListener("progress", ({ detail }) => {
    // What the reader is told to do, or was told of a log, stays while Python starts.
    const free = !status.textContent || Object.values(states).includes(status.textContent);
    const text = detail.state === "failed" ? `${detail.message}.` : states[detail.state];
    if (running || free) say(text);
    bar.hidden = !["loading", "starting", "reading"].includes(detail.state);
    if ("share" in detail) bar.value = detail.share;
    else bar.removeAttribute("value");
  });

  function forget() {
    clearTimeout(settling);
    refused.textContent = "";
    served.removeAttribute("aria-invalid");
    shown.hidden = true;
    shown.replaceChildren();
    return ++newest;
  }

  // What a reader asked for comes into sight; who types stays where the letters are.
  async function diagnose(asked = true) {
    const mine = forget();
    const log = file ?? new Blob([box.value]);
    if (!file && !box.value.trim()) {
      say("Paste a log first, open a file, or try the example.");
      return;
    }
    if (!log.size) {
      say("This file is empty. Open the file of vLLM's output.");
      return;
    }
    if (log.size > LARGEST_MIB * 2 ** 20) {
      say(`${mib(log.size)} take a browser too long. Give the part around the first error, or run in a terminal: ${command}`);
      return;
    }
    running += 1;
    busy(true);
    if (asked) status.scrollIntoView({ block: "nearest" });
    try {
      const start = new Uint8Array(await log.slice(0, 4).arrayBuffer());
      if (PACKED.some((bytes) => bytes.every((byte, at) => start[at] === byte))) {
        if (mine === newest) say("This file is packed. Unpack it, then open the log that was in it.");
        return;
      }
      const found = await python.call("diagnose", { log, command: served.value });
      if (mine === newest) show(found);
      if (mine === newest && asked) status.scrollIntoView({ block: "start" });
    } catch (error) {
      if (mine !== newest) return;
      if (error instanceof python.Refused) {
        say("The command cannot be read.");
        served.setAttribute("aria-invalid", "true");
        refused.textContent = error.message;
      } else say(`${error.message}.`);
    } finally {
      running -= 1;
      if (!running) busy(false);
    }
  }

  function show({ finding, html, text, summary, entries }) {
    make(shown, "h2", {}, "What the doctor finds");
    const body = make(shown, "div");
    body.innerHTML = html; // Python escapes all that comes from the log
    for (const table of body.querySelectorAll("table:has(td + td)")) nameCells(table);
    if (Object.keys(entries).length) {
      const more = make(shown, "p", {}, "What it means, in general: ");
      Object.entries(entries).forEach(([phase, name], number) => {
        if (number) more.append(", ");
        make(more, "a", { href: `oom-now.html#${phase}` }, name);
      });
      more.append(".");
    } else if (!finding.enough) {
      const other = make(shown, "p", {}, "Without more of the log: ");
      make(other, "a", { href: "oom-now.html" }, "OOM now");
      other.append(" lists the last lines that one sees, and what to do about each.");
    }
    const copies = make(shown, "div", { class: "memlab-buttons" });
    const said = make(shown, "p", { role: "status" });
    copier(copies, said, "Copy as text", text);
    copier(copies, said, "Copy as JSON", JSON.stringify(finding, null, 1));
    shown.hidden = false;
    say(`Found: ${summary}.`);
    window.dispatchEvent(new Event("resize")); // what scrolls sideways gets the keyboard: book.js
  }

  // On a narrow screen a row stands as a block, its cells named; the roles keep it a table to who hears it.
  function nameCells(table) {
    table.classList.add("memlab-rows");
    const roles = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", td: "cell" };
    for (const [tag, role] of Object.entries(roles)) {
      for (const each of [table, ...table.querySelectorAll("*")]) if (each.matches(tag)) each.setAttribute("role", role);
    }
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    for (const cell of table.querySelectorAll("th, td")) {
      if (cell.tagName === "TH") cell.setAttribute("role", cell.scope === "col" ? "columnheader" : "rowheader");
      cell.dataset.name = names[cell.cellIndex];
    }
  }

  function copier(parent, said, name, text) {
    make(parent, "button", { type: "button" }, name).addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        said.textContent = "Copied.";
      } catch {
        said.textContent = "The browser does not let this page copy: the text stands here, to be copied by hand.";
        shown.querySelector("textarea")?.remove();
        const field = make(shown, "textarea", { rows: "8", readonly: "", "aria-label": name });
        field.value = text;
        field.select();
      }
    });
  }

  // ---- what the reader does ----

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    diagnose();
  });
  box.addEventListener("input", (event) => {
    letGo();
    clearTimeout(settling);
    const pasted = event.inputType === "insertFromPaste";
    settling = setTimeout(diagnose, pasted ? 0 : SETTLED_MS, pasted);
  });
  box.addEventListener("paste", (event) => {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.length <= SHOWN_CHARACTERS) return;
    event.preventDefault();
    hold(new Blob([text]), "The pasted text");
  });
  served.addEventListener("input", () => {
    clearTimeout(settling);
    if (file || box.value.trim()) settling = setTimeout(diagnose, SETTLED_MS, false);
  });
  opener.addEventListener("change", () => opener.files[0] && hold(opener.files[0], opener.files[0].name));
  tryIt.addEventListener("click", () => {
    letGo();
    box.value = example;
    diagnose();
  });
  clear.addEventListener("click", () => {
    letGo();
    forget();
    box.value = "";
    say("");
    box.focus();
  });
  stop.addEventListener("click", () => {
    newest += 1;
    python.stop();
    tryIt.focus(); // the button that was pressed is gone
  });
  root.addEventListener("dragover", (event) => event.preventDefault());
  root.addEventListener("drop", (event) => {
    const [dropped] = event.dataTransfer.files;
    if (!dropped) return;
    event.preventDefault();
    hold(dropped, dropped.name);
  });
  const touch = () => python.start();
  for (const each of ["pointerdown", "dragenter", "input", "click"]) form.addEventListener(each, touch, { once: true });
  box.addEventListener("focus", touch, { once: true });
});
