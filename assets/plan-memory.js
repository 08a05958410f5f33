// "Plan your memory": the controls ask memlab.plan_view, under Pyodide, and show what it answers. book/_ext/plan_page.py
// puts the controls and the first plan into the page; until a control is first touched, nothing is loaded.
document.addEventListener("DOMContentLoaded", () => {
  const SETTLED_MS = 300; // without a move: then it is heard, linked to, and changes are looked for
  const root = document.querySelector(".memlab-plan");
  if (!root || !window.memlabPython) return; // the first plan stays
  const form = root.querySelector("form");
  const defaults = JSON.parse(root.dataset.defaults);
  const error = root.querySelector(".memlab-plan-error");
  const status = root.querySelector(".memlab-status");
  const heard = root.querySelector(".memlab-plan-heard");
  const progress = root.querySelector("progress");
  const python = window.memlabPython;
  const field = (name) => form.elements.namedItem(name);
  const sliders = new Map([...form.querySelectorAll("input[type=range]")].map((each) => [each.dataset.for, each]));

  let resolved = null; // the flags as vLLM fills them in, of the last answer
  let most = Number(root.dataset.most); // tokens of a request that the model takes
  let wanted = null; // the settings to ask for next: a newer move replaces an older one
  let asking = false;
  let settling = 0;
  let total = null;
  const shown = new Map(); // the HTML of each part

  // ---- settings ----

  function settings() {
    const found = {};
    for (const name of Object.keys(defaults)) {
      const control = field(name);
      found[name] = control.type === "checkbox" ? (control.checked ? "1" : "") : control.value;
    }
    return found;
  }

  function set(found) {
    for (const [name, value] of Object.entries(found)) {
      const control = field(name);
      if (control.type === "checkbox") control.checked = value === "1";
      else {
        control.value = value;
        if (control.value !== value && control.tagName === "SELECT") {
          control.add(new Option(value, value));
          control.value = value;
        }
      }
    }
    place();
  }

  const values = (slider) => slider.dataset.values.split(" ").map(Number);

  // Sliders where their fields are; what belongs to a choice is shown with it.
  function place() {
    for (const [name, slider] of sliders) {
      const typed = field(name).value.trim();
      const now = typed && Number.isFinite(Number(typed)) ? Number(typed) : resolved?.[name];
      if (resolved) field(name).placeholder = `vLLM: ${resolved[name]}`;
      const all = values(slider);
      let last = all.length - 1;
      if (name === "max-model-len") while (last > 0 && all[last] > most) last--;
      slider.max = last;
      if (now === undefined) continue;
      const near = all.reduce((best, value, at) => (Math.abs(value - now) < Math.abs(all[best] - now) ? at : best), 0);
      if (document.activeElement !== slider || all[slider.value] !== now) slider.value = Math.min(near, last);
      slider.setAttribute("aria-valuetext", `${now.toLocaleString("en")} ${slider.dataset.unit}`.trim());
    }
    for (const label of form.querySelectorAll("[data-when]")) {
      const [name, value] = label.dataset.when.split("=");
      label.hidden = field(name).value !== value;
    }
  }

  function link() {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(settings())) if (value !== defaults[name]) query.set(name, value);
    const address = new URL(location.href);
    address.hash = query.toString();
    return address.href.replace(/#$/, "");
  }

  // ---- asking ----

  function ask(now = settings()) {
    clearTimeout(settling);
    wanted = { settings: now };
    if (!asking) pump();
  }

  async function pump() {
    asking = true;
    try {
      while (wanted) {
        const given = wanted;
        wanted = null;
        const answer = await python.call("plan_page", { changes: false, link: false, ...given });
        if (given.link) set(answer.settings);
        show(answer);
        if (given.link) tellProblems(answer.problems);
      }
      settling = setTimeout(settle, SETTLED_MS);
    } catch (broken) {
      wanted = null;
      progress.hidden = true;
      status.textContent = `${broken.message}. The plan shown is the one before. Change a setting to try again.`;
    } finally {
      asking = false;
    }
  }

  async function settle() {
    const found = settings();
    history.replaceState(null, "", link());
    if (!error.hidden) return;
    heard.textContent = root.dataset.said;
    window.focusScrollers?.(); // measures the page: not for every move
    if (root.dataset.starts === "true") return;
    try {
      const answer = await python.call("plan_page", { settings: found, changes: true, link: false });
      if (!wanted && !asking && answer.html && JSON.stringify(settings()) === JSON.stringify(found)) {
        put("changes", answer.html.changes);
      }
    } catch (broken) {
      status.textContent = `${broken.message}.`;
    }
  }

  // ---- showing ----

  function show(answer) {
    error.hidden = !answer.error;
    error.textContent = answer.error ? `${answer.error}. The plan shown is the one before.` : "";
    if (answer.error) return;
    ({ resolved, most_tokens: most, total_gib: total } = answer);
    root.dataset.said = answer.said;
    root.dataset.starts = answer.starts;
    for (const [part, html] of Object.entries(answer.html)) put(part, html);
    place();
  }

  function tellProblems(problems) {
    if (!problems.length) return;
    error.hidden = false;
    error.textContent = `This link holds what cannot be planned; its default is taken instead. ${problems.join(". ")}.`;
  }

  // plan_view escapes whatever comes from settings.
  function put(part, html) {
    const place = root.querySelector(`[data-part="${part}"]`);
    if (shown.get(part) === html) return;
    shown.set(part, html);
    place.innerHTML = html;
    for (const item of place.querySelectorAll("[data-flag]")) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Apply" });
      const { flag, to } = item.dataset;
      button.setAttribute("aria-label", `Apply --${flag} ${to === "1" && flag === "enforce-eager" ? "" : to}`.trim());
      button.addEventListener("click", () => apply(flag, to));
      item.append(" ", button);
    }
  }

  function apply(flag, to) {
    const control = field(flag);
    if (!control) {
      const more = field("more");
      const rest = more.value.replace(new RegExp(`(^|\\s)--${flag}(=|\\s+)\\S+`), "").trim();
      more.value = `${rest} --${flag} ${to}`.trim();
      more.focus();
    } else {
      if (control.type === "checkbox") control.checked = to === "1";
      else set({ [flag]: to });
      control.focus();
    }
    place();
    ask();
  }

  async function copy(text, done) {
    try {
      await navigator.clipboard.writeText(text);
      status.textContent = done;
    } catch {
      const area = Object.assign(document.createElement("textarea"), { value: text, readOnly: true });
      area.setAttribute("aria-label", "To copy: press Ctrl+C");
      root.querySelector(".memlab-plan-to-copy")?.remove();
      area.className = "memlab-plan-to-copy";
      status.after(area);
      area.select();
      status.textContent = "The browser does not let a page copy here: press Ctrl+C, or Cmd+C on a Mac.";
    }
  }

  // ---- what a reader does ----

  place();
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("pointerdown", () => python.start());
  form.addEventListener("input", ({ target }) => {
    if (target.type === "range") {
      field(target.dataset.for).value = String(values(target)[target.value]);
      target.setAttribute("aria-valuetext", `${values(target)[target.value].toLocaleString("en")} ${target.dataset.unit}`.trim());
    }
    if (target.name === "card" && target.value === "other" && !field("card-gib").value) {
      field("card-gib").value = total ?? "24";
    }
    place();
    ask();
  });
  form.addEventListener("click", ({ target }) => {
    if (target.dataset.do === "link") copy(link(), "The link is copied.");
    if (target.dataset.do === "reset") {
      set(defaults);
      ask();
    }
  });
  for (const [part, what] of [["command", "the vllm serve line"], ["plan-command", "the memlab plan line"]]) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: `Copy ${what}` });
    const place = root.querySelector(`[data-part="${part}"]`);
    button.addEventListener("click", () => copy(place.textContent, "The line is copied."));
    place.after(button);
  }

  python.addEventListener("progress", ({ detail }) => {
    progress.hidden = !["loading", "starting"].includes(detail.state);
    if (detail.state === "loading") {
      progress.value = detail.share;
      status.textContent = "Python is loading; what you set is kept.";
    } else if (detail.state === "starting") {
      progress.removeAttribute("value");
      status.textContent = "Python is starting; what you set is kept.";
    } else if (detail.state === "ready") status.textContent = "";
    else if (detail.state === "failed") status.textContent = `${detail.message}.`;
  });

  function fromLink() {
    if (!location.hash.includes("=")) return;
    clearTimeout(settling);
    wanted = { settings: Object.fromEntries(new URLSearchParams(location.hash.slice(1))), link: true };
    if (!asking) pump();
  }
  window.addEventListener("hashchange", fromLink);
  fromLink();
});
